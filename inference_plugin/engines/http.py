"""What an engine's HTTP server says of its replicas: `/ready` for load balancers, and our part of `/metrics`.

All of it is read from files of the runtime directory, in a thread: the server waits for no other process.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import re
from collections.abc import Sequence
from typing import Any
from urllib.parse import parse_qs

from inference_plugin.engines.metrics import exposition
from inference_plugin.engines.monkeypatch import contained
from inference_plugin.net import addresses
from inference_plugin.net.processes import ancestors_of, parent_of
from inference_plugin.net.records import record_of
from inference_plugin.wire.messages import ReplicaCard

__all__ = ["ReplicaMiddleware", "answer", "readiness", "replicas_here"]

TEXT = "text/plain; version=0.0.4; charset=utf-8"
_END = b"# EOF\n"
"""How an exposition in OpenMetrics' format ends."""


def replicas_here() -> list[ReplicaCard]:
    """The replicas of this server: this process has started them, or the process has that started this one, or a child. Where
    data-parallel ranks share experts and each has a server of its own, all these servers have the one replica."""
    here = addresses.boot_id()
    return [
        card for card in addresses.discover() if card.boot_id == here and (_started_here(card) or _shared_here(card))
    ]


def _started_here(card: ReplicaCard) -> bool:
    return card.parent_pid in (os.getpid(), os.getppid()) or parent_of(card.parent_pid) == os.getpid()


def _shared_here(card: ReplicaCard) -> bool:
    """Whether one of several engine cores that are one replica is this server's. A core's only rank is the core's own process; of
    several ranks each is a child of it."""
    ranks = card.tp * card.pp
    if len(card.workers) <= ranks:
        return False
    for worker in card.workers:
        starters = list(itertools.islice(ancestors_of(worker.pid), 2))
        of_core = starters[:1] if ranks == 1 else starters[1:]
        if os.getpid() in starters or os.getppid() in of_core:
            return True
    return False


def readiness(cards: Sequence[ReplicaCard], min_version: int | None, group: str) -> tuple[int, dict[str, Any]]:
    """HTTP status and body of `/ready`: 200 if there are replicas, all generate, and (with `min_version`) all serve that
    version of `group` or a later one; else 503, with the reasons in `why`."""
    replicas, why = [], []
    for card in cards:
        versions = {
            name: record.version for name, record in record_of(card).groups.items() if record.version is not None
        }
        replicas.append({"replica": card.replica, "state": card.state, "versions": versions})
        if card.state != "serving":
            why.append(f"{card.replica} is {card.state}")
        elif min_version is not None and versions.get(group, -1) < min_version:
            served = "an unknown version" if group in card.unknown else "no version"
            served = f"version {versions[group]}" if group in versions else served
            why.append(f"{card.replica} serves {served} of {group}, not {min_version}")
    if not cards:
        why.append("no replica of this server takes weight updates: it is starting, or runs without the plug-in")
    return (503 if why else 200), {"ready": not why, "why": why, "replicas": replicas}


class ReplicaMiddleware:
    """ASGI: answers `GET /ready`, and adds our metrics to what the engine answers at `GET /metrics` (all of the answer where
    the engine has no metrics)."""

    logger = logging.getLogger(__name__)

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["method"] == "GET":
            path = scope["path"].rstrip("/")
            if path == "/ready":
                await self._ready(scope, send)
                return
            if path == "/metrics":
                await self._metrics(scope, receive, send)
                return
        await self._app(scope, receive, send)

    async def _ready(self, scope: Any, send: Any) -> None:
        asked = parse_qs(scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True)
        group = asked.get("group", ["policy"])[-1]
        text = asked.get("min_version", [None])[-1]
        if text is not None and not re.fullmatch("[0-9]{1,19}", text):
            why = f"min_version={text!r} is no version: use a whole number from 0 on"
            status, body = 400, {"ready": False, "why": [why]}
        else:
            status, body = 503, {"ready": False, "why": ["the runtime directory can't be read; the log says why"]}
            with contained("reading the replicas for /ready", self.logger):
                cards = await asyncio.to_thread(replicas_here)
                status, body = readiness(cards, None if text is None else int(text), group)
        await answer(send, status, json.dumps(body).encode(), "application/json")

    async def _metrics(self, scope: Any, receive: Any, send: Any) -> None:
        headers = [(name, value) for name, value in scope["headers"] if name.lower() != b"accept-encoding"]
        start: dict[str, Any] = {}
        parts: list[bytes] = []

        async def keep(message: Any) -> None:
            if message["type"] == "http.response.start":
                start.update(message)
            elif message["type"] == "http.response.body":
                parts.append(message.get("body", b""))

        await self._app({**scope, "headers": headers}, receive, keep)
        status, theirs = start["status"], b"".join(parts)
        kind = next((v.decode("latin-1") for n, v in start["headers"] if n.lower() == b"content-type"), TEXT)
        ours = b""
        if status in (200, 404):
            with contained("adding to the metrics", self.logger):
                openmetrics = status == 200 and "openmetrics" in kind
                ours = await asyncio.to_thread(lambda: exposition(replicas_here(), openmetrics=openmetrics))
        if ours and status == 404:  # the engine has none
            status, theirs, kind = 200, b"", TEXT
        await answer(send, status, (theirs.removesuffix(_END) if ours else theirs) + ours, kind)


async def answer(send: Any, status: int, body: bytes, kind: str) -> None:
    headers = [(b"content-type", kind.encode("latin-1")), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
