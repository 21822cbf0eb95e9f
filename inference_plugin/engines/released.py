"""A release of an engine that is not installed, compared with the table of patch points: its source is read, never imported."""

from __future__ import annotations

import email
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path, PurePosixPath

import msgspec

from inference_plugin.engines.patch_points import EngineTable, judge
from inference_plugin.engines.sglang.patch_points import SGLANG
from inference_plugin.engines.source_places import Release, wrong_in
from inference_plugin.engines.vllm.patch_points import VLLM
from inference_plugin.wire.errors import ConfigError, EngineUnsupported

__all__ = ["TABLES", "CheckedRelease", "check_release", "checked_by_name", "opened"]

TABLES = (VLLM, SGLANG)

DOWNLOAD_TIMEOUT_S = 1800.0


class CheckedRelease(msgspec.Struct, frozen=True):
    """What the comparison found. `missing` keeps the release from being served, `lacks` is what its users miss, both in words.
    `run`: the engine tests have run with this very version."""

    engine: str
    version: str
    distribution: str
    places: int
    missing: tuple[str, ...]
    lacks: tuple[str, ...]
    run: bool

    @property
    def fits(self) -> bool:
        return not self.missing


def check_release(release: Release) -> CheckedRelease:
    """Compares a release with its engine's table. Raises `EngineUnsupported` if no table is for this distribution."""
    table = _table_for(release.distribution)
    missing, lacks = judge(table, release.version, partial(wrong_in, release))
    return CheckedRelease(
        table.engine,
        release.version,
        release.distribution,
        sum(point.needed_in(release.version) for point in table.points),
        missing,
        lacks,
        release.version in table.run,
    )


def _table_for(distribution: str) -> EngineTable:
    table = next((table for table in TABLES if distribution in table.distributions), None)
    if table is None:
        names = ", ".join(name for table in TABLES for name in table.distributions)
        raise EngineUnsupported(
            f"{distribution} is no engine that this plug-in knows", hint=f"engines with a table: {names}"
        )
    return table


# --- where a release comes from ---------------------------------------------------------------------------------------------


def opened(path: Path) -> Release:
    """The release in a wheel or in a source archive (`.tar.gz`). Raises `ConfigError` for anything else."""
    try:
        if path.suffix == ".whl":
            return _from_wheel(path)
        if path.name.endswith(".tar.gz"):
            return _from_archive(path)
    except (OSError, zipfile.BadZipFile, tarfile.TarError, KeyError, ValueError) as error:
        raise ConfigError(
            f"{path} can't be read as a release: {error}", hint="name a wheel, or a version such as vllm==0.32.0"
        ) from error
    raise ConfigError(
        f"{path} is no wheel (.whl), no source archive (.tar.gz) and no version such as vllm==0.32.0",
        hint="pip download --no-deps gets a wheel; a version is downloaded for you",
    )


def _download(requirement: str, directory: Path) -> Path:
    """Has pip download `name==version` into `directory`, without dependencies; returns the file.

    Raises `ConfigError` with pip's last words where there is none.
    """
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download", "--quiet"]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(directory), requirement]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"pip did not download {requirement} within {DOWNLOAD_TIMEOUT_S:g} s") from error
    found = sorted(directory.glob("*.whl"))
    if ran.returncode or not found:
        said = ran.stderr.strip().splitlines() or ["it left no wheel"]
        last = next((line for line in reversed(said) if line.startswith("ERROR: ")), said[-1])
        raise ConfigError(
            f"pip could not download {requirement}: {last}",
            hint="the wheel must be for this Python and platform; a wheel that you have can be named by its path",
        )
    return found[0]


def checked_by_name(what: str) -> CheckedRelease:
    """Compares what a user names: the path of a wheel, or `name==version`. Raises `ConfigError` or `EngineUnsupported`."""
    path = Path(what)
    if "==" in what and not path.exists():
        _table_for(what.partition("==")[0].partition("[")[0].strip())  # before anything is downloaded
        with tempfile.TemporaryDirectory(prefix="weightwire-") as scratch:
            return check_release(opened(_download(what, Path(scratch))))
    return check_release(opened(path))


def _from_wheel(path: Path) -> Release:
    file = zipfile.ZipFile(path)
    names = set(file.namelist())
    (metadata,) = [name for name in names if name.endswith(".dist-info/METADATA") and name.count("/") == 1]
    return _release(file.read(metadata), lambda name: file.read(name).decode() if name in names else None)


def _from_archive(path: Path) -> Release:
    """The package lies in the archive's top folder, or in `python/` under it."""
    texts: dict[str, str] = {}
    metadata = b""
    with tarfile.open(path) as archive:
        for member in archive:
            relative = PurePosixPath(*PurePosixPath(member.name).parts[1:])
            if not member.isfile() or (relative.suffix != ".py" and str(relative) != "PKG-INFO"):
                continue
            read = archive.extractfile(member)
            assert read is not None
            if relative.suffix == ".py":
                texts[str(relative).removeprefix("python/")] = read.read().decode()
            else:
                metadata = read.read()
    return _release(metadata, texts.get)


def _release(metadata: bytes, read: Callable[[str], str | None]) -> Release:
    headers = email.message_from_bytes(metadata)
    name, version = headers["Name"], headers["Version"]
    if not name or not version:
        raise ValueError("its metadata names no distribution and version")
    return Release(name.lower().replace("_", "-"), version, read)
