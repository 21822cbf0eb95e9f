"""Chains and trees in which workers relay buckets: pure functions of an order and a degree.

    chain (degree 1)   trainer -> a -> b -> c -> d
    tree (degree 2)    trainer -> a -> b, c    and    trainer -> d -> e, f

Workers that need the same boxes form a class: each class has a chain or a tree of its own.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Literal, TypeAlias, TypeVar

__all__ = ["FanOut", "branches", "classes_of", "degree_of"]

FanOut: TypeAlias = Literal["auto", "direct", "chain", "tree"]
"""How a bucket reaches many replicas. `direct`: the trainer sends it to each. `chain`: to one, and each relays it to one.
`tree`: to two, and each relays it to two. `auto`: `direct` for few replicas, else `tree`."""

TREE_DEGREE = 2
FEW = 3
"""Largest class that `auto` sends to directly: a tree of three would spare one sending."""

T = TypeVar("T")
Key = TypeVar("Key", bound=Hashable)


def degree_of(fan_out: FanOut, members: int) -> int:
    """To how many workers a sender sends, in a class of `members`; 0: to all of them, and nobody relays."""
    if fan_out == "auto":
        fan_out = "direct" if members <= FEW else "tree"
    return {"direct": 0, "chain": 1, "tree": TREE_DEGREE}[fan_out]


def branches(members: Sequence[T], degree: int) -> list[tuple[T, tuple[T, ...]]]:
    """The members that a sender sends to, each with the members that it then has to reach by this same function.

    At most `degree` branches, whose lengths differ by one at most. Degree 0: a branch for each member.
    """
    count = min(degree or len(members), len(members))
    runs = [members[len(members) * i // count : len(members) * (i + 1) // count] for i in range(count)]
    return [(run[0], tuple(run[1:])) for run in runs]


def classes_of(members: Iterable[tuple[Key, T]]) -> list[tuple[T, ...]]:
    """Groups members with equal keys, in their order."""
    found: list[tuple[Key, list[T]]] = []
    for key, member in members:  # few classes, large keys that are mostly the same object: no hashing
        for known, together in found:
            if known is key or known == key:
                together.append(member)
                break
        else:
            found.append((key, [member]))
    return [tuple(together) for _, together in found]
