"""Real engines whose weights lie where the host can't touch them, as in a GPU's memory (`tests/support/far_memory.py`): five
updates in a row, each held against a fresh engine."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.conftest import Versions
from tests.support import far_memory
from tests.support.engines import Driver
from tests.support.sglang_engines import SglangDriver
from tests.support.trials import COUNT, PROMPTS, UPDATES, House, trial, whole
from trainer_adapters import SyncManager

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.full,
    pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler"),
]

POLICIES = pytest.mark.parametrize("install", ["copy", "standby", "streaming"])


@pytest.fixture(scope="module")
def variables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    library = tmp_path_factory.mktemp("far") / "far_memory.so"
    far_memory.build(library)
    return {far_memory.VARIABLE: str(library)}


@pytest.fixture(scope="module")
def house(runtime: Path, variables: dict[str, str]) -> Iterator[House]:
    one = House(runtime, variables)
    yield one
    one.close()


@pytest.mark.parametrize("kind", ["llama", "qwen3-moe", "gemma3", "fp8-kv-scales"])
@POLICIES
def test_five_updates_in_a_row_are_a_fresh_vllm_bit_for_bit(
    house: House, versions: Versions, kind: str, install: str
) -> None:
    options = {"dtype": "bfloat16", "kv_cache_dtype": "fp8"} if kind == "fp8-kv-scales" else {}
    outcome = trial(house, *versions(kind), plain=True, install=install, **options)
    assert outcome.end == "right", outcome


def test_what_updates_keep_on_the_device_is_freed_before_the_engines_memory_goes_or_comes_back(
    runtime: Path, variables: dict[str, str], versions: Versions
) -> None:
    """The trainer counts on that memory, and so does the engine as it takes its KV cache back."""
    models = versions("llama")
    with Driver(runtime, **variables) as driver:
        driver.open(models[0], plain=True)
        driver.rpc("ext_give_light_sleep")

        def taken() -> int:
            return sum(driver.rpc("ext_far_bytes"))

        with SyncManager(install="copy", timeout_s=60) as manager:
            bare = taken()
            for sleep, wake_up in (
                (lambda: manager.sleep(1), manager.wake_up),
                (lambda: driver.call("own_sleep", level=1), lambda tags: driver.call("own_wake_up", tags=tags)),
            ):
                manager.update(whole(models[1]))
                assert taken() > bare
                sleep()
                assert taken() == bare
                wake_up(["weights"])
                manager.update(whole(models[0]))
                assert taken() > bare
                wake_up(["kv_cache"])
                assert taken() == bare
                assert driver.tokens(PROMPTS, COUNT) and manager.verify(whole(models[0])).ok


@POLICIES
def test_five_updates_in_a_row_are_a_fresh_sglang(
    runtime: Path, variables: dict[str, str], versions: Versions, install: str
) -> None:
    models, fresh = versions("qwen3"), []
    for model in reversed(models):
        with SglangDriver(runtime, **variables) as engine:
            engine.open(model)
            fresh.insert(0, engine.tokens(PROMPTS, COUNT))
            if model == models[0]:
                with SyncManager(install=install, timeout_s=60) as manager:  # type: ignore[arg-type]
                    for i in range(UPDATES):
                        report = manager.update(whole(models[(i + 1) % 2]), i + 1)
                        assert [replica.install for replica in report.replicas] == [install]
                        assert engine.tokens(PROMPTS, COUNT) == fresh[(i + 1) % 2]
    assert fresh[0] != fresh[1]
