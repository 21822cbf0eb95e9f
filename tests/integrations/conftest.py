"""The fixtures of the engine tests, and the mark."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.conftest import checkpoint, runtime

__all__ = ["checkpoint", "runtime"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.integration)
