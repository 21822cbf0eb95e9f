"""DeepSpeed's ZeRO, on real gloo ranks: what all ranks write together is what DeepSpeed itself gathers, bit for bit.

All cases run in one launch (`zero_worker.py`), in `.venvs/megatron`, which has DeepSpeed; each test below looks at one case.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from inference_plugin.engines.transformers import TransformersEngine
from tests.support.managers import SyncManager
from tests.support.rig import eventually, runtime
from tests.trainers.launching import (
    ROOT,
    Ranks,
    assert_is_gold,
    ended_well,
    of,
    results,
    start_ranks,
    written,
)
from tests.trainers.observing import tiny_qwen3
from tests.trainers.test_fsdp_adapter import TIE
from trainer_adapters import ModuleAdapter

PYTHON = ROOT / ".venvs" / "megatron" / "bin" / "python"

pytestmark = pytest.mark.slow

NORMS = 9
Tensors = dict[str, torch.Tensor]
Served = list[tuple[Tensors, list[bool]]]


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Ranks, Served]:
    """What each rank saw, and after each update what DeepSpeed gathered, and whether an engine held that, and what it had
    gathered after the updates before."""
    out = tmp_path_factory.mktemp("zero")
    tiny_qwen3().bfloat16().save_pretrained(out / "model")  # type: ignore[attr-defined]
    served: Served = []
    with pytest.MonkeyPatch.context() as patch, runtime(patch), TransformersEngine(out / "model"):
        program = Path(__file__).with_name("zero_worker.py")
        ran = start_ranks(program, 2, out, str(out), python=str(PYTHON))
        try:
            for version in (1, 2):
                sent = out / f"sent{version}.pt"
                eventually(lambda sent=sent: sent.exists() or ran.poll() is not None, f"update {version}")
                if ran.poll() is None:
                    tensors = [*(before for before, _ in served), torch.load(sent, weights_only=True)]
                    with SyncManager(timeout_s=60) as judge:
                        served.append(
                            (tensors[-1], [judge.verify(ModuleAdapter(one, exclude=TIE)).ok for one in tensors])
                        )
                    (out / f"compared{version}").touch()
            ended_well(ran, out)
        finally:
            ran.terminate()
    return results(out, 2), served


@pytest.fixture(scope="module")
def ranks(launched: tuple[Ranks, Served]) -> Ranks:
    return launched[0]


def test_an_engine_holds_what_deepspeed_gathers_after_each_of_two_steps(launched: tuple[Ranks, Served]) -> None:
    ranks, served = launched
    assert [rank["verified"] for rank in of(ranks, "served")] == [True, True]
    assert [equal for _, equal in served] == [[True], [False, True]]
    (first, _), (second, _) = served
    assert {tensor.dtype for tensor in first.values()} == {torch.bfloat16}
    assert not any(torch.equal(first[name], second[name]) for name in first)


def test_before_the_first_step_the_model_goes_as_it_was_given(ranks: Ranks) -> None:
    seen = of(ranks, "before_the_first_step")
    assert {rank["kind"] for rank in seen} == {"DeepSpeedAdapter"}
    _, values, _ = written(seen)
    assert_is_gold(values, seen[0]["plain"], TIE)


@pytest.mark.parametrize(
    "case", ["before_the_first_step", "after_two_steps", "after_a_forward_pass", "offloaded", "stacked_experts"]
)
def test_each_rank_sends_its_partition_and_nothing_is_gathered(ranks: Ranks, case: str) -> None:
    """Vocabulary, widths and experts of odd sizes: the last rank's partitions end in padding."""
    seen = of(ranks, case)
    manifest, values, sent = written(seen)
    assert_is_gold(values, seen[0]["gold"], manifest.tied)
    assert manifest.tied == (TIE if case not in ("after_two_steps", "stacked_experts") else {})
    assert max(sent) - min(sent) <= 4 * len(manifest.tensors)


def test_parameters_that_a_forward_pass_left_gathered_go_too(ranks: Ranks) -> None:
    """The norms, which always stay, and others."""
    assert min(rank["whole"] for rank in of(ranks, "after_a_forward_pass")) > NORMS


def test_slices_are_the_partitions_own_memory_and_follow_training(ranks: Ranks) -> None:
    for seen in of(ranks, "after_two_steps"):
        assert seen["same"] and seen["views"] and seen["held together"] and seen["changed"] == 1.0


@pytest.mark.parametrize("case", ["stage_1", "stage_2"])
def test_whole_parameters_of_the_other_stages_are_divided_between_the_ranks(ranks: Ranks, case: str) -> None:
    seen = of(ranks, case)
    assert {rank["kind"] for rank in seen} == {"ModuleAdapter"}
    manifest, values, sent = written(seen)
    assert_is_gold(values, seen[0]["gold"], manifest.tied)
    assert min(sent) > 0 and all(rank["by name"] for rank in seen)


def test_adapters_of_peft_are_merged_or_go_alone(ranks: Ranks) -> None:
    seen = of(ranks, "with_adapters")
    for kind in ("merged", "alone"):
        _, values, _ = written([rank[kind] for rank in seen], seen[0][kind]["collectives"])
        _, expected, _ = written([rank[f"{kind} whole"] for rank in seen], seen[0][f"{kind} whole"]["collectives"])
        assert_is_gold(values, expected, {})


def refused(seen: dict[str, Any], *parts: str) -> None:
    assert seen["error"] == "ManifestMismatch", seen
    assert [part for part in parts if part not in seen["text"]] == [], seen["text"]


def test_a_parameter_that_is_gathered_and_may_have_changed_is_refused_until_it_is_in_the_partitions(
    ranks: Ranks,
) -> None:
    seen = of(ranks, "refuse_while_gathered")
    for rank in seen:
        for name, inside in rank["inside"].items():
            refused(inside, f"{name} is gathered at the moment", "outside of GatheredParameters")
            assert inside["slices"] == "ManifestMismatch"
    _, values, _ = written(seen)
    assert_is_gold(values, seen[0]["gold"], TIE)
    assert all(bool((values[name] == 7).all()) for name in seen[0]["inside"])


def test_a_partition_on_nvme_or_in_int8_is_refused_and_what_the_hint_names_works(ranks: Ranks) -> None:
    exported = of(ranks, "refuse_what_is_not_in_memory")
    for seen in exported:
        refused(seen, "model.embed_tokens.weight is offloaded to NVMe", "to the CPU", "ExportAdapter")
    _, values, _ = written(exported, exported[0]["collectives"])
    assert_is_gold(values, exported[0]["gold"], TIE)
    for seen in of(ranks, "refuse_quantised"):
        refused(seen, "is quantised", "zero_quantized_nontrainable_weights", "ExportAdapter")


def test_partitions_that_are_not_of_zero_3s_sizes_are_refused(ranks: Ranks) -> None:
    for seen in of(ranks, "refuse_other_partitions"):
        refused(seen, "is divided into parts of 4517 elements where ZeRO-3 over 2 ranks makes 4518")


def test_other_adapters_refuse_partitions_and_name_the_right_one(ranks: Ranks) -> None:
    for seen in of(ranks, "refuse_another_adapter"):
        assert seen["error"] == "ArgumentError" and "use DeepSpeedAdapter" in seen["text"]
        refused(seen["before"], "use DeepSpeedAdapter")


def test_experts_that_other_ranks_have_others_of_are_refused_and_an_export_under_their_own_names_works(
    ranks: Ranks,
) -> None:
    """DeepSpeed's MoE with an `ep_size` above 1. With 1, every rank has all experts."""
    _, values, _ = written(of(ranks, "experts_on_every_rank"))
    assert_is_gold(values, ranks["experts_on_every_rank"][0]["gold"], {})
    seen = of(ranks, "refuse_experts_of_one_rank")
    for rank in seen:
        for found in rank["refused"].values():
            refused(found, "deepspeed_experts.1.bias is an expert's under expert parallelism", "let ExportAdapter send")
    _, values, _ = written(seen)
    for expert in range(4):
        weight = values[f"1.deepspeed_moe.experts.deepspeed_experts.{expert}.weight"]
        assert weight.unique().tolist() == [expert]
