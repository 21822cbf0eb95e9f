"""The API process: middleware that tells clients about the replicas of this server, above all why a torn one refuses.

Since 0.33 the engine core itself reports that it is torn (`core`), and vLLM answers 503: `TornReplicaMiddleware` then has nothing
to do.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

from inference_plugin.engines.http import ReplicaMiddleware, answer, replicas_here
from inference_plugin.engines.monkeypatch import contained, wrap
from inference_plugin.engines.vllm.answers import hook_answers

__all__ = ["TORN", "TornReplicaMiddleware", "hook_api"]

logger = logging.getLogger("vllm.weightwire")

TORN = "weights are torn and generation is refused until a full weight update heals them"


def hook_api() -> None:
    try:
        from vllm.entrypoints.launchers import app as launcher
    except ImportError:  # before 0.29
        _hook_before_0_29()
        return

    @wrap(launcher, "init_entrypoints_middleware")
    def init_entrypoints_middleware(original: Callable[..., Any], args: Any, app: Any, *rest: Any) -> Any:
        result = original(args, app, *rest)
        _add_middleware(app)
        return result


def _hook_before_0_29() -> None:
    """The function that adds middleware is in the module that `python -m` runs as `__main__`, where wrapping the imported module
    has no effect. So the first function that it imports when it is called is wrapped instead."""
    from vllm.entrypoints import serve

    @wrap(serve, "register_vllm_serve_api_routers")
    def register_routers(original: Callable[..., Any], app: Any) -> Any:
        result = original(app)
        _add_middleware(app)
        return result


def _add_middleware(app: Any) -> None:
    with contained("adding the middleware", logger):
        app.add_middleware(TornReplicaMiddleware)
        app.add_middleware(ReplicaMiddleware)
    with contained("hooking into the answers", logger):
        hook_answers()


_STREAMED_ERROR = b'"Internal server error"'
"""The message of vLLM's error chunk, as JSON, for a request that its engine core ended with an error."""

_STREAM_END = b"data: [DONE]"
_FINISHED = b'"finish_reason":"'
_ERROR = b'"error":'
"""Parts of a stream's chunks: its end, and the two things of which one precedes the end of a whole answer."""


class TornReplicaMiddleware:
    """ASGI: answers 503 with the reason where a torn replica of this server made the answer a 500, and puts the reason
    into the error that ends a stream. A stream without a token has no such error before vLLM 0.32: it gets one."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        torn = explained = False

        async def watch(message: Any) -> None:
            nonlocal torn, explained
            if message["type"] == "http.response.start" and message["status"] == 500:
                reason = self._reason()
                if reason is not None:
                    torn = True
                    await answer(send, 503, _error(reason), "application/json")
            if torn:
                return  # the answer was given already
            if message["type"] == "http.response.body":
                body = message.get("body", b"")
                explained |= _FINISHED in body or _ERROR in body
                cut_short = body.startswith(_STREAM_END) and not explained
                if (cut_short or _STREAMED_ERROR in body) and (reason := self._reason()) is not None:
                    body = body.replace(_STREAMED_ERROR, json.dumps(reason).encode())
                    if cut_short:
                        body = b"data: " + _error(reason) + b"\n\n" + body
                    message["body"] = body
            await send(message)

        await self._app(scope, receive, watch if scope["type"] == "http" else send)

    @staticmethod
    def _reason() -> str | None:
        why = ""
        with contained("looking for torn replicas", logger):
            torn = (card for card in replicas_here() if card.state == "torn")
            why = "; ".join(f"replica {card.replica}: {card.detail}" for card in torn)
        return f"{TORN}: {why}" if why else None


def _error(reason: str) -> bytes:
    return json.dumps({"error": {"message": reason, "type": "TornReplica", "param": None, "code": 503}}).encode()
