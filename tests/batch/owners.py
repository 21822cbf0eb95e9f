"""Owners in processes of their own, and what they hold: rows that a test can make again."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import torch

from inference_plugin.wire import codec
from inference_plugin.wire.messages import Lease, Pull
from tests.support.rig import eventually, fork, gone, stands_still
from trainer_adapters.batch.client import fetch_entries
from trainer_adapters.batch.parts import LocalPart
from trainer_adapters.batch.records import Entry, Kind, Owner, ShardId, VersionSpan
from trainer_adapters.batch.store import Store

MIB = 1 << 20

ELSEWHERE = "another boot"
"""The boot of no host: rows of an owner there are pulled."""


class Held(msgspec.Struct):
    """What an owner's process tells the test."""

    owner: Owner
    entries: tuple[Entry, ...]


def rows_of(task_id: str, items: int = 100) -> dict[str, Any]:
    """A task's rows by key; the same for the same id."""
    random = torch.Generator().manual_seed(sum(map(ord, task_id)) * 1009 + items)
    lengths = [3, 0, 7]
    return {
        "tokens": torch.randint(0, 1 << 40, (3, items), generator=random),
        "logprobs": torch.randn(3, items, generator=random).to(torch.bfloat16),
        "ragged": [torch.randn(length, 2, generator=random) for length in lengths],
        "text": [task_id, {"score": 0.5, "raw": b"\0\xff"}, None],
    }


def as_bytes(part: LocalPart) -> Any:
    """Something to compare parts by."""
    if part.kind is Kind.VALUES:
        return part.values
    return (
        part.dtype,
        part.item_shape,
        part.lengths,
        bytes(part.tensor.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8).numpy()),
    )


def elsewhere(owner: Owner) -> Owner:
    """The same owner, as if it were on another host."""
    return msgspec.structs.replace(owner, boot_id=ELSEWHERE)


def fetched(
    entries: Sequence[Entry], *owners: Owner, timeout_s: float = 60.0, have: dict[ShardId, LocalPart] | None = None
) -> dict[ShardId, LocalPart]:
    """The shards of `entries`, of which those in `have` are not fetched again."""
    have = {} if have is None else have
    fetch_entries(entries, {owner.id: owner for owner in owners}, timeout_s=timeout_s, have=have)
    return have


class OwnerProcess:
    """A process with a store that holds `tasks`."""

    def __init__(
        self, directory: Path, tasks: Sequence[str], *, environment: dict[str, str] | None = None, **options: Any
    ) -> None:
        told = directory / f"owner-{time.monotonic_ns()}"
        arguments = {"tasks": list(tasks), "told": str(told)} | options
        self.pid = fork("tests.batch.owners:own", environment, **arguments)
        eventually(lambda: told.exists() or gone(self.pid), "the owner's entries")
        held = msgspec.msgpack.decode(told.read_bytes(), type=Held)
        self.owner, self.entries = held.owner, held.entries

    def stop(self) -> None:
        """Every thread of it has stopped on return: the kernel takes a moment for that."""
        os.kill(self.pid, signal.SIGSTOP)
        eventually(lambda: stands_still(self.pid), "the stop")

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        eventually(lambda: gone(self.pid), "the owner's end")


@contextmanager
def owners(directory: Path, *tasks: Sequence[str], **options: Any) -> Iterator[list[OwnerProcess]]:
    """An owner for each list of tasks."""
    running = [OwnerProcess(directory, some, **options) for some in tasks]
    try:
        yield running
    finally:
        for one in running:
            if not gone(one.pid):
                one.kill()


def own(tasks: list[str], told: str, items: int = 100, address: str | None = None) -> None:
    """Runs in a process of its own."""
    store = Store(budget_bytes=1 << 30, address=address)
    entries = [entry for task in tasks for entry in store.put(task, rows_of(task, items), VersionSpan(3, 4))]
    tell(told, store.owner, entries)
    threading.Event().wait()


def consume(held: str, told: str, is_far: bool = False) -> None:
    """Runs in a process of its own: fetches what the file `held` lists, and keeps it."""
    found = msgspec.msgpack.decode(Path(held).read_bytes(), type=Held)
    have = fetched(found.entries, elsewhere(found.owner) if is_far else found.owner)
    Path(told).write_text(str(len(have)))
    threading.Event().wait()


def fork_and_drop(held: str, told: str, stays: bool, forks: bool = True) -> None:
    """Runs in a process of its own: fetches, forks, and drops what it fetched. The child, or without `forks` the process itself,
    keeps it, and says what is in it as soon as it is asked to look."""
    found = msgspec.msgpack.decode(Path(held).read_bytes(), type=Held)
    have = fetched(found.entries, found.owner)
    child = os.fork() if forks else 0
    if child:
        have.clear()
        gc.collect()
        while stays or not gone(child):
            time.sleep(0.02)
        return
    Path(f"{told}.tmp").write_text(str(os.getpid()))
    Path(f"{told}.tmp").rename(told)
    while not Path(f"{told}.look").exists():
        time.sleep(0.02)
    (part,) = have.values()
    Path(f"{told}.new").write_text(" ".join(map(str, part.tensor.unique().tolist())))
    Path(f"{told}.new").rename(f"{told}.seen")
    threading.Event().wait()


def overwrite(held: str) -> None:
    """Runs in a process of its own: writes into what it fetched."""
    found = msgspec.msgpack.decode(Path(held).read_bytes(), type=Held)
    for part in fetched(found.entries, found.owner).values():
        part.tensor.zero_()


def tell(path: str | Path, owner: Owner, entries: Sequence[Entry]) -> None:
    temporary = Path(f"{path}.tmp")
    temporary.write_bytes(msgspec.msgpack.encode(Held(owner, tuple(entries))))
    temporary.rename(path)


def memfd_bytes() -> int:
    """Memory in the shared segments of this process, as the kernel counts it."""
    found: dict[int, int] = {}
    # Without `Path`, which is slow: a test process has hundreds of descriptors, and this is asked thousands of times.
    for descriptor in os.listdir("/proc/self/fd"):  # noqa: PTH208
        path = f"/proc/self/fd/{descriptor}"
        try:
            if os.readlink(path).startswith("/memfd:weightwire"):  # noqa: PTH115
                status = os.stat(path)  # noqa: PTH116
                found[status.st_ino] = status.st_blocks * 512
        except FileNotFoundError:
            continue
    return sum(found.values())


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def segment_descriptors() -> int:
    """Those of shared segments. The process's consumer thread opens and closes others at any time."""
    found = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            found += "memfd:weightwire" in str(descriptor.readlink())
    return found


def mappings() -> int:
    """Mapped segments of this process."""
    return Path("/proc/self/maps").read_text().count("memfd:weightwire")


@contextmanager
def counted_requests(monkeypatch: Any) -> Iterator[list[str]]:
    """The names of the requests that this process encodes meanwhile."""
    sent: list[str] = []
    encode = codec.encode

    def noting(body: Any, seq: int = 0) -> bytes:
        if isinstance(body, Lease | Pull):
            sent.append(type(body).__name__)
        return encode(body, seq)

    monkeypatch.setattr(codec, "encode", noting)
    yield sent
    monkeypatch.setattr(codec, "encode", encode)
