"""A vLLM engine that answers with rows of a pooling model, one for each token of the prompt."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from inference_plugin.wire.errors import EngineUnsupported
from tests.support.checkpoints import load
from tests.support.engines import Driver
from tests.support.families import FAMILIES, make_versions
from trainer_adapters import ModuleAdapter, SyncManager

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PROMPT = [(7 * i) % 250 + 3 for i in range(900)]


def rows(engine: Driver, name: str) -> torch.Tensor:
    (done,) = engine.wait([name])
    return torch.tensor(done["rows"])


def test_rows_of_a_prompt_that_is_computed_anew_are_those_of_the_new_weights_alone(
    runtime: Path, tmp_path: Path
) -> None:
    old, new = make_versions(FAMILIES["qwen3-embedding"], tmp_path)
    sources = {path: ModuleAdapter(partial(load, path), dtype_rules="engine") for path in (old, new)}
    with Driver(runtime, in_process=True) as engine, SyncManager(timeout_s=60, in_flight="recompute") as manager:
        options = {"runner": "pooling", "convert": "embed", "enable_chunked_prefill": True}
        engine.open(old, **options, max_model_len=1024, max_num_batched_tokens=16)  # so a prompt takes 57 steps
        manager.update(sources[new], 1)
        engine.call("pool", name="after", prompt=PROMPT)
        wanted = rows(engine, "after")
        assert len(wanted) == len(PROMPT)
        manager.update(sources[old], 2)
        engine.call("pool", name="in flight", prompt=PROMPT, steps=5)
        engine.call("own_pause")
        assert not engine.look(["in flight"])[0]["finished"]
        manager.update(sources[new], 3)
        engine.call("own_resume")
        torch.testing.assert_close(rows(engine, "in flight"), wanted, atol=1e-4, rtol=1e-4)


def test_an_engine_that_scores_documents_against_kept_queries_is_refused_by_name(runtime: Path, tmp_path: Path) -> None:
    old, new = make_versions(FAMILIES["qwen3-embedding"], tmp_path)
    source = ModuleAdapter(partial(load, new), dtype_rules="engine")
    with Driver(runtime, in_process=True) as engine, SyncManager(timeout_s=60) as manager:
        pooler = {"task": "token_embed"}
        engine.open(old, runner="pooling", convert="embed", pooler_config=pooler)
        with pytest.raises(EngineUnsupported, match="late interaction") as refused:
            manager.update(source, 1)
        assert "--no-enable-flash-late-interaction" in refused.value.hint
        engine.call("close")
        engine.open(
            old, runner="pooling", convert="embed", pooler_config=pooler | {"enable_flash_late_interaction": False}
        )
        manager.update(source, 1)
