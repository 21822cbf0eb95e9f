"""What happens to a host while real engines are updated: its runtime directory fills up, an engine ends and starts again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from inference_plugin.wire.errors import ConfigError, PeerLost
from tests.engines.conftest import Checkpoint
from tests.engines.test_vllm_tokens import COUNT, PROMPTS, reference, source
from tests.support.engines import Driver, eventually
from tests.support.rig import kill
from tests.support.sglang_engines import SglangDriver
from tests.support.small_disk import full, small_disk, without_inodes
from trainer_adapters import SyncManager

pytestmark = [pytest.mark.engine, pytest.mark.slow]

ENGINES = ["vllm", "sglang"]


def engine_of(kind: str, runtime: Path, log: Path, *, job: str = "") -> Driver:
    engine = SglangDriver(runtime, job=job) if kind == "sglang" else Driver(runtime, in_process=True, job=job)
    engine.log = log
    return engine


@pytest.fixture
def models(checkpoint: Checkpoint) -> tuple[Path, Path]:
    a, b = (checkpoint("llama", tied=False, seed=seed) for seed in (1, 2))
    return a, b


@pytest.fixture
def small_directory() -> Iterator[Path]:
    with small_disk() as path:
        yield path


@pytest.mark.parametrize("kind", ENGINES)
def test_a_full_runtime_directory_costs_records_and_no_update(
    kind: str, small_directory: Path, models: tuple[Path, Path], tmp_path: Path
) -> None:
    a, b = models
    with engine_of(kind, small_directory, tmp_path / "log") as engine:
        with full(small_directory):
            engine.open(a)
            with (
                SyncManager(timeout_s=5) as manager,
                pytest.raises(PeerLost, match=r"no replica .* No space left on device: .* make room"),
            ):
                manager.update(source(b), 1)  # there is no room for its card, so nobody finds it
            assert engine.tokens(PROMPTS, COUNT) == reference(a)
        with SyncManager(timeout_s=60) as manager:
            eventually(lambda: engine.cards, what="the card that could not be written")
            for version, model in ((1, b), (2, a)):
                assert [r.status for r in manager.update(source(model), version).replicas] == ["committed"]
            with full(small_directory):
                for version, model in ((3, b), (4, a), (5, b)):
                    assert [r.status for r in manager.update(source(model), version).replicas] == ["committed"]
                    assert engine.tokens(PROMPTS, COUNT) == reference(model)
                assert manager.verify(source(b)).ok
            with full(small_directory), SyncManager(timeout_s=60) as newcomer:
                assert [r.status for r in newcomer.update(source(a), 6).replicas] == ["committed"]
        assert engine.tokens(PROMPTS, COUNT) == reference(a)
        assert not [path for path in small_directory.rglob("*") if "tmp" in path.suffix], "half a file"


@pytest.mark.parametrize("kind", ENGINES)
def test_an_engine_that_starts_while_no_file_can_be_made_takes_updates_once_there_is_room(
    kind: str, small_directory: Path, models: tuple[Path, Path], tmp_path: Path
) -> None:
    """Not even the job's directory can be made, nor a socket."""
    a, b = models
    with engine_of(kind, small_directory, tmp_path / "log") as engine:
        with without_inodes(small_directory):
            engine.open(a)
            assert engine.tokens(PROMPTS, COUNT) == reference(a)
        log = (tmp_path / "log").read_text()
        assert "No space left on device" in log and "make room there" in log
        assert "OFF in this engine" not in log and "Traceback" not in log
        with SyncManager(timeout_s=60) as manager:
            eventually(lambda: engine.cards, what="the card that could not be written")
            for version, model in ((1, b), (2, a), (3, b)):
                assert [r.status for r in manager.update(source(model), version).replicas] == ["committed"]
                assert engine.tokens(PROMPTS, COUNT) == reference(model)


def test_a_manager_that_finds_no_room_for_its_socket_says_so(
    small_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIGHTWIRE_RUNTIME_DIR", str(small_directory))
    with SyncManager():
        pass  # the job's directory is there
    with (
        without_inodes(small_directory),
        pytest.raises(ConfigError, match="No space left on device") as raised,
    ):
        SyncManager()
    assert str(small_directory) in raised.value.message and "make room" in raised.value.hint
    with SyncManager():
        pass


@pytest.mark.parametrize("kind", ENGINES)
def test_an_engine_that_starts_again_between_two_updates_takes_the_next_one(
    kind: str, runtime: Path, models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After it ended by itself, and after `kill -9`."""
    a, b = models
    job = f"again-{kind}"
    monkeypatch.setenv("WEIGHTWIRE_RUNTIME_DIR", str(runtime))
    monkeypatch.setenv("WEIGHTWIRE_JOB", job)
    with SyncManager(install="standby", timeout_s=60) as manager:
        for first, updated, killed in ((1, (b, a, b), False), (4, (b, a, b), True), (7, (b, a, b), False)):
            with engine_of(kind, runtime, tmp_path / f"log-{first}", job=job) as engine:
                engine.open(a)
                for version, model in enumerate(updated, first):
                    report = manager.update(source(model), version)
                    assert [r.status for r in report.replicas if r.status != "lost"] == ["committed"], report
                    assert engine.tokens(PROMPTS, COUNT) == reference(model)
                if killed:
                    for process in engine.family():
                        kill(process.pid)
                    engine.stop = lambda: None  # type: ignore[method-assign]
