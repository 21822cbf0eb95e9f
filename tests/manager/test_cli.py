"""The command line, as an operator runs it, beside a living replica.

Most commands run in forks of a process that has imported torch: that saves two seconds each. Those whose start is what the test
is about are started the ordinary way.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from inference_plugin import __version__
from inference_plugin.cli.checkpoints import Checkpoint
from inference_plugin.net import addresses, curve, diagnosis
from inference_plugin.net.records import record_of
from inference_plugin.wire.config import OTHER_VARIABLES, Config
from inference_plugin.wire.errors import ManifestMismatch
from inference_plugin.wire.reports import gib
from tests.manager.test_relatives import tear
from tests.support.commands import weightwire
from tests.support.plain_engine import ShardSource, checkpoint, digests_expected
from tests.support.rig import Rig, eventually, fork, kill
from tests.support.small_disk import full, small_disk
from trainer_adapters import SyncManager


def run(*arguments: str, **environment: str) -> tuple[int, Any]:
    """Exit status and what `--json` printed."""
    code, printed, told = shown(*arguments, "--json", **environment)
    assert printed, told
    document = json.loads(printed)
    assert document.pop("schema") == 1
    return code, document


def shown(*arguments: str, **environment: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of a command whose output goes into files, in a process that has imported torch."""
    return weightwire(arguments, environment)


def plug_in_that_fails(ready: str) -> None:
    """A process of an SGLang that the plug-in doesn't know: here there is none at all."""
    import signal

    from inference_plugin.plugin import register_sglang

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
            assert "replicas of other jobs run here: default; --job NAME" in shown("status", "--job", "misspelt")[1]
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
            _, printed, _ = shown("doctor")
            processes = ", ".join(f"{part} {pid}" for part, pid in replica["processes"].items())
            assert f"replicas:\n  replica {rig.replica}, engine plain " in printed
            assert f"processes {processes}\n" in printed and "broken_plugins: none\n" in printed
            assert not set("{}[]") & set(printed), "no value is printed as Python writes it"
    finally:
        rig.end()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("status", "--job", "../elsewhere"), "--job='../elsewhere': use up to 40 letters"),
        (("doctor", "--job", ""), "--job='': use up to 40 letters"),
        (("push", "not-there"), "not-there does not exist"),
        (("verify", "--checkpoint", "not-there"), "not-there does not exist"),
        (("verify", "--checkpoint", ".", "--timeout-s", "nan"), "NaN is no time"),
        (("push", ".", "--timeout-s", "inf"), "inf is not in the range"),
        (("push", ".", "--version", str(2**62)), "is not in the range"),
        (("close", "policy"), "no replica of job 'default' runs; looked in"),
        (("check-engine", "vllm"), "vllm is no wheel (.whl), no source archive (.tar.gz) and no version such as"),
    ],
)
def test_a_mistake_in_an_argument_is_told_with_status_2_and_leaves_nothing(
    directory: Path, arguments: tuple[str, ...], told: str
) -> None:
    code, printed, error = shown(*arguments)
    assert (code, printed) == (2, "") and told in error and "Traceback" not in error
    assert not (directory.parent / "elsewhere").exists()


def starts_an_engine(ready: str) -> None:
    """A process that loads its model, and goes on doing so."""
    import signal

    diagnosis.note_start("vllm", "model m")
    Path(ready).touch()
    signal.pause()


def test_status_shows_an_engine_that_starts_until_its_process_ends(directory: Path) -> None:
    ready = directory / "ready"
    environment = {"WEIGHTWIRE_RUNTIME_DIR": str(directory)}
    pid = fork("tests.manager.test_cli:starts_an_engine", environment, ready=str(ready))
    eventually(ready.exists, "the process to have noted its start")
    assert run("status")[1]["starting"] == [f"vllm process {pid}: model m"]
    printed = shown("status")[1]
    assert f"starting: vllm process {pid}" in printed and "no replica" not in printed
    assert f"runs; looked in {directory}/default; starting: vllm process {pid}: model m" in shown("close", "policy")[2]
    code, doctor = run("doctor")
    assert code == 0 and doctor["facts"]["starting"] == [f"vllm process {pid}: model m"]
    assert "no problem found; an engine is starting" in shown("doctor")[1]
    kill(pid)
    assert run("status")[1]["starting"] == [] and not list(directory.glob("**/*.starting"))


def loads_the_model(ready: str) -> None:
    """The process that loads the model, started by one that was asked for the engine."""
    parent = diagnosis.note_start("vllm", "model m")
    if os.fork() == 0:
        starts_an_engine(ready)
    os.wait()
    parent.unlink(missing_ok=True)


def test_the_process_that_loads_the_model_takes_the_start_over_from_those_that_it_descends_from(
    directory: Path,
) -> None:
    ready = directory / "ready"
    diagnosis.note_start("sglang", "another engine's")
    pid = fork("tests.manager.test_cli:loads_the_model", {"WEIGHTWIRE_RUNTIME_DIR": str(directory)}, ready=str(ready))
    eventually(ready.exists, "the second process to have noted its start")
    other, told = sorted(run("status")[1]["starting"])
    assert other == f"sglang process {os.getpid()}: another engine's"
    child = int(told.split()[2].rstrip(":"))
    assert told == f"vllm process {child}: model m" and child != pid
    kill(child)
    eventually(lambda: len(run("status")[1]["starting"]) == 1, "the start to end with its process")


def test_an_engine_that_outlives_the_process_that_started_it_is_orphaned_and_doctor_says_so(directory: Path) -> None:
    rig = Rig(directory, RIG_PARENT=str(os.getpid()))  # which is not its parent: that is as if it had ended
    try:
        for command in ("status", "top"):
            assert [replica["state"] for replica in run(command)[1]["replicas"]] == ["orphaned (serving)"]
        code, doctor = run("doctor")
        (problem,) = doctor["problems"]
        assert code == 1 and f"{rig.replica}: orphaned: process {os.getpid()}, which started this engine" in problem
    finally:
        rig.end()


def test_status_says_where_it_finds_no_replica_that_a_full_disk_may_be_why(directory: Path) -> None:
    with small_disk() as path:
        assert "PROBLEM" not in shown("status", WEIGHTWIRE_RUNTIME_DIR=str(path))[1]
        with full(path):
            printed = shown("status", WEIGHTWIRE_RUNTIME_DIR=str(path))[1]
    assert "no replica of job" in printed
    assert "PROBLEM: nothing can be written into" in printed and "No space left" in printed


def test_status_names_the_processes_that_hang_and_does_not_tell_the_reader_to_run_status(directory: Path) -> None:
    """It asks all of them at once."""
    rigs = [Rig(directory) for _ in range(3)]
    pids = [rig.worker_pid() for rig in rigs]
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        began_s = time.monotonic()
        _, printed, _ = shown("status")
        assert time.monotonic() - began_s < 15
        assert printed.count("PROBLEM: rank 0: no reply from ") == 3
        assert all(f" within 5 s: process {pid} hangs or is busy" in printed for pid in pids)
        assert "weightwire status" not in printed
    finally:
        for pid, rig in zip(pids, rigs, strict=True):
            os.kill(pid, signal.SIGCONT)
            rig.end()


def test_status_says_once_that_a_replica_is_torn_and_why(directory: Path) -> None:
    rig = Rig(directory, tp=2)
    try:
        with SyncManager(timeout_s=60) as manager:
            tear(rig, manager)
        _, printed, _ = shown("status")
        (rank,) = (text for text in printed.splitlines() if text.startswith("  rank 0: policy: "))
        assert ", torn, " in rank and "torn, torn" not in rank
        assert "PROBLEM: torn: group 'policy': " in printed
    finally:
        rig.end()


def test_top_says_that_no_replica_runs_in_place_of_an_empty_table(directory: Path) -> None:
    code, printed, _ = shown("top", "--once")
    assert code == 0 and printed.startswith(
        "no replica of job 'default' runs; `weightwire status` says where it looked"
    )


def test_top_shows_versions_how_far_behind_they_are_and_the_last_updates(directory: Path) -> None:
    rig = Rig(directory, tp=2)
    try:
        with SyncManager(timeout_s=60) as manager:
            for version in (7, 9):
                report = manager.update(ShardSource(checkpoint(version)), version)
            eventually(lambda: [group.version for group in record_of(rig.card).groups.values()] == [9], "the record")
            late = Rig(directory)
            try:
                code, look = run("top")
                assert code == 0 and look["job"] == "default"
                groups = {replica["replica"]: replica["groups"] for replica in look["replicas"]}
                (group,) = groups[rig.replica]
                assert (group["version"], group["behind"], group["commits"], group["failures"]) == (9, 0, 2, {})
                (update,) = look["updates"]
                assert (update["version"], update["bytes"], update["replicas"]) == (9, report.bytes, 1)
                assert update["bytes_per_s"] == report.bytes / report.seconds
                for arguments in (("top",), ("top", "--once")):
                    code, printed, _ = shown(*arguments)
                    assert (
                        code == 0
                        and rig.replica in printed
                        and late.replica in printed
                        and gib(report.bytes) in printed
                    )
                (directory / "default" / "policy.report").write_bytes(b"cut")
                for arguments in (("top", "--once"), ("status",)):
                    code, printed, told = shown(*arguments)
                    assert code == 0 and rig.replica in printed and "policy.report can't be read" in told
            finally:
                late.end()
    finally:
        rig.end()


def test_push_brings_a_checkpoint_into_running_replicas_and_says_who_has_it(directory: Path, tmp_path: Path) -> None:
    rig = Rig(directory)
    try:
        tensors = {name: tensor for name, tensor in checkpoint(1).items() if name != "head.weight"}
        save_file({name: tensor.contiguous() for name, tensor in checkpoint(1).items()}, tmp_path / "model.safetensors")
        code, pushed = run("push", str(tmp_path), "--verify")
        assert (code, pushed["ok"], pushed["version"]) == (0, True, 1), pushed
        assert [replica["status"] for replica in pushed["report"]["replicas"]] == ["committed"]
        assert run("push", str(tmp_path))[1]["version"] == 2, "one more than any replica serves"
        code, printed, _ = shown("push", str(tmp_path), "--verify")
        assert code == 0 and printed.startswith("policy version 3: 1 of 1 replicas serve it, ")
        assert "\npolicy: 1 of 1 replicas hold what the trainer holds\n" in printed
        assert "\nlast update: policy version 3: 1 of 1 replicas serve it, " in shown("status")[1]
        code, _, told = weightwire(["push", str(tmp_path)], into=Path("/dev/full"))
        assert code == 0 and "No space left on device" in told, "what it has done does not change with who hears of it"
        code, refused = run("push", str(tmp_path), "--version", "5", "--dtype", "float64")
        assert code == 1 and refused["ok"] is False and refused["error"]["kind"] == "ManifestMismatch"
        assert refused["version"] == 5
        same = ["--checkpoint", str(tmp_path / "model.safetensors")]
        assert shown("verify", *same)[0] == 0
        code, differs, _ = shown("verify", *same, "--dtype", "float64")
        assert code == 1 and "in the engine and torch.float64 in the source" in differs
        assert (
            "NOT COMPARED (0 boxes)\n  no weight-update group is named 'other'"
            in shown("verify", *same, "--group", "other")[1]
        )
        assert shown("verify", *same, "--dtype", "float33")[0] == 2
        extra = {name: tensor.contiguous() for name, tensor in tensors.items()} | {"mtp.weight": torch.ones(2)}
        save_file(extra, tmp_path / "extra.safetensors")
        extras = ["verify", "--checkpoint", str(tmp_path / "extra.safetensors")]
        assert "\n  not compared, no rank took them under these names: mtp.weight (1 in all)" in shown(*extras)[1]
        assert run(*extras)[1]["replicas"][0]["not_compared"] == ["mtp.weight"]
        (tmp_path / "extra.safetensors").unlink()
        longer = tensors | {
            "embed.weight": torch.cat([tensors["embed.weight"], torch.ones(3, tensors["embed.weight"].shape[1])])
        }
        save_file({name: tensor.contiguous() for name, tensor in longer.items()}, tmp_path / "longer.safetensors")
        rows = len(tensors["embed.weight"])
        code, differs, _ = shown("verify", "--checkpoint", str(tmp_path / "longer.safetensors"))
        assert code == 1 and f"embed.weight[{rows}:{rows + 3}, 0:" in differs and "in no rank of the engine" in differs
        (tmp_path / "longer.safetensors").unlink()
        del tensors["embed.weight"]
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
        code, _, _ = shown("push", str(tmp_path))
        assert code == 1
        assert shown("push", str(tmp_path / "nowhere"))[0] == 2
    finally:
        rig.end()


@pytest.mark.parametrize("command", [("push",), ("verify", "--checkpoint")])
def test_a_lora_adapter_as_peft_saves_it_is_refused(directory: Path, tmp_path: Path, command: tuple[str, ...]) -> None:
    """Its B is not multiplied by the scaling: the engine would serve a weaker adapter, and --verify would find it equal."""
    factors = {f"base_model.model.q_proj.lora_{factor}.weight": torch.ones(2, 2) for factor in "AB"}
    save_file(factors, tmp_path / "adapter_model.safetensors")
    code, printed, told = shown(*command, str(tmp_path), "--group", "lora.policy")
    assert (code, printed) == (2, "") and "multiplied by the scaling" in told and "PeftModel.from_pretrained" in told


def test_a_model_with_lora_layers_of_its_own_is_a_checkpoint(tmp_path: Path) -> None:
    """As Phi-4-multimodal is published."""
    tensors = {f"model.layers.0.o_proj.lora_{factor}.vision.weight": torch.ones(2, 2) for factor in "AB"}
    save_file(tensors, tmp_path / "model.safetensors")
    assert sorted(Checkpoint(tmp_path)) == sorted(tensors)


def test_a_checkpoint_s_index_says_which_file_holds_a_tensor(directory: Path, tmp_path: Path) -> None:
    rig = Rig(directory)
    tensors = {name: tensor.contiguous() for name, tensor in checkpoint(1).items()}
    parts = {
        "model-00001-of-00002.safetensors": {n: t for n, t in tensors.items() if "layers.0" in n},
        "model-00002-of-00002.safetensors": {n: t for n, t in tensors.items() if "layers.0" not in n},
        "model-00003-of-00003.safetensors": {n: t.contiguous() for n, t in checkpoint(2).items()},
    }
    try:
        for file, held in parts.items():
            save_file(held, tmp_path / file)
        code, _, told = shown("push", str(tmp_path))
        assert code == 2 and "both hold" in told and "00003-of-00003" in told, "which of the two is meant?"
        index = tmp_path / "model.safetensors.index.json"
        of_the_save = [file for file in parts if file.endswith("of-00002.safetensors")]
        index.write_text(json.dumps({"weight_map": {name: file for file in of_the_save for name in parts[file]}}))
        assert run("push", str(tmp_path), "--verify")[0] == 0
        assert rig.peek() == digests_expected(checkpoint(1)), (
            "the file of an earlier save is passed over, as by engines"
        )
        assert shown("verify", "--checkpoint", str(tmp_path))[0] == 0
        for wrong, words in (
            ('{"weight_map": {"a": "gone.safetensors"}}', "names gone.safetensors, which is not there"),
            (json.dumps({"weight_map": {"lacking": of_the_save[0]}}), "names lacking, which model-00001"),
            ("{", "can't be read"),
        ):
            index.write_text(wrong)
            code, _, told = shown("push", str(tmp_path))
            assert code == 2 and words in told
    finally:
        rig.end()


def test_close_has_all_replicas_forget_a_group_that_its_trainer_left_open(directory: Path) -> None:
    rigs = Rig(directory, tp=2), Rig(directory)
    whole = ShardSource(checkpoint(2))
    try:
        with SyncManager("inner", partial=True, timeout_s=60) as inner:
            inner.update(ShardSource({name: t for name, t in checkpoint(1).items() if "layers" in name}), 1)
        with SyncManager(timeout_s=60) as manager:
            with pytest.raises(ManifestMismatch, match="group 'inner' writes already") as refused:
                manager.update(whole, 1)
            assert "`weightwire close inner`" in refused.value.hint
            code, closed = run("close", "inner")
            assert (code, closed["ok"]) == (0, True)
            assert {row["replica"]: row["had"] for row in closed["replicas"]} == {rig.replica: True for rig in rigs}
            assert manager.update(whole, 1).failed == ()
            code, _, told = shown("close", "inner")
            assert code == 2 and "no replica has a group 'inner'; open groups: policy" in told
            manager.settings.in_flight = "drain"
            pending = manager.update_async(whole, 2)
            for rig in rigs:
                eventually(lambda rig=rig: "pause:drain" in rig.ask("state")["log"], "the pause")  # type: ignore[misc]
            code, printed, _ = shown("close", "policy")
            for rig in rigs:
                rig.ask("drained")
            assert code == 1 and printed.count("NOT closed") == 2 and "being committed" in printed
            assert pending.result(600).failed == ()
    finally:
        for rig in rigs:
            rig.end()
    assert shown("close", "policy")[0] == 2


def test_verify_says_what_it_leaves_out_and_shows_all_if_asked(directory: Path, tmp_path: Path) -> None:
    rig = Rig(directory, layers=8)
    try:
        with SyncManager(timeout_s=60) as manager:
            manager.update(ShardSource(checkpoint(1, layers=8)), 7)
        save_file({n: t.contiguous() for n, t in checkpoint(2, layers=8).items()}, tmp_path / "model.safetensors")
        code, short, _ = shown("verify", "--checkpoint", str(tmp_path))
        _, document = run("verify", "--checkpoint", str(tmp_path))
        count = len(document["replicas"][0]["problems"])
        assert code == 1 and count > 20 and f"and {count - 20} more; --all shows all {count}" in short
        assert shown("verify", "--checkpoint", str(tmp_path), "--all")[1].count(" differs") == count
    finally:
        rig.end()


def test_what_users_of_an_engine_s_version_miss_is_told_by_status_and_in_every_report(directory: Path) -> None:
    rig = Rig(directory, WEIGHTWIRE_TEST_LACKS="answers say nothing")
    try:
        with SyncManager(timeout_s=60) as manager:
            report = manager.update(ShardSource(checkpoint(1)), 1)
        assert [replica.lacks for replica in report.replicas] == [("answers say nothing",)]
        assert [replica["card"]["lacks"] for replica in run("status")[1]["replicas"]] == [["answers say nothing"]]
        assert "in this version of plain answers say nothing" in shown("status")[1]
    finally:
        rig.end()


def test_doctor_and_status_tell_of_an_engine_that_runs_without_the_plug_in_until_it_ends(directory: Path) -> None:
    ready = directory / "ready"
    environment = {"WEIGHTWIRE_RUNTIME_DIR": str(directory)}
    pid = fork("tests.manager.test_cli:plug_in_that_fails", environment, ready=str(ready))
    eventually(ready.exists, "the process to have noted its problem")
    code, doctor = run("doctor")
    (problem,) = doctor["problems"]
    assert code == 1 and problem.startswith(f"runs without the plug-in: sglang process {pid}: ")
    code, status = run("status")
    assert code == 0 and [f"runs without the plug-in: {text}" for text in status["without_plug_in"]] == [problem]
    assert "sglang unknown is not the engine this plug-in knows" in problem and "served are sglang 0.5.20 to" in problem
    kill(pid)
    assert run("doctor")[1]["problems"] == [] == run("status")[1]["without_plug_in"]
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


def test_doctor_tells_of_a_key_addresses_and_a_card_that_nobody_can_use(directory: Path) -> None:
    card = addresses.runtime_dir() / "vllm-1-2-3.card"
    card.write_bytes(b"garbage")
    code, doctor = run(
        "doctor", WEIGHTWIRE_KEY="/nowhere/key", WEIGHTWIRE_REGISTRY="10.0.0.1", WEIGHTWIRE_LISTEN="tcp://*:*"
    )
    unread, key, registry, listening = doctor["problems"]
    assert code == 1 and str(card) in unread and "WEIGHTWIRE_REGISTRY='10.0.0.1' is no address" in registry
    assert "/nowhere/key can't be read" in key and "/nowhere/key can't be read" in listening
    code, doctor = run("doctor", WEIGHTWIRE_LISTEN="tcp://*:*")
    assert code == 1 and "can be reached from outside this host without authentication" in doctor["problems"][-1]
    curve.make_key(directory / "key")
    code, doctor = run("doctor", WEIGHTWIRE_KEY=str(directory / "key"), WEIGHTWIRE_LISTEN="tcp://192.0.2.1:*")
    assert code == 1 and "WEIGHTWIRE_LISTEN=tcp://192.0.2.1:*: Cannot assign" in doctor["problems"][-1]


@pytest.mark.parametrize("no_colour", ["", "1"])
def test_colours_are_for_terminals_that_want_them(directory: Path, no_colour: str) -> None:
    reader, terminal = os.openpty()
    weightwire(["doctor"], {"NO_COLOR": no_colour, "TERM": "xterm"}, into=Path(os.ttyname(terminal)))
    printed = os.read(reader, 1 << 16)
    os.close(terminal)
    os.close(reader)
    assert b"\r\n" in printed and (b"\x1b[" in printed) == (not no_colour)


def test_doctor_tells_of_a_runtime_directory_too_long_for_sockets(directory: Path) -> None:
    code, doctor = run("doctor", WEIGHTWIRE_RUNTIME_DIR=str(directory / ("long" * 25)))
    (problem,) = doctor["problems"]
    assert code == 1 and "too long for a socket" in problem and "set WEIGHTWIRE_RUNTIME_DIR to a shorter" in problem


def test_config_shows_where_each_value_comes_from_and_refuses_what_cannot_be_meant(directory: Path) -> None:
    code, document = run("config", WEIGHTWIRE_LEASE_S="5", WEIGHTWIRE_BUCKET_BYTES="64MiB")
    values = {row["setting"]: (row["value"], row["from"]) for row in document["settings"]}
    assert code == 0 and {*Config.__struct_fields__, *OTHER_VARIABLES} == set(values)
    assert values["lease_s"] == (5.0, "WEIGHTWIRE_LEASE_S") and values["timeout_s"] == (120.0, "default")
    assert values["bucket_bytes"] == (64 << 20, "WEIGHTWIRE_BUCKET_BYTES")
    assert values["WEIGHTWIRE_RUNTIME_DIR"] == (str(directory), "WEIGHTWIRE_RUNTIME_DIR")
    assert values["WEIGHTWIRE_LISTEN"] == (None, "default")
    code, doctor = run("doctor", WEIGHTWIRE_LEASE_S="soon", WEIGHTWIRE_LEASES="5")
    misspelt, senseless = doctor["problems"]
    assert code == 1 and "WEIGHTWIRE_LEASES" in misspelt and "WEIGHTWIRE_LEASE_S='soon'" in senseless
    code, _, refusal = shown("config", WEIGHTWIRE_LEASE_S="soon")
    assert code == 2 and "WEIGHTWIRE_LEASE_S='soon' (field lease_s)" in refusal


def test_config_shows_what_is_unset_with_what_holds_instead_and_never_wraps_in_a_pipe(directory: Path) -> None:
    key = "/a/path/that/is/much/longer/than/any/terminal/is/wide/so/that/eighty/columns/would/cut/it/in/two/job.key"
    code, table, _ = shown("config", WEIGHTWIRE_KEY=key)
    rows = {line.split()[1]: line for line in table.splitlines() if line.startswith("│")}
    assert code == 0 and {*Config.__struct_fields__, *OTHER_VARIABLES} == set(rows)
    assert (
        key in rows["WEIGHTWIRE_KEY"]
        and "not set" in rows["WEIGHTWIRE_REGISTRY"]
        and "ipc" in rows["WEIGHTWIRE_LISTEN"]
    )
    assert "not set" in rows["profile_dir"]


@pytest.mark.parametrize("arguments", [["status"], ["config"]], ids=" ".join)
def test_output_that_cannot_be_written_ends_a_command_with_status_2_and_never_with_a_traceback(
    directory: Path, arguments: list[str]
) -> None:
    command = [sys.executable, "-m", "inference_plugin.cli", *arguments]
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=600, check=False)
    assert (ended.returncode, ended.stderr) == (
        2,
        "weightwire: could not read or write: [Errno 28] No space left on device\n",
    )
    reader, writer = os.pipe()
    os.close(reader)
    gone = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=600, check=False)
    os.close(writer)
    assert (gone.returncode, gone.stderr) == (2, ""), "a reader that closed its pipe wants to hear nothing"


@pytest.mark.parametrize(
    "arguments", [["status"], ["transports"], ["config"], ["top", "--once"], ["status", "--wrong"]]
)
def test_where_stdout_and_stderr_are_closed_the_exit_status_tells(directory: Path, arguments: list[str]) -> None:
    command = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", sys.executable, "-m", "inference_plugin.cli", *arguments]
    ended = subprocess.run(command, timeout=600, check=False)
    assert ended.returncode == (2 if "--wrong" in arguments else 0)


def test_every_command_warns_of_a_misspelt_variable_once(directory: Path) -> None:
    for command in ("config", "status", "transports"):
        _, _, told = shown(command, WEIGHTWIRE_LEASES_S="5")
        assert told.count("WEIGHTWIRE_LEASES_S") == 1 and "did you mean WEIGHTWIRE_LEASE_S?" in told
    code, printed, told = shown("doctor", WEIGHTWIRE_LEASES_S="5")
    assert code == 1 and printed.count("did you mean WEIGHTWIRE_LEASE_S?") == 1 and "LEASES" not in told


NO_TORCH = """
import sys
from inference_plugin.cli import main
sys.argv = ["weightwire", *sys.argv[1:]]
try:
    main()
finally:
    heavy = {"torch", "numpy", "pydantic", "rich", "asyncio", "importlib.metadata", "urllib.request"}
    print(sorted(heavy & set(sys.modules)), file=sys.stderr)
"""


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["-h"], ["--version"], ["status"], ["config", "--json"], ["doctor", "-h"], ["verify", "-h"]],
    ids=" ".join,
)
def test_what_needs_no_torch_imports_neither_it_nor_anything_else_that_takes_long(
    directory: Path, arguments: list[str]
) -> None:
    command = [sys.executable, "-c", NO_TORCH, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0 and done.stderr.splitlines()[-1] == "[]", done.stderr


def test_the_command_has_help_a_version_completion_and_documented_exit_statuses(directory: Path) -> None:
    assert shown("--version")[1] == f"weightwire {__version__}\n"
    code, text, _ = shown("-h")
    assert code == 0 and "Exit status" in text and "..." not in text.partition("Commands:")[2]
    assert shown("status", "-h")[0] == 0 and shown("nonsense")[0] == 2
    script = str(Path(sys.executable).with_name("weightwire"))
    asking = {"_WEIGHTWIRE_COMPLETE": "bash_complete", "COMP_WORDS": "weightwire sta", "COMP_CWORD": "1"}
    done = subprocess.run([script], capture_output=True, text=True, timeout=600, env=os.environ | asking, check=False)
    assert done.stdout.split() == ["plain,status"], done


def test_keygen_makes_a_key_once_and_never_writes_over_one(directory: Path, monkeypatch: Any) -> None:
    command = [sys.executable, "-m", "inference_plugin.cli", "keygen", str(directory / "key")]
    assert subprocess.run(command, capture_output=True, timeout=600, check=False).returncode == 0
    monkeypatch.setenv(curve.VARIABLE, str(directory / "key"))
    made = curve.job_key()
    again = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert again.returncode == 2 and "key exists; a key is never overwritten" in again.stderr
    assert curve.job_key() == made is not None
