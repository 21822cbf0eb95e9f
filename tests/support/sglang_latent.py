"""The smallest stand-in for what SGLang lacks on a CPU to serve DeepSeek's attention: a choice of its form for `torch_native`.

Without it SGLang takes the choice that fits its Triton kernels: prompts by multi-head attention, over keys and values that
the cache of `torch_native` does not hold. The form chosen here, for prompts and for decoding, is
SGLang's own with absorbed weights.
"""

from __future__ import annotations

from typing import Any

__all__ = ["give"]


def give() -> None:
    """Registers it in this process."""
    from sglang.srt.models.deepseek_common import attention_backend_handler as handler

    def absorbed(attention: Any, batch: Any) -> Any:
        return handler._dispatch_mla_subtype(attention, batch)

    handler.AttentionBackendRegistry.register("torch_native", absorbed)
