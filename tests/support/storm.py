"""The storm on the plain rig, with all troubles that there are."""

from __future__ import annotations

import contextlib
import json
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from inference_plugin.net import addresses
from tests.support import poison
from tests.support.hostile import idle_peers, pester, verify_and_leave
from tests.support.plain_engine import ShardSource, checkpoint, digests_expected
from tests.support.rig import Rig
from tests.support.storm_checks import noted_in
from tests.support.troubles import Troubles, make_unwritable


class Storm(Troubles[Rig]):
    sizes = (2, 1, 2)
    kinds = (
        "trainer_killed",
        "trainer_rank_fails",
        "trainer_stopped",
        "paused",
        "installation_fails",
        "way_back_fails",
        "unwritable_files",
        "hostile_messages",
        "idle_connections",
        "verifications_of_nobody",
        "second_manager",
        "worker_killed",
        "coordinator_killed",
        "worker_stopped",
        "coordinator_stopped",
        "boundary_held",
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.known: dict[tuple[int, str], int] = {}

    def start(self, sizes: list[int]) -> list[Rig]:
        return [Rig(self.directory, tp=tp) for tp in sizes]

    def learn_weights(self, seed: int) -> None:
        for tp in set(self.sizes):
            self.known[tp, json.dumps(digests_expected(checkpoint(seed), tp), sort_keys=True)] = seed

    def source(self, seed: int) -> ShardSource:
        return ShardSource(checkpoint(seed))

    def weights_for_a_process(self, seed: int) -> int:
        return seed

    def order_faults(self, replica: Rig, *faults: tuple[int, str]) -> None:
        for rank, step in faults:
            replica.ask("fault", rank=rank, step=step)

    def clear_faults(self, replica: Rig) -> None:
        replica.ask("fault", step="")

    def look_at(self, replica: Rig) -> tuple[str | None, int | None]:
        refusal, digests = replica.look()
        return refusal, self.known.get((replica.tp, json.dumps(digests, sort_keys=True)))

    def pause_state(self, replica: Rig) -> str:
        said = [line for line in replica.ask("state")["log"] if line in ("hold", "resume")]
        return {"hold": "paused", "resume": "serving"}.get(said[-1] if said else "", "never paused")

    def beside_a_trainer_to_be_killed(self) -> contextlib.AbstractContextManager[None]:
        return self._held(self.chance.choice(self.replicas)) if self.chance.random() < 0.5 else contextlib.nullcontext()

    # --- troubles that need the rig's own control -------------------------------------------------------------------------

    @contextlib.contextmanager
    def trainer_rank_fails(self) -> Iterator[None]:
        """Before this update, one of two ranks: killed, raising, or with another model."""
        seed = self.learn_next()
        out = self.directory / f"ranks-{self.number}"
        out.mkdir()
        faults = ("kill", "kill", "kill", "raise", "skip", "double", "another manifest", "manifest raises", "")
        step = {
            "version": self.version,
            "seed": seed,
            "fault": self.chance.choice(faults),
            "at": self.chance.randint(0, 1),
        }
        options = self._drawn_options()
        pids = [
            self.fork(
                "tests.support.storm:trainer_rank", rank=rank, world=2, out=str(out), steps=[step], options=options
            )
            for rank in (0, 1)
        ]
        self.timed("two trainer ranks", lambda: self.ended(pids))
        self.check_between(seed, out / "rank0.step0")
        outcomes = {bool(noted_in(note)[0]) for rank in (0, 1) if (note := out / f"rank{rank}.step0").exists()}
        if len(outcomes) > 1:
            self.violated(f"the two ranks differ: {[note.read_text() for note in out.glob('*.step0')]}")
        yield

    @contextlib.contextmanager
    def boundary_held(self) -> Iterator[None]:
        with self._held(self.chance.choice(self.replicas)):
            yield

    @contextlib.contextmanager
    def hostile_messages(self) -> Iterator[None]:
        chance = random.Random(self.chance.random())
        cards = [rig.card for rig in self.replicas]
        with ThreadPoolExecutor(1) as pool:
            pending = pool.submit(lambda: [address for card in cards for address in pester(card, chance, 40)])
            yield
            gone_too = {w.address for r in self.replicas if r not in self.left() for w in r.card.workers}
            gone_too |= {r.card.address for r in self.replicas if r not in self.left()}
            for address in set(pending.result()) - gone_too:
                self.violated(f"{address} left a message without an answer")

    @contextlib.contextmanager
    def idle_connections(self) -> Iterator[None]:
        everywhere = [a for rig in self.replicas for a in (rig.card.address, *(w.address for w in rig.card.workers))]
        with idle_peers(everywhere, 100):
            yield

    @contextlib.contextmanager
    def verifications_of_nobody(self) -> Iterator[None]:
        def ask() -> None:
            for rig in self.replicas:
                verify_and_leave(rig.card, 5)

        with self._amid(ask):
            yield

    @contextlib.contextmanager
    def unwritable_files(self) -> Iterator[None]:
        directory = addresses.runtime_dir()
        written = [f"{rig.replica}.{kind}" for rig in self.replicas for kind in ("card", "counts")]
        paths = [directory / f"{name}.tmp" for name in (*written, "policy.report")]
        paths = self.chance.sample(paths, k=self.chance.randint(1, len(paths)))
        for path in paths:
            make_unwritable(path)
        yield
        for path in paths:
            path.rmdir()

    @contextlib.contextmanager
    def _held(self, rig: Rig) -> Iterator[None]:
        """The replica comes to no step boundary for a while."""

        def go_on() -> None:
            with contextlib.suppress(OSError, ValueError):  # its coordinator was killed
                rig.ask("go on")

        rig.ask("hold")
        timer = threading.Timer(self.chance.uniform(0.2, 1.0), go_on)
        timer.start()
        yield
        timer.join()


# --- processes of trainers --------------------------------------------------------------------------------------------


def trainer_rank(rank: int, world: int, out: str, steps: list[dict[str, Any]], options: dict[str, Any]) -> None:
    from tests.manager.ranks import one_rank

    poison.spread()
    one_rank(rank, world, out, steps, options)
