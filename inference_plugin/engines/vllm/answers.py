"""The API process: `metadata` of each answer says which versions of the weights made it, in the form in which SGLang says it."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

from inference_plugin.engines.monkeypatch import contained, wrap

__all__ = ["hook_answers", "version_metadata"]

logger = logging.getLogger("vllm.weightwire")


def hook_answers() -> None:
    """Wraps what makes the answers to completions and chat completions that are not streamed. Called once the server's routes
    are there, in its process: importing these modules takes long. Before 0.32 vLLM doesn't know the versions of an answer."""
    from vllm.outputs import CompletionOutput

    if "weight_versions" not in CompletionOutput.__dataclass_fields__:
        return
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion

    @wrap(OpenAIServingCompletion, "request_output_to_completion_response")
    def completion(original: Callable[..., Any], self: Any, final_res_batch: Any, *args: Any, **kwargs: Any) -> Any:
        response = original(self, final_res_batch, *args, **kwargs)
        with contained("telling the weights' version", logger):
            _add(response, final_res_batch[0])
        return response

    @wrap(OpenAIServingChat, "chat_completion_full_generator")
    async def chat(
        original: Callable[..., Any], self: Any, request: Any, result_generator: Any, *args: Any, **kwargs: Any
    ) -> Any:
        last: list[Any] = []

        async def noted() -> AsyncIterator[Any]:
            async for result in result_generator:
                last[:] = [result]
                yield result

        response = await original(self, request, noted(), *args, **kwargs)
        with contained("telling the weights' version", logger):
            if last and hasattr(response, "choices"):  # else it is an error
                _add(response, last[0])
        return response


def version_metadata(output: Any) -> dict[str, Any] | None:
    """`weight_version`, the last one, and `weight_versions`, the spans over the tokens of a vLLM `CompletionOutput`."""
    spans = [{"version": s.version, "start": s.start, "end": s.end} for s in output.weight_versions or ()]
    return {"weight_version": spans[-1]["version"], "weight_versions": spans} if spans else None


def _add(response: Any, result: Any) -> None:
    if (metadata := version_metadata(result.outputs[0])) is not None:
        response.metadata = metadata
