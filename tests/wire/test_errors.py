"""The error tree: what an error says survives every way of carrying it."""

from __future__ import annotations

import copy
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_plugin.wire import codec, errors
from inference_plugin.wire.errors import ErrorInfo, PeerLost, SyncTimeout, VersionConflict, WeightwireError, first_few

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, WeightwireError)]
text = st.text(st.characters(codec="utf-8"), max_size=20)
infos = st.builds(
    ErrorInfo,
    kind=st.sampled_from([kind.__name__ for kind in KINDS]),
    message=text,
    hint=text.filter(bool),
    side=text,
    replica=text,
    rank=st.none() | st.integers(0, 9),
    group=text,
    phase=text,
    version=st.none() | st.integers(0, 9),
)


@given(infos)
@settings(deadline=None)
def test_an_error_is_the_same_class_with_the_same_fields_on_the_other_side(info: ErrorInfo) -> None:
    carried = msgspec.msgpack.decode(msgspec.msgpack.encode(info), type=ErrorInfo)
    error = WeightwireError.of(carried)
    assert type(error).__name__ == info.kind
    assert error.info() == info
    copied = copy.copy(error)
    assert (type(copied), copied.info(), str(copied)) == (type(error), info, str(error))


def test_a_kind_from_the_future_is_a_plain_weightwire_error() -> None:
    error = WeightwireError.of(ErrorInfo("NotYetInvented", "m", rank=3))
    assert type(error) is WeightwireError and (error.message, error.rank) == ("m", 3)


def test_a_kind_of_somebodys_own_that_is_made_of_other_arguments_is_a_plain_weightwire_error() -> None:
    class LossDiverged(WeightwireError):
        def __init__(self, loss: float) -> None:
            super().__init__(f"the loss is {loss}", hint="lower the rate")

    error = WeightwireError.of(LossDiverged(3.0).at(rank=3).info())
    assert type(error) is WeightwireError and (error.hint, error.rank) == ("lower the rate", 3)
    assert error.message == "LossDiverged: the loss is 3.0"
    assert error.info() == copy.copy(error).info()


def test_where_fills_only_what_is_empty_and_rank_0_is_not_empty() -> None:
    error = PeerLost("m", side="worker", rank=0)
    assert error.at(side="coordinator", rank=4, group="policy", version=0) is error
    assert (error.side, error.rank, error.group, error.version) == ("worker", 0, "policy", 0)
    assert "[side=worker rank=0 group=policy version=0]" in str(error)


def test_every_kind_says_what_to_do_next_or_takes_a_hint() -> None:
    for kind in KINDS:
        assert str(kind("m", hint="do this")) == "m -- do this"


def test_only_who_knows_it_promises_the_old_version() -> None:
    for kind in (SyncTimeout, PeerLost):
        error = kind("m")
        assert error.hint and "version" not in error.hint
        assert error.advise("the old version is served") is error
        assert error.hint == "the old version is served"
        assert error.advise("something else").hint == "the old version is served"


def test_timeouts_and_losses_are_also_pythons_own() -> None:
    assert isinstance(SyncTimeout("m"), TimeoutError)
    assert isinstance(PeerLost("m"), ConnectionError)


@pytest.mark.parametrize("foreign", [ValueError("bad"), OSError(28, "No space left on device")])
def test_a_foreign_error_keeps_its_type_text_and_cause(foreign: Exception) -> None:
    wrapped: Any = WeightwireError.wrap(foreign)
    assert wrapped.message == f"{type(foreign).__name__}: {foreign}" and wrapped.__cause__ is foreign
    assert WeightwireError.wrap(wrapped) is wrapped


def test_a_process_without_descriptors_is_told_which_limit_to_raise() -> None:
    assert "ulimit -n" in WeightwireError.wrap(OSError(24, "Too many open files", "card")).hint


def test_long_lists_are_cut_and_counted() -> None:
    assert first_few(["a", "b"]) == "a, b (2 in all)"
    assert first_few([str(i) for i in range(20)]) == "0, 1, 2, 3, 4, 5, 6, 7, ... (20 in all)"


@pytest.mark.parametrize(
    "error",
    [
        VersionConflict("m" * (1 << 20), hint="h" * (1 << 20), group="g" * 1000, replica="r" * 1000),
        VersionConflict("a version that is no 64-bit number", version=1 << 70, rank=-(1 << 70)),
        VersionConflict("half a character: \ud800", hint="\udfff"),
    ],
    ids=["long", "large", "no text"],
)
def test_an_error_arrives_whatever_it_says(error: WeightwireError) -> None:
    arrived = WeightwireError.of(codec.decode_as(msgspec.msgpack.encode(error.info()), ErrorInfo))
    assert type(arrived) is VersionConflict
    assert arrived.message[:10] == error.message[:10]
    assert (arrived.rank, arrived.version) == (None, None)
