"""vLLM's LoRA slots: adapters by name, from tensors instead of from a directory.

vLLM knows an adapter by the `LoRARequest` of whoever asks for it: a name, a number, a path. A worker reads the path when a
number comes that it hasn't got, also again after it dropped the adapter for others. That one place is wrapped: for a name
that an update has brought, the adapter is made of the update's tensors, whatever the path. Numbers that a worker holds
when an update is committed are replaced then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from inference_plugin.engines.hooking import wrap
from inference_plugin.engines.touch import Touch
from inference_plugin.install.contract import AdapterPlace
from inference_plugin.wire.errors import EngineUnsupported
from inference_plugin.wire.tensors import dtype_name

__all__ = ["LORA_TOUCHES", "VllmAdapterSlots", "hook_lora"]

_MANAGER = "vllm.lora.model_manager:LRUCacheLoRAModelManager."

LORA_TOUCHES = (
    Touch("vllm.lora.worker_manager:WorkerLoRAManager._load_adapter", ("self", "lora_request"), "wrapped: an adapter that an update brought is not read from disk"),
    Touch("vllm.lora.worker_manager:WorkerLoRAManager.list_adapters", ("self",), "called: the numbers that are held"),
    Touch("vllm.lora.request:LoRARequest", ("lora_name", "lora_int_id"), "read"),
    Touch(_MANAGER + "add_adapter", ("self", "lora"), "called"),
    Touch(_MANAGER + "remove_adapter", ("self", "adapter_id"), "called"),
    Touch(_MANAGER + "activate_adapter", ("self", "lora_id"), "called"),
    Touch(_MANAGER + "pin_adapter", ("self", "lora_id"), "called: what was pinned stays so"),
    Touch("vllm.lora.lora_model:LoRAModel", ("lora_model_id", "rank", "loras"), "made"),
    Touch("vllm.lora.lora_weights:LoRALayerWeights", ("module_name", "rank", "lora_alpha", "lora_a", "lora_b", "scaling"), "made"),
    Touch("vllm.lora.utils:parse_fine_tuned_lora_name", ("name", "weights_mapper"), "called: the engine's name of a module"),
    Touch("vllm.lora.layers:BaseLayerWithLoRA", why="recognised: around the model's own layers"),
    Touch("vllm.lora.layers:MergedQKVParallelLinearWithLoRA", why="recognised: attention's packed projections"),
    Touch("vllm.lora.layers:MergedColumnParallelLinearWithLoRA", why="recognised: packed projections"),
    Touch("vllm.lora.layers:ColumnParallelLinearWithLoRA", why="recognised"),
    Touch("vllm.lora.layers:RowParallelLinearWithLoRA", why="recognised"),
    Touch("vllm.lora.layers:ReplicatedLinearWithLoRA", why="recognised"),
)  # fmt: skip


def hook_lora() -> None:
    from vllm.lora.worker_manager import WorkerLoRAManager

    @wrap(WorkerLoRAManager, "_load_adapter")
    def load_adapter(original: Callable[..., Any], self: Any, lora_request: Any) -> Any:
        slots: VllmAdapterSlots | None = getattr(self, "_weightwire_slots", None)
        made = slots.made_for(lora_request) if slots is not None else None
        return original(self, lora_request) if made is None else made


class VllmAdapterSlots:
    """`install.contract.AdapterSlots` of one worker."""

    def __init__(self, worker_manager: Any) -> None:
        self._workers = worker_manager
        self._manager = worker_manager._adapter_manager
        self.max_rank = int(worker_manager.lora_config.max_lora_rank)
        self.dtype = dtype_name(worker_manager.lora_config.lora_dtype)
        self._adapters: dict[str, Mapping[str, torch.Tensor]] = {}
        self._names: dict[int, str] = {}
        worker_manager._weightwire_slots = self

    def check(self, adapter: str) -> None:
        if self._workers.lora_config.fully_sharded_loras:
            raise EngineUnsupported(
                "fully sharded LoRA slots have no rule here", hint="start vLLM without --fully-sharded-loras"
            )

    def place(self, module: str) -> AdapterPlace | None:
        found = self._slice_of(module)
        if found is None:
            return None
        layer, at = found
        base = layer.base_layer
        if hasattr(layer, "kv_shard_id"):
            heads = base.total_num_heads if at == 0 else base.total_num_kv_heads
            return AdapterPlace(heads * base.head_size, base.input_size)
        outputs = layer.output_sizes if hasattr(layer, "output_sizes") else [base.output_size]
        return AdapterPlace(outputs[at], base.input_size)

    def held(self, adapter: str) -> object:
        """None where vLLM has what it read itself, or nothing yet."""
        return self._adapters.get(adapter)

    def put(self, adapter: str, what: Any) -> None:
        manager, tensors = self._manager, what
        if tensors is None:
            self._adapters.pop(adapter, None)
        else:
            self._adapters[adapter] = tensors
        for number in self._numbers(adapter):
            active = number in manager._active_adapters
            pinned = number in manager._registered_adapters.pinned_items
            manager.remove_adapter(number)
            if tensors is None:
                continue  # the next request that names it has it read from its path
            manager.add_adapter(self._made(number, tensors))
            if active:
                manager.activate_adapter(number)
            if pinned:
                manager.pin_adapter(number)

    def read(self, adapter: str) -> Iterator[tuple[str, tuple[int, ...], torch.Tensor | str]]:
        held = self._numbers(adapter)
        slots = [slot for slot, number in enumerate(self._manager.lora_index_to_id) if number in held]
        for name, tensor in self._adapters.get(adapter, {}).items():
            if not slots:
                yield name, (), "no request has named the adapter, so it is in no slot just now"
                continue
            module, _, kind = name.removesuffix(".weight").rpartition(".")
            layer, at = self._slice_of(module) or (None, 0)
            assert layer is not None
            row, column = self._first(layer, at)
            for slot in slots:
                if kind == "lora_A":
                    yield name, (0, column), layer.lora_a_stacked[at][slot, 0][: tensor.shape[0]]
                else:
                    yield name, (row, 0), layer.lora_b_stacked[at][slot, 0][:, : tensor.shape[1]]

    def made_for(self, request: Any) -> Any:
        """The adapter that a request asks for, where an update brought it; else None."""
        self._names[request.lora_int_id] = request.lora_name
        tensors = self._adapters.get(request.lora_name)
        return None if tensors is None else self._made(request.lora_int_id, tensors)

    def _numbers(self, adapter: str) -> list[int]:
        held = self._workers.list_adapters()
        return [number for number, name in self._names.items() if name == adapter and number in held]

    def _made(self, number: int, tensors: Mapping[str, torch.Tensor]) -> Any:
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.lora_weights import LoRALayerWeights

        layers = {}
        for name, a in tensors.items():
            if name.endswith(".lora_A.weight"):
                module = name.removesuffix(".lora_A.weight")
                own, rank = self._engine_name(module), a.shape[0]
                layers[own] = LoRALayerWeights(own, rank, rank, a, tensors[f"{module}.lora_B.weight"], 1.0)
        return LoRAModel(number, max((layer.rank for layer in layers.values()), default=1), layers)

    def _engine_name(self, module: str) -> str:
        from vllm.lora.utils import parse_fine_tuned_lora_name

        mapper = getattr(self._manager.model, "hf_to_vllm_mapper", None)
        renames = mapper.get_rename_mapper() if mapper is not None else None
        return str(parse_fine_tuned_lora_name(f"{module}.lora_A.weight", renames)[0])

    def _slice_of(self, module: str) -> tuple[Any, int] | None:
        """The engine's layer that has the module in it, and which of its slices that is."""
        from vllm.lora import layers

        plain = (layers.ColumnParallelLinearWithLoRA, layers.RowParallelLinearWithLoRA, layers.ReplicatedLinearWithLoRA)
        packed = (layers.MergedColumnParallelLinearWithLoRA, layers.MergedQKVParallelLinearWithLoRA)
        name = self._engine_name(module)
        layer = self._manager.modules.get(name)
        if layer is not None and type(layer) in plain and not getattr(layer, "is_merged_col_linear", False):
            return layer, 0
        for packed_name, parts in self._manager.packed_modules.items():
            if name in parts and type(layer := self._manager.modules[packed_name]) in packed:
                return layer, parts.index(name)
        return None

    def _first(self, layer: Any, at: int) -> tuple[int, int]:
        """The first row of B and the first column of A that this rank holds."""
        from vllm.lora import layers

        if isinstance(layer, layers.RowParallelLinearWithLoRA):
            return 0, layer.tp_rank * layer.input_size
        if isinstance(layer, layers.MergedColumnParallelLinearWithLoRA):
            return layer.output_ids[at] * layer.output_slices[at], 0
        if isinstance(layer, layers.ColumnParallelLinearWithLoRA):
            return layer.tp_rank * layer.output_size, 0
        return 0, 0
