"""verl with its own SGLang servers, in Ray actors on a CPU, and `WeightwireManager`.

SGLang lies behind the packages of verl's environment (`tests/support/sglang_site`), and with it a stand-in for
`torch_memory_saver`: what SGLang releases is overwritten.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.engines.conftest import runtime  # noqa: F401 -- a fixture
from tests.integrations.test_verl import JOB_S, PYTHON, STEPS, VARIABLES, VerlError, VerlJob
from tests.integrations.test_verl import pytestmark as of_verl
from tests.support.engines import ROOT, Engine
from tests.support.greedy import greedy_batch
from tests.support.models import make_llama
from tests.support.sglang_engines import PYTHON as SGLANG_PYTHON
from tests.support.sglang_engines import environment
from tests.support.trl_runner import PROMPTS

COUNT = 12
RANKS = 2
RELEASED = ["release kv_cache", "release weights"]
TAKEN_BACK = ["resume weights", "resume kv_cache"]
TOLD = [line for line in (*RELEASED, *TAKEN_BACK) for _ in range(RANKS)]
"""What the ranks of a replica are told about their memory, from one step of the optimizer to the next."""

pytestmark = [
    *of_verl,
    pytest.mark.skipif(not SGLANG_PYTHON.exists(), reason="no .venvs/sglang: `make engines` makes it"),
]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    model = make_llama(tmp_path / "llama", seed=1, dtype=torch.float32)
    (model / "chat_template.jinja").write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    return model


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    (packages,) = (SGLANG_PYTHON.parents[1] / "lib").glob("python3*/site-packages")
    return VARIABLES | {
        **environment(RANKS),
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'support' / 'sglang_site'}",
        "TORCHDYNAMO_DISABLE": "1",
        "WEIGHTWIRE_TEST_MEMORY": str(tmp_path / "memory"),
        "WEIGHTWIRE_TEST_NO_DEVICES": "0",
        "WEIGHTWIRE_TEST_SGLANG_SITE": str(packages),
    }


def train(
    python: str | Path, mode: str, server: str, model: Path, directory: Path, environment: dict[str, str]
) -> list[list[list[int]]]:
    """verl's main program with its own servers for an engine; what each of those generates at its end."""
    command = [str(python), "-m", "tests.support.verl_main", mode, str(model), server, str(directory), str(STEPS)]
    with (directory / "log").open("w") as log:
        ran = subprocess.run(command, cwd=ROOT, env=environment, stdout=log, stderr=log, timeout=JOB_S)
    assert ran.returncode == 0, (directory / "log").read_text()[-8000:]
    tokens: list[list[list[int]]] = json.loads((directory / "tokens.json").read_text())
    return tokens


def memory(tmp_path: Path) -> list[str]:
    return (tmp_path / "memory").read_text().splitlines()


@pytest.mark.parametrize("mode", ["sync", "colocate_async", "separate_async"])
def test_after_verls_main_program_its_own_sglang_says_what_the_trained_model_says(
    runtime: Path,  # noqa: F811
    model: Path,
    tmp_path: Path,
    variables: dict[str, str],
    mode: str,
) -> None:
    own = Engine(runtime).environment | variables  # the engine is verl's
    (tokens,) = train(PYTHON, mode, "sglang", model, tmp_path, own)
    assert tokens == greedy_batch(tmp_path / "saved", PROMPTS, COUNT) != greedy_batch(model, PROMPTS, COUNT)
    if mode != "separate_async":
        assert memory(tmp_path) == TOLD * (STEPS + 1)


@pytest.fixture
def job(runtime: Path, model: Path, variables: dict[str, str]) -> Iterator[VerlJob]:  # noqa: F811
    job = VerlJob(model, Engine(runtime), **variables)
    try:
        job("start", own="sglang", timeout_s=20)
        yield job
    finally:
        job.close()
        print(job.tail())


def test_an_update_that_failed_while_sglang_slept_leaves_its_cache_released_and_the_next_one_wakes_it(
    job: VerlJob, tmp_path: Path
) -> None:
    for step, failing in ((10, 1), (11, -1), (12, -1)):  # the last one finds it awake
        if step < 12:
            job("sleep")
        before = len(memory(tmp_path))
        job("change", seed=step)
        job("fail", rank=failing)
        if failing >= 0:
            with pytest.raises(VerlError, match="fails for the test"):
                job("update", step=step)
            assert memory(tmp_path)[before:] == ["resume weights"] * RANKS
            continue
        assert job("update", step=step)["weightwire/version"] == step
        assert memory(tmp_path)[before:] == [line for line in TAKEN_BACK for _ in range(RANKS * (step == 11))]
        job("export", directory=str(tmp_path / str(step)))
        assert job("tokens", prompts=PROMPTS, count=COUNT) == greedy_batch(tmp_path / str(step), PROMPTS, COUNT)
