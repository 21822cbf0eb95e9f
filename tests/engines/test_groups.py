"""Two groups of one model in real engines, updated at the same time, over TCP with a key or not."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from inference_plugin.net import curve
from inference_plugin.wire.errors import ManifestMismatch
from tests.engines.conftest import Checkpoint
from tests.engines.test_vllm_tokens import COUNT, PROMPTS, reference, weights
from tests.support.commands import weightwire
from tests.support.engines import Driver
from tests.support.greedy import greedy_batch
from tests.support.managers import SyncManager
from tests.support.sglang_engines import SglangDriver
from trainer_adapters import ModuleAdapter

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def part(model: Path, *, layers: bool) -> ModuleAdapter:
    return ModuleAdapter({name: t for name, t in weights(model).items() if (".layers." in name) == layers})


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def engine(request: pytest.FixtureRequest, runtime: Path, checkpoint: Checkpoint) -> Iterator[Driver]:
    """Two ranks that listen on TCP ports and take whoever has the key."""
    with pytest.MonkeyPatch.context() as patch:
        curve.make_key(runtime / f"{request.param}.key")
        patch.setenv(curve.VARIABLE, str(runtime / f"{request.param}.key"))
        patch.setenv("WEIGHTWIRE_LISTEN", "tcp://127.0.0.1:*")
        model = checkpoint("llama", tied=False, seed=1)
        with Driver(runtime) if request.param == "vllm" else SglangDriver(runtime, tp=2) as driver:
            driver.open(model, **({"tensor_parallel_size": 2} if request.param == "vllm" else {}))
            yield driver
        assert driver.leftovers() == [] and driver.family() == []


def test_two_groups_updated_at_the_same_time_give_the_tokens_of_the_model_that_they_make(
    engine: Driver, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    a, b = (checkpoint("llama", tied=False, seed=seed) for seed in (1, 2))
    assert engine.tokens(PROMPTS, COUNT) == reference(a)
    mixed = tmp_path / "mixed"
    shutil.copytree(a, mixed)
    made: dict[str, torch.Tensor] = {n: (weights(b) if ".layers." in n else weights(a))[n] for n in weights(a)}
    save_file(made, mixed / "model.safetensors", metadata={"format": "pt"})
    version = 0
    for install, transport in (("standby", "zmq"), ("copy", "collective"), ("standby", "shm")):
        options = {"partial": True, "install": install, "transport": transport, "timeout_s": 180}
        with SyncManager("inner", **options) as inner, SyncManager("outer", **options) as outer:  # type: ignore[arg-type]
            for layers, rest, expected in (
                (b, a, greedy_batch(mixed, PROMPTS, COUNT)),
                (b, b, reference(b)),
                (a, a, reference(a)),
            ):
                version += 1
                sent = part(layers, layers=True), part(rest, layers=False)
                under_way = inner.update_async(sent[0], version), outer.update_async(sent[1], version)
                assert [r.status for pending in under_way for r in pending.result(600).replicas] == ["committed"] * 2
                assert inner.verify(sent[0]).ok and outer.verify(sent[1]).ok
                assert engine.tokens(PROMPTS, COUNT) == expected, (install, transport, version)


@pytest.mark.parametrize("engine", ["vllm"], indirect=True)
def test_a_part_of_what_the_engine_packs_as_one_is_refused(engine: Driver, checkpoint: Checkpoint) -> None:
    a = checkpoint("llama", tied=False, seed=1)
    queries = {name: tensor for name, tensor in weights(a).items() if "q_proj" in name}
    for name in (
        "inner",
        "outer",
    ):  # of the test before, whose managers left them open: what they write nobody else may
        assert weightwire(["close", name])[0] == 0
    before = engine.tokens(PROMPTS, COUNT)
    with (
        SyncManager("queries", partial=True, timeout_s=180) as manager,
        pytest.raises(ManifestMismatch, match="packs each of these modules as a whole"),
    ):
        manager.update(ModuleAdapter(queries), 1)
    assert engine.tokens(PROMPTS, COUNT) == before
