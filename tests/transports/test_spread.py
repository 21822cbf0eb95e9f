"""Who sends to whom: everybody once, nobody too much, the same every time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_plugin.transports.spread import branches, classes_of, degree_of


def spread(members: Sequence[int], degree: int, depth: int = 1) -> list[tuple[int, int]]:
    """Everybody who is reached, with the number of hops."""
    chosen = branches(members, degree)
    assert len(chosen) <= (degree or len(members))
    found = []
    for child, below in chosen:
        found += [(child, depth), *spread(below, degree, depth + 1)]
    return found


@given(count=st.integers(0, 300), degree=st.integers(0, 8))
@settings(deadline=None)
def test_every_member_is_reached_once_in_the_given_order(count: int, degree: int) -> None:
    members = list(range(count))
    reached = spread(members, degree)
    assert [member for member, _ in reached] == members
    assert branches(members, degree) == branches(tuple(members), degree)


@given(count=st.integers(1, 300), degree=st.integers(2, 8))
@settings(deadline=None)
def test_a_tree_is_as_deep_as_a_full_one_and_its_branches_are_alike(count: int, degree: int) -> None:
    deepest = max(depth for _, depth in spread(range(count), degree))
    within, hops = degree, 1
    while within < count:  # what a full tree of so many hops holds
        hops += 1
        within += degree**hops
    assert deepest == hops
    sizes = [len(below) for _, below in branches(range(count), degree)]
    assert max(sizes) - min(sizes) <= 1


@given(count=st.integers(1, 100))
@settings(deadline=None)
def test_a_chain_is_a_chain_and_direct_is_direct(count: int) -> None:
    assert [depth for _, depth in spread(range(count), 1)] == list(range(1, count + 1))
    assert branches(range(count), 0) == [(member, ()) for member in range(count)]


def test_auto_sends_directly_to_few() -> None:
    assert [degree_of("auto", members) for members in (0, 1, 3, 4, 256)] == [0, 0, 0, 2, 2]
    assert [degree_of(way, 9) for way in ("direct", "chain", "tree")] == [0, 1, 2]  # type: ignore[arg-type]
    with pytest.raises(KeyError):
        degree_of("star", 9)  # type: ignore[arg-type]


@given(keys=st.lists(st.integers(0, 3).map(lambda key: (key, key)), max_size=20))
@settings(deadline=None)
def test_a_class_is_all_with_equal_needs_in_their_order(keys: list[tuple[int, int]]) -> None:
    classes = classes_of((key, (key, i)) for i, key in enumerate(keys))
    assert sorted(member for members in classes for member in members) == sorted((key, i) for i, key in enumerate(keys))
    for members in classes:
        assert len({key for key, _ in members}) == 1 and list(members) == sorted(members)
    assert len(classes) == len(set(keys))
