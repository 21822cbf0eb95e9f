"""The ranks of an SGLang replica, over real sockets and a real gloo group: what they tell each other arrives on all of them, a
commit costs few collectives, and they decide the same whatever fails."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from inference_plugin.engines.gloo_group import INLINE_BYTES
from inference_plugin.engines.sglang import ranks as sglang_ranks
from inference_plugin.engines.sglang.ranks import Ranks
from inference_plugin.net import addresses
from inference_plugin.wire.errors import CommitFailed, EngineUnsupported, PeerLost, SyncTimeout, TornReplica
from inference_plugin.wire.messages import ReplicaCard
from tests.manager.test_manager import source
from tests.support.managers import SyncManager
from tests.support.rig import eventually, fork, kill

LONG = INLINE_BYTES + 1
SILENT_S = 6
"""Of a rank that hangs: longer than a busy machine keeps one that does not from its turn, and shorter than a manager waits."""
SENT = [[b"", b""], [b"", b"ipc:///b"], [b"long" * LONG, b"x"], [b"a" * INLINE_BYTES, b"b" * LONG]]


def ranks_of_two(rank: int, directory: str, host: str) -> Ranks:
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=2)
    with mock.patch.object(addresses, "boot_id", return_value=host):
        return Ranks(
            SimpleNamespace(tp_rank=rank, tp_size=2, pp_rank=0, pp_size=1, tp_group=SimpleNamespace(ranks=[0, 1]))
        )


def one_rank(rank: int, directory: str, host: str, runtime: str) -> None:
    os.environ["WEIGHTWIRE_RUNTIME_DIR"] = runtime
    ranks = ranks_of_two(rank, directory, host)
    heard = [
        [ranks.broadcast(sent[rank]).decode(), *(data.decode() for data in ranks.gather(sent[rank]))] for sent in SENT
    ]
    found = Path(directory) / f"heard{rank}"
    found.with_suffix(".tmp").write_text(json.dumps(heard))
    found.with_suffix(".tmp").rename(found)


@pytest.mark.parametrize("where", ["one host", "two hosts", "no room for a socket's name"])
def test_ranks_hear_each_other_also_where_there_is_nothing_to_tell(where: str, directory: Path) -> None:
    runtime = directory / ("long" * 30) if where == "no room for a socket's name" else directory
    for rank in range(2):
        host = f"host {rank if where == 'two hosts' else 0}"
        fork(f"{__name__}:one_rank", rank=rank, directory=str(directory), host=host, runtime=str(runtime))
    for rank in range(2):
        found = directory / f"heard{rank}"
        heard = json.loads(eventually(lambda found=found: found.exists() and found.read_text(), found.name))
        assert heard == [[a.decode(), a.decode(), b.decode()] for a, b in SENT]
    assert not [path for path in directory.iterdir() if path.is_socket()]


def one_rank_of_two_of_which_the_second_ends(rank: int, directory: str, host: str) -> None:
    os.environ |= {"WEIGHTWIRE_RUNTIME_DIR": directory, "WEIGHTWIRE_RANK_TIMEOUT_S": "3600"}
    ranks = ranks_of_two(rank, directory, host)
    ranks.gather(b"here")
    if rank == 1:
        os._exit(0)
    said = []
    for tell in (ranks.gather, ranks.broadcast):
        try:
            tell(b"anybody?")
        except PeerLost as error:
            said.append(error.message)
    found = Path(directory) / "said"
    found.with_suffix(".tmp").write_text(json.dumps(said))
    found.with_suffix(".tmp").rename(found)


@pytest.mark.parametrize("hosts", [1, 2])
def test_a_rank_that_ends_is_noticed_long_before_the_time_limit_and_is_lost_for_good(
    hosts: int, directory: Path
) -> None:
    for rank in range(2):
        host = f"host {rank % hosts}"
        fork(f"{__name__}:one_rank_of_two_of_which_the_second_ends", rank=rank, directory=str(directory), host=host)
    found = directory / "said"
    why, again = json.loads(eventually(lambda: found.exists() and found.read_text(), "what the first rank noticed"))
    assert why.startswith("rank 1 has ended" if hosts == 1 else "a rank has ended, or was silent for 3600 s")
    assert again == f"the ranks have lost each other: {why}"


def one_rank_of_two_of_which_one_lacks_the_plug_in(rank: int, directory: str, lacking: int) -> None:
    with mock.patch.object(sglang_ranks, "PRESENCE_TIMEOUT_S", 0.5):
        said = ""
        try:
            if rank != lacking:
                ranks_of_two(rank, directory, "host")
            else:
                dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=2)
                # Not before: torch.distributed calls a group made as soon as this rank is connected, while the other may not be.
                eventually((Path(directory) / f"said{1 - rank}").exists, "the end of the other rank's start")
        except EngineUnsupported as error:
            said = error.message
    found = Path(directory) / f"said{rank}"
    found.with_suffix(".tmp").write_text(said)
    found.with_suffix(".tmp").rename(found)


@pytest.mark.parametrize("lacking", [0, 1])
def test_ranks_of_which_one_lacks_the_plug_in_are_told_so_and_wait_for_nobody(lacking: int, directory: Path) -> None:
    for rank in range(2):
        fork(
            f"{__name__}:one_rank_of_two_of_which_one_lacks_the_plug_in",
            rank=rank,
            directory=str(directory),
            lacking=lacking,
        )
    for rank in range(2):
        found = directory / f"said{rank}"
        eventually(found.exists, f"the end of rank {rank}'s start")
        told = f"the plug-in is live here, but not in every rank of the engine: rank {lacking} (1 in all)"
        assert found.read_text() == ("" if rank == lacking else told)


class Replica:
    """Two ranks of `tests.support.sglang_ranks`."""

    def __init__(self, directory: Path, rank_timeout_s: float) -> None:
        self.directory = directory
        self.fences = 0
        self.faults = directory / "faults"
        self.order()
        environment = {"WEIGHTWIRE_TEST_FAULTS": str(self.faults), "WEIGHTWIRE_RANK_TIMEOUT_S": str(rank_timeout_s)}
        self.pids = [
            fork("tests.support.sglang_ranks:one_rank", environment, rank=rank, directory=str(directory))
            for rank in range(2)
        ]
        eventually(addresses.discover, "the replica's card")

    @property
    def card(self) -> ReplicaCard:
        (card,) = addresses.discover()
        return card

    def order(self, *steps: tuple[int, str, str]) -> None:
        """Faults from now on: rank, step, when."""
        temporary = self.faults.with_suffix(".tmp")
        temporary.write_text(json.dumps([dict(zip(("rank", "step", "when"), each, strict=True)) for each in steps]))
        temporary.replace(self.faults)

    def turns(self, rank: int) -> list[dict[str, Any]]:
        log = self.directory / f"log{rank}"
        whole_lines, _, _ = log.read_text().rpartition("\n") if log.exists() else ("", "", "")
        return [json.loads(line) for line in whole_lines.splitlines()]

    def settle(self) -> None:
        """Until both ranks have logged the turns whose answers have come."""
        self.fences += 1
        temporary = self.directory / "fence.tmp"
        temporary.write_text(str(self.fences))
        temporary.replace(self.directory / "fence")
        for rank in range(2):
            fenced = self.directory / f"fenced{rank}"
            eventually(lambda fenced=fenced: fenced.exists() and fenced.read_text() == str(self.fences), "the turns")

    def during(self, act: Callable[[], object]) -> list[dict[str, Any]]:
        """The turns that `act` took, which are the same on both ranks."""
        self.settle()
        known = len(self.turns(0))
        act()
        self.settle()
        ours, theirs = (self.turns(rank)[known:] for rank in range(2))
        assert ours == theirs
        return ours

    def end(self) -> None:
        (self.directory / "stop").touch()
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                kill(pid)


@pytest.fixture
def replica(directory: Path) -> Iterator[Replica]:
    one = Replica(directory, 60)
    yield one
    one.end()


def test_a_commit_takes_four_collectives_and_a_failed_one_is_undone_or_torn_by_all_ranks_alike(
    replica: Replica,
) -> None:
    with SyncManager(timeout_s=60) as manager:
        manager.update(source(1), 1)
        (turn,) = replica.during(lambda: manager.update(source(2), 2))
        assert turn == {"asked": ["installed 2", "resume here"], "collectives": 4, "refusal": None}
        assert manager.verify(source(2)).ok

        replica.order((1, "install", "before"))

        def fails(kind: type[Exception], match: str) -> None:
            with pytest.raises(kind, match=match):
                manager.update(source(3), 3)

        (turn,) = replica.during(lambda: fails(CommitFailed, "planned fault: install on rank 1; undone on all ranks"))
        assert turn == {"asked": ["resume here"], "collectives": 4, "refusal": None}
        assert manager.verify(source(2)).ok

        replica.order((1, "install", "before"), (0, "undo", "before"))
        (turn,) = replica.during(
            lambda: fails(TornReplica, "and the roll-back failed: .* planned fault: undo on rank 0")
        )
        assert turn["asked"] == ["refuse", "resume here"] and "planned fault: undo on rank 0" in turn["refusal"]
        assert replica.card.state == "torn"

        replica.order()
        (turn,) = replica.during(lambda: manager.update(source(4), 4))
        assert turn == {"asked": ["installed 4", "resume here"], "collectives": 4, "refusal": None}
        assert replica.card.state == "serving" and manager.verify(source(4)).ok


def test_a_commit_that_waits_for_requests_lets_both_ranks_step_and_one_that_is_given_up_leaves_nothing(
    replica: Replica,
) -> None:
    with SyncManager(timeout_s=60) as manager:
        manager.update(source(1), 1)
    (replica.directory / "busy").touch()
    with SyncManager(timeout_s=3, in_flight="drain") as impatient, pytest.raises(SyncTimeout):
        impatient.update(source(2), 2)
    with SyncManager(timeout_s=60, in_flight="drain") as patient:
        assert patient.verify(source(1)).ok
        begun = len(replica.turns(1))
        pending = patient.update_async(source(3), 3)
        eventually(lambda: ["drain"] in [turn["asked"] for turn in replica.turns(1)[begun:]], "the drain")
        with SyncManager(timeout_s=60) as other:
            assert other.verify(source(1)).ok, "read between the turns of the commit"
        (replica.directory / "busy").unlink()
        assert [r.status for r in pending.result(600).replicas] == ["committed"]
        assert patient.verify(source(3)).ok
    replica.settle()
    assert [turn["asked"] for turn in replica.turns(0)] == [turn["asked"] for turn in replica.turns(1)]


def test_a_rank_that_is_silent_while_it_installs_leaves_the_others_refusing(directory: Path) -> None:
    replica = Replica(directory, SILENT_S)
    try:
        with SyncManager(timeout_s=60) as manager:
            manager.update(source(1), 1)
            replica.order((1, "install", "hang"))
            with pytest.raises(PeerLost, match=f"rank 1 was silent for {SILENT_S} s"):
                manager.update(source(2), 2)
        assert "rank 1 was silent" in replica.card.detail and replica.card.state == "torn"
        assert "resume here" not in eventually(lambda: replica.turns(0)[1:], "the end of the turn")[-1]["asked"]
        assert "rank 1 was silent" in replica.turns(0)[-1]["refusal"]
    finally:
        replica.end()
