"""SGLang's LoRA slots: an adapter that SGLang knows gets new tensors.

SGLang knows an adapter by an id that its tokenizer process gave to a name, when it was started with the adapter or told to
load it. So the name must be known there first; an update then replaces what every rank holds for it: the copy from which
slots are filled, and the slot, if the adapter is in one. If SGLang evicts the adapter and reads
it from disk again later, it gets the update's tensors as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from inference_plugin.engines.lora_slots import LayerSlice, TensorSlots
from inference_plugin.engines.monkeypatch import wrap
from inference_plugin.wire.errors import EngineUnsupported
from inference_plugin.wire.tensors import dtype_name

__all__ = ["SglangAdapterSlots", "hook_lora"]


PACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Projections that SGLang packs into one layer. They share one LoRA rank there; one that an adapter lacks is zero."""


def hook_lora() -> None:
    from sglang.srt.lora.lora_manager import LoRAManager

    for load in ("load_lora_weights", "load_lora_weights_from_tensors"):

        @wrap(LoRAManager, load)
        def load_lora_weights(original: Callable[..., Any], self: Any, lora_ref: Any, *tensors: Any) -> Any:
            result = original(self, lora_ref, *tensors)
            slots: SglangAdapterSlots | None = getattr(self, "weightwire_slots", None)
            if slots is not None:
                slots.loaded(lora_ref)
            return result


@dataclass(frozen=True)
class _Held:
    """An adapter: SGLang's own objects by their ids, and the tensors of the last update, if there was one."""

    made: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor] | None


class SglangAdapterSlots(TensorSlots):
    """`install.contract.AdapterSlots` of one rank."""

    def __init__(self, manager: Any) -> None:
        super().__init__()
        self._manager = manager
        self.max_rank = int(manager.max_lora_rank)
        self.dtype = dtype_name(manager.dtype)
        manager.weightwire_slots = self

    def check(self, adapter: str) -> None:
        from sglang.srt.runtime_context import get_parallel

        if get_parallel().pp_size > 1:
            raise EngineUnsupported(
                "LoRA slots of pipeline stages have no rule here",
                hint="send the merged model with MergedLoRAAdapter",
            )
        if self._manager.enable_lora_overlap_loading:
            raise EngineUnsupported(
                "LoRA slots that are filled while the model runs have no rule here",
                hint="start SGLang without --enable-lora-overlap-loading",
            )
        if not self._ids(adapter):
            raise EngineUnsupported(
                f"SGLang knows no LoRA adapter named {adapter!r}",
                hint=f"start it with --lora-paths {adapter}=DIRECTORY, or load the adapter once; updates replace it then",
            )

    def held(self, adapter: str) -> object:
        made = {lora_id: self._manager.loras[lora_id] for lora_id in self._ids(adapter)}
        return _Held(made, self._tensors.get(adapter))

    def put(self, adapter: str, what: Any) -> None:
        if not isinstance(what, _Held):
            what = _Held({lora_id: self._made(lora_id, what) for lora_id in self._ids(adapter)}, what)
        self._remember(adapter, what.tensors)
        manager, pool = self._manager, self._manager.memory_pool
        for lora_id, own in what.made.items():
            manager.loras[lora_id], manager.configs[lora_id] = own, own.config
            slot = pool.uid_to_buffer_id.get(lora_id)
            if slot is not None:
                pool.load_lora_weight_to_buffer(
                    lora_id, slot, own, manager.lora_modules, manager.embed_tokens_module, manager.lm_head_module
                )
                manager._notify_lora_slots_updated({slot})

    def refill(self) -> None:
        """SGLang's slots lie outside of the memory that it releases."""

    def loaded(self, lora_ref: Any) -> None:
        """SGLang has taken an adapter from disk, or from a user's tensors: puts the update's in its place, if an update brought it."""
        tensors = self._tensors.get(lora_ref.lora_name)
        if tensors is not None:
            made = self._made(lora_ref.lora_id, tensors)
            self._manager.loras[lora_ref.lora_id], self._manager.configs[lora_ref.lora_id] = made, made.config

    def _slots_with(self, adapter: str) -> Sequence[str]:
        """By SGLang's id; all ids of an adapter hold the same."""
        return [lora_id for lora_id in self._ids(adapter) if lora_id in self._manager.memory_pool.uid_to_buffer_id][:1]

    def _values(self, found: LayerSlice, slot: str) -> tuple[torch.Tensor, torch.Tensor]:
        from sglang.srt.lora.utils import get_target_module_name

        pool, (layer, name, at) = self._manager.memory_pool, found
        key, number = get_target_module_name(name, pool.target_modules), _layer_number(name)
        buffer, rank = pool.uid_to_buffer_id[slot], self._manager.loras[slot].config.r
        rows = slice(*layer.output_offset_cpu[at : at + 2].tolist())
        return pool.A_buffer[key][number][buffer][at * rank :], pool.B_buffer[key][number][buffer][rows]

    def _first(self, layer: Any, at: int) -> tuple[int, int]:
        from sglang.srt.lora import layers

        base = layer.base_layer
        rank = _layer_rank(base, "tp")
        if isinstance(layer, layers.RowParallelLinearWithLoRA):
            return 0, rank * base.input_size_per_partition
        if isinstance(layer, layers.QKVParallelLinearWithLoRA):
            if at == 0:
                return rank * base.q_proj_shard_size, 0
            return _layer_rank(base, "kv_tp") // base.num_kv_head_replicas * base.kv_proj_shard_size, 0
        return rank * base.output_partition_sizes[at], 0

    def _ids(self, adapter: str) -> list[str]:
        return [lora_id for lora_id, ref in list(self._manager.lora_refs.items()) if ref.lora_name == adapter]

    def _made(self, lora_id: str, tensors: Mapping[str, torch.Tensor]) -> Any:
        from sglang.srt.lora.lora import LoRAAdapter
        from sglang.srt.lora.lora_config import LoRAConfig

        manager = self._manager
        rank = max((t.shape[0] for name, t in tensors.items() if name.endswith(".lora_A.weight")), default=1)
        whole = self._completed(tensors, rank)
        names = sorted({name.split(".")[-3] for name in whole})
        config = LoRAConfig.from_dict({"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": names})
        made = LoRAAdapter(
            lora_id,
            config,
            manager.base_hf_config,
            manager.load_config,
            manager.lora_backend,
            base_model=manager.base_model,
        )
        made.initialize_weights_from_tensors(whole)
        return made

    def _completed(self, tensors: Mapping[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
        """The tensors, and zeros for the projections and ranks that a packed layer has and the adapter lacks."""
        dtype = next(iter(tensors.values())).dtype if tensors else torch.float32
        whole: dict[str, torch.Tensor] = {}
        for module in {name.removesuffix(".lora_A.weight") for name in tensors if name.endswith(".lora_A.weight")}:
            parent, _, own = module.rpartition(".")
            for sibling in next((parts for parts in PACKED.values() if own in parts), (own,)):
                place = self.place(f"{parent}.{sibling}")
                assert place is not None
                shapes = {"lora_A": (rank, place.columns), "lora_B": (place.rows, rank)}
                for kind, shape in shapes.items():
                    name = f"{parent}.{sibling}.{kind}.weight"
                    sent = tensors.get(name)
                    if sent is None or tuple(sent.shape) != shape:
                        whole[name] = torch.zeros(shape, dtype=dtype)
                        if sent is not None:
                            whole[name][: sent.shape[0], : sent.shape[1]] = sent
                    else:
                        whole[name] = sent
        return whole

    def _slice_of(self, module: str) -> LayerSlice | None:
        from sglang.srt.lora import layers

        known = (
            layers.QKVParallelLinearWithLoRA,
            layers.MergedColumnParallelLinearWithLoRA,
            layers.ColumnParallelLinearWithLoRA,
            layers.RowParallelLinearWithLoRA,
        )
        parent, _, own = module.removeprefix("base_model.model.").rpartition(".")
        packed, parts = next(((name, parts) for name, parts in PACKED.items() if own in parts), (own, (own,)))
        name = f"{parent}.{packed}"
        number = _layer_number(name)
        if number is None or number >= len(self._manager.lora_modules):
            return None
        layer = self._manager.lora_modules[number].get(name)
        if layer is None or type(layer) not in known:
            return None
        return LayerSlice(layer, name, parts.index(own))


def _layer_number(module: str) -> Any:
    from sglang.srt.layers.utils import get_layer_id

    return get_layer_id(f"{module}.weight")


def _layer_rank(base: Any, group: Literal["tp", "kv_tp"]) -> int:
    """A linear layer's rank among those that share it."""
    if hasattr(base, f"{group}_rank"):  # before 0.5.22
        return int(getattr(base, f"{group}_rank"))
    from sglang.srt.distributed.utils import get_group_rank_size

    return int(get_group_rank_size(getattr(base, f"{group}_group"))[0])
