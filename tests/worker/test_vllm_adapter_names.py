"""Which adapter a number means in vLLM: verl gives each step's adapter a number of its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from inference_plugin.engines.vllm.lora import VllmAdapterSlots


class Manager:
    """vLLM's manager of a worker's adapters, as far as the slots look at it; holds the last two."""

    def __init__(self) -> None:
        self._adapter_manager: Any = None
        self.lora_config = SimpleNamespace(max_lora_rank=8, lora_dtype=torch.float32)
        self.held: list[int] = []

    def _load_adapter(self, request: Any) -> str:
        return f"from {request.lora_path}"

    def list_adapters(self) -> set[int]:
        return set(self.held)

    def add_adapter(self, number: int, name: str) -> None:
        request = SimpleNamespace(lora_int_id=number, lora_name=name, lora_path="disk")
        assert self._load_adapter(request) == "from disk"
        self.held = [*self.held, number][-2:]


def test_no_names_of_adapters_gather_that_vllm_no_longer_holds() -> None:
    manager = Manager()
    slots = VllmAdapterSlots(manager)
    for number in range(1, 301):
        manager.add_adapter(number, "policy" if number % 2 else "judge")
        assert slots.numbers_of("policy") == [one for one in manager.held if one % 2]
    assert len(slots.names) <= 3


class Slots:
    """`LRUCacheLoRAModelManager` of vLLM 0.24, as far as slots go: it computes which slot a request reads only where the
    requests change."""

    def __init__(self, *slots: int | None) -> None:
        self.lora_index_to_id = list(slots)
        self.adapters: dict[int, Any] = {number: None for number in slots if number is not None}
        self.contents = [None if number is None else "first" for number in slots]
        self._registered_adapters = SimpleNamespace(pinned_items=set())
        self._last_mapping: object = None
        self.read: dict[int, int] = {}

    @property
    def _active_adapters(self) -> list[int]:
        return [number for number in self.lora_index_to_id if number is not None]

    def remove_adapter(self, number: int) -> None:
        self.lora_index_to_id = [None if held == number else held for held in self.lora_index_to_id]
        del self.adapters[number]

    def add_adapter(self, adapter: Any) -> None:
        self.adapters[adapter.number] = adapter.said

    def activate_adapter(self, number: int) -> None:
        slot = self.lora_index_to_id.index(None)
        self.lora_index_to_id[slot], self.contents[slot] = number, self.adapters[number]

    def step(self, *numbers: int) -> list[Any]:
        """What the running requests compute with."""
        if self._last_mapping != numbers:
            self.read = {number: self.lora_index_to_id.index(number) for number in numbers}
            self._last_mapping = numbers
        return [self.contents[self.read[number]] for number in numbers]


def test_running_requests_read_an_adapter_in_the_slot_to_which_an_update_moved_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manager = Manager()
    held = manager._adapter_manager = Slots(None, 7)  # the other slot's adapter was removed
    slots = VllmAdapterSlots(manager)
    monkeypatch.setattr(slots, "made_of", lambda number, said: SimpleNamespace(number=number, said=said))
    manager.add_adapter(7, "policy")
    assert held.step(7) == ["first"]
    slots.put("policy", "second")
    assert held.lora_index_to_id == [7, None]
    assert held.step(7) == ["second"]
