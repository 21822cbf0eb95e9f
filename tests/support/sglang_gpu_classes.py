"""SGLang's models that need a GPU, on a CPU: they are made, loaded, post-processed and updated there. They compute nothing.

Importing this module, before SGLang's models are, brings what `sglang_stand_ins` has, and makes these models start. What is
replaced for that is no part of a model's weights, of how they are loaded, or of what SGLang makes of them afterwards:

- the backend of attention, and questions about the GPU;
- whether SGLang takes the code for CUDA: where it loads and derives weights it does.
"""

from __future__ import annotations

import re
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch


class _ScalarType(str):
    """A type of weights, by its name, such as "uint4b8"."""

    __slots__ = ()

    @property
    def size_bits(self) -> int:
        found = re.search(r"\d+", self)
        assert found is not None, self
        return int(found[0])


class _ScalarTypes:
    def __getattr__(self, name: str) -> _ScalarType:
        return _ScalarType(name)


types: Any = ModuleType("sgl_kernel.scalar_type")
types.ScalarType, types.scalar_types = _ScalarType, _ScalarTypes()
sys.modules[types.__name__] = types

import tests.support.sglang_stand_ins  # noqa: E402, F401 -- gives them

HOPPER = (9, 0)


class _NoAttention:
    """A backend that attends to nothing."""

    def __init__(self, runner: Any) -> None:
        self.token_to_kv_pool = runner.token_to_kv_pool


class _Platform:
    """SGLang's own, but no CPU."""

    def __init__(self, platform: Any) -> None:
        self._platform = platform

    def is_cpu(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._platform, name)


def give() -> None:
    from sglang.srt.layers.attention import attention_registry
    from sglang.srt.layers.attention.dsa import dsa_indexer
    from sglang.srt.mem_cache import kv_cache_configurator
    from sglang.srt.models.deepseek_common import deepseek_weight_loader

    torch.cuda.get_device_capability = lambda *_: HOPPER  # type: ignore[assignment]
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(multi_processor_count=132)  # type: ignore[assignment]
    attention_registry.ATTENTION_BACKENDS["dsa"] = _NoAttention
    kv_cache_configurator.current_platform = _Platform(kv_cache_configurator.current_platform)
    dsa_indexer._is_cuda = deepseek_weight_loader._is_cuda = True
    dsa_indexer.resolve_num_sms = lambda *_: 132


def give_marlin() -> None:
    """Weights of four bits, as the kernels named Marlin lay them out."""
    from sglang.srt.hardware_backend.gpu.quantization import awq_kernels, gptq_kernels
    from sglang.srt.layers.quantization import marlin_utils, moe_wna16
    from sglang.srt.layers.quantization.awq import awq
    from sglang.srt.layers.quantization.compressed_tensors import schemes

    packed: Any = sys.modules[schemes.CompressedTensorsWNA16.__module__]
    packed.gptq_marlin_repack = gptq_kernels.gptq_marlin_repack = awq_kernels.awq_marlin_repack = _repacked
    awq_kernels.awq_marlin_moe_repack = lambda weights, perm, *sizes, **named: torch.stack(
        [_repacked(weight, None, *sizes, **named) for weight in weights]
    )
    marlin_utils.get_device_capability = moe_wna16.get_device_capability = lambda *_: HOPPER
    awq._is_cuda = True


def _repacked(
    weight: torch.Tensor, perm: torch.Tensor | None = None, size_k: int = 0, size_n: int = 0, num_bits: int = 4
) -> torch.Tensor:
    """In the kernel's shape, and with the rows in the order of `perm`; within a tile the kernel has another order."""
    packed = 32 // num_bits
    if perm is not None and perm.numel():  # eight rows of four bits are one of 32
        shifts = torch.arange(0, 32, num_bits, dtype=torch.int32)[None, :, None]
        rows = ((weight[:, None, :] >> shifts) & (2**num_bits - 1)).reshape(size_k, size_n)[perm.long()]
        weight = (rows.reshape(-1, packed, size_n) << shifts).sum(1, dtype=torch.int32)
    return weight.reshape(size_k // 16, size_n * 16 // packed).clone()


give()
give_marlin()
