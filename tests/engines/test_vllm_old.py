"""An older vLLM, in an environment of its own: tokens there and back, LoRA slots, faults. `make versions` runs more versions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.conftest import Checkpoint
from tests.engines.test_vllm_faults import (  # noqa: F401 -- collected here once more
    PLUGIN,
    Faulty,
    test_a_replica_whose_way_back_fails_too_is_torn_refuses_to_generate_and_is_healed_by_an_update,
    test_an_installation_that_fails_on_one_rank_is_undone_on_all,
    tp2,
)
from tests.engines.test_vllm_lora import SLOTS, Trained
from tests.engines.test_vllm_tokens import reference, source
from tests.support.engines import OLD_PYTHON, Driver
from tests.support.lora_trainer import LoRATrainer
from trainer_adapters import SyncManager

pytestmark = [pytest.mark.engine, pytest.mark.slow]


class OldDriver(Driver):
    python = OLD_PYTHON


@pytest.fixture(scope="module")
def tp2_engine(runtime: Path, checkpoint: Checkpoint) -> Iterator[Faulty]:
    model_a, model_b = (checkpoint("qwen3", tied=True, seed=seed) for seed in (1, 2))
    faults = runtime / "faults-old"
    faults.write_text("[]")
    with OldDriver(runtime, WEIGHTWIRE_PLUGINS=PLUGIN, WEIGHTWIRE_TEST_FAULTS=str(faults)) as driver:
        driver.open(model_a, tensor_parallel_size=2, max_model_len=1024)
        yield Faulty(driver, faults, model_a, model_b)
    assert driver.leftovers() == []


def test_updates_through_every_policy_and_transport_and_back_again(tp2: Faulty) -> None:  # noqa: F811
    assert isinstance(tp2.engine, OldDriver)
    (card,) = tp2.engine.cards
    assert card.engine_version.startswith("0.27."), "not the version of the other tests"
    for install, transport in (("copy", "shm"), ("standby", "zmq"), ("standby", "shm"), ("copy", "zmq")):
        with SyncManager(install=install, transport=transport, timeout_s=180) as manager:  # type: ignore[arg-type]
            for _ in range(2):
                tp2.update(sync=manager)
                tp2.assert_serves()
                assert manager.verify(source(tp2.models[tp2.serves])).ok


def test_adapters_in_their_slots_say_what_peft_says_and_the_base_is_not_touched(
    runtime: Path, checkpoint: Checkpoint, lora_trainer: LoRATrainer, tmp_path: Path
) -> None:
    base = checkpoint("qwen3", tied=False, seed=1)
    with OldDriver(runtime) as driver:
        driver.open(base, **SLOTS)
        trained = Trained(driver, lora_trainer, 1, base, tmp_path)
        assert trained.train(seed=3)["tokens"] == trained.adapted()
        assert trained.plain() == reference(base)
