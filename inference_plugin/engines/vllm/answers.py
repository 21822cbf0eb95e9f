"""The API process: `metadata` of each answer says which versions of the weights made it, in the form in which SGLang says it."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, nullcontext
from typing import Any

from inference_plugin.engines.monkeypatch import contained, wrap

__all__ = ["hook_answers", "version_metadata"]

logger = logging.getLogger("vllm.weightwire")


@functools.cache
def hook_answers() -> None:
    """Wraps, once, the functions that make the answers to completions and chat completions. Called in the server's process when
    its routes exist, because importing these modules takes long. Before 0.32 vLLM doesn't know the versions of an answer."""
    from vllm.outputs import CompletionOutput

    if "weight_versions" not in CompletionOutput.__dataclass_fields__:
        return
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion

    @wrap(OpenAIServingCompletion, "request_output_to_completion_response")
    def completion(original: Callable[..., Any], self: Any, final_res_batch: Any, *args: Any, **kwargs: Any) -> Any:
        response = original(self, final_res_batch, *args, **kwargs)
        with contained("telling the weights' version", logger):
            _add(response, [output for result in final_res_batch for output in result.outputs])
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
                _add(response, last[0].outputs)
        return response

    @wrap(OpenAIServingCompletion, "completion_stream_generator")
    def completion_stream(original: Callable[..., Any], self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        return _streamed(functools.partial(original, self, request), request.n or 1, args, kwargs)

    @wrap(OpenAIServingChat, "chat_completion_stream_generator")
    def chat_stream(original: Callable[..., Any], self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        return _streamed(functools.partial(original, self, request), 0, args, kwargs)


def version_metadata(output: Any) -> dict[str, Any] | None:
    """`weight_version`, the last one, and `weight_versions`, the spans over the tokens of a vLLM `CompletionOutput`."""
    spans = [{"version": s.version, "start": s.start, "end": s.end} for s in output.weight_versions or ()]
    return {"weight_version": spans[-1]["version"], "weight_versions": spans} if spans else None


def _add(response: Any, outputs: list[Any]) -> None:
    """The answer gets the `metadata` of its first choice, and where it has several, each choice its own."""
    if (metadata := version_metadata(outputs[0])) is not None:
        response.metadata = metadata
    if len(response.choices) == len(outputs) > 1:
        for choice, output in zip(response.choices, outputs, strict=True):
            if (metadata := version_metadata(output)) is not None:
                choice.metadata = metadata


async def _streamed(
    stream: Callable[..., Any], choices: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> AsyncIterator[str]:
    """vLLM's stream of an answer: the chunk that ends a choice has the `metadata` of that choice. `choices`: how many each
    prompt of a completion has; 0 for a chat."""
    ended: dict[int, dict[str, Any]] = {}

    async def noted(results: Any) -> AsyncIterator[Any]:
        async with aclosing(results) if hasattr(results, "aclose") else nullcontext():
            async for item in results:
                with contained("telling the weights' version", logger):
                    prompt, result = item if choices else (0, item)
                    for output in result.outputs:
                        if (metadata := version_metadata(output)) is not None:
                            ended[output.index + prompt * choices] = metadata
                yield item

    given = [noted(value) if hasattr(value, "__aiter__") else value for value in args]
    async with aclosing(stream(*given, **kwargs)) as chunks:
        async for chunk in chunks:
            yield _with_versions(chunk, ended) if ended else chunk


def _with_versions(chunk: str, ended: dict[int, dict[str, Any]]) -> str:
    """The chunk, with the metadata of the choice that it ends."""
    with contained("telling the weights' version", logger):
        if '"finish_reason":"' in chunk:
            told = json.loads(chunk.removeprefix("data: "))
            metadata = ended.pop(told["choices"][0]["index"], None)
            if metadata is not None:
                return (
                    f"data: {json.dumps(told | {'metadata': metadata}, ensure_ascii=False, separators=(',', ':'))}\n\n"
                )
    return chunk
