"""The root of prefix hashes under `keep`, on vLLM's own requests, hashes and sessions."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus, StreamingUpdate

from inference_plugin.engines.vllm.core import CoreControl

BLOCK = 16


def test_a_session_s_block_that_old_weights_computed_is_found_by_no_request_that_begins_after_the_update(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its last token was sampled and not computed: vLLM hashes the block anew with the session's next chunk."""
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", kv_cache_utils.BlockHash(b"root"), raising=False)
    hasher = kv_cache_utils.get_request_block_hasher(BLOCK, sha256)
    session = request("session", list(range(BLOCK - 1)), hasher)
    session.streaming_queue, session.status = deque(), RequestStatus.WAITING_FOR_STREAMING_REQ
    session.append_output_token_ids(BLOCK)
    session.num_computed_tokens = BLOCK - 1
    assert len(session.block_hashes) == 1
    scheduler = SimpleNamespace(
        requests={"session": session},
        reset_prefix_cache=lambda **_: False,
        reset_connector_cache=lambda: True,
        hash_block_size=BLOCK,
        num_waiting_for_streaming_input=1,
        log_stats=False,
    )
    config = SimpleNamespace(
        cache_config=SimpleNamespace(prefix_caching_hash_algo="sha256"),
        model_config=SimpleNamespace(is_multimodal_model=False),
    )
    core: Any = SimpleNamespace(scheduler=scheduler, request_block_hasher=hasher, vllm_config=config)
    CoreControl(core).installed("policy", "1", "txn", "keep")
    chunk = StreamingUpdate.from_request(request("session", [99] * BLOCK, hasher))
    assert chunk is not None
    Scheduler._update_request_as_session(scheduler, session, chunk)
    later = request("later", list(session.prompt_token_ids or ()), hasher)
    assert later.block_hashes and session.block_hashes[0] != later.block_hashes[0]


def request(name: str, prompt: list[int], hasher: Any) -> Request:
    params = SamplingParams(max_tokens=4)
    return Request(name, prompt, params, None, block_hasher=hasher, resumable=True)
