"""Whatever a message says: it is answered, the worker goes on, and the transaction of another group is unharmed."""

from __future__ import annotations

import contextlib
import copy
import os
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inference_plugin.net import addresses
from inference_plugin.transports.relay import RelayTerms
from inference_plugin.wire import codec
from inference_plugin.wire.digest import digest_bytes, digest_group
from inference_plugin.wire.errors import ProtocolError
from inference_plugin.wire.geometry import Box, Piece
from inference_plugin.wire.manifest import Manifest, TensorSpec
from inference_plugin.wire.messages import (
    PROTOCOL_VERSION,
    Abort,
    Begin,
    Begun,
    Body,
    Bucket,
    CloseGroup,
    Describe,
    Envelope,
    Failed,
    GroupOpened,
    Hop,
    OpenGroup,
    Relay,
    Release,
    Renew,
    Seal,
    Sender,
    WorkerCard,
)
from tests.support.rig import eventually
from tests.support.worker import Worker
from tests.transports.cases import assert_equal_bytes
from tests.worker.driver import Driver, weights

LONG_MS = 60_000
EXAMPLES = int(os.environ.get("WW_TEST_EXAMPLES", "60"))

SMALL = Manifest((TensorSpec("w", "int8", (4,)), TensorSpec("v", "bfloat16", (2, 3))), {"w2": "w"})
DATA = bytes(range(4))
PIECE = Piece(Box(0, (0,), (4,)), digest_bytes(DATA))
PIECES = (PIECE, Piece(Box(1, (0, 0), (2, 3)), digest_bytes(bytes(12))))
HERE = addresses.boot_id()
PASSING = msgspec.msgpack.encode(RelayTerms(1, 0.3))

REQUESTS: tuple[Body, ...] = (
    Describe(),
    OpenGroup("victim", SMALL, "zmq", b"", "auto", False),
    OpenGroup("victim", SMALL, "shm", msgspec.msgpack.encode({"segment_id": "s", "boot_id": HERE, "pid": 1, "fd": 1})),
    Begin("victim", "t2", 1 << 40, Sender("s", os.getpid(), HERE), 60.0, SMALL.fingerprint, PASSING),
    Begin("victim", "t3", 1 << 40, Sender("s", os.getpid(), HERE), 60.0, SMALL.fingerprint),
    Bucket("victim", "t", 0, 0, (PIECE,)),
    Relay("victim", "t", (Hop("r", 0, "ipc:///nowhere", os.getpid(), HERE),), 1),
    Seal("victim", "t", digest_group(SMALL, PIECES), PIECES, 0.0),
    Renew("victim", "t"),
    Abort("victim", "t", "because"),
    Release("victim"),
    CloseGroup("victim"),
)

EXTREMES: list[Any] = [
    *(-(1 << 63), -1, 0, 1, 65, (1 << 31) - 1, 1 << 31, 1 << 32, 1 << 48, (1 << 62) - 1, (1 << 63) - 1, (1 << 64) - 1),
    *(float("nan"), float("inf"), float("-inf"), -0.0, 5e-324, 1.7e308, 86400.0, 86400.5),
    *("", "\0", "t", "victim", "../victim", "é\U0010ffff", "x" * 65, "y" * 100_000, "tcp://10.0.0.1:7", HERE),
    *(b"", b"\0" * 70_000, b"\xc1", PASSING, bytes(4)),
    *(
        None,
        True,
        False,
        [],
        {},
        [[]],
        [0] * 9,
        [[0, [0], [1]]] * 50,
        [[0, [-1], [4]], 3],
        {"session": "s"},
        {"a": {"a": []}},
    ),
    [[0, [1 << 47] * 8, [1 << 47] * 8], 0],
    ["z", "float64", [0, 1 << 47, 1 << 47]],
    ["w", "int8", [1 << 43]],
]


def places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value of a message as it travels."""
    if path:
        yield path
    entries = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in entries:
        if key != "type":
            yield from places(value, (*path, key))


def integers(request: Body) -> list[tuple[Any, ...]]:
    """The way to every integer of a message."""
    found = []
    for path in places(travelling(request)):
        value: Any = travelling(request)
        for key in path:
            value = value[key]
        if isinstance(value, int) and not isinstance(value, bool):
            found.append(path)
    return found


def put(message: Any, path: tuple[Any, ...], value: Any) -> Any:
    """The message, with another value at the end of the path, if there is such a path."""
    tree = message
    try:
        for key in path[:-1]:
            tree = tree[key]
        tree[path[-1]] = copy.deepcopy(value)
    except (TypeError, LookupError):
        pass  # what lay there was replaced by something else
    return message


def travelling(request: Body) -> dict[str, Any]:
    """A message as plain lists and dicts."""
    plain: dict[str, Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(Envelope(PROTOCOL_VERSION, 1, request)))
    return plain


@st.composite
def extreme_frames(draw: st.DrawFn) -> bytes:
    """A right request in which up to three values are others."""
    message = travelling(draw(st.sampled_from(REQUESTS)))
    for path in draw(st.lists(st.sampled_from(list(places(message))), min_size=0, max_size=3)):
        put(message, path, draw(st.sampled_from(EXTREMES)))
    return msgspec.msgpack.encode(message)


@pytest.fixture
def raw(worker: Worker) -> Iterator[Any]:
    context = zmq.Context()
    socket = context.socket(zmq.REQ)
    socket.setsockopt(zmq.RCVTIMEO, LONG_MS)
    socket.connect(worker.address)
    yield socket
    context.destroy(linger=0)


def test_no_value_in_any_field_ends_the_loop_or_reaches_another_group(
    worker: Worker, trainer: Driver, raw: Any
) -> None:
    trainer.open()
    trainer.begin("bystander", 1, lease_s=3600)  # longer than thousands of requests take on any machine
    trainer.write(weights(1))
    seen: set[str] = set()

    def exchange(*frames: bytes) -> Body:
        raw.send_multipart(list(frames))
        return codec.decode(raw.recv()).body

    def ask(request: Body) -> Body:
        return exchange(codec.encode(request))

    @given(extreme_frames(), st.booleans(), st.booleans())
    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), derandomize=EXAMPLES <= 60)
    def is_answered(frame: bytes, begun: bool, with_payload: bool) -> None:
        if begun:
            ask(CloseGroup("victim"))
            assert isinstance(ask(OpenGroup("victim", SMALL, "zmq")), GroupOpened)
            begin = Begin("victim", "t", 1, Sender("s", os.getpid(), HERE), 60.0, SMALL.fingerprint, PASSING)
            assert ask(begin) == Begun()
        answer = exchange(frame, DATA) if with_payload else exchange(frame)
        seen.add(type(answer).__name__)
        if isinstance(answer, Failed):
            assert answer.error.kind not in ("WeightwireError", ""), answer  # a bug of ours, not a refusal
        card = ask(Describe())
        assert isinstance(card, WorkerCard)
        bystander = next(group for group in card.groups if group.group == "policy")
        assert (bystander.state, bystander.txn) == ("receiving", "bystander")

    for request in REQUESTS:  # as they are, and with one integer that is another
        with_payload = isinstance(request, Bucket)
        is_answered.hypothesis.inner_test(codec.encode(request), True, with_payload)
        for path in integers(request):
            for value in (-1, 1 << 31, (1 << 64) - 1):
                frame = msgspec.msgpack.encode(put(travelling(request), path, value))
                is_answered.hypothesis.inner_test(frame, True, with_payload)
    is_answered()
    assert {"Done", "Begun", "GroupOpened", "Relaying", "Sealed", "Failed", "WorkerCard"} <= seen
    trainer.seal_fully("bystander")
    worker.commit("bystander", 1)
    assert_equal_bytes(worker.installers["policy"].installed, weights(1))


def test_every_integer_of_a_request_has_its_bounds() -> None:
    """A number that no field can mean is refused on arrival, whatever would have been made of it."""
    unbounded = []
    for request in REQUESTS:
        for path in integers(request):
            for value in (-1, (1 << 64) - 1):
                digest = path[-2:] in ((0, 1), (1, 1)) and "pieces" in path and value > 0  # all 64 bits of it
                with contextlib.suppress(ProtocolError):
                    codec.decode(msgspec.msgpack.encode(put(travelling(request), path, value)))
                    if not digest:
                        unbounded.append((type(request).__name__, path, value))
    assert unbounded == []


def test_what_is_left_of_extreme_requests_goes_with_the_groups(worker: Worker, raw: Any) -> None:
    """A relay to nowhere, a transaction without a trainer: closing the group ends them."""

    def ask(request: Body) -> Body:
        raw.send(codec.encode(request))
        return codec.decode(raw.recv()).body

    ask(OpenGroup("victim", SMALL, "zmq"))
    ask(Begin("victim", "t", 1, Sender("s"), 86400.0, SMALL.fingerprint, PASSING))
    ask(Relay("victim", "t", (Hop("r", 0, "ipc:///nowhere", 0, ""),), 1))
    ask(CloseGroup("victim"))
    names = ("weightwire-group-victim", "weightwire-relay", "weightwire-stage-victim")
    eventually(
        lambda: not any(thread.name in names for thread in threading.enumerate()),
        "the end of the group's threads",
    )
