"""A model that vLLM made, and its skeleton."""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from inference_plugin.engines.default_dtype import default_dtype_here
from inference_plugin.engines.live_model import COMPILED_IN, ROTARY_TABLES, LiveModel
from inference_plugin.engines.skeleton import Skeleton, build_skeleton
from inference_plugin.engines.vllm.whole_model import finish_nothing_in, whole_finishers, why_whole
from inference_plugin.install.graph import Boundary
from inference_plugin.wire.checkpoint_headers import checkpoint_headers
from inference_plugin.wire.digest import digest_bytes
from inference_plugin.wire.tensors import bytes_view

__all__ = ["VllmModel", "skeleton_of"]


class VllmModel(LiveModel):
    """`install.contract.EngineModel` of a model that vLLM made from `config`, an engine's whole configuration."""

    runtime_state = frozenset(
        {
            *("kv_cache", "lora_manager", "moe_state"),
            "_lora_context",  # the adapters' slots, of a kernel for experts
            *("_k_scale_cache", "_v_scale_cache"),  # parts of the KV cache, in Triton's attention
            "_workspace_buffer",  # of FlashInfer's attention
            *("handles", "alltoall_info"),  # of the last exchange of tokens between ranks with experts
            "_output",  # of shared experts, within a step: a group may be opened meanwhile
            "deepstack_input_embeds",  # of the last request with images or sounds
            # of B12x's experts: how kernels run, and ones
            *("_plans", "_decode_plans", "_verify_plans", "_unit_scales"),
            *("capture_fn", "routing_sink"),  # which experts tokens went to, of `--enable-return-routed-experts`
            *("_arange_cache", "_cu_2", "_cu_2_q", "_cu_2_k"),  # of attention over a KV cache in few bits,
            *("_tq_PiT", "_tq_Pi", "_tq_Pi_half", "_tq_centroids", "_tq_midpoints"),  # its rotations,
            *("_uq_kfull_buf", "_uq_vfull_buf", "_kv_scratch"),  # and its buffers
            *ROTARY_TABLES,
        }
    )
    placeholders = frozenset({"StageMissingLayer"})
    boundary = Boundary(
        ("vllm.config", "vllm.distributed", "vllm.platforms", "vllm.forward_context", "vllm.lora", "transformers")
    )

    def __init__(
        self, live: nn.Module, device: torch.device, config: Any, model_config: Any, skeleton: Skeleton
    ) -> None:
        from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

        self.engine_config = config
        self.model_config = model_config
        self.random_weights = config.load_config.load_format == "dummy"
        self.post_processing, self.padded = QuantizeMethodBase, VocabParallelEmbedding
        super().__init__(live, device, *skeleton)
        self._why_whole = why_whole(self.skeleton, self.boundary)
        finish_nothing_in(self.skeleton)
        self._angles: list[Any] = [module for module in live.modules() if hasattr(module, "cos_coef")]
        self.note_graphs(config)
        if config.cache_config.cache_dtype.startswith("fp8"):
            self.cache_scales = frozenset(
                f"_{name}{kind}" for name in ("k_scale", "v_scale") for kind in ("", "_float")
            )
        held = _expert_maps(live)
        self._experts = list(held.values())
        for name, places in held.items():
            self.skeleton.get_submodule(name).expert_map_manager = places

    def note_graphs(self, config: Any) -> None:
        """Notes what the engine that was started with `config` holds: graphs, and only memory of vLLM's own pool sleeps."""
        self.captures_graphs = self.device.type != "cpu" and not config.model_config.enforce_eager
        self.fixed_addresses = self.captures_graphs or bool(config.model_config.enable_sleep_mode)

    def checkpoint(self) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        """With what vLLM reads from other files (BGE-M3's heads, Ultravox's towers), under the names of the parameters: such a
        file may be no safetensors. Kimi-Audio's encoder lies in a subfolder, under names of its own. Empty where nothing tells
        the names."""
        sources: Any = getattr(self.skeleton, "secondary_weights", ())
        prefixes = tuple(source.prefix for source in sources if source.prefix)
        beside = {
            name: (tuple(parameter.shape), parameter.dtype)
            for name, parameter in self.skeleton.named_parameters()
            if name.startswith(prefixes)
        }
        for source in sources:
            if not source.prefix:
                place = getattr(source, "subfolder", None)
                held = checkpoint_headers(source.model_or_path, source.revision, place) if place else {}
                if not held:
                    return {}
                beside |= held
        return {**checkpoint_headers(self.model_config.model, self.model_config.revision), **beside}

    def finishers(self) -> Mapping[str, Callable[[nn.Module], None]]:
        """vLLM post-processes by quantisation methods first, attention layers after all of them, and then the model itself."""
        first = super().finishers()
        dtype = self.model_config.dtype

        def finish(name: str, module: nn.Module) -> None:
            if name in first:
                first[name](module)
            module.process_weights_after_loading(dtype)  # type: ignore[operator]

        deferred = {
            name: functools.partial(finish, name)
            for name, module in self.skeleton.named_modules()
            if _processes_itself_last(module)
        }
        return {**first, **deferred, **whole_finishers(self.skeleton)}

    def derive_in_place(self) -> None:
        """InternS1-Pro sums up its learned rotary embeddings in its first step, and never again."""
        with torch.no_grad():
            for rope in self._angles:
                if not rope.update_cache:
                    rope.cos_sin_cache.copy_(rope._compute_cos_sin_cache())

    def reads(self, module: nn.Module) -> tuple[str, ...]:
        return ("kv_b_proj",) if "kv_b_proj" in module._modules and _processes_itself_last(module) else ()

    def expert_places(self) -> str:
        maps = [places.expert_map for places in self._experts if places.expert_map is not None]
        if not maps:
            return ""
        together = torch.cat([each.reshape(-1) for each in maps]).cpu()  # one wait for a device, not one for each layer
        return f"{digest_bytes(bytes_view(together).numpy()):016x}"

    def unfinishable(self) -> str | None:
        if self.engine_config.parallel_config.enable_eplb:
            return (
                "expert load balancing (enable_eplb) moves experts while the engine runs, and vLLM's loader knows only the "
                "places where they began"
            )
        load = self.engine_config.load_config
        if load.load_format == "ipc_cache" and (load.model_loader_extra_config or {}).get("mode") != "copy":
            return (
                "its weights may lie in vLLM's weight cache, from which other engines are served, too (load format ipc_cache; "
                '--model-loader-extra-config \'{"mode": "copy"}\' gives it its own)'
            )
        if _prefetches():
            return (
                "its weights lie in the host's memory, from which vLLM fetches them layer by layer (offload_group_size)"
            )
        compiled = self.engine_config.compilation_config
        if self.device.type == "cpu" and compiled.mode and compiled.inductor_compile_config.get("max_autotune"):
            return f"{COMPILED_IN} (max_autotune in inductor_compile_config)"
        cache = self.engine_config.cache_config
        if cache.cache_dtype.startswith("fp8") and getattr(cache, "calculate_kv_scales", False):  # before 0.28
            return (
                "the scales of its KV cache are made of the weights that its first step computed with (calculate_kv_scales); the "
                "engine can be updated without"
            )
        if self._why_whole is not None:
            return self._why_whole
        for name, module in self.live.named_modules():
            if getattr(module, "dcp_q_replicate", False):
                return f"{name} gathers its derived weights over the ranks of a decode context"
            if hasattr(module, "sink_populated"):
                return f"{name} writes its sinks into the KV cache in its first step, and never again"
            if getattr(module, "_o_scale_float", None) is not None:
                return (
                    f"{name} quantises what it gives to the next layer, by that layer's scale as it was at first use "
                    "(fuse_attn_quant)"
                )
        return super().unfinishable()

    def read_rebuilt(
        self, module: nn.Module, parameter: str, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor | None:
        """Scales of an FP8 KV cache are read where the attention layer computes with them. A packed linear layer is multiplied
        with one-hot rows: each product is exact, so its weight comes out."""
        if parameter in KV_SCALES:
            return _kv_scale(module, parameter, shape, dtype)
        if parameter != "weight" or len(shape) != 2:
            return None
        if dtype == torch.int8:
            return _int8_weight(module, shape)
        compute = getattr(module, "cpu_linear", None)
        return None if compute is None else _products(lambda rows: compute(rows, module.weight, None), shape, dtype)

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        from vllm.config import set_current_vllm_config

        with (
            set_current_vllm_config(self.engine_config),
            default_dtype_here(self.model_config.dtype),
            torch.no_grad(),
        ):
            yield


def _expert_maps(model: nn.Module) -> dict[str, Any]:
    """What says which expert lies where, of each layer of experts by name. Before 0.27 vLLM has no such object, and nothing that
    could move an expert but load balancing."""
    held = {name: vars(module).get("expert_map_manager") for name, module in model.named_modules()}
    return {name: places for name, places in held.items() if places is not None}


KV_SCALES = ("k_scale", "v_scale", "q_scale")


def _kv_scale(module: Any, parameter: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
    from vllm.platforms import current_platform

    held, cache = module._buffers.get(f"_{parameter}"), getattr(module, "kv_cache_dtype", "")
    if not cache.startswith("fp8") or "per_token" in cache:
        return None  # vLLM computes with scales of its own, whatever the checkpoint brings
    if held is None or current_platform.is_fp8_fnuz():  # these are doubled
        return None
    return held.to(dtype).reshape(shape)  # type: ignore[no-any-return]


def _products(
    compute: Callable[[torch.Tensor], torch.Tensor], shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """What a linear layer makes of one-hot rows, as its weight lies in a checkpoint: (outputs, inputs)."""
    outputs, inputs = shape
    found = torch.empty(shape, dtype=dtype)
    for start in range(0, inputs, 1024):
        count = min(1024, inputs - start)
        probe = torch.zeros(count, inputs, dtype=dtype)
        probe[torch.arange(count), torch.arange(start, start + count)] = 1
        found[:, start : start + count] = compute(probe).view(count, outputs).t()
    return found


def _int8_weight(module: Any, shape: tuple[int, ...]) -> torch.Tensor | None:
    """The weight of a W8A8-int8 layer, which vLLM keeps packed, or in an object of oneDNN. A one-hot row is quantised
    without loss, so a product is the element times its scale, in the model's dtype.

    The rows are negative: oneDNN adds 128 to what it multiplies, and without VNNI sums two products in 16 bits, which +127
    overflows. bfloat16 has 8 bits, and an element 7: where a kernel rounds to it, the nearest integer is the element; where it
    cuts off, as vLLM's do without AVX512-BF16, the next one away from zero. Several rows tell which. None where neither fits.
    """
    try:
        from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUInt8ScaledMMLinearKernel
    except ImportError:
        return None
    kernel = getattr(getattr(module, "scheme", None), "kernel", None)
    if not isinstance(kernel, CPUInt8ScaledMMLinearKernel):
        return None
    if kernel.config.is_static_input_scheme or not kernel.config.input_symmetric:
        return None  # the scale of a quantised row would depend on the kernel that vLLM chose
    scale = module.weight_scale.float().reshape(-1, 1)
    steps = [
        _products(functools.partial(_negated, kernel, module, size), shape, torch.get_default_dtype()).float()
        / (size * scale)
        for size in (1.0, 1.25, 1.5)
    ]
    if not all(bool(each.isfinite().all()) for each in steps):
        return None
    for nearest in (torch.round, _away_from_zero):
        found, *others = [nearest(each).to(torch.int16) for each in steps]
        if all(torch.equal(found, each) for each in others):
            return found.to(torch.int8)
    return None


def _negated(kernel: Any, module: Any, size: float, rows: torch.Tensor) -> torch.Tensor:
    return -kernel.apply_weights(module, -size * rows, None)  # type: ignore[no-any-return]


def _away_from_zero(steps: torch.Tensor) -> torch.Tensor:
    return steps.sign() * (steps.abs() - 1 / 256).ceil()


def _processes_itself_last(module: nn.Module) -> bool:
    """Whether vLLM post-processes this module by its own method, after all others."""
    from vllm.model_executor.layers import attention

    if hasattr(attention, "is_deferred_attention_layer"):
        return bool(attention.is_deferred_attention_layer(module))
    from vllm.model_executor.model_loader import utils as loader

    # Before 0.28: what the loader itself looks for, of which 0.27 knows a base class.
    names = ("Attention", "MLAAttention", "AttentionLayerBase", "MMEncoderAttention")
    kinds = tuple(vars(loader)[name] for name in names if name in vars(loader))
    return isinstance(module, kinds) and hasattr(module, "process_weights_after_loading")


def skeleton_of(engine_config: Any, model_config: Any, prefix: str = "") -> Skeleton:
    """A second instance of the model's class, without memory for weights and without entries in the engine's own tables.
    `prefix`: as the engine gave it to the model's constructor."""
    from vllm.config import CompilationMode
    from vllm.model_executor.layers import rotary_embedding
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    config = copy.copy(engine_config)
    compilation = config.compilation_config = copy.copy(config.compilation_config)
    compilation.static_forward_context = {}
    compilation.static_all_moe_layers = []
    compilation.enabled_custom_ops = collections.Counter()
    compilation.disabled_custom_ops = collections.Counter()
    compilation.mode = CompilationMode.NONE

    def make() -> nn.Module:
        with _without_offloading():
            model: nn.Module = initialize_model(vllm_config=config, model_config=model_config, prefix=prefix)
        _load_at_once(model)
        return model.eval()

    return build_skeleton(make, set_default_torch_dtype(model_config.dtype), rotary_embedding._ROPE_DICT)


def _prefetches() -> bool:
    try:
        from vllm.model_executor.offloader import PrefetchOffloader, get_offloader
    except ImportError:
        return False
    return isinstance(get_offloader(), PrefetchOffloader)


@contextlib.contextmanager
def _without_offloading() -> Iterator[None]:
    """A second model has no weights that vLLM could move to the host's memory. The process's only offloader would try, and would
    count them among the first model's."""
    try:
        from vllm.model_executor.offloader import NoopOffloader, get_offloader, set_offloader
    except ImportError:
        yield
        return
    kept = get_offloader()
    if isinstance(kept, NoopOffloader):
        yield
        return
    set_offloader(NoopOffloader())
    try:
        yield
    finally:
        set_offloader(kept)


def _load_at_once(model: nn.Module) -> None:
    """Has parameters take weights as they come. Where vLLM quantises while it loads, it would keep them until a layer has all of
    its weights, and then quantise the layer."""
    for parameter in model.parameters():
        loader: Any = getattr(parameter, "weight_loader", None)
        while getattr(loader, "__name__", "") == "online_process_loader":
            loader = loader.__wrapped__
            parameter.weight_loader = loader  # type: ignore[attr-defined]
