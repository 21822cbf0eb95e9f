"""vLLM 0.33 has hooks of its own for a worker's life, and an error that an output can carry. No package index has a CPU build of
it: `make versions` runs it on the kernels of another version. These tests, for `make test`, use stand-ins with the signatures of
its published source, which `check-engine vllm==0.33.0` compares."""

from __future__ import annotations

import enum
import queue
import sys
import types
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from inference_plugin.wire.errors import EngineUnsupported


class FinishReason(enum.IntEnum):
    STOP, LENGTH, ABORT, ERROR = range(4)


class RequestStatus(enum.IntEnum):
    FINISHED_ABORTED, FINISHED_ERROR = 1, 2


@dataclass(frozen=True)
class RequestError:
    code: str
    message: str
    retryable: bool = False


class EngineCoreOutput(msgspec.Struct, array_like=True):
    request_id: str
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: RequestError | None = None


class EngineCoreOutputs(msgspec.Struct, array_like=True):
    outputs: list[EngineCoreOutput] = []
    finished_requests: set[str] | None = None


@dataclass
class Request:
    request_id: str
    client_index: int


class Scheduler:
    """Holds two clients' requests until they are finished."""

    def __init__(self) -> None:
        self.requests = [Request("a", 0), Request("b", 1)]

    def finish_requests(self, request_ids: Any, finished_status: RequestStatus) -> list[Request]:
        ended, self.requests = self.requests, []
        return ended


class EngineCoreProc:
    def __init__(self) -> None:
        self.scheduler = Scheduler()
        self.output_queue: queue.Queue[tuple[int, EngineCoreOutputs]] = queue.Queue()


class WorkerWrapperBase:
    """As published: `init_device` and `shutdown` call the extension's hooks with the worker."""

    def __init__(self, worker: Any, worker_extension_cls: type | None) -> None:
        self.worker = worker
        self._worker_extension_cls = worker_extension_cls

    def init_device(self) -> None:
        hook = getattr(self._worker_extension_cls, "init_worker_extension", None)
        if callable(hook):
            hook(self.worker)

    def shutdown(self) -> None:
        hook = getattr(self._worker_extension_cls, "destroy_worker_extension", None)
        if callable(hook):
            hook(self.worker)


class Runtime:
    """What a worker holds of ours."""

    closed = 0

    def close(self) -> None:
        self.closed += 1


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    contents: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.outputs": {"RequestError": RequestError},
        "vllm.v1": {},
        "vllm.v1.engine": {
            "EngineCoreOutput": EngineCoreOutput,
            "EngineCoreOutputs": EngineCoreOutputs,
            "FinishReason": FinishReason,
        },
        "vllm.v1.engine.core": {"EngineCoreProc": EngineCoreProc},
        "vllm.v1.request": {"RequestStatus": RequestStatus},
    }
    for name, members in contents.items():
        module = types.ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("WEIGHTWIRE_DISABLE", "1")  # nothing is hooked into the stand-ins


def test_requests_of_a_torn_replica_end_with_a_retryable_error_that_says_why() -> None:
    from inference_plugin.engines.vllm.core import CoreControl

    core = EngineCoreProc()
    control = CoreControl(core)
    control.refuse("the undo failed on rank 0")
    ended = dict(core.output_queue.get_nowait() for _ in range(2))
    assert {client: [output.request_id for output in outputs.outputs] for client, outputs in ended.items()} == {
        0: ["a"],
        1: ["b"],
    }
    for outputs in ended.values():
        (output,) = outputs.outputs
        assert (output.finish_reason, output.stop_reason) == (FinishReason.ERROR, "the undo failed on rank 0")
        assert output.error is not None and (output.error.code, output.error.retryable) == ("engine_paused", True)
        assert "weights are torn" in output.error.message and "the undo failed on rank 0" in output.error.message


def test_aborted_requests_carry_no_error() -> None:
    from inference_plugin.engines.vllm.core import CoreControl

    core = EngineCoreProc()
    CoreControl(core).end_outputs(["a"], None)
    _, outputs = core.output_queue.get_nowait()
    assert [(output.finish_reason, output.error) for output in outputs.outputs] == [(FinishReason.ABORT, None)]


def test_the_official_hooks_begin_and_end_a_worker() -> None:
    from inference_plugin.engines.vllm import WeightSyncWorkerExtension

    runtime = Runtime()
    worker = types.SimpleNamespace(weightwire_start=None, weightwire_runtime=runtime)
    wrapper = WorkerWrapperBase(worker, WeightSyncWorkerExtension)
    wrapper.init_device()
    wrapper.shutdown()
    assert (runtime.closed, worker.weightwire_runtime) == (1, None)
    wrapper.shutdown()
    assert runtime.closed == 1, "a second end does nothing"


def test_a_worker_in_which_the_plug_in_is_not_live_is_refused_before_its_model_is_loaded() -> None:
    from inference_plugin.engines.vllm import WeightSyncWorkerExtension

    with pytest.raises(EngineUnsupported, match="before the plug-in was live"):
        WorkerWrapperBase(types.SimpleNamespace(), WeightSyncWorkerExtension).init_device()
