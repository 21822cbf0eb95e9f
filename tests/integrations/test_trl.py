"""TRL's GRPOTrainer, for real on a CPU, with its weights going through Weightwire: into a stock vLLM server, and into an engine
in the trainer's own process. What the engine then says is what `transformers`, or a fresh engine, says of the saved model.

The trainer runs in `.venvs/trl`, which has no vLLM: in server mode none is needed beside it. The server is vLLM's own, found by
our plug-in's entry point, without developer mode. `tools/versions.py` says of which versions.
"""

from __future__ import annotations

import gc
import json
import math
import re
import shutil
import subprocess
import sysconfig
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from inference_plugin.engines.transformers import TransformersEngine
from inference_plugin.wire.config import Config
from inference_plugin.wire.errors import ArgumentError, EngineUnsupported, PeerLost, SyncTimeout
from tests.manager.conftest import Start, directory, start  # noqa: F401 -- fixtures
from tests.support.engines import (
    ENGINE_ARGUMENTS,
    INTEGRATIONS_PYTHON,
    ROOT,
    Driver,
    HttpEngine,
    free_port,
    session_directory,
)
from tests.support.greedy import greedy_batch
from tests.support.models import make_llama
from tests.support.plain_engine import checkpoint as plain_checkpoint
from tests.support.trl_runner import PROMPTS
from trainer_adapters.integrations.options import replicas_behind
from trainer_adapters.integrations.trl import WeightSync, refuse, through_weightwire
from trainer_adapters.integrations.trl_async import WeightTransfer

PYTHON = ROOT / ".venvs" / "trl" / "bin" / "python"
PROGRAM = ROOT / "examples" / "trl" / "train.py"
COUNT, STEPS = 12, 3
ALONE = {"WEIGHTWIRE_LISTEN": "", "WEIGHTWIRE_REGISTRY": ""}
TIMEOUT_S = 900

pytestmark = [pytest.mark.integration, pytest.mark.engine, pytest.mark.slow]
needs_trl = pytest.mark.skipif(
    not PYTHON.exists(), reason="no .venvs/trl: `make test-integrations` makes it and runs this"
)


class StockServer(HttpEngine):
    """`vllm serve` as a user starts it; its own interpreter, nothing of the tests in it."""

    python = INTEGRATIONS_PYTHON
    preloads = ()

    def start(self) -> None:
        options = ["--model", self.environment["MODEL"], "--logprobs-mode", "processed_logprobs"]
        self.serve("vllm.entrypoints.openai.api_server", options, ENGINE_ARGUMENTS)

    def stop(self) -> None:
        assert self.process is not None
        self.process.terminate()
        self.process.wait(60)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def tokens(self) -> list[list[int]]:
        asked = {"model": self.environment["MODEL"], "prompt": PROMPTS, "max_tokens": COUNT, "temperature": 0}
        status, answer = self.request("POST", "/v1/completions", asked | {"ignore_eos": True, "return_token_ids": True})
        assert status == 200, answer
        return [choice["token_ids"] for choice in sorted(answer["choices"], key=lambda choice: choice["index"])]

    def version(self) -> int:
        (replica,) = self.request("GET", "/ready")[1]["replicas"]
        return int(replica["versions"].get("policy", 0))


class FreshEngine(Driver):
    python = INTEGRATIONS_PYTHON


@pytest.fixture(scope="module")
def runtime() -> Iterator[Path]:
    with session_directory() as path:
        yield path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("models") / "llama", seed=1, dtype=torch.float32)


@pytest.fixture(scope="module")
def server(runtime: Path, model: Path) -> Iterator[StockServer]:
    other_hosts = {"WEIGHTWIRE_LISTEN": "tcp://127.0.0.1:*", "WEIGHTWIRE_REGISTRY": f"tcp://127.0.0.1:{free_port()}"}
    with StockServer(runtime, MODEL=str(model), **other_hosts) as running:
        yield running


def train(engine: HttpEngine, command: Sequence[str | Path], **environment: str) -> subprocess.CompletedProcess[str]:
    """The example, beside the engine's job; the interpreter of the command decides what else is there."""
    return subprocess.run(
        [*map(str, command), "--steps", str(STEPS)],
        cwd=engine.runtime,
        env=engine.environment | {"TORCHDYNAMO_DISABLE": "1", **ALONE} | environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


@needs_trl
@pytest.mark.parametrize("how", ["full", "lora", "ddp"])
def test_after_training_the_server_says_what_the_saved_model_says(
    server: StockServer, model: Path, tmp_path: Path, how: str
) -> None:
    assert not list(PYTHON.parent.parent.glob("lib/python*/site-packages/vllm*")), "no vLLM beside the trainer"
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"] if how == "ddp" else []
    before, version = greedy_batch(model, PROMPTS, COUNT), server.version()
    options = ["--lora", "--lr", "5e-2"] if how == "lora" else []
    command = [PYTHON, *launch, PROGRAM, "--model", model, "--server", server.url, "--save", tmp_path, *options]
    with session_directory() as elsewhere:
        registry = {"WEIGHTWIRE_REGISTRY": server.environment["WEIGHTWIRE_REGISTRY"]}
        # As on another host: the server finds this trainer's registry while the trainer starts its first sync.
        other_host = registry | {"WEIGHTWIRE_RUNTIME_DIR": str(elsewhere)} if how == "full" else {}
        ran = train(server, command, **other_host)
    assert ran.returncode == 0, ran.stderr[-8000:]
    expected = greedy_batch(tmp_path, PROMPTS, COUNT)
    assert server.tokens() == expected != before
    assert server.version() == version + STEPS + 1, "one update for each step, and one at the end"
    (drift,) = set(re.findall(r"'sampling/sampling_logp_difference/max': '([^']+)'", ran.stdout))
    assert float(drift) < 1e-3, "at every step the server's log-probabilities were those of the trainer's model"


@needs_trl
@pytest.mark.parametrize("how", ["full", "lora"])
def test_after_asynchronous_training_the_server_says_what_the_saved_model_says(
    server: StockServer, model: Path, tmp_path: Path, how: str
) -> None:
    """TRL's own trainer and rollout worker; FlashAttention's kernel is replaced."""
    (template,) = PYTHON.parent.parent.glob(
        "lib/python*/site-packages/trl/chat_templates/qwen3.jinja"
    )  # TRL parses its answers
    shutil.copy(template, model / "chat_template.jinja")
    saved = tmp_path / "saved"
    before, version = server.tokens(), server.version()
    options = ["--lora", "--lr", "5e-2"] if how == "lora" else []
    lender = sysconfig.get_path("purelib")
    runner = [PYTHON, ROOT / "tests" / "support" / "trl_async_runner.py", lender, PROGRAM.with_name("train_async.py")]
    where = ["--model", model, "--server", server.url, "--save", saved, "--dtype", "float32"]
    ran = train(server, [*runner, *where, *options], PYTHONPATH=str(ROOT))
    assert ran.returncode == 0, ran.stderr[-8000:]
    expected = greedy_batch(saved, PROMPTS, COUNT)
    assert server.tokens() == expected != before
    assert server.version() == version + STEPS + 1, "one update before the first rollout, and one after each step"


@needs_trl
def test_a_sync_that_fails_ends_the_training_with_its_error_and_changes_nothing(
    server: StockServer, model: Path
) -> None:
    before = server.tokens(), server.version()
    other_dtype = ["--trainer-dtype", "bfloat16"]
    ran = train(server, [PYTHON, PROGRAM, "--model", model, "--server", server.url, *other_dtype])
    assert ran.returncode != 0
    assert re.search(r"ManifestMismatch: dtypes differ: .*\n.*through_weightwire\(\.\.\., dtype=", ran.stderr), (
        ran.stderr[-8000:]
    )
    assert (server.tokens(), server.version()) == before


@needs_trl
def test_a_server_of_another_job_is_noticed_before_a_replica_of_this_job_takes_an_update(
    server: StockServer, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = server.tokens(), server.version()
    monkeypatch.setenv("WEIGHTWIRE_JOB", "elsewhere")
    with TransformersEngine(model):
        command = [PYTHON, PROGRAM, "--model", model, "--server", server.url]
        ran = train(server, command, WEIGHTWIRE_JOB="elsewhere", WEIGHTWIRE_SILENCE_S="2")
    assert ran.returncode != 0
    assert re.search(r"SyncTimeout: vllm-.* did not register.*WEIGHTWIRE_JOB", ran.stderr), ran.stderr[-8000:]
    assert (server.tokens(), server.version()) == before


@needs_trl
@pytest.mark.parametrize("sleeps", [False, True])
def test_after_training_a_colocated_engine_holds_what_the_saved_model_holds(
    runtime: Path, model: Path, tmp_path: Path, sleeps: bool
) -> None:
    """TRL gives its engine no dtype, so vLLM takes bfloat16 for a model in float32: the trainer's weights travel in that. One
    that sleeps loses its weights before the first sync and after each generation."""
    (packages,) = PYTHON.parent.parent.glob("lib/python*/site-packages")
    runner = [INTEGRATIONS_PYTHON, ROOT / "tests" / "support" / "trl_runner.py", packages, PROGRAM]
    with FreshEngine(runtime, VLLM_CPU_KVCACHE_SPACE="1") as fresh:
        options = ["--model", model, "--save", tmp_path, *(["--sleep"] if sleeps else [])]
        ran = train(fresh, [*runner, *options], WEIGHTWIRE_JOB=f"{fresh.job}-colocated")
        assert ran.returncode == 0, ran.stderr[-8000:]
        found = json.loads(ran.stdout.splitlines()[-1])
        fresh.open(tmp_path, dtype="bfloat16")
        assert found == {"tokens": fresh.tokens(PROMPTS, COUNT), "verified": True, "slept": (STEPS + 1) * sleeps}
    assert found["tokens"] != greedy_batch(model, PROMPTS, COUNT)


# --- without TRL ------------------------------------------------------------------------------------------------------


def test_what_is_no_class_and_a_misspelt_setting_are_refused_before_anything_starts() -> None:
    with pytest.raises(ArgumentError, match=r"object, not a class .*through_weightwire\(GRPOTrainer\)"):
        through_weightwire(object())  # type: ignore[type-var]
    for wrong, why in (
        ({"instal": "copy"}, "unexpected.*'instal'"),
        ({"dtype": "float99"}, "float99"),
        ({"dtype": 5}, "int"),
    ):
        with pytest.raises(ArgumentError, match=why):
            through_weightwire(object, **wrong)  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match=why):
            WeightTransfer("http://127.0.0.1:8000", **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("server", ["", "localhost:8000", "ftp://x", None, 5, b"http://x"])
def test_what_is_no_url_of_a_server_is_refused_at_once_and_not_waited_for(server: Any) -> None:
    with pytest.raises(ArgumentError, match="is no URL of a server"):
        WeightTransfer(server)


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1, "x", True, 1e300])
def test_no_wait_for_a_server_is_without_an_end(seconds: Any) -> None:
    with pytest.raises(ArgumentError, match="server_timeout_s"):
        WeightTransfer("http://127.0.0.1:8000", server_timeout_s=seconds)


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ({"tensor_parallel_size": 2}, "several engines.*vllm_tensor_parallel_size=1"),
        ({"num_processes": 2}, "torch.distributed has 1 ranks and accelerate 2"),
    ],
)
def test_what_would_end_in_wrong_weights_is_refused_before_an_engine_starts(what: dict[str, Any], why: str) -> None:
    said = {"tensor_parallel_size": 1, "num_processes": 1} | what
    everything = SimpleNamespace(mode="colocate", **said)
    everything.accelerator = everything
    with pytest.raises(ArgumentError, match=why):
        refuse(everything)


def test_a_manager_that_is_closed_at_the_end_of_a_training_is_kept_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTWIRE_JOB", "nobody-here")
    generation = SimpleNamespace(mode="colocate", enable_sleep_mode=False)
    sync = WeightSync(SimpleNamespace(model=torch.nn.Linear(2, 2)), generation, "bfloat16", {})
    with pytest.raises(PeerLost):
        sync()
    manager: Any = weakref.ref(sync.manager)  # type: ignore[arg-type]
    sync.close()
    gc.collect()
    assert manager() is None


def test_without_trl_the_error_says_what_to_install() -> None:
    with pytest.raises(EngineUnsupported, match=r"No module named 'trl.*pip install '\.\[trl\]'"):
        through_weightwire(object)


def test_the_first_sync_waits_for_all_replicas_of_the_server_and_names_those_that_do_not_register(
    start: Start,  # noqa: F811
) -> None:
    names = [start().replica, start().replica]

    def transfer(*replicas: str) -> None:
        told = json.dumps({"replicas": [{"replica": name} for name in replicas]}).encode()
        with answering(200, told) as url:
            one = WeightTransfer(url, config=Config(silence_s=0.5), timeout_s=60)
            try:
                one.init_weight_transfer()
                one.send_weights(iter(plain_checkpoint(1).items()))
            finally:
                one.destroy()

    transfer(*names)
    with pytest.raises(SyncTimeout, match=r"nobody of the server's 3 replicas did not register.*WEIGHTWIRE_JOB"):
        transfer(*names, "nobody")


def test_a_sync_is_no_failure_where_the_server_gives_no_answer_after_the_commit(
    start: Start,  # noqa: F811
) -> None:
    """Its replicas are known from the beginning, and say themselves that they took the version."""
    rig = start()
    told = json.dumps({"replicas": [{"replica": rig.replica}]}).encode()
    with answering(200, told) as url:
        transfer = WeightTransfer(url, timeout_s=60)
        transfer.init_weight_transfer()
    try:
        transfer.send_weights(iter(plain_checkpoint(1).items()))
        rig.end()
        start()
        with pytest.raises(PeerLost, match="no answer about its replicas"):  # which may be others now
            transfer.send_weights(iter(plain_checkpoint(2).items()))
    finally:
        transfer.destroy()


def test_a_server_without_our_plugin_or_none_at_all_is_an_error_that_says_so() -> None:
    with answering(404, b"") as url, pytest.raises(EngineUnsupported, match=rf"{url} takes no weight updates.* 404"):
        replicas_behind(url)
    starting = b'{"ready": false, "why": ["no replica of this server takes weight updates"], "replicas": []}'
    with answering(503, starting) as url, pytest.raises(EngineUnsupported, match="no replica of this server"):
        replicas_behind(url)
    for nonsense in (b"<html>", b"[]", b"{}"):
        with answering(200, nonsense) as url, pytest.raises(PeerLost, match="no answer about its replicas"):
            replicas_behind(url)
    with pytest.raises(PeerLost, match="no answer about its replicas"):
        replicas_behind(url)


@contextmanager
def answering(status: int, body: bytes) -> Iterator[str]:
    """A server that gives one answer to everything."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{listening.server_port}"
        finally:
            listening.shutdown()
