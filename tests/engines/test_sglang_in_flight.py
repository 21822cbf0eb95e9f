"""Requests of SGLang that its own pause or its namespaces of cached prefixes don't cover, over updates."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.engines.conftest import Checkpoint
from tests.engines.test_vllm_tokens import weights
from tests.support.checkpoints import load
from tests.support.families import FAMILIES, make_versions
from tests.support.family_trials import SglangWithStandIns
from tests.support.managers import SyncManager
from tests.support.models import make_qwen3
from tests.support.sglang_engines import SglangDriver, SglangServer
from trainer_adapters import ModuleAdapter

pytestmark = [pytest.mark.engine]

PATIENT = {"SGLANG_UVICORN_WORKER_HEALTHCHECK_TIMEOUT": "600"}
"""A server with several processes ends those that don't answer it in time, as while they start on a busy machine."""

PROMPT, NEXT = [*range(20, 60)], [77, 78, 79, 80]
TRIES = 20
"""Requests are to run when an update comes. On a busy machine they may have ended before: then it is tried again."""


@pytest.fixture
def old_and_new(checkpoint: Checkpoint) -> tuple[Path, Path]:
    one, two = (checkpoint("qwen3", tied=True, seed=seed) for seed in (1, 2))
    return one, two


def test_a_turn_of_a_session_that_begins_after_an_update_computes_all_of_it_with_the_new_weights(
    runtime: Path, old_and_new: tuple[Path, Path]
) -> None:
    """Under `keep`, beside a request that runs through the update, so that no cache is flushed."""
    old, new = old_and_new
    with SglangDriver(runtime) as driver:
        driver.open(old, enable_streaming_session=True)
        for name in ("idle", "busy"):
            driver.rpc("open_session", 10_000, name, True)
        (first,) = driver.wait(driver.submit([PROMPT], 8, session="idle"))
        with SyncManager(in_flight="keep", timeout_s=60) as manager:
            beside = driver.submit([[5, 6, 7]], 600)
            through = driver.submit([PROMPT], 60, session="busy")
            driver.wait_for_tokens([*beside, *through], 3)
            manager.update(ModuleAdapter(weights(new)), 1)
            (turn,) = driver.wait(driver.submit([NEXT], 8, session="idle"))
            (second,) = driver.wait(through)
            (after,) = driver.wait(driver.submit([NEXT], 8, session="busy"))
            (again,) = driver.wait(driver.submit([NEXT], 8, session="busy"))
            assert set(turn["versions"]) == set(after["versions"]) == {"1"}, "as it is stamped"
            assert second["finish_reason"] == "length" and again["cached"] > 0
            driver.wait(beside)
        texts = [PROMPT + first["tokens"] + NEXT, PROMPT + second["tokens"] + NEXT]
        texts.append(texts[1] + after["tokens"] + NEXT)
    with SglangDriver(runtime) as driver:
        driver.open(new)
        fresh = driver.tokens(texts, 8)
    assert [turn["tokens"], after["tokens"], again["tokens"]] == fresh


def test_requests_that_are_computed_again_are_not_turned_away_by_a_full_queue(
    runtime: Path, old_and_new: tuple[Path, Path]
) -> None:
    old, new = old_and_new
    with SglangDriver(runtime) as driver:
        driver.open(old, max_queued_requests=2)
        with SyncManager(in_flight="recompute", timeout_s=60) as manager:
            names: list[str] = []
            for i in range(6):
                names += driver.submit([[*range(20 + i, 60 + i)]], 160)
                driver.wait_for_tokens(names, 1)
            manager.update(ModuleAdapter(weights(new)), 1)
            assert [done["finish_reason"] for done in driver.wait(names)] == ["length"] * 6
            crowd = driver.wait(driver.submit([[*range(20 + i, 60 + i)] for i in range(30)], 60))
            assert "error" in [done["finish_reason"] for done in crowd], "the limit holds again"


def test_requests_that_are_held_during_a_drain_are_scheduled_by_priority_afterwards_or_aborted_when_asked(
    runtime: Path, old_and_new: tuple[Path, Path]
) -> None:
    """With priorities, SGLang gives a request its default one as it joins the queue."""
    old, new = old_and_new
    with SglangDriver(runtime) as driver:
        driver.open(old, enable_priority_scheduling=True)
        fresh = driver.tokens([PROMPT], 8)
        with SyncManager(in_flight="drain", timeout_s=60) as manager:
            manager.update(ModuleAdapter(weights(new)), 1)
            running = driver.submit([NEXT], 800)
            driver.wait_for_tokens(running, 1)
            update = manager.update_async(ModuleAdapter(weights(old)), 2)
            held = _held(driver, running)
            assert [replica.status for replica in update.result().replicas] == ["committed"]
            assert [(done["tokens"], set(done["versions"])) for done in driver.wait(held)] == [(fresh[0], {"2"})]

            running = driver.submit([NEXT], 800)
            driver.wait_for_tokens(running, 1)
            update = manager.update_async(ModuleAdapter(weights(new)), 3)
            held = _held(driver, running)
            driver.call("abort_all")
            assert [(done["finish_reason"], done["tokens"]) for done in driver.wait(held)] == [("abort", [])]
            assert [replica.status for replica in update.result().replicas] == ["committed"]


@pytest.mark.parametrize("policy", ["recompute", "drain"])
def test_a_turn_of_a_session_that_waits_for_room_over_an_update_is_computed_anew(
    runtime: Path, old_and_new: tuple[Path, Path], policy: str
) -> None:
    """Such a turn has the session's rows of the cache already, and SGLang flushes nothing while a request that waits has rows;
    nor may it go on with rows that a flush has freed."""
    old, new = old_and_new
    with SglangDriver(runtime) as driver:
        driver.open(old, enable_streaming_session=True, max_total_tokens=1024)
        driver.rpc("open_session", 10_000, "chat", True)
        (first,) = driver.wait(driver.submit([PROMPT], 8, session="chat"))
        with SyncManager(in_flight=policy, timeout_s=60) as manager:
            running = driver.submit([[5, 6, 7]], 400)
            driver.wait_for_tokens(running, 3)
            turn = driver.submit([NEXT], 800, session="chat")
            (now,) = driver.look(running)
            driver.wait_for_tokens(running, len(now["tokens"]) + 5)
            assert not driver.look(turn)[0]["tokens"], "it waits for room"
            report = manager.update(ModuleAdapter(weights(new)), 1)
            assert [replica.status for replica in report.replicas] == ["committed"]
            driver.wait_for_tokens(turn, 8)
            (said,) = driver.look(turn)
            driver.call("abort_all")
            driver.wait([*running, *turn])
            assert driver.tokens([PROMPT + first["tokens"] + NEXT], 8) == [said["tokens"][:8]]


HYBRID = {
    "attention_backend": "triton",
    "mamba_radix_cache_strategy": "no_buffer",
    "disable_overlap_schedule": True,
    "max_total_tokens": 1024,
    "max_mamba_cache_size": 12,
}


@pytest.mark.full
def test_a_turn_of_a_session_of_a_hybrid_model_that_waits_over_an_update_begins_with_no_other_s_state(
    runtime: Path, tmp_path: Path
) -> None:
    """While it waits for room it has a slot already, which held the state of an earlier request."""
    family = FAMILIES["qwen3_next"]
    old, new = make_versions(family, tmp_path)
    options = {**HYBRID, "dtype": family.dtype, **family.sglang}
    with SglangWithStandIns(runtime) as driver:
        driver.open(old, **options)
        for i in range(15):
            driver.tokens([[7 * i + 3] * 9], 2)
        driver.rpc("open_session", 10_000, "chat", False)
        (first,) = driver.wait(driver.submit([PROMPT], 4, session="chat"))
        with SyncManager(in_flight="keep", timeout_s=60) as manager:
            running = driver.submit([[5, 6, 7]], 400)
            driver.wait_for_tokens(running, 3)
            turn = driver.submit([NEXT], 800, session="chat", logprobs=1)
            (now,) = driver.look(running)
            driver.wait_for_tokens(running, len(now["tokens"]) + 5)
            assert not driver.look(turn)[0]["tokens"], "it waits for room"
            manager.update(load(new), 1, dtype="engine")
            driver.wait_for_tokens(turn, 8)
            (said,) = driver.look(turn)
            driver.call("abort_all")
            driver.wait(turn)
    with SglangWithStandIns(runtime) as driver:
        driver.open(new, **options)
        (fresh,) = driver.wait(driver.submit([PROMPT + first["tokens"] + NEXT], 8, logprobs=1))
    assert said["logprobs"][:8] == fresh["logprobs"]


def _held(driver: SglangDriver, running: list[str]) -> list[str]:
    """A request that came while an update waits for those that are running."""
    while True:
        came = driver.submit([PROMPT], 8)
        (before,) = driver.look(running)
        driver.wait_for_tokens(running, len(before["tokens"]) + 5)
        if not driver.look(came)[0]["tokens"]:
            return came


@pytest.mark.parametrize("policy", ["recompute", "keep"])
def test_a_beam_search_does_not_end_the_engine(runtime: Path, old_and_new: tuple[Path, Path], policy: str) -> None:
    """SGLang can't retract one: under `recompute` it is aborted."""
    old, new = old_and_new
    with SglangDriver(runtime) as driver:
        driver.open(new)
        (alone,) = driver.wait(driver.submit([PROMPT], 8, beams=2))
        fresh = driver.tokens([PROMPT], 8)
    with SglangDriver(runtime) as driver:
        driver.open(old)
        with SyncManager(in_flight=policy, timeout_s=60) as manager:
            reason = "abort" if policy == "recompute" else "length"
            for version in range(1, 1 + TRIES):
                beside = driver.submit([NEXT], 200)
                driver.wait_for_tokens(beside, 2)
                searches = driver.submit([PROMPT, NEXT], 150, beams=2)
                driver.wait_for_tokens(beside, 20)  # a search gives no tokens before its end
                manager.update(ModuleAdapter(weights(new)), version)
                reasons = [done["finish_reason"] for done in driver.wait(searches)]
                assert [done["finish_reason"] for done in driver.wait(beside)] == ["length"]
                if reason in reasons:
                    break  # else they had ended before the update
            assert reasons == [reason] * 2
            assert driver.wait(driver.submit([PROMPT], 8, beams=2))[0]["tokens"] == alone["tokens"]
            assert driver.tokens([PROMPT], 8) == fresh


def test_requests_of_a_diffusion_model_do_not_end_the_engine(runtime: Path, tmp_path: Path) -> None:
    """SGLang has them in queues of their own, where its pause doesn't look. One that has made tokens is aborted, because SGLang
    would append them once more."""
    model = make_qwen3(tmp_path / "sdar", seed=1, tied=False, vocab_size=151_672, dtype=torch.float32)
    old = weights(model)
    new = {name: tensor.flip(-1).contiguous() for name, tensor in old.items()}
    diffusion = {
        "json_model_override_args": '{"architectures": ["SDARForCausalLM"]}',
        "dllm_algorithm": "LowConfidence",
        "max_running_requests": 1,  # with more, keys depend on how many blocks of a prompt are computed at once
    }
    with SglangDriver(runtime) as driver:
        driver.open(model, **diffusion)
        with SyncManager(in_flight="recompute", timeout_s=60) as manager:
            for version in range(1, 1 + 2 * TRIES, 2):
                manager.update(ModuleAdapter(old), version)
                running = driver.submit([PROMPT], 60)
                driver.wait_for_tokens(running, 4)
                waiting = driver.submit([NEXT], 8)
                report = manager.update(ModuleAdapter(new), version + 1)
                assert [replica.status for replica in report.replicas] == ["committed"]
                (ran,), (waited,) = driver.wait(running), driver.wait(waiting)
                if ran["finish_reason"] != "length":
                    break  # else it had ended before the update
            assert (ran["finish_reason"], set(ran["versions"])) == ("abort", {str(version)})
            assert (waited["finish_reason"], set(waited["versions"])) == ("length", {str(version + 1)})
            assert driver.tokens([NEXT], 8) == [waited["tokens"]]


@pytest.mark.parametrize("processes", [1, 2])
def test_a_client_that_waits_for_a_vector_hears_that_an_update_has_aborted_its_request(
    runtime: Path, old_and_new: tuple[Path, Path], processes: int
) -> None:
    """SGLang's answer to an aborted request has no vector, which its server answered with an internal error; or the vector of
    the prompt's beginning, where a prompt is computed in chunks. Each process of a server with several knows the replica."""
    old, new = old_and_new
    body = {"model": str(old), "input": [(7 * i) % 500 + 1 for i in range(800)]}
    options = {"is_embedding": True, "max_running_requests": 1, "disable_radix_cache": True, "chunked_prefill_size": 50}
    options["tokenizer_worker_num"] = processes
    with (
        SglangServer(runtime, old, options=options, **PATIENT) as server,
        SyncManager(in_flight="abort", timeout_s=60) as manager,
    ):
        manager.update(ModuleAdapter(weights(old)), 1)
        for version in range(2, 2 + TRIES):
            with ThreadPoolExecutor(40) as clients:
                asked = [clients.submit(server.request, "POST", "/v1/embeddings", body) for _ in range(40)]
                vectors = [asked[0].result()[1]["data"]]
                manager.update(ModuleAdapter(weights(new)), version)
                answers = [one.result() for one in asked]
            if {status for status, _ in answers} != {200}:
                break  # else all had ended before the update
        for _ in range(4):
            ready = [server.request("GET", f"/ready?min_version={least}")[0] for least in (version, version + 1)]
            assert ready == [200, 503]
            assert server.request("GET", "/model_info")[1]["weight_version"] == str(version)
        vectors.append(server.request("POST", "/v1/embeddings", body)[1]["data"])
    assert {status for status, _ in answers} == {200, 503}
    assert all(answer["data"] in vectors for status, answer in answers if status == 200)
    assert all("aborted for a weight update" in str(answer) for status, answer in answers if status == 503)
