"""Greedy tokens by plain ``transformers``: the reference that no engine has touched."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch


def greedy_tokens(directory: str | Path, prompt_ids: Sequence[int], max_tokens: int = 16) -> list[int]:
    """The ``max_tokens`` tokens after ``prompt_ids``, computed in float32, not stopping at an end token."""
    return greedy_batch(directory, [prompt_ids], max_tokens)[0]


def greedy_batch(directory: str | Path, prompts: Sequence[Sequence[int]], max_tokens: int = 16) -> list[list[int]]:
    """The same for several prompts, each computed on its own; the checkpoint is loaded once."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    return [continued(model, prompt, max_tokens) for prompt in prompts]


@torch.inference_mode()
def continued(model: torch.nn.Module, prompt_ids: Sequence[int], max_tokens: int) -> list[int]:
    tokens: list[int] = []
    cache = None
    fresh = torch.tensor([list(prompt_ids)])
    for _ in range(max_tokens):
        output = model(input_ids=fresh, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        tokens.append(int(output.logits[0, -1].argmax()))
        fresh = torch.tensor([tokens[-1:]])
    return tokens
