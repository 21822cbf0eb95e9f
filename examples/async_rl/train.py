"""The trainer: FSDP2 ranks under torchrun, joined by gloo. Run by `run.py`. Rank 0 is the controller too (`way_back.py`).

One step, while the engine installs the last update and goes on answering:

1. the first tasks that completed, whatever order they were submitted in, become a batch: metadata only;
2. every rank fetches a share with about as many tokens, recomputes its log-probabilities, and keeps them in its own store;
3. rank 0 joins them to the batch, adds advantages, and shares it out again;
4. one AdamW step on a policy gradient, whose weights correct that the engine sampled with older weights and in bfloat16
   (truncated importance sampling), with a KL penalty to the model of the beginning;
5. the new weights travel; the batch is cleared, wherever anything of it is kept.

torchrun may restart the ranks: they go on with the next version of what the engines serve.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import secrets
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM
from way_back import WAIT_S, Controller, RankRows

from trainer_adapters import FSDPAdapter, PendingUpdate, SyncManager
from trainer_adapters.batch.batch import DistributedBatch
from trainer_adapters.batch.store import Store

TASKS, PROMPT_TOKENS = 4, 8
MOST_WEIGHT, KL_PENALTY = 2.0, 0.01
STORE_BYTES = 1 << 30


def log_probabilities(model: Any, rows: DistributedBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 `[rows, longest answer, vocabulary]`, and those of the answers' tokens `[rows, longest answer]`."""
    answers = padded(rows["token_ids"])
    ids = torch.cat([padded(rows["prompt_ids"]), answers], dim=1)
    logits = model(input_ids=ids, use_cache=False).logits[:, PROMPT_TOKENS - 1 : -1]
    everything = logits.float().log_softmax(-1)
    return everything, everything.gather(2, answers[..., None]).squeeze(2)


def learn(model: Any, rows: DistributedBatch) -> None:
    """Adds the gradient of the loss, a mean over the tokens of all ranks."""
    lengths = torch.as_tensor(rows.lengths("token_ids"))
    everything, chosen = log_probabilities(model, rows)
    mask = torch.arange(chosen.shape[1]) < lengths[:, None]
    old, sampled = padded(rows["old_logprobs"]), padded(rows["logprobs"])
    weights = (old - sampled).exp().clamp(max=MOST_WEIGHT)
    gain = weights * (chosen - old).exp() * rows["advantages"][:, None]
    penalty = (everything.exp() * (everything - padded(rows["reference_logprobs"]).float())).sum(2)
    tokens = lengths.sum()
    dist.all_reduce(tokens)
    # FSDP averages gradients over the ranks; the mean over all tokens needs their sum.
    loss = -((gain - KL_PENALTY * penalty) * mask).sum() * dist.get_world_size() / tokens
    loss.backward()


def train(arguments: argparse.Namespace, running: ExitStack) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    reference: Any = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.bfloat16)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr, weight_decay=0.0)
    source = FSDPAdapter(model, dtype_rules={"*": torch.bfloat16})

    @torch.no_grad()
    def recompute(rows: DistributedBatch) -> dict[str, torch.Tensor]:
        lengths = rows.lengths("token_ids").tolist()
        old, before = log_probabilities(model, rows)[1], log_probabilities(reference, rows)[0].bfloat16()
        return {"old_logprobs": jagged(old, lengths), "reference_logprobs": jagged(before, lengths)}

    manager = running.enter_context(SyncManager(in_flight="keep", timeout_s=WAIT_S))
    store = running.enter_context(Store(budget_bytes=STORE_BYTES, name="trainer"))
    version = first_version(manager)
    manager.update(source, version)  # what the engine samples with has a version from the first token on
    controller = start_controller(arguments, model.config.vocab_size, version) if dist.get_rank() == 0 else None
    if controller:
        running.callback(controller.close)
    tell(first_version=version, ranks=gathered(os.getpid()))
    shares = RankRows(store, controller)
    pending: PendingUpdate | None = None
    for _ in range(arguments.steps):
        rows = shares.next(recompute)
        learn(model, rows)
        overlapped = pending is not None and not pending.done()
        optimizer.step()
        optimizer.zero_grad()
        if pending is not None:
            pending.result()
        version += 1
        pending = manager.update_async(source, version)
        pending.wait_released()  # FSDP2 unshards in a forward pass, and the update reads shards; engines install it meanwhile
        if arguments.max_staleness == 0:
            pending.result()
        tokens = gathered(int(rows.lengths("token_ids").sum()))
        reward = torch.cat(gathered(rows["rewards"].clone())).mean()
        del rows  # gives the leases back
        if controller:
            controller.clear()
            tell(
                version=version,
                reward=round(float(reward), 4),
                tokens=tokens,
                overlapped=overlapped,
                **seen(controller, version - 1),
            )
            controller.pool.set_version(version)
            controller.submit(TASKS)
    if pending is not None:
        pending.result()
    verified = manager.verify(source).ok
    tell(verified=verified, served=list(manager.versions().values()), trainer_stores=gathered(store.stats().tasks))


def start_controller(arguments: argparse.Namespace, vocabulary: int, version: int) -> Controller:
    """Begins to draw answers to random prompts. No other run of the trainer has the same task ids."""
    run, numbers = secrets.token_hex(4), itertools.count()
    common = {"samples": arguments.samples, "max_tokens": arguments.max_tokens, "vocabulary": vocabulary}

    def new_task() -> tuple[str, Any]:
        prompt = [random.randrange(3, vocabulary) for _ in range(PROMPT_TOKENS)]
        return f"{run}/{next(numbers)}", {"prompt": prompt, **common}

    ahead = TASKS * (arguments.max_staleness + 1)
    controller = Controller(new_task, tasks=TASKS, staleness=arguments.max_staleness)
    controller.pool.set_version(version)
    controller.submit(ahead)
    return controller


def seen(controller: Controller, learned_with: int) -> dict[str, Any]:
    """What the controller knows of a step: versions of the rows, tasks that were dropped, and its share of all bytes."""
    spans = sorted({(e.versions.first, e.versions.last) for e in controller.drawn.entries() if e.versions})
    dropped = {"lost": controller.lost, "stale": controller.pool.stats().stale}
    return {
        "spans": spans,
        "staleness": learned_with - spans[0][0],
        **dropped,
        "controller_share": round(controller.share_seen, 5),
    }


def first_version(manager: SyncManager) -> int:
    """The version after the one that the engines serve; 0 if they have none. Rank 0 asks."""
    served = [-1]
    if dist.get_rank() == 0:
        manager.wait_for_replicas(1, timeout_s=WAIT_S)
        served = [max(-1 if v is None else v for v in manager.versions().values())]
    dist.broadcast_object_list(served)
    return served[0] + 1


def padded(rows: torch.Tensor) -> torch.Tensor:
    """`[rows, longest, ...]`, with zeros at the end of shorter ones."""
    return rows.to_padded_tensor(0) if rows.is_nested else rows


def jagged(dense: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """The rows of `[rows, longest, ...]` without their pads, which need not travel."""
    return torch.nested.nested_tensor([row[:n] for row, n in zip(dense, lengths, strict=True)], layout=torch.jagged)


def gathered(value: Any) -> list[Any]:
    """The value of each rank. Collective."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def tell(**fields: Any) -> None:
    if dist.get_rank() == 0:
        print(json.dumps(fields), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--max-staleness", type=int, required=True)
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--max-tokens", type=int, required=True)
    parser.add_argument("--lr", type=float, required=True)
    dist.init_process_group("gloo", timeout=timedelta(seconds=2 * WAIT_S))
    with ExitStack() as running:
        train(parser.parse_args(), running)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
