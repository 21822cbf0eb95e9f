"""The calls that NeMo-RL's `CheckpointEngineWeightSynchronizer` makes, in its order, into a real vLLM. NeMo-RL itself is not on
a package index; where it can be imported, its own factory makes the engine and its own class says what is abstract."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from inference_plugin.wire.errors import ConfigError, ProtocolError, SyncTimeout, WeightwireError
from tests.engines.conftest import Checkpoint, checkpoint, runtime  # noqa: F401 -- fixtures
from tests.engines.test_vllm_tokens import PROMPTS
from tests.manager.conftest import Start, directory, start  # noqa: F401 -- fixtures
from tests.manager.test_manager import holds
from tests.support.engines import Driver
from tests.support.greedy import greedy_batch
from tests.support.plain_engine import checkpoint as plain_checkpoint

BACKEND = "trainer_adapters.integrations.nemo_rl:WeightwireEngine"
BASE = "nemo_rl.utils.checkpoint_engines.base"

pytestmark = [pytest.mark.engine, pytest.mark.integration, pytest.mark.slow]


def is_there() -> bool:
    try:
        return importlib.util.find_spec(BASE) is not None
    except ModuleNotFoundError:
        return False


def made(**options: Any) -> Any:
    """As `create_checkpoint_engine` makes it: "module:Class", `bucket_size` and the entries of `refit_cfg`."""
    keywords = {"release_after_refit": False, **options}
    if is_there():
        base = importlib.import_module(BASE)
        return base.create_checkpoint_engine(BACKEND, bucket_size_bytes=1 << 20, engine_kwargs=keywords)
    module, _, name = BACKEND.partition(":")
    return getattr(importlib.import_module(module), name)(bucket_size=1 << 20, **keywords)


def weights_of(model: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """As NeMo-RL's DTensor workers yield them: gathered copies, of tied weights one under each name."""
    weights = load_file(model / "model.safetensors")
    yield from weights.items()
    if "lm_head.weight" not in weights:
        yield "lm_head.weight", weights["model.embed_tokens.weight"].clone()


async def received(engine: Any) -> list[Any]:
    return [batch async for batch in engine.receive_weight_batches()]


def refit(policy: Any, rollout: Any, model: Path) -> None:
    """One `sync_weights`; both halves run at once there."""

    async def both() -> None:
        _, batches = await asyncio.gather(policy.send_weights(weights_of(model)), received(rollout))
        assert batches == []

    asyncio.run(both())


def test_two_refits_by_generators_that_can_be_read_once(
    runtime: Path,  # noqa: F811
    checkpoint: Checkpoint,  # noqa: F811
) -> None:
    models = [checkpoint("llama", tied=True, seed=seed) for seed in (1, 2, 3)]
    with Driver(runtime) as engine:
        engine.open(models[0])
        policy, rollout = made(timeout_s=300), made(timeout_s=300)
        metadata = [policy.prepare(), rollout.prepare()]
        sizes = {"train_world_size": 1, "rollout_world_size": 1, "metadata": metadata}
        policy.init_policy_process_group(worker_rank=0, **sizes)
        rollout.init_rollout_process_group(rollout_rank=0, **sizes)
        assert policy.get_target_weight_layout() is None
        try:
            for model in models[1:]:
                refit(policy, rollout, model)
                assert engine.tokens(PROMPTS) == greedy_batch(model, PROMPTS, 16)
            with pytest.raises(WeightwireError, match="of the test"):
                asyncio.run(policy.send_weights(failing()))
            assert engine.tokens(PROMPTS) == greedy_batch(models[2], PROMPTS, 16)
            policy.finalize()  # as with release_after_refit
            policy.init_policy_process_group(worker_rank=0, **sizes)
            refit(policy, rollout, models[0])
            assert engine.tokens(PROMPTS) == greedy_batch(models[0], PROMPTS, 16)
        finally:
            policy.finalize()
            rollout.finalize()


def failing() -> Iterator[tuple[str, torch.Tensor]]:
    raise RuntimeError("of the test")
    yield


def test_wrong_options_and_a_wrong_order_are_typed_errors() -> None:
    for wrong in ({"time_out": 3}, {"dtype": "float99"}, {"dtype": 5}):
        with pytest.raises(ConfigError, match=f"refit_cfg.*{next(iter(wrong))}"):
            made(**wrong)
    with pytest.raises(ProtocolError, match="init_policy_process_group"):
        asyncio.run(made().send_weights(iter(())))


@pytest.mark.parametrize(
    ("weights", "why"),
    [
        (None, "weights are a NoneType"),
        (5, "weights are a int"),
        ([("a", 1)], "a is a int"),
        ([(1, torch.zeros(2))], "the name 1 is a int"),
        ([("a",)], "is no pair of a name and a tensor"),
        ({"a": torch.zeros(2)}, "'a' is no pair of a name and a tensor"),
    ],
)
def test_what_is_no_generator_of_named_tensors_is_a_typed_error_that_names_it(weights: Any, why: str) -> None:
    engine = made()
    engine.init_policy_process_group(worker_rank=0, train_world_size=1, rollout_world_size=0, metadata=[])
    try:
        with pytest.raises(WeightwireError, match=why):
            asyncio.run(engine.send_weights(weights))
    finally:
        engine.finalize()


def test_the_first_refit_waits_for_the_engines_of_all_rollout_workers(start: Start) -> None:  # noqa: F811
    """One that registers later would generate with the weights that it was started with."""
    rigs = [start(tp=2)]
    late = threading.Timer(1.0, lambda: rigs.append(start()))
    late.start()
    engine, short = made(timeout_s=60), made(timeout_s=0.5)
    topology = {"worker_rank": 0, "train_world_size": 1, "metadata": []}
    try:
        engine.init_policy_process_group(**topology, rollout_world_size=3)
        asyncio.run(engine.send_weights(iter(plain_checkpoint(1).items())))
        assert len(rigs) == 2 and all(holds(rig, 1) for rig in rigs)
        with pytest.raises(SyncTimeout, match="replicas with 3 ranks have registered, of 4"):
            short.init_policy_process_group(**topology, rollout_world_size=4)
    finally:
        late.join()
        engine.finalize()
        short.finalize()


@pytest.mark.skipif(not is_there(), reason="NeMo-RL is not installed")
def test_every_method_of_its_base_class_is_there() -> None:
    base = importlib.import_module(BASE).CheckpointEngine
    missing = [name for name in vars(base) if not name.startswith("_") and not hasattr(type(made()), name)]
    assert missing == []
