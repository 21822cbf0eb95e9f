"""Data-parallel ranks of vLLM that share experts are one replica: two engine cores behind an API server, with each expert on one
of the ranks, or a part of each on both. vLLM on CPU lacks two collectives for it, which the tests bring along."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from inference_plugin.wire.errors import CommitFailed, PeerLost, SyncTimeout, TornReplica
from inference_plugin.wire.messages import ReplicaCard
from inference_plugin.wire.reports import ReplicaReport
from tests.engines.conftest import Checkpoint
from tests.engines.test_vllm_faults import PLUGIN, assert_gone, statuses
from tests.engines.test_vllm_one_version import Replay, seen_in
from tests.engines.test_vllm_tokens import COUNT, PROMPTS, reference, source
from tests.support.engines import Server, eventually, free_port
from tests.support.managers import SyncManager

pytestmark = [pytest.mark.engine, pytest.mark.slow]

LAYOUTS = {"experts": ["--enable-expert-parallel"], "parts": []}
ASYNC = {"experts-async": ["--enable-expert-parallel", "--async-scheduling"]}
"""As on a GPU (see `tests/support/async_scheduling.py`)."""
RANKS = (0, 1)
RANK_TIMEOUT_S = 20.0
UPDATES = 8
TOKENS = 150
TRIES = 20


class Shared:
    """A server of two ranks that share experts. Odd versions are of the second model."""

    def __init__(self, server: Server, models: tuple[Path, Path], faults: Path, steps: Path) -> None:
        self.server = server
        self.models = models
        self.faults = faults
        self.steps = steps
        self.version = 0

    @property
    def card(self) -> ReplicaCard:
        (card,) = self.server.cards
        return card

    def model(self, version: int) -> Path:
        return self.models[version % 2]

    def order(self, *faults: dict[str, Any]) -> None:
        temporary = self.faults.with_suffix(".tmp")
        temporary.write_text(json.dumps(faults))
        temporary.replace(self.faults)

    def update(self, sync: SyncManager) -> ReplicaReport:
        self.version += 1
        (report,) = sync.update(source(self.model(self.version)), self.version).replicas
        assert report.status == "committed", report
        return report

    def assert_serves(self) -> None:
        """Both ranks, each beside an idle one."""
        for rank in RANKS:
            told = [self.server.complete(prompt, COUNT, dp_rank=rank) for prompt in PROMPTS]
            assert [status for status, _ in told] == [200] * len(PROMPTS), told
            choices = [answer["choices"][0] for _, answer in told]
            assert [choice["token_ids"] for choice in choices] == reference(self.model(self.version)), rank
            stamps = {answer["metadata"]["weight_version"] for _, answer in told}
            assert stamps == {str(self.version or "default")}
        assert {status.version for status in statuses(self.card)} == {self.version or None}


@pytest.fixture(scope="module", params=list(LAYOUTS))
def shared(request: pytest.FixtureRequest, runtime: Path, checkpoint: Checkpoint) -> Iterator[Shared]:
    a, b = (checkpoint("qwen3_moe", tied=False, seed=seed) for seed in (1, 2))
    faults, steps = runtime / f"faults-{request.param}", runtime / f"steps-{request.param}"
    faults.write_text("[]")
    steps.mkdir()
    server = Server(
        runtime,
        a,
        arguments=["--data-parallel-size", "2", *(LAYOUTS | ASYNC)[request.param]],
        WEIGHTWIRE_TEST_ASYNC=str(int(request.param in ASYNC)),
        WEIGHTWIRE_PLUGINS=PLUGIN,
        WEIGHTWIRE_TEST_FAULTS=str(faults),
        WEIGHTWIRE_TEST_STEPS=str(steps),
        WEIGHTWIRE_RANK_TIMEOUT_S=str(RANK_TIMEOUT_S),
        VLLM_SERVER_DEV_MODE="1",  # has /weight_checker
    )
    with server:
        yield Shared(server, (a, b), faults, steps)
    assert server.leftovers() == [] and server.family() == []


def test_both_ranks_are_one_replica_and_serve_what_a_fresh_engine_would_there_and_back(shared: Shared) -> None:
    card = shared.card
    assert [worker.rank for worker in card.workers] == [0, 1]
    assert len({worker.pid for worker in card.workers}) == 2
    shared.assert_serves()
    for install in ("standby", "copy"):
        with SyncManager(install=install, timeout_s=120) as sync:  # type: ignore[arg-type]
            for _ in range(2):
                report = shared.update(sync)
                assert report.mechanism == "plan" and report.install == install, report
                shared.assert_serves()
                assert sync.verify(source(shared.model(shared.version))).ok
                assert not sync.verify(source(shared.model(shared.version + 1))).ok


@pytest.mark.parametrize("shared", [*LAYOUTS, *ASYNC], indirect=True)
def test_every_step_and_every_token_is_of_one_version_on_both_ranks_while_updates_alternate(shared: Shared) -> None:
    pick = random.Random(0)
    running: list[tuple[list[int], Future[tuple[int, dict[str, Any]]]]] = []
    first = len(notes_of(shared, 0))
    with ThreadPoolExecutor(6) as pool, SyncManager(timeout_s=180) as sync:
        for update in range(UPDATES):
            for rank in ((0, 1), (1,), (0, 1), (0,))[update % 4]:  # at times a busy core beside an idle one
                prompt = [pick.randrange(1, 500) for _ in range(20)]
                running.append((prompt, pool.submit(shared.server.complete, prompt, TOKENS, rank)))
            time.sleep(pick.random() / 4)
            shared.update(sync)
        answers = [(prompt, future.result(300)) for prompt, future in running]
    steps = eventually(
        lambda: equally_many([notes_of(shared, rank) for rank in RANKS]), what="as many steps on both ranks"
    )
    known = [seen_in(model) for model in shared.models]
    sequences = []
    for notes in steps:
        assert all(before == after for before, after in notes), "the weights changed within a step"
        of = [[i for i, values in enumerate(known) if set(before) <= values] for before, _ in notes]
        assert all(len(one) == 1 for one in of), "a mix within one rank"
        sequences.append([one[0] for one in of])
    assert sequences[0] == sequences[1], "the ranks disagree about a step"
    changes = sum(a != b for a, b in zip(sequences[0][first:], sequences[0][first + 1 :], strict=False))
    assert changes >= UPDATES // 2, "the updates were to come while steps ran"

    replay = Replay(shared.models, "keep")
    crossing = 0
    for prompt, (status, answer) in answers:
        assert status == 200, answer
        spans = answer["metadata"]["weight_versions"]
        versions = [span["version"] for span in spans for _ in range(span["start"], span["end"])]
        crossing += len(spans) > 1
        replay.check(prompt, answer["choices"][0]["token_ids"], versions)
    print(
        f"{len(sequences[0])} steps, {changes} changes, {crossing} of {len(answers)} requests across updates, ", end=""
    )
    print(f"{replay.total} tokens, {replay.unexplained} unexplained, {replay.by_other} by the other one too")
    assert crossing, "no request ran across an update"
    assert replay.unexplained == 0
    shared.assert_serves()


def notes_of(shared: Shared, rank: int) -> list[list[list[float]]]:
    path = shared.steps / str(rank)
    whole_lines, _, _ = path.read_text().rpartition("\n") if path.exists() else ("", "", "")
    return [json.loads(line) for line in whole_lines.splitlines()]


def equally_many(notes: list[list[list[list[float]]]]) -> list[list[list[list[float]]]] | None:
    """The notes of both ranks, once they have taken as many steps: they go on for a while after the last request."""
    return notes if len(notes[0]) == len(notes[1]) else None


@pytest.mark.parametrize("in_flight", ["recompute", "abort", "drain"])
def test_requests_of_both_ranks_follow_the_policy(shared: Shared, in_flight: str) -> None:
    with ThreadPoolExecutor(2) as pool, SyncManager(in_flight=in_flight, timeout_s=180) as sync:  # type: ignore[arg-type]
        for _ in range(TRIES):
            steps = len(notes_of(shared, 0))
            asked = [pool.submit(shared.server.complete, PROMPTS[0], 100, rank) for rank in RANKS]
            eventually(lambda steps=steps: len(notes_of(shared, 0)) > steps + 5, what="steps")  # type: ignore[misc]
            before = str(shared.version or "default")
            shared.update(sync)
            answers = [future.result(600) for future in asked]
            if in_flight != "drain" or {str(shared.version)} not in [versions_of(answer) for _, answer in answers]:
                break  # else one of them came to its rank after the update: the steps were others'
    for status, answer in answers:
        assert status == 200, answer
        choice = answer["choices"][0]
        if in_flight == "abort" and choice["finish_reason"] != "length":
            assert choice["finish_reason"] == "abort" and len(choice["token_ids"]) < 100, answer
        else:
            assert len(choice["token_ids"]) == 100
        if in_flight == "drain":
            assert versions_of(answer) == {before}
    shared.assert_serves()


def versions_of(answer: dict[str, Any]) -> set[str]:
    return {span["version"] for span in answer["metadata"]["weight_versions"]}


def test_no_rank_steps_while_it_is_paused_and_requests_of_then_are_answered_with_the_update(shared: Shared) -> None:
    with ThreadPoolExecutor(2) as pool, SyncManager(timeout_s=120) as sync:
        with sync.paused() as report:
            assert [replica.state for replica in report.replicas] == ["paused"]
            stood = [len(notes_of(shared, rank)) for rank in RANKS]
            asked = [pool.submit(shared.server.tokens, PROMPTS[0], COUNT, rank) for rank in RANKS]
            shared.update(sync)
            time.sleep(0.3)
            assert [len(notes_of(shared, rank)) for rank in RANKS] == stood
        expected = reference(shared.model(shared.version))[0]
        assert [future.result(600) for future in asked] == [expected] * 2
    shared.assert_serves()


def test_ranks_step_once_neither_the_user_nor_a_manager_wants_them_to_stand(shared: Shared) -> None:
    def own(path: str) -> None:
        status, answer = shared.server.request("POST", path)
        assert status == 200, answer

    def assert_stands(pool: ThreadPoolExecutor) -> list[Future[list[int]]]:
        stood = [len(notes_of(shared, rank)) for rank in RANKS]
        asked = [pool.submit(shared.server.tokens, PROMPTS[0], COUNT, rank) for rank in RANKS]
        time.sleep(0.3)
        assert [len(notes_of(shared, rank)) for rank in RANKS] == stood
        return asked

    with ThreadPoolExecutor(8) as pool, SyncManager(timeout_s=120) as sync:
        with sync.paused():  # the user's pause and resume within a manager's
            own("/pause?mode=keep")
            own("/resume")
            asked = assert_stands(pool)
            shared.update(sync)
        answers = [(shared.version, future.result(600)) for future in asked]
        own("/pause?mode=keep")  # an update, and a manager's pause, within the user's
        shared.update(sync)
        asked = assert_stands(pool)
        with sync.paused():
            shared.update(sync)
        asked += assert_stands(pool)
        own("/resume")
        answers += [(shared.version, future.result(600)) for future in asked]
        with sync.paused():  # the end of each comes after the beginning of the other
            own("/pause?mode=keep")
        asked = assert_stands(pool)
        with sync.paused():
            own("/resume")
            asked += assert_stands(pool)
        answers += [(shared.version, future.result(600)) for future in asked]
    assert [tokens for _, tokens in answers] == [reference(shared.model(version))[0] for version, _ in answers]
    shared.assert_serves()


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("install", ["copy", "standby"])
def test_an_installation_that_fails_on_one_rank_is_undone_on_both(shared: Shared, install: str, rank: int) -> None:
    with SyncManager(install=install, timeout_s=120) as sync:  # type: ignore[arg-type]
        shared.update(sync)  # under `copy` its bytes are the way back
        with ThreadPoolExecutor(2) as pool:
            asked = [pool.submit(shared.server.complete, PROMPTS[0], 100, one) for one in RANKS]
            shared.order({"rank": rank, "step": "install", "when": "after"})
            with pytest.raises(CommitFailed, match=f"planned fault: install on rank {rank}"):
                sync.update(source(shared.model(shared.version + 1)), shared.version + 1)
            shared.order()
            answers = [future.result(600) for future in asked]
        assert [status for status, _ in answers] == [200, 200]
        assert {answer["metadata"]["weight_version"] for _, answer in answers} == {str(shared.version)}
        shared.assert_serves()
        assert sync.verify(source(shared.model(shared.version))).ok
        shared.update(sync)
    shared.assert_serves()


def test_a_torn_replica_refuses_on_both_ranks_and_is_healed_by_an_update(shared: Shared) -> None:
    with SyncManager(install="copy", timeout_s=120) as sync:
        shared.update(sync)
        shared.order({"rank": 1, "step": "install", "when": "after"}, {"rank": 1, "step": "undo", "when": "before"})
        with pytest.raises(TornReplica, match="planned fault: undo on rank 1"):
            sync.update(source(shared.model(shared.version + 1)), shared.version + 1)
        shared.order()
        assert shared.card.state == "torn" and {status.state for status in statuses(shared.card)} == {"torn"}
        for rank in RANKS:
            status, answer = shared.server.complete(PROMPTS[0], COUNT, dp_rank=rank)
            assert status in (500, 503) and "token_ids" not in json.dumps(answer), answer
        shared.update(sync)
    assert shared.card.state == "serving"
    shared.assert_serves()


@pytest.mark.parametrize("shared", ["experts"], indirect=True)
def test_a_reset_of_the_weights_is_refused_by_name_and_the_version_is_served(shared: Shared) -> None:
    status, answer = shared.server.request("POST", "/weight_checker", {"action": "reset"})
    assert status == 500 and "weights of ranks that share experts can't be reset" in json.dumps(answer), answer
    assert shared.card.state == "serving"
    shared.assert_serves()


@pytest.mark.parametrize("shared", ["experts"], indirect=True)
def test_a_worker_that_hangs_in_its_installation_tears_both_ranks_in_bounded_time(shared: Shared) -> None:
    """The last one for this engine, which ends with the worker."""
    card = shared.card
    shared.order({"rank": 1, "step": "install", "when": "hang"})
    with SyncManager(timeout_s=300) as sync:
        future = sync.update_async(source(shared.model(shared.version + 1)), shared.version + 1)
        eventually(shared.faults.with_name(f"{shared.faults.name}.1").exists, what="rank 1 to install")
        # Its own core and the first core wait equally long for it.
        with pytest.raises((PeerLost, TornReplica), match=r"engine core 1 lost a worker|rank 1 was silent"):
            future.result(600)
        assert shared.card.state == "torn"
        assert set(sync.versions().values()) == {None}, "workers that nobody reaches say the version of before"
        assert [replica.version for replica in sync.replicas()] == [None]
    for rank in RANKS:
        status, answer = shared.server.complete(PROMPTS[0], COUNT, dp_rank=rank)
        assert status in (500, 503), answer
    os.kill(card.workers[1].pid, signal.SIGKILL)
    assert_gone(card)
    eventually(lambda: shared.server.cards == [], what="the card to go")


@pytest.mark.parametrize("shared", ["parts"], indirect=True)
def test_a_core_that_is_silent_costs_a_bounded_wait_and_the_old_version_is_served(shared: Shared) -> None:
    """The last one for this engine: its cores may have lost each other."""
    card = shared.card
    (core,) = {psutil.Process(worker.pid).ppid() for worker in card.workers} - {card.pid}
    with SyncManager(timeout_s=60) as sync:
        shared.update(sync)
        os.kill(core, signal.SIGSTOP)
        try:  # the other core is idle and asks it, or waits for it in a step of vLLM's
            with pytest.raises((PeerLost, SyncTimeout)) as caught:
                sync.update(source(shared.model(shared.version + 1)), shared.version + 1)
        finally:
            os.kill(core, signal.SIGCONT)
        shared.assert_serves()
        if isinstance(caught.value, PeerLost):
            assert "rank 1 was silent for 20 s" in str(caught.value)
            with pytest.raises(PeerLost, match="have lost each other"):
                sync.update(source(shared.model(shared.version + 1)), shared.version + 1)
        else:
            shared.update(sync)
        shared.assert_serves()
        os.kill(core, signal.SIGKILL)
        assert_gone(card)
    eventually(lambda: shared.server.cards == [], what="the card to go")


def test_four_ranks_of_two_cores_are_one_replica(runtime: Path, checkpoint: Checkpoint) -> None:
    """Tensor parallel 2 on each of them: every rank has one of the four experts."""
    a, b = (checkpoint("qwen3_moe", tied=False, seed=seed) for seed in (1, 2))
    arguments = ["--data-parallel-size", "2", "--tensor-parallel-size", "2", "--enable-expert-parallel"]
    with Server(runtime, a, arguments=arguments) as server, SyncManager(timeout_s=180) as sync:
        (card,) = server.cards
        assert [worker.rank for worker in card.workers] == [0, 1, 2, 3]
        assert [worker.tp_rank for worker in card.workers] == [0, 1, 0, 1]
        for version, model in enumerate((b, a), 1):
            (report,) = sync.update(source(model), version).replicas
            assert report.status == "committed", report
            for rank in RANKS:
                assert [server.tokens(prompt, COUNT, dp_rank=rank) for prompt in PROMPTS] == reference(model)
            assert sync.verify(source(model)).ok


def test_behind_an_external_load_balancer_each_rank_has_a_server_and_all_say_what_their_replica_is(
    runtime: Path, checkpoint: Checkpoint
) -> None:
    a, b = (checkpoint("qwen3_moe", tied=False, seed=seed) for seed in (1, 2))
    faults = runtime / "faults-balanced"
    faults.write_text("[]")
    common = ["--data-parallel-size", "2", "--data-parallel-address", "127.0.0.1", "--enable-expert-parallel"]
    common += ["--data-parallel-rpc-port", str(free_port())]
    told = {"WEIGHTWIRE_PLUGINS": PLUGIN, "WEIGHTWIRE_TEST_FAULTS": str(faults)}
    servers = [
        Server(runtime, a, job="balanced", arguments=[*common, "--data-parallel-rank", str(rank)], **told)
        for rank in RANKS
    ]
    with ThreadPoolExecutor() as pool, contextlib.ExitStack() as stack:
        list(pool.map(stack.enter_context, servers))  # each waits for the other
        with SyncManager(install="copy", timeout_s=120) as sync:
            (report,) = sync.update(source(b), 1).replicas
            assert report.status == "committed", report
            for server in servers:
                assert server.tokens(PROMPTS[0], COUNT) == reference(b)[0]
                assert server.request("GET", "/ready?min_version=1")[0] == 200
            faults.write_text(
                json.dumps(
                    [{"rank": 1, "step": "install", "when": "after"}, {"rank": 1, "step": "undo", "when": "before"}]
                )
            )
            with pytest.raises(TornReplica, match="planned fault: undo on rank 1"):
                sync.update(source(a), 2)
            for server in servers:
                status, answer = server.complete(PROMPTS[0], COUNT)
                assert status == 503 and "undo on rank 1" in json.dumps(answer), answer
                status, ready = server.request("GET", "/ready")
                assert status == 503 and "is torn" in ready["why"][0], ready
