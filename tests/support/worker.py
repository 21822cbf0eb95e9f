"""A real worker server and group table in this process, with an installer that only keeps what it is given."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from inference_plugin.install.contract import InstallTerms, Throttle
from inference_plugin.net import addresses
from inference_plugin.net.channel import Channel
from inference_plugin.transports.base import Target
from inference_plugin.wire.digest import digest_group
from inference_plugin.wire.errors import TransportUnavailable
from inference_plugin.wire.geometry import Box, Piece
from inference_plugin.wire.manifest import Manifest
from inference_plugin.wire.messages import BoxDigest, GroupStatus, Seal, WorkerCard
from inference_plugin.wire.tensors import box_view
from inference_plugin.worker.groups import GroupTable
from inference_plugin.worker.server import WorkerServer


@dataclass
class KeepingInstaller:
    """Takes any manifest whole, or the boxes of `needs`; `installed` is what it holds, by name.

    `fail` maps the name of a method to the error that it raises, `fail_once` to one that its next call raises. `gate`, when
    it is closed, holds `prepare`; `open_gate` holds `open`.
    """

    needs: tuple[Box, ...] | None = None
    fail: dict[str, BaseException] = field(default_factory=dict)
    fail_once: dict[str, BaseException] = field(default_factory=dict)
    keeps_previous: bool = False
    installed: dict[str, torch.Tensor] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    sharing: int = 0
    """As the last `open` named it."""
    gate: threading.Event = field(default_factory=threading.Event)
    open_gate: threading.Event = field(default_factory=threading.Event)
    manifest: Manifest | None = None
    claims_by_name: bool = False

    def __post_init__(self) -> None:
        self.gate.set()
        self.open_gate.set()

    def open(
        self, manifest: Manifest, policy: str, *, partial: bool, zone: bool = False, sharing: int = 1
    ) -> InstallTerms:
        if zone:
            raise TransportUnavailable("zone: this installer has no second set")
        self._note("open")
        assert self.open_gate.wait(600)
        self.manifest, self.sharing = manifest, sharing
        whole = tuple(manifest.whole(i) for i in range(len(manifest.tensors)))
        return InstallTerms(whole if self.needs is None else self.needs, "plan", "copy", "a test")

    @property
    def claims(self) -> frozenset[str]:
        """With `claims_by_name` what the manifest names, else nothing."""
        names = self.manifest.index if self.manifest is not None and self.claims_by_name else ()
        return frozenset(names)

    def prepare(self, segment: torch.Tensor, brake: Throttle) -> int:
        self._note("prepare")
        while not self.gate.wait(0.001):
            brake()
        return 0

    def share(self) -> bytes:
        return b""

    def install(self, segment: torch.Tensor, shares: Sequence[bytes] = ()) -> None:
        self._note("install")
        self.installed = self.read(segment)

    def undo(self, previous: torch.Tensor | None) -> None:
        self._note("undo")

    def finish(self) -> None:
        self._note("finish")

    def discard(self) -> None:
        self._note("discard")

    @property
    def scales_cache(self) -> bool:
        return False

    @property
    def needs_previous(self) -> bool:
        return self.keeps_previous

    def check_terms(self) -> None: ...

    def check_model(self) -> None: ...

    def read_back(self) -> Iterator[BoxDigest | tuple[str, str]]:
        return iter(())

    def free_kept(self) -> None:
        self._note("free_kept")

    def close(self) -> None:
        self.calls.append("close")

    def read(self, segment: torch.Tensor) -> dict[str, torch.Tensor]:
        assert self.manifest is not None
        return {
            spec.name: box_view(segment, self.manifest, self.manifest.whole(i)).clone()
            for i, spec in enumerate(self.manifest.tensors)
        }

    def _note(self, name: str) -> None:
        self.calls.append(name)
        if name in self.fail_once:
            raise self.fail_once.pop(name)
        if name in self.fail:
            raise self.fail[name]


class Worker:
    """Server, table and one installer per group, on a real socket."""

    def __init__(
        self,
        listen: str,
        make: Callable[[str], KeepingInstaller] = lambda _group: KeepingInstaller(),
    ) -> None:
        self.installers: dict[str, KeepingInstaller] = {}
        self.make = make

        def made(group: str) -> KeepingInstaller:
            self.installers[group] = self.make(group)
            return self.installers[group]

        self.table = GroupTable("replica", 0, made)
        self.server = WorkerServer(self.table, listen, self.card, {"side": "worker", "replica": "replica", "rank": 0})
        self.address = self.server.address
        self.server.start()

    @property
    def installer(self) -> KeepingInstaller:
        return self.installers["policy"]

    def card(self) -> WorkerCard:
        return WorkerCard(
            "replica", 0, 0, 0, os.getpid(), addresses.boot_id(), self.address, "cpu", 0, groups=self.table.statuses()
        )

    def status(self, group: str = "policy") -> GroupStatus:
        return next(status for status in self.table.statuses() if status.group == group)

    def channel(self) -> Channel:
        return Channel(self.address, pid=os.getpid(), peer_boot_id=addresses.boot_id())

    def target(self, manifest: Manifest, needs: tuple[Box, ...] | None = None) -> Target:
        whole = tuple(manifest.whole(i) for i in range(len(manifest.tensors)))
        return Target("replica", 0, self.address, os.getpid(), addresses.boot_id(), needs or whole)

    def seal(self, txn: str, pieces: Sequence[Piece], wait_s: float = 0.5, group: str = "policy") -> Seal:
        """The request that a trainer would send."""
        manifest = self.table.named(group).work.manifest
        assert manifest is not None
        return Seal(group, txn, digest_group(manifest, pieces), tuple(pieces), wait_s)

    def commit(self, txn: str, version: int, group: str = "policy") -> Any:
        """What the coordinator has every rank do."""
        held = self.table.named(group)
        if (done := held.check_sealed(txn, version)) is not None:
            return done
        held.install(txn)
        return held.finish(txn, 0.0)

    def close(self) -> None:
        self.server.close()
