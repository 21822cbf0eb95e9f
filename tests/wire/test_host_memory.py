"""An update that does not fit is refused with both numbers before it takes anything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from inference_plugin.wire import host_memory
from inference_plugin.wire.errors import TransportUnavailable
from inference_plugin.wire.host_memory import check_fits, free_host_bytes, left_in_groups, left_to_promise


def group(path: Path, limit: str, held: int = 0, files: int = 0) -> None:
    path.mkdir(parents=True, exist_ok=True)
    (path / "memory.max").write_text(f"{limit}\n")
    (path / "memory.current").write_text(f"{held}\n")
    read_once = files // 4  # the rest was read again, as a checkpoint is by an engine's second rank
    kinds = f"inactive_file {read_once}\nactive_file {files - read_once}\n"
    (path / "memory.stat").write_text(f"anon {held - files}\nfile {files}\nworkingset_activate_file 9\n{kinds}")


def test_a_container_s_limit_counts_and_so_do_those_around_it(tmp_path: Path) -> None:
    membership = tmp_path / "cgroup"
    membership.write_text("0::/pod/engine\n")
    group(tmp_path / "pod" / "engine", "max", 10)
    group(tmp_path / "pod", "1000", 700, 200)
    assert list(left_in_groups(membership, tmp_path)) == [500]
    group(tmp_path / "pod" / "engine", "400", 500)
    assert list(left_in_groups(membership, tmp_path)) == [0, 500]


def test_limits_of_control_groups_of_version_1_count_too(tmp_path: Path) -> None:
    membership = tmp_path / "cgroup"
    membership.write_text("5:cpu,cpuacct:/\n4:memory:/pod/engine\n0::/\n")
    for path, limit, held in (("pod", 1000, 700), ("pod/engine", 1 << 63, 600)):
        group = tmp_path / "memory" / path
        group.mkdir(parents=True)
        (group / "memory.limit_in_bytes").write_text(f"{limit}\n")
        (group / "memory.usage_in_bytes").write_text(f"{held}\n")
        (group / "memory.stat").write_text("inactive_file 7\ntotal_inactive_file 150\ntotal_active_file 50\n")
    assert min(left_in_groups(membership, tmp_path)) == 500
    membership.write_text("4:memory:/pod\n")
    assert list(left_in_groups(membership, tmp_path)) == [500]


@pytest.mark.parametrize("said", ["", "1:memory:/pod\n", "0::/nowhere\n"])
def test_without_groups_the_host_alone_counts(tmp_path: Path, said: str) -> None:
    (tmp_path / "cgroup").write_text(said)
    assert list(left_in_groups(tmp_path / "cgroup", tmp_path)) == []
    assert list(left_in_groups(tmp_path / "missing", tmp_path)) == []
    assert free_host_bytes() > 0


LIMITED = """
import resource
from inference_plugin.wire.host_memory import free_host_bytes
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, resource.RLIM_INFINITY))
print(free_host_bytes())
"""


def test_the_limit_of_a_process_s_own_address_space_counts() -> None:
    done = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, timeout=600, check=True)
    assert 0 < int(done.stdout) < 4 << 30


@pytest.mark.parametrize(("mode", "left"), [("0", []), ("1", []), ("2", [(1000 - 400) << 10])])
def test_a_host_that_promises_no_more_than_it_has_counts_what_it_promised(
    tmp_path: Path, mode: str, left: list[int]
) -> None:
    (tmp_path / "sys" / "vm").mkdir(parents=True)
    (tmp_path / "sys" / "vm" / "overcommit_memory").write_text(f"{mode}\n")
    (tmp_path / "meminfo").write_text("CommitLimit:  1000 kB\nCommitted_AS:  400 kB\nHugePages_Total: 0\n")
    assert list(left_to_promise(tmp_path)) == left
    assert list(left_to_promise(tmp_path / "missing")) == []


def test_doctor_says_whether_linux_gives_large_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "PAGES", tmp_path)
    (tmp_path / "enabled").write_text("always [madvise] never\n")
    assert host_memory.large_pages() == "ordinary memory: madvise, shared memory: unknown"
    (tmp_path / "shmem_enabled").write_text("always within_size advise [never] deny force\n")
    assert host_memory.large_pages() == "ordinary memory: madvise, shared memory: never"


def test_what_does_not_fit_is_refused_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "free_host_bytes", lambda: 7 << 20)
    check_fits(7 << 20, "a segment", "")
    with pytest.raises(TransportUnavailable, match="a segment of 8 MiB does not fit: 7 MiB are free -- send less"):
        check_fits(8 << 20, "a segment", "send less")
