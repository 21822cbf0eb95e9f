"""Faults of this process's trainer: a plug-in that does something before a phase (`weightwire_phase`), and silence."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from inference_plugin.net.channel import Channel
from inference_plugin.plugins import hookimpl, plugin_manager
from inference_plugin.wire.messages import Body, RenewPause

__all__ = ["AtPhase", "fall_silent"]


class AtPhase:
    """Calls `action` before each `phase` of an `operation`; what it raises fails the operation."""

    def __init__(self, phase: str, action: Callable[[], object], *, operation: str = "update") -> None:
        self._phase = operation, phase
        self._action = action

    @hookimpl
    def weightwire_phase(self, operation: str, phase: str) -> None:
        if (operation, phase) == self._phase:
            self._action()

    @contextlib.contextmanager
    def registered(self) -> Iterator[None]:
        plugin_manager().register(self)
        try:
            yield
        finally:
            plugin_manager().unregister(self)


def fall_silent(patch: pytest.MonkeyPatch) -> None:
    """From now on no pause of this process is renewed."""
    send = Channel.send

    def sending(channel: Channel, body: Body, payload: Any = None) -> None:
        if not isinstance(body, RenewPause):
            send(channel, body, payload)

    patch.setattr(Channel, "send", sending)
