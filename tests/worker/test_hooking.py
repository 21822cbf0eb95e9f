"""What the files of engines hook in with: all of it or nothing, and what fails stays on our side."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from inference_plugin.engines import monkeypatch as hooking
from inference_plugin.engines.monkeypatch import add, all_or_none, contained, run_without, wrap
from inference_plugin.engines.patch_points import EngineTable, PatchPoint, check_patch_points
from inference_plugin.net import diagnosis
from inference_plugin.wire.errors import EngineUnsupported
from tests.support.rig import ROOT


class Base:
    def inherited(self) -> str:
        return "inherited"


class Engine(Base):
    def step(self) -> str:
        return "step"


def hook(kind: type) -> None:
    @wrap(kind, "step")
    def step(original: Any, self: Any) -> str:
        return f"our {original(self)}"

    @wrap(kind, "inherited")
    def inherited(original: Any, self: Any) -> str:
        return f"our {original(self)}"

    add(kind, "ours", lambda _: "ours")


def test_a_hook_that_fails_takes_back_all_those_before_it() -> None:
    before = dict(vars(Engine))

    def hook_twice() -> None:
        with all_or_none():
            hook(Engine)
            assert (Engine().step(), Engine().inherited()) == ("our step", "our inherited")
            add(Engine, "ours", None)

    with pytest.raises(EngineUnsupported, match="Engine has an attribute ours already"):
        hook_twice()
    assert dict(vars(Engine)) == before
    assert (Engine().step(), Engine().inherited(), Base().inherited()) == ("step", "inherited", "inherited")


def test_hooks_that_all_succeed_stay_whatever_fails_later() -> None:
    kind = type("Kind", (Engine,), {"step": lambda _: "step"})
    with all_or_none():
        hook(kind)
    with pytest.raises(RuntimeError), all_or_none():
        raise RuntimeError
    assert (kind().step(), kind().ours()) == ("our step", "ours")


def test_our_own_failure_is_logged_once_and_does_not_reach_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("test")
    for _ in range(3):
        with contained("the test's own part", logger):
            raise ValueError("of ours")
    (record,) = [each for each in caplog.records if each.levelno >= logging.ERROR]
    assert record.getMessage() == "weightwire: the test's own part failed: of ours" and record.exc_info is not None


def test_running_without_is_warned_of_once_and_noted_for_doctor_and_status(
    directory: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(hooking.WARNED, "")
    logger, error = logging.getLogger("vllm.weightwire"), EngineUnsupported("it lacks a place", hint="another version")
    for _ in range(2):
        run_without("vllm", error, logger, "model m")
    (warning,) = caplog.messages
    assert warning.startswith("weightwire: OFF in this engine")
    assert warning.endswith("model m: it lacks a place -- another version")
    assert diagnosis.problems() == [f"vllm process {os.getpid()}: model m: it lacks a place -- another version"]
    child = "import sys, logging; from inference_plugin.engines.monkeypatch import run_without\n"
    child += "from inference_plugin.wire.errors import EngineUnsupported as E\n"
    child += "run_without('vllm', E('it lacks a place', hint='another version'), logging.getLogger(), 'model m')\n"
    child += "run_without('vllm', E('something else'), logging.getLogger(), 'model m')"
    told = subprocess.run([sys.executable, "-c", child], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert told.returncode == 0 and told.stderr.count("OFF in this engine") == 1 and "something else" in told.stderr


def test_a_runtime_directory_that_cannot_be_used_does_not_keep_the_engine_from_starting_either(
    directory: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (directory / "file").touch()
    monkeypatch.setattr(
        logging.getLogger("vllm"), "propagate", True
    )  # vLLM, once imported, keeps its records to itself
    monkeypatch.setenv(hooking.WARNED, "")
    monkeypatch.setenv("WEIGHTWIRE_RUNTIME_DIR", str(directory / "file"))
    run_without("vllm", OSError(28, "No space left on device \0"), logging.getLogger("vllm.weightwire"))
    first, second = caplog.messages
    assert "No space left on device" in first and "`weightwire doctor` won't know of it" in second


def test_a_touched_module_that_cannot_be_imported_is_named_like_one_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "breaks_at_import.py").write_text("raise RuntimeError('operator nms does not exist')")
    monkeypatch.syspath_prepend(tmp_path)
    points = (PatchPoint("breaks_at_import:A.b"), PatchPoint("json:no_such"), PatchPoint("json:loads"))
    with pytest.raises(EngineUnsupported) as raised:
        check_patch_points(EngineTable("vllm", ("vllm",), "0.24", "0.32", (), points), "0.30")
    assert "breaks_at_import:A.b (can't be read: RuntimeError: operator nms does not exist)" in raised.value.message
    assert "json:no_such (missing" in raised.value.message and "json:loads" not in raised.value.message
    assert json.loads("1") == 1


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_an_engine_that_the_entry_point_cannot_hook_into_goes_on(directory: Path, engine: str) -> None:
    """In a process of its own: an engine that this one has imported and hooked stays so."""
    program = f"""
import logging, os, sys
logging.basicConfig(stream=sys.stdout, format="%(message)s")
sys.modules["{engine}"] = None  # importing it fails
from inference_plugin.net import diagnosis
from inference_plugin.plugin import register_{engine}
register_{engine}()
assert any(text.startswith(f"{engine} process {{os.getpid()}}: ") for text in diagnosis.problems())
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr
    (warning,) = ran.stdout.splitlines()
    assert "OFF in this engine" in warning and engine in warning
