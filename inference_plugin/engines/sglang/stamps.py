"""The version that SGLang's outputs are stamped with."""

from __future__ import annotations

from typing import Any

__all__ = ["stamp_all", "tokens_made"]


def stamp_all(scheduler: Any, version: str) -> None:
    """Stamps outputs with the version. SGLang's own record leaves out a diffusion model's requests that rest between two blocks,
    and the tokens of a forward pass whose result is still to be processed (SGLang overlaps the two): they are of the weights that
    the pass ran with."""
    from sglang.srt.runtime_context import get_serving
    from sglang.srt.utils.weight_versions import WeightVersionEvent

    old = get_serving().weight_version
    scheduler.record_weight_version_change(new_version=version)
    if old == version:
        return
    for request in scheduler.dllm_manager.waiting_queue:
        event = WeightVersionEvent(old, len(request.output_ids))
        if request.output_ids and event not in request.weight_version_events[-1:]:
            request.weight_version_events.append(event)
    if not scheduler.enable_overlap:
        return
    for batch, result in scheduler.result_queue:
        for request, count in zip(batch.reqs, tokens_made(batch, result), strict=True):
            if request.inflight_middle_chunks > 0 or request.finished():
                continue  # a middle chunk of a prompt makes no token
            events, made = request.weight_version_events, len(request.output_ids)
            if events and events[-1] == WeightVersionEvent(old, made):
                events.pop()
            events.append(WeightVersionEvent(old, made + count))


def tokens_made(batch: Any, result: Any) -> list[int]:
    """How many tokens a pass that is over has made for each request of its batch, while its result is still to be processed: one,
    or as many as speculative decoding has accepted."""
    accepted = getattr(result, "accept_lens", None)
    if accepted is None or not batch.forward_mode.is_decode():
        return [1] * len(batch.reqs)
    if result.copy_done is not None:
        result.copy_done.synchronize()
    return [int(count) for count in accepted.tolist()]
