"""Run by `test_vllm_gpu_parts` in a process of its own: parts of vLLM that only a GPU's engine has, on the CPU's memory. JSON on
the last line."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", VLLM_CPU_KVCACHE_SPACE="1", VLLM_PLUGINS="", VLLM_LOGGING_LEVEL="ERROR")

import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel, parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention.static_sink_attention import StaticSinkAttention
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, RoutingMethodType
from vllm.model_executor.layers.fused_moe.experts.cutlass_moe import CutlassExpertsFp8
from vllm.model_executor.layers.fused_moe.oracle.fp8 import (
    Fp8MoeBackend,
    make_fp8_moe_kernel,
    make_fp8_moe_quant_config,
)
from vllm.model_executor.offloader import PrefetchOffloader, UVAOffloader, get_offloader, set_offloader
from vllm.model_executor.utils import replace_parameter
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator
from vllm.v1.worker.gpu.spec_decode.gemma4.speculator import Gemma4Speculator
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator
from vllm.v1.worker.worker_base import WorkerBase

from inference_plugin.engines.live_model import LiveModel
from inference_plugin.engines.operations import RankReply
from inference_plugin.engines.skeleton import build_skeleton
from inference_plugin.engines.vllm.draft import draft_of
from inference_plugin.engines.vllm.model import VllmModel, skeleton_of
from inference_plugin.engines.vllm.worker import hook_worker
from inference_plugin.install.installer import ModelInstaller
from inference_plugin.wire.codec import decode_as
from tests.install.installing import update
from tests.install.vllm_skeletons import build_real
from tests.support.models import make_llama
from tests.support.plain_engine import manifest_of

EXPERTS, HIDDEN, INTERMEDIATE = 4, 32, 16


# --- a kernel for experts in FP8 with scales for whole tensors, as vLLM makes it after a load ---------------------------------


class Method:
    """The steps of vLLM's `Fp8MoEMethod` that need no kernel of a GPU."""

    def __init__(self) -> None:
        self.moe = FusedMoEConfig(
            num_experts=EXPERTS,
            experts_per_token=2,
            hidden_dim=HIDDEN,
            intermediate_size=INTERMEDIATE,
            num_local_experts=EXPERTS,
            num_logical_experts=EXPERTS,
            activation=MoEActivation.SILU,
            device="cpu",
            routing_method=RoutingMethodType.Default,
            moe_parallel_config=FusedMoEParallelConfig.make_no_parallel(),
            in_dtype=torch.bfloat16,
        )
        self.moe_quant_config: Any = None
        self.moe_kernel: Any = None

    def process_weights_after_loading(self, layer: Any) -> None:
        replace_parameter(layer, "w13_weight_scale", layer.w13_weight_scale.max(1).values)
        self.moe_quant_config = make_fp8_moe_quant_config(
            fp8_backend=Fp8MoeBackend.FLASHINFER_CUTLASS,
            w1_scale=layer.w13_weight_scale,
            w2_scale=layer.w2_weight_scale,
            a1_scale=layer.w13_input_scale,
            a2_scale=layer.w2_input_scale,
            layer=layer,
        )
        self.moe_kernel = make_fp8_moe_kernel(
            self.moe_quant_config, self.moe, CutlassExpertsFp8, Fp8MoeBackend.VLLM_CUTLASS
        )


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant_method = Method()
        for name, tensor in scales(-1).items():
            self.register_parameter(name, nn.Parameter(torch.empty_like(tensor), requires_grad=False))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = Experts()

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            self.experts.get_parameter(name).data.copy_(tensor)

    def loaded(self, seed: int) -> Model:
        self.load_weights(scales(seed).items())
        self.experts.quant_method.process_weights_after_loading(self.experts)
        return self

    def read_by_a_step(self) -> dict[str, torch.Tensor]:
        kernel = self.experts.quant_method.moe_kernel.fused_experts
        config = kernel.quant_config
        return {
            "ab_strides1": kernel.ab_strides1, "ab_strides2": kernel.ab_strides2, "c_strides1": kernel.c_strides1,
            "w1_scale": config.w1_scale, "w2_scale": config.w2_scale, "a1_gscale": config.a1_gscale,
            "a2_gscale": config.a2_gscale, "g1_alphas": config.g1_alphas, "g2_alphas": config.g2_alphas,
        }  # fmt: skip


def scales(seed: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    shapes = {"w13_weight_scale": (EXPERTS, 2), "w2_weight_scale": (EXPERTS,)}
    shapes |= {"w13_input_scale": (1,), "w2_input_scale": (1,)}
    return {name: torch.rand(shape, generator=random) + 1 for name, shape in shapes.items()}


class WithGraphs(LiveModel):
    post_processing = Method
    fixed_addresses = captures_graphs = True
    boundary, runtime_state = VllmModel.boundary, VllmModel.runtime_state

    def __init__(self, config: VllmConfig) -> None:
        self.config = config
        skeleton = build_skeleton(Model, torch.no_grad())
        super().__init__(Model().loaded(0), torch.device("cpu"), *skeleton)

    def free_bytes(self) -> int:
        return 1 << 40

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        with set_current_vllm_config(self.config), torch.no_grad():
            yield


def stale_after_updates(config: VllmConfig) -> list[str]:
    """What a graph that was captured before would read otherwise than a fresh engine's."""
    engine = WithGraphs(config)
    graph, manifest, wrong = engine.live.read_by_a_step(), manifest_of(scales(0)), set[str]()  # type: ignore[operator]
    installer = ModelInstaller(engine)
    installer.open(manifest, "copy", partial=False)
    for seed in (1, 2, 0, 3):
        update(installer, manifest, scales(seed))
        fresh = Model().loaded(seed).read_by_a_step()
        live = engine.live.read_by_a_step()  # type: ignore[operator]
        for name, tensor in graph.items():
            if live[name].data_ptr() != tensor.data_ptr() or not torch.equal(tensor, fresh[name]):
                wrong.add(name)
    return sorted(wrong)


# --- the second model ---------------------------------------------------------------------------------------------------------


def beside_an_offloader(config: VllmConfig, offloader: Any) -> dict[str, Any]:
    """A second model where vLLM moves weights to the host's memory: whether the offloader stays, and why updates are refused."""
    set_offloader(offloader)
    try:
        skeleton = skeleton_of(config, config.model_config)
        kept = get_offloader() is offloader
        live = VllmModel(build_real(config), torch.device("cpu"), config, config.model_config, skeleton)
        why = live.unfinishable()
    finally:
        set_offloader(None)
    return {"kept": kept, "refused": why}


def prefetching() -> Any:
    offloader = object.__new__(PrefetchOffloader)  # its constructor makes a stream
    offloader.module_offloaders = [object()]  # type: ignore[list-item]
    offloader.wrap_modules = lambda generator, prefix="": list(generator)  # type: ignore[method-assign, assignment]
    return offloader


def fused_with_the_next_layers_scale(config: VllmConfig) -> str | None:
    """Why a model is refused of which FlashInfer's attention has taken the next layer's scale as a number."""
    live = build_real(config)
    attention = next(module for module in live.modules() if hasattr(module, "_o_scale_float"))
    attention._o_scale_float = 0.5  # type: ignore[assignment]
    skeleton = skeleton_of(config, config.model_config)
    return VllmModel(live, torch.device("cpu"), config, config.model_config, skeleton).unfinishable()


def with_sinks_in_the_cache(config: VllmConfig) -> str | None:
    """Why a model is refused of which vLLM has written a part of the weights into the KV cache."""
    live = build_real(config)
    with set_current_vllm_config(config):
        live.sinks = StaticSinkAttention(4, 32, 1.0, sink_len=16, cache_config=config.cache_config, prefix="sinks")
    skeleton = skeleton_of(config, config.model_config)
    return VllmModel(live, torch.device("cpu"), config, config.model_config, skeleton).unfinishable()


def in_a_shared_cache(config: VllmConfig) -> list[str | None]:
    """Why a model is refused that is served from vLLM's weight cache, for each mode of that."""
    live, skeleton, load = build_real(config), skeleton_of(config, config.model_config), config.load_config
    model = VllmModel(live, torch.device("cpu"), config, config.model_config, skeleton)
    found, before = [], (load.load_format, load.model_loader_extra_config)
    for extra in ({}, {"mode": "zero_copy"}, {"mode": "copy"}):
        load.load_format, load.model_loader_extra_config = "ipc_cache", extra
        found.append(model.unfinishable())
    load.load_format, load.model_loader_extra_config = before
    return found


# --- drafts -------------------------------------------------------------------------------------------------------------------


def drafts(config: VllmConfig) -> dict[str, str]:
    """What becomes of the draft model of each speculator of vLLM's second model runner."""
    speculative = config.speculative_config
    served, found = build_real(config), {}
    draft_config = speculative.apply_draft_overrides(config)
    for kind in (StandaloneARSpeculator, EagleSpeculator, Gemma4Speculator):
        speculator: Any = object.__new__(kind)
        speculator.speculative_config, speculator.vllm_config = speculative, config
        speculator._draft_vllm_config = draft_config
        speculator.model = build_real(config)
        runner = SimpleNamespace(
            speculator=speculator,
            get_model=lambda: served,
            get_draft_model=lambda speculator=speculator: speculator.model,
        )
        worker = SimpleNamespace(model_runner=runner, vllm_config=config, device="cpu")
        draft: Any = draft_of(worker, served)
        names = sorted(dict(getattr(draft, "skeleton", nn.Module()).named_parameters()))
        same = names == sorted(dict(speculator.model.named_parameters()))
        found[kind.__name__] = getattr(draft, "why", "") or f"a draft, complete: {same}"
    return found


# --- ranks --------------------------------------------------------------------------------------------------------------------


def ranks_with_context_parallelism(config: VllmConfig) -> list[list[int]]:
    """The rank of each worker, and its number of ranks, where two share the tokens of prompts."""
    hook_worker()
    served, found = build_real(config), []
    for rank in range(2):
        runner = SimpleNamespace(get_model=lambda: served, get_draft_model=lambda: None)
        worker = SimpleNamespace(model_runner=runner, vllm_config=config, device="cpu")
        group, parallel_state._PCP = parallel_state._PCP, SimpleNamespace(rank_in_group=rank, world_size=2)
        try:
            reply = decode_as(WorkerBase.weightwire_start(worker, "replica"), RankReply)
        finally:
            parallel_state._PCP = group
        assert reply.card is not None, reply
        found.append([reply.card.rank, worker.weightwire_runtime.model.ranks])
        WorkerBase.weightwire_stop(worker)
    return found


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["WEIGHTWIRE_RUNTIME_DIR"] = f"{scratch}/runtime"
        checkpoint = make_llama(Path(scratch) / "llama", seed=1)
        args = EngineArgs(
            model=str(checkpoint),
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=64,
            speculative_config={"method": "draft_model", "model": str(checkpoint), "num_speculative_tokens": 2},
        )
        config = args.create_engine_config()
        with set_current_vllm_config(config):
            init_distributed_environment(1, 0, f"file://{scratch}/store", 0, "gloo")
            initialize_model_parallel(1, 1)
        uva = UVAOffloader(cpu_offload_max_bytes=1 << 40)
        results = {
            "stale": stale_after_updates(config),
            "uva": beside_an_offloader(config, uva),
            "counted by uva": uva.cpu_offload_bytes,
            "prefetch": beside_an_offloader(config, prefetching()),
            "fused": fused_with_the_next_layers_scale(config),
            "sinks": with_sinks_in_the_cache(config),
            "shared cache": in_a_shared_cache(config),
            "drafts": drafts(config),
            "ranks": ranks_with_context_parallelism(config),
        }
    sys.stdout.write("\n" + json.dumps(results) + "\n")


if __name__ == "__main__":
    main()
