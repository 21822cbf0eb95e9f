"""What the engine's own thread does with one group: it alone touches the live model, at a step boundary.

Each step asks the machine first, then works without a lock, then tells the machine how it ended. While a group is
`committing`, nobody else works for it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from inference_plugin.devices import in_use
from inference_plugin.install.contract import Installer
from inference_plugin.plugins import plugin_manager
from inference_plugin.wire.errors import WeightwireError
from inference_plugin.wire.messages import BoxDigest, RankCommit, RankVerify
from inference_plugin.wire.tracing import save, span, under
from inference_plugin.worker.actions import WayBack, WeightsState
from inference_plugin.worker.events import (
    CheckCommitting,
    CheckSealed,
    Finished,
    Install,
    LookAtWeights,
    ReleaseCheck,
    StartUndo,
    Undone,
)
from inference_plugin.worker.group import WeightUpdateGroup
from inference_plugin.worker.work import GroupWork, Update

__all__ = ["EngineSide", "Left", "Reading"]

logger = logging.getLogger(__name__)

PLACING_S = 0.2
"""The engine's thread takes streamed bytes for this long before it shows that it is alive."""

PORTION_BYTES = 8 << 20
PORTION_BYTES_ON_DEVICE = 64 << 20
PORTION_BOXES = 512
"""A verification reads this much at one step boundary, and at most one box more. Each takes some milliseconds."""

Left = Literal["", "more", "changed"]
"""What is left of a verification: nothing; more boxes; or the weights have changed since it began, and it must begin again."""


@dataclass
class Reading:
    """A verification under way, of parameters that had been written `writes` times; `found` is None once all is read."""

    token: str
    writes: int
    found: Iterator[BoxDigest | tuple[str, str]] | None


class EngineSide:
    """One group, as the engine's thread uses it. `ask(event, fields...)` returns the machine's answer to an event, or raises its
    error; `readings` holds the verification of each group."""

    def __init__(
        self,
        group: WeightUpdateGroup,
        work: GroupWork,
        rank: int,
        ask: Callable[..., Any],
        readings: dict[int, Reading],
    ) -> None:
        self.group = group
        self.work = work
        self.rank = rank
        self.ask = ask
        self._readings = readings

    @property
    def installer(self) -> Installer:
        return self.work.installer

    # --- commit ------------------------------------------------------------------------------------------------------

    def check_sealed(self, txn: str, version: int) -> RankCommit | None:
        """First half of a commit: nothing is written. Returns the earlier answer if the transaction is committed."""
        done: RankCommit | None = self.ask(CheckSealed, self.group.name, txn, version)
        if done is None:
            try:
                self.installer.check_terms()
                self.installer.check_model()
            except BaseException:
                self.release()
                raise
        return done

    def release(self) -> None:
        """Takes `check_sealed` back: another rank was not ready."""
        self.ask(ReleaseCheck, self.group.name)

    def share(self) -> bytes:
        """After `check_sealed`: what the other ranks' post-processing needs of this one."""
        return self.installer.share()

    def install(self, txn: str, shares: Sequence[bytes] = ()) -> Left:
        """Writes the live model. Returns "more" while bytes are still to come: call it again then. `shares`: of all ranks."""
        version: int = self.ask(Install, self.group.name, txn)
        update = self.work.update(txn)
        if not update.is_told:
            update.is_told = True
            self._tell_listeners(version, "install")
        with under(update.trace):
            if not update.is_installed and not (update.staging.streams and self._is_under_way(txn, update)):
                with span("install"):
                    self.installer.install(update.staging.segment, shares)
                update.is_installed = True
        return "" if update.is_installed else "more"

    def _is_under_way(self, txn: str, update: Update) -> bool:
        """Places the bytes that arrive within `PLACING_S`. Returns whether more are due; raises the reason if none will come."""
        with span("place"):
            try:
                update.staging.place(self.installer.place, PLACING_S)
            except WeightwireError:
                self.ask(CheckCommitting, self.group.name, txn)  # raises the reason if the transaction was dropped
                raise
        is_sealed: bool = self.ask(CheckCommitting, self.group.name, txn)
        return not is_sealed

    def finish(self, txn: str, install_s: float) -> RankCommit:
        """Makes the new version the installed one. Call it once the version is on all ranks."""
        self.ask(CheckCommitting, self.group.name, txn)
        update = self.work.update(txn)
        with under(update.trace), span("finish"):
            self.installer.finish()
        done: RankCommit = self.ask(Finished, self.group.name, txn, install_s, self.installer.needs_previous)
        save(update.trace)
        return done

    def undo(self, reason: str) -> None:
        """Restores the previous version. If that fails, the group is `torn`, and this raises `TornReplica`."""
        back: WayBack = self.ask(StartUndo, self.group.name)
        trace = self.work.trace(back.undone)
        try:
            self._tell_listeners(back.version, "undo")
            with under(trace), span("undo"):
                self.installer.undo(self._bytes_of(back.txn))
        except Exception as error:
            why, is_ours = WeightwireError.wrap(error).message, isinstance(error, WeightwireError)
            words = "weightwire: group %s could not go back to version %d: %s"
            logger.error(words, self.group.name, back.version, why, exc_info=not is_ours)
            self.ask(Undone, self.group.name, reason, why)
        else:
            self.ask(Undone, self.group.name, reason)

    def _bytes_of(self, txn: str) -> torch.Tensor | None:
        """The previous version's bytes, if they are kept. Raises `DigestMismatch` if they have changed."""
        if not txn or self.work.manifest is None:
            return None
        previous = self.work.update(txn)
        if self.installer.needs_previous:
            previous.staging.check(self.work.manifest, previous.wanted, lambda: None, 1)
        return previous.staging.segment

    def _tell_listeners(self, version: int, step: str) -> None:
        plugin_manager().hook.weightwire_installing(group=self.group.name, version=version, rank=self.rank, step=step)

    # --- verify ------------------------------------------------------------------------------------------------------

    def start_reading(self, token: str) -> None:
        """Begins a verification. An earlier one that was not read to its end is dropped."""
        found = self.installer.read_back()
        self._readings[self.group.member] = Reading(token, self._look_at_weights().writes, found)

    def read_on(self, token: str) -> tuple[RankVerify, Left]:
        """Digests of the next portion of the live parameters."""
        reading = self._readings.get(self.group.member)
        state = self._look_at_weights()
        if reading is None or (reading.token, reading.writes) != (token, state.writes):
            self.stop_reading(token)
            return RankVerify(self.rank, state.version, ()), "changed"
        try:
            boxes, unreadable, left = _next_portion(reading)
        except BaseException:
            self.stop_reading(token)
            raise
        if self._look_at_weights().writes != state.writes:  # the group was opened anew meanwhile
            left = "changed"
        return RankVerify(self.rank, state.version, boxes, unreadable), left

    def stop_reading(self, token: str) -> None:
        """Ends a verification: nobody waits for the rest of it."""
        reading = self._readings.get(self.group.member)
        if reading is not None and reading.token == token:
            self._readings.pop(self.group.member, None)  # the end of its group may have come in between

    def _look_at_weights(self) -> WeightsState:
        state: WeightsState = self.ask(LookAtWeights, self.group.name)
        return state


def _next_portion(reading: Reading) -> tuple[tuple[BoxDigest, ...], dict[str, str], Left]:
    """The next boxes, the parameters that cannot be read with the reasons, and whether more is left."""
    boxes: list[BoxDigest] = []
    unreadable: dict[str, str] = {}
    nbytes, most_bytes = 0, PORTION_BYTES if in_use().type == "cpu" else PORTION_BYTES_ON_DEVICE
    for found in reading.found or ():
        if isinstance(found, BoxDigest):
            boxes.append(found)
            nbytes += math.prod(found.sizes) * getattr(torch, found.dtype).itemsize
        else:
            unreadable[found[0]] = found[1]
        if nbytes >= most_bytes or len(boxes) + len(unreadable) >= PORTION_BOXES:
            return tuple(boxes), unreadable, "more"
    reading.found = None
    return tuple(boxes), unreadable, ""
