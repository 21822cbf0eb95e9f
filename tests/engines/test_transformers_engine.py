"""The smallest engine there is keeps the same promises: what `test_vllm_tokens` asks of vLLM, and a torn replica."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from transformers import MistralConfig, MistralForCausalLM

from inference_plugin.engines.transformers import Completion, TransformersEngine
from inference_plugin.net import addresses
from inference_plugin.plugins import plugin_manager
from inference_plugin.wire.errors import EngineUnsupported, TornReplica, WeightwireError
from inference_plugin.wire.messages import ReplicaCard
from tests.engines.conftest import Checkpoint
from tests.engines.test_vllm_tokens import (  # noqa: F401 -- collected here once more
    COUNT,
    IN_FLIGHT,
    PROMPTS,
    Live,
    check_life,
    check_requests_in_flight,
    reference,
    source,
    test_a_manifest_that_does_not_fit_is_refused_with_names_before_anything_changes,
    test_a_number_that_is_served_is_taken_again_with_its_weights_alone,
    test_an_older_version_is_refused_and_changes_nothing,
)
from tests.support.models import make_llama
from tests.support.pages import blocks
from tests.support.plain_engine import Faults
from tests.support.rig import ROOT
from tests.support.rig import runtime as runtime_directory
from trainer_adapters import SyncManager

ENGINES = {"tp1": ("qwen3", True), "tp2": ("llama", False)}
"""Both have one rank; the names are those of the tests that are imported."""


class TransformersDriver:
    """What those tests, and those of `test_pause`, ask of an engine."""

    def __init__(self, engine: TransformersEngine) -> None:
        self.engine = engine

    def submit(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Future[Completion]]:
        return [self.engine.generate(prompt, max_tokens) for prompt in prompts]

    def wait_for_tokens(self, running: list[Future[Completion]], count: int) -> None:
        loop = self.engine.loop

        def lacks_tokens(future: Future[Completion]) -> bool:
            taken = {request.future: len(request.tokens) for request in [*loop.running, *loop.held]}
            return not future.done() and taken.get(future, 0) < count  # one that was just submitted is not taken yet

        while any(lacks_tokens(future) for future in running):
            time.sleep(0.001)

    def look(self, running: list[Future[Completion]]) -> list[dict[str, Any]]:
        return [{"finished": future.done()} for future in running]

    @property
    def cards(self) -> list[ReplicaCard]:
        return addresses.discover()

    def wait(self, running: list[Future[Completion]]) -> list[dict[str, Any]]:
        done = [future.result(600) for future in running]
        return [
            {"tokens": d.tokens, "versions": [str(v) for v in d.versions], "finish_reason": d.finish_reason}
            for d in done
        ]

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[dict[str, Any]]:
        return self.wait(self.submit(prompts, max_tokens))

    def tokens(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
        return [done["tokens"] for done in self.generate(prompts, max_tokens)]


@pytest.fixture
def directory() -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch, runtime_directory(patch) as path:
        yield path


@pytest.fixture  # for each test: an engine of this process that lived on would register in the next test's directory as well
def live(request: pytest.FixtureRequest, directory: Path, checkpoint: Checkpoint) -> Iterator[Live]:
    kind, tied = ENGINES[request.param]
    model_a, model_b = (checkpoint(kind, tied=tied, seed=seed) for seed in (1, 2))
    with TransformersEngine(model_a) as engine:
        yield Live(TransformersDriver(engine), 1, model_a, model_b)  # type: ignore[arg-type]
    assert addresses.discover() == []


@pytest.mark.parametrize(("kind", "tied"), ENGINES.values())
def test_an_updated_engine_is_a_fresh_engine(checkpoint: Checkpoint, kind: str, tied: bool) -> None:
    model_a, model_b = (checkpoint(kind, tied=tied, seed=seed) for seed in (1, 2))
    with pytest.MonkeyPatch.context() as patch, runtime_directory(patch), TransformersEngine(model_a) as engine:
        check_life(TransformersDriver(engine).tokens, model_a, model_b, zones=True)


@pytest.mark.parametrize(("kind", "tied"), ENGINES.values())
def test_steps_at_fixed_addresses_say_what_a_fresh_engine_says_after_each_update(
    directory: Path, checkpoint: Checkpoint, kind: str, tied: bool
) -> None:
    """Without a GPU no graph is captured; slots, caches of a fixed size and weights at fixed addresses are the same."""
    models = [checkpoint(kind, tied=tied, seed=seed) for seed in (1, 2)]
    with TransformersEngine(models[0], captured_length=256) as engine:
        driver = TransformersDriver(engine)
        for version, (install, transport) in enumerate(
            [("auto", "auto"), ("auto", "auto"), ("copy", "zmq"), ("streaming", "stream")], 1
        ):
            served = models[version % 2]
            with SyncManager(install=install, transport=transport, timeout_s=60) as manager:  # type: ignore[arg-type]
                manager.update(source(served), version)
                assert manager.verify(source(served)).ok
            assert driver.tokens(PROMPTS, COUNT) == reference(served)
        with pytest.raises(ValueError, match="would be 257 tokens, and captured_length is 256"):
            engine.generate([1, 2, 3], 254)


@pytest.mark.parametrize("in_flight", IN_FLIGHT)
def test_requests_in_captured_slots_follow_the_policy(directory: Path, checkpoint: Checkpoint, in_flight: str) -> None:
    model_a, model_b = (checkpoint("qwen3", tied=True, seed=seed) for seed in (1, 2))
    with TransformersEngine(model_a, captured_length=1024) as engine:
        check_requests_in_flight(Live(TransformersDriver(engine), 1, model_a, model_b), in_flight)  # type: ignore[arg-type]


def test_a_model_whose_cache_counts_on_the_host_is_not_captured(directory: Path, tmp_path: Path) -> None:
    config = MistralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        sliding_window=8,
    )
    MistralForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(EngineUnsupported, match="StaticSlidingWindowLayer counts tokens on the host"):
        TransformersEngine(tmp_path, captured_length=64)
    assert addresses.discover() == []


@pytest.mark.parametrize("in_flight", IN_FLIGHT)
@pytest.mark.parametrize("live", ["tp1"], indirect=True)
def test_requests_in_flight_follow_the_policy(live: Live, in_flight: str) -> None:
    check_requests_in_flight(live, in_flight)


@pytest.mark.parametrize("live", ["tp1"], indirect=True)
def test_a_torn_engine_refuses_with_the_reason_until_a_full_update_heals_it(live: Live) -> None:
    live.update("A")
    faults = Faults()
    faults.steps = ["install", "undo"]
    plugin_manager().register(faults)
    try:
        running = live.driver.submit(PROMPTS[:1] * 10, 900)  # together they run for longer than the update takes
        with SyncManager() as manager, pytest.raises(TornReplica):
            manager.update(live.source("B"), live.version + 1)
    finally:
        plugin_manager().unregister(faults)
    for future in [*running, *live.driver.submit(PROMPTS[:1], 4)]:
        with pytest.raises(TornReplica, match="the test lets 'undo' fail"):
            future.result(600)  # type: ignore[attr-defined]
    live.version += 1
    live.update("B")
    live.assert_serves("B")


def test_a_request_that_fails_or_is_cancelled_ends_alone_and_the_engine_goes_on(
    directory: Path, checkpoint: Checkpoint
) -> None:
    with TransformersEngine(checkpoint("llama", tied=False, seed=1)) as engine:
        long = engine.generate([1, 5, 9], 64)
        with pytest.raises(IndexError, match="out of range"):
            engine.generate([1, 10**6], 4).result(600)
        cancelled = engine.generate([1, 5], 64)
        cancelled.cancel()  # before it has begun, or too late
        with pytest.raises(ValueError, match="at least one token"):
            engine.generate([], 4)
        assert len(long.result(600).tokens) == 64
        assert cancelled.cancelled() or len(cancelled.result(600).tokens) == 64
        assert len(engine.generate([1, 5], 3).result(600).tokens) == 3
    with pytest.raises(WeightwireError, match="closed"):
        engine.generate([1, 5], 3)


def test_a_request_that_comes_while_the_engine_is_closed_ends_too(directory: Path, checkpoint: Checkpoint) -> None:
    with TransformersEngine(checkpoint("llama", tied=False, seed=1)) as engine:
        is_closing = threading.Event()
        engine.loop.submit(is_closing.wait)  # type: ignore[arg-type]
        engine.loop.submit(engine.loop.stop)
        late = engine.generate(PROMPTS[0], COUNT)
        is_closing.set()
        assert late.result(30).finish_reason == "abort"
        with pytest.raises(WeightwireError, match="is closed"):
            engine.generate(PROMPTS[0], COUNT)


def test_a_user_without_an_engine_can_play_with_it(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "inference_plugin.engines.transformers", make_llama(tmp_path, seed=1)],
        input="hello\nonce more\n",
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    assert [line.split("]")[0] for line in ran.stdout.splitlines() if line.startswith("[")] == ["[version 0"] * 2


def test_the_program_of_its_page_runs_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (program,) = (block.text for block in blocks(ROOT / "docs" / "generate-loop.md", "python"))
    (tmp_path / "program.py").write_text(program)
    with runtime_directory(monkeypatch):
        ran = subprocess.run(
            [sys.executable, tmp_path / "program.py", make_llama(tmp_path / "model", seed=1)],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
    assert ran.returncode == 0, ran.stderr
    first, second, last = ran.stdout.splitlines()
    assert "versions=[0, 0, 0, 0, 0, 0, 0, 0]" in first and "versions=[1, 1, 1, 1, 1, 1, 1, 1]" in second
    assert last.startswith("stopped for ")
