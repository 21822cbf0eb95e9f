"""Ways in which a promise can still be broken, each shown on the real classes: docs/assurance.md lists them as not prevented.

Each is expected to fail. Whoever mends one is told so by `strict`, takes the mark away and moves the test to its area.
"""

from __future__ import annotations

import pytest

from inference_plugin.wire.errors import CommitFailed
from tests.manager.conftest import Start
from tests.manager.test_manager import holds, source
from tests.support.managers import SyncManager


def gap(promise: str, where: str) -> pytest.MarkDecorator:
    return pytest.mark.xfail(strict=True, reason=f"{promise}: {where}")


@gap("P8", "update.Quorum and `all` count who sealed; a commit that fails afterwards is the replica's alone")
def test_all_or_none_holds_for_installations_that_fail_too(start: Start) -> None:
    fine, failing = start(), start()
    with SyncManager(timeout_s=60, stragglers="all") as manager:
        manager.update(source(1), 1)
        failing.ask("fault", rank=0, step="install")
        with pytest.raises(CommitFailed):
            manager.update(source(2), 2)
    assert holds(failing, 1) and holds(fine, 1)
