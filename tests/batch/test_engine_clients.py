"""Finished requests as rows: vLLM's from its own classes, SGLang's from the shapes that its tokenizer manager returns."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from inference_plugin.wire.errors import BatchError
from tests.support.rig import ROOT, runtime
from trainer_adapters.batch.engine_clients import from_sglang, from_vllm
from trainer_adapters.batch.records import Kind, VersionSpan
from trainer_adapters.batch.store import Store

vllm_only = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
SGLANG = ROOT / ".venvs/sglang/bin/python"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    with runtime(monkeypatch), Store(budget_bytes=1 << 22) as one:
        yield one


def rows(data: Any, key: str) -> list[list[Any]]:
    return [row.tolist() for row in data[key].unbind()]


def completion(index: int, tokens: list[int], spans: Any, logprobs: Any, reason: str | None = "stop") -> Any:
    from vllm.outputs import CompletionOutput, WeightVersionSpan

    labelled = None if spans is None else [WeightVersionSpan(*span) for span in spans]
    return CompletionOutput(index, "text", tokens, -1.0, logprobs, finish_reason=reason, weight_versions=labelled)


def request(*outputs: Any, finished: bool = True) -> Any:
    from vllm.outputs import RequestOutput

    return RequestOutput("r-1", "hello", [1, 2, 3], None, list(outputs), finished)


@vllm_only
def test_vllms_request_becomes_rows_with_version_spans(store: Store) -> None:
    from vllm.logprobs import FlatLogprobs, Logprob

    listed = [{7: Logprob(-0.5, 2), 9: Logprob(-0.25, 1)}, {8: Logprob(-1.5, 1)}]
    flat = FlatLogprobs()
    for token, value in ((4, -2.0), (5, -0.125), (6, 0.0)):
        flat.append({token: Logprob(value, 1)})
    made = from_vllm(
        request(
            completion(0, [7, 8], [("3", 0, 1), ("4", 1, 2)], listed),
            completion(1, [4, 5, 6], [("4", 0, 3)], flat, "length"),
        )
    )
    assert rows(made.data, "token_ids") == [[7, 8], [4, 5, 6]] and made.data["token_ids"].dtype == torch.int64
    assert (
        rows(made.data, "logprobs") == [[-0.5, -1.5], [-2.0, -0.125, 0.0]]
        and made.data["logprobs"].dtype == torch.float32
    )
    assert rows(made.data, "prompt_ids") == [[1, 2, 3], [1, 2, 3]]
    assert made.data["finish_reason"] == ["stop", "length"]
    assert made.data["version_spans"] == [[[3, 0, 1], [4, 1, 2]], [[4, 0, 3]]]
    assert made.versions == VersionSpan(3, 4) and made.tags == {"request": "r-1", "tokens": 5}
    entries = {entry.shard.key: entry for entry in store.put("t", made.data, versions=made.versions)}
    assert {key: entry.kind for key, entry in entries.items()} == {
        "token_ids": Kind.JAGGED, "logprobs": Kind.JAGGED, "prompt_ids": Kind.JAGGED,
        "finish_reason": Kind.VALUES, "version_spans": Kind.VALUES,
    }  # fmt: skip
    assert entries["token_ids"].lengths == (2, 3) and all(entry.rows == 2 for entry in entries.values())


@vllm_only
@pytest.mark.parametrize(
    "spans",
    [None, [("mine", 0, 2)], [("mine", 0, 1), ("1", 1, 2)], [("1", 0, 1)], [("1", 1, 2)]],
    ids=["none", "a label", "a label first", "too short", "from the second token"],
)
def test_versions_that_do_not_cover_every_token_are_unknown(spans: Any) -> None:
    assert from_vllm(request(completion(0, [7, 8], spans, None))).versions is None


def test_answers_of_a_vllm_before_0_32_have_rows_and_no_versions() -> None:
    output = SimpleNamespace(index=0, token_ids=[7, 8], logprobs=None, finish_reason="stop")
    old = SimpleNamespace(request_id="r-1", prompt_token_ids=[1], outputs=[output], finished=True)
    made = from_vllm(old)
    assert rows(made.data, "token_ids") == [[7, 8]] and made.versions is None
    with torch.device("meta"):  # of the trainer's tensors; rows lie on the host
        assert from_vllm(old).data["token_ids"].device.type == "cpu"


@vllm_only
def test_the_weights_that_an_engine_started_with_are_version_0() -> None:
    started = from_vllm(request(completion(0, [7, 8], [("default", 0, 2)], None)))
    assert started.versions == VersionSpan(0, 0) and started.data["version_spans"] == [[[0, 0, 2]]]
    updated = from_vllm(request(completion(0, [7, 8], [("default", 0, 1), ("3", 1, 2)], None)))
    assert updated.versions == VersionSpan(0, 3)
    meta = {**ANSWER["meta_info"], "weight_versions": [["default", 0, 3]]}
    assert from_sglang({**ANSWER, "meta_info": meta}).versions == VersionSpan(0, 0)


@vllm_only
def test_a_request_without_tokens_and_one_of_equal_lengths_are_jagged_too(store: Store) -> None:
    empty = from_vllm(request(completion(0, [], None, None, "abort"), completion(1, [], [], None, "abort")))
    assert rows(empty.data, "token_ids") == [[], []] and empty.versions is None and "logprobs" not in empty.data
    equal = from_vllm(request(completion(0, [1], [("2", 0, 1)], None), completion(1, [5], [("3", 0, 1)], None)))
    kinds = {
        entry.kind for made in (empty, equal) for entry in store.put("t", made.data) if entry.shard.key == "token_ids"
    }
    assert kinds == {Kind.JAGGED} and equal.versions == VersionSpan(2, 3)


@vllm_only
def test_what_is_not_finished_or_disagrees_is_refused() -> None:
    from vllm.logprobs import Logprob

    with pytest.raises(BatchError, match="'r-1' is not finished"):
        from_vllm(request(completion(0, [7], None, None, None), finished=False))
    with pytest.raises(BatchError, match="has 2 tokens and log-probabilities for 1"):
        from_vllm(request(completion(0, [7, 8], None, [{7: Logprob(-1.0)}])))
    with pytest.raises(BatchError, match="no log-probability for the sampled token 8"):
        from_vllm(request(completion(0, [8], None, [{7: Logprob(-1.0)}])))
    with pytest.raises(BatchError, match="for 1 of its 2 samples"):
        from_vllm(request(completion(0, [7], None, [{7: Logprob(-1.0)}]), completion(1, [8], None, None)))


@vllm_only
def test_the_last_part_of_a_stream_is_not_taken_for_the_whole_answer() -> None:
    """What vLLM gives last with an `output_kind` other than FINAL_ONLY."""
    with pytest.raises(
        BatchError, match=r"'r-1' has not all of its samples in this output, but the numbers \[1\].*FINAL_ONLY"
    ):
        from_vllm(request(completion(1, [7, 8], [("3", 0, 2)], None)))
    with pytest.raises(BatchError, match=r"'r-1' has 1 tokens, and versions for 2.*FINAL_ONLY"):
        from_vllm(request(completion(0, [8], [("3", 0, 2)], None)))
    meta = {**ANSWER["meta_info"], "output_token_logprobs": None}
    with pytest.raises(BatchError, match="'abc' has 1 tokens, and versions for 3"):
        from_sglang({**ANSWER, "output_ids": ANSWER["output_ids"][-1:], "meta_info": meta})


VLLM_ANSWER: dict[str, Any] = {
    "request_id": "r-2",
    "prompt_token_ids": [1, 2, 3],
    "choices": [
        {"index": 1, "finish_reason": "length", "token_ids": [4, 5, 6],
         "logprobs": {"content": [{"token_id": t, "logprob": -float(t), "rank": 1, "top_logprobs": []} for t in (4, 5, 6)]},
         "weight_versions": [{"version": "4", "start": 0, "end": 3}]},
        {"index": 0, "finish_reason": "stop", "token_ids": [7, 8],
         "logprobs": {"content": [{"token_id": t, "logprob": -float(t), "rank": None} for t in (7, 8)]},
         "weight_versions": [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 2}]},
    ],
}  # fmt: skip
"""As `/inference/v1/generate` answers."""


def test_vllms_http_answer_becomes_the_same_rows(store: Store) -> None:
    made = from_vllm(VLLM_ANSWER)
    assert rows(made.data, "token_ids") == [[7, 8], [4, 5, 6]]
    assert rows(made.data, "logprobs") == [[-7.0, -8.0], [-4.0, -5.0, -6.0]]
    assert rows(made.data, "prompt_ids") == [[1, 2, 3], [1, 2, 3]]
    assert made.data["finish_reason"] == ["stop", "length"]
    assert made.data["version_spans"] == [[[3, 0, 1], [4, 1, 2]], [[4, 0, 3]]]
    assert made.versions == VersionSpan(3, 4) and made.tags == {"request": "r-2", "tokens": 5}
    assert len(store.put("t", made.data, versions=made.versions)) == 5


@vllm_only
def test_the_http_answer_is_what_vllms_own_class_makes() -> None:
    from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateTokensResponse

    answer = GenerateTokensResponse.model_validate(VLLM_ANSWER).model_dump(mode="json")
    made = from_vllm(answer)
    assert rows(made.data, "token_ids") == [[7, 8], [4, 5, 6]] and made.versions == VersionSpan(3, 4)
    bare = {"request_id": "r", "choices": [{"index": 0, "token_ids": [7]}]}
    made = from_vllm(GenerateTokensResponse.model_validate(bare).model_dump(mode="json"))
    assert set(made.data) == {"token_ids", "finish_reason", "version_spans"} and made.versions is None


def test_http_answers_of_vllm_that_are_none_or_disagree_are_refused() -> None:
    other = {
        "index": 0,
        "finish_reason": "stop",
        "token_ids": [7],
        "logprobs": {"content": [{"token_id": 8, "logprob": 0.0}]},
    }
    with pytest.raises(BatchError, match="'r-2' has 1 tokens, and 1 log-probabilities that belong to others"):
        from_vllm({**VLLM_ANSWER, "choices": [other]})
    with pytest.raises(BatchError, match="has no choices"):
        from_vllm({**VLLM_ANSWER, "choices": []})
    completion = {"id": "cmpl-1", "choices": [{"index": 0, "text": "x", "finish_reason": "stop"}]}
    for wrong in ({}, {"choices": None}, {"choices": [5]}, completion):
        with pytest.raises(BatchError, match="no answer of /inference/v1/generate"):
            from_vllm(wrong)


ANSWER: dict[str, Any] = {
    "text": " world",
    "output_ids": [4, 5, 6],
    "prompt_token_ids": [1, 2],
    "meta_info": {
        "id": "abc",
        "finish_reason": {"type": "length", "length": 3},
        "prompt_tokens": 2,
        "completion_tokens": 3,
        "cached_tokens": 0,
        "weight_version": "8",
        "weight_versions": [{"version": "7", "start": 0, "end": 1}, {"version": "8", "start": 1, "end": 3}],
        "output_token_logprobs": [(-0.5, 4, None), (-0.25, 5, None), (-1.0, 6, " x")],
        "output_token_logprobs_length": 3,
    },
}
"""As `TokenizerManager._handle_batch_output` builds it; over HTTP the tuples are lists."""


@pytest.mark.parametrize("http", [False, True])
def test_sglangs_answer_becomes_the_same_rows(store: Store, http: bool) -> None:
    answer = json.loads(json.dumps(ANSWER)) if http else ANSWER
    other = {"output_ids": [9], "meta_info": {**answer["meta_info"], "finish_reason": {"type": "stop", "matched": 9},
             "weight_versions": [["8", 0, 1]], "output_token_logprobs": [[-3.0, 9, None]]}}  # fmt: skip
    made = from_sglang([answer, other])
    assert rows(made.data, "token_ids") == [[4, 5, 6], [9]] and rows(made.data, "prompt_ids") == [[1, 2], [1, 2]]
    assert rows(made.data, "logprobs") == [[-0.5, -0.25, -1.0], [-3.0]]
    assert made.data["finish_reason"] == ["length", "stop"]
    assert made.data["version_spans"] == [[[7, 0, 1], [8, 1, 3]], [[8, 0, 1]]]
    assert made.versions == VersionSpan(7, 8) and made.tags == {"request": "abc", "tokens": 4}
    assert len(store.put("t", made.data, versions=made.versions)) == 5
    assert rows(from_sglang(answer).data, "token_ids") == [[4, 5, 6]]


def test_sglangs_last_version_alone_says_nothing_of_the_first_token() -> None:
    meta = {key: value for key, value in ANSWER["meta_info"].items() if key != "weight_versions"}
    made = from_sglang({"output_ids": [4, 5, 6], "meta_info": meta})
    assert made.versions is None and made.data["version_spans"] == [[]] and "prompt_ids" not in made.data


def test_answers_of_sglang_that_are_none_or_disagree_are_refused() -> None:
    with pytest.raises(BatchError, match="'abc' is not finished"):
        from_sglang({**ANSWER, "meta_info": {**ANSWER["meta_info"], "finish_reason": None}})
    with pytest.raises(BatchError, match="3 tokens, and 2 log-probabilities"):
        from_sglang({**ANSWER, "meta_info": {**ANSWER["meta_info"], "output_token_logprobs": [(-1.0, 4, None)] * 2}})
    for wrong in ({}, {"meta_info": {"finish_reason": {"type": "stop"}}}, {"meta_info": None}, [5]):
        with pytest.raises(BatchError, match="no answer of SGLang"):
            from_sglang(wrong)  # type: ignore[arg-type]
    with pytest.raises(BatchError, match="is empty"):
        from_sglang([])
    with pytest.raises(BatchError, match="'abc' came with answers to other prompts"):
        from_sglang([ANSWER, {**ANSWER, "prompt_token_ids": [1, 3]}])


@pytest.mark.slow  # SGLang's import takes as long as that
@pytest.mark.skipif(not SGLANG.exists(), reason="SGLang is not installed")
def test_the_spans_are_what_sglangs_own_functions_make(tmp_path: Path) -> None:
    script = """
import json, sys
from sglang.srt.utils.weight_versions import *
events = [WeightVersionEvent(old_version="7", num_output_tokens=2)]
meta = {"id": "x", "finish_reason": {"type": "stop", "matched": 1}}
add_weight_versions_to_meta_info(meta, compute_weight_version_spans(events, "9", 5), 5)
print("META" + json.dumps(meta))
"""
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [str(SGLANG), "-c", script], capture_output=True, text=True, timeout=300, env=environment, check=True
    )
    meta = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("META"))[4:])
    made = from_sglang({"output_ids": [1, 2, 3, 4, 5], "meta_info": meta})
    assert made.data["version_spans"] == [[[7, 0, 2], [9, 2, 5]]] and made.versions == VersionSpan(7, 9)
