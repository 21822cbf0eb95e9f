"""The worker's ZMQ socket, in front of its groups.

The reply thread only decides and answers; `work` does what takes time, so that no request waits for another one's work. The
reply thread never touches the live model. It also lets transactions expire: at the end of their lease, once every request that
had arrived by then was read, or at once when the trainer's process ends.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from inference_plugin.devices import in_use
from inference_plugin.net.processes import ProcessId
from inference_plugin.net.reply_server import Asker, ReplyServer, Service
from inference_plugin.wire import codec
from inference_plugin.wire.messages import Body, Describe, WorkerCard
from inference_plugin.worker.groups import GroupTable

__all__ = ["WorkerServer"]

MAX_OPEN = 8
"""Unanswered requests of one peer. A REQ peer has one; the others are those that it gave up."""


class WorkerServer(Service):
    """Serves one worker's groups at `address`. Its socket is bound when the constructor returns, or once there is room for it.

    `card` makes the worker's card anew. `listen` is as for `Listener`.
    """

    def __init__(self, table: GroupTable, listen: str, card: Callable[[], WorkerCard], where: dict[str, Any]) -> None:
        self._table = table
        self.card = card
        self._device = in_use().current()
        self.server = ReplyServer(
            self,
            [listen],
            name="weightwire-rep",
            where=where,
            max_bytes=codec.MAX_PAYLOAD_BYTES,
            most_open=MAX_OPEN,
            waits_for_room=True,
        )
        (self.address,) = self.server.addresses
        table.sooner = self.server.wake
        self._closed = False

    def start(self) -> None:
        self.server.start()

    def close(self) -> None:
        """Ends the thread, closes the socket and every group; may be called twice."""
        if not self._closed:
            self._closed = True
            self.server.close()
            self._table.close()

    # --- the server's thread -----------------------------------------------------------------------------------------

    def started(self) -> None:
        in_use().use(self._device)

    def answer(self, asker: Asker, body: Body, payload: memoryview | None) -> Body | None:
        if isinstance(body, Describe):
            return self.card()
        self._table.handle(asker, body, payload)
        return None

    def processes(self) -> Collection[ProcessId]:
        return self._table.processes()

    def wakes_at_s(self) -> float:
        return self._table.wakes_at_s()

    def look(self, now_s: float, ended: Collection[ProcessId]) -> None:
        self._table.tick(now_s, ended)
