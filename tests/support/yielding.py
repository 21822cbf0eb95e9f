"""Keeps processes that wait by `sched_yield` from starving all others, and from burning the cores that tests share.

Ranks of a vLLM engine on a CPU, and its engine core, wait for each other by calling `sched_yield` without pause, for up to a
second after each message. Linux 6.18 and its neighbours then lose count of who ran how long (mended in April 2026: "sched/fair:
Fix zero_vruntime tracking" and what followed it): a process that wakes beside such ranks was seen to wait 28 s for a core of an
otherwise idle machine. Tests would call it silent, rightly. And the waiting itself took a third of an engine's CPU time. So the
processes of tests get a `sched_yield` that spins for some microseconds, and then sleeps for an eighth of the time that the
process has waited.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

__all__ = ["make_yielding_fair"]

SOURCE = Path(__file__).with_suffix(".c")


def make_yielding_fair(directory: Path) -> None:
    """Processes that are started from now on yield fairly. The library is built in `directory`, if it is not there. Does nothing
    without a C compiler, and in a path with a space or a colon, which LD_PRELOAD takes for the end of a name."""
    if {" ", ":"} & set(str(directory)):
        return
    directory.mkdir(exist_ok=True)
    library = directory / f"yielding-{SOURCE.stat().st_mtime_ns}.so"
    compiler = shutil.which("cc")
    if not library.exists() and compiler is not None:
        temporary = library.with_suffix(f".{os.getpid()}")
        subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", temporary, SOURCE], check=True)
        temporary.replace(library)
    if library.exists() and str(library) not in os.environ.get("LD_PRELOAD", ""):
        os.environ["LD_PRELOAD"] = " ".join(filter(None, [os.environ.get("LD_PRELOAD"), str(library)]))
