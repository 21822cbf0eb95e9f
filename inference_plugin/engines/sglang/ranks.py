"""Messages among a replica's ranks in the middle of a turn, while generation stands."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from inference_plugin.engines.gloo_group import GlooGroup
from inference_plugin.engines.rank_runtime import rank_timeout_s
from inference_plugin.engines.rank_sockets import START_TIMEOUT_S, RankSockets, sockets_of
from inference_plugin.wire.errors import EngineUnsupported, first_few

__all__ = ["Ranks", "note_presence"]

logger = logging.getLogger("sglang.weightwire")

PRESENCE_TIMEOUT_S = 10.0
"""How long a rank that has loaded the model waits for the others' notes, which they make before they load it."""


class Ranks:
    """This replica's ranks. `collectives` counts their broadcasts and gatherings.

    On one host they are connected to the first one by sockets. Over several hosts, or where the sockets can't be made, they use a
    gloo group that nobody else uses. If either fails, SGLang's own groups stay in step. With two ranks on two busy cores a
    gathering takes 0.02 ms by sockets and 0.5 ms by gloo, whose messages pass through several threads on either side.

    Raises `EngineUnsupported` if the plug-in is not live in every rank.
    """

    def __init__(self, parallel: Any) -> None:
        self.tp_rank, self.tp_size = int(parallel.tp_rank), int(parallel.tp_size)
        self.stage, self.stages = int(parallel.pp_rank), int(parallel.pp_size)
        self.rank, self.size = self.stage * self.tp_size + self.tp_rank, self.stages * self.tp_size
        self.leads = self.rank == 0
        self.collectives = 0
        self._way: RankSockets | GlooGroup | None = None
        if self.size > 1:
            every = parallel.world_group if self.stages > 1 else parallel.tp_group
            _check_presence(every.ranks)
            timeout = timedelta(seconds=START_TIMEOUT_S)
            own = dist.new_group(every.ranks, backend="gloo", timeout=timeout, use_local_synchronization=True)
            group = GlooGroup(own)
            self._way = sockets_of(group, self.rank, self.size) or group
            group.timeout_s = rank_timeout_s()

    def broadcast(self, data: bytes = b"") -> bytes:
        """The first rank's bytes, on all ranks."""
        if self._way is None:
            return data
        self.collectives += 1
        return self._way.broadcast(data)

    def gather(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, in order of rank, on all ranks."""
        if self._way is None:
            return [data]
        self.collectives += 1
        return self._way.gather(data)


def note_presence() -> None:
    """Tells the other ranks that the plug-in is live in this one, once SGLang has connected them."""
    if dist.is_initialized():
        _get_default_store().set(_presence(dist.get_rank()), "")


def _check_presence(ranks: Sequence[int]) -> None:
    """Raises `EngineUnsupported` for ranks, as torch.distributed counts them, that lack the plug-in (it may be installed on some
    hosts only): they would never come to what the others do together."""
    note_presence()
    store = _get_default_store()
    try:
        store.wait([_presence(rank) for rank in ranks], timedelta(seconds=PRESENCE_TIMEOUT_S))
    except RuntimeError:  # of each kind of store its own
        absent = [rank for rank in ranks if not store.check([_presence(rank)])]
        if not absent:
            return
        why = EngineUnsupported(
            f"the plug-in is live here, but not in every rank of the engine: {first_few([f'rank {each}' for each in absent])}",
            hint="install weightwire on every host of the engine, and set WEIGHTWIRE_DISABLE on all of them or on none",
            phase="start",
        )
        if ranks[0] in absent and dist.get_rank() == min(set(ranks) - set(absent)):
            logger.warning("weightwire: OFF in this engine, whose first rank would have said so: %s", why)
        raise why from None


def _presence(rank: int) -> str:
    return f"weightwire/{rank}"
