"""Counts the steps of an engine core, and keeps it from beginning another."""

from __future__ import annotations

import threading

__all__ = ["StepGate"]


class StepGate:
    """The steps of one of several cores that step together: a step of one ends only if all of them take it. So the number of
    steps done is the same on all cores whenever all of them stand. Any thread may call `halt`; the others are the core's own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._done = 0
        self._stepping = False
        self._in_collective = False
        self._turns = 0
        self._limit: int | None = None

    def halt(self) -> int | None:
        """No further step begins. Returns how many have begun; None, and nothing is halted, where the core is in a collective
        of vLLM's own between two steps, because it may wait for the very core that asks for the halt."""
        with self._lock:
            if self._in_collective:
                return None
            self._turns += 1  # the end of the turn before may still be on its way to the core's own thread
            self._limit = None
            return self._done + self._stepping

    def allow(self, steps: int) -> None:
        """While halted: this core steps until it has done `steps` in all."""
        with self._lock:
            self._limit = steps

    def release(self) -> None:
        """Undoes one `halt`. The core may step as it likes, unless it was halted again."""
        with self._lock:
            self._turns = max(0, self._turns - 1)
            if not self._turns:
                self._limit = None

    def open(self) -> None:
        """Undoes every `halt`: no turn follows."""
        with self._lock:
            self._turns, self._limit = 0, None

    @property
    def halted(self) -> bool:
        with self._lock:
            return self._turns > 0

    @property
    def behind(self) -> bool:
        """Whether the core has to step before it may stand."""
        with self._lock:
            return self._limit is not None and self._done < self._limit

    # the core's loop

    def begin(self) -> bool:
        """Whether a step may begin; if so, it has begun."""
        with self._lock:
            if self._turns and (self._limit is None or self._done >= self._limit):
                return False
            self._stepping = True
            return True

    def count(self) -> None:
        """All cores have taken a step."""
        with self._lock:
            self._done += 1
            self._stepping = False

    def end(self) -> None:
        """The core is between two steps. What had begun and was not counted was no step: there was nothing to do."""
        with self._lock:
            self._stepping = False

    def enter_collective(self) -> bool:
        """Before a collective of vLLM's own between two steps. False while halted: it has to wait."""
        with self._lock:
            self._in_collective = not self._turns
            return self._in_collective

    def leave_collective(self) -> None:
        with self._lock:
            self._in_collective = False
