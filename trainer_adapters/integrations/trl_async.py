"""TRL's asynchronous trainers (extra `trl`): the `weight_transfer` of AsyncGRPO and AsyncDistillation, one argument.

    from trainer_adapters.integrations.trl_async import WeightTransfer

    trainer = AsyncGRPOTrainer(model, reward, ..., weight_transfer=WeightTransfer("http://localhost:8000"))

TRL calls it on its main process; there

1. `init_weight_transfer` waits for the server and makes a `SyncManager` of this process alone;
2. `send_weights` is one update of all replicas of the job: TRL's other ranks only help to gather what it reads;
3. `pause` and `resume` do nothing: generation goes on until the commit, between two decoding steps;
4. `destroy` closes the manager.

A PEFT adapter arrives merged, as TRL merges it for the time of a sync. Written against TRL 1.16.0.
"""

from __future__ import annotations

import contextlib
import functools
import re
import threading
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

from inference_plugin.wire.errors import ArgumentError, PeerLost, ProtocolError
from trainer_adapters.integrations.options import await_replicas, checked_options, replicas_behind
from trainer_adapters.integrations.read_once import GeneratorUpdates
from trainer_adapters.integrations.trl import check_took
from trainer_adapters.manager import SyncManager

__all__ = ["WeightTransfer"]

POLL_S = 1.0
DAY_S = 86400.0


class WeightTransfer:
    """TRL's `WeightTransferProtocol`. `server`: the URL of the vLLM server, the trainer's `vllm_server_base_url`. `dtype`: in
    which all tensors travel; default: the trainer's own. `server_timeout_s`: how long a server may take to start. `settings`:
    as `SyncManager` takes them, without `process_group`. Raises `ArgumentError` for an invalid URL, time or dtype, and for a
    setting that `SyncManager` does not have.
    """

    def __init__(
        self,
        server: str,
        *,
        dtype: torch.dtype | str | None = None,
        server_timeout_s: float = 240.0,
        **settings: object,
    ) -> None:
        check_server(server, server_timeout_s)
        if "process_group" in settings:
            raise ArgumentError("process_group was given", hint="leave it out: one rank sends, by itself")
        self._settings = checked_options(settings, dtype, "WeightTransfer()")
        self._server, self._timeout_s, self._dtype = server.rstrip("/"), server_timeout_s, dtype
        self._manager: SyncManager | None = None

    def init_weight_transfer(self) -> None:
        """Raises `PeerLost` if the server does not answer in time, `EngineUnsupported` if it runs without our plug-in, and
        `SyncTimeout` if a replica of it does not register."""
        deadline_s = time.monotonic() + self._timeout_s
        while True:
            try:
                self._replicas = replicas_behind(self._server)
                break
            except PeerLost:
                if time.monotonic() > deadline_s:
                    raise
                threading.Event().wait(POLL_S)  # the server is still starting, and tells nobody when it is there
        alone = None
        if dist.is_initialized() and dist.get_world_size() > 1:  # the other ranks make no manager, and no group
            alone = dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
        self._manager = SyncManager(process_group=alone, **self._settings)
        self._updates = GeneratorUpdates(self._manager, self._dtype, alone)
        await_replicas(self._manager, self._replicas)

    def pause(self) -> None:
        """Nothing: Weightwire stops generation itself, and only for the installation."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Every replica of the job serves what `iterator` yields, as the next version, when this returns.

        In the first sync the whole model is kept in host memory, because the iterator can be read once; later syncs pass on one
        tensor at a time. Raises what `SyncManager.update` raises, and `CommitFailed` if the server is not among the replicas
        that took the version. The iterator is read to its end in any case, because other ranks gather with it.
        """
        if self._manager is None:
            raise ProtocolError("send_weights before init_weight_transfer", side="trainer")
        try:
            report = self._updates.update(iterator)
        except BaseException:
            with contextlib.suppress(TypeError, ValueError):  # it can't be read; the manager's thread still reads it
                for _ in iterator:
                    pass
            raise
        ask = functools.partial(replicas_behind, self._server)
        self._replicas = check_took(report, f"the server at {self._server}", self._replicas, ask)

    def resume(self) -> None:
        """Nothing, as `pause`."""

    def destroy(self) -> None:
        """Closes the manager; the server serves on. May be called twice."""
        manager, self._manager = self._manager, None
        if manager is not None:
            manager.close()


def check_server(server: object, timeout_s: object) -> None:
    """Raises `ArgumentError` for an invalid URL or time."""
    if not isinstance(server, str) or not re.match("https?://.", server):
        raise ArgumentError(f"server={server!r} is no URL of a server", hint="such as 'http://127.0.0.1:8000'")
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 <= timeout_s <= DAY_S:
        raise ArgumentError(f"server_timeout_s={timeout_s!r}", hint="give it seconds, from 0 to a day")
