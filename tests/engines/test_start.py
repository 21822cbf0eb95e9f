"""An installed plug-in never keeps an engine from starting: whatever fails in our start is warned about once, `doctor` and
`status` tell of it, and the engine serves as if the plug-in were not there."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from inference_plugin.net.diagnosis import starting
from tests.engines.conftest import Checkpoint
from tests.engines.test_vllm_tokens import COUNT, PROMPTS, reference, source
from tests.engines.test_vllm_touch import OURS
from tests.manager.test_cli import run
from tests.support.engines import ENGINE_ARGUMENTS, START_TIMEOUT_S, Driver, eventually
from tests.support.sglang_engines import SglangDriver
from trainer_adapters import SyncManager

pytestmark = [pytest.mark.engine, pytest.mark.slow]

LONGER = PROMPTS[1:]
"""No prompt of fewer than five tokens: stock vLLM dies of those on a CPU with AMX."""


def check_told(driver: Driver, *words: str) -> None:
    """One warning in all, and one process that `doctor` and `status` name, with the reason in `words`."""
    (warning,) = [line for line in driver.log.read_text(errors="replace").splitlines() if "weightwire: OFF" in line]
    code, doctor = run("doctor")
    (problem,) = doctor["problems"]
    (told,) = run("status")[1]["without_plug_in"]
    assert code == 1 and problem == f"runs without the plug-in: {told}"
    pid = int(told.split(" process ")[1].split(":")[0])
    assert pid in [process.pid for process in driver.family()]
    for word in words:
        assert word in warning and word in told, (word, warning, told)


def check_nothing_is_left(driver: Driver) -> None:
    """No card, no file of ours, and nobody listens in the runtime directory."""
    assert driver.cards == []
    assert [name for name in driver.leftovers() if not name.endswith(".problem")] == []
    for process in driver.family():
        listening = [each.laddr for each in process.net_connections("unix") if str(driver.runtime) in str(each.laddr)]
        assert listening == [], process


def bare(driver: Driver, model: Path, **kwargs: Any) -> None:
    driver.call("open_bare", kwargs={"model": str(model), **ENGINE_ARGUMENTS, **kwargs}, timeout_s=START_TIMEOUT_S)
    driver.family()


def test_whatever_fails_in_our_start_an_engine_in_this_process_serves_without_us_and_the_next_one_with_us(
    runtime: Path, checkpoint: Checkpoint
) -> None:
    model_a, model_b = (checkpoint("qwen3", tied=True, seed=seed) for seed in (1, 2))
    with Driver(runtime, in_process=True, WEIGHTWIRE_TEST_START_FAULT="constructor") as driver:
        bare(driver, model_a)
        assert driver.tokens(LONGER, COUNT) == reference(model_a)[1:]
        check_told(driver, str(model_a), "can't be built a second time", "planned fault")
        check_nothing_is_left(driver)
        with pytest.raises(RuntimeError, match="can't be built a second time"):
            bare(driver, model_a, worker_extension_cls=OURS)
        driver.call("close")

        driver.call("environment", env={"WEIGHTWIRE_TEST_START_FAULT": "card"})
        bare(driver, model_a)
        assert driver.tokens(LONGER, COUNT) == reference(model_a)[1:]
        assert "permission denied" in driver.log_tail(200)
        check_nothing_is_left(driver)
        with pytest.raises(RuntimeError, match="permission denied"):
            bare(driver, model_a, worker_extension_cls=OURS)
        check_nothing_is_left(driver)
        driver.call("close")

        driver.call("environment", env={"WEIGHTWIRE_TEST_START_FAULT": "none"})
        with ThreadPoolExecutor(1) as pool:
            opening = pool.submit(bare, driver, model_a)
            (told,) = eventually(lambda: starting(driver.job), timeout_s=START_TIMEOUT_S, what="the start in `status`")
            assert told.startswith("vllm process ") and str(model_a) in told
            opening.result()
        assert starting(driver.job) == []
        with SyncManager(timeout_s=180) as manager:
            manager.update(source(model_b), 1)
        assert driver.tokens(LONGER, COUNT) == reference(model_b)[1:]


def test_one_rank_that_cannot_start_leaves_none_half_set_up(runtime: Path, checkpoint: Checkpoint) -> None:
    model = checkpoint("qwen3", tied=True, seed=1)
    with Driver(runtime, WEIGHTWIRE_TEST_START_FAULT="rank 1") as driver:
        bare(driver, model, tensor_parallel_size=2)
        assert driver.tokens(PROMPTS, COUNT) == reference(model)
        check_told(driver, "rank=1", "planned fault: no card of this rank")
        check_nothing_is_left(driver)
        assert driver.tokens(PROMPTS, COUNT) == reference(model)
    assert driver.leftovers() == []


def test_a_vllm_that_lacks_a_touched_place_starts_and_serves_without_us(runtime: Path, checkpoint: Checkpoint) -> None:
    model = checkpoint("qwen3", tied=True, seed=1)
    with Driver(runtime, WEIGHTWIRE_TEST_START_FAULT="gone") as driver:
        bare(driver, model)
        assert driver.tokens(LONGER, COUNT) == reference(model)[1:]
        check_told(driver, "launchers.app:init_entrypoints_middleware (missing", "served are vllm 0.24.0 to 0.33.0")
        check_nothing_is_left(driver)


def test_one_rank_of_sglang_that_cannot_start_leaves_none_half_set_up(runtime: Path, checkpoint: Checkpoint) -> None:
    model = checkpoint("qwen3", tied=True, seed=1)
    with SglangDriver(runtime, tp=2, WEIGHTWIRE_TEST_START_FAULT="rank 1") as driver:
        driver.open(model)
        assert driver.tokens(PROMPTS, COUNT) == reference(model)
        check_told(driver, "rank=1", "planned fault: no card of this rank")
        check_nothing_is_left(driver)
        assert driver.tokens(PROMPTS, COUNT) == reference(model)


def test_an_sglang_in_a_layout_that_we_do_not_serve_serves_without_us(runtime: Path, checkpoint: Checkpoint) -> None:
    """A dense model makes nothing of the option."""
    model = checkpoint("qwen3", tied=True, seed=1)
    with SglangDriver(runtime) as driver:
        driver.open(model, kt_weight_path=str(model))
        assert driver.tokens(PROMPTS, COUNT) == reference(model)
        check_told(driver, f"kt_weight_path={model}", "docs/sglang.md says which layouts are served")
        check_nothing_is_left(driver)


def test_an_sglang_that_we_start_ourselves_is_refused_where_we_cannot(runtime: Path, checkpoint: Checkpoint) -> None:
    with SglangDriver(runtime, WEIGHTWIRE_TEST_START_FAULT="card") as driver:
        with pytest.raises((RuntimeError, AssertionError)):
            driver.open(checkpoint("qwen3", tied=True, seed=1), explicit=True)
        assert "permission denied" in driver.log_tail(400)
        driver.ends_itself = True
