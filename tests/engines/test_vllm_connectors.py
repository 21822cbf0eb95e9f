"""Keys and values outside the engine, which a KV connector reaches: new requests find none of an older version there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from inference_plugin.wire.errors import EngineUnsupported
from tests.engines.conftest import Checkpoint
from tests.support.engines import Driver
from tests.support.greedy import greedy_tokens
from tests.support.trials import whole
from trainer_adapters import SyncManager

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PROMPT = [(7 * i) % 250 + 1 for i in range(100)]
COUNT = 8


def connected(name: str, files: Path, **more: Any) -> dict[str, Any]:
    """Arguments of an engine with this connector."""
    extra = {"shared_storage_path": str(files)}
    transfer = {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra, **more}
    return {"kv_transfer_config": transfer, "block_size": 32, "enable_prefix_caching": False}


def test_an_engine_whose_connector_cannot_forget_is_refused_by_name(
    runtime: Path, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    models = [checkpoint("llama", tied=False, seed=seed) for seed in (1, 2)]
    old = greedy_tokens(models[0], PROMPT, COUNT)
    with Driver(runtime) as engine, SyncManager(timeout_s=60) as manager:
        engine.open(models[0], **connected("ExampleConnector", tmp_path))
        assert engine.tokens([PROMPT], COUNT) == [old]
        with pytest.raises(EngineUnsupported, match="the KV connector ExampleConnector cannot be told to forget"):
            manager.update(whole(models[1]), 1)
        assert engine.tokens([PROMPT], COUNT) == [old]


def test_what_a_connector_keeps_by_hashes_of_blocks_is_found_by_requests_of_its_version_only(
    runtime: Path, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    models = [checkpoint("llama", tied=False, seed=seed) for seed in (1, 2)]
    wanted = [greedy_tokens(model, PROMPT, COUNT) for model in models]
    assert wanted[0] != wanted[1]
    own = {"kv_connector_module_path": "tests.support.hashed_connector"}
    with Driver(runtime) as engine:
        engine.open(models[0], **connected("HashedConnector", tmp_path, **own))
        for version, in_flight in enumerate(("recompute", "keep", "recompute", "keep")):
            before = wanted[version % 2]
            assert engine.tokens([PROMPT], COUNT) == [before]
            files = {path.name for path in tmp_path.iterdir()}
            (again,) = engine.generate([PROMPT], COUNT)
            assert (again["tokens"], again["cached"] > 0) == (before, True)
            with SyncManager(in_flight=in_flight, timeout_s=60) as manager:  # type: ignore[arg-type]
                manager.update(whole(models[1 - version % 2]), version + 1)
            assert engine.tokens([PROMPT], COUNT) == [wanted[1 - version % 2]]
            assert {path.name for path in tmp_path.iterdir()} > files, "the connector keeps this version's as well"
        for version, in_flight in enumerate(("keep", "keep", "recompute", "recompute", "keep", "abort"), 5):
            with SyncManager(in_flight=in_flight, timeout_s=60) as manager:  # type: ignore[arg-type]
                manager.update(whole(models[version % 2]), version)  # no step between these
        assert engine.tokens([PROMPT], COUNT) == [wanted[0]]


def test_the_same_version_of_another_run_finds_nothing_in_a_store_that_outlives_the_first(
    runtime: Path, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    first, *versions = [checkpoint("llama", tied=False, seed=seed) for seed in (1, 2, 3)]
    own = {"kv_connector_module_path": "tests.support.hashed_connector"}
    for model in versions:
        with Driver(runtime) as engine, SyncManager(timeout_s=60) as manager:
            engine.call(
                "environment", env={"PYTHONHASHSEED": "0"}
            )  # engines agree on hashes, as a shared store needs it
            engine.open(first, **connected("HashedConnector", tmp_path, **own))
            manager.update(whole(model), 1)
            assert engine.tokens([PROMPT], COUNT) == [greedy_tokens(model, PROMPT, COUNT)]
