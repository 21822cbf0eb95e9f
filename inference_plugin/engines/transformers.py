"""A generate loop around a `transformers` model: the smallest engine there is, and a real one.

It is for those who add an engine (docs/adding-an-engine.md walks through this file) and for those who have none at hand:

    with TransformersEngine("path/to/a/checkpoint") as engine:
        completion = engine.generate([1, 5, 9], max_new_tokens=16).result()

or `python -m inference_plugin.engines.transformers CHECKPOINT`, which continues the lines it is given. One process, one
rank, greedy; each step computes the next token of every request. Models whose parameters are called as in their
checkpoint, which all but mixtures of experts are.
"""

from __future__ import annotations

import argparse
import queue
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from inference_plugin.devices import device_of, start_thread
from inference_plugin.engines.captured_steps import CapturedSteps
from inference_plugin.engines.control import EngineControl
from inference_plugin.engines.coordinator import open_coordinator
from inference_plugin.engines.live_model import LiveModel
from inference_plugin.engines.monkeypatch import installed_version
from inference_plugin.engines.rank_runtime import RankIdentity, RankRuntime
from inference_plugin.engines.skeleton import build_skeleton
from inference_plugin.net import addresses
from inference_plugin.wire.closing import Closing
from inference_plugin.wire.errors import TornReplica, WeightwireError
from inference_plugin.wire.messages import InFlight, MemoryTag

__all__ = ["Completion", "TransformersEngine"]


@dataclass(frozen=True)
class Completion:
    """What was generated: tokens, the version of the weights that each was computed with, and why it ended."""

    tokens: list[int]
    versions: list[int]
    finish_reason: Literal["length", "abort"]


class TransformersEngine(Closing):
    """Serves one model from a thread of its own, on `device`. `version` is the one it serves; 0 is the checkpoint's.

    `captured_length` captures the decode step in a CUDA graph (`captured_steps`): the most tokens of a request, prompt and answer
    together. None captures nothing and sets no limit. Raises `EngineUnsupported` for a model that can't be captured.
    """

    def __init__(
        self, checkpoint: str | Path, *, device: torch.device | str = "cpu", captured_length: int | None = None
    ) -> None:
        from transformers import AutoModelForCausalLM

        models: Any = AutoModelForCausalLM
        live = models.from_pretrained(checkpoint).to(device).eval()
        skeleton = build_skeleton(lambda: models.from_config(live.config, dtype=live.dtype).eval(), nullcontext())
        captured = None if captured_length is None else CapturedSteps(live, captured_length)
        self.loop = _Loop(GeneratingModel(live, live.device, *skeleton), captured)
        self._coordinator = open_coordinator(
            self.loop,
            self.loop.replica,
            [self.loop.runtime.card()],
            engine="transformers",
            engine_version=installed_version("transformers"),
            model=str(checkpoint),
            dtype=str(live.dtype).removeprefix("torch."),
            tp=1,
        )

    @property
    def version(self) -> int:
        return self.loop.version

    def generate(self, prompt: Sequence[int], max_new_tokens: int) -> Future[Completion]:
        """Continues `prompt` (token ids) by `max_new_tokens` tokens. The future raises `TornReplica` from a torn engine, and what
        the model raises for a prompt that it can't take, an unknown token id for instance.

        Raises `ValueError` for a prompt without tokens, and where both together are more than `captured_length`;
        `WeightwireError` once the engine is closed.
        """
        if not len(prompt):
            raise ValueError("a prompt has at least one token")
        self.loop.check_length(len(prompt) + max_new_tokens)
        request = _Request(list(prompt), max_new_tokens)
        self.loop.take(request)
        return request.future

    def close(self) -> None:
        """Ends the thread, after what was submitted before; requests in flight end as aborted."""
        self.loop.submit(self.loop.stop)
        self.loop.thread.join()
        self._coordinator.close()
        self.loop.runtime.close()


@dataclass(eq=False)
class _Request:
    prompt: list[int]
    max_new_tokens: int
    tokens: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    cache: Any = None
    future: Future[Completion] = field(default_factory=Future)

    def end(self, why: Literal["length", "abort"]) -> None:
        """Of an admitted request: nobody can have cancelled its future."""
        self.future.set_result(Completion(self.tokens, self.versions, why))


class GeneratingModel(LiveModel):
    def load_weights(self, model: nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]) -> object:
        """By name. A tied weight comes under one of its names or under all: it is written once."""
        targets = model.state_dict(keep_vars=True)
        written: set[int] = set()
        for name, tensor in tensors:
            target = targets[name]
            if id(target) not in written:
                written.add(id(target))
                target.data.copy_(tensor)
        return None


class _Loop(EngineControl):
    """The engine's own thread, and the engine as its coordinator sees it."""

    def __init__(self, model: GeneratingModel, captured: CapturedSteps | None) -> None:
        self.version = 0
        self.replica = addresses.new_replica_id("transformers")
        self.runtime = RankRuntime(RankIdentity(self.replica, 0, tp_rank=0), model)
        self._model = model
        self._captured = captured
        model.fixed_addresses = model.captures_graphs = captured is not None
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.running: list[_Request] = []
        self.held: list[_Request] = []
        self._drained: Future[None] | None = None
        self._refusal: str | None = None
        self._holding = False
        self._stopping = False
        self._taking = threading.Lock()
        self.thread = start_thread(self._run, name="transformers-engine", stop=lambda: self.submit(self.stop))

    def _run(self) -> None:
        device_of(self._model.device).use(self._model.device.index)
        while not self._stopping:
            if self._holding or not self.running or not self._work.empty():
                self._work.get()()  # between two steps
            else:
                self._step()
            if self._drained is not None and not self.running:
                drained, self._drained = self._drained, None
                drained.set_result(None)

    @torch.inference_mode()
    def _step(self) -> None:
        with self._model.step():
            for request in list(self.running):
                known = [*request.prompt, *request.tokens]
                compute = self._compute if self._captured is None else self._compute_captured
                try:
                    request.tokens.append(compute(request, known))
                except Exception as error:  # noqa: BLE001 -- it fails this request; the others and the engine go on
                    self.running.remove(request)
                    self._drop_cache(request)
                    request.future.set_exception(error)
                    continue
                request.versions.append(self.version)
        for request in [r for r in self.running if len(r.tokens) >= r.max_new_tokens]:
            self.running.remove(request)
            self._drop_cache(request)
            request.end("length")

    def _compute(self, request: _Request, known: list[int]) -> int:
        fresh = torch.tensor([known if request.cache is None else known[-1:]], device=self._model.device)
        output = self._model.live(input_ids=fresh, past_key_values=request.cache, use_cache=True)
        request.cache = output.past_key_values
        return int(output.logits[0, -1].argmax())

    def _compute_captured(self, request: _Request, known: list[int]) -> int:
        assert self._captured is not None
        if request.cache is None:
            request.cache = self._captured.take()
            return int(request.cache.prefill(known))
        return int(request.cache.decode(known[-1]))

    def _drop_cache(self, request: _Request) -> None:
        if self._captured is not None and request.cache is not None:
            self._captured.give_back(request.cache)
        request.cache = None

    def check_length(self, tokens: int) -> None:
        if self._captured is not None and tokens > self._captured.length:
            raise ValueError(
                f"prompt and answer would be {tokens} tokens, and captured_length is {self._captured.length}: "
                "ask for fewer new tokens, or start the engine with a larger captured_length"
            )

    def take(self, request: _Request) -> None:
        """Any thread."""
        with self._taking:
            if self._stopping or not self.thread.is_alive():
                raise WeightwireError("the engine is closed and takes no request")
            self.submit(lambda: self._admit(request))

    def _admit(self, request: _Request) -> None:
        if not request.future.set_running_or_notify_cancel():
            return
        if self._refusal is not None:
            request.future.set_exception(TornReplica(self._refusal))
        elif request.max_new_tokens < 1:
            request.end("length")
        else:
            (self.running if self._drained is None else self.held).append(request)

    def stop(self) -> None:
        with self._taking:
            self._stopping = True
        while not self._work.empty():
            self._work.get()()  # a request that another thread made meanwhile
        self._end_all()

    def _end_all(self) -> None:
        ended, self.running, self.held = [*self.running, *self.held], [], []
        for request in ended:
            self._drop_cache(request)
            if self._refusal is not None:
                request.future.set_exception(TornReplica(self._refusal))
            else:
                request.end("abort")

    # --- what the coordinator asks for ---

    def submit(self, command: Callable[[], None]) -> None:
        self._work.put(command)

    def call_ranks(self, request: bytes) -> list[bytes]:
        return [self.runtime.call(request)]

    def pause(self, in_flight: InFlight) -> Future[None] | None:
        # A command runs between two steps, and no step is taken until it returns: only `drain` has to wait.
        if in_flight == "drain":
            self._drained = Future()
            return self._drained
        if in_flight == "abort":
            self._end_all()
        elif in_flight == "recompute":
            for request in self.running:
                self._drop_cache(request)
        return None

    def hold(self, asleep: frozenset[MemoryTag]) -> None:
        self._holding = True

    def resume(self) -> None:
        self._holding = False
        self._drained = None
        self.running += self.held
        self.held = []

    def installed(self, group: str, stamp: str, txn: str, in_flight: InFlight) -> None:
        self.version = int(stamp)  # nobody else writes the weights here

    def refuse(self, reason: str | None) -> None:
        self._refusal = reason
        if reason is not None:
            self._end_all()


def main() -> None:
    """Continues each line of standard input, and says which version of the weights it was computed with."""
    parser = argparse.ArgumentParser(prog="python -m inference_plugin.engines.transformers", description=main.__doc__)
    parser.add_argument("checkpoint")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    arguments = parser.parse_args()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(arguments.checkpoint)
    with TransformersEngine(arguments.checkpoint) as engine:
        for line in filter(str.strip, sys.stdin):
            done = engine.generate(tokenizer(line.strip())["input_ids"], arguments.max_new_tokens).result()
            print(
                f"[version {', '.join(map(str, sorted(set(done.versions))))}] {tokenizer.decode(done.tokens)}",
                flush=True,
            )


if __name__ == "__main__":
    main()
