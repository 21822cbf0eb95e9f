"""The runtime directory: private, per job, and free of the dead."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from inference_plugin.net import addresses, diagnosis
from inference_plugin.net.listening import make_private
from inference_plugin.net.processes import has_ended, start_ticks
from inference_plugin.net.records import last_reports, record_of
from inference_plugin.wire.errors import AuthError, ConfigError
from inference_plugin.wire.messages import ReplicaCard
from tests.support.rig import fork, kill


def card(replica: str, pid: int = 0, **fields: object) -> ReplicaCard:
    known = {
        "engine": "plain",
        "engine_version": "0",
        "model": "m",
        "job": addresses.job_name(),
        "boot_id": addresses.boot_id(),
        "address": "",
        "workers": (),
    }
    return ReplicaCard(replica=replica, pid=pid or os.getpid(), **(known | fields))  # type: ignore[arg-type]


def sleep_for_ever() -> None:
    import signal

    signal.pause()


def test_a_card_is_found_as_it_was_written_and_rewritten(directory: Path) -> None:
    addresses.write_card(card("b", detail="one"))
    addresses.write_card(card("a"))
    assert addresses.discover() == [card("a"), card("b", detail="one")]
    addresses.write_card(card("b", detail="two", state="torn"))
    assert addresses.discover() == [card("a"), card("b", detail="two", state="torn")]


def test_a_dead_replicas_card_and_sockets_are_swept_and_the_livings_stay(directory: Path) -> None:
    pid = fork("tests.wire.test_addresses:sleep_for_ever")
    addresses.write_card(card("dead", pid))
    addresses.write_card(card("alive"))
    for endpoint in ("dead.f", "dead.0", "alive.0"):
        (addresses.runtime_dir() / endpoint).touch()
    assert [c.replica for c in addresses.discover()] == ["alive", "dead"]
    kill(pid)
    assert [c.replica for c in addresses.stale_replicas()] == ["dead"]
    assert [c.replica for c in addresses.discover()] == ["alive"]
    assert sorted(path.name for path in addresses.runtime_dir().iterdir()) == ["alive.0", "alive.card"]


def test_a_card_from_before_a_reboot_is_stale_even_if_its_pid_is_taken(directory: Path) -> None:
    addresses.write_card(card("old", boot_id="another boot"))
    assert addresses.discover() == []
    assert list(addresses.runtime_dir().iterdir()) == []


def test_looking_for_replicas_disturbs_none_that_lives(directory: Path) -> None:
    """Each update looks for them, and each connection to a replica wakes it while it generates."""
    living = addresses.new_replica_id("engine")
    addresses.write_card(card(living))
    with socket.socket(socket.AF_UNIX) as of_replica, socket.socket(socket.AF_UNIX) as of_trainer:
        for listener, name in ((of_replica, f"{living}.f"), (of_trainer, f"{addresses.new_replica_id('registry')}.r")):
            listener.bind(str(addresses.runtime_dir() / name))
            listener.listen()
            listener.setblocking(False)
        assert [c.replica for c in addresses.discover()] == [living]
        for listener in (of_replica, of_trainer):
            with pytest.raises(BlockingIOError):
                listener.accept()


def test_removing_a_replica_leaves_those_whose_names_begin_like_it(directory: Path) -> None:
    addresses.write_card(card("r-1"))
    addresses.write_card(card("r-10"))
    addresses.remove_replica("r-1")
    addresses.remove_replica("r-1")
    assert [c.replica for c in addresses.discover()] == ["r-10"]


def test_another_jobs_replicas_are_never_seen(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    addresses.write_card(card("mine"))
    monkeypatch.setenv("WEIGHTWIRE_JOB", "other")
    assert addresses.discover() == []
    addresses.write_card(card("theirs"))
    assert [c.replica for c in addresses.discover()] == ["theirs"]
    assert [c.replica for c in addresses.discover("default")] == ["mine"]


def test_replicas_of_the_job_under_another_default_directory_are_named(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses.write_card(card("mine"))
    uid = 1_000_000_000 + os.getpid()
    root = Path(f"/tmp/weightwire-{uid}")
    shutil.copytree(directory / "default", root / "default")
    try:
        monkeypatch.setattr(os, "getuid", lambda: uid)
        assert diagnosis.elsewhere() == [str(root)] and diagnosis.elsewhere("other") == []
        monkeypatch.setenv("WEIGHTWIRE_RUNTIME_DIR", str(root))
        assert diagnosis.elsewhere() == []
    finally:
        shutil.rmtree(root)


def test_a_relative_runtime_directory_is_shown_as_an_absolute_one(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(directory)
    monkeypatch.setenv("WEIGHTWIRE_RUNTIME_DIR", "here")
    assert addresses.runtime_dir() == directory / "here" / "default"


def test_the_directory_is_closed_to_others_even_if_it_was_open(directory: Path) -> None:
    path = addresses.runtime_dir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    path.chmod(0o777)
    assert stat.S_IMODE(addresses.runtime_dir().stat().st_mode) == 0o700


@pytest.mark.skipif(os.getuid() != 0, reason="needs another user")
@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o755, 0o700])
def test_no_other_user_can_put_a_directory_in_place_of_a_jobs(directory: Path, mode: int) -> None:
    directory.parent.chmod(0o711)  # so that the other user gets there
    directory.chmod(mode)
    path = addresses.runtime_dir()
    assert stat.S_IMODE(directory.stat().st_mode) & 0o777 == mode & 0o777, "who may write there may still do so"
    if (pid := os.fork()) == 0:
        os.setgid(12345)
        os.setuid(12345)
        try:
            path.rename(directory / "taken")
        except PermissionError:
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.skipif(os.getuid() != 0, reason="needs to give a directory away")
@pytest.mark.parametrize("level", ["the root", "the job"])
def test_a_directory_of_somebody_else_is_refused(directory: Path, level: str) -> None:
    path = addresses.runtime_dir()
    os.chown(directory if level == "the root" else path, 12345, -1)
    with pytest.raises(AuthError, match="belongs to user 12345, not to 0") as raised:
        addresses.runtime_dir()
    assert "WEIGHTWIRE_RUNTIME_DIR" in raised.value.hint
    os.chown(directory if level == "the root" else path, 0, -1)


@pytest.mark.skipif(os.getuid() != 0, reason="needs to give a link away")
def test_a_link_of_somebody_else_is_refused_also_where_it_leads_to_a_directory_of_our_own(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = directory / "link"
    (directory / "own").mkdir()
    link.symlink_to(directory / "own")
    monkeypatch.setenv("WEIGHTWIRE_RUNTIME_DIR", str(link))
    assert addresses.runtime_dir().is_dir(), "our own may lead where we want"
    os.chown(link, 12345, -1, follow_symlinks=False)
    with pytest.raises(AuthError, match="belongs to user 12345, not to 0"):
        addresses.runtime_dir()


@pytest.mark.skipif(os.getuid() != 0, reason="needs to give a directory away")
def test_a_link_that_root_made_leads_to_a_users_own_directory_and_to_no_other(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, link = directory / "own", directory / "link"
    own.mkdir()
    link.symlink_to(own)
    os.chown(own, 12345, -1)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    make_private(link)
    os.chown(own, 0, -1)
    with pytest.raises(AuthError, match="belongs to user 0, not to 12345"):
        make_private(link)


@pytest.mark.parametrize("job", ["a/b", "..", ".hidden", "x" * 41, "sp ace", ""])
def test_a_job_name_that_is_no_plain_name_is_refused(
    directory: Path, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIGHTWIRE_JOB", job)
    with pytest.raises(AuthError, match=r"WEIGHTWIRE_JOB=.*use up to 40 letters"):
        addresses.runtime_dir()


def test_a_path_too_long_for_a_socket_is_refused_with_the_way_out(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert addresses.ipc_address("plain-1-abc", "f").startswith(f"ipc://{directory}/default/")
    monkeypatch.setenv("WEIGHTWIRE_RUNTIME_DIR", str(directory / ("d" * 100)))
    with pytest.raises(AuthError, match="too long for a socket") as raised:
        addresses.ipc_address("plain-1-abc", "f")
    assert "shorter" in raised.value.hint


def test_ids_are_never_used_twice_and_name_engine_and_process() -> None:
    ids = {addresses.new_replica_id("plain") for _ in range(100)}
    assert len(ids) == 100 and all(i.startswith(f"plain-{os.getpid()}-") for i in ids)


def test_a_card_that_cannot_be_read_is_left_out_with_one_warning(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (addresses.runtime_dir() / "bad.card").write_bytes(b"\xff\xff")
    assert addresses.discover() == [] and addresses.discover() == []
    (warning,) = caplog.messages
    assert "bad.card" in warning and "not a ReplicaCard" in warning


def test_nobody_waits_for_what_is_no_plain_file_in_the_runtime_directory(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    replica, dead = addresses.new_replica_id("vllm"), "vllm-4000000-1-ab"
    for name in (f"{replica}.card", f"{replica}.problem", f"{replica}.starting", "policy.report", f"{dead}.tmp"):
        os.mkfifo(addresses.runtime_dir() / name)
    os.mkfifo(addresses.runtime_dir() / f"{replica}.counts")
    (addresses.runtime_dir() / f"{dead}.counts").mkdir()
    assert (addresses.discover(), diagnosis.problems(), diagnosis.starting(), last_reports(None)) == ([], [], [], [])
    assert record_of(card(replica)).groups == {} and diagnosis.elsewhere() == [] and diagnosis.other_jobs("other") == []
    assert [("no plain file" in text) for text in caplog.messages] == [True, True]


def test_a_zombie_is_not_alive() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert has_ended(pid)
    os.waitpid(pid, 0)
    assert has_ended(pid)
    assert not has_ended(os.getpid())


def test_a_half_written_card_is_never_seen(directory: Path) -> None:
    addresses.write_card(card("a"))
    (addresses.runtime_dir() / "a.tmp").write_bytes(msgspec.msgpack.encode(card("a"))[:10])
    assert addresses.discover() == [card("a")]


def test_a_card_whose_pid_is_another_processs_now_is_stale(directory: Path) -> None:
    pid = fork("tests.wire.test_addresses:sleep_for_ever")
    for name in ("mine", "older"):
        (addresses.runtime_dir() / f"{name}.f").touch()
    addresses.write_card(card("mine", pid, start_ticks=start_ticks(pid)))
    addresses.write_card(card("older", pid, start_ticks=start_ticks(pid) - 1))
    addresses.write_card(card("untold", pid))
    assert [c.replica for c in addresses.stale_replicas()] == ["older"]
    assert [c.replica for c in addresses.discover()] == ["mine", "untold"]
    assert not (addresses.runtime_dir() / "older.f").exists()
    kill(pid)
    assert addresses.discover() == []


def test_what_a_process_left_is_swept_even_if_its_pid_is_taken(directory: Path) -> None:
    now, earlier = f"{os.getpid()}-{start_ticks()}", f"{os.getpid()}-{start_ticks() - 1}"
    for name in (f"registry-{now}-ab.r", f"registry-{earlier}-ab.r"):
        socket.socket(socket.AF_UNIX).bind(str(addresses.runtime_dir() / name))
    assert addresses.new_replica_id("vllm").startswith(f"vllm-{now}-")
    assert list(addresses.local_registries().values()) == [(os.getpid(), start_ticks())]
    for name in (f"collective-{now}-ab.0", f"collective-{earlier}-ab.0"):
        (addresses.runtime_dir() / name).touch()
    (addresses.runtime_dir() / f"vllm-{earlier}-ab.problem").write_text("long ago")
    diagnosis.note_problem("vllm", "today")
    assert diagnosis.problems() == [f"vllm process {os.getpid()}: today"]
    addresses.discover()
    left = sorted(path.name for path in addresses.runtime_dir().iterdir() if not path.name.endswith(".problem"))
    assert left == [f"collective-{now}-ab.0", f"registry-{now}-ab.r"]


def test_whoever_reads_what_a_process_noted_sees_all_of_it_or_nothing(directory: Path) -> None:
    about = "model m" * 1000
    done = threading.Event()

    def note() -> None:
        while not done.is_set():
            earlier = list(addresses.runtime_dir().iterdir())
            diagnosis.note_start("vllm", about)
            diagnosis.note_problem("vllm", about)
            for path in earlier:
                path.unlink()

    diagnosis.note_start("vllm", about)
    writer = threading.Thread(target=note)
    writer.start()
    try:
        seen = [text for _ in range(1000) for text in diagnosis.starting() + diagnosis.problems()]
    finally:
        done.set()
        writer.join()
    assert set(seen) == {f"vllm process {os.getpid()}: {about}"}


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """Files can be made meanwhile, but not one byte can be written into them."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_on_a_full_disk_the_old_card_stays_a_problem_is_told_without_its_reason_and_nothing_half_written_is_left(
    directory: Path,
) -> None:
    path = addresses.runtime_dir() / "vllm.card"
    addresses.replace_file(path, b"old")
    with full_disk():
        with pytest.raises(OSError, match="too large"):
            addresses.replace_file(path, b"new")
        with pytest.raises(OSError, match="too large"):
            diagnosis.note_start("vllm", "model m")
        with pytest.raises(OSError, match="too large"):
            diagnosis.note_problem("vllm", "a reason")
    assert path.read_bytes() == b"old" and diagnosis.starting() == []
    (problem,) = diagnosis.problems()
    assert problem.startswith(f"vllm process {os.getpid()}: its reason could not be written down")
    assert list(addresses.runtime_dir().glob("*.tmp")) == []


def test_a_runtime_directory_that_cannot_be_made_is_a_typed_error(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (directory / "file").touch()
    monkeypatch.setenv("WEIGHTWIRE_RUNTIME_DIR", str(directory / "file" / "below"))
    with pytest.raises(ConfigError, match="can't be made: Not a directory") as raised:
        addresses.runtime_dir()
    assert "WEIGHTWIRE_RUNTIME_DIR" in raised.value.hint
