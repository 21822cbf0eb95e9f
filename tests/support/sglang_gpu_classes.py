"""SGLang's models that need a GPU, on a CPU: they are made, loaded, post-processed and updated there. They compute nothing.

Importing this module, before SGLang's models are, brings what `sglang_stand_ins` has, and makes these models start. What is
replaced for that is no part of a model's weights, of how they are loaded, or of what SGLang makes of them afterwards:

- the backend of attention, and questions about the GPU;
- whether SGLang takes the code for CUDA: where it loads and derives weights it does.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

import tests.support.sglang_stand_ins  # noqa: F401 -- gives them

HOPPER = (9, 0)


class _NoAttention:
    """A backend that attends to nothing."""

    def __init__(self, runner: Any) -> None:
        self.token_to_kv_pool = runner.token_to_kv_pool


def give() -> None:
    from sglang.srt.layers.attention import attention_registry
    from sglang.srt.layers.attention.dsa import dsa_indexer
    from sglang.srt.layers.rotary_embedding import factory
    from sglang.srt.models.deepseek_common import deepseek_weight_loader

    torch.cuda.get_device_capability = lambda *_: HOPPER  # type: ignore[assignment]
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(multi_processor_count=132)  # type: ignore[assignment]
    attention_registry.ATTENTION_BACKENDS["dsa"] = _NoAttention
    dsa_indexer._is_cuda = deepseek_weight_loader._is_cuda = True
    factory.get_rope_cpu = lambda *arguments: factory.get_rope(*arguments[:-1])  # without the device
    dsa_indexer.resolve_num_sms = lambda *_: 132


give()
