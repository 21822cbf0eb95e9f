"""Checks of what a user gives: times, counts, bytes beside a budget; and of the process that uses a store."""

from __future__ import annotations

import contextlib
import math
import operator
import os
from collections.abc import Collection, Iterable
from typing import Any, TypeVar

from inference_plugin.wire.errors import BatchError, ConfigError, StoreFull
from trainer_adapters.batch.records import Owner

__all__ = ["asker", "check_budget", "check_process", "checked_count", "checked_list", "checked_seconds"]

Item = TypeVar("Item")

LONGEST_S = 365 * 86_400.0
"""Longest time limit, in seconds: every wait ends."""


def checked_seconds(name: str, value: Any, *, above_zero: bool = False) -> float:
    """`value` as a time limit in seconds, 0 to a year. Raises `ConfigError` for anything else: nan, infinity, a text, a bool."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and math.isfinite(value) and 0 <= value <= LONGEST_S and (value or not above_zero):
        return float(value)
    raise ConfigError(
        f"{name}={value!r}: give a number of seconds, {'above 0' if above_zero else '0 or more'} and at most a year",
        hint="every wait has a limit; to wait longer, call again",
    )


def checked_count(name: str, value: Any, least: int) -> int:
    """`value` as a whole number of at least `least`. Raises `ConfigError`."""
    with contextlib.suppress(TypeError):  # also of a tensor of several elements
        if not isinstance(value, bool) and (count := operator.index(value)) >= least:
            return count
    raise ConfigError(f"{name}={value!r}: give a whole number, {least} or more", hint="see the method's description")


def checked_list(name: str, values: Iterable[Item], of: str) -> list[Item]:
    """`values` as a list. Raises `BatchError` for one text, whose characters would each be taken for an item, and for what has
    no items."""
    given: object = values
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise BatchError(f"{name}={given!r:.300} is a {type(given).__name__}", hint=f"give a list of {of}")
    return list(values)


def asker(tasks: Collection[str]) -> str:
    """Who needs room, for an error: a put of tasks; without them, an empty tensor."""
    if not tasks:
        return "an empty tensor"
    return f"task {next(iter(tasks))!r}" + (f" and {len(tasks) - 1} others" if len(tasks) > 1 else "")


def check_budget(tasks: Collection[str], needed: int, budget_bytes: int) -> None:
    """Raises `StoreFull` for what no store of this budget can ever hold."""
    if needed > budget_bytes:
        raise StoreFull(
            f"{asker(tasks)} has {needed} bytes, the whole budget is {budget_bytes}",
            hint="give the store a larger budget_bytes, or put smaller tasks",
        )


def check_process(owner: Owner, pid: int) -> None:
    """Raises `BatchError` in a forked child of process `pid`, whose store it is: the child has books of its own, and would write
    over rows of its parent; on Ray it would wait for ever."""
    if os.getpid() != pid:
        raise BatchError(
            f"the store {owner.id} is of process {pid}; this is one that was forked from it",
            hint="make a Store in each process that puts rows",
        )
