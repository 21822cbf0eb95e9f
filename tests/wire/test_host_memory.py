"""An update that does not fit is refused with both numbers before it takes anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from inference_plugin.wire import host_memory
from inference_plugin.wire.errors import TransportUnavailable
from inference_plugin.wire.host_memory import check_fits, free_host_bytes, left_in_groups


def group(path: Path, limit: str, held: int = 0, files: int = 0) -> None:
    path.mkdir(parents=True, exist_ok=True)
    (path / "memory.max").write_text(f"{limit}\n")
    (path / "memory.current").write_text(f"{held}\n")
    (path / "memory.stat").write_text(f"anon {held - files}\nfile {files}\ninactive_file {files}\n")


def test_a_container_s_limit_counts_and_so_do_those_around_it(tmp_path: Path) -> None:
    membership = tmp_path / "cgroup"
    membership.write_text("0::/pod/engine\n")
    group(tmp_path / "pod" / "engine", "max", 10)
    group(tmp_path / "pod", "1000", 700, 200)
    assert list(left_in_groups(membership, tmp_path)) == [500]
    group(tmp_path / "pod" / "engine", "400", 500)
    assert list(left_in_groups(membership, tmp_path)) == [0, 500]


@pytest.mark.parametrize("said", ["", "1:memory:/pod\n", "0::/nowhere\n"])
def test_without_groups_the_host_alone_counts(tmp_path: Path, said: str) -> None:
    (tmp_path / "cgroup").write_text(said)
    assert list(left_in_groups(tmp_path / "cgroup", tmp_path)) == []
    assert list(left_in_groups(tmp_path / "missing", tmp_path)) == []
    assert free_host_bytes() > 0


def test_what_does_not_fit_is_refused_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "free_host_bytes", lambda: 7 << 20)
    check_fits(7 << 20, "a segment", "")
    with pytest.raises(TransportUnavailable, match="a segment of 8 MiB does not fit: 7 MiB are free -- send less"):
        check_fits(8 << 20, "a segment", "send less")
