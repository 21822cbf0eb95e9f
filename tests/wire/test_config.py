"""Settings: where they come from, and which are refused."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from inference_plugin.engines.rank_runtime import RankIdentity, RankRuntime
from inference_plugin.transports import zmq
from inference_plugin.wire.config import PIECE_BYTES, Config, settings, unknown_variables, variable_of
from inference_plugin.wire.errors import ArgumentError, ConfigError
from tests.support.plain_engine import PlainEngineModel
from tests.support.rig import ROOT
from trainer_adapters.manager import SyncManager


def test_an_argument_comes_before_the_environment_and_the_environment_before_the_default() -> None:
    environment = {"WEIGHTWIRE_LEASE_S": "7.5", "WEIGHTWIRE_TIMEOUT_S": "90", "WEIGHTWIRE_CHECK_THREADS": ""}
    config = Config.from_environment(environment).but(timeout_s=5, silence_s=None)
    assert (config.timeout_s, config.lease_s, config.silence_s, config.check_threads) == (5.0, 7.5, 10.0, 4)
    assert config.but() == config != Config()


@pytest.mark.parametrize("given", ["8388608", "8192KiB", "8MiB", "8 MiB"])
def test_a_size_may_have_a_unit(given: str) -> None:
    assert Config.from_environment({"WEIGHTWIRE_BUCKET_BYTES": given}).bucket_bytes == 8 << 20
    assert Config(bucket_bytes="1GiB").bucket_bytes == 1 << 30  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "value", [True, 8388608.0, 0, -1, PIECE_BYTES - 1, (1 << 30) + 1, "", "8MB", "auto", "9" * 5000, None]
)
def test_what_is_no_size_is_refused_with_field_variable_value_and_what_is_allowed(value: Any) -> None:
    with pytest.raises(ConfigError) as refused:
        Config(bucket_bytes=value)
    for told in ("bucket_bytes", "WEIGHTWIRE_BUCKET_BYTES", repr(value), "from 4 MiB to 1 GiB"):
        assert told in str(refused.value)


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "1e9", "true", "ten", "8MiB", "0x10", "\udcff"])
def test_no_number_of_the_environment_is_taken_for_another(text: str) -> None:
    for field in ("timeout_s", "lease_s", "control_timeout_s", "silence_s", "rank_timeout_s", "background_share"):
        with pytest.raises(
            ConfigError, match=f"WEIGHTWIRE_{field.upper()}={re.escape(repr(text))}.*{field}.* above 0, "
        ):
            Config.from_environment({variable_of(field): text})
    with pytest.raises(ArgumentError, match="environment=5 is a int"):
        Config.from_environment(5)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"WEIGHTWIRE_CHECK_THREADS.*from 1 to 256"):
        Config.from_environment({"WEIGHTWIRE_CHECK_THREADS": text})


def test_trainer_and_engine_refuse_what_cannot_be_meant_before_they_open_anything(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIGHTWIRE_LEASE_S", "soon")
    with pytest.raises(ConfigError, match="WEIGHTWIRE_LEASE_S='soon'"):
        SyncManager()
    with pytest.raises(ConfigError, match="WEIGHTWIRE_LEASE_S='soon'"):
        RankRuntime(RankIdentity("plain-1-a", 0, tp_rank=0), PlainEngineModel(1, 0, 1))
    assert not [path for path in directory.rglob("*") if path.is_socket()]


def test_a_manager_goes_by_its_own_configuration_and_its_arguments_before_that(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIGHTWIRE_LEASE_S", "soon")  # not read where a configuration is given
    config = Config(lease_s=7, timeout_s=60, bucket_bytes="4MiB")  # type: ignore[arg-type]
    with SyncManager(transport="zmq", timeout_s=30, config=config) as manager:
        assert (manager.settings.timeout_s, manager.settings.lease_s) == (30.0, 7.0)
        assert manager.context.writer.sender(zmq.TRANSPORT).config.bucket_bytes == 4 << 20


def test_a_misspelt_variable_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTWIRE_LEASE_S", "3")
    monkeypatch.setenv("WEIGHTWIRE_LEASES", "3")
    assert unknown_variables() == ["WEIGHTWIRE_LEASES"]


def test_buckets_that_exceed_the_free_memory_are_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=16 << 20))
    with caplog.at_level(logging.WARNING):
        Config(bucket_bytes=8 << 20).warn_if_short_of_memory(2 * (8 << 20))
        assert caplog.text == ""
        Config(bucket_bytes=9 << 20).warn_if_short_of_memory(2 * (9 << 20))
    assert "bucket_bytes=9437184" in caplog.text and "16777216 bytes" in caplog.text


def test_the_page_of_the_documentation_has_every_setting_as_the_code_has_it() -> None:
    page = (ROOT / "docs/configuration.md").read_text()
    rows = [f"| `{s.variable}` | {s.default} | {s.side} | {s.text} | {s.allowed} |" for s in settings()]
    ours = tuple(f"| `{s.variable}` |" for s in settings())
    assert [line for line in page.splitlines() if line.startswith(ours)] == rows


def test_no_variable_is_read_that_the_documentation_does_not_know() -> None:
    page = (ROOT / "docs/configuration.md").read_text()
    read = set()
    for package in ("inference_plugin", "trainer_adapters"):
        for path in Path(ROOT / package).rglob("*.py"):
            read |= set(re.findall(r"\bWEIGHTWIRE_[A-Z_]*[A-Z]", path.read_text()))
    assert {name for name in read if f"`{name}`" not in page} == set()
