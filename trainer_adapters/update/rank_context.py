"""The state of one trainer rank for its operations, in the manager's thread."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Callable

from inference_plugin.wire.cover import ExactCover
from inference_plugin.wire.errors import SyncTimeout
from inference_plugin.wire.manifest import Manifest
from trainer_adapters.events import Events
from trainer_adapters.fleet.fleet import Fleet
from trainer_adapters.settings import Settings
from trainer_adapters.sources.base import WeightSource
from trainer_adapters.sources.left_behind import any_left, still_made_on
from trainer_adapters.update.agreement import Claims
from trainer_adapters.update.trainer_ranks import TrainerRanks
from trainer_adapters.update.writer import Writer

__all__ = ["RankContext"]


class RankContext:
    """This rank. `fleet`: on rank 0, None on the others. `trainer`: the id under which workers know this trainer, and name it
    to another one: host, process, and a random number.

    `count` numbers the operations. The current one began at `began_s` (of `perf_counter`) and ends by `deadline_s` (of
    `monotonic`), which each rank counts from its own call. `released`: called once this rank's source is no longer read.
    `cover`: checks that pieces cover the manifest that was scanned last.
    """

    def __init__(self, settings: Settings, ranks: TrainerRanks, fleet: Fleet | None) -> None:
        self.settings = settings
        self.ranks = ranks
        self.fleet = fleet
        host = socket.gethostname()[:64].encode("ascii", "replace").decode()
        self.trainer = f"{host}/{os.getpid()}/{secrets.token_hex(8)}"
        self.events = Events()
        self.claims = Claims()
        self.writer = Writer(settings, ranks.rank, secret=ranks.secret, look=ranks.look)
        self.count = 0
        self.began_s = 0.0
        self.deadline_s = 0.0
        self.released: Callable[[], None] = lambda: None
        self._manifest = Manifest(())
        self.cover = ExactCover(self._manifest)

    def begin(self, deadline_s: float, released: Callable[[], None] = lambda: None) -> None:
        """Begins the next operation."""
        self.count += 1
        self.released = released
        self.began_s = time.perf_counter()
        self.deadline_s = deadline_s

    def end(self) -> None:
        """The operation is over: holds its future no longer."""
        self.released = lambda: None

    def left_s(self, operation: str) -> float:
        """Seconds until the deadline. Raises `SyncTimeout` if there are none."""
        left_s = self.deadline_s - time.monotonic()
        if left_s <= 0:
            raise SyncTimeout(f"{operation} took longer than {self.settings.timeout_s:g} s")
        return left_s

    def scan(self, source: WeightSource) -> Manifest:
        """The source's manifest, made under this manager's settings. Raises `ProtocolError` for slices that the ranks would make
        together while this one, after half of the operation's time, still makes some of an update that failed."""
        source.configure(self.settings.config)
        manifest = source.manifest()
        manifest.check_not_empty()
        if source.made_together() and any_left((time.monotonic() + self.deadline_s) / 2):
            raise still_made_on([self.ranks.rank])
        if manifest != self._manifest:
            self._manifest, self.cover = manifest, ExactCover(manifest)
        return self._manifest  # the same object as before: it remembers how its boxes are cut

    def close(self) -> None:
        """Has replicas free what they keep for the next update, frees segments and closes sockets; all of it, also where a part
        of it raises."""
        with contextlib.ExitStack() as stack:
            stack.callback(self.ranks.close)
            stack.callback(self.writer.close)
            if self.fleet is not None:
                self.fleet.release()
