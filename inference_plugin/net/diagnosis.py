"""What to tell a user who finds no replica: which engines start or run without the plug-in, and where else to look.

An engine process leaves a note in the runtime directory while it starts (`.starting`), and if it runs without the plug-in
(`.problem`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from inference_plugin.net.addresses import (
    is_stale,
    job_name,
    job_path,
    new_replica_id,
    owner_of,
    replace_file,
    runtime_dir,
)
from inference_plugin.net.held import hold, is_held, read_plain
from inference_plugin.net.processes import ancestors_of, has_ended, start_ticks
from inference_plugin.wire.codec import decode_as
from inference_plugin.wire.errors import ConfigError, ProtocolError
from inference_plugin.wire.messages import ReplicaCard

__all__ = [
    "check_writable", "elsewhere", "looked", "none_runs", "note_problem", "note_start", "other_jobs", "problems", "starting",
]  # fmt: skip


def note_problem(engine: str, text: str) -> None:
    """Records why this process runs `engine` without the plug-in, for `problems`."""
    path = runtime_dir() / f"{new_replica_id(engine)}.problem"
    try:
        replace_file(path, text.encode(), held=True)
    except OSError:
        path.touch()  # on a full disk the file alone still says that there is a problem
        hold(path, path.suffix)
        raise


def problems(job: str | None = None) -> list[str]:
    """Which living processes run an engine without the plug-in, and why."""
    unknown = "its reason could not be written down; the engine's log has it"
    return [f"{process}: {why or unknown}" for process, why in _notes(".problem", job)]


def note_start(engine: str, about: str) -> Path:
    """Records that this process starts `engine`, for `starting`, in place of what the processes that it descends from recorded.
    Whoever called removes the file when the replica is there; the next reader does so when the process has ended."""
    path = runtime_dir() / f"{new_replica_id(engine)}.starting"
    replace_file(path, about.encode(), held=True)
    ancestors = {(pid, start_ticks(pid)) for pid in ancestors_of(os.getpid())}
    for other in path.parent.glob(f"{engine}-*.starting"):
        if owner_of(other) in ancestors:
            other.unlink(missing_ok=True)
    return path


def starting(job: str | None = None) -> list[str]:
    """Which living processes start an engine that is no replica yet, in words."""
    return [f"{process}: {about}" for process, about in _notes(".starting", job)]


def none_runs(job: str | None = None) -> str:
    """Says that the job has no replica here, and what `looked` tells."""
    return f"no replica of job {job or job_name()!r} runs; {looked(job)}"


def looked(job: str | None = None) -> str:
    """Says where the job's replicas were looked up, whether a card could be written there, which engines start or run without
    the plug-in, and which other jobs have replicas here."""
    told = [f"looked in {runtime_dir(job)}"]
    try:
        check_writable(job)
    except ConfigError as error:
        told.append(f"{error.message}: a replica that runs can't publish its card; {error.hint}")
    told += [f"starting: {text}" for text in starting(job)]
    told += [f"without the plug-in: {text}" for text in problems(job)]
    told += [f"this job has replicas in {root}: set WEIGHTWIRE_RUNTIME_DIR to it" for root in elsewhere(job)]
    if others := other_jobs(job):
        told.append(f"replicas of other jobs run here: {', '.join(map(repr, others))}")
    return "; ".join(told)


def check_writable(job: str | None) -> None:
    """Raises `ConfigError` if no card could be written into the runtime directory just now."""
    path = runtime_dir(job) / f"{new_replica_id('room')}.tmp"
    try:
        path.write_bytes(bytes(4096))
    except OSError as error:
        raise ConfigError(
            f"nothing can be written into {path.parent}: {error.strerror or error}",
            hint="make room there, or set WEIGHTWIRE_RUNTIME_DIR to another directory",
            phase="start",
        ) from error
    finally:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def other_jobs(job: str | None = None) -> list[str]:
    """The jobs beside this one that have living replicas in the same place: one name may be a misspelt other."""
    return sorted(_living_jobs(job_path().parent) - {job or job_name()})


def elsewhere(job: str | None = None) -> list[str]:
    """Other default runtime directories with living replicas of the job: a shell and a service may differ in XDG_RUNTIME_DIR."""
    own, mine, uid = job_path().parent, job or job_name(), os.getuid()
    roots = (Path(f"/tmp/weightwire-{uid}"), Path(f"/run/user/{uid}/weightwire"))
    return [str(root) for root in roots if root != own and mine in _living_jobs(root)]


def _living_jobs(root: Path) -> set[str]:
    found = set()
    for path in root.glob("*/*.card"):
        with contextlib.suppress(ProtocolError, OSError):
            card = decode_as(read_plain(path), ReplicaCard)
            found |= set() if is_stale(card) else {card.job}
    return found


def _notes(suffix: str, job: str | None) -> Iterator[tuple[str, str]]:
    """Living processes that left a file with this suffix, in words, each with its text."""
    for path in sorted(runtime_dir(job).glob(f"*{suffix}")):
        if (owner := owner_of(path)) and (not has_ended(*owner) or is_held(path)):
            with contextlib.suppress(OSError):  # it was removed just now
                yield f"{path.name.partition('-')[0]} process {owner[0]}", read_plain(path).decode(errors="replace")
