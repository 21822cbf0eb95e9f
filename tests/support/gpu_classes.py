"""vLLM's classes of models for GPUs, on a CPU: they are made, loaded, post-processed and updated there. They compute nothing.

Of some models vLLM has classes for GPUs only; of DeepSeek-V3.2 and -V4 it has others for a CPU. With
`WEIGHTWIRE_TEST_GPU_CLASSES` importing this module has vLLM take those for NVIDIA's GPUs of the package that it names (a key of
`CLASSES`). What is replaced for that is no part of a model's weights, of how they are loaded, or of what vLLM makes of them
afterwards:

- which class and which backend of attention vLLM chooses, and which sizes of blocks of its cache that backend takes;
- packages of kernels that this environment lacks: they are empty while vLLM imports modules that are written for them;
- streams and events of CUDA, and checks for a GPU in constructors.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
import types
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any
from unittest import mock

import torch

import tests.support.torchvision_here  # noqa: F401 -- some import it

__all__ = ["VARIABLE"]

VARIABLE = "WEIGHTWIRE_TEST_GPU_CLASSES"
KERNELS = ("cuda", "cutlass", "quack", "tilelang")
"""Packages that are empty."""


class _Empty(types.ModuleType):
    __path__: Sequence[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return mock.MagicMock()


class _Packages(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in KERNELS else None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None: ...


@contextlib.contextmanager
def _packages() -> Iterator[None]:
    finder = _Packages()
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name, module in sys.modules.items() if isinstance(module, _Empty)]:
            del sys.modules[name]


class _OfCuda:
    """A stream or an event that nothing runs on."""

    __module__ = "torch.cuda"

    def __init__(self, *_: Any, **__: Any) -> None: ...


def give(package: str) -> None:
    """Has vLLM take the classes of `vllm.models.{package}.nvidia`."""
    from vllm.model_executor.models import registry
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.mla import cpu_mla, flashmla_sparse, index_group, indexer
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.worker import workspace
    from vllm.v1.worker.cpu_worker import CPUWorker

    # vLLM looks at a model's class in an interpreter of its own, which would be without this.
    registry._run_in_subprocess = lambda look: look()  # type: ignore[attr-defined]
    torch.cuda.Stream = torch.cuda.Event = _OfCuda  # type: ignore[assignment, misc]
    index_group._create_side_stream = lambda device: _OfCuda()
    index_group._create_event = _OfCuda
    if CLASSES[package]:
        _take_classes(package)
    if package == "marlin":
        _take_marlin()
    platform, choose, start = type(current_platform), current_platform.get_attn_backend_cls, CPUWorker.init_device

    def chosen(cls: Any, selected_backend: Any, attn_selector_config: Any, **more: Any) -> str:
        if attn_selector_config.use_sparse:
            return AttentionBackendEnum.FLASHMLA_SPARSE.get_path()
        return str(choose(selected_backend, attn_selector_config, **more))

    @functools.wraps(start)
    def started(self: Any) -> None:
        workspace.init_workspace_manager(torch.device("cpu"))
        start(self)

    platform.get_attn_backend_cls = classmethod(chosen)
    CPUWorker.init_device = started
    for backend in (flashmla_sparse.FlashMLASparseBackend, indexer.DeepseekV32IndexerBackend, cpu_mla.CPUMLABackend):
        backend.get_supported_kernel_block_sizes = staticmethod(_any_size)
    cpu_mla.CPUMLABackend.supports_block_size = classmethod(lambda cls, block_size: True)


def _take_classes(package: str) -> None:
    with _packages():
        chooses = importlib.import_module(f"vllm.models.{package}")
        nvidia = importlib.import_module(f"vllm.models.{package}.nvidia.model")
        if package == "kimi_k3":
            os.environ["VLLM_KIMI_K3_GEMM_AR"] = "0"
            sys.modules[f"vllm.models.{package}.nvidia.kda"].resolve_kda_decode_backend = lambda *_: "native"
    for name, of_gpus in CLASSES[package].items():
        part = nvidia if hasattr(nvidia, of_gpus) else importlib.import_module(f"vllm.models.{package}.nvidia.vl_model")
        setattr(chooses, name, getattr(part, of_gpus))
    if package.startswith("deepseek_v4"):
        sys.modules[f"vllm.models.{package}.nvidia.flashmla"].compute_fp8_einsum_recipe = lambda *_: (
            (1, 128, 128),
            False,
        )
    if package == "deepseek_v41":
        importlib.import_module("vllm.v1.worker.utils").select_common_block_size = lambda size, *_: size
    if package == "qwen4_exp":
        sys.modules[f"vllm.models.{package}.nvidia.qsa"].is_flash_attn_varlen_func_available = lambda: True


def _take_marlin() -> None:
    """Experts in four bits, as the kernels named Marlin lay them out. Within a tile the order is the tests'."""
    from vllm import _custom_ops
    from vllm.model_executor.layers.fused_moe.experts.marlin_moe import MarlinExperts
    from vllm.model_executor.layers.fused_moe.oracle.int_wna16 import WNA16MoEBackend
    from vllm.model_executor.layers.quantization import auto_awq, auto_gptq
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe_wna16,
    )

    for method in (auto_awq, auto_gptq, compressed_tensors_moe_wna16):
        method.select_wna16_moe_backend = lambda *_, **__: (WNA16MoEBackend.MARLIN, MarlinExperts)  # type: ignore[assignment]
    _custom_ops.gptq_marlin_moe_repack = _custom_ops.awq_marlin_moe_repack = _repacked  # type: ignore[assignment]


def _repacked(weights: torch.Tensor, size_k: int, size_n: int, num_bits: int, **_: Any) -> torch.Tensor:
    """In the kernel's shape."""
    return weights.reshape(weights.shape[0], size_k // 16, size_n * (num_bits // 2)).clone()


def _any_size(kv_cache_spec: Any = None) -> list[Any]:
    from vllm.v1.attention.backend import MultipleOf

    return [MultipleOf(1)]


CLASSES: dict[str, dict[str, str]] = {
    "deepseek_v32": {
        "DeepseekV32ForCausalLM": "DeepseekV32ForCausalLM",
        "GlmMoeDsaForCausalLM": "DeepseekV32ForCausalLM",
    },
    "deepseek_v4": {name: name for name in ("DeepseekV4ForCausalLM", "DeepseekV4ForConditionalGeneration")},
    "deepseek_v41": {"DeepseekV41ForCausalLM": "DeepseekV41ForCausalLM"},
    "kimi_k3": {"KimiLinearForCausalLM": "KimiLinearForCausalLM"},
    "hy_v4": {"HYV4ForCausalLM": "HYV4ForCausalLM"},
    "minimax_m3": {name: name for name in ("MiniMaxM3SparseForCausalLM", "MiniMaxM3SparseForConditionalGeneration")},
    "inkling": {"InklingForCausalLM": "InklingForCausalLM"},
    "own": {},
    "marlin": {},
    "qwen4_exp": {name: name for name in ("Qwen4ExpForCausalLM", "Qwen4ExpForConditionalGeneration")},
}
"""By package: names under which vLLM looks for classes, and the names of those for GPUs. "own": vLLM has one class, whose kernels
and sizes of blocks no CPU has. "marlin": it takes these kernels for experts in four bits."""

if asked := os.environ.get(VARIABLE):
    give(asked)
