"""What happens once a version is installed: it changes no answer, and what is not the same on all ranks is no success."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from inference_plugin.net.channel import Channel
from inference_plugin.plugins import hookimpl
from inference_plugin.wire.errors import VersionConflict
from inference_plugin.wire.messages import CloseGroup, Done
from tests.manager.conftest import Start
from tests.manager.test_manager import holds, source
from tests.support.managers import SyncManager
from tests.support.plain_engine import ShardSource, checkpoint


class FailingListener:
    @hookimpl
    def weightwire_committed(self, version: int) -> None:
        raise RuntimeError(f"a listener's own trouble with version {version}")


failing_listener = FailingListener()


def test_a_coordinators_listener_that_raises_changes_no_answer_and_the_engine_goes_on(start: Start) -> None:
    rig = start(tp=2, WEIGHTWIRE_PLUGINS="tests.manager.test_after_the_commit:failing_listener")
    with SyncManager(timeout_s=60) as manager:
        for version in (1, 2):
            assert [r.status for r in manager.update(source(version), version).replicas] == ["committed"]
            assert holds(rig, version)
    assert rig.ask("state")["refusal"] is None


class FailingSource(ShardSource):
    """A user's own source, whose record of the engine's dtypes can't be read, or is of another form."""

    recorded: dict[str, Any] | None = None

    @property
    def engine_dtypes(self) -> dict[str, Any]:
        if self.recorded is None:
            raise RuntimeError("a source's own trouble")
        return self.recorded


def test_a_source_that_raises_once_its_version_is_installed_changes_no_answer(start: Start) -> None:
    rig = start()
    with SyncManager(timeout_s=60) as manager:
        report = manager.update(FailingSource(checkpoint(1)), 1)
        assert [r.status for r in report.replicas] == ["committed"] and report.engine_dtypes == {}
        assert holds(rig, 1)
        of_another_form = FailingSource(checkpoint(2))
        of_another_form.recorded = {"*": torch.bfloat16}
        assert manager.update(of_another_form, 2).engine_dtypes == {"*": "torch.bfloat16"}
    assert holds(rig, 2)


def test_a_replica_of_which_one_rank_lost_the_version_takes_its_number_again_with_the_same_weights_alone(
    start: Start,
) -> None:
    rig = start(tp=2)
    with SyncManager(timeout_s=60) as manager:
        manager.update(source(1), 1)
        with Channel(rig.card.workers[1].address) as one_rank:
            one_rank.request(CloseGroup("policy"), Done, timeout_s=60)  # from here on it knows of no version
        with pytest.raises(VersionConflict, match="version 1 is served with other weights"):
            manager.update(source(2), 1)
        assert holds(rig, 1)
        assert manager.update(source(1), 1).failed == ()
        assert holds(rig, 1) and manager.versions() == {rig.replica: 1}
        assert manager.update(source(2), 2).failed == ()
    assert holds(rig, 2)
