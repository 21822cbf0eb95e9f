"""The command line, as an operator runs it, beside a living replica."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from inference_plugin.wire import curve
from inference_plugin.wire.config import Config
from tests.support.plain_engine import ShardSource, checkpoint
from tests.support.rig import Rig, eventually, fork, kill
from trainer_adapters import SyncManager


def run(*arguments: str, **environment: str) -> tuple[int, Any]:
    """Exit status and what `--json` printed."""
    done = subprocess.run(
        [sys.executable, "-m", "inference_plugin.cli", *arguments, "--json"],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | environment,
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def plug_in_that_fails(ready: str) -> None:
    """A process of an SGLang that the plug-in doesn't know: here there is none at all."""
    import contextlib
    import signal

    from inference_plugin.plugin import register_sglang
    from inference_plugin.wire.errors import EngineUnsupported

    with contextlib.suppress(EngineUnsupported):  # as SGLang does
        register_sglang()
    Path(ready).touch()
    signal.pause()


def test_status_and_doctor_tell_of_replicas_versions_and_processes(directory: Path) -> None:
    rig = Rig(directory, tp=2)
    try:
        with SyncManager(timeout_s=60) as manager:
            manager.update(ShardSource(checkpoint(1)), 7)
            code, status = run("status")
            assert code == 0 and rig.replica in json.dumps(status) and "7" in json.dumps(status)
            assert [replica["groups"] for replica in status["replicas"]] == [{"policy": "current"}]
            manager.settings.catch_up = "never"
            late = Rig(directory)
            try:
                groups = {replica["card"]["replica"]: replica["groups"] for replica in run("status")[1]["replicas"]}
                assert groups == {rig.replica: {"policy": "current"}, late.replica: {"policy": "joining"}}
            finally:
                late.end()
            code, doctor = run("doctor")
            assert code == 0 and doctor["problems"] == []
            (replica,) = doctor["facts"]["replicas"]
            assert replica["replica"] == rig.replica
            assert set(replica["processes"].values()) == {rig.pid, *(worker.pid for worker in rig.card.workers)}
    finally:
        rig.end()


def test_doctor_tells_of_an_engine_that_runs_without_the_plug_in_until_it_ends(directory: Path) -> None:
    ready = directory / "ready"
    environment = {"WEIGHTWIRE_RUNTIME_DIR": str(directory)}
    pid = fork("tests.manager.test_cli:plug_in_that_fails", environment, ready=str(ready))
    eventually(ready.exists, "the process to have noted its problem")
    code, doctor = run("doctor")
    (problem,) = doctor["problems"]
    assert code == 1 and problem.startswith(f"runs without the plug-in: sglang-{pid}-")
    assert "sglang unknown is not the engine this plug-in knows" in problem and "known to work: sglang" in problem
    kill(pid)
    assert run("doctor")[1]["problems"] == []
    assert not list(directory.glob("**/*.problem"))


def test_doctor_tells_where_an_engine_s_own_list_leaves_the_plug_in_out(directory: Path) -> None:
    for variable, value, complaint in (
        ("VLLM_PLUGINS", "other", True),
        ("VLLM_PLUGINS", "", True),
        ("VLLM_PLUGINS", "other,weightwire", False),
        ("SGLANG_PLUGINS", "other", True),
        ("SGLANG_PLUGINS", "", False),
    ):
        code, doctor = run("doctor", **{variable: value})
        assert (code, any(variable in problem for problem in doctor["problems"])) == (int(complaint), complaint)


def test_config_shows_where_each_value_comes_from_and_refuses_what_cannot_be_meant(directory: Path) -> None:
    code, rows = run("config", WEIGHTWIRE_LEASE_S="5", WEIGHTWIRE_BUCKET_BYTES="64MiB")
    shown = {row["setting"]: (row["value"], row["from"]) for row in rows}
    assert code == 0 and set(Config.__struct_fields__) <= set(shown)
    assert shown["lease_s"] == (5.0, "WEIGHTWIRE_LEASE_S") and shown["timeout_s"] == (120.0, "default")
    assert shown["bucket_bytes"] == (64 << 20, "WEIGHTWIRE_BUCKET_BYTES")
    assert shown["WEIGHTWIRE_RUNTIME_DIR"] == (str(directory), "WEIGHTWIRE_RUNTIME_DIR")
    code, doctor = run("doctor", WEIGHTWIRE_LEASE_S="soon", WEIGHTWIRE_LEASES="5")
    misspelt, senseless = doctor["problems"]
    assert code == 1 and "WEIGHTWIRE_LEASES" in misspelt and "WEIGHTWIRE_LEASE_S='soon'" in senseless
    command = [sys.executable, "-m", "inference_plugin.cli", "config"]
    environment = os.environ | {"WEIGHTWIRE_LEASE_S": "soon"}
    refused = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert refused.returncode == 2 and "WEIGHTWIRE_LEASE_S='soon' (field lease_s)" in refused.stderr


def test_keygen_makes_a_key_once_and_never_writes_over_one(directory: Path, monkeypatch: Any) -> None:
    command = [sys.executable, "-m", "inference_plugin.cli", "keygen", str(directory / "key")]
    assert subprocess.run(command, capture_output=True, timeout=120, check=False).returncode == 0
    monkeypatch.setenv(curve.VARIABLE, str(directory / "key"))
    made = curve.job_key()
    again = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert again.returncode == 2 and "File exists" in again.stderr
    assert curve.job_key() == made is not None
