"""Background work rests beside decoding for as long as it worked, not for as long as it waited."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from inference_plugin.wire.errors import VersionConflict
from inference_plugin.worker.throttle import DecodingThrottle, TeamTime


class Rests(threading.Event):
    """Notes the rests that it is asked for, and does not take them."""

    def __init__(self) -> None:
        super().__init__()
        self.asked_s: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.asked_s.append(timeout)
        return self.is_set()


def work(processor_s: float) -> float:
    """Computes for at least so long; returns for how long."""
    began_s = time.thread_time()
    while time.thread_time() - began_s < processor_s:
        pass
    return time.thread_time() - began_s


@pytest.mark.parametrize("threads", [1, 4])
def test_all_threads_together_work_for_their_share_of_the_time(threads: int) -> None:
    rests = Rests()
    throttle = DecodingThrottle(0.25, threads, lambda: True, rests)
    worked_s = work(0.02)
    throttle()
    assert rests.asked_s[0] >= worked_s * (4 * threads - 1) > 0

    def in_a_pool() -> None:
        work(0.02)
        throttle()

    thread = threading.Thread(target=in_a_pool)
    thread.start()
    thread.join()
    assert rests.asked_s[1] >= 0.02 * (4 * threads - 1)


def test_a_thread_that_waited_does_not_rest_for_it() -> None:
    rests = Rests()
    throttle = DecodingThrottle(1 / 3, 1, lambda: True, rests)
    time.sleep(1.0)  # as on a host whose processors others use
    throttle()
    assert rests.asked_s[0] < 1.0, "twice a second by the clock"


def test_the_threads_among_which_torch_divides_an_operation_count() -> None:
    counted_s: list[float] = []

    def compute() -> None:
        team_s, own_s = TeamTime(), time.thread_time()
        numbers = torch.ones(1 << 20)
        before_s = team_s()
        while time.thread_time() - own_s < 0.2:
            numbers.sin_()
        team_s()  # sees the threads for the first time
        counted_s.extend([team_s() - before_s, time.thread_time() - own_s])

    threads = torch.get_num_threads()
    torch.set_num_threads(2)  # a thread that begins now takes it over
    try:
        for _ in range(2):  # the second one's OpenMP may give it the first one's threads
            began_s = time.process_time()
            thread = threading.Thread(target=compute)
            thread.start()
            thread.join()
            all_s, (team_s, own_s) = time.process_time() - began_s, counted_s[-2:]
            assert own_s * 1.5 < team_s < all_s
    finally:
        torch.set_num_threads(threads)


def test_threads_that_work_for_others_do_not_count() -> None:
    numbers = torch.ones(1 << 20)
    numbers.sin_()
    own_s, team_s = time.thread_time(), TeamTime()
    before_s = team_s()
    thread = threading.Thread(target=lambda: work(0.1))
    thread.start()
    thread.join()
    assert team_s() - before_s <= time.thread_time() - own_s


def test_an_idle_engine_is_not_given_way_to_and_a_cancelled_update_ends() -> None:
    rests = Rests()
    throttle = DecodingThrottle(1 / 3, 1, lambda: False, rests)
    work(0.001)
    throttle()
    assert not rests.asked_s
    rests.set()
    with pytest.raises(VersionConflict, match="was dropped"):
        throttle()
