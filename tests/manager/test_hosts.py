"""Hosts apart: trainer and engines meet over TCP alone, with a key; links are cut and restored, managers die."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from inference_plugin.net import curve
from inference_plugin.transports.interfaces import INTERFACE
from tests.support.hosts import Host, HostedReplica, HostedTrainer, can_make_hosts, network
from tests.support.plain_engine import checkpoint, digests_expected
from tests.support.rig import eventually, runtime

pytestmark = pytest.mark.skipif(not can_make_hosts(), reason="network namespaces need root and iproute2")


def joined(hosts: list[Host], directory: Path) -> dict[str, str]:
    """A new key, and the variables of a job whose trainer is on the first of these hosts."""
    curve.make_key(directory / "key")
    return {
        curve.VARIABLE: str(directory / "key"),
        "WEIGHTWIRE_REGISTRY": f"tcp://{hosts[0].address}:7777",
        "WEIGHTWIRE_SILENCE_S": "2",
    }


class Cluster:
    """A trainer and two replicas, each on a host of its own. The tests of this file take them over one from the other."""

    def __init__(self, hosts: list[Host], directory: Path) -> None:
        self.hosts, self.directory, self.version = hosts, directory, 0
        self.environment = joined(hosts, directory)
        self.trainer = HostedTrainer(hosts[0], directory / "trainer", self.environment)
        self.first = self.replica(hosts[1], "a", tp=2)
        self.second = self.replica(hosts[2], "b")
        assert len(self.trainer.ask("wait", count=2)) == 2

    def replica(self, host: Host, name: str, *, tp: int = 1, **environment: str) -> HostedReplica:
        return HostedReplica(host, self.directory / name, self.environment | environment, tp=tp)

    def update(self) -> dict[str, list[str]]:
        """The next version; of each replica in the report: status, transport and error."""
        self.version += 1
        report: dict[str, list[str]] = self.trainer.ask("update", version=self.version)
        return report


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch, runtime(patch) as directory, network(3) as hosts:
        yield Cluster(hosts, directory)


def holds(replica: HostedReplica, version: int) -> bool:
    return bool(replica.ask("peek") == digests_expected(checkpoint(version), replica.tp))


def test_replicas_of_other_hosts_register_and_take_updates_byte_for_byte(cluster: Cluster) -> None:
    for _ in range(2):
        assert sorted(cluster.update().values()) == [["committed", "zmq", ""]] * 2
        assert holds(cluster.first, cluster.version) and holds(cluster.second, cluster.version)


def test_a_replica_without_the_key_is_never_part_of_the_job(cluster: Cluster) -> None:
    curve.make_key(cluster.directory / "other")
    stranger = cluster.replica(cluster.hosts[2], "x", **{curve.VARIABLE: str(cluster.directory / "other")})
    assert len(cluster.update()) == 2
    assert holds(stranger, 0) and holds(cluster.second, cluster.version)


def test_a_link_that_is_cut_costs_its_replica_and_nobody_else_and_a_restored_one_catches_up(cluster: Cluster) -> None:
    before = set(cluster.update())
    old = cluster.version
    cluster.second.host.cut()
    report = cluster.update()  # the lease still runs, or has just ended
    committed = {name for name, (status, _, _) in report.items() if status == "committed"}
    assert len(committed) == 1 and {error for _, _, error in report.values()} <= {"", "PeerLost"}
    assert holds(cluster.first, cluster.version) and holds(cluster.second, old)
    eventually(lambda: set(cluster.trainer.ask("discover")) == committed, "the end of the lease")
    assert set(cluster.update()) == committed and holds(cluster.first, cluster.version)
    cluster.second.host.restore()
    assert set(cluster.trainer.ask("wait", count=2)) == before
    current = {name: ["current", cluster.version] for name in before}
    eventually(lambda: cluster.trainer.ask("replicas") == current, "the one that was cut off caught up")
    assert holds(cluster.second, cluster.version), "with no update since"
    assert sorted(cluster.update().values()) == [["committed", "zmq", ""]] * 2
    assert holds(cluster.first, cluster.version) and holds(cluster.second, cluster.version)


def test_a_manager_that_is_killed_and_started_again_finds_out_where_everyone_stands(cluster: Cluster) -> None:
    cluster.update()
    cluster.trainer.kill()
    cluster.second.process.kill()
    cluster.trainer = HostedTrainer(cluster.hosts[0], cluster.directory / "trainer", cluster.environment)
    third = cluster.replica(cluster.hosts[2], "c")
    eventually(lambda: len(cluster.trainer.ask("discover")) == 2, "the end of the lease of the killed one")
    assert sorted(map(str, cluster.trainer.ask("versions").values())) == [str(cluster.version), "None"]
    assert [status for status, _, _ in cluster.update().values()] == ["committed"] * 2
    assert holds(cluster.first, cluster.version) and holds(third, cluster.version)
    fourth = cluster.replica(cluster.hosts[1], "d")
    eventually(
        lambda: sum(state == ["current", cluster.version] for state in cluster.trainer.ask("replicas").values()) == 3,
        "the one that joined caught up",
    )
    assert holds(fourth, cluster.version), "from another host, between updates"


@pytest.mark.parametrize("transport", ["delta", pytest.param("store", marks=pytest.mark.full)])
def test_between_hosts_what_did_not_change_stays_and_after_a_cut_link_everything_travels(transport: str) -> None:
    with pytest.MonkeyPatch.context() as patch, runtime(patch) as directory, network(3) as hosts:
        (store := directory / "store").mkdir()
        environment = joined(hosts, directory) | {"WEIGHTWIRE_STORE_URL": f"file://{store}"}
        trainer = HostedTrainer(hosts[0], directory / "trainer", environment, transport=transport)
        first = HostedReplica(hosts[1], directory / "a", environment, tp=2)
        second = HostedReplica(hosts[2], directory / "b", environment)
        assert len(trainer.ask("wait", count=2)) == 2
        for version, seed in ((1, 1), (2, 1), (3, 3), (4, 3)):  # half of them change nothing
            report = trainer.ask("update", version=version, seed=seed)
            assert sorted(report.values()) == [["committed", transport, ""]] * 2
            assert holds(first, seed) and holds(second, seed)
        second.host.cut()
        trainer.ask("update", version=5)
        assert holds(first, 5) and holds(second, 3)
        second.host.restore()
        assert len(trainer.ask("wait", count=2)) == 2
        caught_up = [["current", 5]] * 2
        eventually(lambda: [*trainer.ask("replicas").values()] == caught_up, "the one that was cut off caught up")
        assert holds(second, 5)
        for version, seed in ((6, 5), (7, 7)):
            report = trainer.ask("update", version=version, seed=seed)
            assert sorted(report.values()) == [["committed", transport, ""]] * 2
            assert holds(first, seed) and holds(second, seed)


def test_hosts_read_the_trainers_memory_by_nixl() -> None:
    with pytest.MonkeyPatch.context() as patch, runtime(patch) as directory, network(3) as hosts:
        environment = joined(hosts, directory) | {"UCX_NET_DEVICES": "eth0"}
        trainer = HostedTrainer(hosts[0], directory / "trainer", environment, transport="nixl")
        first = HostedReplica(hosts[1], directory / "a", environment, tp=2)
        second = HostedReplica(hosts[2], directory / "b", environment)
        assert len(trainer.ask("wait", count=2)) == 2
        for version in (1, 2):
            assert sorted(trainer.ask("update", version=version).values()) == [["committed", "nixl", ""]] * 2
            assert holds(first, version) and holds(second, version)


def test_hosts_that_trust_a_network_take_updates_by_collective_and_a_lost_one_costs_one_update() -> None:
    with pytest.MonkeyPatch.context() as patch, runtime(patch) as directory, network(3) as hosts:
        environment = joined(hosts, directory) | {INTERFACE: "eth0"}
        trainer = HostedTrainer(hosts[0], directory / "trainer", environment, transport="collective")
        first = HostedReplica(hosts[1], directory / "a", environment, tp=2)
        second = HostedReplica(hosts[2], directory / "b", environment)
        assert len(trainer.ask("wait", count=2)) == 2
        for version in (1, 2):
            assert sorted(trainer.ask("update", version=version).values()) == [["committed", "collective", ""]] * 2
            assert holds(first, version) and holds(second, version)
        second.process.kill()
        assert holds(first, 2)
        eventually(lambda: "error" not in trainer.ask("update", version=3), "an update without the lost host")
        assert holds(first, 3)
