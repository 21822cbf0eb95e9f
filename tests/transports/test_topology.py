"""Who is which rank: for any number of trainer ranks and workers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_plugin.transports.topology import SENDER, Process, plan_groups
from inference_plugin.wire.errors import ProtocolError, TransportUnavailable

PROCESSES = st.lists(
    st.builds(Process, st.sampled_from(["one host", "another"]), st.integers(1, 1 << 22)), max_size=64, unique=True
)


def here(*pids: int) -> list[Process]:
    return [Process("here", pid) for pid in pids]


@given(senders=st.integers(1, 64), receivers=PROCESSES)
def test_a_group_per_sender_whose_ranks_are_the_sender_and_all_receivers_without_a_gap(
    senders: int, receivers: list[Process]
) -> None:
    plans = plan_groups(senders, receivers)
    assert [plan.sender for plan in plans] == (list(range(senders)) if receivers else [])
    for plan in plans:
        ranks = [SENDER, *(plan.rank_of(process) for process in receivers)]
        assert ranks == list(range(plan.size)) and plan.receivers == tuple(receivers)


@pytest.mark.parametrize(
    ("senders", "receivers", "sizes"),
    [(1, 0, []), (3, 0, []), (1, 1, [2]), (1, 3, [4]), (3, 1, [2, 2, 2]), (2, 3, [4, 4])],
)
def test_the_edges(senders: int, receivers: int, sizes: list[int]) -> None:
    assert [plan.size for plan in plan_groups(senders, here(*range(100, 100 + receivers)))] == sizes


@given(senders=st.integers(1, 8), receivers=PROCESSES)
def test_both_sides_make_the_same_groups_and_another_membership_makes_others(
    senders: int, receivers: list[Process]
) -> None:
    plans = plan_groups(senders, receivers)
    assert plans == plan_groups(senders, tuple(receivers))
    assert plans != plan_groups(senders + 1, receivers) or not receivers
    assert plans != plan_groups(senders, [*receivers, *here(7)])


def test_two_workers_in_one_process_are_refused() -> None:
    with pytest.raises(TransportUnavailable, match="two workers live in one process"):
        plan_groups(1, here(7, 8, 7))


def test_who_has_no_part_in_it_is_refused_by_name() -> None:
    with pytest.raises(ProtocolError, match="process 9 has no part"):
        plan_groups(1, here(7, 8))[0].rank_of(*here(9))


def test_equal_pids_of_two_hosts_are_two_ranks() -> None:
    both = [Process("one host", 7), Process("another", 7)]
    assert [plan_groups(1, both)[0].rank_of(process) for process in both] == [1, 2]
