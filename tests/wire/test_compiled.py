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
    for name in (
        "copy_rows",
        "copy_rows_and_digest",
        "copy_strided_and_digest",
        "copy_joined",
        "digest_rows",
        "tensor_rows",
    ):
        assert callable(getattr(compiled.FUNCTIONS, name))
    assert how_copies_are_made().startswith("C")


@pytest.mark.parametrize("interface", [None, compiled.INTERFACE - 1, compiled.INTERFACE + 1])
def test_a_build_of_other_code_is_not_used_and_the_warning_says_what_to_do(
    interface: int | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    other = ModuleType(NAME)
    other.__file__ = "/somewhere/_copying.abi3.so"
    if interface is not None:
        other.INTERFACE = interface  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, NAME, other)
    functions, why = compiled.load()
    assert functions is None and "/somewhere/_copying.abi3.so was built from other code" in why
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "python setup.py build_ext --inplace" in record.getMessage()


def test_without_a_build_the_reason_is_known_and_nothing_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, NAME, None)  # an import of it then fails
    functions, why = compiled.load()
    assert functions is None and "_copying" in why and not caplog.records
