"""The transport that docs/transports.md writes out, as somebody else's package, on both sides."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from inference_plugin.plugins import plugin_manager
from inference_plugin.transports.registry import transport_named
from inference_plugin.wire.errors import TransportUnavailable
from tests.support.plain_engine import ShardSource, checkpoint, digests_expected
from tests.support.rig import ROOT, Rig
from trainer_adapters import SyncManager

MODULE = "weightwire_docs_file_transport"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the module of the docs in it; for this process it is not loaded yet."""
    text = (ROOT / "docs" / "transports.md").read_text()
    (code,) = [block for block in text.split("```python\n")[1:] if "class FileSender" in block]
    (tmp_path / f"{MODULE}.py").write_text(code.partition("```")[0])
    (tmp_path / "files").mkdir()
    monkeypatch.setenv("FILE_TRANSPORT_DIR", str(tmp_path / "files"))
    monkeypatch.setenv("WEIGHTWIRE_PLUGINS", f"{MODULE}:plugin")
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("install", ["copy", "standby"])
def test_the_transport_of_the_docs_brings_every_version_across(directory: Path, package: Path, install: str) -> None:
    environment = {
        "PYTHONPATH": str(package),
        "WEIGHTWIRE_PLUGINS": f"{MODULE}:plugin",
        "FILE_TRANSPORT_DIR": str(package / "files"),
    }
    rig = Rig(directory, tp=2, **environment)
    plugin_manager.cache_clear()
    try:
        assert transport_named("file").name == "file"
        with SyncManager(transport="file", install=install, timeout_s=60) as manager:  # type: ignore[arg-type]
            for version in (1, 2, 3):
                report = manager.update(ShardSource(checkpoint(version)), version)
                assert [(r.status, r.transport) for r in report.replicas] == [("committed", "file")]
                assert rig.peek() == digests_expected(checkpoint(version), tp=2)
        assert list((package / "files").iterdir()) == []
    finally:
        plugin_manager.cache_clear()
        sys.modules.pop(MODULE, None)
        rig.end()


def test_a_worker_without_it_refuses_with_what_there_is(directory: Path, package: Path) -> None:
    rig = Rig(directory)
    plugin_manager.cache_clear()
    try:
        with (
            SyncManager(transport="file", timeout_s=60) as manager,
            pytest.raises(TransportUnavailable, match=r"file.*shm.*zmq"),
        ):
            manager.update(ShardSource(checkpoint(1)), 1)
        assert rig.peek() == digests_expected(checkpoint(0))
    finally:
        plugin_manager.cache_clear()
        sys.modules.pop(MODULE, None)
        rig.end()
