"""What only a GPU can show: a real vLLM on CUDA, its parameters in device memory, with and without captured graphs.

Written for a machine with one CUDA GPU and a CUDA build of vLLM (docs/gpu.md says what was run). All engines share
that GPU, and the trainer's process has it too. Graphs are captured without Inductor, which would compile for a minute in each
engine.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from inference_plugin.transports.backends import VARIABLE
from inference_plugin.wire.errors import ReplicaAsleep
from tests.engines.conftest import Checkpoint
from tests.engines.test_vllm_tokens import COUNT, PROMPTS, source, weights
from tests.support.engines import Driver
from trainer_adapters import ModuleAdapter, SyncManager


class Alone(Driver):
    """An interpreter of its own. In a fork of a process that has torch, vLLM can't show the GPU memory of the host: seen on an
    H200."""

    preloads = ()


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

Tokens = list[list[int]]
Expected = Callable[[bool], dict[Path, Tokens]]

SHARED: dict[str, Any] = {"gpu_memory_utilization": 0.1}
"""What an engine must find free as it starts; its KV cache has a size of its own."""
WITH_GRAPHS: dict[str, Any] = {
    "enforce_eager": False,
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL", "cudagraph_capture_sizes": [1, 2, 4, 8]},
}
WAYS = (
    ("auto", "auto"),
    ("copy", "shm"),
    ("standby", "zmq"),
    ("streaming", "stream"),
    ("auto", "collective"),
    ("auto", "cuda_ipc"),
)


def engine_arguments(eager: bool) -> dict[str, Any]:
    return SHARED | ({"enforce_eager": True} if eager else WITH_GRAPHS)


def source_on_gpu(model: Path) -> ModuleAdapter:
    return ModuleAdapter({name: tensor.cuda() for name, tensor in weights(model).items()})


@pytest.fixture(scope="module")
def models(checkpoint: Checkpoint) -> tuple[Path, Path]:
    model_a, model_b = (checkpoint("qwen3", tied=True, seed=seed) for seed in (1, 2))
    return model_a, model_b


@pytest.fixture(scope="module")
def fresh(runtime: Path, models: tuple[Path, Path]) -> Expected:
    """`fresh(eager)`: the tokens of a fresh engine of each model, which start side by side."""

    @functools.cache
    def tokens(eager: bool) -> dict[Path, Tokens]:
        with contextlib.ExitStack() as open_engines:
            engines = {model: open_engines.enter_context(Alone(runtime)) for model in models}
            with ThreadPoolExecutor() as threads:
                for started in [
                    threads.submit(engine.open, model, **engine_arguments(eager)) for model, engine in engines.items()
                ]:
                    started.result()
            found = {model: engine.tokens(PROMPTS, COUNT) for model, engine in engines.items()}
        assert found[models[0]] != found[models[1]]
        return found

    return tokens


@pytest.fixture
def by_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL takes no two ranks on one GPU."""
    monkeypatch.setenv(VARIABLE, "gloo")


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "cuda-graphs"])
def test_tokens_after_an_update_on_a_gpu_are_those_of_a_fresh_engine(
    runtime: Path, models: tuple[Path, Path], fresh: Expected, by_gloo: None, eager: bool
) -> None:
    model_a, model_b = models
    expected = fresh(eager)
    with Alone(runtime, job="gpu") as engine:
        engine.open(model_a, **engine_arguments(eager))
        assert engine.tokens(PROMPTS, COUNT) == expected[model_a]
        version = 0
        for install, transport in WAYS:
            send = source_on_gpu if transport == "cuda_ipc" else source
            with SyncManager(install=install, transport=transport, timeout_s=60) as manager:  # type: ignore[arg-type]
                for model in (model_b, model_a):
                    version += 1
                    (replica,) = manager.update(send(model), version).replicas
                    assert replica.status == "committed", (install, transport, replica)
                    assert transport in ("auto", replica.transport)
                    if not eager and install != "streaming":  # captured graphs hold the parameters' addresses
                        assert replica.install == "copy"
                    assert engine.tokens(PROMPTS, COUNT) == expected[model], (install, transport)
                    assert manager.verify(source(model)).ok
                assert not manager.verify(source(model_b)).ok


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL wants a GPU of its own for each rank")
def test_a_trainer_on_another_gpu_broadcasts_over_nccl(
    runtime: Path, models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    model_a, model_b = models
    before = torch.cuda.current_device()
    with Alone(runtime, job="gpu-nccl", CUDA_VISIBLE_DEVICES="0") as engine:
        engine.open(model_a, **engine_arguments(eager=True))
        try:
            torch.cuda.set_device(1)
            sources = [source_on_gpu(model) for model in (model_b, model_a)]
            with SyncManager(transport="collective", timeout_s=300) as manager:
                for version, sent in enumerate(sources, start=1):
                    report = manager.update(sent, version)
                    assert [(r.status, r.transport) for r in report.replicas] == [("committed", "collective")]
                    assert manager.verify(sent).ok
        finally:
            torch.cuda.set_device(before)


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "cuda-graphs"])
def test_the_memory_of_a_sleeping_engine_is_free_and_its_weights_are_right_when_it_wakes(
    runtime: Path, models: tuple[Path, Path], fresh: Expected, eager: bool
) -> None:
    model_a, model_b = models
    expected = fresh(eager)
    with Alone(runtime, job="gpu-sleep") as engine:
        engine.open(model_a, enable_sleep_mode=True, **engine_arguments(eager))
        assert engine.tokens(PROMPTS, COUNT) == expected[model_a]
        with SyncManager(timeout_s=60) as manager:
            steps = [(1, model_a, model_b), (2, model_b, model_a), (1, model_a, model_a)]
            for version, (level, before, after) in enumerate(steps, start=1):
                free_bytes = torch.cuda.mem_get_info()[0]
                manager.sleep(level)  # type: ignore[arg-type]
                assert torch.cuda.mem_get_info()[0] > free_bytes
                with pytest.raises(ReplicaAsleep):
                    manager.update(source(after), version)
                manager.wake_up(["weights"])
                if version > 1:  # there is no group before the first update
                    assert manager.verify(source(before)).ok == (level == 1)
                (replica,) = manager.update(source(after), version).replicas
                assert (replica.status, replica.install) == ("committed", "copy"), (
                    "only the allocator's own memory sleeps"
                )
                manager.wake_up()
                assert engine.tokens(PROMPTS, COUNT) == expected[after], (version, level)
                assert manager.verify(source(after)).ok
