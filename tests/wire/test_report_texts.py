"""Reports are printed for people: a heading, a line per replica, no repr."""

from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console

from inference_plugin.wire.errors import PeerLost
from inference_plugin.wire.reports import (
    PauseReport,
    ReplicaPause,
    ReplicaReport,
    ReplicaVerify,
    UpdateReport,
    VerifyReport,
    gib,
)

LOST = PeerLost("the process is gone", hint="restart it").info()
UPDATE = UpdateReport(
    group="policy",
    version=7,
    txn="0" * 24,
    bytes=3 << 30,
    seconds=1.5,
    phases={"scan": 0.001, "agree": 0.01, "stage": 1.2, "seal": 0.25, "commit": 0.04, "stage.move": 1.1},
    messages=9,
    copies_per_byte=2.0,
    replicas=(
        ReplicaReport("vllm-1", "vllm", "committed", 7, "shm", "standby", "plan", stopped_s=0.0018),
        ReplicaReport("vllm-22", "vllm", "failed", None, error=LOST),
    ),
)
VERIFY = VerifyReport(
    "policy",
    (
        ReplicaVerify("vllm-1", 7, 120, (), ()),
        ReplicaVerify("vllm-22", 6, 120, ("rank 0: norm.weight[0:16] differs",), ()),
        ReplicaVerify("vllm-3", None, 0, (), (), LOST),
    ),
)
PAUSE = PauseReport(
    (ReplicaPause("vllm-1", "vllm", "asleep", ("weights",)), ReplicaPause("vllm-22", "vllm", "failed", error=LOST))
)


def test_an_update_is_printed_in_a_line_per_replica_with_seconds_per_phase_and_bytes_in_gib() -> None:
    assert str(UPDATE).splitlines() == [
        "policy version 7: 1 of 2 replicas serve it, 3 GiB in 1.50 s (2 GiB/s); scan 1 ms, agree 10 ms, stage 1.20 s, "
        "seal 0.25 s, commit 40 ms",
        "  vllm-1   committed  version 7        stopped 1.8 ms  shm/standby/plan",
        "  vllm-22  failed     version unknown                                    PeerLost: the process is gone -- restart it",
    ]


def test_an_update_that_no_replica_took_tells_no_throughput() -> None:
    heading = str(msgspec.structs.replace(UPDATE, replicas=UPDATE.replicas[1:])).splitlines()[0]
    assert heading.startswith("policy version 7: 0 of 1 replicas serve it, 3 GiB in 1.50 s; scan")


def test_a_verification_is_printed_with_what_differs_in_whole() -> None:
    assert str(VERIFY).splitlines() == [
        "policy: 1 of 3 replicas hold what the trainer holds",
        "  vllm-1   equal      version 7        120 boxes",
        "  vllm-22  DIFFERENT  version 6        120 boxes  rank 0: norm.weight[0:16] differs",
        "  vllm-3   failed     version unknown  0 boxes                                       "
        "PeerLost: the process is gone -- restart it",
    ]


def test_a_pause_is_printed_with_the_memory_that_is_released() -> None:
    assert str(PAUSE).splitlines() == [
        "1 asleep, 1 failed",
        "  vllm-1   vllm  asleep  released: weights",
        "  vllm-22  vllm  failed                     PeerLost: the process is gone -- restart it",
    ]
    assert str(PauseReport(())) == "no replicas"


@pytest.mark.parametrize("report", [UPDATE, VERIFY, PAUSE])
def test_rich_shows_the_same_as_a_table(report: object) -> None:
    console = Console(file=io.StringIO(), width=200)
    console.print(report)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert str(report).splitlines()[0].split(";")[0] in shown
    assert all(words in shown for words in ("replica", "vllm-22", "the process is gone"))


@pytest.mark.parametrize(
    ("nbytes", "words"),
    [(0, "0 B"), (90, "90 B"), (2048, "2 KiB"), (300 << 20, "0.293 GiB"), (30 << 20, "30 MiB"), (61 << 30, "61 GiB")],
)
def test_bytes_are_read_at_a_glance(nbytes: int, words: str) -> None:
    assert gib(nbytes) == words
