"""Traces of updates: real trainer ranks, coordinators and workers, each writing its own file."""

from __future__ import annotations

import json
import logging
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from inference_plugin.wire import telemetry, tracing
from inference_plugin.wire.config import Config
from inference_plugin.wire.errors import WeightwireError
from inference_plugin.wire.tracing import Trace
from tests.manager.conftest import Start
from tests.manager.ranks import FaultySource
from tests.support.managers import SyncManager
from tests.support.plain_engine import ShardSource, checkpoint
from tests.support.rig import eventually, fork, gone

NAME = re.compile(r"policy\.v(\d+)\.([0-9a-f]{8})\.(trainer|worker|coordinator)(\d*)(?:\.(plain-.*))?\.json")


def spans(trace: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X" and event["name"] == name]


def names(trace: dict[str, Any]) -> set[str]:
    return {event["name"] for event in trace["traceEvents"] if event["ph"] == "X"}


def lies_in(inner: dict[str, Any], outer: dict[str, Any]) -> bool:
    return bool(outer["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"])


def overlaps(trace: dict[str, Any]) -> list[tuple[str, str]]:
    """Spans of one line of which neither lies in the other: a viewer can't draw them."""
    found = []
    open_spans: dict[int, list[dict[str, Any]]] = {}
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        outer = open_spans.setdefault(event["tid"], [])
        while outer and outer[-1]["ts"] + outer[-1]["dur"] <= event["ts"]:
            outer.pop()
        if outer and not lies_in(event, outer[-1]):
            found.append((outer[-1]["name"], event["name"]))
        outer.append(event)
    return found


@pytest.mark.parametrize("transport", ["shm", "zmq", "collective"])
def test_every_rank_worker_and_coordinator_writes_one_trace_per_update_on_one_time_line(
    start: Start, directory: Path, tmp_path: Path, transport: str
) -> None:
    traces = tmp_path / "made" / "on demand"
    rig = start(tp=2, WEIGHTWIRE_PROFILE_DIR=str(traces))
    steps, options = [{"version": 1}, {"version": 2}], {"transport": transport, "timeout_s": 60}
    for rank in (0, 1):
        arguments = {"rank": rank, "world": 2, "directory": str(directory), "steps": steps, "options": options}
        environment = {"WEIGHTWIRE_RUNTIME_DIR": str(directory), "WEIGHTWIRE_PROFILE_DIR": str(traces)}
        last = fork("tests.manager.ranks:one_rank", environment, **arguments)
    eventually(lambda: gone(last), "the end of the trainer")
    eventually(lambda: len(list(traces.glob("*.json"))) == 10, "5 files of each update")
    found: dict[int, dict[str, Any]] = {1: {}, 2: {}}
    for path in traces.iterdir():
        named = NAME.fullmatch(path.name)
        assert named is not None, path.name
        trace = json.loads(path.read_text())
        about = trace["otherData"]
        assert (about["group"], about["version"], about["txn"][:8]) == ("policy", int(named[1]), named[2])
        assert (about["role"], named[5] or "") == (named[3], about.get("replica", ""))
        assert about.get("replica", rig.replica) == rig.replica and about["left_out"] == 0
        found[about["version"]][named[3] + named[4]] = trace
    for version in (1, 2):
        of = found[version]
        assert set(of) == {"trainer0", "trainer1", "worker0", "worker1", "coordinator"}
        assert len({trace["otherData"]["txn"] for trace in of.values()}) == 1
        assert [overlaps(trace) for trace in of.values()] == [[]] * 5
        assert {"scan", "agree", "open", "begin", "stage", "write", "seal", "commit"} <= names(of["trainer0"])
        assert {"scan", "agree", "stage", "write", "outcome"} <= names(of["trainer1"])
        assert {"open staging", "check", "prepare", "install", "finish"} <= names(of["worker0"]) & names(of["worker1"])
        assert {"wait", "check", "install", "finish", "caches", "stopped"} == names(of["coordinator"])
        for rank in (0, 1):
            assert ("bucket" in names(of[f"trainer{rank}"])) == (transport != "shm")
            assert ("receive" in names(of[f"worker{rank}"])) == (transport != "shm")
        # One clock: what a worker does lies in what the coordinator asks of it, and that in the trainer's commit.
        (commit,), (asked,) = spans(of["trainer0"], "commit"), spans(of["coordinator"], "install")
        for rank in (0, 1):
            (installed,), (checked,) = spans(of[f"worker{rank}"], "install"), spans(of[f"worker{rank}"], "check")
            assert lies_in(installed, asked) and lies_in(asked, commit)
            assert checked["ts"] + checked["dur"] < commit["ts"]
        lines = {event["args"]["name"] for event in of["worker0"]["traceEvents"] if event["name"] == "thread_name"}
        assert {"weightwire-group-policy", "weightwire-stage-policy", "MainThread"} <= lines
        processes = [
            event for trace in of.values() for event in trace["traceEvents"] if event["name"] == "process_name"
        ]
        assert f"worker 1 {rig.replica}" in {event["args"]["name"] for event in processes}


def test_without_a_directory_nothing_is_made_and_nothing_is_written(
    start: Start, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(*_: object, **__: object) -> None:
        raise AssertionError("a trace was made")

    monkeypatch.setattr(Trace, "__init__", made)
    monkeypatch.setattr(tracing.TraceWriter, "__init__", made)
    start()
    with SyncManager(timeout_s=60) as manager:
        assert manager.update(ShardSource(checkpoint(1)), 1).failed == ()
    assert tracing.span("x") is tracing.span("y", a=1)
    assert tracing.carried(made) is made
    assert not list(directory.rglob("*.json"))


def test_a_trace_that_cannot_be_written_fails_no_update_and_is_told_once(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing.TraceWriter, "one", None)
    in_the_way = tmp_path / "file"
    in_the_way.write_text("not a directory")
    rig = start(tp=2, WEIGHTWIRE_PROFILE_DIR=str(in_the_way))
    with caplog.at_level(logging.WARNING), SyncManager(config=Config(profile_dir=str(in_the_way))) as manager:
        for version in (1, 2, 3):
            assert manager.update(ShardSource(checkpoint(version)), version).failed == ()
        assert manager.versions() == {rig.replica: 3}
    told = [record.getMessage() for record in caplog.records if record.name == tracing.__name__]
    assert [str(in_the_way) in message for message in told] == [True]


def test_an_update_does_not_wait_for_a_disk_that_hangs(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "FLUSH_S", 0.01)
    monkeypatch.setattr(tracing.TraceWriter, "one", None)
    hangs, works_again = threading.Event(), threading.Event()
    write = Trace.write

    def slow(self: Trace) -> None:
        hangs.set()
        assert works_again.wait(600)
        write(self)

    monkeypatch.setattr(Trace, "write", slow)
    start()
    with SyncManager(config=Config(profile_dir=tmp_path)) as manager:  # type: ignore[arg-type]
        for version in (1, 2):
            assert manager.update(ShardSource(checkpoint(version)), version).failed == ()
        assert hangs.wait(600)
    assert not list(tmp_path.iterdir())
    works_again.set()
    eventually(lambda: len(list(tmp_path.glob("policy.v*.trainer0.json"))) == 2, "both traces")


def test_a_failed_update_leaves_its_traces_with_the_error(start: Start, tmp_path: Path) -> None:
    start(WEIGHTWIRE_PROFILE_DIR=str(tmp_path))
    with SyncManager(config=Config(profile_dir=str(tmp_path))) as manager, pytest.raises(WeightwireError):
        manager.update(FaultySource(1, 0, 1, "raise"), 1)
    eventually(lambda: len(list(tmp_path.glob("*.json"))) == 2, "the trainer's trace and the worker's")
    (trainer,) = (json.loads(path.read_text()) for path in tmp_path.glob("*.trainer0.json"))
    (stage,) = spans(trainer, "stage")
    assert "out of memory, says rank 1" in stage["args"]["error"]
    assert "commit" not in names(trainer)


def test_without_a_version_the_traces_of_an_update_have_the_one_that_it_brought(start: Start, tmp_path: Path) -> None:
    start(WEIGHTWIRE_PROFILE_DIR=str(tmp_path))
    with SyncManager(config=Config(profile_dir=str(tmp_path))) as manager:
        report = manager.update(ShardSource(checkpoint(1)))
    files = f"policy.v{report.version}.{report.txn[:8]}.*.json"
    eventually(lambda: len(list(tmp_path.glob(files))) == 3, "trainer, coordinator and worker, for one merge")
    (trainer,) = (json.loads(path.read_text()) for path in tmp_path.glob("*.trainer0.json"))
    assert trainer["otherData"]["version"] == report.version


def test_spans_are_seen_by_the_users_own_torch_profiler(tmp_path: Path) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        trace = Trace(str(tmp_path), role="worker", group="policy", version=1)
        with tracing.under(trace), tracing.span("install"):
            torch.ones(3).sum()
    assert "weightwire.install" in {event.key for event in profiler.key_averages()}


def test_where_the_process_has_a_tracer_provider_the_spans_of_an_update_are_one_opentelemetry_trace(
    start: Start, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    otel = pytest.importorskip("opentelemetry.trace")
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    start(tp=1)
    exporter = InMemorySpanExporter()
    provider = sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(otel, "_TRACER_PROVIDER", provider)
    with SyncManager(timeout_s=60) as manager:
        report = manager.update(ShardSource(checkpoint(1)), 1)
    tracing.flush()
    found = {span.name: span for span in exporter.get_finished_spans()}
    root = found["weightwire trainer"]
    assert root.attributes["weightwire.txn"] == report.txn and root.attributes["weightwire.version"] == 1
    assert {span.context.trace_id for span in found.values()} == {int(report.txn, 16)}
    assert {"scan", "agree", "stage", "write", "seal", "commit"} <= set(found)
    for name, span in found.items():
        assert root.start_time <= span.start_time <= span.end_time <= root.end_time, name
        assert span is root or span.parent.span_id == root.context.span_id


def test_a_tracer_provider_that_raises_keeps_no_trace_from_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raises(*_: object) -> None:
        raise RuntimeError("the collector is gone")

    monkeypatch.setattr(telemetry, "is_wanted", lambda: True)
    monkeypatch.setattr(telemetry, "export", raises)
    with pytest.raises(RuntimeError, match="the collector is gone"):
        Trace(str(tmp_path), role="trainer", group="policy", version=1).write()
    assert [path.name for path in tmp_path.iterdir()] == ["policy.v1.trainer.json"]
