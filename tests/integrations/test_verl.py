"""verl's own trainer (FSDP2 on gloo, two Ray actors) into a real vLLM, by the checkpoint manager that verl's config names.

verl runs in `.venvs/verl`, without an engine beside it (`tests/support/verl_job.py`, and `verl_ppo.py` for its own loop).
`tools/versions.py` says which versions of vLLM this is run with; verl 0.9.1 pins 0.24.0.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines.conftest import Checkpoint, checkpoint, runtime  # noqa: F401 -- fixtures
from tests.engines.test_vllm_tokens import PROMPTS
from tests.integrations.test_trl import COUNT, StockServer
from tests.support.engines import ENGINE_ARGUMENTS, EXTENSION, INTEGRATIONS_PYTHON, ROOT, Driver
from tests.support.engines import Engine as AnyEngine
from tests.support.greedy import greedy_batch
from tests.support.models import make_llama
from tests.support.trl_runner import PROMPTS as TRL_PROMPTS

PYTHON = Path(os.environ.get("WEIGHTWIRE_TEST_VERL", ROOT / ".venvs" / "verl" / "bin" / "python"))

pytestmark = [
    pytest.mark.engine,
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="no .venvs/verl: `make test-integrations` makes it"),
]

JOB_S = 600
LONG = 960
RAY_STARTS = 5
STEPS = 3


class Engine(Driver):
    python = INTEGRATIONS_PYTHON


class VerlError(RuntimeError):
    """What verl's process raised: the names of its classes, its text and its rank."""

    def __init__(self, types: list[str], text: str, rank: int | None) -> None:
        super().__init__(text)
        self.types, self.rank = types, rank


VARIABLES = {
    "PYTHONPATH": str(ROOT),
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_raylet_start_wait_time_s": "40",
    "VERL_ENGINE_DEVICE": "cuda",  # verl registers its FSDP engine for this
    "VERL_LOGGING_LEVEL": "WARN",
    "VERL_PLATFORM": "cpu",
    "VERL_USE_EXTERNAL_MODULES": "tests.support.verl_cpu",
}


class VerlJob:
    """The process of `verl_job.py`."""

    def __init__(self, model: Path, engine: AnyEngine, python: str | Path = PYTHON, **variables: str) -> None:
        self.log = engine.runtime / "verl.log"
        self.command = [str(python), "-m", "tests.support.verl_job", str(model)]
        self.variables = {**engine.environment, **VARIABLES, **variables}
        for _ in range(RAY_STARTS):
            if self._start():
                return
            self.close()
            if "timed out during startup" not in self.tail():
                break
        raise AssertionError(f"verl's process did not start\n{self.tail()}")

    def _start(self) -> bool:
        """False if Ray did not start: its raylet gives up where its agent isn't imported within 15 seconds, as on a busy
        machine."""
        pipe = subprocess.PIPE
        with self.log.open("a") as log:
            self.process: Any = subprocess.Popen(
                self.command, stdin=pipe, stdout=pipe, stderr=log, text=True, cwd=ROOT, env=self.variables
            )
        return bool(self.process.stdout.readline())

    def __call__(self, do: str, **arguments: Any) -> Any:
        """One command. Raises `VerlError`."""
        alarm = threading.Timer(JOB_S, self.process.kill)
        alarm.start()
        try:
            self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        finally:
            alarm.cancel()
        assert line, f"verl's process ended in {do!r}\n{self.tail()}"
        answer = json.loads(line)
        if "error" in answer:
            raise VerlError(**answer["error"])
        return answer["result"]

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-6000:]

    def close(self) -> None:
        self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(60)
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def model(checkpoint: Checkpoint) -> Path:  # noqa: F811
    return checkpoint("llama", tied=True, seed=1)


@pytest.fixture(scope="module")
def engine(runtime: Path, model: Path) -> Iterator[Driver]:  # noqa: F811
    with Engine(runtime) as driver:
        driver.open(model, max_model_len=1024)
        yield driver


@pytest.fixture(scope="module")
def verl(engine: Driver, model: Path) -> Iterator[VerlJob]:
    job = VerlJob(model, engine)
    try:
        job("start", timeout_s=20)
        yield job
    finally:
        job.close()
        print(job.tail())


def expected(model: Path) -> list[list[int]]:
    return greedy_batch(model, PROMPTS, 16)


def test_two_updates_through_verls_manager_keep_what_is_generated_and_say_what_a_fresh_engine_says(
    verl: VerlJob, engine: Driver, model: Path, tmp_path: Path
) -> None:
    before = engine.tokens(PROMPTS)
    assert before == expected(model)
    figures = verl("update", step=0)
    assert (figures["weightwire/version"], figures["weightwire/replicas"]) == (0, 1)
    assert engine.tokens(PROMPTS) == before
    (old,) = engine.tokens(PROMPTS[:1], LONG)

    verl("change", seed=7)
    with ThreadPoolExecutor(1) as thread:
        update = thread.submit(verl, "update", step=1)
        running = engine.submit(PROMPTS[:1], LONG)
        while not update.done():  # there is always one that is less than half done
            if len(engine.look(running[-1:])[0]["tokens"]) > LONG // 2:
                running += engine.submit(PROMPTS[:1], LONG)
        assert update.result()["weightwire/version"] == 1
    requests = engine.wait(running)
    assert {(one["finish_reason"], len(one["tokens"])) for one in requests} == {("length", LONG)}  # none was aborted
    (new,) = engine.tokens(PROMPTS[:1], LONG)
    across = [one for one in requests if one["tokens"] not in (old, new)]
    assert old[0] in [one["tokens"][0] for one in across]  # one went on across the update
    if engine.stamps:  # since vLLM 0.32
        assert ["0", "1"] in [list(dict.fromkeys(one["versions"])) for one in across]

    verl("export", directory=str(tmp_path))
    assert engine.tokens(PROMPTS) == expected(tmp_path) != before
    assert verl("look") == {"disturbed": [], "steps": [0, 1]}


def test_a_rank_that_fails_raises_out_of_update_weights_and_the_engine_keeps_its_version(
    verl: VerlJob, engine: Driver
) -> None:
    before = engine.tokens(PROMPTS)
    verl("change", seed=8)
    verl("fail", rank=1)
    with pytest.raises(VerlError, match="fails for the test") as caught:
        verl("update", step=2)
    assert "WeightwireError" in caught.value.types and caught.value.rank == 1
    assert engine.tokens(PROMPTS) == before
    assert verl("look")["steps"] == [0, 1]

    verl("fail", rank=-1)
    assert verl("update", step=2)["weightwire/version"] == 2
    assert engine.tokens(PROMPTS) != before


@pytest.mark.parametrize("lacking", ["replicas", "ranks"])
def test_an_engine_of_verls_that_never_registered_is_an_error_before_anything_is_sent(
    verl: VerlJob, lacking: str
) -> None:
    """A replica of verl's may be several engines: data-parallel ranks, or those that prefill and those that decode."""
    verl("expect", **{lacking: 2})
    try:
        with pytest.raises(VerlError, match="replicas with 1 ranks have registered, of 2") as caught:
            verl("update", step=3)
        assert "SyncTimeout" in caught.value.types
    finally:
        verl("expect")


@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [
        ("backend", "ConfigError", "checkpoint_engine.backend is 'naive'"),
        ("replica", "ArgumentError", "RolloutMode.COLOCATED, and Weightwire can't wake it"),
        ("engine", "ArgumentError", "is a trtllm in RolloutMode.HYBRID"),
        ("disaggregated", "ArgumentError", "is a disaggregated sglang in RolloutMode.HYBRID"),
        ("option", "ConfigError", "time_out_s"),
        ("trainer's backend", "ConfigError", "checkpoint_engine.backend is 'naive'"),
        ("trainer's replicas", "ConfigError", r"an update would find those asleep .*hybrid_engine=False"),
    ],
)
def test_what_cannot_work_is_refused_when_verl_makes_its_manager(
    verl: VerlJob, kind: str, error: str, text: str
) -> None:
    with pytest.raises(VerlError, match=text) as caught:
        verl("misuse", kind=kind)
    assert error in caught.value.types


@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [
        ("gone", "PeerLost", "did not take its weights back: ConnectionRefusedError"),
        ("refuses", "PeerLost", "did not take its weights back: HTTP 400: busy"),
        ("silent", "SyncTimeout", "did not take its weights back within 1 s"),
    ],
)
def test_an_sglang_that_does_not_wake_is_a_typed_error(verl: VerlJob, kind: str, error: str, text: str) -> None:
    with pytest.raises(VerlError, match=text) as caught:
        verl("wake", kind=kind)
    assert error in caught.value.types


TIED = """
import json, sys, torch, torch.distributed as dist
from functools import partial
from types import SimpleNamespace
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from transformers import AutoModelForCausalLM
from trainer_adapters.integrations.verl import ties_of

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
layer = partial(transformer_auto_wrap_policy, transformer_layer_cls={type(model.model.layers[0])})
wrapped = FullyShardedDataParallel(
    model, auto_wrap_policy=layer, device_id=torch.device("cpu"), use_orig_params=sys.argv[2] == "True"
)
print(json.dumps(ties_of(SimpleNamespace(module=wrapped))))
"""


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_what_verls_fsdp1_ties_is_known_although_it_keeps_flat_parameters(model: Path, use_orig_params: bool) -> None:
    """verl's default, which starts on a GPU only. Its export yields the head as a tensor of its own."""
    command = [str(PYTHON), "-c", TIED, str(model), str(use_orig_params)]
    ran = subprocess.run(
        command, env=os.environ | VARIABLES, capture_output=True, text=True, timeout=JOB_S, check=False
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert json.loads(ran.stdout.splitlines()[-1]) == {"lm_head.weight": "model.embed_tokens.weight"}


def test_the_same_step_again_is_sent_again_as_the_next_version(verl: VerlJob, engine: Driver, tmp_path: Path) -> None:
    verl("change", seed=9)
    assert verl("update", step=2)["weightwire/version"] == 3
    verl("export", directory=str(tmp_path))
    assert engine.tokens(PROMPTS) == expected(tmp_path)


def test_the_backend_alone_takes_the_generator_that_verls_own_manager_hands_over(
    verl: VerlJob, engine: Driver, tmp_path: Path
) -> None:
    for step, seed in ((4, 10), (5, 11)):
        verl("change", seed=seed)
        assert verl("update_alone", step=step)["weightwire/version"] == step
    verl("export", directory=str(tmp_path))
    assert engine.tokens(PROMPTS) == expected(tmp_path)


def test_the_modules_own_shards_travel_where_the_config_says_so(
    verl: VerlJob, engine: Driver, model: Path, tmp_path: Path
) -> None:
    verl("start", timeout_s=20, weights="module")
    verl("change", seed=12)
    assert verl("update", step=20)["weightwire/version"] == 20
    verl("export", directory=str(tmp_path))
    assert engine.tokens(PROMPTS) == expected(tmp_path)


# --- verl's own loop --------------------------------------------------------------------------------------------------


def test_after_verls_own_loop_the_server_says_what_the_trained_model_says(
    runtime: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    """verl's `OneStepOffRayTrainer` with GRPO, its agent loop, reward loop and optimizer; a stock server."""
    model = make_llama(tmp_path / "llama", seed=1, dtype=torch.float32)
    (model / "chat_template.jinja").write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    with StockServer(runtime, MODEL=str(model)) as server:
        before = server.tokens()
        command = [str(PYTHON), "-m", "tests.support.verl_ppo", str(model), server.url, str(tmp_path), str(STEPS)]
        variables = {**server.environment, **VARIABLES, "TORCHDYNAMO_DISABLE": "1"}
        ran = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=JOB_S)
        assert ran.returncode == 0, (ran.stdout[-4000:], ran.stderr[-8000:])
        told = json.loads(ran.stdout.splitlines()[-1])["calls"]
        assert server.tokens() == greedy_batch(tmp_path / "saved", TRL_PROMPTS, COUNT) != before
        assert told == [["set_global_steps", step] for step in range(STEPS + 2)], "before each step, and at the end"
        assert server.version() == STEPS + 1


class SleepyServer(StockServer):
    """It starts without weights, as verl has it, and can sleep: with a stand-in for the allocator that a CPU lacks, which
    overwrites all that modules reach."""

    def start(self) -> None:
        options = [
            "--model",
            self.environment["MODEL"],
            "--load-format",
            "dummy",
            "--logprobs-mode",
            "processed_logprobs",
        ]
        self.serve(
            "vllm.entrypoints.openai.api_server", [*options, "--worker-extension-cls", EXTENSION], ENGINE_ARGUMENTS
        )
        asked = {"method": "ext_give_allocator", "args": [True]}
        assert self.request("POST", "/collective_rpc", asked)[0] == 200


@pytest.fixture
def sleepy(runtime: Path, tmp_path: Path) -> Iterator[SleepyServer]:  # noqa: F811
    model = make_llama(tmp_path / "llama", seed=1, dtype=torch.float32)
    (model / "chat_template.jinja").write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    with SleepyServer(runtime, MODEL=str(model), VLLM_SERVER_DEV_MODE="1") as server:
        yield server


SLEEP = [["sleep"], ["wake_up", "weights"], ["wake_up", "kv_cache"]]


@pytest.mark.parametrize("mode", ["sync", "colocate_async", "separate_async"])
def test_after_verls_main_program_the_server_says_what_the_trained_model_says(
    sleepy: SleepyServer, tmp_path: Path, mode: str
) -> None:
    """`verl.trainer.main_ppo` with its V1 trainers. Two of them have the replica on the trainer's devices: before each step of
    the optimizer verl discards the server's weights."""
    before, model = sleepy.tokens(), sleepy.environment["MODEL"]
    command = [str(PYTHON), "-m", "tests.support.verl_main", mode, model, sleepy.url, str(tmp_path), str(STEPS)]
    variables = {**sleepy.environment, **VARIABLES, "TORCHDYNAMO_DISABLE": "1"}
    ran = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=JOB_S)
    assert ran.returncode == 0, (ran.stdout[-4000:], ran.stderr[-8000:])
    assert sleepy.tokens() == greedy_batch(tmp_path / "saved", TRL_PROMPTS, COUNT) != before
    calls = json.loads((tmp_path / "calls.json").read_text())
    expected: list[list[Any]] = []
    for step in range(STEPS + 1):
        aborts = mode == "colocate_async" and step > 0
        expected += [["abort_all_requests"]] * aborts + (SLEEP if mode != "separate_async" else [])
        expected += [["set_global_steps", step]] + [["resume_generation"]] * aborts
    assert calls == expected


def test_a_replica_whose_update_failed_while_it_slept_generates_nothing_until_the_next_update(
    sleepy: SleepyServer, tmp_path: Path
) -> None:
    job = VerlJob(Path(sleepy.environment["MODEL"]), sleepy)
    try:
        job("start", url=sleepy.url, timeout_s=20)
        for step, failing in ((10, 1), (11, -1), (12, -1)):  # the last one finds it awake
            if step < 12:
                job("sleep")
            job("change", seed=step)
            job("fail", rank=failing)
            if failing >= 0:
                with pytest.raises(VerlError, match="fails for the test"):
                    job("update", step=step)
                assert sleepy.request("GET", "/is_sleeping")[1] == {"is_sleeping": True}
            else:
                assert job("update", step=step)["weightwire/version"] == step
                job("export", directory=str(tmp_path / str(step)))
                assert sleepy.tokens() == greedy_batch(tmp_path / str(step), TRL_PROMPTS, COUNT)
    finally:
        job.close()
