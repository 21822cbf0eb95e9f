"""The prefix namespaces of SGLang's requests: what was computed by older weights is not found."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from inference_plugin.engines.sglang.kv_events import hook_kv_events
from inference_plugin.engines.sglang.scheduler import SchedulerRank

EVENTS = "sglang.srt.mem_cache.events"
ADAPTER = "0123456789abcdef" * 2


class KvEventLoraNames:
    """As SGLang 0.5.23 has it; `register` runs when a request comes, and nothing is forgotten."""

    def __init__(self) -> None:
        self._adapter_names: dict[str, str] = {}
        self._names: dict[str, str] = {}

    def register(self, req: Any = None, lora_name: str | None = None, *, lora_id: str | None = None) -> None:
        if lora_id is not None:
            self._adapter_names[lora_id] = str(lora_name)
        elif req.lora_id is not None:
            self._names[req.extra_key] = lora_name or self._adapter_names[req.lora_id]

    def get(self, extra_key: str | None) -> str | None:
        return self._names.get(extra_key or "")

    def resolve(self, extra_key: str | None) -> str | None:
        return self.get(extra_key) or self._adapter_names.get((extra_key or "")[-32:])


def rank_of(*, installations: int = 0) -> Any:
    rank: Any = object.__new__(SchedulerRank)
    rank.some_keep_cache, rank.scheduler = False, None
    rank.namespace = f"weightwire={installations}" if installations else ""
    return rank


def request_for(adapter: str | None = ADAPTER) -> Any:
    return SimpleNamespace(extra_key=f"mine{adapter}" if adapter else None, lora_id=adapter, session=None)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> KvEventLoraNames:
    events = ModuleType(EVENTS)
    events.KvEventLoraNames = type("KvEventLoraNames", (KvEventLoraNames,), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, EVENTS, events)
    hook_kv_events()
    names: KvEventLoraNames = events.KvEventLoraNames()
    names.register(lora_id=ADAPTER, lora_name="loaded")
    return names


def test_sglang_s_kv_events_name_the_adapter_of_a_request_that_waited_over_an_update(names: KvEventLoraNames) -> None:
    """They find it by the whole key, as it was recorded, or (before 0.5.23) by the end of the key."""
    request = request_for()
    for installations in (1, 2, 0):
        rank = rank_of(installations=installations)
        rank.name(request)
        if installations == 1:
            names.register(request, "polite")
        space = f"weightwire={installations}|" if installations else ""
        assert request.extra_key == f"{space}mine{ADAPTER}"
        assert names.get(request.extra_key) == names.resolve(request.extra_key) == "polite"
    assert names.resolve(f"other{ADAPTER}") == "loaded"
    assert names.get(None) is names.resolve(None) is names.get("weightwire=1") is None


def test_sglang_s_kv_events_keep_one_name_for_an_adapter_over_any_number_of_updates(names: KvEventLoraNames) -> None:
    for installations in range(300):
        for request in (request_for(), request_for(None)):
            rank_of(installations=installations).name(request)
            names.register(request, "polite")
    assert names._names == {f"mine{ADAPTER}": "polite"}  # noqa: SLF001


def test_sglang_without_names_of_adapters_by_key_has_nothing_to_wrap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, EVENTS, ModuleType(EVENTS))
    hook_kv_events()
