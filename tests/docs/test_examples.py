"""What the examples share (`examples/rl_smollm2/server.py`): whatever ends one, nothing that it started goes on.
And how they ask and what they say."""

from __future__ import annotations

import argparse
import fcntl
import json
import shutil
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.support.rig import ROOT, eventually, gone, runtime

SHARED = ROOT / "examples" / "rl_smollm2"
STARTED = "sleep 600 & echo $!; wait"
"""A process that has started another one."""
PROGRAM = """
import json, signal, sys, time
from server import DemoError, job_directory, own_process

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under `nohup`
with job_directory("ww-example-") as directory:
    with own_process(["sh", "-c", sys.argv[2]], directory / "log", {}, read_stdout=True) as process:
        pids = [process.pid, int(process.stdout.readline())]
        print(json.dumps([pids, str(directory)]), flush=True)
        if sys.argv[1] == "fails":
            raise DemoError("the test says so")
        time.sleep(600)
"""


@pytest.mark.parametrize("end", ["SIGTERM", "SIGHUP", "fails"])
def test_an_example_that_is_ended_or_fails_leaves_no_process_and_keeps_its_logs_where_it_failed(end: str) -> None:
    example, pids, directory = begun(end)
    if end != "fails":
        example.send_signal(getattr(signal, end))
    _, said = example.communicate(timeout=300)
    assert example.returncode == 1
    eventually(lambda: all(map(gone, pids)), "the end of what the example started")
    failed = end == "fails"
    assert said.splitlines() == (
        [f"logs: {directory}", "failed: the test says so"]
        if failed
        else ["interrupted; everything that was started is stopped"]
    )
    assert Path(directory).exists() == failed
    if failed:
        shutil.rmtree(directory)


def test_an_example_that_is_killed_leaves_no_process() -> None:
    example, pids, directory = begun("SIGKILL")
    example.kill()
    example.communicate(timeout=300)
    eventually(lambda: all(map(gone, pids)), "the end of what the example started")
    shutil.rmtree(directory)


class Answers(BaseHTTPRequestHandler):
    """An engine that has no answers."""

    def do_POST(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"choices": []}')


def test_an_example_asks_its_engine_past_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.syspath_prepend(str(SHARED))
    import server as shared

    sys.modules.pop("server")  # a name that others have too
    with HTTPServer(("127.0.0.1", 0), Answers) as engine:
        threading.Thread(target=engine.handle_request, daemon=True).start()
        assert shared.Server("vllm", f"http://127.0.0.1:{engine.server_port}").complete([[1]], max_tokens=1) == []


def test_a_second_demo_leaves_the_first_one_s_files_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SHARED))
    import run
    from server import DemoError

    for name in ("run", "server", "task"):  # names that others have too
        sys.modules.pop(name)
    (tmp_path / "checkpoint").mkdir()
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(DemoError, match="another demo writes to"):
            run.demo(argparse.Namespace(engine="vllm", out=tmp_path))
    assert (tmp_path / "checkpoint").exists()


def test_a_push_that_fails_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    push = [sys.executable, str(ROOT / "examples" / "push_checkpoint" / "push.py"), str(tmp_path)]
    with runtime(monkeypatch):
        ended = subprocess.run(push, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 2 and "[side=manager " in ended.stdout, ended


def begun(end: str) -> tuple[subprocess.Popen[str], list[int], str]:
    """The example, once what it starts is there; the pids of that, and its directory."""
    program = [sys.executable, "-c", PROGRAM, end, STARTED]
    example = subprocess.Popen(program, cwd=SHARED, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert example.stdout is not None
    pids, directory = json.loads(example.stdout.readline())
    return example, pids, directory
