"""Real SGLang engines: ways of loading, the server, one version per token under load, and beside a vLLM replica."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from inference_plugin.wire.errors import PeerLost, ReplicaAsleep, TornReplica, WeightwireError
from tests.engines.conftest import Checkpoint
from tests.engines.test_vllm_faults import PLUGIN
from tests.engines.test_vllm_one_version import TOKENS, Loaded, Replay
from tests.engines.test_vllm_tokens import COUNT, PROMPTS, check_life, reference, source, weights
from tests.support import sglang_pool
from tests.support.engines import ROOT, Driver, check_starts, eventually, noted_starts
from tests.support.managers import SyncManager
from tests.support.sglang_engines import PYTHON, SglangDriver, SglangServer
from tests.support.visible import check_probe, check_visible_on_sglang
from trainer_adapters import LocalSlice, ModuleAdapter

pytestmark = [pytest.mark.engine, pytest.mark.slow]

NOT_DISCOVERED = {"SGLANG_PLUGINS": "somebody_elses"}


@pytest.fixture
def pair(checkpoint: Checkpoint) -> tuple[Path, Path]:
    return checkpoint("qwen3", tied=True, seed=1), checkpoint("qwen3", tied=True, seed=2)


def test_an_engine_built_by_hand_has_the_extension_where_discovery_leaves_it_out(
    runtime: Path, pair: tuple[Path, Path]
) -> None:
    with SglangDriver(runtime, **NOT_DISCOVERED) as driver:
        driver.open(pair[0], explicit=True)
        with SyncManager(timeout_s=180) as manager:
            manager.update(source(pair[1]), 1)
        assert driver.tokens(PROMPTS, COUNT) == reference(pair[1])


def test_an_engine_that_leaves_the_plug_in_out_runs_without_it(runtime: Path, pair: tuple[Path, Path]) -> None:
    with SglangDriver(runtime, **NOT_DISCOVERED) as driver:
        driver.open(pair[0])
        assert driver.tokens(PROMPTS, COUNT) == reference(pair[0])
        assert driver.cards == []
        with SyncManager(timeout_s=60) as manager, pytest.raises(PeerLost, match="no replica"):
            manager.update(source(pair[1]), 1)


def test_the_user_s_own_sleep_refuses_requests_and_waits_for_a_group_that_is_being_opened_and_reads_the_weights(
    runtime: Path, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    """On a GPU reading released memory ends the engine, and so it does here."""
    held = tmp_path / "held"
    with SglangDriver(runtime, **{sglang_pool.VARIABLE: str(held)}) as driver:
        driver.open(pair[0], enable_weights_cpu_backup=True)
        driver.call("own_sleep", level=1)  # from now on the weights lie where nobody may touch what is released
        with pytest.raises(AssertionError, match="SGLang has released its memory"):
            driver.tokens(PROMPTS[:1], COUNT)
        driver.call("own_wake_up")
        assert driver.tokens(PROMPTS, COUNT) == reference(pair[0])
        driver.call("own_pause")
        driver.call("own_sleep", level=1)
        waiting = driver.submit(PROMPTS, COUNT)
        driver.call("own_resume")  # nothing steps before the memory is back
        driver.call("own_wake_up", tags=["weights"])
        with SyncManager(timeout_s=180) as manager:
            manager.pause()
            manager.resume()  # neither does this let requests into a cache that is released
        assert not any(request["tokens"] for request in driver.look(waiting))
        driver.call("own_wake_up")
        assert [request["tokens"] for request in driver.wait(waiting)] == reference(pair[0])
        with SyncManager(timeout_s=180) as manager:
            update = manager.update_async(source(pair[1]), 1)
            eventually(held.exists, what="the opening to begin")
            driver.call("own_sleep", level=1)
            with pytest.raises(ReplicaAsleep, match="a command of the engine's own has released"):
                update.result(600)
            with pytest.raises(ReplicaAsleep):
                manager.update(source(pair[1]), 2)
            driver.call("own_wake_up")
            manager.update(source(pair[1]), 3)
            assert manager.verify(source(pair[1])).ok
        assert driver.tokens(PROMPTS, COUNT) == reference(pair[1])


class Stalling(ModuleAdapter):
    """Stops in the middle of its slices until it is told to go on."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__(tensors)
        self.stalled, self.go_on = threading.Event(), threading.Event()

    def slices(self) -> Iterator[LocalSlice]:
        for i, item in enumerate(super().slices()):
            if i == 5:
                self.stalled.set()
                self.go_on.wait(600)
            yield item


def test_a_server_of_our_launcher_answers_while_a_trainer_stalls_and_never_dies_of_a_bad_update(
    runtime: Path, pair: tuple[Path, Path]
) -> None:
    server = SglangServer(runtime, pair[0], explicit=True, log_level="info", **NOT_DISCOVERED)
    with noted_starts(server.job) as starts, server:
        check_starts(server, starts)
        check_life(server.tokens, *pair, zones=True)
        stalling = Stalling(weights(pair[1]))
        with SyncManager(timeout_s=180, lease_s=180) as manager:
            future = manager.update_async(stalling, 100)
            assert stalling.stalled.wait(600)
            for _ in range(3):
                assert server.tokens(PROMPTS, COUNT) == reference(pair[0])
                assert server.request("GET", "/health")[0] == 200
            stalling.go_on.set()
            assert [r.status for r in future.result(600).replicas] == ["committed"]
        assert server.tokens(PROMPTS, COUNT) == reference(pair[1])
        assert server.generate(PROMPTS[0], COUNT)[1]["meta_info"]["weight_version"] == "100"
        with SyncManager(timeout_s=180) as manager:
            check_visible_on_sglang(server, PROMPTS[1], source(pair[1]), manager, pair[1])
        check_probe(server, pair[1], pair[0])
        with SyncManager(timeout_s=180) as manager, manager.paused():
            assert server.request("GET", "/health")[0] == 200  # SGLang's own answer would be a token
        narrow = weights(pair[0])
        narrow["model.norm.weight"] = narrow["model.norm.weight"][:-1].clone()
        for bad in (narrow, {"nonsense": torch.zeros(3)}):
            with SyncManager(timeout_s=180) as manager, pytest.raises(WeightwireError):
                manager.update(ModuleAdapter(bad), 103)
            assert server.tokens(PROMPTS, COUNT) == reference(pair[1])
    assert server.leftovers() == [] and server.family() == []


@pytest.mark.parametrize("server", ["python", "rust"])
def test_a_torn_server_answers_503_with_the_reason_until_it_is_healed(
    runtime: Path, pair: tuple[Path, Path], server: str
) -> None:
    """SGLang's Rust server is a part of the scheduler's process, and its HTTP answers are its own."""
    faults = runtime / "faults-sglang-server"
    faults.write_text('[{"rank": 0, "step": "install", "when": "after"}]')
    variables = {"WEIGHTWIRE_PLUGINS": PLUGIN, "WEIGHTWIRE_TEST_FAULTS": str(faults)}
    if server == "rust":
        variables["SGLANG_RUST_SERVER"] = "1"
    with (
        SglangServer(
            runtime, pair[0], tp=2 if server == "python" else 1, options={"weight_version": "started"}, **variables
        ) as engine,
        SyncManager(timeout_s=120, install="copy", in_flight="keep") as sync,
    ):
        with pytest.raises(TornReplica, match="previous version's bytes are gone"):
            sync.update(source(pair[1]), 1)
        (card,) = engine.cards
        assert card.state == "torn"
        for _ in range(2):
            status, answer = engine.generate(PROMPTS[1], COUNT)
            assert status == 503 and "planned fault" in json.dumps(answer), (status, answer)
        faults.write_text("[]")
        sync.update(source(pair[1]), 2)
        assert engine.tokens(PROMPTS, COUNT) == reference(pair[1])
        with sync.paused():
            assert engine.request("GET", "/health")[0] == 200
        sync.update(source(pair[0]), 3)
        status, answer = engine.generate(PROMPTS[1], COUNT)
        spans = answer["meta_info"]["weight_versions"]
        assert (status, answer["output_ids"]) == (200, reference(pair[0])[1])
        assert [(span["version"], span["start"], span["end"]) for span in spans] == [("3", 0, COUNT)]
        if server == "python":  # nobody has asked it before; the Rust server doesn't say
            assert engine.request("POST", "/update_weights_from_disk", {"model_path": str(pair[1])})[1]["success"]
            eventually(  # a thread writes what the server's process reads
                lambda: engine.request("GET", "/model_info")[1]["weight_version"] == "unknown",
                what="a version that nobody knows",
            )


def test_an_engine_started_under_the_name_of_the_first_version_takes_it_with_requests_in_flight(
    runtime: Path, pair: tuple[Path, Path]
) -> None:
    with SglangDriver(runtime) as driver:
        driver.open(pair[0], weight_version="1")
        with SyncManager(timeout_s=180) as manager:
            running = driver.submit([PROMPTS[1]] * 3, 800)
            driver.wait_for_tokens(running, 3)
            report = manager.update(source(pair[1]), 1)
        assert [r.status for r in report.replicas] == ["committed"]
        assert {r["finish_reason"] for r in driver.wait(running)} == {"length"}
        assert driver.tokens(PROMPTS, COUNT) == reference(pair[1])


def check_one_version(
    runtime: Path,
    checkpoint: Checkpoint,
    in_flight: str,
    *,
    tp: int = 1,
    pp: int = 1,
    kind: str = "llama",
    updates: int = 50,
    **options: Any,
) -> None:
    """Updates alternate between two models while requests run; every token is one of its version's."""
    models = checkpoint(kind, tied=False, seed=1), checkpoint(kind, tied=False, seed=2)
    with SglangDriver(runtime, tp=tp, pp=pp) as driver:
        driver.open(models[0], **options)
        loaded = Loaded("sglang", driver, models)
        sources = [ModuleAdapter(load_file(model / "model.safetensors")) for model in models]
        names: list[str] = []
        with SyncManager(in_flight=in_flight, timeout_s=180) as sync:  # type: ignore[arg-type]
            for _ in range(updates):
                loaded.top_up(names)
                loaded.version += 1
                report = sync.update(sources[loaded.version % 2], loaded.version)
                assert [r.status for r in report.replicas] == ["committed"]
        done = driver.wait(names)
    assert [(r["finish_reason"], len(r["tokens"])) for r in done] == [("length", TOKENS)] * len(done)
    replay = Replay(models, in_flight)
    for request in done:
        replay.check(loaded.prompts[request["name"]], request["tokens"], request["versions"])
    crossing = sum(len(set(r["versions"])) > 1 for r in done)
    print(f"{len(done)} requests, {crossing} across updates, {replay.total} tokens, {replay.unexplained} unexplained")
    assert crossing, "no request ran across an update"
    assert replay.unexplained == 0
    assert replay.by_other <= replay.total // 20, "the two sets can't be told apart"


@pytest.mark.timeout(900)
@pytest.mark.parametrize("in_flight", ["keep", "recompute"])
def test_every_token_is_of_exactly_one_version_while_50_updates_alternate_under_load(
    runtime: Path, checkpoint: Checkpoint, in_flight: str
) -> None:
    check_one_version(runtime, checkpoint, in_flight, tp=2)


def test_one_update_reaches_vllm_and_sglang_and_goes_on_without_the_one_that_is_killed(
    runtime: Path, pair: tuple[Path, Path]
) -> None:
    with Driver(runtime) as vllm, SglangDriver(runtime, job=vllm.job, ends_itself=True) as sglang:
        vllm.open(pair[0])
        sglang.open(pair[0])
        assert sorted(card.engine for card in vllm.cards) == ["sglang", "vllm"]
        with SyncManager(timeout_s=180, lease_s=180) as manager:
            report = manager.update(source(pair[1]), 1)
            assert sorted((r.engine, r.status) for r in report.replicas) == [
                ("sglang", "committed"),
                ("vllm", "committed"),
            ]
            assert len({r.digest for r in report.replicas}) == 1
            for driver in (vllm, sglang):
                assert driver.tokens(PROMPTS, COUNT) == reference(pair[1])
            assert manager.verify(source(pair[1])).ok
            (card,) = [card for card in vllm.cards if card.engine == "sglang"]
            stalling = Stalling(weights(pair[0]))
            future = manager.update_async(stalling, 2)
            assert stalling.stalled.wait(600)
            os.kill(card.pid, signal.SIGKILL)
            stalling.go_on.set()
            outcome = {r.engine: r for r in future.result(600).replicas}
            assert outcome["vllm"].status == "committed" and outcome["sglang"].status == "failed"
            assert outcome["sglang"].error is not None and outcome["sglang"].error.kind == "PeerLost"
        assert vllm.tokens(PROMPTS, COUNT) == reference(pair[0])


SPARED = """
from types import SimpleNamespace
import torch
from inference_plugin.engines.drafts import NoDraft
from inference_plugin.engines.sglang.model import SglangModel
from inference_plugin.engines.sglang.served import ServedModel

layer = torch.nn.Module()
for name, kept in (("mask", False), ("scale", False), ("cos_sin_cache", False), ("mean", True)):
    layer.register_buffer(name, torch.zeros(1), persistent=kept)
model = torch.nn.Module()
model.layer = layer
served = object.__new__(ServedModel)
served.live, served.draft = model, NoDraft("it is of another kind")
print(served.lost_by_a_reset(["mas"]))
print(SglangModel.lost_by_a_reset(SimpleNamespace(live=model), ["mas"]))
"""


@pytest.mark.full
def test_a_buffer_that_no_update_brings_back_is_named_unless_sglang_s_reset_spares_it() -> None:
    told = subprocess.run([PYTHON, "-c", SPARED], cwd=ROOT, capture_output=True, text=True, check=True)
    assert told.stdout.splitlines()[-2:] == ["['layer.scale', 'the draft model']", "['layer.scale']"]


REFUSED = """
from types import SimpleNamespace
import torch
from inference_plugin.engines.sglang.model import SglangModel
from sglang.srt.model_executor.model_runner_components import weight_updater

live = torch.nn.Module()
live.post_load_weights = lambda: None
model = SimpleNamespace(live=live, _arguments=SimpleNamespace(enable_eplb=False, elastic_ep_backend=None))
print(SglangModel.unfinishable(model))
weight_updater._unsupported_derived_weight_cache_error = lambda model: "SGLang says no"
print(SglangModel.unfinishable(model))
"""


@pytest.mark.full
def test_what_sglang_itself_cannot_update_is_refused_in_its_own_words_and_what_we_cannot_in_ours() -> None:
    told = subprocess.run([PYTHON, "-c", REFUSED], cwd=ROOT, capture_output=True, text=True, check=True)
    assert told.stdout.splitlines()[-2:] == ["Module post-processes as a whole", "SGLang says no"]
