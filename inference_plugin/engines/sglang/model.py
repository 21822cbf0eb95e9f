"""A model of one SGLang rank, and its skeleton."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from inference_plugin.engines.live_model import ROTARY_TABLES, LiveModel
from inference_plugin.engines.sglang.latent_attention import (
    KV_PROJECTION,
    derive_nothing,
    latent_finishers,
    projections_kept,
    why_underivable,
)
from inference_plugin.engines.sglang.layouts import captures_graphs, lends_addresses, why_copied
from inference_plugin.engines.sglang.pipeline import stages_apart
from inference_plugin.engines.skeleton import Skeleton, build_skeleton
from inference_plugin.install.graph import Boundary
from inference_plugin.wire.checkpoint_headers import checkpoint_headers
from inference_plugin.wire.digest import digest_bytes
from inference_plugin.wire.tensors import bytes_view

__all__ = ["SglangModel", "skeleton_of"]


class SglangModel(LiveModel):
    """`install.contract.EngineModel` of one rank."""

    reads_finished = False
    post_processing = object
    """SGLang asks every `quant_method`: those of some kernels for MXFP4 have no class in common with the others."""
    runtime_state = frozenset(
        {
            *("last_hc_hidden_states", "audio_past_key_values", "_dispatch_output"),  # of the last step
            *("_eager_prefetch_buffer", "_masked_m_cache", "_shared_topk_ids", "intermediate_state_indices"),
            *("local_expert_mapping", "expert_mask_gpu"),  # of the ranks' experts
            "_deepstack_merger_list",  # of a runner of CUDA graphs: the model's, or in Qwen3-Omni one that no load fills
            *ROTARY_TABLES,
        }
    )
    derived_caches = frozenset(
        {
            "_interpolated_pos_emb_cache",  # of MoonViT: positions for each size of an image
            *("cache_position_embedding", "cache_position_count"),  # the same, of PaddleOCR-VL
        }
    )
    boundary = Boundary(
        ("sglang.srt.configs", "sglang.srt.server_args", "sglang.srt.distributed", "sglang.srt.lora", "transformers")
    )

    def __init__(self, scheduler: Any, runner: Any, live: nn.Module, skeleton: Skeleton) -> None:
        """`runner`: SGLang's `ModelRunner` that computes with `live`."""
        from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

        self.padded = VocabParallelEmbedding
        super().__init__(live, next(live.parameters()).device, *skeleton)
        self._config = runner.model_config
        # SGLang's update from a directory replaces it, also where it fails.
        self._started_from = self._config.model_path
        self._attention = getattr(runner, "attn_backend", None)
        self._scheduler = scheduler
        self.random_weights = runner.load_config.load_format == "dummy"
        self._arguments = runner.server_args
        if getattr(runner.kv_cache_dtype, "itemsize", 2) == 1:
            self.cache_scales = frozenset({"k_scale", "v_scale", "k_scale_float", "v_scale_float"})
        self._folding: list[Any] = [module for module in live.modules() if hasattr(module, "fuse_scale")]
        self._angles: list[Any] = [module for module in live.modules() if hasattr(module, "cos_coef")]
        on_gpu = self.device.type != "cpu"
        self.captures_graphs = on_gpu and captures_graphs()
        sleeps = scheduler.weight_updater.memory_saver_adapter.enabled  # only memory of its own sleeps
        self.fixed_addresses = self.captures_graphs or sleeps or (on_gpu and lends_addresses(self._arguments))

    def checkpoint(self) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        return checkpoint_headers(self._started_from, self._config.revision)

    def finishers(self) -> Mapping[str, Callable[[nn.Module], None]]:
        """SGLang derives weights at the end of a load, and post-processes by quantisation methods after that."""
        last = super().finishers()

        def finish(name: str, module: nn.Module) -> None:
            derived[name](module)
            if name in last:
                last[name](module)

        derived = latent_finishers(self.skeleton)
        return {**last, **{name: functools.partial(finish, name) for name in derived}}

    def load_weights(self, model: nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]) -> object:
        vars(model).pop("_cached_params_dict", None)  # parameters that an earlier load found, in memory of its own
        with projections_kept(model):
            return super().load_weights(model, tensors)

    def derive_in_place(self) -> None:
        """The routers of Gemma 4 fold a weight into a buffer in their first step, and InternS1-Pro sums up its learned rotary
        embeddings; neither does so again."""
        with torch.no_grad():
            for router in self._folding:
                if router._scale_fused:
                    router.fuse_scale()
            for rope in self._angles:
                if rope.update_buffer:
                    rope.cos_sin_cache.copy_(rope._compute_cos_sin_cache())

    def reads(self, module: nn.Module) -> tuple[str, ...]:
        return (KV_PROJECTION,) if isinstance(getattr(module, KV_PROJECTION, None), nn.Module) else ()

    def expert_places(self) -> str:
        """Which expert is in which place, of all ranks; SGLang's loader puts experts there."""
        from sglang.srt.eplb.expert_location import get_global_expert_location_metadata

        places = get_global_expert_location_metadata()
        if places is None:
            return ""
        return f"{digest_bytes(bytes_view(places.physical_to_logical_map_cpu.contiguous()).numpy()):016x}"

    def unfinishable(self) -> str | None:
        from sglang.srt.model_executor.model_runner_components import weight_updater

        for option in ("enable_eplb", "elastic_ep_backend"):
            if getattr(self._arguments, option):
                return f"SGLang moves experts while it runs ({option}), in tensors that it has collected as it loaded the model"
        ask = weight_updater._unsupported_derived_weight_cache_error
        known = inspect.signature(ask).parameters  # none before 0.5.21
        told: str | None = ask(self.live) if known else ask()
        return (
            told
            or why_underivable(self.live)
            or why_copied(self._attention, fixed_addresses=self.fixed_addresses)
            or super().unfinishable()
        )

    def why_stale(self) -> str | None:
        for option in (
            "hicache_storage_backend",
            "enable_lmcache",
            "enable_flexkv",
            "enable_unified_cache_external_linker",
        ):
            if value := getattr(self._arguments, option, None):
                return f"SGLang's cache outside it ({option}={value}) keeps what the old weights computed"
        if getattr(self._scheduler, "enable_hicache_storage", False):
            return "SGLang's cache outside it, which it was told to attach while it ran, keeps what the old weights computed"
        return None

    def lost_by_a_reset(self, spared: Collection[str]) -> list[str]:
        """Buffers that SGLang's `reset_tensors` would fill with random numbers, and that no checkpoint holds. `spared`: parts
        of names that the reset leaves out."""
        from sglang.srt.utils.weight_checker import _is_non_persistent_buffer_name

        names = [
            f"{path}.{own}".lstrip(".")
            for path, module in self.live.named_modules()
            for own in sorted(module._non_persistent_buffers_set)
        ]
        return [
            name for name in names if not (_is_non_persistent_buffer_name(name) or any(part in name for part in spared))
        ]


def skeleton_of(runner: Any) -> Skeleton:
    """A second instance of the class of the runner's model, without memory for weights."""
    from sglang.srt.layers.rotary_embedding import factory
    from sglang.srt.model_loader.loader import _get_quantization_config, _initialize_model
    from sglang.srt.model_loader.utils import set_default_torch_dtype

    config, load_config = runner.model_config, runner.load_config

    def make() -> nn.Module:
        with stages_apart(), _parameters_as_built():
            model: nn.Module = _initialize_model(config, load_config, _get_quantization_config(config, load_config))
        derive_nothing(model)
        return model.eval()

    return build_skeleton(make, set_default_torch_dtype(config.dtype), factory._ROPE_DICT)


@contextlib.contextmanager
def _parameters_as_built() -> Iterator[None]:
    """Once it is built, SGLang's class for models of transformers replaces what is on meta by parameters with memory. Of a second
    model that is everything, and the functions that load its parameters would be lost."""
    base: Any = getattr(sys.modules.get("sglang.srt.models.transformers"), "TransformersBase", None)
    if (replace := getattr(base, "_init_parameters", None)) is None:
        yield  # SGLang can't import that class here, or has another; it may serve its own classes all the same
        return
    base._init_parameters = lambda self, module: None
    try:
        yield
    finally:
        base._init_parameters = replace
