"""A clock that is set must neither end a wait nor make one longer."""

from __future__ import annotations

import re

from tests.support.rig import ROOT


def test_the_time_of_day_is_read_for_people_only_and_no_wait_goes_by_it() -> None:
    clock = re.compile(r"\btime\.time(?:_ns)?\(|\bdatetime\.(?:now|utcnow)\(|from time import")
    found = {
        path.name: clock.findall(path.read_text())
        for package in ("inference_plugin", "trainer_adapters")
        for path in (ROOT / package).rglob("*.py")
    }
    for name in ("tracing.py", "telemetry.py"):  # say to readers of a trace how the two clocks lie to each other
        found.pop(name)
    told = {
        "recorder.py",
        "top.py",
    }  # when a replica committed, and how long ago that is
    assert {name: uses for name, uses in found.items() if uses} == {name: ["time.time("] for name in told}
