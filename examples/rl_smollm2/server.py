"""A vLLM API server as a subprocess, and the little of its HTTP API that the demo needs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

MODEL_NAME = "smollm2"
START_TIMEOUT_S = 300.0
REQUEST_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 15.0


class DemoError(RuntimeError):
    """Something that the demo needs did not work; the message says what and where to look."""


@dataclass(frozen=True)
class Completion:
    text: str
    token_ids: list[int]
    finished: bool
    """The model ended the answer itself; otherwise it was cut off at the token limit."""


@contextlib.contextmanager
def vllm_server(model: Path, log: Path, environment: Mapping[str, str]) -> Iterator[str]:
    """Serve ``model`` on a free port of this host; yields the URL once it answers, and stops it always.

    ``environment`` is added to this process's own. Raises :class:`DemoError` when the server does not start.
    """
    port = _free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(model), "--served-model-name", MODEL_NAME, "--dtype", "bfloat16"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--uvicorn-log-level", "warning"]
    command += ["--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "64", "--seed", "0"]
    command += ["--kv-cache-memory-bytes", str(512 << 20)]
    settings = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with own_process(command, log, {**settings, **environment}) as process:
        url = f"http://127.0.0.1:{port}"
        _wait_until_ready(url, process, log)
        yield url


@contextlib.contextmanager
def own_process(
    command: Sequence[str], log: Path, environment: Mapping[str, str], *, read_stdout: bool = False
) -> Iterator[subprocess.Popen[str]]:
    """Run ``command`` in a process group of its own, gone when the ``with`` block ends; output goes to ``log``.

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
        yield process
    finally:
        stop_group(process)


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


def complete(
    url: str,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    samples: int = 1,
    temperature: float = 0.0,
) -> list[list[Completion]]:
    """``samples`` completions of each of ``prompts`` (token ids). Temperature 0 is greedy. Raises OSError."""
    body = {
        "model": MODEL_NAME,
        "prompt": [list(prompt) for prompt in prompts],
        "max_tokens": max_tokens,
        "n": samples,
        "temperature": temperature,
        "top_p": 1.0,
        "top_k": -1,
        "return_token_ids": True,
    }
    request = urllib.request.Request(
        f"{url}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as response:
        choices = sorted(json.load(response)["choices"], key=lambda choice: choice["index"])
    flat = [Completion(choice["text"], choice["token_ids"], choice["finish_reason"] == "stop") for choice in choices]
    return [flat[i : i + samples] for i in range(0, len(flat), samples)]


def _wait_until_ready(url: str, process: subprocess.Popen[str], log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise DemoError(f"the vLLM server ended with status {process.returncode}; see {log}\n{tail(log)}")
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
            return
        time.sleep(0.5)
    raise DemoError(f"the vLLM server did not answer within {START_TIMEOUT_S:.0f} s; see {log}\n{tail(log)}")


def tail(log: Path, lines: int = 15, until: str | None = None) -> str:
    """The last lines of a log, or those before the first line that contains ``until``."""
    text = log.read_text(errors="replace").splitlines()
    end = next((i for i, line in enumerate(text) if until is not None and until in line), len(text))
    return "\n".join(f"    {line}" for line in text[:end][-lines:])


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
