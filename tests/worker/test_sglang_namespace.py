"""The prefix namespaces of SGLang's requests: what was computed by older weights is not found."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from inference_plugin.engines.sglang.scheduler import SchedulerRank

ADAPTER = "0123456789abcdef" * 2


def test_sglang_s_kv_events_name_the_adapter_of_a_request_that_waited_over_an_update() -> None:
    """They find it by the whole key, as it was recorded, or by the end of the key."""
    recorded: list[str] = []
    rank: Any = object.__new__(SchedulerRank)
    rank._some_keep_cache = False
    rank.scheduler = SimpleNamespace(_record_kv_event_lora_name=lambda request, _: recorded.append(request.extra_key))
    request = SimpleNamespace(extra_key=f"mine{ADAPTER}", session=None)
    for installation in (1, 2):
        rank.namespace = f"weightwire={installation}"
        rank.name(request)
        assert recorded.pop() == request.extra_key == f"weightwire={installation}|mine{ADAPTER}"
    rank.namespace = ""
    rank.name(request)
    assert recorded == [request.extra_key] == [f"mine{ADAPTER}"]
