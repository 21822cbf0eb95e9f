"""What no way can do without: the bytes are copied once, to memory that exists, and read once. Two threads do half each.

The copy goes around the cache, which is faster than numpy's.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from benchmarks.batches.data import CONSUMERS, Case, now_s
from inference_plugin.wire.copying import copy_rows
from inference_plugin.wire.digest import digest_bytes

RUNS = 5


def measure_bound(case: Case) -> dict[str, Any]:
    """Seconds of one copy, and of one read by the digest that every way reads with; neither holds Python's lock."""
    size = case.nbytes // CONSUMERS
    sources, targets = ([np.ones(size, np.uint8) for _ in range(CONSUMERS)] for _ in range(2))
    with ThreadPoolExecutor(CONSUMERS) as threads:

        def seconds(work: Callable[[int], object]) -> float:
            taken = []
            for _ in range(RUNS):
                start_s = now_s()
                list(threads.map(work, range(CONSUMERS)))
                taken.append(now_s() - start_s)
            return statistics.median(taken)

        copied_s = seconds(lambda i: copy_rows(targets[i], 0, size, sources[i], 0, size, 1, size, True))
        read_s = seconds(lambda i: digest_bytes(targets[i]))
    return {
        "kind": "bound",
        "way": "memory copy",
        "bytes": case.nbytes,
        "put_seconds": copied_s,
        "fetch_seconds": read_s,
    }
