"""Which adapter a number means in vLLM: verl gives each step's adapter a number of its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

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
        assert slots._numbers("policy") == [one for one in manager.held if one % 2]
    assert len(slots._names) <= 3
