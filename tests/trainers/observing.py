"""What the training ranks of these tests share: small models, a real step, and what a source shows of itself.

A worker is run by `torchrun` as `worker.py OUT_DIRECTORY`. It takes every case in turn and leaves what it saw in that
directory; a case is a function that returns what `observe` does, or a mapping of its own. The test beside it knows what
each must be (`launching.py`).
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode

from inference_plugin.wire.errors import WeightwireError
from tests.support.leaving import leave_process_groups
from trainer_adapters import WeightSource

Result = dict[str, Any]


# --- what a case leaves behind ------------------------------------------------


def observe(source: WeightSource, gold: dict[str, torch.Tensor] | None = None) -> Result:
    """This rank's manifest and slices (values copied), how many collectives ran, and the gold values on rank
    0."""
    with CommDebugMode() as communication:
        manifest = source.manifest()
        slices = [(msgspec.to_builtins(piece.box), piece.tensor.clone()) for piece in source.slices()]
        copies = [(msgspec.to_builtins(piece.box), piece.tensor.clone()) for piece in source.copies()]
        equal = [(msgspec.to_builtins(piece.box), piece.tensor.clone()) for piece in source.kept_equal()]
    return {
        "manifest": msgspec.msgpack.encode(manifest),
        "slices": slices,
        "claims": msgspec.to_builtins(source.claims()),
        "copies": copies,
        "kept_equal": equal,
        "collectives": communication.get_total_counts(),
        "gold": gold if dist.get_rank() == 0 else None,
    }


def refused(action: Callable[[], object]) -> Result:
    """The error that `action` raises."""
    try:
        action()
    except (WeightwireError, TypeError, RuntimeError) as error:
        return {"error": type(error).__name__, "text": str(error)}
    return {"error": None, "text": ""}


# --- models -------------------------------------------------------------------


def tiny_qwen3(tied: bool = True, key_heads: int = 1, hidden_size: int = 36, intermediate_size: int = 130) -> nn.Module:
    """Odd in every size that FSDP divides: vocabulary 251, head_dim 10, intermediate 130."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(3)
    config = Qwen3Config(
        vocab_size=251,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=key_heads,
        head_dim=10,
        tie_word_embeddings=tied,
        attn_implementation="eager",
    )
    return Qwen3ForCausalLM(config)


def tiny_qwen3_moe() -> Any:
    """Five experts, of an odd number of features each."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(9)
    config = Qwen3MoeConfig(
        vocab_size=51,
        hidden_size=20,
        intermediate_size=24,
        moe_intermediate_size=14,
        num_experts=5,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=10,
    )
    return Qwen3MoeForCausalLM(config)


def train(model: nn.Module, steps: int = 1) -> None:
    """Real steps; the batch is the same on all ranks, so that the mean gradient is the unsharded one, bit for
    bit."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    tokens = torch.arange(40).view(2, 20) * 7 % 251
    for _ in range(steps):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def nudge(model: nn.Module) -> None:
    """A real optimizer step whose gradients are a function of the weights, element by element: no sum whose order
    parallelism could change, so that a sharded model's bits are the unsharded one's."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for parameter in model.parameters():
        parameter.grad = parameter.detach() * 0.5 + 1
    optimizer.step()


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def run_cases(cases: Iterable[Callable[[], Result]], out: Path) -> None:
    """Every case in turn, on this rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results: dict[str, Result] = {}
    for case in cases:
        try:
            results[case.__name__] = case()
        except Exception:  # noqa: BLE001  the test of this case fails with it, the others go on
            results[case.__name__] = {"crash": traceback.format_exc()}
        dist.barrier()
    torch.save(results, out / f"rank{dist.get_rank()}.pt")
    dist.barrier()
    leave_process_groups()


def main(any_world: list[Callable[[], Result]], four_ranks: list[Callable[[], Result]]) -> None:
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    more = four_ranks if os.environ["WORLD_SIZE"] == "4" else []
    run_cases(any_world + more, Path(sys.argv[1]))
