"""Post-processing that fails, or whose rank is killed, while it makes modules anew: on engines of two ranks.

Llama that vLLM quantises by a maximum over all ranks: each rank notes its part before the commit, and modules are made in it.
MiniCPM3 in SGLang: each rank derives weights of its latent attention. A fault on one rank leaves all ranks as they were.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from inference_plugin.wire.errors import PeerLost, TornReplica, WeightwireError
from inference_plugin.wire.messages import InstallPolicy
from tests.engines.test_vllm_faults import PLUGIN, assert_gone
from tests.support.engines import Driver, eventually
from tests.support.families import FAMILIES, make_versions
from tests.support.family_trials import LOGPROBS, SglangAnswers
from tests.support.trials import COUNT, PROMPTS, whole
from trainer_adapters import SyncManager

pytestmark = [pytest.mark.engine, pytest.mark.slow]

TOLD_S = 60.0
"""A killed rank is told of within this time, far below the limit of an update."""

Say = Callable[[], Any]


class Rig:
    """An engine with the fault plug-in that serves the first of two models, and what fresh engines of both say."""

    def __init__(self, engine: Driver, faults: Path, models: tuple[Path, Path], fresh: list[Any], say: Say) -> None:
        self.engine, self.models, self.fresh, self.say = engine, models, fresh, say
        self._faults = faults
        self.version = 0

    def order(self, *faults: dict[str, Any]) -> None:
        temporary = self._faults.with_suffix(".tmp")
        temporary.write_text(json.dumps(faults))
        temporary.replace(self._faults)

    def update(self, manager: SyncManager, which: int) -> None:
        self.version += 1
        manager.update(whole(self.models[which]), self.version)
        assert self.say() == self.fresh[which]

    def check_a_fault(self, manager: SyncManager, rank: int, step: str, when: int) -> WeightwireError:
        """An update to the second model fails by a fault on one rank, and the engine says what it said before."""
        self.order({"rank": rank, "step": step, "when": when})
        with pytest.raises(WeightwireError, match=f"planned fault: {step} on rank {rank}") as caught:
            manager.update(whole(self.models[1]), self.version + 1)
        self.order()
        assert caught.value.version == self.version + 1
        assert self.say() == self.fresh[0]
        return caught.value

    def check_a_kill(self, manager: SyncManager, rank: int, step: str) -> None:
        """A rank that is killed in the middle of `step`: a typed error in bounded time, and nothing of the engine is left."""
        self.order({"rank": rank, "step": step, "when": 1, "hangs": True})
        update = manager.update_async(whole(self.models[1]), self.version + 1)
        eventually(self._faults.with_name(f"{self._faults.name}.{rank}").exists, what=f"{step} on rank {rank}")
        (card,) = self.engine.cards
        os.kill(card.workers[rank].pid, signal.SIGKILL)
        began_s = time.monotonic()
        with pytest.raises((PeerLost, TornReplica)) as caught:
            update.result(600)
        assert time.monotonic() - began_s < TOLD_S
        assert caught.value.version == self.version + 1
        assert_gone(card)
        assert self.engine.cards == [] and self.engine.leftovers() == []


def orders_in(directory: Path) -> tuple[Path, dict[str, str]]:
    """The fault plug-in's file, and what an engine's environment says of it."""
    faults = directory / "faults"
    faults.write_text("[]")
    return faults, {"WEIGHTWIRE_PLUGINS": PLUGIN, "WEIGHTWIRE_TEST_FAULTS": str(faults)}


@pytest.fixture(scope="module")
def quantised(runtime: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    family, directory = FAMILIES["llama-fp8-by-the-engine"], tmp_path_factory.mktemp("quantised")
    models = make_versions(family, directory)
    options = {"tensor_parallel_size": 2, "dtype": family.dtype, **family.vllm}

    def say(engine: Driver) -> Any:
        return engine.tokens(PROMPTS, COUNT), engine.rpc("ext_state")

    with Driver(runtime) as engine:
        engine.open(models[1], **options)
        fresh = [say(engine)]
    faults, variables = orders_in(directory)
    with Driver(runtime, **variables) as engine:
        engine.open(models[0], **options)
        fresh.insert(0, say(engine))
        assert fresh[0][0] != fresh[1][0]
        yield Rig(engine, faults, models, fresh, functools.partial(say, engine))


@pytest.fixture(scope="module")
def latent(runtime: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    family, directory = FAMILIES["minicpm3"], tmp_path_factory.mktemp("latent")
    models = make_versions(family, directory)
    options = {"dtype": family.dtype, "disable_radix_cache": True, **family.sglang}

    def say(engine: Driver) -> Any:
        return engine.call("say", prompts=PROMPTS, count=COUNT, logprobs=LOGPROBS)

    with SglangAnswers(runtime, tp=2) as engine:
        engine.open(models[1], **options)
        fresh = [say(engine)]
    faults, variables = orders_in(directory)
    with SglangAnswers(runtime, tp=2, **variables) as engine:
        engine.open(models[0], **options)
        fresh.insert(0, say(engine))
        assert fresh[0] != fresh[1]
        yield Rig(engine, faults, models, fresh, functools.partial(say, engine))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("step", "phase"), [("note", "seal"), ("reduce", "commit")])
@pytest.mark.parametrize("install", ["copy", "standby"])
def test_a_fault_where_ranks_reduce_what_they_quantise_by_leaves_all_ranks_as_they_were(
    quantised: Rig, install: InstallPolicy, step: str, phase: str, rank: int
) -> None:
    with SyncManager(install=install, timeout_s=60) as manager:
        quantised.update(manager, 0)  # under `copy` its bytes are the way back
        assert quantised.check_a_fault(manager, rank, step, 2).phase == phase
        for which in (1, 0):
            quantised.update(manager, which)


def test_a_rank_killed_where_ranks_reduce_ends_the_update_by_a_typed_error_in_bounded_time(quantised: Rig) -> None:
    """The last one for this engine."""
    with SyncManager(timeout_s=120) as manager:
        quantised.update(manager, 1)
        quantised.update(manager, 0)
        quantised.check_a_kill(manager, 1, "reduce")


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("install", "phase"), [("copy", "commit"), ("standby", "seal")])
def test_a_fault_where_ranks_of_sglang_derive_weights_leaves_all_ranks_as_they_were(
    latent: Rig, install: InstallPolicy, phase: str, rank: int
) -> None:
    with SyncManager(install=install, timeout_s=60) as manager:
        latent.update(manager, 0)
        assert latent.check_a_fault(manager, rank, "post-process", 1).phase == phase
        for which in (1, 0):
            latent.update(manager, which)


def test_a_rank_of_sglang_killed_where_it_derives_weights_ends_the_update_by_a_typed_error_in_bounded_time(
    latent: Rig,
) -> None:
    """The last one for this engine."""
    assert isinstance(latent.engine, SglangAnswers)
    latent.engine.ends_itself = True
    with SyncManager(install="copy", timeout_s=120) as manager:
        latent.update(manager, 1)
        latent.update(manager, 0)
        latent.check_a_kill(manager, 1, "post-process")
