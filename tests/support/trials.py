"""Trials of one model in one real engine: five updates in a row, each held against a fresh engine bit for bit.

A house is one process that holds one engine after another, so that a fresh engine costs seconds. What an engine says is
its greedy tokens and their log-probabilities. A trial ends in one of four ways:

- right: every update was committed, and the engine said after each what a fresh engine of those weights says;
- refused: the group was not opened, by a typed error, and the engine says what it said before;
- failed: an update was refused or broke off later than that, and the engine says what it said before;
- WRONG: anything else.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from inference_plugin.wire.errors import EngineUnsupported, ManifestMismatch, WeightwireError
from tests.support import checkpoints
from tests.support.engines import Driver
from tests.support.reachable import differences
from trainer_adapters import ModuleAdapter, SyncManager
from trainer_adapters.sources.base import WeightSource

__all__ = [
    "COUNT",
    "House",
    "Outcome",
    "PROMPTS",
    "Said",
    "Source",
    "UPDATES",
    "incomplete",
    "not_refused",
    "too_small",
    "trial",
    "whole",
]

PROMPTS = [[1, 5, 9], [11, 23, 42, 99, 100, 7, 8, 250, 251, 200], [(7 * i) % 250 + 1 for i in range(160)]]
COUNT = 8
UPDATES = 5

Source = Callable[[Path], WeightSource]


@dataclass(frozen=True)
class Said:
    answers: list[dict[str, Any]]
    """Of each prompt: tokens, and the log-probabilities of the likeliest five at each position."""
    state: dict[str, str] = field(repr=False)
    """What the engine computes with, as far as it can be reached (see `reachable.py`): it tells of weights that the prompts
    do not show, and of those that only another kernel reads."""


@dataclass(frozen=True)
class Outcome:
    end: str
    text: str = ""
    after: int = 0
    """How many updates were right before."""

    def __str__(self) -> str:
        return f"{self.end} after {self.after} updates: {self.text}" if self.text else self.end


def whole(checkpoint: Path) -> ModuleAdapter:
    """Every tensor of a checkpoint under its own name, none of them tied."""
    return ModuleAdapter(lambda: checkpoints.load(checkpoint))


@dataclass
class House:
    """A process with one engine at a time; a new one where the last was killed by its engine."""

    runtime: Path
    variables: dict[str, str] = field(default_factory=dict)
    """Of the engines' environment."""
    fresh: dict[tuple[Any, ...], Said] = field(default_factory=dict)
    driver: Driver | None = None
    key: tuple[Any, ...] = ()
    """The checkpoint that the open engine started with, and its arguments."""
    serves: Path | None = None
    """The checkpoint whose fresh engine the open one has last been found equal to."""
    version: int = 0

    def open(self, checkpoint: Path, *, plain: bool, **kwargs: Any) -> None:
        """A fresh engine of `checkpoint`; one that was open is closed. Raises RuntimeError where it doesn't start."""
        self.key, self.serves, self.version = (), None, 0
        if self.driver is None or self.driver.process is None or self.driver.process.poll() is not None:
            self.close()
            self.driver = Driver(self.runtime, in_process=True, **self.variables).__enter__()
        else:
            self.driver.call("close")
        self.driver.open(checkpoint, plain=plain, **kwargs)
        self.key = _key(checkpoint, plain, kwargs)

    def say(self) -> Said:
        assert self.driver is not None
        done = self.driver.wait(self.driver.submit(PROMPTS, COUNT, logprobs=5))
        (state,) = self.driver.rpc("ext_state")
        said = [{"tokens": r["tokens"], "logprobs": repr(r["logprobs"]), "end": r["finish_reason"]} for r in done]
        return Said(said, state)

    def fresh_says(self, checkpoint: Path, *, plain: bool, **kwargs: Any) -> Said:
        """What a fresh engine of `checkpoint` says; asked once."""
        key = _key(checkpoint, plain, kwargs)
        if key not in self.fresh:
            self.open(checkpoint, plain=plain, **kwargs)
            self.fresh[key] = self.say()
            self.serves = checkpoint
        return self.fresh[key]

    def at(self, checkpoint: Path, *, plain: bool, **kwargs: Any) -> Said:
        """What a fresh engine of `checkpoint` says, and one is open that says so: fresh, or right so far."""
        said = self.fresh_says(checkpoint, plain=plain, **kwargs)
        if self.serves != checkpoint or self.key != _key(checkpoint, plain, kwargs):
            self.open(checkpoint, plain=plain, **kwargs)
            self.serves = checkpoint
            assert self.say() == said, "two fresh engines of the same weights differ: nothing can be told"
        return said

    def close(self) -> None:
        driver, self.driver = self.driver, None
        if driver is not None:
            alive = driver.process is not None and driver.process.poll() is None
            with contextlib.suppress(AssertionError) if not alive else contextlib.nullcontext():
                driver.__exit__(*(None, None, None) if alive else (AssertionError, None, None))


def trial(
    house: House,
    model_a: Path,
    model_b: Path,
    *,
    plain: bool,
    install: str,
    source: Source = whole,
    partial: bool = False,
    updates: int = UPDATES,
    **kwargs: Any,
) -> Outcome:
    """From A to B and back, `updates` times in a row, by one manager, in a fresh engine of A or in one that was right when a
    trial of the same two ended."""
    fresh = {model: house.fresh_says(model, plain=plain, **kwargs) for model in (model_b, model_a)}
    assert fresh[model_a].answers != fresh[model_b].answers, (
        "these prompts do not tell the two versions from each other"
    )
    if house.serves is None or house.key not in [_key(model, plain, kwargs) for model in fresh]:
        house.open(model_a, plain=plain, **kwargs)
        house.serves = model_a
    serves, house.serves = house.serves, None
    assert house.say() == fresh[serves], "two fresh engines of the same weights differ: nothing can be told"
    right = 0
    with SyncManager(install=install, partial=partial, timeout_s=60) as manager:  # type: ignore[arg-type]
        while right < updates:
            target = model_b if serves == model_a else model_a
            house.version += 1
            try:
                report = manager.update(source(target), house.version)
            except WeightwireError as error:
                if house.say() != fresh[serves]:
                    return Outcome("WRONG", f"what a failed update left: {_about(error)}", right)
                house.serves = serves
                opening = right == 0 and error.phase in ("open", "agree")
                return Outcome("refused" if opening else "failed", _about(error), right)
            assert all(r.install == install or r.mechanism == "loader" for r in report.replicas)
            serves = target
            if (said := house.say()) != fresh[serves]:
                return Outcome("WRONG", _difference(said, fresh, target), right)
            right += 1
        read = manager.verify(source(serves)).replicas
        assert not any(one.differ for one in read), read
    house.serves = serves
    return Outcome("right", "; ".join(why for one in read for why in one.unreadable), after=right)


Case = tuple[str, dict[str, torch.Tensor]]


def incomplete(tensors: Mapping[str, torch.Tensor]) -> Iterator[Case]:
    """Manifests that lack something, and what: every tensor in turn, whole experts, layers and kinds."""
    groups: dict[str, set[str]] = {name: {name} for name in tensors}
    for name in tensors:
        for pattern in (r".*\.experts\.\d+\.", r".*\.experts\.", r".*\.layers\.\d+\.", r".*self_attn\."):
            if found := re.match(pattern, name):
                groups.setdefault(found.group() + "*", set()).add(name)
        groups.setdefault("all of *." + ".".join(name.split(".")[-2:]), set()).add(name)
        if name.endswith("bias"):
            groups.setdefault("all biases", set()).add(name)
    for what, names in groups.items():
        yield what, {name: tensor for name, tensor in tensors.items() if name not in names}


def too_small(tensors: Mapping[str, torch.Tensor]) -> Iterator[Case]:
    """Manifests in which one tensor lacks its last row, or its last column; one tensor of each kind."""
    kinds = {".".join(name.split(".")[-2:]): name for name in tensors}
    for name in kinds.values():
        tensor = tensors[name]
        for dim in range(tensor.dim()):
            if tensor.shape[dim] > 1:
                cut = tensor.narrow(dim, 0, tensor.shape[dim] - 1).contiguous()
                yield f"the end of dimension {dim} of {name}", {**tensors, name: cut}


def not_refused(cases: Iterable[Case], version: int = 1, **settings: Any) -> list[str]:
    """Of manifests that must be refused before anything changes, those that are not, and what became of them.

    Each is an update to `version`, or to the next one where the last was committed."""
    wrong: list[str] = []
    with SyncManager(timeout_s=60, **settings) as manager:
        before = manager.versions()
        for what, tensors in cases:
            try:
                manager.update(ModuleAdapter(tensors), version)
                wrong.append(f"{what}: committed")
            except (ManifestMismatch, EngineUnsupported) as error:
                if error.phase != "open":
                    wrong.append(f"{what}: refused in phase {error.phase!r} only")
            except WeightwireError as error:
                wrong.append(f"{what}: {_about(error)}")
            if manager.versions() != before:
                before = manager.versions()
                version += 1
    return wrong


def _key(checkpoint: Path, plain: bool, kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    return (checkpoint, plain, *sorted(kwargs.items()))


def _about(error: WeightwireError) -> str:
    return f"{type(error).__name__} in phase {error.phase!r}: {error}"


def _difference(said: Said, fresh: Mapping[Path, Said], wanted: Path) -> str:
    differ = differences(said.state, fresh[wanted].state)
    where = f"; {len(differ)} reachable values differ from a fresh engine's: {', '.join(differ[:12])}"
    tokens = [answer["tokens"] for answer in said.answers]
    numbers = "with NaN" if any("nan" in answer["logprobs"] for answer in said.answers) else "no NaN"
    if said.answers == fresh[wanted].answers:
        return f"committed: answers are right{where}"
    if any(said.answers == other.answers for other in fresh.values()):
        return f"committed: answers are exactly those of the version before{where}"
    if tokens == [answer["tokens"] for answer in fresh[wanted].answers]:
        return f"committed: tokens are right, log-probabilities are not, {numbers}{where}"
    return f"committed: tokens of neither version, {numbers}{where}"
