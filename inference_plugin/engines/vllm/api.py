"""The API process: what clients are told while a replica of this server is torn."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

from inference_plugin.engines.hooking import wrap
from inference_plugin.wire import addresses

__all__ = ["TornReplicaMiddleware", "hook_api"]


def hook_api() -> None:
    from vllm.entrypoints.launchers import app as launcher

    @wrap(launcher, "init_entrypoints_middleware")
    def init_entrypoints_middleware(original: Callable[..., Any], args: Any, app: Any, *rest: Any) -> Any:
        result = original(args, app, *rest)
        app.add_middleware(TornReplicaMiddleware)
        return result


_STREAMED_ERROR = b'"Internal server error"'
"""The message of vLLM's error chunk, as JSON, for a request that its engine core ended with an error."""


class TornReplicaMiddleware:
    """ASGI: answers 503 with the reason where a torn replica of this server made the answer a 500, and puts the reason
    into the error that ends a stream."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        torn = False

        async def watch(message: Any) -> None:
            nonlocal torn
            if message["type"] == "http.response.start" and message["status"] == 500:
                reason = self._reason()
                if reason is not None:
                    torn = True
                    body = json.dumps(
                        {"error": {"message": reason, "type": "TornReplica", "param": None, "code": 503}}
                    ).encode()
                    headers = [
                        (b"content-type", b"application/json"),
                        (b"content-length", str(len(body)).encode()),
                    ]
                    await send({"type": "http.response.start", "status": 503, "headers": headers})
                    await send({"type": "http.response.body", "body": body})
            if torn:
                return  # the answer was given already
            if (
                message["type"] == "http.response.body"
                and _STREAMED_ERROR in message.get("body", b"")
                and (reason := self._reason()) is not None
            ):
                message["body"] = message["body"].replace(_STREAMED_ERROR, json.dumps(reason).encode())
            await send(message)

        await self._app(scope, receive, watch if scope["type"] == "http" else send)

    @staticmethod
    def _reason() -> str | None:
        mine = [
            card
            for card in addresses.discover()
            if card.parent_pid in (os.getpid(), os.getppid()) and card.state == "torn"
        ]
        if not mine:
            return None
        why = "; ".join(f"replica {card.replica}: {card.detail}" for card in mine)
        return f"weights are torn and generation is refused until a full weight update heals them: {why}"
