"""Runs a program of TRL's asynchronous trainers on a CPU: `python trl_async_runner.py OTHER_SITE_PACKAGES PROGRAM [arguments]`.

TRL's rollout worker needs aiohttp, which `.venvs/trl` lacks: what is missing is lent from the other environment.
Replaced are FlashAttention's kernel, which needs a GPU, by the same attention in plain torch; the question which GPU it is, which
TRL asks for a figure of its log; and the question whether vLLM is installed here: TRL's rollout worker speaks HTTP with a server.
"""

from __future__ import annotations

import runpy
import sys
from types import SimpleNamespace
from typing import Any

import torch


def flash_attn_varlen_func(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    *_: int,
    softmax_scale: float,
    **__: Any,
) -> torch.Tensor:
    """Causal attention of segments that end where their keys end. `query`: (tokens, heads, size); `key`, `value`: fewer heads."""
    repeat = query.shape[1] // key.shape[1]
    parts = []
    for i in range(len(cu_q) - 1):
        q = query[cu_q[i] : cu_q[i + 1]].transpose(0, 1)
        k, v = (x[cu_k[i] : cu_k[i + 1]].repeat_interleave(repeat, dim=1).transpose(0, 1) for x in (key, value))
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=softmax_scale)
        parts.append(attended.transpose(0, 1))
    return torch.cat(parts)


def main() -> None:
    sys.path.append(sys.argv[1])
    from trl.experimental.async_grpo import async_grpo_trainer, async_rollout_worker, packing

    async_rollout_worker.is_vllm_available = lambda: True
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func)
    sys.argv[:] = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
