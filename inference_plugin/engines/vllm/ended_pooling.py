"""What clients of a pooling model are told of a request that ended without an answer, under `abort` or as a replica tore.

vLLM up to 0.33 takes such an end for a part of a text: the loop that hands out all answers ends, of its API server or of the
caller's engine.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from inference_plugin.engines.monkeypatch import wrap

__all__ = ["hook_ended_pooling"]

_ABORTED = "the request was ended before it had an answer, as requests are where weights change: send it again"


def hook_ended_pooling() -> None:
    from vllm.v1.engine.output_processor import OutputProcessor

    @wrap(OutputProcessor, "process_outputs")
    def process_outputs(
        original: Callable[..., Any], self: Any, outputs: Sequence[Any], *args: Any, **kwargs: Any
    ) -> Any:
        for output in outputs:
            if output.finish_reason is not None and output.pooling_output is None:
                _answer_pooling(self.request_states.get(output.request_id), output)
        return original(self, outputs, *args, **kwargs)


def _answer_pooling(state: Any, output: Any) -> None:
    """Makes the end of a pooling request one that vLLM can hand out. `state`: of the request, if it is not forgotten."""
    import torch

    if state is None or state.detokenizer is not None or getattr(output, "mm_cache_miss_hashes", None):
        return  # a text, or an end that vLLM itself explains
    output.pooling_output = torch.empty(0)  # as where a client goes
    state.make_request_output = partial(_with_reason, state, state.make_request_output, output)


def _with_reason(state: Any, original: Callable[..., Any], output: Any, *args: Any, **kwargs: Any) -> Any:
    """In the place of a request's `make_request_output`: its caller gets an error, and no vector without elements. Before 0.32
    vLLM has no error for a caller of the offline `LLM`, who then gets such a vector."""
    reason = output.stop_reason or _ABORTED
    if "error" not in inspect.signature(original).parameters:
        made = original(*args, **kwargs)
        return made if state.queue is None else RuntimeError(reason)
    from vllm.outputs import RequestError

    error = getattr(output, "error", None) or RequestError("engine_paused", reason, retryable=True)
    return original(*args, **kwargs | {"error": error})
