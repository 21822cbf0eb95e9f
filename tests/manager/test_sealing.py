"""Between the last byte and the commit: what rank 0 says to workers that still check."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from inference_plugin.net.channel import Channel
from inference_plugin.plugins import plugin_manager
from inference_plugin.wire.messages import Body, Seal
from tests.support.managers import SyncManager
from tests.support.plain_engine import ShardSource, checkpoint, digests_expected
from tests.support.rig import Rig

PLUGIN = "tests.support.slow_transport:plugin"


def test_a_list_of_pieces_travels_once_however_long_the_check_takes(
    start: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Seal] = []
    send = Channel.send

    def heard(self: Channel, body: Body, payload: Any = None) -> None:
        if isinstance(body, Seal):
            sent.append(body)
        send(self, body, payload)

    rig = start(WEIGHTWIRE_PLUGINS=PLUGIN)
    monkeypatch.setenv("WEIGHTWIRE_PLUGINS", PLUGIN)
    monkeypatch.setattr(Channel, "send", heard)
    plugin_manager.cache_clear()
    try:
        with SyncManager(transport="slow", timeout_s=60) as manager:
            manager.update(ShardSource(checkpoint(1)), 1)
    finally:
        plugin_manager.cache_clear()
    assert rig.peek() == digests_expected(checkpoint(1))
    first, *later = sent
    assert first.pieces and later
    assert {(seal.txn, seal.digest, seal.pieces) for seal in later} == {(first.txn, first.digest, None)}
