"""What vLLM's API process tells clients of a torn replica, and that it tells them something whatever it can read."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from inference_plugin.engines.published_card import replica_card
from inference_plugin.engines.vllm.api import TornReplicaMiddleware
from inference_plugin.net import addresses
from inference_plugin.wire.messages import ReplicaCard
from tests.support.rig import runtime as directory_of_its_own

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with directory_of_its_own(monkeypatch) as path:
        yield path


async def _failing(scope: Any, receive: Any, send: Any) -> None:
    """vLLM, whose engine core ended the request with an error."""
    await send({"type": "http.response.start", "status": 500, "headers": []})
    await send({"type": "http.response.body", "body": b'"Internal server error"'})


def answer(engine: Any = _failing) -> tuple[int, bytes]:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(TornReplicaMiddleware(engine)({"type": "http"}, None, send))
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent)


def streaming(*chunks: bytes) -> Any:
    """A stream as vLLM sends it; before 0.32 it ends without an error where the engine core ended the request before the first
    token."""

    async def engine(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for chunk in (*chunks, b"data: [DONE]\n\n"):
            await send({"type": "http.response.body", "body": chunk, "more_body": True})

    return engine


def torn_card() -> ReplicaCard:
    card = replica_card(
        replica=addresses.new_replica_id("vllm"),
        address="",
        workers=(),
        engine="vllm",
        engine_version="0",
        model="m",
        parent_pid=os.getpid(),
    )
    addresses.write_card(msgspec.structs.replace(card, state="torn", detail="undo failed"))
    return card


def test_clients_of_a_torn_replica_get_a_503_with_the_reason(directory: Path) -> None:
    card = torn_card()
    status, body = answer()
    assert status == 503 and f"replica {card.replica}: undo failed" in json.loads(body)["error"]["message"]


def test_a_stream_that_a_torn_replica_ended_before_its_first_token_ends_with_the_reason(directory: Path) -> None:
    torn_card()
    role, end = b'data: {"choices":[{"delta":{"role":"assistant"},"finish_reason":null}]}\n\n', b"data: [DONE]\n\n"
    for chunks in ((), (role,)):
        status, body = answer(streaming(*chunks))
        *before, error, last = body.split(b"\n\n")[:-1]
        told = json.loads(error.removeprefix(b"data: "))["error"]
        assert (status, before, last) == (200, [chunk.strip() for chunk in chunks], end.strip())
        assert (told["type"], told["code"]) == ("TornReplica", 503) and "undo failed" in told["message"]
    whole = (role, b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n')
    assert answer(streaming(*whole))[1] == b"".join((*whole, end)), "an answer that came to its end is left alone"
    failed = b'data: {"error":{"message":"Internal server error"}}\n\n'
    assert answer(streaming(failed))[1].count(b"error") == 1


@pytest.mark.parametrize("broken", ["the card", "the directory"])
def test_where_nothing_can_be_read_the_engine_s_own_error_goes_out(
    directory: Path, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if broken == "the card":
        (addresses.runtime_dir() / "vllm-1-ab.card").mkdir()
    else:
        (directory / "file").touch()
        monkeypatch.setenv("WEIGHTWIRE_RUNTIME_DIR", str(directory / "file"))
    assert answer() == (500, b'"Internal server error"')
