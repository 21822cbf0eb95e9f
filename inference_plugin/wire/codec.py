"""Encodes and decodes messages. Any bytes of a peer decode to a message or raise `ProtocolError`."""

from __future__ import annotations

import os
import threading
from typing import Any, TypeVar

import msgspec

from inference_plugin.wire.errors import ManifestMismatch, ProtocolError
from inference_plugin.wire.messages import PROTOCOL_VERSION, Body, Bucket, Envelope, OpenGroup, Pulled

__all__ = ["MAX_CONTROL_BYTES", "MAX_PAYLOAD_BYTES", "check_payload", "decode", "decode_as", "encode"]

MAX_CONTROL_BYTES = 256 << 20
"""Largest frame 0 that is accepted: a manifest of a million tensors fits."""

MAX_PAYLOAD_BYTES = 1 << 30
"""Largest payload frame that is accepted."""

_encoder = msgspec.msgpack.Encoder()
_latest = threading.local()
"""`pair`: the body that this thread encoded last, which nobody changes, and its bytes. A list of 20,000 tensors takes
milliseconds to encode."""

_decoder = msgspec.msgpack.Decoder(Envelope)
_version_decoder = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])

_decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}
_making_decoder = threading.Lock()
"""msgspec (0.22) ends the process with SIGSEGV where two threads at once decode their first message of one struct type: one of
them finds the type's description half made. So decoders are made one at a time."""


def _after_fork_in_child() -> None:
    global _making_decoder
    _making_decoder = threading.Lock()


os.register_at_fork(after_in_child=_after_fork_in_child)

T = TypeVar("T")


def encode(body: Body, seq: int = 0) -> bytes:
    """Frame 0 of a message. A body that goes to many peers, one after the other, is encoded once."""
    known: Any
    encoded: Any  # in the body's place
    known, encoded = getattr(_latest, "pair", (None, None))
    if known is not body:
        encoded = msgspec.Raw(_encoder.encode(body))
        _latest.pair = body, encoded
    return _encoder.encode(Envelope(PROTOCOL_VERSION, seq, encoded))


def decode(frame: bytes | memoryview) -> Envelope:
    """The message in frame 0. Raises `ProtocolError` for anything else, another protocol version included."""
    size = len(frame)
    if size > MAX_CONTROL_BYTES:
        raise ProtocolError(f"a control frame of {size} bytes is over the limit of {MAX_CONTROL_BYTES}")
    try:
        envelope = _decoder.decode(frame)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError, UnicodeDecodeError) as error:
        _check_version(frame)
        raise ProtocolError(f"not a message of this protocol: {error}") from error
    if envelope.protocol != PROTOCOL_VERSION:
        raise _other_version(envelope.protocol)
    if isinstance(envelope.body, OpenGroup):
        try:
            envelope.body.manifest.check()
        except ManifestMismatch as error:
            raise error.at(group=envelope.body.group, phase="open") from None
    return envelope


def check_payload(body: Body, payload: Any) -> None:
    """Raises `ProtocolError` for a payload frame behind a message that takes none. None: there is no such frame."""
    if payload is not None and not isinstance(body, Bucket | Pulled):
        raise ProtocolError(f"a {type(body).__name__} takes no payload frame")


def decode_as(frame: bytes | memoryview, kind: type[T]) -> T:
    """A struct of type `kind` that was stored or sent alone. Raises `ProtocolError`."""
    try:
        return _decoder_of(kind).decode(frame)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError, UnicodeDecodeError) as error:
        raise ProtocolError(f"not a {kind.__name__}: {error}") from error


def _decoder_of(kind: type[T]) -> msgspec.msgpack.Decoder[T]:
    if (decoder := _decoders.get(kind)) is None:
        with _making_decoder:
            decoder = _decoders[kind] = msgspec.msgpack.Decoder(kind)
    return decoder


def _check_version(frame: bytes | memoryview) -> None:
    try:
        version = msgspec.msgpack.decode(_version_decoder.decode(frame)["protocol"], type=int)
    except (msgspec.DecodeError, msgspec.ValidationError, KeyError, RecursionError, UnicodeDecodeError):
        return
    if version != PROTOCOL_VERSION:
        raise _other_version(version)


def _other_version(version: int) -> ProtocolError:
    return ProtocolError(
        f"the peer speaks protocol {version}, this side {PROTOCOL_VERSION}",
        hint="install the same weightwire version beside the trainer and beside the engine",
    )
