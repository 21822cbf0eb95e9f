"""A vLLM or SGLang server as a subprocess, and the little of its HTTP API that the examples need."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch

DTYPE = "bfloat16" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "float32"
"""In which the trainer and vLLM compute. Without AVX-512 a processor takes 20 times as long for a product in bfloat16."""

MODEL_NAME = "smollm2"
SGLANG_PYTHON = Path(__file__).resolve().parents[2] / ".venvs" / "sglang" / "bin" / "python"
START_TIMEOUT_S = 300.0
REQUEST_TIMEOUT_S = 1800.0
STOP_TIMEOUT_S = 15.0
WATCH = f"""read _
kill -s TERM -- "-$1"
for _ in $(seq {STOP_TIMEOUT_S:.0f}); do
    sleep 1
    kill -s 0 -- "-$1" || exit
done
kill -s KILL -- "-$1"
"""
"""For a shell: ends the process group $1 once standard input ends, with the process that holds its other end."""
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Asks servers of this host, past any `http_proxy`."""
TORCHRUN = "torch/distributed/elastic"
"""In a log, what follows this is torchrun's own account of a failure; the cause stands before."""


class DemoError(RuntimeError):
    """Something that the demo needs did not work; the message says what and where to look."""


def served_dtype(engine: str) -> str:
    """In which `engine` computes.

    SGLang answers with keys and values of the prompt that it has computed before, alone or in a batch. On the same weights
    log-probabilities of the same answer then differ by up to 0.1 in bfloat16, and by 1e-6 in float32. Where two tokens are nearly
    as likely, that decides which one is the most likely.
    """
    return "float32" if engine == "sglang" else DTYPE


def end_by_signals() -> None:
    """From now on SIGTERM, and the SIGHUP of a terminal that is closed, end this program as Ctrl-C does: what it started has
    sessions of its own, and would go on."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # `nohup` ignores SIGHUP
            signal.signal(number, _interrupt)


def _interrupt(signum: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


@contextlib.contextmanager
def job_directory(prefix: str) -> Iterator[Path]:
    """A directory for the sockets and logs of a program. If the program fails, the directory stays and is named: the logs say
    why. Ctrl-C and the signals of `end_by_signals` end the program with status 1."""
    end_by_signals()
    directory = Path(tempfile.mkdtemp(prefix=prefix))
    failed = True
    try:
        yield directory
        failed = False
    except DemoError as error:
        sys.exit(f"failed: {error}")
    except KeyboardInterrupt:
        failed = False
        sys.exit("interrupted; everything that was started is stopped")
    finally:
        if failed:
            print(f"logs: {directory}", file=sys.stderr)
        else:
            shutil.rmtree(directory, ignore_errors=True)


@dataclass(frozen=True)
class Completion:
    text: str
    token_ids: list[int]
    finished: bool
    """The model ended the answer itself; otherwise it was cut off at the token limit."""


@dataclass(frozen=True)
class Server:
    """A running server, and how to ask it."""

    engine: str
    url: str

    def complete(
        self, prompts: Sequence[Sequence[int]], *, max_tokens: int, samples: int = 1, temperature: float = 0.0
    ) -> list[list[Completion]]:
        """``samples`` completions of each of ``prompts`` (token ids). Temperature 0 is greedy. Raises OSError."""
        ask = self._ask_sglang if self.engine == "sglang" else self._ask_vllm
        flat = ask([list(prompt) for prompt in prompts], max_tokens, samples, temperature)
        return [flat[i : i + samples] for i in range(0, len(flat), samples)]

    def _ask_vllm(
        self, prompts: list[list[int]], max_tokens: int, samples: int, temperature: float
    ) -> list[Completion]:
        answer = self._post(
            "/v1/completions",
            {
                "model": MODEL_NAME,
                "prompt": prompts,
                "max_tokens": max_tokens,
                "n": samples,
                "temperature": temperature,
                "top_p": 1.0,
                "top_k": -1,
                "return_token_ids": True,
            },
        )
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        return [Completion(one["text"], one["token_ids"], one["finish_reason"] == "stop") for one in choices]

    def _ask_sglang(
        self, prompts: list[list[int]], max_tokens: int, samples: int, temperature: float
    ) -> list[Completion]:
        answers = self._post(
            "/generate",
            {
                "input_ids": [prompt for prompt in prompts for _ in range(samples)],
                "sampling_params": {
                    "temperature": temperature,
                    "top_p": 1.0,
                    "top_k": -1,
                    "max_new_tokens": max_tokens,
                },
            },
        )
        return [
            Completion(one["text"], one["output_ids"], one["meta_info"]["finish_reason"]["type"] == "stop")
            for one in answers
        ]

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            self.url + path, data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
        )
        with DIRECT.open(request, timeout=REQUEST_TIMEOUT_S) as response:
            return json.load(response)


@contextlib.contextmanager
def running_server(
    engine: str, model: Path, log: Path, environment: Mapping[str, str], arguments: Sequence[str] = ()
) -> Iterator[Server]:
    """Serve ``model`` on a free port of this host; yields the server once it answers, and stops it always.

    ``environment`` is added to this process's own, ``arguments`` to the server's.
    Raises :class:`DemoError` when the server does not start.
    """
    if not (model / "config.json").is_file():
        raise DemoError(f"there is no model in {model}; `make model` makes one")
    port = _free_port()
    command, settings = (_sglang if engine == "sglang" else _vllm)(model, port)
    with own_process([*command, *arguments], log, {**settings, **environment}) as process:
        url = f"http://127.0.0.1:{port}"
        _wait_until_ready(url, process, log)
        yield Server(engine, url)


def _vllm(model: Path, port: int) -> tuple[list[str], dict[str, str]]:
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(model), "--served-model-name", MODEL_NAME, "--dtype", DTYPE]
    command += ["--host", "127.0.0.1", "--port", str(port), "--uvicorn-log-level", "warning"]
    command += ["--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "64", "--seed", "0"]
    command += ["--kv-cache-memory-bytes", str(512 << 20)]
    return command, {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


def _sglang(model: Path, port: int) -> tuple[list[str], dict[str, str]]:
    if not SGLANG_PYTHON.exists():
        raise DemoError("SGLang's environment is not there: `make engines` makes it")
    command = [str(SGLANG_PYTHON), "-m", "sglang.launch_server", "--model-path", str(model)]
    command += ["--dtype", served_dtype("sglang")]
    command += ["--host", "127.0.0.1", "--port", str(port), "--log-level", "warning", "--skip-server-warmup"]
    command += ["--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
    command += ["--disable-cuda-graph", "--sleep-on-idle", "--context-length", "512", "--max-running-requests", "64"]
    command += ["--max-total-tokens", "16384", "--random-seed", "0"]
    settings = {"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_CPU_OMP_THREADS_BIND": "0-1", "HF_HUB_OFFLINE": "1"}
    return command, {**settings, "TRANSFORMERS_OFFLINE": "1"}


@contextlib.contextmanager
def own_process(
    command: Sequence[str], log: Path, environment: Mapping[str, str], *, read_stdout: bool = False
) -> Iterator[subprocess.Popen[str]]:
    """Run ``command`` in a process group of its own, gone when the ``with`` block or this process ends; output goes to ``log``.

    With ``read_stdout`` only its standard error does, and its standard output is the caller's to read.
    """
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if read_stdout else file,
            stderr=file,
            text=True,
            env={**os.environ, **environment},
            start_new_session=True,
        )
    try:
        with _watched(process):
            yield process
    finally:
        stop_group(process)


@contextlib.contextmanager
def _watched(process: subprocess.Popen[str]) -> Iterator[None]:
    """A shell stops the process and all that it started if this process is gone before the end of the block: after `kill -9`."""
    watch = ["sh", "-c", WATCH, "sh", str(process.pid)]
    with subprocess.Popen(watch, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True) as shell:
        try:
            yield
        finally:
            shell.kill()  # now: once the process is reaped, its number may become somebody else's


def stop_group(process: subprocess.Popen[str]) -> None:
    """End a process and all that it started: politely, then by force."""
    try:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT_S)
    finally:  # also when somebody presses Ctrl-C a second time
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _wait_until_ready(url: str, process: subprocess.Popen[str], log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise DemoError(f"the server ended with status {process.returncode}; see {log}\n{tail(log)}")
        with contextlib.suppress(OSError), DIRECT.open(f"{url}/health", timeout=5):
            return
        time.sleep(0.5)
    raise DemoError(f"the server did not answer within {START_TIMEOUT_S:.0f} s; see {log}\n{tail(log)}")


def tail(log: Path, lines: int = 15, until: str | None = None) -> str:
    """The last lines of a log, or those before the first line that contains ``until``."""
    text = log.read_text(errors="replace").splitlines()
    end = next((i for i, line in enumerate(text) if until is not None and until in line), len(text))
    return "\n".join(f"    {line}" for line in text[:end][-lines:])


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
