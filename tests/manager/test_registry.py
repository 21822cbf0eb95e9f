"""The manager's registry: who is believed, for how long, and what it makes of whatever is sent to it."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inference_plugin.net import addresses, curve
from inference_plugin.net.channel import Channel
from inference_plugin.net.listening import Listener
from inference_plugin.net.registration import Registration
from inference_plugin.wire import codec
from inference_plugin.wire.errors import AuthError, ConfigError, ProtocolError, SyncTimeout, WeightwireError
from inference_plugin.wire.messages import Describe, Done, Failed, Leave, Register, ReplicaCard, WorkerCard
from tests.manager.conftest import Start
from tests.support.managers import SyncManager
from tests.support.plain_engine import ShardSource, checkpoint
from tests.support.rig import ROOT, eventually, kill
from tests.support.small_disk import read_only, small_disk
from trainer_adapters.batch.rollouts.pool import RolloutPool
from trainer_adapters.batch.store import Store
from trainer_adapters.fleet import registry
from trainer_adapters.fleet.registry import Registry


def card(replica: str = "plain-1-abc", **fields: object) -> ReplicaCard:
    worker = WorkerCard(replica, 0, 0, 0, 1, "elsewhere", "tcp://192.0.2.1:2", "cpu", 0)
    known = {"engine": "plain", "engine_version": "0", "model": "m", "job": "default", "pid": 1, "boot_id": "elsewhere"}
    return ReplicaCard(replica=replica, address="tcp://192.0.2.1:1", workers=(worker,), **(known | fields))  # type: ignore[arg-type]


@pytest.fixture
def there(directory: Path) -> Iterator[Registry]:
    one = Registry("tcp://127.0.0.1:*")
    yield one
    one.close()


def names_of(cards: list[ReplicaCard]) -> list[str]:
    return [each.replica for each in cards]


def names(found: Registry) -> list[str]:
    return names_of(found.cards())


def state_of(found: Registry, replica: str) -> str:
    return next(each.state for each in found.cards() if each.replica == replica)


def test_a_replica_is_there_for_as_long_as_it_renews_and_leaves_at_once(there: Registry) -> None:
    with Channel(there.address) as channel:
        channel.request(Register(card("plain-1-a"), 60), Done, timeout_s=60)
        channel.request(Register(card("plain-2-b"), 0.2), Done, timeout_s=60)
        eventually(lambda: names(there) == ["plain-1-a"], "the end of the second one's lease")
        channel.request(Register(card("plain-1-a", state="torn"), 60), Done, timeout_s=60)
        assert [each.state for each in there.cards()] == ["torn"], "the same id again replaces"
        channel.request(Leave("plain-1-a"), Done, timeout_s=60)
        channel.request(Leave("nobody"), Done, timeout_s=60)
        assert names(there) == []
    with pytest.raises(SyncTimeout, match="0 of 1 replicas"):
        there.wait(1, 0.01)


def test_a_heartbeat_renews_the_lease_and_reads_no_directory(there: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand replicas send 300 a second, and each looked at all of them."""
    looks, discover = list[None](), addresses.discover
    monkeypatch.setattr(addresses, "discover", lambda: (looks.append(None), discover())[1])
    with Channel(there.address) as channel:
        channel.request(Register(card(), 0.5), Done, timeout_s=60)
        begun, heard_s = len(looks), there.heard_s("plain-1-abc")
        for _ in range(3):
            channel.request(Register(card(), 3600), Done, timeout_s=60)
        assert len(looks) == begun and there.heard_s("plain-1-abc") > heard_s
        time.sleep(0.6)
        assert names(there) == ["plain-1-abc"]
        channel.request(Register(card(state="torn"), 3600), Done, timeout_s=60)
        assert state_of(there, "plain-1-abc") == "torn"


def test_a_registration_is_kept_up_by_itself_tells_news_at_once_and_ends_with_its_replica(
    there: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIGHTWIRE_SILENCE_S", "3600")  # the lease: that it is over is not what ends it
    kept = Registration(there.address, card())
    assert [each.replica for each in there.wait(1, 60)] == ["plain-1-abc"]
    kept.update(card(state="torn"))
    eventually(lambda: [each.state for each in there.cards()] == ["torn"], "the news")
    kept.close()
    kept.close()
    eventually(lambda: names(there) == [], "that it left")


def test_an_engine_that_starts_before_the_trainer_says_so_once_and_is_not_told_to_call_again(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("inference_plugin.net.registration.ASK_TIMEOUT_S", 0.05)
    monkeypatch.setenv("WEIGHTWIRE_SILENCE_S", "0.3")
    early = Registration("tcp://127.0.0.1:9", card())
    eventually(lambda: "trying on" in caplog.text, "the warning")
    time.sleep(0.5)
    early.close()
    assert caplog.text.count("can't register at tcp://127.0.0.1:9 yet: no manager answers (no reply ") == 1
    assert "call it again" not in caplog.text


def test_an_engine_that_no_manager_answered_says_that_the_manager_which_came_has_another_key(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("inference_plugin.net.registration.ASK_TIMEOUT_S", 0.5)
    monkeypatch.setenv("WEIGHTWIRE_SILENCE_S", "0.3")
    for name in ("trainer's", "engine's"):
        curve.make_key(directory / name)
    with zmq.Context() as context, context.socket(zmq.REP) as probe:
        free = f"tcp://127.0.0.1:{probe.bind_to_random_port('tcp://127.0.0.1')}"
    monkeypatch.setenv(curve.VARIABLE, str(directory / "engine's"))
    early = Registration(free, card())
    eventually(lambda: "no manager answers" in caplog.text, "the first warning")
    monkeypatch.setenv(curve.VARIABLE, str(directory / "trainer's"))
    late = Listener(zmq.ROUTER, free, max_bytes=1 << 20)
    monkeypatch.setenv(curve.VARIABLE, str(directory / "engine's"))
    eventually(lambda: "hold different keys" in caplog.text, "the second warning")
    early.close()
    late.close()


def test_replicas_of_this_host_tell_every_manager_and_nobody_looks_for_them(
    start: Start, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wait reads the runtime directory once, and again where there is news; not because time passes."""
    looks: list[None] = []
    cards = Registry.cards

    def looking(here: Registry) -> list[ReplicaCard]:
        if threading.current_thread().name == "the one that waits":
            looks.append(None)
        return cards(here)

    monkeypatch.setattr(Registry, "cards", looking)
    one, another = Registry(), Registry("tcp://127.0.0.1:*")
    found: list[tuple[list[str], int]] = []

    def wait() -> None:
        there = names_of(one.wait(2, 600))
        found.append((there, one.changes))

    waits = threading.Thread(target=wait, name="the one that waits")
    waits.start()
    # The second one registers over TCP as well, with a lease: it is there once.
    rigs = [start(), start(WEIGHTWIRE_REGISTRY=another.address)]
    waits.join(600)
    ((there, news),) = found
    assert there == sorted(rig.replica for rig in rigs) == names(another) and len(looks) <= news + 1
    rigs[0].ask("fault", step="install")
    rigs[0].ask("fault", step="undo")
    with SyncManager(timeout_s=60) as manager:
        assert [r.replica for r in manager.update(ShardSource(checkpoint(1)), 1).failed] == [rigs[0].replica]
    torn = rigs[0].replica
    eventually(lambda: one.heard_s(torn) > 0 and state_of(one, torn) == "torn", "the news that it is torn")
    kill(rigs[0].pid)
    rigs[1].ask("stop")
    eventually(lambda: names(one) == names(another) == [], "that one was killed and the other left")
    monkeypatch.setenv("WEIGHTWIRE_SILENCE_S", "3600")  # the next one's lease: that it is over is not what ends it
    later = Registration(None, card(boot_id=addresses.boot_id(), pid=os.getpid()))
    assert names_of(one.wait(1, 60)) == ["plain-1-abc"]
    third = Registry()
    later.close()
    for each in (one, another, third):
        eventually(lambda each=each: names(each) == [], "that it left")  # type: ignore[misc]
        each.close()
        each.close()
    assert not list(directory.glob("*/registry-*"))


def test_a_replica_that_leaves_is_missed_by_a_manager_that_started_after_it_too(directory: Path) -> None:
    mine = card(boot_id=addresses.boot_id(), pid=os.getpid())
    addresses.write_card(mine)
    kept = Registration(None, mine)
    later = Registry()
    assert names(later) == ["plain-1-abc"]
    news = threading.Event()
    forget = later.on_change(news.set)
    addresses.remove_card(mine)
    kept.close()
    assert news.wait(600) and names(later) == []
    forget()
    later.close()


def test_a_card_that_is_removed_before_the_first_look_at_it_is_written_again(directory: Path) -> None:
    mine = card(boot_id=addresses.boot_id(), pid=os.getpid())

    def publish(again: bool) -> None:
        if again:
            addresses.write_card(mine)

    kept = Registration(None, mine, publish)
    try:
        eventually(lambda: addresses.is_published(mine), "the card")
    finally:
        kept.close()


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        (Register(card(job="other"), 60), AuthError, "is of job 'other'"),
        (Register(msgspec.structs.replace(card(), address="ipc:///x"), 60), AuthError, "can't be reached from here"),
        (Describe(), ProtocolError, "a registry takes no Describe"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_what_to_do(
    there: Registry, wrong: Register | Describe, error: type[WeightwireError], text: str
) -> None:
    with Channel(there.address) as channel:
        with pytest.raises(error, match=text):
            channel.request(wrong, Done, timeout_s=60)
        channel.request(Register(card(), 60), Done, timeout_s=60)
    assert names(there) == ["plain-1-abc"]


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(frames=st.lists(st.binary(max_size=64), min_size=1, max_size=3))
def test_garbage_gets_an_error_and_the_registry_goes_on(there: Registry, frames: list[bytes]) -> None:
    context = zmq.Context()
    raw = context.socket(zmq.REQ)
    raw.connect(there.address)
    raw.send_multipart(frames)
    assert raw.poll(60_000)
    assert isinstance(codec.decode(raw.recv_multipart()[0]).body, Failed)
    context.destroy(linger=0)
    with Channel(there.address) as channel:
        channel.request(Register(card(), 60), Done, timeout_s=60)


def test_managers_of_one_process_share_a_registry_and_the_last_one_closes_it(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = Registry("tcp://127.0.0.1:*")
    free.close()
    monkeypatch.setenv("WEIGHTWIRE_REGISTRY", free.address)
    first, second = registry.take(), registry.take()
    assert first is second
    registry.give_back(first)
    with Channel(free.address) as channel:
        channel.request(Register(card(), 60), Done, timeout_s=60)
    registry.give_back(second)
    third = registry.take()
    assert third is not first and names(third) == []
    registry.give_back(third)


def test_a_fork_has_a_registry_of_its_own(directory: Path) -> None:
    """Its parent's has no thread there: replicas that start later would register in vain."""
    parents = registry.take()
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            with Channel(registry.take().address) as channel:
                channel.request(Register(card(), 60), Done, timeout_s=30)
            os._exit(names(registry.take()) != ["plain-1-abc"])
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert names(parents) == []
    registry.give_back(parents)


@pytest.mark.parametrize(
    "address", ["10.0.0.1:7777", "tcp://10.0.0.1", "tcp://10.0.0.1:*", "tcp://*:7", "ipc:///x", "tcp://127.0.0.1:70000"]
)
def test_an_address_that_is_no_registry_is_refused_by_the_variables_name(
    monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.setenv("WEIGHTWIRE_REGISTRY", address)
    with pytest.raises(AuthError, match="WEIGHTWIRE_REGISTRY"):
        addresses.registry_address()


@pytest.mark.parametrize("with_key", [False, True], ids=["without a key", "with a key"])
def test_a_registry_at_an_address_of_another_host_is_refused_by_the_variables_name(
    directory: Path, monkeypatch: pytest.MonkeyPatch, with_key: bool
) -> None:
    monkeypatch.setenv("WEIGHTWIRE_REGISTRY", "tcp://203.0.113.9:7777")
    if with_key:
        curve.make_key(directory / "key")
        monkeypatch.setenv("WEIGHTWIRE_KEY", str(directory / "key"))
    with pytest.raises(AuthError, match=r"WEIGHTWIRE_REGISTRY=tcp://203\.0\.113\.9:7777"):
        registry.take()


@pytest.mark.parametrize(
    "made", [SyncManager, RolloutPool, lambda: Store(budget_bytes=1)], ids=["manager", "pool", "store"]
)
def test_a_runtime_directory_on_a_read_only_disk_is_an_error_that_says_what_to_set(
    made: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_disk() as path:
        monkeypatch.setenv("WEIGHTWIRE_RUNTIME_DIR", str(path))
        addresses.runtime_dir()
        with read_only(path), pytest.raises(ConfigError, match=r"no socket can be made at .*Read-only") as raised:
            made()
        assert "WEIGHTWIRE_RUNTIME_DIR" in raised.value.hint


def test_nothing_in_the_packages_sleeps() -> None:
    """Whoever waits, waits for a socket, a descriptor or an event."""
    sleeping = re.compile(r"\b(time|asyncio)\.sleep\(|from time import.*sleep")
    sources = [path for package in ("inference_plugin", "trainer_adapters") for path in (ROOT / package).rglob("*.py")]
    assert [path.name for path in sources if sleeping.search(path.read_text())] == []
