from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.rig import runtime


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with runtime(monkeypatch) as path:
        yield path
