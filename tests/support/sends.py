"""Something that happens in the middle of an update: right before the n-th message that this process sends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from inference_plugin.net.channel import Channel


class Sends:
    """Counts the messages of all channels while it is used as a context."""

    def __init__(self) -> None:
        self.count = 0
        self._plans: list[tuple[int, Callable[[], None]]] = []
        self._lock = threading.Lock()

    def __enter__(self) -> Sends:
        self._send = send = Channel.send

        def counted(channel: Channel, body: Any, payload: Any = None) -> None:
            with self._lock:
                self.count += 1
                due = [plan for plan in self._plans if plan[0] <= self.count]
                self._plans = [plan for plan in self._plans if plan not in due]
            for _, action in due:
                action()
            send(channel, body, payload)

        Channel.send = counted  # type: ignore[method-assign, assignment]
        return self

    def __exit__(self, *_: object) -> None:
        Channel.send = self._send  # type: ignore[method-assign]

    def restart(self) -> None:
        """Counts from 0 again; plans stay."""
        with self._lock:
            self.count = 0

    def before(self, number: int, action: Callable[[], None]) -> Callable[[], bool]:
        """`action` happens right before the message of this number. What is returned takes the plan back, and says whether
        there was still one to take back."""
        plan = number, action
        with self._lock:
            self._plans.append(plan)

        def take_back() -> bool:
            with self._lock:
                kept = [other for other in self._plans if other is not plan]
                missed = len(kept) < len(self._plans)
                self._plans = kept
            return missed

        return take_back
