"""What has to be done on the engine's own thread and may have to wait there: one thing at a time, in the order it came."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

from inference_plugin.wire.errors import WeightwireError
from inference_plugin.wire.messages import Body, Failed

if TYPE_CHECKING:
    from inference_plugin.engines.front import Front

__all__ = ["Pending"]


class Pending(ABC):
    """A request on its way through the engine's thread: `start` begins it there, `_end` or `_fail` answer it."""

    phase = ""

    def __init__(self, front: Front, reply: Callable[[Body], None]) -> None:
        self.front = front
        self.reply = reply
        self.over = False

    def start(self) -> None:
        """At a step boundary: runs, or gets in line behind what is at work."""
        if self.over:
            return
        other = self.front.at_work
        if other is not None and other is not self and not other.over:
            self._meet(other)
            if not self.over:
                self.front.in_line.append(self)
            return
        self.front.at_work = self
        self._run()

    @abstractmethod
    def cancel(self) -> None:
        """The deadline passed. Whatever can't be taken back any longer goes on."""

    @abstractmethod
    def is_asked_again(self, body: Body) -> bool:
        """Whether `body` is the same request once more."""

    @abstractmethod
    def _run(self) -> None:
        """Begins the work; nothing else is at work."""

    def _meet(self, other: Pending) -> None:  # noqa: B027 -- most only wait
        """`other` is at work: may end this one."""

    def _where(self) -> dict[str, object]:
        return {"phase": self.phase, **self.front.where}

    def _fail(self, error: WeightwireError) -> None:
        self._end(Failed(error.at(**self._where()).info()))

    def _end(self, body: Body) -> None:
        front = self.front
        self.over = True
        self.reply(body)
        while front.in_line and (front.at_work or self).over:
            if not (following := front.in_line.popleft()).over:
                front.control.submit(following.start)
                break
