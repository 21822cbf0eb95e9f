"""The compiled functions are those of this code, or none: a build of other code is told and not used."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import pytest

from inference_plugin.wire import compiled
from inference_plugin.wire.copying import how_copies_are_made

BUILT = importlib.util.find_spec("inference_plugin.wire._copying")
NAME = "inference_plugin.wire._copying"


@pytest.mark.skipif(BUILT is None, reason="built without a compiler")
def test_the_build_beside_this_code_is_a_build_of_this_code_and_is_used() -> None:
    """If this fails in a checkout, its build is old: `python setup.py build_ext --inplace`."""
    assert compiled.load() == (sys.modules[NAME], "")
    assert how_copies_are_made().startswith("C")


@pytest.mark.parametrize(
    ("interface", "lacking", "said"),
    [
        (compiled.INTERFACE + 1, [], f"its interface is {compiled.INTERFACE + 1}"),
        (compiled.INTERFACE, ["tensor_rows"], "it lacks tensor_rows"),
        (None, ["copy_groups", "tensor_rows"], "it lacks copy_groups, tensor_rows"),
    ],
)
def test_a_build_of_other_code_is_not_used_and_the_warning_says_what_to_do(
    interface: int | None,
    lacking: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    other = ModuleType(NAME)
    other.__file__ = "/somewhere/_copying.abi3.so"
    for name in set(compiled.NAMES) - set(lacking):
        setattr(other, name, None)
    if interface is not None:
        other.INTERFACE = interface  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, NAME, other)
    functions, why = compiled.load()
    assert functions is None and "/somewhere/_copying.abi3.so was built from other code" in why and said in why
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "python setup.py build_ext --inplace" in record.getMessage()


def test_without_a_build_the_reason_is_known_and_nothing_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, NAME, None)  # an import of it then fails
    functions, why = compiled.load()
    assert functions is None and "_copying" in why and not caplog.records
