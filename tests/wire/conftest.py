from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support.rig import runtime


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with runtime(monkeypatch) as path:
        yield path


settings.register_profile("weightwire", deadline=None)  # no test depends on the machine's speed
settings.load_profile("weightwire")
