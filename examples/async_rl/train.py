"""The trainer: FSDP2 ranks under torchrun, joined by gloo. Run by `run.py`. Rank 0 is the controller too.

One step, while the engine installs the last update and goes on answering:

1. the first tasks that completed, whatever order they were submitted in, become a batch: metadata only;
2. every rank fetches a share with about as many tokens, recomputes its log-probabilities, and keeps them in its own store;
3. rank 0 adds advantages, and the batch is shared out again;
4. one AdamW step on a policy gradient, whose weights correct that the engine sampled with older weights and in bfloat16
   (truncated importance sampling), with a KL penalty to the model of the beginning;
5. the new weights travel; the batch is cleared, wherever anything of it is kept.

torchrun may restart the ranks: they go on with the next version of what the engines serve.
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import json
import os
import random
import secrets
import sys
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from inference_plugin.wire.errors import PeerLost, PoolClosed, StaleRollout
from trainer_adapters.batch.batch import DistributedBatch
from trainer_adapters.batch.ranks import RankBatch
from trainer_adapters.batch.rollouts.pool import RolloutPool
from trainer_adapters.batch.store import Store
from weightwire import FSDPAdapter, PendingUpdate, SyncManager

TASKS, PROMPT_TOKENS = 4, 8
MOST_WEIGHT, KL_PENALTY = 2.0, 0.01
STORE_BYTES = 1 << 30
START_S, ENGINE_S, WAIT_S = 120.0, 30.0, 300.0
MOST_FAILED = 16
"""Tasks that may fail in a row. More than that: the engine has ended, say."""


class Controller:
    """Rank 0: keeps `TASKS` x (`max_staleness` + 1) tasks in the works. The pool counts what passes through this process."""

    def __init__(self, arguments: argparse.Namespace, vocabulary: int, version: int) -> None:
        self.pool = RolloutPool()
        self.pool.set_version(version)
        self.pool.on_complete(self._replace)
        self._staleness = arguments.max_staleness
        self._task = {"samples": arguments.samples, "max_tokens": arguments.max_tokens, "vocabulary": vocabulary}
        self._ids = map(f"{secrets.token_hex(4)}/{{}}".format, itertools.count())  # no other run has the same ones
        self.lost_later = self.moved_bytes = self.data_bytes = self._failed = 0
        self.submit(TASKS * (self._staleness + 1))

    def submit(self, tasks: int) -> None:
        for _ in range(tasks):
            prompt = [random.randrange(3, self._task["vocabulary"]) for _ in range(PROMPT_TOKENS)]
            self.pool.submit(next(self._ids), {"prompt": prompt, **self._task})

    def draw(self) -> DistributedBatch:
        return self.pool.next_batch(TASKS, WAIT_S, self._staleness)

    def done(self, batch: RankBatch, version: int | None = None) -> None:
        """The batch is not needed any more; other tasks take its place."""
        batch.clear()
        self.lost_later += len(batch.lost)
        self.moved_bytes += batch.moved_bytes
        self.data_bytes += batch.whole.nbytes
        if version is not None:
            self.pool.set_version(version)
        self.submit(TASKS)

    def told(self) -> dict[str, Any]:
        """Tasks that were dropped, and the share of all bytes that came and went through this process as the controller."""
        stats = self.pool.stats()
        share = (self.moved_bytes + stats.received_bytes + stats.sent_bytes) / max(1, self.data_bytes)
        return {"lost": stats.lost + self.lost_later, "stale": stats.stale, "controller_share": round(share, 5)}

    def _replace(self, done: Any) -> None:
        """Another task takes the place of one that became too stale, was lost with its worker, or failed. When too many have
        failed, the pool is closed, and whoever waits for a batch hears of it."""
        error = done.exception()
        if error is None:
            self._failed = 0
        elif isinstance(error, StaleRollout | PeerLost):
            self.submit(1)
        elif not isinstance(error, PoolClosed):
            print(f"a task failed: {error}", file=sys.stderr, flush=True)
            self._failed += 1
            if self._failed < MOST_FAILED:
                self.submit(1)
            else:
                self.pool.close()


def train(arguments: argparse.Namespace, running: ExitStack) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    reference: Any = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.bfloat16)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr, weight_decay=0.0)
    source = FSDPAdapter(model, dtype_rules="engine")
    manager = running.enter_context(SyncManager(in_flight="keep", timeout_s=WAIT_S))
    store = running.enter_context(Store(budget_bytes=STORE_BYTES, name="trainer"))
    if dist.get_rank() == 0:
        manager.wait_for_replicas(1, timeout_s=ENGINE_S)  # it answers already, or has ended
    version = manager.update(source).version  # one more than the engines served: every token has a version from now on
    controller = Controller(arguments, model.config.vocab_size, version) if dist.get_rank() == 0 else None
    if controller:
        running.enter_context(controller.pool)
    tell(first_version=version, ranks=gathered(os.getpid()))
    pending: PendingUpdate | None = None
    for _ in range(arguments.steps):
        batch, rows = next_rows(controller, store, model, reference)
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
            spans = sorted({(e.versions.first, e.versions.last) for e in batch.whole.entries() if e.versions})
            controller.done(batch, version)
            step = {"version": version, "reward": round(float(reward), 4), "tokens": tokens, "overlapped": overlapped}
            tell(**step, spans=spans, staleness=version - 1 - spans[0][0], **controller.told())
    if pending is not None:
        pending.result()
    verified = manager.verify(source).ok
    tell(verified=verified, served=list(manager.versions().values()), trainer_stores=gathered(store.stats().tasks))


def next_rows(
    controller: Controller | None, store: Store, model: Any, reference: Any
) -> tuple[RankBatch, DistributedBatch]:
    """A batch, and this rank's rows of it, with what the ranks recomputed and advantages. Another batch takes the place of one
    that lost too many rows with their workers."""
    while True:
        batch = RankBatch(controller.draw() if controller else None, store, by="token_ids", timeout_s=WAIT_S)
        if (rows := batch.fetch()) is not None:
            with torch.no_grad():
                old, before = log_probabilities(model, rows)[1], log_probabilities(reference, rows)[0].bfloat16()
            computed = {"old_logprobs": old, "reference_logprobs": before}
            batch.add({key: rows.unpadded(each, "token_ids") for key, each in computed.items()})
            if controller:
                rewards = batch.read(["rewards"]).dense("rewards")
                batch.add_whole({"advantages": advantages(rewards, batch.whole.row_tasks("rewards"))})
            if (rows := batch.fetch()) is not None:
                return batch, rows
        if controller:
            controller.done(batch)


def advantages(rewards: torch.Tensor, tasks: list[str | None]) -> torch.Tensor:
    """The reward of each row, less the mean of its group: the rows of one task."""
    groups = torch.from_numpy(np.unique(np.array(tasks), return_inverse=True)[1])
    sums = torch.zeros(len(tasks)).index_add(0, groups, rewards)
    return rewards - (sums / groups.bincount(minlength=len(tasks)))[groups]


def log_probabilities(model: Any, rows: DistributedBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 `[rows, longest answer, vocabulary]`, and those of the answers' tokens `[rows, longest answer]`."""
    dense = rows.select(["prompt_ids", "token_ids"]).padded(0)
    ids = torch.cat([dense["prompt_ids"], dense["token_ids"]], dim=1)
    logits = model(input_ids=ids, use_cache=False).logits[:, PROMPT_TOKENS - 1 : -1]
    everything = logits.float().log_softmax(-1)
    return everything, everything.gather(2, dense["token_ids"][..., None]).squeeze(2)


def learn(model: Any, rows: DistributedBatch) -> None:
    """Adds the gradient of the loss, a mean over the tokens of all ranks."""
    lengths = torch.as_tensor(rows.lengths("token_ids"))
    everything, chosen = log_probabilities(model, rows)
    mask = torch.arange(chosen.shape[1]) < lengths[:, None]
    dense = rows.select(["old_logprobs", "logprobs", "reference_logprobs"]).padded(0)
    weights = (dense["old_logprobs"] - dense["logprobs"]).exp().clamp(max=MOST_WEIGHT)
    gain = weights * (chosen - dense["old_logprobs"]).exp() * rows["advantages"][:, None]
    penalty = (everything.exp() * (everything - dense["reference_logprobs"].float())).sum(2)
    tokens = lengths.sum()
    dist.all_reduce(tokens)
    # FSDP averages gradients over the ranks; the mean over all tokens needs their sum.
    (-((gain - KL_PENALTY * penalty) * mask).sum() * dist.get_world_size() / tokens).backward()


def gathered(value: Any) -> list[Any]:
    """The value of each rank. Collective."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def tell(**fields: Any) -> None:
    if dist.get_rank() == 0:
        print(json.dumps(fields), flush=True)


def main() -> None:
    # A rank that does not meet the others ends, and torchrun starts all of them again. The group's own limit must be longer.
    faulthandler.dump_traceback_later(START_S, exit=True)
    store, rank, ranks = next(dist.rendezvous("env://"))
    # torchrun keeps one store over restarts: without a prefix, a rank may read the address of one that has died.
    store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", ""), store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=2 * WAIT_S))
    faulthandler.cancel_dump_traceback_later()
    with ExitStack() as running:
        train(argparse.Namespace(**json.loads(sys.argv[1])), running)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
