"""Imported by vLLM's preloaded process: its engines nap where they would spin.

For a second after each message vLLM's processes look for the next one without a rest, so that each engine takes all cores
whose time it can get, and many engines share those of a test run. Here they look 5000 times a second. An engine that a test
starts with an interpreter of its own spins as ever.
"""

from __future__ import annotations

import time
from functools import partial

from vllm.distributed.device_communicators import shm_broadcast

NAP_S = 0.0002

shm_broadcast.sched_yield = partial(time.sleep, NAP_S)
