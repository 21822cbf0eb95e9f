"""The manager of tests that look at reports: a replica that did not take an update is in the report, and `update` does not raise
for it. What `update` raises by default is tested in `tests/manager/test_outcomes.py`."""

from __future__ import annotations

from typing import Any

import trainer_adapters

__all__ = ["SyncManager"]


class SyncManager(trainer_adapters.SyncManager):
    """`on_failure="report"`, unless the test says otherwise."""

    def __init__(self, group: str = "policy", **options: Any) -> None:
        super().__init__(group, **{"on_failure": "report"} | options)
