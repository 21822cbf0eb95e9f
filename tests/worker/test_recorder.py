"""Commits are logged and counted, whatever the disk does; our lines appear where the engine's own do."""

from __future__ import annotations

import logging
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from inference_plugin.engines.recorder import CommitRecorder
from inference_plugin.net import addresses
from inference_plugin.net.records import GroupRecord, ReplicaRecord, last_report, save_report
from inference_plugin.wire.codec import decode_as
from inference_plugin.wire.errors import CommitFailed
from inference_plugin.wire.messages import Committed, RankCommit
from inference_plugin.wire.reports import UpdateReport


@pytest.fixture(autouse=True)
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was told is written when `close` returns, however slow the disk is."""
    monkeypatch.setattr("inference_plugin.engines.recorder.CLOSE_TIMEOUT_S", 300.0)


def committed(version: int) -> Committed:
    """Two ranks; the slower one installed for 0.5 s."""
    ranks = tuple(RankCommit(rank, version, 0.25 * (rank + 1), False, checked_bytes=1000) for rank in range(2))
    return Committed(version, ranks, stopped_s=0.75, waited_s=0.125)


def recorded(replica: str) -> ReplicaRecord:
    return decode_as((addresses.runtime_dir() / f"{replica}.counts").read_bytes(), ReplicaRecord)


def test_every_commit_and_every_failure_is_logged_and_counted(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    replica = addresses.new_replica_id("plain")
    recorder = CommitRecorder(replica)
    recorder.start()
    with caplog.at_level(logging.INFO):
        for version in (3, 4):
            recorder.tell_commit("policy", committed(version))
        recorder.tell_failure(CommitFailed("no room", group="policy", phase="commit", version=5).info())
        recorder.tell_failure(CommitFailed("no room", group="critic", phase="commit", version=1).info())
        recorder.close()
        recorder.close()
    groups = recorded(replica).groups
    counts = GroupRecord(
        version=4,
        commits=2,
        failures={"CommitFailed": 1},
        waited_s=0.25,
        install_s=1.0,
        stopped_s=1.5,
        installed_bytes=4000,
        committed_at_unix_s=groups["policy"].committed_at_unix_s,
    )
    assert groups == {"policy": counts, "critic": GroupRecord(failures={"CommitFailed": 1})}
    served = [line for line in caplog.messages if "serves version" in line]
    assert len(served) == 2 and f"replica {replica} serves version 4 of policy" in served[1] and "750.0 ms" in served[1]
    assert sum("no room" in line for line in caplog.messages) == 2


def test_a_version_that_somebody_else_wrote_over_is_in_no_record_and_its_commits_still_count(directory: Path) -> None:
    replica = addresses.new_replica_id("plain")
    recorder = CommitRecorder(replica)
    recorder.start()
    for group in ("policy", "lora.adapter"):
        recorder.tell_commit(group, committed(3))
    recorder.tell_unknown(("policy",))
    recorder.close()
    groups = recorded(replica).groups
    assert (groups["policy"].version, groups["policy"].commits) == (None, 1)
    assert groups["lora.adapter"].version == 3, "nobody wrote over the adapter"


def test_a_record_that_cannot_be_written_is_written_with_the_next_commit(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    replica = addresses.new_replica_id("plain")
    (addresses.runtime_dir() / f"{replica}.counts.tmp").mkdir()
    recorder = CommitRecorder(replica)
    recorder.start()
    for version in (1, 2):
        recorder.tell_commit("policy", committed(version))
    recorder.close()
    assert sum("can't be written" in line for line in caplog.messages) == 1
    (addresses.runtime_dir() / f"{replica}.counts.tmp").rmdir()
    again = CommitRecorder(replica)
    again.start()
    again.tell_commit("policy", committed(3))
    again.close()
    assert recorded(replica).groups["policy"].version == 3


LOGS = """
import logging, sys
engine = logging.getLogger("engine")
shown = logging.StreamHandler(sys.stdout)
shown.setFormatter(logging.Formatter("ENGINE %(message)s"))
engine.addHandler(shown)
engine.setLevel(logging.INFO)
engine.propagate = False
from inference_plugin.engines.logs import log_like
log_like("engine")
log_like("engine")
ours = logging.getLogger("inference_plugin.somewhere")
ours.debug("zero")
ours.info("one")
assert not logging.getLogger().handlers
logging.basicConfig(stream=sys.stdout, format="ROOT %(message)s")
ours.info("two")
"""


def test_our_lines_appear_as_the_engine_s_own_and_none_appears_twice() -> None:
    ran = subprocess.run([sys.executable, "-c", LOGS], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines() == ["ENGINE one", "ROOT two"]


def test_a_report_that_several_managers_write_at_once_is_that_of_one_of_them(directory: Path) -> None:
    """They write one file, and readers find it whole all the time."""
    reports = [UpdateReport("policy", i, "t" * (1 + 5000 * i), 0, 1.0, {}, 0, 1.0, ()) for i in range(4)]
    save_report(reports[0])

    def write_and_read(report: UpdateReport) -> None:
        for _ in range(200):
            save_report(report)
            assert last_report("policy") in reports

    with ThreadPoolExecutor(len(reports)) as pool:
        list(pool.map(write_and_read, reports))
    assert [path.name for path in addresses.runtime_dir().iterdir()] == ["policy.report"]
