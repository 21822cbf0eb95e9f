"""Real engines whose ranks are on two hosts (`--nnodes 2`), updated by a trainer on a third one: over TCP alone, with a key."""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inference_plugin.net import curve
from tests.engines.conftest import Checkpoint
from tests.engines.test_vllm_tokens import COUNT, PROMPTS, reference
from tests.support.engines import session_directory
from tests.support.hosts import Host, can_make_hosts, network
from tests.support.node_engines import ModelTrainer, SglangHead, SglangNode, VllmHead, VllmNode
from tests.support.rig import eventually

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.skipif(not can_make_hosts(), reason="network namespaces need root and iproute2"),
]

ENGINES: dict[str, tuple[Any, Any]] = {"vllm": (VllmHead, VllmNode), "sglang": (SglangHead, SglangNode)}
TP2, PP2 = {"tp": 2, "pp": 1}, {"tp": 1, "pp": 2}
SILENCE_S = 4


class Cluster:
    """Three hosts: an engine on the first two, the trainer on the third."""

    def __init__(self, directory: Path, hosts: list[Host], model_a: Path, model_b: Path) -> None:
        self.directory, self.hosts, self.model_a, self.model_b = directory, hosts, model_a, model_b
        curve.make_key(directory / "key")
        self.faults = directory / "faults"
        self.faults.write_text("[]")
        self.environment = {
            curve.VARIABLE: str(directory / "key"),
            "WEIGHTWIRE_REGISTRY": f"tcp://{hosts[2].address}:7777",
            "WEIGHTWIRE_SILENCE_S": str(SILENCE_S),
            "WEIGHTWIRE_RANK_TIMEOUT_S": "8",
            "WEIGHTWIRE_PLUGINS": "tests.support.fault_plugin:plugin",
            "WEIGHTWIRE_TEST_FAULTS": str(self.faults),
        }
        self.listens = {"WEIGHTWIRE_LISTEN": "tcp://eth0:*"}
        self._engines = itertools.count(1)

    @contextlib.contextmanager
    def engine(
        self, engine: str, sizes: dict[str, int], there: dict[str, str] | None = None, **at_the_head: str
    ) -> Iterator[tuple[Any, Any]]:
        """An engine on its head, and its other node. `there`: what else is set on that one."""
        first, second, _ = self.hosts
        head_kind, node_kind = ENGINES[engine]
        both = self.environment | self.listens
        number = next(
            self._engines
        )  # an engine that was killed leaves its card, which nobody outside its host can judge
        head = head_kind(first, self.directory / f"head{number}", job="nodes", **sizes, **(both | at_the_head))
        node = node_kind(
            second, self.directory / f"node{number}", self.model_a, head, job="nodes", **(both | (there or {}))
        )
        with head, node:
            head.open_here(self.model_a)
            yield head, node

    @contextlib.contextmanager
    def trainer(self) -> Iterator[ModelTrainer]:
        trainer = ModelTrainer(
            self.hosts[2], self.directory / "trainer", self.environment | {"WEIGHTWIRE_JOB": "nodes"}
        )
        try:
            yield trainer
        finally:
            trainer.kill()


@pytest.fixture(scope="module")
def cluster(checkpoint: Checkpoint) -> Iterator[Cluster]:
    model_a, model_b = (checkpoint("llama", tied=False, seed=seed) for seed in (1, 2))
    with session_directory() as directory, network(3) as hosts:
        yield Cluster(directory, hosts, model_a, model_b)


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("sizes", [TP2, PP2], ids=["tp2", "pp2"])
def test_ranks_of_two_hosts_are_one_replica_and_a_fresh_engine_there_and_back(
    cluster: Cluster, engine: str, sizes: dict[str, int]
) -> None:
    with cluster.engine(engine, sizes) as (head, _), cluster.trainer() as trainer:
        (card,) = head.cards
        assert len({card.boot_id} | {worker.boot_id for worker in card.workers}) == 2
        assert head.tokens(PROMPTS, COUNT) == reference(cluster.model_a)
        for version, model, install in (
            (1, cluster.model_b, "copy"),
            (2, cluster.model_a, "copy"),
            (3, cluster.model_b, "standby"),
            (4, cluster.model_a, "standby"),
            (5, cluster.model_b, "streaming"),
        ):
            transport = "stream" if install == "streaming" else "zmq"
            told = trainer.update(model, version, install=install, transport=transport)
            assert told == ["committed", transport, ""]
            assert head.tokens(PROMPTS, COUNT) == reference(model)
            assert trainer.ask("verify", model=str(model)) == [True]
            assert trainer.ask("verify", model=str(cluster.model_a)) == [model == cluster.model_a]


def test_a_host_that_fails_or_is_silent_or_dies_costs_updates_and_mixes_no_versions(
    cluster: Cluster, engine: str
) -> None:
    a, b = cluster.model_a, cluster.model_b
    with cluster.engine(engine, TP2) as (head, node), cluster.trainer() as trainer:
        for version, (install, rank) in zip((1, 3), (("standby", 0), ("copy", 1)), strict=True):
            cluster.faults.write_text("[]")
            assert trainer.update(b, version, install=install) == ["committed", "zmq", ""]
            cluster.faults.write_text(json.dumps([{"rank": rank, "step": "install", "when": "after"}]))
            status, _, error = trainer.update(a, version + 1, install=install)
            assert (status, f"planned fault: install on rank {rank}" in error) == ("CommitFailed", True), error
            assert head.tokens(PROMPTS, COUNT) == reference(b)
            assert trainer.ask("verify", model=str(b)) == [True]
        cluster.faults.write_text("[]")

        cluster.hosts[1].cut()
        began_s = time.monotonic()
        status, _, error = trainer.update(a, 7)
        assert (status, "rank=1" in error) == ("PeerLost", True), error
        assert time.monotonic() - began_s < 60 - SILENCE_S
        cluster.hosts[1].restore()
        assert head.tokens(PROMPTS, COUNT) == reference(b)
        eventually(lambda: trainer.update(a, 8)[0] == "committed", "an update after the link is back")
        assert head.tokens(PROMPTS, COUNT) == reference(a)

        # The other host dies while it installs: nobody knows what it had written, so nobody is served by half of it.
        cluster.faults.write_text(json.dumps([{"rank": 1, "step": "install", "when": "hang"}]))
        trainer.begin("update", model=str(b), version=9, settings={})
        eventually(cluster.faults.with_name("faults.1").exists, "rank 1 installs")
        node.kill()
        status, _, error = trainer.end()
        assert status in ("TornReplica", "PeerLost"), (status, error)
        if engine == "sglang":
            with pytest.raises(AssertionError, match="the driver ended"):  # SGLang ends with its ranks
                head.wait(head.submit(PROMPTS[:1], COUNT))
        else:
            (request,) = head.submit(PROMPTS[:1], COUNT)
            (ended,) = head.wait([request])
            assert ended["finish_reason"] in ("error", "dead") and not ended["tokens"], ended
        assert trainer.update(b, 10)[0] in ("TornReplica", "PeerLost", "SyncTimeout")


def test_a_host_that_dies_between_two_updates_ends_the_next_one_by_name(cluster: Cluster, engine: str) -> None:
    cluster.faults.write_text("[]")
    with cluster.engine(engine, TP2) as (_, node), cluster.trainer() as trainer:
        assert trainer.update(cluster.model_b, 1) == ["committed", "zmq", ""]
        node.kill()
        began_s = time.monotonic()
        status, _, error = trainer.update(cluster.model_a, 2)
        assert status == "PeerLost" and "rank=1" in error, (status, error)
        assert time.monotonic() - began_s < 30


@pytest.mark.parametrize(
    ("there", "why"),
    [
        ({"WEIGHTWIRE_LISTEN": ""}, "rank 1 listens at ipc://"),
        ({"WEIGHTWIRE_LISTEN": "tcp://127.0.0.1:*"}, "rank 1 is not reached from here"),  # of one machine
        ({curve.VARIABLE: ""}, "can be reached from outside this host without authentication"),
        ({curve.VARIABLE: "other"}, "rank 1 is not reached from here"),
        ({"WEIGHTWIRE_DISABLE": "1"}, "but not in every "),
    ],
    ids=["unix sockets", "loopback", "no key", "another key", "no plug-in"],
)
def test_an_engine_whose_other_host_cannot_be_reached_says_so_at_its_start_and_serves_without_us(
    cluster: Cluster, engine: str, there: dict[str, str], why: str
) -> None:
    if there.get(curve.VARIABLE) == "other":
        curve.make_key(cluster.directory / f"other-{engine}")
        there = {curve.VARIABLE: str(cluster.directory / f"other-{engine}")}
    with cluster.engine(engine, TP2, there) as (head, _):
        log = head.log.read_text()
        (told,) = [line for line in log.splitlines() if "weightwire: OFF in this engine" in line]
        assert why in told and "is ready for weight updates" not in log
        assert head.cards == [] and head.tokens(PROMPTS, COUNT) == reference(cluster.model_a)


def test_an_engine_whose_first_host_alone_lacks_the_plug_in_serves_without_us(cluster: Cluster, engine: str) -> None:
    with cluster.engine(engine, TP2, WEIGHTWIRE_DISABLE="1") as (head, node):
        assert head.cards == [] and head.tokens(PROMPTS, COUNT) == reference(cluster.model_a)
        if engine == "sglang":  # a headless worker of vLLM waits to be asked
            assert "weightwire: OFF in this engine, whose first rank would have said so" in node.log.read_text()
