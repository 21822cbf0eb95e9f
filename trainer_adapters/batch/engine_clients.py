"""What engines answer, as rows: turns a finished request of vLLM or SGLang into what a `RolloutWorker`'s function returns.

Both give the same keys, with one row for each sample of the request:

    token_ids      jagged int64     the generated tokens
    logprobs       jagged float32   log-probability of each generated token, if the request asked for them
    prompt_ids     jagged int64     the prompt's tokens, the same in each row, if the answer has them
    finish_reason  values           "stop", "length", "abort", ...
    version_spans  values           list of [version, start, end]: `start:end` of `token_ids` was sampled by `version`

A version is an int where the engine's label is a number, as Weightwire's are. The weights that an engine started with are version
0: both engines label them "default". Any other label stays as it is, and the versions of such a task are unknown. No engine is
imported here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from inference_plugin.wire.errors import BatchError
from trainer_adapters.batch.records import VersionSpan
from trainer_adapters.batch.rollouts.generated import Generated

__all__ = ["from_sglang", "from_vllm"]

Span = list[Any]

WHOLE = "hand over a whole answer, not the last part of a stream: with vLLM, SamplingParams(output_kind=FINAL_ONLY)"

STARTED_WITH = "default"
"""How vLLM and SGLang label the weights that no update has reached yet."""


@dataclass(frozen=True)
class _Sample:
    """One generated sequence. `logprobs`: None if the answer has none; `spans`: [version, start, end] each."""

    token_ids: list[int]
    logprobs: list[float] | None
    spans: list[Span]
    finish_reason: str


def from_vllm(request_output: Any) -> Generated:
    """The rows of a finished `vllm.RequestOutput`, one for each of its `outputs` (`SamplingParams.n`).

    Over HTTP: the JSON object that `/inference/v1/generate` answers (`vllm serve --enable-scale-out`), the one endpoint of vLLM
    whose answers carry version spans. It has the prompt if the request had `return_token_ids`. Log-probabilities are there if
    `SamplingParams.logprobs` asked for them (0 is enough). Before vLLM 0.32 answers have no version spans.
    Of an engine's own outputs, hand over that of `output_kind=FINAL_ONLY`: the last output of any other kind has only some of the
    samples (n > 1), or only the last tokens (DELTA).
    Raises `BatchError` for a request that is not finished, or whose parts disagree.
    """
    if isinstance(request_output, Mapping):
        return _from_vllm_http(request_output)
    name = f"vLLM's request {request_output.request_id!r}"
    if not request_output.finished or not request_output.outputs:
        raise BatchError(f"{name} is not finished", hint="hand over the last output of a request")
    numbers = [int(output.index) for output in request_output.outputs]
    if numbers != list(range(len(numbers))):
        raise BatchError(f"{name} has not all of its samples in this output, but the numbers {numbers}", hint=WHOLE)
    samples = []
    for output in request_output.outputs:
        tokens = list(output.token_ids)
        logprobs = None
        if output.logprobs is not None:
            if len(output.logprobs) != len(tokens):
                raise BatchError(f"{name} has {len(tokens)} tokens and log-probabilities for {len(output.logprobs)}")
            logprobs = [_chosen(name, output.logprobs[i], token) for i, token in enumerate(tokens)]
        stamps = getattr(output, "weight_versions", None) or ()  # vLLM has them since 0.32
        spans = [[_version(span.version), span.start, span.end] for span in stamps]
        samples.append(_Sample(tokens, logprobs, spans, str(output.finish_reason)))
    return _generated(name, samples, request_output.prompt_token_ids, str(request_output.request_id))


def from_sglang(answer: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> Generated:
    """The rows of SGLang's answer to one prompt: the dict of `Engine.generate` and of `/generate`, or with `n` > 1 the list.

    Log-probabilities are there if the request had `return_logprob`, the prompt if it had `return_prompt_token_ids`. Raises
    `BatchError` for an answer that is not finished, or whose parts disagree.
    """
    answers = [answer] if isinstance(answer, Mapping) else list(answer)
    if not answers:
        raise BatchError("SGLang's answer is empty")
    try:
        samples = [_sglang_sample(one) for one in answers]
    except (KeyError, TypeError, AttributeError) as error:
        raise BatchError(
            f"this is no answer of SGLang: {type(error).__name__}: {error}",
            hint="hand over the dict with 'output_ids' and 'meta_info', or the list of them",
        ) from error
    first = answers[0]
    request, prompt = str(first["meta_info"].get("id", "")), first.get("prompt_token_ids")
    name = f"SGLang's request {request!r}"
    if any(one.get("prompt_token_ids", prompt) != prompt for one in answers):
        raise BatchError(f"{name} came with answers to other prompts", hint="make a task of each prompt")
    return _generated(name, samples, prompt, request)


def _from_vllm_http(answer: Mapping[str, Any]) -> Generated:
    name = f"vLLM's request {answer.get('request_id', '')!r}"
    try:
        samples = [
            _vllm_http_sample(name, choice) for choice in sorted(answer["choices"], key=lambda one: one["index"])
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise BatchError(
            f"{name}: this is no answer of /inference/v1/generate: {type(error).__name__}: {error}",
            hint="hand over the whole JSON object of a request that did not stream, with output_mode 'tokens'",
        ) from error
    if not samples:
        raise BatchError(f"{name} has no choices")
    return _generated(name, samples, answer.get("prompt_token_ids"), str(answer.get("request_id", "")))


def _vllm_http_sample(name: str, choice: Mapping[str, Any]) -> _Sample:
    tokens = [int(token) for token in choice["token_ids"]]
    logprobs = None
    if (listed := choice.get("logprobs")) is not None:
        steps = listed["content"] or []
        if [int(step["token_id"]) for step in steps] != tokens:
            raise BatchError(
                f"{name} has {len(tokens)} tokens, and {len(steps)} log-probabilities that belong to others"
            )
        logprobs = [float(step["logprob"]) for step in steps]
    spans = [
        [_version(span["version"]), int(span["start"]), int(span["end"])]
        for span in choice.get("weight_versions") or ()
    ]
    return _Sample(tokens, logprobs, spans, str(choice["finish_reason"]))


def _sglang_sample(answer: Mapping[str, Any]) -> _Sample:
    meta = answer["meta_info"]
    name = f"SGLang's request {meta.get('id', '')!r}"
    reason = meta.get("finish_reason")
    if reason is None:
        raise BatchError(f"{name} is not finished", hint="hand over the last chunk of a stream")
    tokens = [int(token) for token in answer["output_ids"]]
    logprobs = None
    if (listed := meta.get("output_token_logprobs")) is not None and (listed or not tokens):
        if [int(one[1]) for one in listed] != tokens:
            raise BatchError(
                f"{name} has {len(tokens)} tokens, and {len(listed)} log-probabilities that belong to others",
                hint="without incremental streaming, the last chunk holds all of both",
            )
        logprobs = [float(one[0]) for one in listed]
    spans = []
    for span in meta.get("weight_versions") or ():
        version, start, end = (span["version"], span["start"], span["end"]) if isinstance(span, Mapping) else span
        spans.append([_version(version), int(start), int(end)])
    return _Sample(tokens, logprobs, spans, str(reason["type"] if isinstance(reason, Mapping) else reason))


def _generated(name: str, samples: list[_Sample], prompt: Sequence[int] | None, request: str) -> Generated:
    data: dict[str, Any] = {"token_ids": _jagged([sample.token_ids for sample in samples], torch.int64)}
    if prompt is not None:
        data["prompt_ids"] = _jagged([list(prompt)] * len(samples), torch.int64)
    logprobs = [sample.logprobs for sample in samples if sample.logprobs is not None]
    if logprobs:
        if len(logprobs) != len(samples):
            raise BatchError(f"{name} has log-probabilities for {len(logprobs)} of its {len(samples)} samples")
        data["logprobs"] = _jagged(logprobs, torch.float32)
    data["finish_reason"] = [sample.finish_reason for sample in samples]
    data["version_spans"] = [sample.spans for sample in samples]
    for sample in samples:
        if sample.spans and (end := sample.spans[-1][2]) > (count := len(sample.token_ids)):
            raise BatchError(f"{name} has {count} tokens, and versions for {end}", hint=WHOLE)
    tokens = sum(len(sample.token_ids) for sample in samples)
    return Generated(data, _versions(samples), {"request": request, "tokens": tokens})


def _versions(samples: list[_Sample]) -> VersionSpan | None:
    """The versions of all tokens; None if that of a single one is unknown, or if there are no tokens."""
    numbers: list[int] = []
    for sample in samples:
        at = 0
        for version, start, end in sample.spans:
            if start == end:
                continue
            if start != at or not isinstance(version, int):
                return None
            numbers.append(version)
            at = end
        if at != len(sample.token_ids):
            return None
    return VersionSpan(min(numbers), max(numbers)) if numbers else None


def _version(label: Any) -> int | str:
    text = str(label)
    if text == STARTED_WITH:
        return 0
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else text


def _chosen(name: str, step: Any, token: int) -> float:
    """vLLM lists the most likely tokens of each step, and always the one that was sampled."""
    if step is None or token not in step:
        raise BatchError(f"{name} has no log-probability for the sampled token {token}")
    return float(step[token].logprob)


def _jagged(rows: Sequence[Sequence[int] | Sequence[float]], dtype: torch.dtype) -> torch.Tensor:
    """Jagged even where all rows are equally long: a column has one layout, whatever the lengths of its tasks."""
    offsets = torch.zeros(len(rows) + 1, dtype=torch.int64, device="cpu")
    offsets[1:] = torch.tensor([len(row) for row in rows], dtype=torch.int64, device="cpu").cumsum(0)
    values = torch.tensor([value for row in rows for value in row], dtype=dtype, device="cpu")
    return torch.nested.nested_tensor_from_jagged(values, offsets)
