"""A vLLM engine that answers with rows of a pooling model, one for each token of the prompt."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from inference_plugin.wire.errors import EngineUnsupported
from tests.support.checkpoints import load
from tests.support.engines import Driver, Server, eventually
from tests.support.families import FAMILIES, make_versions
from trainer_adapters import ModuleAdapter, SyncManager

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PROMPT = [(7 * i) % 250 + 3 for i in range(900)]
TRIES = 20


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


def test_a_server_tells_who_waits_for_a_vector_that_none_comes_and_goes_on(runtime: Path, tmp_path: Path) -> None:
    """Under `abort`, and as the replica tears. vLLM's own loop of answers would end."""
    old, new = make_versions(FAMILIES["qwen3-embedding"], tmp_path)
    sources = {path: ModuleAdapter(partial(load, path), dtype_rules="engine") for path in (old, new)}
    arguments = ["--runner", "pooling", "--convert", "embed", "--enable-server-load-tracking"]
    server = Server(runtime, old, arguments=arguments, VLLM_SERVER_DEV_MODE="1")

    def embed() -> tuple[int, Any]:
        status, answer = server.request("POST", "/v1/embeddings", {"model": str(old), "input": PROMPT[:100]})
        return status, answer["data"][0]["embedding"] if status == 200 else answer["error"]["message"]

    def sent() -> Future[tuple[int, Any]]:
        """A request that waits in the engine."""
        server.request("POST", "/pause?mode=keep")
        waiting = pool.submit(embed)
        eventually(lambda: server.request("GET", "/load")[1]["server_load"] == 1, what="a request in the server")
        time.sleep(1)  # nothing tells of one in the engine, which makes no step
        return waiting

    with ThreadPoolExecutor() as pool, server, SyncManager(timeout_s=60, in_flight="abort") as manager:
        first = embed()
        manager.update(sources[new], 1)
        assert embed()[0] == 200 and embed() != first
        for version in range(2, 2 + TRIES):
            waiting = sent()
            manager.update(sources[old], version)
            server.request("POST", "/resume")
            status, why = waiting.result(600)
            if status != 200:
                break  # else it came to the engine after the update
        assert status == 503 and "send it again" in why
        assert embed() == first
        waiting = sent()
        server.request("POST", "/weight_checker", {"action": "reset"})
        status, why = waiting.result(600)
        assert status == 503 and "reset the weights" in why
        assert embed()[0] == 503
        manager.update(sources[old], version + 1)
        server.request("POST", "/resume")
        assert embed() == first
