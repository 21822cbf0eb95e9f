"""A Weightwire plug-in for SGLang: from when it is loaded on, a scheduler that sleeps on idle sleeps until a socket wakes it.

`WEIGHTWIRE_PLUGINS=tests.support.sleepy_plugin:plugin`; it leaves a file `<WEIGHTWIRE_TEST_ASLEEP>.<pid>` when it falls
asleep, and takes it away when it wakes. SGLang itself looks up once a second.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from inference_plugin.plugins import hookimpl


class SleepyPlugin:
    def __init__(self) -> None:
        from sglang.srt.managers.scheduler_components.idle_sleeper import IdleSleeper

        IdleSleeper.maybe_sleep = _sleep

    @hookimpl
    def weightwire_state_changed(self) -> None:
        """Nothing: being loaded is enough."""


def _sleep(sleeper: Any) -> None:
    asleep = Path(f"{os.environ['WEIGHTWIRE_TEST_ASLEEP']}.{os.getpid()}")
    asleep.touch()
    sleeper.poller.poll(None)
    asleep.unlink()


def __getattr__(name: str) -> SleepyPlugin:
    if name == "plugin":  # made where it is asked for: there SGLang is
        return SleepyPlugin()
    raise AttributeError(name)
