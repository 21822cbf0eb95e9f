"""What only a GPU can show: a real vLLM on CUDA, its parameters in device memory, with and without captured graphs.

Written for a machine with one CUDA GPU and a CUDA build of vLLM; not run where there is none.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from inference_plugin.transports.backends import VARIABLE
from inference_plugin.wire.errors import ReplicaAsleep
from tests.engines.conftest import Checkpoint
from tests.engines.test_vllm_tokens import COUNT, PROMPTS, source, weights
from tests.support.engines import Driver
from trainer_adapters import ModuleAdapter, SyncManager

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "cuda-graphs"])
def test_tokens_after_an_update_on_a_gpu_are_those_of_a_fresh_engine(
    runtime: Path, checkpoint: Checkpoint, eager: bool
) -> None:
    model_a, model_b = (checkpoint("qwen3", tied=True, seed=seed) for seed in (1, 2))
    expected = {}
    for model in (model_a, model_b):
        with Driver(runtime, job="gpu-fresh") as engine:
            engine.open(model, enforce_eager=eager)
            expected[model] = engine.tokens(PROMPTS, COUNT)
    assert expected[model_a] != expected[model_b]
    with Driver(runtime, job="gpu") as engine:
        engine.open(model_a, enforce_eager=eager)
        engine.use()
        version = 0
        for install, transport in (("auto", "auto"), ("copy", "shm"), ("standby", "zmq"), ("auto", "collective")):
            with SyncManager(install=install, transport=transport, timeout_s=300) as manager:  # type: ignore[arg-type]
                for model in (model_b, model_a):
                    version += 1
                    report = manager.update(source(model), version)
                    assert [replica.status for replica in report.replicas] == ["committed"]
                    if not eager:  # captured graphs hold the parameters' addresses
                        assert report.replicas[0].install == "copy"
                    assert engine.tokens(PROMPTS, COUNT) == expected[model]
                    assert manager.verify(source(model)).ok


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL wants a GPU of its own for each rank")
def test_a_trainer_on_another_gpu_broadcasts_over_nccl(
    runtime: Path, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    model_a, model_b = (checkpoint("qwen3", tied=True, seed=seed) for seed in (1, 2))
    before = torch.cuda.current_device()
    with Driver(runtime, job="gpu-nccl", CUDA_VISIBLE_DEVICES="0") as engine:
        engine.open(model_a, enforce_eager=True)
        engine.use()
        try:
            torch.cuda.set_device(1)
            sources = [
                ModuleAdapter({name: tensor.cuda() for name, tensor in weights(model).items()})
                for model in (model_b, model_a)
            ]
            with SyncManager(transport="collective", timeout_s=300) as manager:
                for version, sent in enumerate(sources, start=1):
                    report = manager.update(sent, version)
                    assert [(r.status, r.transport) for r in report.replicas] == [("committed", "collective")]
                    assert manager.verify(sent).ok
        finally:
            torch.cuda.set_device(before)


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "cuda-graphs"])
def test_the_memory_of_a_sleeping_engine_is_free_and_its_weights_are_right_when_it_wakes(
    runtime: Path, checkpoint: Checkpoint, eager: bool
) -> None:
    model_a, model_b = (checkpoint("qwen3", tied=True, seed=seed) for seed in (1, 2))
    with Driver(runtime, job="gpu-sleep") as engine:
        engine.open(model_a, enforce_eager=eager, enable_sleep_mode=True)
        engine.use()
        expected = {model_a: engine.tokens(PROMPTS, COUNT)}
        with SyncManager(timeout_s=300) as manager:
            for version, (level, before, after) in enumerate(
                [(1, model_a, model_b), (2, model_b, model_a), (1, model_a, model_a)], start=1
            ):
                free_before = torch.cuda.mem_get_info()[0]
                manager.sleep(level)  # type: ignore[arg-type]
                assert torch.cuda.mem_get_info()[0] > free_before
                with pytest.raises(ReplicaAsleep):
                    manager.update(source(after), version)
                manager.wake_up(["weights"])
                assert manager.verify(source(before)).ok == (level == 1 and version > 1)  # no group yet the first time
                report = manager.update(source(after), version)
                assert report.replicas[0].install == "copy", "only memory of the allocator's own sleeps"
                manager.wake_up()
                tokens = engine.tokens(PROMPTS, COUNT)
                assert tokens == expected.setdefault(after, tokens)
                assert manager.verify(source(after)).ok
