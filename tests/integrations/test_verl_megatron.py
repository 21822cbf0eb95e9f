"""verl's worker with its Megatron engine (two tensor-parallel ranks or pipeline stages, Megatron-Bridge 0.3.1) into a real vLLM.

It runs in Megatron's environment, behind whose packages lie those of verl's (`tests/support/verl_site`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.conftest import Checkpoint, checkpoint, runtime  # noqa: F401 -- fixtures
from tests.engines.test_vllm_tokens import PROMPTS
from tests.integrations.test_verl import PYTHON, VerlJob, engine, expected  # noqa: F401 -- `engine` is a fixture
from tests.integrations.test_verl import pytestmark as of_verl
from tests.support.engines import ROOT, Driver

MEGATRON_PYTHON = ROOT / ".venvs" / "megatron" / "bin" / "python"
pytestmark = [
    *of_verl,
    pytest.mark.skipif(not MEGATRON_PYTHON.exists(), reason="no .venvs/megatron: `make megatron` makes it"),
]


@pytest.fixture(scope="module")
def model(checkpoint: Checkpoint) -> Path:  # noqa: F811
    """Untied: Megatron-Bridge's export has a tied head under one name only, and the test loads it into transformers' model."""
    return checkpoint("llama", tied=False, seed=1)


@pytest.fixture
def job(model: Path, engine: Driver) -> Iterator[VerlJob]:  # noqa: F811
    (packages,) = (PYTHON.parents[1] / "lib").glob("python3*/site-packages")
    path = f"{ROOT}:{ROOT / 'tests' / 'support' / 'verl_site'}"
    job = VerlJob(model, engine, MEGATRON_PYTHON, PYTHONPATH=path, WEIGHTWIRE_TEST_VERL_SITE=str(packages))
    try:
        yield job
    finally:
        job.close()
        print(job.tail())


def test_verls_megatron_trainer_brings_its_weights_by_its_own_export_and_by_its_shards(
    job: VerlJob,
    engine: Driver,  # noqa: F811
    model: Path,
    tmp_path: Path,
) -> None:
    before = engine.tokens(PROMPTS)
    assert before == expected(model)
    for step, (parts, weights) in enumerate(itertools.product(("tensor", "pipeline"), ("export", "module")), 1):
        job("start", megatron=parts, timeout_s=60, weights=weights, dtype="float32")  # verl has it in bfloat16
        job("change", seed=step)
        assert job("update", step=10 * step)["weightwire/version"] == 10 * step
        job("export", directory=str(tmp_path / str(step)))
        assert engine.tokens(PROMPTS) == expected(tmp_path / str(step)) != before
