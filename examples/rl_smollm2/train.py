"""The trainer of the demo: policy gradient on an FSDP2 model; its samples come from an engine that it keeps up to date.

Run by ``run.py`` under torchrun, on CPU ranks joined by gloo. One step:

1. ask the server for several answers to each question (every rank asks its own questions);
2. reward them, and compare each with the others to the same question: the group-normalised advantage of GRPO
   (Shao et al. 2024, eq. 3; one optimiser step per batch, so its probability ratio is 1);
3. one AdamW step on fp32 shards;
4. ``SyncManager.update``: the new weights go into the running engine, in its dtype.

Rank 0 tells ``run.py`` how far it is: one JSON object per line on standard output.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from server import DTYPE, Completion, Server, served_dtype
from task import CAPITALS, MAX_TOKENS, is_right, prompt_ids, reward
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM

from weightwire import FSDPAdapter, SyncManager

MICRO_BATCH = 32
LEARNING_RATE = 5e-5
"""Large for RL, so that a few steps show: two short trials at 1e-5 stayed flat, three at 5e-5 rose. The likely reason is
that an engine computes in bfloat16, whose steps near 0.02 are 1e-4: a smaller change often rounds to none."""


@dataclass(frozen=True)
class Answers:
    """What this rank drew in one step."""

    countries: list[str]
    prompts: list[list[int]]
    drawn: list[Completion]
    rewards: torch.Tensor
    """fp32 [answers], those to one question next to each other."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--engine", required=True)
    parser.add_argument("--server", required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--save", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--samples", type=int, default=8, help="answers per question and step")
    parser.add_argument("--lr", type=float, default=LEARNING_RATE)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    try:
        train(args)
    finally:
        dist.destroy_process_group()


def train(args: argparse.Namespace) -> None:
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = load_sharded(args.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0)
    mine = list(CAPITALS)[dist.get_rank() :: dist.get_world_size()]
    questions = {country: prompt_ids(tokenizer, country) for country in mine}

    server = Server(args.engine, args.server)

    # fp32 shards, sent in the engine's dtype: nothing is cast silently.
    source = FSDPAdapter(model, dtype_rules={"*": served_dtype(args.engine)})
    with SyncManager(in_flight="keep", check_finite=True, timeout_s=120) as manager:
        for step in range(1, args.steps + 1):
            tell("doing", what=f"step {step}: the engine draws {len(CAPITALS) * args.samples} answers")
            started = time.monotonic()
            answers = draw(server, questions, args.samples)
            drawn = time.monotonic()
            tell("doing", what=f"step {step}: FSDP2 learns from them")
            learn(model, optimizer, answers, args.samples)
            learned = time.monotonic()
            tell("doing", what=f"step {step}: the weights travel")
            report = manager.update(source, version=step)
            tell(
                "step",
                step=step,
                **summary(answers),
                sample_s=drawn - started,
                train_s=learned - drawn,
                update_s=report.seconds,
                phases=report.phases,
                bytes=report.bytes,
                messages=report.messages,
                stopped_s=max(replica.stopped_s for replica in report.replicas),
                replicas=[[replica.replica, replica.version, replica.digest] for replica in report.replicas],
            )
        tell("doing", what="the last version answers")
        tell("final", **summary(draw(server, questions, args.samples)))
        tell("doing", what="comparing the engine's tensors with the trainer's")
        verified = manager.verify(source)
        tell("verified", ok=verified.ok, boxes=sum(replica.boxes for replica in verified.replicas))
        tell("doing", what="saving the checkpoint")
        save(model, args.model, args.save, getattr(torch, served_dtype(args.engine)))
        tell("saved")


def load_sharded(directory: Path) -> LlamaForCausalLM:
    """The model with fp32 shards, computing in `DTYPE`; one FSDP group per decoder layer."""
    model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)
    precision = MixedPrecisionPolicy(param_dtype=getattr(torch, DTYPE), reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=precision)
    fully_shard(model, mp_policy=precision)
    return model


def draw(server: Server, questions: dict[str, list[int]], samples: int) -> Answers:
    """``samples`` answers to each question at temperature 1, with their rewards."""
    groups = server.complete(list(questions.values()), max_tokens=MAX_TOKENS, samples=samples, temperature=1.0)
    countries = [country for country in questions for _ in range(samples)]
    drawn = [answer for group in groups for answer in group]
    rewards = [
        reward(country, answer.text, len(answer.token_ids), answer.finished)
        for country, answer in zip(countries, drawn, strict=True)
    ]
    return Answers(countries, [questions[country] for country in countries], drawn, torch.tensor(rewards))


def learn(model: Any, optimizer: torch.optim.Optimizer, answers: Answers, samples: int) -> None:
    """One optimiser step on the policy gradient, averaged over all answer tokens of all ranks."""
    groups = answers.rewards.view(-1, samples)
    spread = groups.std(dim=1, keepdim=True) + 1e-4
    advantages = ((groups - groups.mean(dim=1, keepdim=True)) / spread).flatten()

    tokens = torch.tensor(float(sum(len(answer.token_ids) for answer in answers.drawn)))
    dist.all_reduce(tokens)
    # FSDP averages gradients over the ranks; the mean over all tokens needs their sum.
    scale = dist.get_world_size() / tokens

    parts = list(range(0, len(answers.drawn), MICRO_BATCH))
    for first in parts:
        part = slice(first, first + MICRO_BATCH)
        model.set_requires_gradient_sync(first == parts[-1])
        logprobs, mask = answer_logprobs(model, answers.prompts[part], [a.token_ids for a in answers.drawn[part]])
        loss = -(logprobs * mask * advantages[part, None]).sum() * scale
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def answer_logprobs(
    model: Any, prompts: list[list[int]], answers: list[list[int]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of the answers' tokens: fp32 [batch, longest answer], and 1 where there is a token.

    Prompts are padded on the left, so that all answers begin in one column and only their logits are computed.
    """
    before, after = max(map(len, prompts)), max(map(len, answers))
    ids = torch.zeros(len(prompts), before + after, dtype=torch.long)
    attended = torch.zeros_like(ids)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        first, end = before - len(prompt), before + len(answer)
        ids[row, first:end] = torch.tensor(prompt + answer)
        attended[row, first:end] = 1
    positions = (attended.cumsum(dim=1) - 1).clamp(min=0)
    logits = (
        model(
            input_ids=ids,
            attention_mask=attended,
            position_ids=positions,
            logits_to_keep=after + 1,
            use_cache=False,
        )
        .logits[:, :-1]
        .float()
    )
    target = ids[:, before:]
    chosen = logits.gather(2, target[..., None]).squeeze(2)
    return chosen - logits.logsumexp(dim=2), attended[:, before:].float()


def summary(answers: Answers) -> dict[str, float]:
    """Means over all ranks: reward, share of right answers, tokens per answer."""
    right = sum(is_right(c, a.text) for c, a in zip(answers.countries, answers.drawn, strict=True))
    length = sum(len(answer.token_ids) for answer in answers.drawn)
    total = torch.tensor([float(answers.rewards.sum()), float(right), float(length), float(len(answers.drawn))])
    dist.all_reduce(total)
    mean_reward, mean_right, mean_length, _ = (total / total[3]).tolist()
    return {"reward": mean_reward, "right": mean_right, "tokens": mean_length}


def save(model: Any, original: Path, directory: Path, dtype: torch.dtype) -> None:
    """Gather the parameters and write, from rank 0, a checkpoint in `dtype`, the engine's, that any engine can start from."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    gathered = get_model_state_dict(model, options=options)
    if dist.get_rank() == 0:
        plain = LlamaForCausalLM(AutoConfig.from_pretrained(original)).to(dtype)
        plain.load_state_dict({name: tensor.to(dtype) for name, tensor in gathered.items()})
        plain.save_pretrained(directory)
        AutoTokenizer.from_pretrained(original).save_pretrained(directory)
    dist.barrier()


def tell(event: str, **fields: Any) -> None:
    if dist.get_rank() == 0:
        print(json.dumps({"event": event, **fields}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
