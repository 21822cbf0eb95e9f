"""verl with its own vLLM servers, in Ray actors on a CPU: `WeightwireManager`, and verl's own manager around the backend.

All of it runs in vLLM's environment, behind whose packages lie those of verl's (`tests/support/verl_site`). A stand-in for vLLM's
allocator (`tests/support/verl_vllm.py`) overwrites what vLLM releases. verl 0.9.1 pins vLLM 0.24.0.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.conftest import runtime  # noqa: F401 -- a fixture
from tests.integrations.test_verl import PYTHON, STEPS, VARIABLES, VerlError, VerlJob, pytestmark
from tests.integrations.test_verl_sglang import COUNT, RANKS, memory, model, train  # noqa: F401 -- `model` is a fixture
from tests.support.engines import ENVIRONMENT, INTEGRATIONS_PYTHON, ROOT, Engine
from tests.support.greedy import greedy_batch
from tests.support.trl_runner import PROMPTS

__all__ = ["pytestmark"]

SLEEP = ["sleep 2", "wake_up weights", "wake_up kv_cache"]
"""What each rank is told about its memory, from one step of the optimizer to the next."""
engine = (Path(INTEGRATIONS_PYTHON).parents[1] / "lib").glob("python3*/site-packages/vllm/v1/engine/async_llm.py")
verl_aborts = pytest.mark.skipif(
    not any("wait_for_inflight_requests" in file.read_text() for file in engine),
    reason="verl 0.9.1 aborts requests by an argument of `AsyncLLM.pause_generation` that vLLM 0.32 has no more",
)


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    (packages,) = (PYTHON.parents[1] / "lib").glob("python3*/site-packages")
    return (
        ENVIRONMENT
        | VARIABLES
        | {
            "PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'support' / 'verl_site'}",
            "TORCHDYNAMO_DISABLE": "1",
            "WEIGHTWIRE_TEST_MEMORY": str(tmp_path / "memory"),
            "WEIGHTWIRE_TEST_NO_DEVICES": "0",
            "WEIGHTWIRE_TEST_RAY_RESOURCE": "GPU",
            "WEIGHTWIRE_TEST_VERL_SITE": str(packages),
        }
    )


@pytest.mark.parametrize(
    "mode",
    ["sync", "separate_async", "old", *(pytest.param(each, marks=verl_aborts) for each in ("replicas", "alone"))],
)
def test_after_verls_main_program_its_own_vllm_says_what_the_trained_model_says(
    runtime: Path,  # noqa: F811
    model: Path,  # noqa: F811
    tmp_path: Path,
    variables: dict[str, str],
    mode: str,
) -> None:
    """sync, and old, which is `trainer.use_v1=False`: two tensor-parallel ranks. replicas: `colocate_async_weightwire` with two
    replicas. alone: verl's own trainer `separate_async` with its own manager, which has vLLM sleep in each update."""
    if mode == "alone":
        variables["WEIGHTWIRE_TEST_IPC"] = "1"
    tokens = train(INTEGRATIONS_PYTHON, mode, "vllm", model, tmp_path, Engine(runtime).environment | variables)
    right = greedy_batch(tmp_path / "saved", PROMPTS, COUNT)
    assert tokens == [right] * (2 if mode == "replicas" else 1)
    assert right != greedy_batch(model, PROMPTS, COUNT)
    if mode != "separate_async":
        ranks = 1 if mode == "alone" else RANKS
        assert sorted(memory(tmp_path)) == sorted(SLEEP * ranks * (STEPS + 1))


@pytest.fixture
def job(runtime: Path, model: Path, variables: dict[str, str]) -> Iterator[VerlJob]:  # noqa: F811
    job = VerlJob(model, Engine(runtime), INTEGRATIONS_PYTHON, **variables)
    try:
        job("start", own="vllm", timeout_s=20)
        yield job
    finally:
        job.close()
        print(job.tail())


def test_what_fails_while_verls_vllm_sleeps_is_told_from_what_fails_once_the_version_is_committed(
    job: VerlJob, tmp_path: Path
) -> None:
    """First a rank fails, and the update with it. Then the memory of the cache is refused: the version is committed, and the
    error says so. The next update wakes the server each time."""
    for step, trouble in ((10, "rank"), (11, ""), (12, "memory"), (13, ""), (14, "")):  # the last one finds it awake
        if trouble or step == 11:
            job("sleep")
        before = len(memory(tmp_path))
        job("change", seed=step)
        job("fail", rank=1 if trouble == "rank" else -1)
        if trouble == "rank":
            with pytest.raises(VerlError, match="fails for the test"):
                job("update", step=step)
            assert memory(tmp_path)[before:] == ["wake_up weights"]
            continue
        if trouble == "memory":
            (tmp_path / "scarce").touch()
            with pytest.raises(
                VerlError, match=r"version 12 is committed, .* of its KV cache back: .*for the test"
            ) as caught:
                job("update", step=step)
            assert "ReplicaAsleep" in caught.value.types
            assert job("step") == step
            (tmp_path / "scarce").unlink()
            continue
        assert job("update", step=step)["weightwire/version"] == step
        job("export", directory=str(tmp_path / str(step)))
        assert job("tokens", prompts=PROMPTS, count=COUNT) == greedy_batch(tmp_path / str(step), PROMPTS, COUNT)
