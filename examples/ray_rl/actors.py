"""The two kinds of actors: a rank of the trainer and a replica of the engine. Weightwire is three lines in the trainer and
none in the replica."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import ray

PROMPT_TOKENS, ANSWER_TOKENS, SAMPLES = 8, 16, 4
MEETING_S = 60


@dataclass(frozen=True)
class Sample:
    """An answer, and how much better than the others to its prompt it is."""

    prompt: list[int]
    answer: list[int]
    advantage: float


@ray.remote
class Trainer:
    """One rank of an FSDP2 trainer. Which rank, on which host, with which GPU: Ray's and the framework's matter."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self.store: Any = None

    def meeting(self) -> tuple[str, int]:
        """Rank 0: where the others find it."""
        from torch.distributed import TCPStore

        host = ray.util.get_node_ip_address()
        self.store = TCPStore(host, 0, self.ranks, is_master=True, wait_for_workers=False)
        return host, self.store.port

    def begin(self, meeting: tuple[str, int], model: str, lr: float = 5e-3, timeout_s: float = 300) -> None:
        import torch
        import torch.distributed as dist
        from torch.distributed.fsdp import fully_shard
        from transformers import AutoModelForCausalLM

        from weightwire import FSDPAdapter, SyncManager

        store = self.store or dist.TCPStore(*meeting, self.ranks, timeout=timedelta(seconds=MEETING_S))
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.ranks)
        self.model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        for layer in self.model.model.layers:
            fully_shard(layer)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, weight_decay=0.0)
        # Weightwire: what is sent, and what sends it. It finds the replicas by itself.
        self.source = FSDPAdapter(self.model)
        self.manager = SyncManager(timeout_s=timeout_s)

    def learn(self, samples: Sequence[Sample]) -> None:
        """A step of the policy gradient on this rank's part of the batch."""
        import torch

        device = next(self.model.parameters()).device
        ids = torch.tensor([sample.prompt + sample.answer for sample in samples], device=device)
        logits = self.model(input_ids=ids, use_cache=False).logits[:, PROMPT_TOKENS - 1 : -1].float()
        chosen = logits.log_softmax(-1).gather(2, ids[:, PROMPT_TOKENS:, None]).squeeze(2)
        advantages = torch.tensor([sample.advantage for sample in samples], device=device)
        (-(chosen * advantages[:, None]).mean()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def update_weights(self, version: int) -> dict[str, float]:
        """On all ranks at once: every replica that lives serves `version` when this returns. Raises what went wrong, on all
        ranks."""
        report = self.manager.update(self.source, version)
        stopped_s = max(replica.stopped_s for replica in report.replicas)
        return {"version": version, "seconds": report.seconds, "stopped_s": stopped_s, "replicas": len(report.replicas)}

    def wait_for_replicas(self, count: int, timeout_s: float) -> None:
        """Rank 0: until as many are there, a restarted one among them."""
        self.manager.wait_for_replicas(count, timeout_s=timeout_s)

    def served(self) -> list[int | None]:
        """Rank 0: the version that each replica serves."""
        return sorted(self.manager.versions().values(), key=lambda version: -1 if version is None else version)

    def export(self, like: str, directory: str) -> None:
        """On all ranks at once: writes a checkpoint."""
        sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "trainers"))
        from common import export

        export(self.model, Path(like), Path(directory))


@ray.remote(max_restarts=-1, max_task_retries=-1)
class Replica:
    """A stock vLLM. The plug-in is found by its entry point, in vLLM's own processes; nothing of it is seen here."""

    def __init__(self, model: str, **options: Any) -> None:
        from vllm import LLM

        self.llm = LLM(model, seed=0, **options)

    def generate(
        self, prompts: Sequence[list[int]], *, samples: int = 1, temperature: float = 0.0
    ) -> list[list[list[int]]]:
        """`samples` answers to each prompt."""
        from vllm import SamplingParams

        sampling = SamplingParams(n=samples, temperature=temperature, max_tokens=ANSWER_TOKENS, ignore_eos=True)
        outputs = self.llm.generate([{"prompt_token_ids": list(p)} for p in prompts], sampling, use_tqdm=False)
        return [[list(answer.token_ids) for answer in output.outputs] for output in outputs]
