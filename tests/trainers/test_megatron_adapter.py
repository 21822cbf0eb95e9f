"""Megatron-Core's parts, on real gloo ranks: what all ranks write together is the Hugging Face checkpoint, bit for bit.

The trainers run in `.venvs/megatron` (`megatron_worker.py`), all cases of a world size in one launch. Three judges: the
checkpoint that Megatron-Bridge loaded into the model; Megatron-Bridge's export after a training step; and a gold model
put together by `tests/support/megatron_gold.py`, also where Megatron-Bridge has no mapping.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors import safe_open

from inference_plugin.wire.errors import ManifestMismatch
from inference_plugin.wire.geometry import Box, Piece
from inference_plugin.wire.messages import Ready
from tests.support.megatron_gold import assemble
from tests.support.megatron_models import KINDS, text_of, write_checkpoint
from tests.trainers.launching import ROOT, Ranks, assert_is_gold, launch, of, written
from trainer_adapters import LocalSlice
from trainer_adapters.update.agreement import Claims, digests_of, what_differs

PYTHON = ROOT / ".venvs" / "megatron" / "bin" / "python"

pytestmark = pytest.mark.slow

COMBINATIONS = {
    2: {
        "tp2 llama": "llama",
        "tp2 llama te": "llama",
        "tp2 one kv head": "mqa",
        "tp2 qwen2 te": "qwen2",
        "pp2 qwen2": "qwen2",
        "tp2 qwen3 tied te": "qwen3 tied",
        "pp2 qwen3 tied": "qwen3 tied",
        "pp2 vpp2 qwen3": "qwen3",
        "dp2 qwen3 te bf16": "qwen3",
        "ep2 qwen3_moe te": "qwen3_moe",
        "ep2 qwen3_moe": "qwen3_moe",
        "etp2 qwen3_moe te": "qwen3_moe",
        "etp2 qwen3_moe": "qwen3_moe",
        "tp2 qwen2_moe te": "qwen2_moe",
        "tp2 deepseek_v3 te": "deepseek_v3",
        "tp2 deepseek_v3": "deepseek_v3",
        "ep2 deepseek_v3 mtp te": "deepseek_v3",
        "pp2 deepseek_v3 mtp": "deepseek_v3",
        "tp2 deepseek_v2 te": "deepseek_v2",
        "pp2 glm4_moe mtp": "glm4_moe",
        "tp2 gpt_oss te": "gpt_oss",
        "ep2 gpt_oss": "gpt_oss",
        "tp2 mimo mtp te": "mimo",
        "tp2 qwen3_next te": "qwen3_next",
        "tp2 qwen3_5 mtp te": "qwen3_5",
        "tp2 qwen3_5_moe te": "qwen3_5_moe",
        "tp2 glm4 te": "glm4",
        "tp2 ernie4_5_moe te": "ernie4_5_moe",
        "tp2 llama4 te": "llama4",
        "pp2 phi3 te": "phi3",
        "tp2 nemotron_h te": "nemotron_h",
        "tp2 nemotron te": "nemotron",
        "tp2 gemma3 te": "gemma3",
    },
    4: {
        "tp2 pp2 qwen3 tied te": "qwen3 tied",
        "tp2 dp2 llama": "llama",
        "tp4 qwen3": "qwen3",
        "tp2 ep2 qwen3_moe te": "qwen3_moe",
        "tp2 ep2 etp2 qwen3_moe te": "qwen3_moe",
        "pp2 vpp2 ep2 qwen3_moe te": "qwen3_moe",
        "pp2 vpp2 ep2 qwen3_moe": "qwen3_moe",
        "tp2 pp2 deepseek_v3 mtp te": "deepseek_v3",
        "tp2 pp2 ep2 glm4_moe te": "glm4_moe",
    },
}
FURTHER = {
    2: {
        "pp2 deepseek_v2": "deepseek_v2",
        "ep2 deepseek_v2 te": "deepseek_v2",
        "etp2 deepseek_v2": "deepseek_v2",
        "tp2 kimi_k2 te": "kimi_k2",
        "pp2 kimi_k2": "kimi_k2",
        "ep2 kimi_k2 te": "kimi_k2",
        "tp2 glm4_moe_lite te": "glm4_moe_lite",
        "etp2 glm4_moe_lite": "glm4_moe_lite",
        "pp2 glm4_moe_lite mtp te": "glm4_moe_lite",
        "tp2 glm4_moe te": "glm4_moe",
        "etp2 glm4_moe mtp": "glm4_moe",
        "ep2 glm4_moe mtp te": "glm4_moe",
        "tp2 mixtral te": "mixtral",
        "etp2 mixtral": "mixtral",
        "pp2 mixtral te": "mixtral",
        "ep2 mixtral": "mixtral",
        "ep2 gpt_oss te": "gpt_oss",
        "tp2 gpt_oss": "gpt_oss",
        "pp2 gpt_oss te": "gpt_oss",
        "dp2 gpt_oss te bf16": "gpt_oss",
        "pp2 mimo mtp": "mimo",
        "tp2 mimo": "mimo",
        "tp2 seed_oss te": "seed_oss",
        "pp2 seed_oss": "seed_oss",
        "ep2 olmoe te": "olmoe",
        "pp2 olmoe": "olmoe",
        "pp2 qwen3_next te": "qwen3_next",
        "tp2 qwen3_next mtp te": "qwen3_next",
        "pp2 qwen3_5 te": "qwen3_5",
        "pp2 qwen3_5_text te": "qwen3_5_text",
        "pp2 qwen3_5_moe mtp te": "qwen3_5_moe",
        "ep2 qwen3_5_moe te": "qwen3_5_moe",
        "pp2 glm4": "glm4",
        "tp2 glm4": "glm4",
        "pp2 ernie4_5_moe": "ernie4_5_moe",
        "ep2 ernie4_5_moe te bf16": "ernie4_5_moe",
        "etp2 llama4": "llama4",
        "pp2 llama4 te": "llama4",
        "ep2 llama4_text te": "llama4_text",
        "tp2 phi3 te": "phi3",
        "pp2 nemotron_h te": "nemotron_h",
        "ep2 nemotron_h te": "nemotron_h",
        "pp2 nemotron te": "nemotron",
        "tp2 gemma2 te": "gemma2",
        "pp2 gemma2 te": "gemma2",
        "tp2 gemma te": "gemma",
        "pp2 gemma3 te": "gemma3",
        "pp2 gemma te": "gemma",
    },
    4: {
        "tp2 pp2 ep2 gpt_oss te": "gpt_oss",
        "tp2 pp2 glm4_moe mtp te": "glm4_moe",
        "tp2 pp2 ep2 mixtral te": "mixtral",
        "tp2 pp2 mimo mtp te": "mimo",
        "tp2 pp2 qwen3_5 te": "qwen3_5",
        "tp2 pp2 ep2 llama4 te": "llama4",
        "tp2 pp2 ep2 ernie4_5_moe te": "ernie4_5_moe",
        "tp2 pp2 ep2 nemotron_h te": "nemotron_h",
        "tp2 pp2 ep2 qwen3_next mtp te": "qwen3_next",
    },
}
"""Of the worker's launch for `make test-full`."""
KIND = {case: kind for table in (COMBINATIONS, FURTHER) for cases in table.values() for case, kind in cases.items()}


def matrix(without: Collection[str] = (), worlds: Collection[int] = (2, 4)) -> pytest.MarkDecorator:
    """Parameters `launch` and `case`: all combinations but those `without`, on ranks of these numbers."""
    rows = [
        pytest.param((world, *further), case, id=case, marks=[pytest.mark.full] if further else [])
        for table, further in ((COMBINATIONS, ()), (FURTHER, ("further",)))
        for world in worlds
        for case in table[world]
        if case not in without
    ]
    return pytest.mark.parametrize(("launch", "case"), rows)


Seen = list[dict[str, Any]]
Launch = tuple[Any, ...]
"""The number of ranks, and the word for the worker if it shall take further cases."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoints")
    for kind in KINDS:
        write_checkpoint(kind, directory / kind.replace(" ", "_"))
    return directory


class Launched:
    """What the worker's ranks saw; each launch is made when its first case is asked for."""

    def __init__(self, new_directory: Callable[[str], Path], checkpoints: Path) -> None:
        self.new_directory, self.checkpoints = new_directory, checkpoints
        self.done: dict[Launch, Ranks] = {}
        self.began: set[Launch] = set()

    def __getitem__(self, which: int | Launch) -> Ranks:
        which = which if isinstance(which, tuple) else (which,)
        if which not in self.done:
            assert which not in self.began, "this launch failed in an earlier test"
            self.began.add(which)
            world, *further = which
            out, arguments = self.new_directory(f"megatron{world}"), (self.checkpoints, *map(Path, further))
            self.done[which] = launch("megatron_worker.py", world, out, *arguments, python=str(PYTHON))
        return self.done[which]


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory, checkpoints: Path) -> Launched:
    return Launched(tmp_path_factory.mktemp, checkpoints)


def of_file(directory: Path) -> dict[str, torch.Tensor]:
    with safe_open(directory / "model.safetensors", framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a mapping


def hf_config(checkpoints: Path, kind: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((checkpoints / kind.replace(" ", "_") / "config.json").read_text())
    return config


def gold_of(seen: Seen, hf: dict[str, Any]) -> dict[str, torch.Tensor]:
    return assemble([{"raw": one["raw"], "place": one["place"]} for one in seen], hf)


# --- every combination -----------------------------------------------------------------------------------------------


@matrix()
def test_after_a_training_step_all_ranks_together_send_the_gathered_model(
    launched: Launched, checkpoints: Path, launch: Launch, case: str
) -> None:
    seen = of(launched[launch], case)
    hf = hf_config(checkpoints, KIND[case])
    manifest, values, _ = written([one["trained"] for one in seen])
    gold = gold_of(seen, hf)
    assert_is_gold(values, gold, {})
    for one in seen:
        for (tensor, offsets, sizes), copy in one["trained"]["copies"]:
            at = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
            assert torch.equal(values[manifest.tensors[tensor].name][at], copy), "a copy is not what was sent"
    if text_of(hf)["tie_word_embeddings"]:
        (embedding,) = (name for name in values if name.endswith("embed_tokens.weight"))
        assert manifest.tied == {"lm_head.weight": embedding}
    if "loaded" in seen[0]:
        before = of_file(checkpoints / KIND[case].replace(" ", "_"))
        still = [name for name, value in values.items() if torch.equal(value, before[name].to(value.dtype))]
        assert all("e_score_correction_bias" in name for name in still), f"training changed nothing in {still}"


WITHOUT_BRIDGE = {"tp2 one kv head", "pp2 qwen3 tied", "tp2 qwen2_moe te", "ep2 qwen3_moe", "etp2 qwen3_moe"}
WITHOUT_BRIDGE |= {"tp2 deepseek_v3", "ep2 deepseek_v3 mtp te", "pp2 deepseek_v3 mtp"}
WITHOUT_BRIDGE |= {"tp2 dp2 llama", "tp4 qwen3", "pp2 vpp2 ep2 qwen3_moe", "tp2 pp2 deepseek_v3 mtp te"}
WITHOUT_BRIDGE |= {"pp2 glm4_moe mtp", "ep2 gpt_oss", "tp2 mimo mtp te"}
WITHOUT_BRIDGE |= {case for cases in FURTHER.values() for case in cases if "mtp" in case or "te" not in case.split()}
NO_MAPPING = {kind for kind, entry in KINDS.items() if not entry.bridge}
WITHOUT_BRIDGE |= {case for case, kind in KIND.items() if kind in NO_MAPPING} | {"pp2 gemma te"}


@matrix(without=WITHOUT_BRIDGE)
def test_every_tensor_is_what_megatron_bridge_loads_and_exports(
    launched: Launched, checkpoints: Path, launch: Launch, case: str
) -> None:
    seen = of(launched[launch], case)
    directory = checkpoints / KIND[case].replace(" ", "_")
    _, loaded, _ = written([one["loaded"] for one in seen])
    assert_is_gold(loaded, of_file(directory), {})
    _, trained, _ = written([one["trained"] for one in seen])
    assert_is_gold(trained, {k: v for k, v in seen[0]["bridge"].items() if k in trained or k != "lm_head.weight"}, {})


@matrix(worlds=[2])
def test_names_and_shapes_are_those_of_the_checkpoint_that_transformers_writes(
    launched: Launched, checkpoints: Path, launch: Launch, case: str
) -> None:
    kind = KIND[case]
    manifest, _, _ = written([one["trained"] for one in of(launched[launch], case)])
    shapes = {spec.name: list(spec.shape) for spec in manifest.tensors}
    layers = text_of(hf_config(checkpoints, kind))["num_hidden_layers"]
    mtp = {
        name: shape
        for name, shape in shapes.items()
        if name.startswith((f"model.layers.{layers}.", "model.mtp_layers.", "mtp."))
    }
    written_by_transformers = {
        name: list(tensor.shape)
        for name, tensor in of_file(checkpoints / kind.replace(" ", "_")).items()
        if not name.startswith(("model.visual.", "vision_model.", "multi_modal_projector."))
    }
    assert {name: shape for name, shape in shapes.items() if name not in mtp} == written_by_transformers
    assert bool(mtp) == ("mtp" in case)
    order = [spec.name for spec in manifest.tensors]
    of_2, of_3 = (next(i for i, name in enumerate(order) if f".layers.{layer}." in name) for layer in (2, 3))
    assert of_2 < of_3


@pytest.mark.parametrize("case", ["pp2 deepseek_v3 mtp", "pp2 glm4_moe mtp"])
def test_an_mtp_layer_has_the_names_of_published_checkpoints(launched: Launched, case: str) -> None:
    manifest, _, _ = written([one["trained"] for one in of(launched[2], case)])
    own = {"enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight", "mlp.gate.weight"}
    assert {f"model.layers.4.{name}" for name in own} <= set(manifest.index)
    assert manifest.tied == {
        "model.layers.4.embed_tokens.weight": "model.embed_tokens.weight",
        "model.layers.4.shared_head.head.weight": "lm_head.weight",
    }


def test_data_parallel_copies_share_the_bytes_and_of_tensor_parallel_copies_the_first_is_sent(
    launched: Launched,
) -> None:
    manifest, _, sent = written([one["trained"] for one in of(launched[2], "dp2 qwen3 te bf16")])
    largest = max(spec.nbytes for spec in manifest.tensors)
    assert max(sent) - min(sent) <= 2 * largest
    seen = of(launched[4], "tp2 dp2 llama")
    manifest, _, sent = written([one["trained"] for one in seen])
    assert max(sent) - min(sent) <= 2 * max(spec.nbytes for spec in manifest.tensors)
    norms = {i for i, spec in enumerate(manifest.tensors) if spec.name.endswith("norm.weight")}
    for one in seen:
        mine = {box[0] for box, _ in one["trained"]["slices"]}
        copies = {box[0] for box, _ in one["trained"]["copies"]}
        assert not (one["place"]["tp"] and mine & norms)
        assert copies == (norms if one["place"]["tp"] else set()), "what may come apart is compared with what was sent"


def test_the_first_stage_sends_tied_embeddings(launched: Launched) -> None:
    for world, case in ((2, "pp2 qwen3 tied"), (4, "tp2 pp2 qwen3 tied te")):
        seen = of(launched[world], case)
        manifest, _, _ = written([one["trained"] for one in seen])
        embedding = manifest.index["model.embed_tokens.weight"]
        senders = {one["place"]["pp"] for one in seen if embedding in {b[0] for b, _ in one["trained"]["slices"]}}
        assert senders == {0}
        copies = {one["place"]["pp"] for one in seen if embedding in {b[0] for b, _ in one["trained"]["copies"]}}
        assert copies == {1}, "only the reduction of their gradients keeps them equal"


def test_adapters_are_gathered_as_many_at_a_time_as_the_managers_buckets_hold(launched: Launched) -> None:
    for seen in of(launched[2], "lora tp2 qwen3 te"):
        assert seen["a bucket for each"] == {"more": True, "same": True}


# --- what the ranks of a manager hold against each other -------------------------------------------------------------


@pytest.mark.parametrize(("world", "case"), [(2, "etp2 qwen3_moe te"), (4, "tp2 pp2 qwen3 tied te")])
def test_an_orphan_and_a_double_among_the_ranks_claims_are_named(launched: Launched, world: int, case: str) -> None:
    seen = [one["trained"] for one in of(launched[world], case)]
    manifest, _, _ = written(seen)
    claims = [msgspec.convert(one["claims"], tuple[Box, ...]) for one in seen]

    def check(of_rank_1: tuple[Box, ...]) -> None:
        others = [of_rank_1, *claims[2:]]
        readies = [Ready(1, "update:1", i, manifest.fingerprint, claims=own) for i, own in enumerate(others, start=1)]
        Claims().check(manifest, claims[0], readies)

    check(claims[1])
    with pytest.raises(ManifestMismatch, match="each byte once: written by nobody: "):
        check(claims[1][:-1])
    with pytest.raises(ManifestMismatch, match=r"each byte once: written more than once: .* by rank 0 and rank 1"):
        check((*claims[1], claims[0][0]))


@pytest.mark.parametrize(
    ("world", "case"), [(2, "tp2 deepseek_v3 te"), (4, "tp2 pp2 qwen3 tied te"), (4, "tp2 dp2 llama")]
)
def test_every_copy_is_compared_with_what_was_sent(launched: Launched, world: int, case: str) -> None:
    seen = [one["trained"] for one in of(launched[world], case)]
    manifest, _, _ = written(seen)

    def pieces(what: str, plus: int = 0) -> dict[int, list[Piece]]:
        by_rank = {}
        for rank, one in enumerate(seen):
            slices = [LocalSlice(msgspec.convert(box, Box), tensor + plus) for box, tensor in one[what]]
            by_rank[rank] = list(digests_of(manifest, slices))
        return by_rank

    sent, copies = pieces("slices"), pieces("copies")
    boxes = {piece.box for own in sent.values() for piece in own}
    assert copies[len(seen) - 1] and all(piece.box in boxes for own in copies.values() for piece in own)
    assert what_differs(manifest, sent, copies) == ""
    assert "norm.weight" in what_differs(manifest, sent, pieces("copies", plus=1))


# --- dtypes and values that are not plain ----------------------------------------------------------------------------


def test_the_routers_bias_is_fp32_in_a_bf16_model_before_and_after_the_first_step(
    launched: Launched, checkpoints: Path
) -> None:
    seen = of(launched[2], "float16 module")
    manifest, values, _ = written([one["trained"] for one in seen])
    assert [one["bias"] for one in seen] == [["torch.bfloat16", "torch.float32"]] * 2
    assert all(one["same"] for one in seen)
    dtypes = {spec.name: spec.dtype for spec in manifest.tensors}
    kept = {n for n, d in dtypes.items() if d == "float32"}
    assert kept == {n for n in dtypes if n.endswith(("norm.weight", "e_score_correction_bias"))}
    assert_is_gold(values, gold_of(seen, hf_config(checkpoints, "deepseek_v3")), {})


def test_gates_of_attention_lie_behind_each_heads_query(launched: Launched, checkpoints: Path) -> None:
    seen = of(launched[2], "gated attention")
    _, values, _ = written([one["trained"] for one in seen])
    hf = hf_config(checkpoints, "qwen3") | {"gated": True}
    assert values["model.layers.0.self_attn.q_proj.weight"].shape == (2 * 4 * 16, 32)
    assert_is_gold(values, gold_of(seen, hf), {})


def test_zero_centered_norms_travel_with_their_one(launched: Launched, checkpoints: Path) -> None:
    seen = of(launched[2], "zero-centered norms")
    _, values, _ = written([one["trained"] for one in seen])
    gold = gold_of(seen, hf_config(checkpoints, "llama"))
    assert_is_gold(values, {name: t.float() + 1 if name.endswith("norm.weight") else t for name, t in gold.items()}, {})


# --- architectures ------------------------------------------------------------------------------------------------------


def test_an_architecture_of_ones_own_is_registered_by_decorator_and_sent(launched: Launched, checkpoints: Path) -> None:
    seen = of(launched[2], "ep2 our mixtral")
    for one in seen:
        assert one["unknown"]["error"] == "ManifestMismatch"
        assert (
            "no Megatron architecture for model_type 'our_mixtral'; there are deepseek_v2, deepseek_v3"
            in one["unknown"]["text"]
        )
        assert one["same"], "given to the adapter it is the same"
        assert one["twice"] == "a Megatron architecture is registered already for our_mixtral"
    _, values, _ = written([one["trained"] for one in seen])
    assert_is_gold(values, gold_of(seen, hf_config(checkpoints, "mixtral")), {})
    written_by_transformers = of_file(checkpoints / "mixtral")
    assert {n: t.shape for n, t in values.items()} == {n: t.shape for n, t in written_by_transformers.items()}


def test_an_architecture_of_a_plug_in_with_a_rule_of_its_own_is_sent(launched: Launched, checkpoints: Path) -> None:
    seen = of(launched[2], "tp2 our phi3")
    _, values, _ = written([one["trained"] for one in seen])
    assert_is_gold(values, gold_of(seen, hf_config(checkpoints, "phi3")), {})
    written_by_transformers = of_file(checkpoints / "phi3")
    assert {n: t.shape for n, t in values.items()} == {n: t.shape for n, t in written_by_transformers.items()}


def test_megatron_bridges_export_is_a_source_where_no_architecture_fits(launched: Launched, checkpoints: Path) -> None:
    seen = of(launched[2], "fallback")
    loaded, shifted, by_rank_0 = (
        written([one[what] for one in seen], collectives=seen[0][what]["collectives"])
        for what in ("loaded", "shifted", "by rank 0")
    )
    gold = of_file(checkpoints / "gemma")
    assert_is_gold(loaded[1], gold, {})
    for _, values, _ in (shifted, by_rank_0):
        assert_is_gold(values, {name: tensor.mul(1.03).add(0.01) for name, tensor in gold.items()}, {})
    assert all(shifted[2]) and not by_rank_0[2][1], "what all ranks yield they share, what one yields it sends"


# --- LoRA ------------------------------------------------------------------------------------------------------------

LORA = {
    (2, "lora tp2 qwen3 te"): r"layers\.\d\.(self_attn\.._proj|mlp\..*_proj)\.",
    (2, "lora ep2 qwen3_moe"): r"layers\.\d\.(self_attn\.._proj|mlp\.experts.*_proj)\.",
    (2, "lora ep2 qwen3_moe te"): r"layers\.\d\.mlp\.experts.*_proj\.",
    (2, "lora etp2 qwen3_moe te"): r"layers\.\d\.(self_attn\.[qkv]_proj|mlp\.experts.*_proj)\.",
    (2, "lora ep2 gpt_oss"): r"layers\.\d\.mlp\.experts\.(gate_up|down)_proj$",
    (4, "lora tp2 pp2 qwen3 te"): r"layers\.(\d\.self_attn\.o_proj|[13]\.mlp\.(gate|up)_proj)\.",
}
"""Which tensors are adapted. Targets are each stage's own names: `layers.1` on two stages is layers 1 and 3."""


@pytest.mark.parametrize(("world", "case"), LORA, ids=[case for _, case in LORA])
def test_lora_adapters_are_merged_into_what_is_sent_as_megatron_bridge_merges_them(
    launched: Launched, checkpoints: Path, world: int, case: str
) -> None:
    seen = of(launched[world], case)
    hf = hf_config(checkpoints, next(kind for kind in ("qwen3_moe", "gpt_oss", "qwen3") if kind in case))
    _, values, _ = written([one["merged"] for one in seen], collectives=seen[0]["merged"]["collectives"])
    base = assemble([{"raw": one["before"], "place": one["place"]} for one in seen], hf)
    assert {n for n, t in values.items() if not torch.equal(t, base[n])} == {
        n for n in base if re.search(LORA[world, case], n)
    }
    golds = [seen[0]["bridge"]] if "bridge" in seen[0] else []
    for gold in golds + ([gold_of(seen, hf)] if "raw" in seen[0] else []):
        assert values.keys() == gold.keys()
        for name, value in values.items():
            torch.testing.assert_close(value, gold[name], rtol=1e-5, atol=1e-7, msg=lambda text, n=name: f"{n}: {text}")
    for one in seen:
        assert all(torch.equal(one["gathered"][name], value) for name, value in values.items())


@pytest.mark.parametrize(("world", "case"), LORA, ids=[case for _, case in LORA])
def test_lora_adapters_alone_are_what_megatron_bridge_would_merge(
    launched: Launched, checkpoints: Path, world: int, case: str
) -> None:
    seen = of(launched[world], case)
    if "moe" in case or "gpt_oss" in case:
        for one in seen:
            assert one["alone_refused"]["error"] == "ManifestMismatch", one["alone_refused"]
            assert "LoRA slots can't hold the adapters of experts: decoder.layers." in one["alone_refused"]["text"]
        return
    hf = hf_config(checkpoints, "qwen3")
    _, values, _ = written([one["alone"] for one in seen], collectives=seen[0]["alone"]["collectives"])
    base = assemble([{"raw": one["before"], "place": one["place"]} for one in seen], hf)
    layers = {name.removesuffix("weight") for name in base if re.search(LORA[world, case], name)}
    assert set(values) == {f"base_model.model.{name}lora_{x}.weight" for name in layers for x in "AB"}
    for name in layers:
        a, b = (values[f"base_model.model.{name}lora_{x}.weight"] for x in "AB")
        assert a.shape[0] == b.shape[1] == 4
        merged = seen[0]["bridge"][f"{name}weight"]
        torch.testing.assert_close(base[f"{name}weight"] + b @ a, merged, rtol=1e-5, atol=1e-6)
    for one in seen:
        assert "LoRA adapters were added, removed or scaled" in one["alone_scaled"]["text"]


def test_adapters_that_were_scaled_or_disabled_meanwhile_and_kinds_without_a_rule_are_refused(
    launched: Launched,
) -> None:
    for one in of(launched[2], "lora tp2 qwen3 te"):
        assert "LoRA adapters were added, removed or scaled" in one["scaled"]["text"]
        assert "decoder.layers.0.self_attention.linear_proj has an adapter that is disabled" in one["disabled"]["text"]
    for one in of(launched[2], "lora without a rule"):
        for kind in ("CanonicalLoRA", "DoRA"):
            assert one[kind]["error"] == "ManifestMismatch"
            assert "which has no rule here" in one[kind]["text"] and "ExportAdapter" in one[kind]["text"]
            assert "layers.0.self_attention.linear_qkv has Megatron-Bridge's" in one[kind]["text"]
        assert one["other order"]["error"] == "ManifestMismatch"
        assert "orders the weight of mtp.layers.0.eh_proj differently" in one["other order"]["text"]


# --- rules and marks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("rule by columns", "linear_proj.weight [32, 32] is divided along dimension 1, but its rule ColumnParallel("),
        ("rule replicated", "is for one that is whole on each tensor-parallel rank"),
        (
            "router by rows",
            "mlp.router.weight [4, 32] is whole on each tensor-parallel rank, but its rule RowParallel(",
        ),
        ("marked by rows", "linear_qkv.weight [64, 32] is divided along dimension 1, but its rule QKV("),
        ("strides", "linear_qkv.weight is divided with partition_stride 2, but its rule supports 1"),
        ("reduced expert", "linear_fc1.weight has allreduce=True, so it is no expert's parameter"),
        ("unreduced attention", "linear_qkv.weight has allreduce=False, so it is an expert's parameter"),
    ],
)
def test_a_rule_that_contradicts_what_megatron_says_of_the_parameter_is_refused_by_name(
    launched: Launched, what: str, text: str
) -> None:
    for one in of(launched[2], "disagree"):
        assert one[what]["error"] == "ManifestMismatch", one[what]
        assert text in one[what]["text"], one[what]["text"]
        assert one["fine"]["error"] is None and one["strides of a gate"]["error"] is None
        assert one["wrong on one rank, which does not matter there"]["error"] is None


# --- changes and refusals --------------------------------------------------------------------------------------------


def test_slices_are_the_parameters_own_memory_and_follow_training(launched: Launched) -> None:
    for one in of(launched[2], "several updates"):
        assert one["views"], "a slice is a copy"
        assert one["same"]
        changed, total = one["changed"]
        assert changed == total > 0


def test_a_model_that_changed_between_updates_is_refused_by_name(launched: Launched) -> None:
    for one in of(launched[2], "several updates"):
        reshaped, appeared, freed, _ = one["errors"]
        assert [each["error"] for each in one["errors"]] == ["ManifestMismatch"] * 3 + [None]
        assert "layers.0.mlp.linear_fc2.weight has no memory: it was freed" in freed["text"]
        assert (
            "layers.0.mlp.linear_fc2.weight was torch.float32 [32, 24] and is torch.float32 [3, 3]" in reshaped["text"]
        )
        assert "decoder.layers.0.extra appeared" in appeared["text"]
        assert "make a new MegatronAdapter, on all ranks" in appeared["text"]


def test_parameters_that_wait_to_be_gathered_are_refused_and_sent_once_they_are(
    launched: Launched, checkpoints: Path
) -> None:
    seen = of(launched[2], "dp2 overlapped")
    for one in seen:
        assert [one[when]["error"] for when in ("before", "before its first step", "then gathered")] == [None] * 3
        for error in (*one["no forward"], *one["no sync"], one["reduced at the end"]):
            assert error["error"] == "ManifestMismatch", error
            assert "overlap_param_gather" in error["text"] and "start_param_sync(force_sync=True)" in error["text"]
        assert one["forwarded"]["error"] is None
    _, values, _ = written([one["trained"] for one in seen])
    assert_is_gold(values, gold_of(seen, hf_config(checkpoints, "qwen3")), {})


@pytest.mark.parametrize(
    ("what", "parts"),
    [
        (
            "no rule",
            ["rank=1", "no rule for Megatron's decoder.layers.1.mlp.extra [2, 2]", "docs/trainers/megatron.md"],
        ),
        ("no table", ["no Megatron architecture for model_type 'phimoe'; there are deepseek_v2, deepseek_v3"]),
        ("tied", ["tie_word_embeddings is True", "share_embeddings_and_output_weights is False"]),
        ("vocabulary", ["different models: vocabulary is 249, on rank 0 250"]),
        ("meta", ["rank=1", "decoder.final_layernorm.weight is on the meta device"]),
        ("a chunk is missing", ["no rank holds decoder layer 3"]),
        ("chunks in another order", ["rank=1", "was built as layer"]),
        ("another shape", ["different models: model.layers.0.mlp.gate_proj.weight is float32 [64, 32] on rank 1"]),
        ("another depth", ["different models: layers is 3, on rank 0 4"]),
        ("another number of heads", ["linear_qkv.weight has 96 rows over all ranks", "accounts for 128"]),
    ],
)
def test_one_rank_that_is_wrong_is_an_error_on_all_ranks(launched: Launched, what: str, parts: list[str]) -> None:
    for one in of(launched[2], "refuse"):
        assert one[what]["error"] == "ManifestMismatch", one[what]
        assert [part for part in parts if part not in one[what]["text"]] == [], one[what]["text"]


def test_of_a_larger_model_the_text_model_is_taken_and_the_config_of_the_whole(launched: Launched) -> None:
    for one in of(launched[2], "refuse"):
        assert one["a vision tower too"]["error"] == "ArgumentError"
        assert "give its language_model, with the config of the whole" in one["a vision tower too"]["text"]
        assert one["its text model"]["error"] is None, one["its text model"]["text"]
        assert one["tied in the text model"]["error"] == "ManifestMismatch", (
            "engines tie what the text model's config ties"
        )


def test_what_is_no_megatron_model_is_the_same_error_on_all_ranks(launched: Launched) -> None:
    first, second = (one["no model"] for one in of(launched[2], "refuse"))
    assert first["error"] == second["error"] == "ArgumentError"
    assert all("expected Megatron-Core's GPTModel" in one["text"] for one in (first, second))


def test_a_config_that_one_rank_lacks_is_the_same_error_on_all_ranks(launched: Launched) -> None:
    for one in of(launched[2], "refuse"):
        seen = one["no config"]
        assert seen["error"] == "ArgumentError" and "without the config of its checkpoint" in seen["text"], seen
        assert "rank=1" in seen["text"], seen


def test_a_refusal_leaves_nothing_behind(launched: Launched) -> None:
    for one in of(launched[2], "refuse"):
        assert one["fine"]["error"] is None
        assert one["any order of chunks that know their stage"]["error"] is None


def test_importing_the_adapter_needs_no_megatron() -> None:
    code = "import sys, trainer_adapters; trainer_adapters.MegatronAdapter; sys.exit('megatron' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=600, check=False).returncode == 0
