"""vLLM's own weight transfer with our backend: `vllm serve --weight-transfer-config '{"backend": "weightwire"}'`, vLLM's client,
vLLM's source, vLLM's factory."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from inference_plugin.wire.config import Config
from inference_plugin.wire.errors import ArgumentError, CommitFailed, ManifestMismatch, SyncTimeout, WeightwireError
from tests.engines.conftest import Checkpoint
from tests.manager.conftest import Start, directory, start  # noqa: F401 -- fixtures
from tests.manager.test_manager import holds
from tests.support.engines import OLD_PYTHON, ROOT, Server
from tests.support.greedy import greedy_tokens
from tests.support.plain_engine import checkpoint as plain_checkpoint
from trainer_adapters import SyncManager
from trainer_adapters.sources.chosen import source_for

PROMPT = [3, 14, 15, 92, 65]
BACKEND = '{"backend": "weightwire"}'


class OldServer(Server):
    """vLLM 0.27.1. The trainer's half is the newest one's."""

    python = OLD_PYTHON


@pytest.fixture(scope="module", params=[Server, OldServer], ids=["newest", "0.27"])
def server(request: pytest.FixtureRequest, runtime: Path, checkpoint: Checkpoint) -> Iterator[Server]:
    model = checkpoint("llama", tied=False, seed=1)
    arguments = ["--weight-transfer-config", BACKEND, "--tensor-parallel-size", "2"]
    with request.param(runtime, model, arguments=arguments, VLLM_SERVER_DEV_MODE="1") as server:
        yield server


def loaded(path: Path) -> torch.nn.Module:
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return model


def trainer_of(server: Server, source: Any, **options: Any) -> Any:
    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    from trainer_adapters.integrations.vllm import WeightwireInitInfo

    client = HTTPVLLMWeightSyncClient(f"http://127.0.0.1:{server.port}")
    info = WeightwireInitInfo(rank=0, options={"timeout_s": 120.0, **options})
    return WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)


def test_vllms_own_trainer_loop_updates_both_ranks_there_and_back(server: Server, checkpoint: Checkpoint) -> None:
    from vllm.distributed.weight_transfer.base import ModuleSource

    one, two = (checkpoint("llama", tied=False, seed=seed) for seed in (1, 2))
    model = loaded(two)
    expected = {path: greedy_tokens(path, PROMPT) for path in (one, two)}
    assert expected[one] != expected[two]
    assert server.tokens(PROMPT) == expected[one]
    trainer = trainer_of(server, ModuleSource(model))
    try:
        done = threading.Event()
        answers: list[int] = []
        asking = threading.Thread(
            target=lambda: [answers.append(server.complete(PROMPT)[0]) for _ in iter(done.is_set, True)]
        )
        asking.start()
        try:
            for path in (two, one, two):
                model.load_state_dict(loaded(path).state_dict())
                report = trainer.send_weights()
                assert not report.failed
                assert server.tokens(PROMPT) == expected[path]
        finally:
            done.set()
            asking.join()
        assert set(answers) == {200}, "requests went on meanwhile, without a pause"
        assert report.version == 3
        status, answer = server.request("GET", "/weight_version")
        assert (status, answer) == (200, {"weight_version": "3"}) or status == 404
    finally:
        trainer.shutdown()


def test_a_version_that_the_engine_does_not_serve_is_refused_on_all_ranks_and_the_engine_goes_on(
    server: Server,
) -> None:
    before = server.tokens(PROMPT)
    for _ in range(2):
        assert server.request("POST", "/start_weight_update")[0] == 200
        status, answer = server.request("POST", "/update_weights", {"update_info": {"version": 99}})
        assert status >= 500, answer
    assert "version 99 of group 'policy' was announced" in server.log.read_text()
    assert server.tokens(PROMPT) == before


def test_a_client_of_another_job_than_the_managers_is_told_so(
    server: Server, checkpoint: Checkpoint, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_of(server, loaded(checkpoint("llama", tied=False, seed=1)), timeout_s=5.0)
    try:
        trainer.manager.close()
        monkeypatch.setenv("WEIGHTWIRE_JOB", "nobody-is-here")
        trainer.manager = SyncManager(timeout_s=5.0)
        with pytest.raises(WeightwireError, match="replica"):
            trainer.send_weights()
    finally:
        trainer.shutdown()


def test_a_committed_version_that_vllm_does_not_confirm_is_told_as_such(server: Server, checkpoint: Checkpoint) -> None:
    path = checkpoint("llama", tied=False, seed=1)
    trainer = trainer_of(server, loaded(path))
    trainer.client.base_url = "http://127.0.0.1:9"
    try:
        with pytest.raises(CommitFailed, match=r"version 4 is committed on 1 replicas, but vLLM did not confirm it"):
            trainer.send_weights()
        assert server.tokens(PROMPT) == greedy_tokens(path, PROMPT)
    finally:
        trainer.shutdown()


def test_the_example_runs_as_it_stands(server: Server) -> None:
    command = [sys.executable, str(ROOT / "examples/integrations/vllm_backend.py"), str(server.model)]
    url = f"http://127.0.0.1:{server.port}"
    done = subprocess.run([*command, url], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"version \d+", done.stdout)) >= 3, done.stdout


def test_the_first_update_waits_for_an_engine_of_each_of_the_clients_actors(start: Start) -> None:  # noqa: F811
    """One that registered later would generate with the weights that it was started with."""
    from trainer_adapters.integrations.vllm import CALLED, WeightwireInitInfo, WeightwireTrainer

    rigs = [start()]
    late = threading.Timer(1.0, lambda: rigs.append(start()))
    late.start()
    client = SimpleNamespace(handles=[1, 2], **dict.fromkeys(CALLED, lambda *_, **__: None))
    trainer = WeightwireTrainer.trainer_init(
        WeightwireInitInfo(rank=0, options={"timeout_s": 60.0}), client=client, source=plain_checkpoint(1)
    )
    try:
        trainer.send_weights()
        assert len(rigs) == 2 and all(holds(rig, 1) for rig in rigs)
        client.handles.append(3)
        short = {"timeout_s": 60.0, "config": Config(silence_s=0.5)}
        with pytest.raises(SyncTimeout, match="replicas with 2 ranks have registered, of 3 that there are"):
            WeightwireTrainer.trainer_init(WeightwireInitInfo(rank=0, options=short), client=client)
    finally:
        late.join()
        trainer.shutdown()


def newer_source(tensors: dict[str, torch.Tensor]) -> Any:
    """A source in the dialect of vLLM 0.33; over a stand-in for its classes where the installed vLLM is older."""
    from vllm.distributed.weight_transfer import base as installed

    @dataclass
    class ParamMeta:
        name: str
        dtype: torch.dtype
        shape: tuple[int, ...]

    is_newer = hasattr(installed.WeightSource, "iter_full")
    described = installed.ParamMeta if is_newer else ParamMeta

    class Held(installed.WeightSource if is_newer else object):  # type: ignore[misc]
        @cached_property
        def metadata(self) -> list[Any]:
            return [described(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]

        def owned_names(self, rank: int) -> list[str]:
            return list(tensors)

        def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
            yield from tensors.items()

    if not is_newer:
        Held.__module__, Held.__name__ = installed.__name__, "WeightSource"
    return Held()


def older_source(tensors: dict[str, torch.Tensor]) -> Any:
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    if hasattr(WeightSource, "iter_full"):
        pytest.skip("this vLLM refuses sources in the older dialect")

    class Held(WeightSource):  # type: ignore[misc]
        def metadata(self) -> list[Any]:
            whole = [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
            return [*whole, ParamMeta("another.stage", torch.float32, (3,))]

        def held_names(self) -> set[str]:
            return set(tensors)

        def __iter__(self) -> Iterator[tuple[str, Any]]:
            yield from tensors.items()
            yield "another.stage", None

    return Held()


@pytest.mark.parametrize("make", [newer_source, older_source])
def test_both_dialects_of_vllms_source_are_sources_and_nothing_is_gathered_to_describe_them(make: Any) -> None:
    tensors = {"a.weight": torch.arange(6.0).reshape(2, 3), "b.weight": torch.ones(4, dtype=torch.bfloat16)}
    vllms = make(tensors)
    iterated: list[str] = []
    source = source_for(vllms)
    assert [(t.name, t.shape, t.dtype) for t in source.manifest().tensors] == [
        ("a.weight", (2, 3), "float32"),
        ("b.weight", (4,), "bfloat16"),
    ]
    assert not iterated
    for _ in range(2):
        sent = [(source.manifest().tensors[piece.box.tensor].name, piece.tensor) for piece in source.slices()]
        assert [name for name, _ in sent] == list(tensors)
        assert all(torch.equal(tensor, tensors[name]) for name, tensor in sent)
    tensors["a.weight"] = torch.zeros(3, 3)
    with pytest.raises(ManifestMismatch, match=r"a\.weight"):
        list(source.slices())


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"rank": "0"}, "rank='0' is a str"),
        ({"rank": True}, "rank=True is a bool"),
        ({"rank": 1}, "rank=1, but torch.distributed says 0"),
        ({"rank": 0}, "client is a NoneType without init_weight_transfer_engine"),
        ({"rank": 1, "options": {"time_out": 3}}, "unexpected keyword argument 'time_out'"),
        ({"rank": 1, "options": None}, "None is no mapping"),
        ({"rank": 0, "options": {"group": "critic"}}, "options name a group"),
        ({"rank": 1, "dtype": "float99"}, "unknown dtype 'float99'"),
    ],
)
def test_what_cannot_be_meant_is_refused_when_it_is_given_and_not_in_the_first_update(
    runtime: Path, given: dict[str, Any], why: str
) -> None:
    from trainer_adapters.integrations.vllm import WeightwireInitInfo, WeightwireTrainer

    with pytest.raises(ArgumentError, match=why):
        WeightwireTrainer.trainer_init(WeightwireInitInfo(**given), client=None)
