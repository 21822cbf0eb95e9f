"""The storm on real engines of one kind, under load: a replica of two ranks and one of one rank.

What a replica holds is told by its greedy tokens: those of `transformers` with the weights of the version that is stamped
on them. Requests run across every update, and one of them is computed anew, token by token.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from inference_plugin.net import addresses
from inference_plugin.net.channel import Channel
from inference_plugin.wire.errors import WeightwireError
from inference_plugin.wire.messages import Describe, ReplicaCard, WorkerCard
from tests.support.engines import Driver, eventually, segments_of
from tests.support.greedy import greedy_batch
from tests.support.rig import LONG_S, gone
from tests.support.sglang_engines import SglangDriver
from tests.support.storm_checks import STREAMED
from tests.support.troubles import CALM, Troubles
from trainer_adapters import ModuleAdapter

PLUGIN = "tests.support.fault_plugin:plugin"
PROMPTS = [[1, 5, 9], [11, 23, 42, 99, 100, 7, 8, 250, 251, 300], [(7 * i) % 500 + 1 for i in range(160)]]
COUNT = 10
LOOKS = 10
"""An answer is asked for so often, if versions change while it is given: a replica may be caught up at any time."""
RUNNING = 2
"""Requests of each replica that run beside an update."""
LENGTHS = {"vllm": 250, "sglang": 100}
"""Tokens of such a request: it is to run for longer than an update takes."""
PROMPT = 20
NEAR = 2e-3
"""Two logits that are this close are a tie: the two programs round differently."""
KEPT_SEGMENTS = 2
"""A worker keeps this many mapped: what it serves (the way back) and the one before, for the next update."""
END_S = 60.0
"""For the end of an engine of which one process was killed."""


class EngineReplica:
    def __init__(self, driver: Driver, tp: int, faults: Path) -> None:
        self.driver, self.tp, self.faults = driver, tp, faults
        family = {process.pid for process in driver.family()}
        self.card = next(card for card in addresses.discover() if card.pid in family)
        self.replica, self.pid = self.card.replica, self.card.pid

    def worker_pid(self, rank: int = 0) -> int:
        return self.card.workers[rank].pid

    def end(self) -> None:
        self.driver.family()
        self.driver.kill()
        self.driver.leave()


class EngineStorm(Troubles[EngineReplica]):
    """`engine`: "vllm" or "sglang". `models`: checkpoints of one architecture; replicas start with the first, and versions take
    them in turn."""

    sizes = (2, 1)
    calm_between = True
    no_answer = (OSError, ValueError, AssertionError, RuntimeError, WeightwireError)
    kinds = (
        "trainer_killed",
        "trainer_stopped",
        "paused",
        "installation_fails",
        "way_back_fails",
        "second_manager",
        "worker_killed",
        "coordinator_killed",
        "worker_stopped",
        "coordinator_stopped",
    )

    def __init__(self, engine: str, models: Sequence[Path], *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.engine, self.models = engine, models
        self.crossing = self.computed_anew = 0
        self._started = 0

    # --- replicas -----------------------------------------------------------------------------------------------------------

    def start(self, sizes: list[int]) -> list[EngineReplica]:
        begun = []
        for tp in sizes:
            faults = self.directory / f"faults-{self._started}"
            faults.write_text("[]")
            driver = self._driver(tp, WEIGHTWIRE_PLUGINS=PLUGIN, WEIGHTWIRE_TEST_FAULTS=str(faults))
            driver.__enter__()
            begun.append((driver, tp, faults))
            self._started += 1
        with ThreadPoolExecutor() as pool:
            for opened in [pool.submit(self._open, driver, tp) for driver, tp, _ in begun]:
                opened.result()
        return [EngineReplica(*each) for each in begun]

    def _driver(self, tp: int, **variables: Any) -> Driver:
        job = addresses.job_name()
        if self.engine == "sglang":
            return SglangDriver(self.directory, tp=tp, job=job, ends_itself=True, **variables)
        return Driver(self.directory, job=job, **variables)

    def _open(self, driver: Driver, tp: int) -> None:
        arguments: dict[str, Any] = {"tensor_parallel_size": tp, "max_model_len": 1024}
        driver.open(self.models[0], **({} if self.engine == "sglang" else arguments))

    def bury(self, replica: EngineReplica) -> None:
        """vLLM ends the rest of an engine by itself; SGLang leaves it hanging, and so does a vLLM whose core is killed while it
        ends a worker."""
        pids = [replica.pid, *(worker.pid for worker in replica.card.workers)]
        if self.engine == "vllm" and self.killed[replica.replica] == 1:
            try:
                self.timed("the end of an engine", lambda: eventually(lambda: all(map(gone, pids)), timeout_s=END_S))
            except AssertionError:
                self.violated(f"of {replica.replica} there are still {[pid for pid in pids if not gone(pid)]}")
        super().bury(replica)
        addresses.discover()  # sweeps what dead processes left
        if found := [path.name for path in addresses.runtime_dir().iterdir() if replica.replica in path.name]:
            self.violated(f"{replica.replica} left {found}")

    def learn_weights(self, seed: int) -> None:
        self._model(seed)

    def _model(self, seed: int) -> Path:
        return self.models[seed % len(self.models)]

    def source(self, seed: int) -> ModuleAdapter:
        return ModuleAdapter(load_file(self._model(seed) / "model.safetensors"))

    def weights_for_a_process(self, seed: int) -> str:
        return str(self._model(seed))

    def order_faults(self, replica: EngineReplica, *faults: tuple[int, str]) -> None:
        whens = {"install": self.chance.choice(("before", "after")), "undo": "before"}
        self._write(replica, [{"rank": rank, "step": step, "when": whens[step]} for rank, step in faults])

    def clear_faults(self, replica: EngineReplica) -> None:
        self._write(replica, [])

    def _write(self, replica: EngineReplica, faults: list[dict[str, Any]]) -> None:
        temporary = replica.faults.with_suffix(".new")
        temporary.write_text(json.dumps(faults))
        temporary.replace(replica.faults)

    # --- what they say and do -------------------------------------------------------------------------------------------------

    def pause_state(self, replica: EngineReplica) -> str:
        state = self._described(replica).state
        return "" if state == "torn" else state

    def _described(self, replica: EngineReplica) -> ReplicaCard:
        with Channel(replica.card.address) as channel:
            return channel.request(Describe(), ReplicaCard, timeout_s=LONG_S)

    def look_at(self, replica: EngineReplica) -> tuple[str | None, int | None]:
        for _ in range(LOOKS):
            done = replica.driver.generate(PROMPTS, COUNT)
            ends = {request["finish_reason"] for request in done}
            stamps = {version for request in done for version in request["versions"]}
            if ends == {"length"} and len(stamps) == 1:
                held = self._told_by(stamps.pop(), [request["tokens"] for request in done])
                return None, held
            if ends == {"error"} and not stamps:
                if (state := self._described(replica).state) != "torn" and self.options["catch_up"] == "never":
                    self.violated(
                        f"{replica.replica} refuses requests and says that it is {state}: {done[0]['reason']}"
                    )
                return str(done[0]["reason"]), None
            if "dead" in ends:
                raise RuntimeError(f"{done}")
        self.violated(f"{replica.replica} answers {done}")
        return None, None

    def _told_by(self, stamp: str, tokens: list[list[int]]) -> int | None:
        """The seed of the stamped version whose weights make these tokens."""
        seeds = self._seeds(stamp)
        found = [seed for seed in seeds if expected(self._model(seed)) == tokens]
        if not found:
            by = [i for i, model in enumerate(self.models) if expected(model) == tokens]
            self.violated(f"tokens stamped v{stamp} ({seeds}) are those of model {by}: {tokens}")
        return found[-1] if found else None

    def _seeds(self, stamp: str) -> list[int]:
        return [seed for seed, version in self.versions.items() if stamp == str(version or "default")]

    # --- requests beside an update --------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def around_event(self) -> Iterator[None]:
        if self.kind.startswith(CALM):
            yield
            self._come_to_rest()
            return
        chance = random.Random(f"{self.seed} {self.number} {self.kind}")
        torn_before = set(self.torn)
        prompts = {
            replica.replica: [[chance.randrange(1, 500) for _ in range(PROMPT)] for _ in range(RUNNING)]
            for replica in self.replicas
        }
        names = {r.replica: r.driver.submit(prompts[r.replica], LENGTHS[self.engine]) for r in self.replicas}
        yield
        ended = []
        for replica in self.left():
            may_refuse = replica.replica in torn_before | self.torn | self.may_tear | self.failing
            try:
                done = self.timed("requests beside", lambda: replica.driver.wait(names[replica.replica]))  # noqa: B023
            except self.no_answer as error:
                self.violated(f"requests of {replica.replica} did not end: {error}")
                continue
            for prompt, request in zip(prompts[replica.replica], done, strict=True):
                if self._ended_well(replica, request, may_refuse=may_refuse):
                    ended.append((prompt, request))
        self._compute_anew(ended)

    def _ended_well(self, replica: EngineReplica, request: dict[str, Any], *, may_refuse: bool) -> bool:
        if request["finish_reason"] == "error" and (may_refuse or STREAMED in request["reason"]):
            return False
        numbers = [0 if version == "default" else int(version) for version in request["versions"]]
        whole = (request["finish_reason"], len(numbers)) == ("length", LENGTHS[self.engine])
        if not whole or numbers != sorted(numbers) or not all(map(self._seeds, set(request["versions"]))):
            self.violated(f"a request of {replica.replica} ended with {request}")
            return False
        return True

    def _compute_anew(self, ended: list[tuple[list[int], dict[str, Any]]]) -> None:
        """One of these requests, by the versions that are stamped on its tokens; one that ran across a commit, if any did."""
        told = [each for each in ended if all(len(self._seeds(v)) == 1 for v in set(each[1]["versions"]))]
        crossing = [each for each in told if len(set(each[1]["versions"])) > 1]
        self.crossing += len(crossing)
        for prompt, request in (crossing or told)[:1]:
            models = [self._model(self._seeds(version)[0]) for version in request["versions"]]
            self.computed_anew += len(models)
            if wrong := unexplained(prompt, request["tokens"], models):
                spans = sorted(set(request["versions"]))
                self.violated(f"tokens {wrong[:5]} of a request with the versions {spans} are not of their versions")

    def _come_to_rest(self) -> None:
        """After a while no worker has a transaction, and none keeps more memory than it needs."""
        for replica in self.left():
            try:
                self.timed("a transaction's end", lambda: eventually(lambda: self._is_idle(replica), timeout_s=LONG_S))  # noqa: B023
            except AssertionError:
                self.violated(f"{replica.replica} does not come to rest")
            for process in replica.driver.family():
                if len(kept := segments_of(process)) > KEPT_SEGMENTS:
                    self.violated(f"process {process.pid} of {replica.replica} keeps {len(kept)} segments")

    def _is_idle(self, replica: EngineReplica) -> bool:
        for worker in replica.card.workers:
            with Channel(worker.address) as channel:
                card = channel.request(Describe(), WorkerCard, timeout_s=LONG_S)
            if any(group.txn or group.state not in ("idle", "torn") for group in card.groups):
                return False
        return True


@functools.cache
def expected(model: Path) -> list[list[int]]:
    """What `transformers` says to `PROMPTS`."""
    return greedy_batch(model, PROMPTS, COUNT)


@functools.cache
def loaded(model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()


@torch.inference_mode()
def unexplained(prompt: list[int], tokens: list[int], models: list[Path]) -> list[int]:
    """Positions of tokens that are not the best next ones by their model, with keys and values as earlier models left them."""
    sequence, cache, start, wrong, begin = prompt + tokens, None, 0, [], 0
    for model, span in itertools.groupby(models):
        count = len(list(span))
        end = len(prompt) + begin + count - 1
        output = loaded(model)(input_ids=torch.tensor([sequence[start:end]]), past_key_values=cache, use_cache=True)
        cache, start, logits = output.past_key_values, end, output.logits[0, -count:]
        chosen = logits[range(count), tokens[begin : begin + count]]
        wrong += [begin + i for i in (logits.max(-1).values - chosen > NEAR).nonzero().flatten().tolist()]
        begin += count
    return wrong
