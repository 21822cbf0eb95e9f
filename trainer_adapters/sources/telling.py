"""How ranks that must go on together tell each other what they need, or that they have failed."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Iterator

import msgspec
import torch.distributed as dist

from inference_plugin.devices import start_thread
from inference_plugin.wire.codec import decode_as
from inference_plugin.wire.errors import ErrorInfo, WeightwireError
from trainer_adapters.sources.exchange import OwnGroup, exchange_bytes
from trainer_adapters.sources.left_behind import leave

__all__ = ["Telling"]

logger = logging.getLogger(__name__)


class _Told(msgspec.Struct):
    needed: list[int] = []
    error: ErrorInfo | None = None


class Telling:
    """`ranks`: None if this rank is alone."""

    def __init__(self, ranks: OwnGroup | None) -> None:
        self._ranks = ranks
        self._told: threading.Thread | None = None

    def begin(self) -> None:
        """Before the first exchange of an update: waits for what is left of the last one, and makes a broken group anew."""
        if self._told is not None:
            self._told.join()  # it ends with the group's time limit
        if self._ranks is not None:
            self._ranks.renew()

    @contextlib.contextmanager
    def what_all_need(self) -> Iterator[set[int]]:
        """Collective. Yields an empty set, to which this rank adds what it needs; afterwards it has what any rank needs. A rank
        that fails meanwhile raises its error at once, and tells it; all raise it: none waits in a collective for a rank that
        doesn't come."""
        needed: set[int] = set()
        try:
            yield needed
        except BaseException as error:
            if self._ranks is not None:
                rank = dist.get_rank(self._ranks.group)
                told = _Told(error=WeightwireError.wrap(error).at(side="trainer", rank=rank).info())
                # Beside it: the others may still be in collectives of the source, which miss this rank.
                self._told = start_thread(functools.partial(self._tell, told), name="weightwire-telling")
                leave(self._told)
            raise
        if self._ranks is None:
            return
        everyone = self._exchange(_Told(sorted(needed)))
        if failed := next((one.error for one in everyone if one.error is not None), None):
            raise WeightwireError.of(failed)
        needed.update(*(one.needed for one in everyone))

    def _tell(self, told: _Told) -> None:
        try:
            self._exchange(told)
        except WeightwireError as error:
            logger.warning("weightwire: this rank can't tell the others that it failed: %s", error)

    def _exchange(self, told: _Told) -> list[_Told]:
        assert self._ranks is not None
        with self._ranks.used() as group:
            everyone = exchange_bytes(msgspec.msgpack.encode(told), group)
        return [decode_as(one, _Told) for one in everyone]
