"""Metrics: what the trainer counts, what a replica counts, what a server says of its replicas; and the dashboard."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics

from inference_plugin.engines.http import ReplicaMiddleware
from inference_plugin.engines.metrics import ENGINE_METRICS
from inference_plugin.engines.published_card import replica_card
from inference_plugin.net import addresses
from inference_plugin.net.records import ReplicaRecord, record_of, save_record
from inference_plugin.wire.errors import WeightwireError
from inference_plugin.wire.messages import WorkerCard
from tests.manager.test_relatives import tear
from tests.support.plain_engine import ShardSource, checkpoint
from tests.support.rig import ROOT, Rig, eventually
from tests.support.visible import samples, value
from trainer_adapters import SyncManager
from trainer_adapters.metrics import UpdateMetrics

DASHBOARD = ROOT / "docs" / "grafana" / "weightwire.json"


@pytest.fixture
def rig(directory: Path) -> Iterator[Rig]:
    one = Rig(directory, tp=2)
    yield one
    one.end()


class Server:
    """The server of an engine: its application, with the middleware around it."""

    def __init__(self, own: bytes | None = b"", kind: str = "text/plain") -> None:
        self._own, self._kind = own, kind
        self._app = ReplicaMiddleware(self._engine)

    def get(self, path: str, query: str = "", **headers: str) -> tuple[int, str, dict[bytes, bytes]]:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        given = [(name.replace("_", "-").encode(), text.encode()) for name, text in headers.items()]
        scope = {"type": "http", "method": "GET", "path": path, "query_string": query.encode(), "headers": given}
        asyncio.run(self._app(scope, None, send))
        body = b"".join(message.get("body", b"") for message in sent)
        return sent[0]["status"], body.decode(), dict(sent[0]["headers"])

    async def _engine(self, scope: Any, receive: Any, send: Any) -> None:
        assert b"accept-encoding" not in dict(scope["headers"]), "two compressed texts can't be joined"
        status = 404 if self._own is None else 200
        headers = [(b"content-type", self._kind.encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": self._own or b"not found"})


def adopt(rig: Rig, **fields: Any) -> None:
    """Makes this process the server of the rig's replica."""
    (card,) = [card for card in addresses.discover() if card.replica == rig.replica]
    addresses.write_card(msgspec.structs.replace(card, parent_pid=os.getpid(), **fields))


def test_the_trainer_counts_updates_phases_bytes_and_failures(rig: Rig) -> None:
    registry = CollectorRegistry()
    with SyncManager(timeout_s=60) as manager:
        metrics = UpdateMetrics(manager, registry=registry)
        reports = [manager.update(ShardSource(checkpoint(version)), version) for version in (7, 9)]
        with pytest.raises(WeightwireError):
            manager.update(ShardSource(checkpoint(1)), 8)
        found = samples(generate_latest(registry).decode())
        assert value(found, "weightwire_version", group="policy") == 9
        assert value(found, "weightwire_updates_total", group="policy") == 2
        assert value(found, "weightwire_update_bytes_total", group="policy") == sum(r.bytes for r in reports)
        assert value(found, "weightwire_update_failures_total", group="policy", kind="VersionConflict") == 1
        for phase in ("agree", "stage", "seal", "commit"):
            total_s = sum(report.phases[phase] for report in reports)
            counted_s = value(found, "weightwire_update_phase_seconds_total", group="policy", phase=phase)
            assert counted_s == pytest.approx(total_s)
        replica = {"replica": rig.replica, "group": "policy"}
        assert value(found, "weightwire_replica_version", **replica) == 9
        stopped_s = value(found, "weightwire_replica_stopped_seconds_total", **replica)
        assert stopped_s == pytest.approx(sum(report.replicas[0].stopped_s for report in reports))
        metrics.close()
        metrics.close()
        assert samples(generate_latest(registry).decode()) == {}
        UpdateMetrics(manager, registry=registry)  # the names are free again


def test_a_replica_that_serves_no_known_version_has_none_in_the_trainers_metrics(rig: Rig) -> None:
    registry = CollectorRegistry()

    def found(name: str) -> float | None:
        return samples(generate_latest(registry).decode()).get((name, (("group", "policy"), ("replica", rig.replica))))

    with SyncManager(timeout_s=60) as manager:
        UpdateMetrics(manager, registry=registry)
        tear(rig, manager)
        eventually(lambda: found("weightwire_replica_torn") == 1, "the tear")
        assert found("weightwire_replica_version") is None
        manager.update(ShardSource(checkpoint(3)), 3)
        eventually(lambda: found("weightwire_replica_version") == 3, "the version that heals it")
        eventually(lambda: found("weightwire_replica_torn") == 0, "its end")
        manager.close_group()
        eventually(lambda: found("weightwire_replica_version") is None, "the end of the group")


def test_a_server_s_metrics_are_the_engine_s_own_and_those_of_its_replicas(rig: Rig) -> None:
    adopt(rig)
    own_registry = CollectorRegistry()
    Counter("engine_requests", "The engine's own.", registry=own_registry).inc(3)
    own = generate_latest(own_registry)
    with SyncManager(timeout_s=60) as manager:
        reports = [manager.update(ShardSource(checkpoint(version)), version) for version in (7, 9)]
        with pytest.raises(WeightwireError):
            manager.update(ShardSource(checkpoint(1)), 8)
    eventually(lambda: [group.version for group in record_of(rig.card).groups.values()] == [9], "the record")
    status, text, headers = Server(own).get("/metrics", accept_encoding="gzip")
    found = samples(text)
    labels = {"replica": rig.replica, "group": "policy"}
    assert status == 200 and int(headers[b"content-length"]) == len(text.encode())
    assert value(found, "engine_requests_total") == 3
    assert value(found, "weightwire_engine_version", **labels) == 9
    assert value(found, "weightwire_engine_commits_total", **labels) == 2
    assert value(found, "weightwire_engine_installed_bytes_total", **labels) > 0
    assert value(found, "weightwire_engine_torn", replica=rig.replica) == 0
    stopped_s = value(found, "weightwire_engine_commit_seconds_total", phase="stopped", **labels)
    assert stopped_s == pytest.approx(sum(report.replicas[0].stopped_s for report in reports))
    ours = {key for key in found if key[0].startswith("weightwire_")}
    assert samples(Server(None).get("/metrics")[1]).keys() == ours, "where the engine has no metrics"
    from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST
    from prometheus_client.openmetrics.exposition import generate_latest as openmetrics

    _, text, _ = Server(openmetrics(own_registry), CONTENT_TYPE_LATEST).get("/metrics")
    assert value(samples(text, parse_openmetrics), "weightwire_engine_version", **labels) == 9
    assert text.count("# EOF") == 1


def test_the_record_of_an_engine_that_was_killed_while_it_ended_is_removed_by_the_next_reader(directory: Path) -> None:
    replica = addresses.new_replica_id("plain").replace(
        str(os.getpid()), str((1 << 22) + 1), 1
    )  # no process has that pid
    save_record(replica, ReplicaRecord())
    living = addresses.new_replica_id("plain")
    save_record(living, ReplicaRecord())
    addresses.discover()
    assert [path.name for path in addresses.runtime_dir().iterdir()] == [f"{living}.counts"]


def test_ready_says_whether_all_replicas_of_the_server_serve_a_version(rig: Rig) -> None:
    status, body, _ = Server().get("/ready")
    assert status == 503 and "no replica of this server" in body
    adopt(rig)
    assert Server().get("/ready")[0] == 200
    status, body, _ = Server().get("/ready", "min_version=0")
    assert status == 503 and "serves no version of policy, not 0" in body
    with SyncManager(timeout_s=60) as manager:
        manager.update(ShardSource(checkpoint(1)), 7)
    eventually(lambda: Server().get("/ready", "min_version=7")[0] == 200, "version 7")
    status, body, _ = Server().get("/ready", "min_version=8")
    assert status == 503 and json.loads(body)["why"] == [f"{rig.replica} serves version 7 of policy, not 8"]
    assert Server().get("/ready", "min_version=0&group=critic")[0] == 503
    for nonsense in ("soon", "-1", "1.5", "", "9" * 5000):
        assert Server().get("/ready", f"min_version={nonsense}")[0] == 400
    adopt(rig, state="torn", detail="because")
    status, body, _ = Server().get("/ready")
    assert status == 503 and f"{rig.replica} is torn" in body


def test_each_server_of_ranks_that_share_experts_has_their_replica_and_no_neighbour_has(directory: Path) -> None:
    """External load balancing: each rank has a server of its own, and the card is of the engine core of the first."""
    core = subprocess.Popen(["sh", "-c", "sleep 600 & echo $!; wait"], stdout=subprocess.PIPE, text=True)
    assert core.stdout is not None
    worker = int(core.stdout.readline())
    ask = [sys.executable, "-c", "from inference_plugin.engines.http import replicas_here; print(len(replicas_here()))"]
    # a core's only rank works in the core itself, several have processes of their own
    cases = ((core.pid, 1, 2, 200, "1"), (worker, 2, 4, 200, "1"), (worker, 1, 2, 200, "0"), (core.pid, 1, 1, 503, "0"))
    for pid, tp, ranks, ours, neighbours in cases:
        replica = addresses.new_replica_id("vllm")
        here = addresses.boot_id()
        fields = {"tp_rank": 0, "pp_rank": 0, "boot_id": here, "address": "ipc:///w", "device": "cpu", "free_bytes": 0}
        of_others = [WorkerCard(replica=replica, rank=rank, pid=1, **fields) for rank in range(ranks - 1)]
        workers = (*of_others, WorkerCard(replica=replica, rank=ranks - 1, pid=pid, **fields))
        told = {"engine": "vllm", "engine_version": "0", "model": "m", "tp": tp, "parent_pid": 1}
        card = replica_card(replica=replica, address="", workers=workers, **told)
        addresses.write_card(card)
        assert Server().get("/ready")[0] == ours
        # a process that this one has started as well: another API server of the same launcher, or of a neighbour
        assert subprocess.run(ask, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout.strip() == neighbours
        addresses.remove_card(card)
    subprocess.run(["kill", str(worker)], check=True)
    core.wait(60)


def test_a_closed_group_s_version_is_served_until_another_group_writes_over_it(rig: Rig) -> None:
    def shown() -> str:
        return Server().get("/metrics")[1]

    adopt(rig)
    with SyncManager(timeout_s=60) as policy:
        policy.update(ShardSource(checkpoint(1)), 7)
        policy.close_group()
    eventually(lambda: Server().get("/ready", "min_version=7")[0] == 200, "its weights are still there")
    with SyncManager("head", partial=True, timeout_s=60) as head:
        head.update({"norm.weight": checkpoint(2)["norm.weight"]}, 1)
        eventually(lambda: Server().get("/ready", "min_version=1&group=head")[0] == 200, "the other group's version")
        status, body, _ = Server().get("/ready", "min_version=7")
        assert status == 503 and "serves no version of policy, not 7" in json.loads(body)["why"][0]
        assert 'weightwire_engine_version{group="policy"' not in shown()
        assert 'weightwire_engine_commits_total{group="policy"' in shown()
        head.close_group()
    with SyncManager(timeout_s=60) as policy:
        policy.update(ShardSource(checkpoint(3)), 8)
    eventually(lambda: Server().get("/ready", "min_version=8")[0] == 200, "the group that is open again")
    assert 'weightwire_engine_version{group="head"' not in shown()


def test_every_metric_of_the_dashboard_exists_and_every_metric_is_on_it(rig: Rig) -> None:
    registry = CollectorRegistry()
    with SyncManager(timeout_s=60) as manager:
        UpdateMetrics(manager, registry=registry)
        theirs = {f"{family.name}_total" if family.type == "counter" else family.name for family in registry.collect()}
    known = theirs | {metric.sample for metric in ENGINE_METRICS}
    shown = set(re.findall(r"weightwire_\w+", DASHBOARD.read_text()))
    assert shown == known
    documented = set(re.findall(r"`(weightwire_\w+)`", (ROOT / "docs" / "metrics.md").read_text()))
    assert documented == known


def test_a_trainer_warns_once_of_a_replica_of_another_release(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    addresses.write_card(msgspec.structs.replace(rig.card, package_version="0.0.9"))
    with caplog.at_level(logging.WARNING), SyncManager(timeout_s=60) as manager:
        for version in (1, 2):
            manager.update(ShardSource(checkpoint(version)), version)
    told = [record.getMessage() for record in caplog.records if "0.0.9" in record.getMessage()]
    assert len(told) == 1 and rig.replica in told[0]
