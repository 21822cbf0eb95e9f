"""What only several GPUs show. Nobody has run it: no machine with two was at hand."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from inference_plugin.devices import device_of
from inference_plugin.net import addresses
from inference_plugin.wire.digest import digest_bytes
from tests.support.managers import SyncManager
from tests.support.models import make_qwen3
from tests.support.rig import PYTHON_PATH, ROOT, eventually, runtime
from tests.transports.cases import any_bits
from trainer_adapters import ModuleAdapter

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]


def test_digests_of_memory_of_another_gpu_than_the_current_one_are_those_of_the_host() -> None:
    values = [any_bits(torch.uint8, 5000, seed=seed) for seed in range(50)]
    there = [value.to("cuda:1") for value in values]
    with torch.cuda.device(0):
        assert device_of(there[0].device).digests(there) == [digest_bytes(value.numpy()) for value in values]


@pytest.mark.parametrize("transport", ["cuda_ipc", "shm", "collective"])
def test_an_engine_on_another_gpu_than_the_trainers_takes_every_version(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, transport: str
) -> None:
    """The engine's process has the first GPU as its current one, too. `cuda_ipc` needs GPUs that reach each other's memory."""
    from transformers import AutoModelForCausalLM

    if transport == "cuda_ipc" and not torch.cuda.can_device_access_peer(0, 1):
        pytest.skip("these GPUs don't reach each other's memory")
    paths = [make_qwen3(tmp_path / str(seed), seed=seed, tied=True, dtype=torch.float32) for seed in (1, 2)]
    models = [AutoModelForCausalLM.from_pretrained(path).to("cuda:0") for path in paths]
    with runtime(monkeypatch):
        command = [sys.executable, "-m", "tests.gpu.engine", str(paths[0]), "cuda:1"]
        environment = os.environ | {"PYTHONPATH": PYTHON_PATH}
        engine = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.PIPE)
        try:
            eventually(lambda: addresses.discover() or engine.poll() is not None, "the engine's card")
            with SyncManager(timeout_s=120, transport=transport) as manager:
                for version in range(1, 4):
                    report = manager.update(ModuleAdapter(models[version % 2]), version)
                    assert [(one.status, one.transport) for one in report.replicas] == [("committed", transport)]
                    assert manager.verify(ModuleAdapter(models[version % 2])).ok
        finally:
            engine.kill()
            engine.wait()
