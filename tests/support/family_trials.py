"""Trials of a model family in a real engine, for `make models`: five updates in a row, each held against a fresh engine.

As `trials.trial`, and more is noted: how the replica installs, what `verify` says, and why an engine does not start. No
engine's crash ends a survey: the next engine gets a process of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from inference_plugin.wire.errors import PeerLost, WeightwireError
from inference_plugin.wire.messages import InstallPolicy
from inference_plugin.wire.reports import ReplicaReport, VerifyReport
from tests.support import poison
from tests.support.checkpoints import load
from tests.support.engines import ENGINE_ARGUMENTS, EXTENSION, Driver
from tests.support.families import Family
from tests.support.gpu_classes import VARIABLE as GPU_CLASSES
from tests.support.reachable import differences
from tests.support.sglang_engines import SglangDriver
from tests.support.torchvision_here import VARIABLE as TORCHVISION
from tests.support.trials import COUNT, PROMPTS, UPDATES, Said
from trainer_adapters import ModuleAdapter, SyncManager

__all__ = ["FamilyTrial", "Host", "SglangAnswers", "SglangHost", "VllmHost", "run_trial"]

START_S = 180.0
"""Longest start of an engine of a tiny model, in seconds."""
TEXTS = ["one two three", "The quick brown fox jumps over the lazy dog, 250 times.", "weights " * 30]
"""Prompts of a pooling model in SGLang, which takes text."""
LOGPROBS = 5
MEDIA = (1, 2)
"""Seeds of the images or sounds that an engine is asked about."""
LOG_LINES = 400
"""Lines of an engine's log that may hold the reason why it ended."""


@dataclass
class FamilyTrial:
    """What became of a family in one engine and one layout."""

    outcome: str
    """right, refused, failed, WRONG, "does not start", or "cannot be told"."""
    words: str = ""
    """The refusal's or the engine's words, or how a wrong engine differs."""
    updates: int = 0
    """How many updates were right."""
    mechanism: str = ""
    install: str = ""
    why: str = ""
    """Why the replica takes this mechanism rather than a plan, in its own words."""
    verified: str = ""
    """"verified", or why not."""


class EngineGone(Exception):
    """The engine did not start, crashed, or did not answer; the message is the engine's words."""


class EngineMute(EngineGone):
    """The engine started, and did not answer."""


@dataclass
class Host:
    """One engine at a time, which answers for one family."""

    runtime: Path
    driver: Driver | None = None
    reaches: ClassVar[bool] = False
    """Whether `reach` can look into the engine's modules."""

    def open(self, family: Family, checkpoint: Path, *, plain: bool) -> None:
        """Starts a fresh engine of `checkpoint`; closes the one that is open. Raises `EngineGone`."""
        raise NotImplementedError

    def answers(self, family: Family) -> Said:
        raise NotImplementedError

    def reach(self) -> Said:
        """What the modules of the open engine reach."""
        raise NotImplementedError

    def is_mute(self, family: Family) -> bool:
        """Whether the engine takes a class for GPUs, which computes nothing here."""
        raise NotImplementedError

    def say(self, family: Family, *, mute: bool = False) -> Said:
        """What the open engine says; of a mute one, what its modules reach. Raises `EngineMute`."""
        try:
            return self.reach() if mute else self.answers(family)
        except (AssertionError, RuntimeError, OSError) as error:
            raise EngineMute(self.words_of(error)) from error

    def words_of(self, error: Exception) -> str:
        """An error of the driver in the engine's own words, and without the engine: a driver may hang after an error."""
        log = self.driver.log_tail(LOG_LINES) if self.driver is not None else ""
        self.kill()
        return _engine_words(str(error), log)

    def plugin_words(self) -> str:
        """The last line of the engine's log in which the plug-in says why it serves no updates; "" if there is none."""
        lines = self.driver.log_tail(LOG_LINES).splitlines() if self.driver is not None else []
        own = [
            line.partition("weightwire: ")[2]
            for line in lines
            if "weightwire: " in line and poison.VARIABLE not in line
        ]
        return own[-1] if own else ""

    def close(self) -> None:
        """Ends the engine's process, whatever state it is in."""
        self.kill()

    def kill(self) -> None:
        driver, self.driver = self.driver, None
        if driver is not None:
            driver.__exit__(AssertionError, None, None)


class VllmHost(Host):
    """In-process vLLM engines, one after another in one process of one kind."""

    reaches = True
    kind: tuple[type[Driver], bool, str] = (Driver, False, "")
    """The open driver's class, whether it has torchvision, and the package of whose classes for GPUs vLLM takes."""

    def open(self, family: Family, checkpoint: Path, *, plain: bool) -> None:
        driver_class = Driver if family.answer == "tokens" else PoolingDriver
        try:
            kind = (driver_class, family.torchvision, family.gpu_class)
            if self.driver is None or self.kind != kind:
                self.close()
                variables = {TORCHVISION: "1"} if family.torchvision else {}
                variables |= {GPU_CLASSES: family.gpu_class} if family.gpu_class else {}
                driver = driver_class(self.runtime, in_process=True, **variables)
                if family.torchvision:
                    driver.preloads = ()  # whose processes are without
                self.driver, self.kind = driver.__enter__(), kind
            else:
                self.driver.call("close")
            self._open(family, checkpoint, plain=plain)
        except (AssertionError, RuntimeError, OSError) as error:
            raise EngineGone(self.words_of(error)) from error

    def _open(self, family: Family, checkpoint: Path, *, plain: bool) -> None:
        assert self.driver is not None
        arguments = {
            "model": str(checkpoint),
            "worker_extension_cls": EXTENSION,
            **ENGINE_ARGUMENTS,
            "dtype": family.dtype,
            **family.vllm,
        }
        layout = {"WEIGHTWIRE_TEST_LAYOUT": "plain" if plain else "packed"}
        self.driver.call("open", timeout_s=START_S, kwargs=arguments, env=layout)
        self.driver.family()

    def answers(self, family: Family) -> Said:
        assert self.driver is not None
        if family.answer == "tokens":
            asked: list[tuple[list[list[int]], dict[str, int]]] = [(PROMPTS, {})] if family.text else []
            asked += [([list(family.place)], {family.medium: seed}) for seed in MEDIA if family.medium]
            done = []
            for prompts, more in asked:  # one after another: what else is in a batch may change the last bits
                done += self.driver.wait(self.driver.submit(prompts, COUNT, logprobs=LOGPROBS, **more))
            said = [{"tokens": r["tokens"], "logprobs": repr(r["logprobs"]), "end": r["finish_reason"]} for r in done]
            if dead := next((r["reason"] for r in done if r["finish_reason"] == "dead"), None):
                raise RuntimeError(dead)
        else:
            said = _vectors(self.driver.call("pool", prompts=PROMPTS, task=family.answer))
        return Said(said, self.reach().state)

    def reach(self) -> Said:
        assert self.driver is not None
        (state,) = self.driver.rpc("ext_state")
        return Said([], state)

    def is_mute(self, family: Family) -> bool:
        return bool(family.gpu_class)


class SglangHost(Host):
    """SGLang engines, each in processes of its own. Without its cache of prefixes: an answer made from one differs in the last
    bits from the answer before it."""

    reaches = True

    def open(self, family: Family, checkpoint: Path, *, plain: bool) -> None:
        self.close()
        arguments: dict[str, Any] = {} if family.answer == "tokens" else {"is_embedding": True}
        if family.stand_ins:
            arguments["attention_backend"] = "triton"
        try:
            kind = (
                SglangForGpus if family.sglang_for_gpus else SglangWithStandIns if family.stand_ins else SglangAnswers
            )
            driver = kind(self.runtime)
            self.driver = driver.__enter__()
            arguments |= {"dtype": family.dtype, "disable_radix_cache": True, **family.sglang}
            driver.open(checkpoint, **arguments)
        except (AssertionError, RuntimeError, OSError) as error:
            raise EngineGone(self.words_of(error)) from error

    def answers(self, family: Family) -> Said:
        assert self.driver is not None
        if family.answer == "tokens":
            said = self.driver.call("say", prompts=PROMPTS, count=COUNT, logprobs=LOGPROBS)
        else:
            said = _vectors(self.driver.call("pool", texts=TEXTS))
        return Said(said, self.reach().state)

    def reach(self) -> Said:
        assert self.driver is not None
        return Said([], self.driver.call("state", directory=str(self.runtime)))

    def is_mute(self, family: Family) -> bool:
        return family.sglang_for_gpus


class PoolingDriver(Driver):
    module = "tests.support.pooling_driver"


class SglangAnswers(SglangDriver):
    module = "tests.support.sglang_answers"

    def call(self, do: str, *, timeout_s: float = START_S, **fields: Any) -> Any:
        return super().call(do, timeout_s=min(timeout_s, START_S), **fields)


class SglangWithStandIns(SglangAnswers):
    """SGLang that has `sglang_stand_ins` for kernels which it lacks on a CPU."""

    preloads = ("tests.support.sglang_stand_ins", *SglangAnswers.preloads)
    constants = (*SglangAnswers.constants, "TRITON_INTERPRET")

    def __init__(self, runtime: Path) -> None:
        super().__init__(runtime, TRITON_INTERPRET="1")


class SglangForGpus(SglangWithStandIns):
    """SGLang that also takes its code for GPUs, which computes nothing here."""

    preloads = ("tests.support.sglang_gpu_classes", *SglangAnswers.preloads)


def run_trial(
    host: Host,
    family: Family,
    versions: tuple[Path, Path],
    *,
    plain: bool,
    install: InstallPolicy,
    updates: int = UPDATES,
) -> FamilyTrial:
    """From A to B and back, `updates` times in a row, by one manager, in a fresh engine of A."""
    model_a = versions[0]
    trial = FamilyTrial("does not start")
    is_mute = host.is_mute(family)
    say = partial(host.say, family, mute=is_mute)
    if is_mute:
        trial.words = (
            "what its modules reach was compared, and answers were not: the engine's class for GPUs gives none here"
        )
    try:
        try:
            fresh = _fresh(say, host, family, versions, plain=plain)
        except EngineMute as mute:
            if not host.reaches:
                raise
            say = partial(host.say, family, mute=True)
            fresh = _fresh(say, host, family, versions, plain=plain)
            trial.words = f"what its modules reach was compared, and answers were not: the engine gives none: {mute}"
        if len({repr(said.answers or said.state) for said in fresh.values()}) == 1:
            return FamilyTrial("cannot be told", "the prompts do not tell the two versions from each other")
        if (again := say()) != fresh[model_a]:
            trial.words = "an engine does not repeat itself: " + _differ(again, fresh[model_a])
            if not again.state or again.state != fresh[model_a].state:
                return FamilyTrial("cannot be told", trial.words)
            trial.words += "; what its modules reach was compared, and answers were not"
            say = partial(_without_answers, say)
            fresh = {model: Said([], said.state) for model, said in fresh.items()}
        _update_and_compare(say, host, versions, fresh, trial, install=install, updates=updates)
    except EngineGone as gone:
        if trial.outcome != "does not start":
            trial.outcome = "failed"
        trial.words = str(gone)
    return trial


def _fresh(
    say: Callable[[], Said], host: Host, family: Family, versions: tuple[Path, Path], *, plain: bool
) -> dict[Path, Said]:
    """What a fresh engine of each version says. An engine of the first one is open in the end."""
    said = {}
    for model in reversed(versions):
        host.open(family, model, plain=plain)
        said[model] = say()
    return said


def _without_answers(say: Callable[[], Said]) -> Said:
    return Said([], say().state)


def _update_and_compare(
    say: Callable[[], Said],
    host: Host,
    versions: tuple[Path, Path],
    fresh: dict[Path, Said],
    trial: FamilyTrial,
    *,
    install: InstallPolicy,
    updates: int,
) -> None:
    """Fills `trial` in. The open engine serves the first of `versions`."""
    serves, target = versions
    sources = {model: ModuleAdapter(partial(load, model), dtype_rules="engine") for model in versions}
    trial.outcome = "failed"  # until the end is reached
    with SyncManager(install=install, timeout_s=60) as manager:
        while trial.updates < updates:
            try:
                report = manager.update(sources[target], trial.updates + 1)
            except WeightwireError as error:
                refused = trial.updates == 0 and error.phase in ("open", "agree")
                words = host.plugin_words() if isinstance(error, PeerLost) else ""
                trial.outcome, trial.words = ("refused" if refused else "failed"), words or _about(error)
                if (said := say()) != fresh[serves]:
                    trial.outcome = "WRONG"
                    trial.words = f"after a failed update: {_differ(said, fresh[serves])}; {trial.words}"
                return
            _note_replica(trial, report.replicas[0])
            if (said := say()) != fresh[target]:
                old = " (exactly the version before)" if said.answers == fresh[serves].answers else ""
                trial.outcome, trial.words = "WRONG", f"committed, but {_differ(said, fresh[target])}{old}"
                return
            serves, target = target, serves
            trial.updates += 1
        trial.outcome = "right"
        try:
            trial.verified = _verified(manager.verify(sources[serves]))
        except WeightwireError as error:
            trial.verified = _about(error)
        if trial.verified.startswith("differs"):
            trial.outcome, trial.words = "WRONG", f"verify: {trial.verified}"


def _note_replica(trial: FamilyTrial, replica: ReplicaReport) -> None:
    trial.mechanism, trial.install, trial.why = replica.mechanism, replica.install, replica.why


def _verified(report: VerifyReport) -> str:
    for replica in report.replicas:
        if replica.error is not None:
            return f"error: {replica.error.message}"
        if replica.differ:
            return "differs: " + "; ".join(replica.differ)
        if replica.unreadable:
            return "unreadable: " + "; ".join(replica.unreadable)
    return "verified" if report.ok else "nothing compared"


def _differ(said: Said, wanted: Said) -> str:
    """How an engine's answers differ from a fresh engine's."""
    where = differences(said.state, wanted.state)
    state = f"; {len(where)} reachable values differ: {', '.join(where[:8])}" if where else ""
    if said.answers == wanted.answers:
        return f"answers are right{state}"
    nan = ", with NaN" if any("nan" in answer["logprobs"] for answer in said.answers) else ""
    if [answer["tokens"] for answer in said.answers] == [answer["tokens"] for answer in wanted.answers]:
        return f"log-probabilities or vectors are wrong{nan}{state}"
    return f"tokens are wrong{nan}{state}"


def _vectors(vectors: list[str]) -> list[dict[str, Any]]:
    return [{"tokens": [], "logprobs": vector, "end": "pooled"} for vector in vectors]


def _about(error: WeightwireError) -> str:
    return f"{type(error).__name__} in phase {error.phase!r}: {_CONTEXT.sub('', str(error))}"


_CONTEXT = re.compile(r" \[side=[^\]]*\]")
"""Which worker of which replica refused, in an error's text."""
_ERROR = re.compile(r"((?:[A-Za-z_]+\.)*[A-Z][A-Za-z]*(?:Error|Exception|Unsupported|Failed)(?:: .*)?)$")


def _engine_words(told: str, log: str) -> str:
    """The line that says why an engine ended: the driver's, or the first error in the log where that says more."""
    first, _, more = told.partition("\n")
    if "validation error" in first:
        return " ".join([first, *more.splitlines()[:3]])
    if _ERROR.search(first) and "initialization failed" not in first and "See root cause" not in first:
        return first
    in_log = [found.group(1) for line in log.splitlines() if (found := _ERROR.search(line.strip()))]
    return next((line for line in in_log if ": " in line), in_log[0] if in_log else first)
