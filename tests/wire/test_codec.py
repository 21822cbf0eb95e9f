"""The codec: every message comes back as it was, and whatever else a peer sends is a typed error."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import inspect

from inference_plugin.wire import codec
from inference_plugin.wire.errors import ManifestMismatch, ProtocolError
from inference_plugin.wire.geometry import Box, Piece
from inference_plugin.wire.manifest import Manifest, TensorSpec
from inference_plugin.wire.messages import (
    PROTOCOL_VERSION,
    Abort,
    Begin,
    Begun,
    Body,
    Bucket,
    ClearTasks,
    CloseGroup,
    Describe,
    Done,
    EndLeases,
    Envelope,
    Failed,
    Go,
    GroupOpened,
    Lease,
    Leased,
    OpenGroup,
    Outcome,
    Pull,
    Pulled,
    Ready,
    Relay,
    Relaying,
    Release,
    Renew,
    Seal,
    Sealed,
    Sender,
    TasksCleared,
    Wrote,
)

BODIES: tuple[type[Any], ...] = Body.__args__  # type: ignore[attr-defined]


def values(kind: inspect.Type) -> st.SearchStrategy[Any]:
    """Any value that a field of this type may have."""
    match kind:
        case inspect.IntType(ge=low, lt=high):
            return st.integers(low or 0, (high or 1 << 63) - 1)
        case inspect.FloatType(ge=low, le=high):
            return st.floats(low or 0, high or 1e9)
        case inspect.StrType(pattern=pattern) if pattern:
            return st.from_regex(pattern, fullmatch=True)
        case inspect.StrType(min_length=low, max_length=high):
            return st.text(st.characters(codec="utf-8"), min_size=low or 0, max_size=min(high or 12, 12))
        case inspect.BytesType():
            return st.binary(max_size=12)
        case inspect.BoolType():
            return st.booleans()
        case inspect.NoneType():
            return st.none()
        case inspect.LiteralType(values=options):
            return st.sampled_from(options)
        case inspect.UnionType(types=types):
            return st.one_of([values(one) for one in types])
        case inspect.VarTupleType(item_type=item):
            return st.lists(values(item), max_size=2).map(tuple)
        case inspect.DictType(key_type=key, value_type=value):
            return st.dictionaries(values(key), values(value), max_size=2)
        case inspect.Metadata(type=inner):
            return values(inner)
        case inspect.StructType(cls=cls, fields=fields):
            if cls is Manifest:
                return manifests
            return st.builds(cls, **{field.name: values(field.type) for field in fields})
    raise AssertionError(f"no strategy for {kind}")


specs = st.builds(
    TensorSpec,
    st.text(st.characters(codec="utf-8"), min_size=1, max_size=8),
    st.sampled_from(["bfloat16", "float32", "bool"]),
    st.lists(st.integers(0, 9), max_size=3).map(tuple),
)
manifests = st.lists(specs, max_size=3, unique_by=lambda spec: spec.name).map(lambda s: Manifest(tuple(s)))
bodies = st.one_of([values(inspect.type_info(body)) for body in BODIES])


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_every_message_type_comes_back_equal(body: type[Any]) -> None:
    @given(values(inspect.type_info(body)), st.integers(0, 1 << 40))
    @settings(max_examples=15, deadline=None)
    def round_trip(message: Body, seq: int) -> None:
        envelope = codec.decode(codec.encode(message, seq))
        assert (envelope.body, envelope.seq, envelope.protocol) == (message, seq, PROTOCOL_VERSION)

    round_trip()


BOUNDED = (
    *(Describe, OpenGroup, Begin, Bucket, Relay, Seal, Renew, Abort, Release, CloseGroup),
    *(Ready, Wrote, Go, Outcome, Done, Failed, GroupOpened, Begun, Relaying, Sealed),
    *(Lease, Leased, EndLeases, Pull, Pulled, ClearTasks, TasksCleared),
)
DIGESTS = ("Piece.digest", "WantedShard.digest")


def unbounded(kind: inspect.Type, where: str) -> Iterator[str]:
    """The fields of a type, and of those in it, that may be as large or as long as a peer likes."""
    match kind:
        case inspect.IntType(ge=low, gt=above, lt=high):
            # A digest has all 64 bits: msgpack itself has no larger number, and no lower bound is below 0.
            if (low is None and above is None) or (high is None and not where.endswith(DIGESTS)):
                yield where
        case inspect.FloatType(ge=low, le=high):
            if low is None or high is None:
                yield where
        case inspect.StrType(max_length=limit, pattern=pattern):
            if limit is None and pattern is None:
                yield where
        case inspect.BytesType(max_length=limit):
            if limit is None:
                yield where
        case inspect.VarTupleType(item_type=item, max_length=limit):
            yield from [where] if limit is None else unbounded(item, f"{where}[]")
        case inspect.DictType(key_type=key, value_type=value, max_length=limit):
            yield from [where] if limit is None else [*unbounded(key, f"{where}.key"), *unbounded(value, f"{where}[]")]
        case inspect.UnionType(types=types):
            for one in types:
                yield from unbounded(one, where)
        case inspect.Metadata(type=inner):
            yield from unbounded(inner, where)
        case inspect.StructType(cls=cls, fields=fields):
            for field in fields:
                yield from unbounded(field.type, f"{where} > {cls.__name__}.{field.name}")
        case inspect.BoolType() | inspect.NoneType() | inspect.LiteralType():
            pass
        case _:
            raise AssertionError(f"{where}: {kind}")


def test_a_body_that_goes_to_many_peers_in_turn_has_each_ones_number_and_no_others_content() -> None:
    one, other = Abort("policy", "a" * 24, "one"), Abort("policy", "a" * 24, "other")
    for sent in ([one, one, other], [other, one, one], [one, other, one]):
        frames = [codec.encode(body, seq) for seq, body in enumerate(sent)]
        assert [codec.decode(frame) for frame in frames] == [
            Envelope(PROTOCOL_VERSION, seq, body) for seq, body in enumerate(sent)
        ]


@pytest.mark.parametrize("body", BOUNDED, ids=lambda body: body.__name__)
def test_every_field_of_a_message_has_its_bounds(body: type[Any]) -> None:
    assert list(unbounded(inspect.type_info(body), "")) == []


def decodes_or_refuses(frame: bytes) -> None:
    with contextlib.suppress(ProtocolError, ManifestMismatch):
        assert isinstance(codec.decode(frame), Envelope)


@given(st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_garbage_is_a_protocol_error(frame: bytes) -> None:
    decodes_or_refuses(frame)


@given(bodies, st.data())
@settings(max_examples=300, deadline=None)
def test_mutated_frames_never_crash_the_codec(body: Body, data: st.DataObject) -> None:
    frame = bytearray(codec.encode(body, 3))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(frame) - 1))
        match data.draw(st.sampled_from(["flip", "cut", "insert", "swap"])):
            case "flip":
                frame[at] ^= data.draw(st.integers(1, 255))
            case "cut":
                del frame[at : at + data.draw(st.integers(1, 8))]
            case "insert":
                frame[at:at] = data.draw(st.binary(min_size=1, max_size=8))
            case "swap":
                frame = frame[at:] + frame[:at]
        if not frame:
            break
    decodes_or_refuses(bytes(frame))


@pytest.mark.parametrize(
    "frame", [b"\x91" * 100_000, b"\x81\xa1a" * 50_000, b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"]
)
def test_deeply_nested_frames_and_huge_announced_lengths_are_protocol_errors(frame: bytes) -> None:
    with pytest.raises(ProtocolError):
        codec.decode(frame)


def test_a_frame_over_the_limit_is_refused_by_its_size_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "MAX_CONTROL_BYTES", 10)
    with pytest.raises(ProtocolError, match=r"a control frame of 11 bytes is over the limit of 10"):
        codec.decode(b"x" * 11)


@pytest.mark.parametrize("body", [{"type": "describe"}, {"type": "a message of the future", "x": 1}])
def test_another_protocol_version_is_named_whatever_else_the_message_says(body: dict[str, Any]) -> None:
    frame = msgspec.msgpack.encode({"protocol": 7, "seq": 1, "body": body})
    with pytest.raises(ProtocolError, match=r"the peer speaks protocol 7, this side 2") as raised:
        codec.decode(frame)
    assert "install the same weightwire version" in raised.value.hint


def test_an_unknown_type_of_this_version_is_a_protocol_error() -> None:
    frame = msgspec.msgpack.encode({"protocol": PROTOCOL_VERSION, "seq": 1, "body": {"type": "explode"}})
    with pytest.raises(ProtocolError, match="explode"):
        codec.decode(frame)


@pytest.mark.parametrize(
    "manifest",
    [
        Manifest((TensorSpec("w", "bfloat16", (2,)), TensorSpec("w", "bfloat16", (2,)))),
        Manifest((TensorSpec("w", "float7", (2,)),)),
        Manifest((TensorSpec("w", "bfloat16", (2,)),), {"head": "nothing"}),
        Manifest((TensorSpec("w", "float64", (1 << 40, 1 << 40)),)),
    ],
    ids=["duplicate name", "unknown dtype", "dangling tie", "over the size limit"],
)
def test_a_bad_manifest_is_refused_on_arrival_and_says_so(manifest: Manifest) -> None:
    with pytest.raises(ManifestMismatch) as raised:
        codec.decode(codec.encode(OpenGroup("policy", manifest, "shm")))
    assert (raised.value.group, raised.value.phase) == ("policy", "open")


@pytest.mark.parametrize(
    "body",
    [
        Begin("policy", "t", -1, Sender("s"), 1.0, "f"),
        Begin("policy", "t", 1 << 62, Sender("s"), 1.0, "f"),
        Begin("policy", "t", 1, Sender("s"), -1.0, "f"),
        Begin("policy", "t", 1, Sender("s"), float("nan"), "f"),
        Begin("policy", "t", 1, Sender("s"), float("inf"), "f"),
        Begin("policy", "t" * 65, 1, Sender("s"), 1.0, "f"),
        Begin("policy", "", 1, Sender("s"), 1.0, "f"),
        Begin("../policy", "t", 1, Sender("s"), 1.0, "f"),
        Begin("policy\n", "t", 1, Sender("s"), 1.0, "f"),
        Begin("p" * 65, "t", 1, Sender("s"), 1.0, "f"),
        Bucket("policy", "t", -1, 0, ()),
        Bucket("policy", "t", 0, 0, (Piece(Box(0, (-1,), (1,)), 0),)),
        Bucket("policy", "t", 0, 0, (Piece(Box(0, (0,) * 9, (1,) * 9), 0),)),
        Bucket("policy", "t", 0, 0, (Piece(Box(1 << 20, (0,), (1,)), 0),)),
        Seal("policy", "t", "d", (), wait_s=3600.0),
    ],
    ids=repr,
)
def test_values_out_of_their_limits_are_refused_on_arrival(body: Body) -> None:
    with pytest.raises(ProtocolError):
        codec.decode(codec.encode(body))


def test_a_struct_stored_alone_is_read_back_or_refused() -> None:
    sender = Sender("s", 4, "b")
    assert codec.decode_as(msgspec.msgpack.encode(sender), Sender) == sender
    for bad in (b"", b"\xff", msgspec.msgpack.encode({"pid": 4}), msgspec.msgpack.encode(Describe())):
        with pytest.raises(ProtocolError, match="not a Sender"):
            codec.decode_as(bad, Sender)


FIRST_MESSAGES = """
import sys, threading
from typing import Literal
import msgspec
from inference_plugin.wire.codec import decode_as

sys.setswitchinterval(1e-6)
for number in range(100):
    part = msgspec.defstruct(f"Part{number}", [(f"field{i}", Literal[1, i + 2, number + 30]) for i in range(20)])
    whole = msgspec.defstruct(f"Whole{number}", [(f"parts{i}", tuple[part, ...]) for i in range(5)])
    message = whole(*[(part(*[1] * 20),)] * 5)
    frame = msgspec.msgpack.encode(message)
    together, read = threading.Barrier(4), []

    def read_first():
        together.wait()
        read.append(decode_as(frame, whole))

    threads = [threading.Thread(target=read_first) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert read == [message] * 4
"""


def test_threads_may_read_their_first_message_of_a_kind_at_the_same_time() -> None:
    """msgspec alone ends the process there, with SIGSEGV: in an engine, all of its requests with it."""
    ended = subprocess.run([sys.executable, "-c", FIRST_MESSAGES], timeout=600, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_fork_reads_its_first_message_of_a_kind_though_a_thread_of_its_parent_was_about_to() -> None:
    kinds = [msgspec.defstruct(f"Kind{number}", [("field", int)]) for number in range(3000)]
    read = threading.Thread(target=lambda: [codec.decode_as(b"\x81\xa5field\x01", kind) for kind in kinds])
    read.start()
    ended: list[int] = []
    while read.is_alive():
        if (child := os.fork()) == 0:
            signal.alarm(20)
            codec.decode_as(b"\x81\xa5field\x01", msgspec.defstruct("Own", [("field", int)]))
            os._exit(0)
        ended.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    read.join()
    assert ended and not any(ended)
