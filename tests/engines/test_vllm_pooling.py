"""A vLLM engine of a pooling model that answers with a row for each token of the prompt."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from inference_plugin.wire.errors import EngineUnsupported
from tests.support.checkpoints import load
from tests.support.engines import Driver
from tests.support.families import FAMILIES, make_versions
from trainer_adapters import ModuleAdapter, SyncManager

pytestmark = [pytest.mark.engine, pytest.mark.slow]


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
