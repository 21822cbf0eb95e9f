"""A process that ends while its threads run torch ends with its own exit code: none of them makes it abort."""

from __future__ import annotations

import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch

from tests.support.models import make_llama
from tests.support.rig import ROOT, runtime
from trainer_adapters.serial import SerialExecutor

COPIES = """
import sys, threading, time, torch
torch.set_num_threads(1)

begun = []

def copies(name):
    of, to = torch.zeros(2, 1 << 20, dtype=torch.uint8)
    until = time.monotonic() + 1.5
    while time.monotonic() < until:
        to.copy_(of)
        if name not in begun:
            begun.append(name)
        yield to

def copy(name):
    for _ in copies(name): pass
"""

TRAINER = """
from trainer_adapters import WeightSource
from trainer_adapters.serial import SerialExecutor
from trainer_adapters.update.together import SlicesTogether

class Source(WeightSource):
    def manifest(self): ...
    def slices(self): return copies("slices")

next(SlicesTogether(Source(), time.monotonic() + 60, lambda: None))
puts = SerialExecutor("puts")
puts.submit(copy, "puts")
puts.submit(print, "a call began at the end")
"""

ENGINE = """
from inference_plugin.engines.transformers import TransformersEngine
from inference_plugin.net.addresses import listen_address
from tests.support.worker import KeepingInstaller, Worker
from tests.worker.driver import Driver, weights

class Preparing(KeepingInstaller):
    def prepare(self, segment, brake):
        of, to = torch.zeros(2, 1 << 20)
        begun.append("prepare")
        while True:
            to.copy_(of)
            brake()  # raises once the update is cancelled

engine = TransformersEngine(sys.argv[1])
answer = engine.generate([1, 2, 3], 100_000)
begun.append("generate")
worker = Worker(listen_address("replica", "0"), lambda group: Preparing())
trainer = Driver(worker.address)
trainer.open()
trainer.begin("t1", 1)
trainer.write(weights(1))
trainer.seal("t1")
"""

ENDING = """
import numpy
from inference_plugin.devices import start_thread

class Memory(numpy.ndarray):
    def __del__(self):
        begun.append("freed")
        for _ in range(100): time.sleep(0.01)

def keep(tensor):
    go = threading.Event()
    start_thread(lambda: begun.append(go.wait() and tensor.dtype), name="keeper")
    return go

keep(torch.from_numpy(numpy.zeros(8).view(Memory))).set()
"""

END = """
while len(begun) < 2: time.sleep(0.01)
sys.exit(7)
"""


@pytest.mark.parametrize(
    "threads", [TRAINER, ENGINE, ENDING], ids=["trainer", "engine", "a thread that frees its memory"]
)
def test_a_process_that_ends_while_its_threads_run_torch_keeps_its_exit_code(
    threads: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = str(make_llama(tmp_path / "model", seed=1)) if threads is ENGINE else ""
    program = [sys.executable, "-c", COPIES + threads + END, model]
    with runtime(monkeypatch):
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        ended = subprocess.run(program, env=environment, capture_output=True, timeout=600)
    assert (ended.returncode, ended.stdout.decode()) == (7, ""), ended.stderr.decode()


CLOSED_AT_THE_END = """
import atexit
atexit.register(lambda: worker.close())  # before any import of ours: it runs after what we have run at the end
from tests.support.worker import Worker
from tests.worker.driver import Driver
from inference_plugin.net.addresses import listen_address
worker = Worker(listen_address("replica", "0"))
Driver(worker.address).open()
"""


def test_a_worker_that_is_closed_as_its_process_ends_waits_for_no_thread_that_has_ended_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An in-process engine that its program leaves open to the end."""
    with runtime(monkeypatch):
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        program = [sys.executable, "-c", CLOSED_AT_THE_END]
        ended = subprocess.run(program, env=environment, capture_output=True, timeout=600)
    assert (ended.returncode, ended.stderr.decode()) == (0, "")


def test_what_a_call_on_a_thread_of_ours_was_given_is_freed_with_its_future_though_it_failed() -> None:
    """Not only by the garbage collector: it may be a model."""

    def fails(given: torch.Tensor) -> None:
        raise ValueError("it fails")

    given = torch.ones(2)
    kept = weakref.ref(given)
    calls = SerialExecutor("calls")
    future = calls.submit(fails, given)
    assert isinstance(future.exception(60), ValueError)
    calls.close(60)
    del given, future
    assert kept() is None
