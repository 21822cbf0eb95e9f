"""Containers of one host that share the runtime directory, as a volume, and no pid namespace."""

from __future__ import annotations

import select
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import zmq

from inference_plugin.net import addresses, diagnosis
from inference_plugin.net.listening import Listener
from tests.support.hosts import Container, HostedReplica, can_make_hosts
from tests.support.managers import SyncManager
from tests.support.plain_engine import ShardSource, checkpoint, digests_expected
from tests.support.rig import eventually

pytestmark = pytest.mark.skipif(not can_make_hosts(), reason="pid namespaces need root")


@pytest.fixture
def engine(directory: Path) -> Iterator[HostedReplica]:
    one = contained(directory, "first")
    yield one
    one.process.kill()
    one.process.wait()


def contained(directory: Path, name: str) -> HostedReplica:
    environment = {"WEIGHTWIRE_RUNTIME_DIR": str(directory), "WEIGHTWIRE_LISTEN": "ipc"}
    return HostedReplica(Container(), directory / name, environment, tp=2)


def holds(replica: HostedReplica, version: int) -> bool:
    return bool(replica.ask("peek") == digests_expected(checkpoint(version), replica.tp))


def test_a_container_that_is_killed_and_started_again_costs_the_next_updates_nothing(
    engine: HostedReplica, directory: Path
) -> None:
    with SyncManager(timeout_s=120) as manager:
        (first,) = manager.wait_for_replicas(1, timeout_s=120)
        assert manager.update(ShardSource(checkpoint(1)), 1).failed == () and holds(engine, 1)
        engine.process.kill()
        engine.process.wait()
        again = contained(directory, "again")
        try:
            eventually(lambda: first.replica not in {card.replica for card in manager.discover()}, "its card swept")
            manager.wait_for_replicas(1, timeout_s=120)
            (report,) = manager.update(ShardSource(checkpoint(2)), 2).replicas
            assert (report.status, report.transport) == ("committed", "zmq") and holds(again, 2)
        finally:
            again.process.kill()
            again.process.wait()


def test_what_an_engine_of_another_container_says_of_its_start_is_seen_while_it_lives(directory: Path) -> None:
    noting = (
        "import time; from inference_plugin.net import diagnosis; diagnosis.note_start('vllm', 'model m'); "
        "diagnosis.note_problem('vllm', 'a reason'); print(flush=True); time.sleep(600)"
    )
    engine = Container().start(noting, {"WEIGHTWIRE_RUNTIME_DIR": str(directory)})
    assert engine.stdout is not None and engine.stdout.readline() == "\n"
    for _ in range(2):
        assert addresses.discover() == []
        assert [text.partition(": ")[2] for text in diagnosis.starting() + diagnosis.problems()] == [
            "model m",
            "a reason",
        ]
    engine.kill()
    engine.wait()
    eventually(lambda: not diagnosis.starting() + diagnosis.problems(), "the notes to be of a process that has ended")
    addresses.discover()
    assert list(addresses.runtime_dir().iterdir()) == []


def test_what_a_container_is_writing_is_no_leftover_to_those_who_look(directory: Path) -> None:
    """To another pid namespace its process has ended. An engine that published its card at that moment failed to start."""
    writing = (
        "from inference_plugin.net import addresses, diagnosis\n"
        "path = addresses.runtime_dir() / addresses.new_replica_id('plain')\n"
        "print(flush=True)\n"
        "for _ in range(1000):\n"
        "    addresses.replace_file(path, b'x')\n"
        "    assert diagnosis.note_start('vllm', 'model m').exists()\n"
        "print('written', flush=True)"
    )
    engine = Container().start(writing, {"WEIGHTWIRE_RUNTIME_DIR": str(directory)})
    assert engine.stdout is not None and engine.stdout.readline() == "\n"
    while not select.select([engine.stdout], [], [], 0)[0]:
        addresses.discover()
    assert engine.stdout.readline() == "written\n" and engine.wait() == 0


def test_what_looks_for_replicas_in_one_container_leaves_the_sockets_of_the_others(
    engine: HostedReplica, directory: Path
) -> None:
    path = addresses.runtime_dir() / addresses.new_replica_id("crew")
    with closing(Listener(zmq.REP, f"ipc://{path}", max_bytes=1 << 20)):
        looking = "from inference_plugin.net import addresses; print(len(addresses.discover()), flush=True)"
        looks = Container().start(looking, {"WEIGHTWIRE_RUNTIME_DIR": str(directory)})
        assert looks.stdout is not None and looks.stdout.readline() == "1\n" and looks.wait() == 0
        assert path.is_socket(), "where a trainer's ranks meet"
