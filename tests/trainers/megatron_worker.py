"""Run by `torchrun` in `.venvs/megatron`: one training rank that takes every case of its world size in turn.

Usage: megatron_worker.py OUT_DIRECTORY CHECKPOINTS_DIRECTORY [further]. What each rank saw is compared in
`test_megatron_adapter.py` with Megatron-Bridge's export and with a gold model assembled there from `raw`, all ranks'
parameters as Megatron has them.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.module import MegatronModule

from tests.support.leaving import leave_process_groups
from tests.support.megatron_cpu import fake_transformer_engine, import_bridge, run_on_cpu, without_fused_kernels
from tests.support.megatron_models import KINDS, Layout, build, data_parallel, run_schedule, shift, text_of, train
from tests.trainers.observing import Result, observe, refused
from trainer_adapters import ExportAdapter, MegatronAdapter, MegatronLoRAAdapter
from trainer_adapters.sources import megatron
from trainer_adapters.sources.chosen import source_for
from trainer_adapters.sources.gather import gathered
from trainer_adapters.sources.megatron import (
    Architecture,
    ColumnParallel,
    GatedMLP,
    Replicated,
    RowParallel,
    decoder_layer,
    megatron_architecture,
)
from trainer_adapters.sources.megatron.families.llama import llama

SEQUENCE_PARALLEL = (("sequence_parallel", True),)
"""Without it, Megatron doesn't sum the gradients of a gated delta net's norm over tensor-parallel ranks."""

CASES: dict[int, dict[str, tuple[str, Layout]]] = {
    2: {
        "tp2 llama": ("llama", Layout(tp=2)),
        "tp2 llama te": ("llama", Layout(tp=2, te=True)),
        "tp2 one kv head": ("mqa", Layout(tp=2, padded=True)),
        "tp2 qwen2 te": ("qwen2", Layout(tp=2, te=True)),
        "pp2 qwen2": ("qwen2", Layout(pp=2)),
        "tp2 qwen3 tied te": ("qwen3 tied", Layout(tp=2, te=True)),
        "pp2 qwen3 tied": ("qwen3 tied", Layout(pp=2, padded=True)),
        "pp2 vpp2 qwen3": ("qwen3", Layout(pp=2, vpp=2)),
        "dp2 qwen3 te bf16": ("qwen3", Layout(te=True, dtype=torch.bfloat16)),
        "ep2 qwen3_moe te": ("qwen3_moe", Layout(ep=2, te=True)),
        "ep2 qwen3_moe": ("qwen3_moe", Layout(ep=2)),
        "etp2 qwen3_moe te": ("qwen3_moe", Layout(tp=2, etp=2, te=True)),
        "etp2 qwen3_moe": ("qwen3_moe", Layout(tp=2, etp=2)),
        "tp2 qwen2_moe te": ("qwen2_moe", Layout(tp=2, etp=1, ep=2, te=True, padded=True)),
        "tp2 deepseek_v3 te": ("deepseek_v3", Layout(tp=2, te=True)),
        "tp2 deepseek_v3": ("deepseek_v3", Layout(tp=2, padded=True)),
        "ep2 deepseek_v3 mtp te": ("deepseek_v3", Layout(ep=2, te=True, mtp=1)),
        "pp2 deepseek_v3 mtp": ("deepseek_v3", Layout(pp=2, mtp=1)),
        "tp2 deepseek_v2 te": ("deepseek_v2", Layout(tp=2, te=True)),
        "pp2 glm4_moe mtp": ("glm4_moe", Layout(pp=2, mtp=1)),
        "tp2 gpt_oss te": ("gpt_oss", Layout(tp=2, ep=2, etp=1, te=True)),
        "ep2 gpt_oss": ("gpt_oss", Layout(ep=2)),
        "tp2 mimo mtp te": ("mimo", Layout(tp=2, mtp=1, te=True)),
        "tp2 qwen3_next te": ("qwen3_next", Layout(tp=2, etp=1, ep=2, te=True)),
        "tp2 qwen3_5 mtp te": ("qwen3_5", Layout(tp=2, mtp=1, te=True, overrides=SEQUENCE_PARALLEL)),
        "tp2 qwen3_5_moe te": ("qwen3_5_moe", Layout(tp=2, etp=1, ep=2, te=True)),
        "tp2 glm4 te": ("glm4", Layout(tp=2, te=True)),
        "tp2 ernie4_5_moe te": ("ernie4_5_moe", Layout(tp=2, ep=2, etp=1, te=True)),
        "tp2 llama4 te": ("llama4", Layout(tp=2, ep=2, etp=1, te=True)),
        "pp2 phi3 te": ("phi3", Layout(pp=2, te=True)),
        "tp2 nemotron_h te": ("nemotron_h", Layout(tp=2, ep=2, etp=1, te=True)),
        "tp2 nemotron te": ("nemotron", Layout(tp=2, te=True)),
        "tp2 gemma3 te": ("gemma3", Layout(tp=2, te=True)),
    },
    4: {
        "tp2 pp2 qwen3 tied te": ("qwen3 tied", Layout(tp=2, pp=2, te=True)),
        "tp2 dp2 llama": ("llama", Layout(tp=2, padded=True)),
        "tp4 qwen3": ("qwen3", Layout(tp=4, padded=True)),
        "tp2 ep2 qwen3_moe te": ("qwen3_moe", Layout(tp=2, ep=2, etp=1, te=True)),
        "tp2 ep2 etp2 qwen3_moe te": ("qwen3_moe", Layout(tp=2, ep=2, etp=2, te=True, trains=False)),
        "pp2 vpp2 ep2 qwen3_moe te": ("qwen3_moe", Layout(pp=2, vpp=2, ep=2, te=True)),
        "pp2 vpp2 ep2 qwen3_moe": ("qwen3_moe", Layout(pp=2, vpp=2, ep=2)),
        "tp2 pp2 deepseek_v3 mtp te": ("deepseek_v3", Layout(tp=2, pp=2, mtp=1, te=True, padded=True)),
        "tp2 pp2 ep2 glm4_moe te": ("glm4_moe", Layout(tp=2, pp=2, ep=2, etp=1, te=True)),
    },
}

FULL: dict[int, dict[str, tuple[str, Layout]]] = {
    2: {
        "pp2 deepseek_v2": ("deepseek_v2", Layout(pp=2, padded=True)),
        "ep2 deepseek_v2 te": ("deepseek_v2", Layout(ep=2, te=True)),
        "etp2 deepseek_v2": ("deepseek_v2", Layout(tp=2, etp=2)),
        "tp2 kimi_k2 te": ("kimi_k2", Layout(tp=2, te=True)),
        "pp2 kimi_k2": ("kimi_k2", Layout(pp=2)),
        "ep2 kimi_k2 te": ("kimi_k2", Layout(ep=2, te=True)),
        "tp2 glm4_moe_lite te": ("glm4_moe_lite", Layout(tp=2, ep=2, etp=1, te=True)),
        "etp2 glm4_moe_lite": ("glm4_moe_lite", Layout(tp=2, etp=2)),
        "pp2 glm4_moe_lite mtp te": ("glm4_moe_lite", Layout(pp=2, mtp=1, te=True)),
        "tp2 glm4_moe te": ("glm4_moe", Layout(tp=2, ep=2, etp=1, te=True)),
        "etp2 glm4_moe mtp": ("glm4_moe", Layout(tp=2, etp=2, mtp=1, padded=True)),
        "ep2 glm4_moe mtp te": ("glm4_moe", Layout(ep=2, mtp=1, te=True)),
        "tp2 mixtral te": ("mixtral", Layout(tp=2, ep=2, etp=1, te=True)),
        "etp2 mixtral": ("mixtral", Layout(tp=2, etp=2, padded=True)),
        "pp2 mixtral te": ("mixtral", Layout(pp=2, te=True)),
        "ep2 mixtral": ("mixtral", Layout(ep=2)),
        "ep2 gpt_oss te": ("gpt_oss", Layout(ep=2, te=True)),
        "tp2 gpt_oss": ("gpt_oss", Layout(tp=2, etp=1, padded=True, trains=False)),
        "pp2 gpt_oss te": ("gpt_oss", Layout(pp=2, te=True)),
        "dp2 gpt_oss te bf16": ("gpt_oss", Layout(te=True, dtype=torch.bfloat16)),
        "pp2 mimo mtp": ("mimo", Layout(pp=2, mtp=1)),
        "tp2 mimo": ("mimo", Layout(tp=2, padded=True)),
        "tp2 seed_oss te": ("seed_oss", Layout(tp=2, te=True)),
        "pp2 seed_oss": ("seed_oss", Layout(pp=2)),
        "ep2 olmoe te": ("olmoe", Layout(ep=2, te=True)),
        "pp2 olmoe": ("olmoe", Layout(pp=2)),
        "pp2 qwen3_next te": ("qwen3_next", Layout(pp=2, te=True)),
        "tp2 qwen3_next mtp te": ("qwen3_next", Layout(tp=2, etp=2, mtp=1, te=True)),
        "pp2 qwen3_5 te": ("qwen3_5", Layout(pp=2, te=True)),
        "pp2 qwen3_5_text te": ("qwen3_5_text", Layout(pp=2, te=True, padded=True)),
        "pp2 qwen3_5_moe mtp te": ("qwen3_5_moe", Layout(pp=2, mtp=1, te=True)),
        "ep2 qwen3_5_moe te": ("qwen3_5_moe", Layout(ep=2, te=True)),
        "pp2 glm4": ("glm4", Layout(pp=2)),
        "tp2 glm4": ("glm4", Layout(tp=2, padded=True, overrides=SEQUENCE_PARALLEL)),
        "pp2 ernie4_5_moe": ("ernie4_5_moe", Layout(pp=2)),
        "ep2 ernie4_5_moe te bf16": ("ernie4_5_moe", Layout(ep=2, te=True, dtype=torch.bfloat16)),
        "etp2 llama4": ("llama4", Layout(tp=2, etp=2)),
        "pp2 llama4 te": ("llama4", Layout(pp=2, te=True)),
        "ep2 llama4_text te": ("llama4_text", Layout(ep=2, te=True)),
        "tp2 phi3 te": ("phi3", Layout(tp=2, te=True)),
        "pp2 nemotron_h te": ("nemotron_h", Layout(pp=2, te=True)),
        "ep2 nemotron_h te": ("nemotron_h", Layout(ep=2, te=True)),
        "pp2 nemotron te": ("nemotron", Layout(pp=2, te=True)),
        "tp2 gemma2 te": ("gemma2", Layout(tp=2, te=True)),
        "pp2 gemma2 te": ("gemma2", Layout(pp=2, te=True)),
        "tp2 gemma te": ("gemma", Layout(tp=2, te=True)),
        "pp2 gemma3 te": ("gemma3", Layout(pp=2, te=True)),
        "pp2 gemma te": ("gemma", Layout(pp=2, te=True, padded=True)),
    },
    4: {
        "tp2 pp2 ep2 gpt_oss te": ("gpt_oss", Layout(tp=2, pp=2, ep=2, etp=1, te=True)),
        "tp2 pp2 glm4_moe mtp te": ("glm4_moe", Layout(tp=2, pp=2, mtp=1, te=True)),
        "tp2 pp2 ep2 mixtral te": ("mixtral", Layout(tp=2, pp=2, ep=2, etp=1, te=True)),
        "tp2 pp2 mimo mtp te": ("mimo", Layout(tp=2, pp=2, mtp=1, te=True)),
        "tp2 pp2 qwen3_5 te": ("qwen3_5", Layout(tp=2, pp=2, te=True, overrides=SEQUENCE_PARALLEL)),
        "tp2 pp2 ep2 llama4 te": ("llama4", Layout(tp=2, pp=2, ep=2, etp=1, te=True)),
        "tp2 pp2 ep2 ernie4_5_moe te": ("ernie4_5_moe", Layout(tp=2, pp=2, ep=2, etp=1, te=True)),
        "tp2 pp2 ep2 nemotron_h te": ("nemotron_h", Layout(tp=2, pp=2, ep=2, etp=1, te=True)),
        "tp2 pp2 ep2 qwen3_next mtp te": ("qwen3_next", Layout(tp=2, pp=2, ep=2, etp=1, mtp=1, te=True)),
    },
}
"""Further combinations, for `make test-full`."""


def raw(chunks: list[Any]) -> list[tuple[str, torch.Tensor]]:
    """Parameters and persistent buffers under Megatron's names, layers by the numbers that they were built with."""
    out = []
    for chunk in chunks:
        state = {k: v for k, v in chunk.state_dict().items() if isinstance(v, torch.Tensor)}
        for name, tensor in state.items():
            head, _, rest = name.partition("decoder.layers.")
            if rest and not head:
                local, _, rest = rest.partition(".")
                name = f"decoder.layers.{chunk.decoder.layers[int(local)].layer_number - 1}.{rest}"
            out.append((name, tensor.detach().clone()))
    return out


def place() -> dict[str, int]:
    return {
        "tp": mpu.get_tensor_model_parallel_rank(),
        "etp": mpu.get_expert_tensor_parallel_rank(),
        "ep": mpu.get_expert_model_parallel_rank(),
        "eps": mpu.get_expert_model_parallel_world_size(),
        "pp": mpu.get_pipeline_model_parallel_rank(),
    }


def combination(kind: str, layout: Layout, checkpoints: Path) -> Result:
    """A checkpoint loaded by Megatron-Bridge where it can, one training step, and what the adapter makes of it."""
    hf = config_of(kind, checkpoints)
    layout.enter()
    chunks = build(hf, layout)
    result: Result = {"place": place()}
    # Its rule for experts knows Transformer Engine's names only; it leaves MTP and padding out.
    is_moe = "num_experts_per_tok" in text_of(hf)
    bridge = None
    if KINDS[kind].bridge and not (layout.mtp or layout.padded or (is_moe and not layout.te)):
        bridge = BRIDGE.from_hf_pretrained(checkpoints / kind.replace(" ", "_"))
    if bridge is not None:
        bridge.load_hf_weights(chunks)
        result["loaded"] = observe(MegatronAdapter(chunks, hf))
    wrapped = train(chunks) if layout.trains else shift(chunks)
    result["trained"] = observe(MegatronAdapter(wrapped if len(wrapped) > 1 else wrapped[0], hf))
    if bridge is not None:
        exported = dict(bridge.export_hf_weights(chunks, cpu=True, show_progress=False))
        result["bridge"] = exported if dist.get_rank() == 0 else None
    result["raw"] = raw(chunks)
    return result


# --- what no Hugging Face model of the matrix has --------------------------------------------------------------------


def mixtral() -> Architecture:
    gate, up, down = (f"block_sparse_moe.experts.{{expert}}.{w}.weight" for w in ("w1", "w3", "w2"))
    rules = decoder_layer(
        Replicated("mlp.router.weight", "block_sparse_moe.gate.weight"),
        GatedMLP("mlp.experts.linear_fc1.weight{expert}", gate, up),
        RowParallel("mlp.experts.linear_fc2.weight{expert}", down),
    )
    return llama().extended(rules)


def registered_by_decorator(checkpoints: Path) -> Result:
    """A model that no architecture is registered for, until one is; and one that is given to the adapter alone."""
    hf = config_of("mixtral", checkpoints) | {"model_type": "our_mixtral"}
    layout = Layout(ep=2, te=True)
    layout.enter()
    chunks = train(build(hf, layout))
    result: Result = {"place": place(), "unknown": refused(lambda: MegatronAdapter(chunks, hf))}
    given = MegatronAdapter(chunks, hf, architecture=mixtral()).manifest()
    megatron_architecture("our_mixtral")(mixtral)
    adapter = MegatronAdapter(chunks, hf)
    try:
        megatron_architecture("our_mixtral")(mixtral)
        twice = ""
    except ValueError as error:
        twice = str(error)
    return result | {
        "trained": observe(adapter),
        "raw": raw(inner(chunks)),
        "same": given == adapter.manifest(),
        "twice": twice,
    }


def registered_by_a_plugin(checkpoints: Path) -> Result:
    """`phi3_plugin.py`, which `WEIGHTWIRE_PLUGINS` names."""
    hf = config_of("phi3", checkpoints) | {"model_type": "our_phi3"}
    layout = Layout(tp=2)
    layout.enter()
    chunks = train(build(hf, layout))
    return {"place": place(), "trained": observe(MegatronAdapter(chunks, hf)), "raw": raw(inner(chunks))}


def rules_and_marks_that_disagree(checkpoints: Path) -> Result:
    """What Megatron says of a parameter is held against its rule: one of the two is wrong."""
    hf = config_of("qwen3_moe", checkpoints)
    out: Result = {}

    def with_rule(rule: Any) -> Any:
        architecture = megatron.architectures()["qwen3_moe"].extended(decoder_layer(rule))
        return refused(lambda: MegatronAdapter(chunks, hf, architecture=architecture))

    def with_mark(parameter: Any, mark: str, value: Any) -> Any:
        before = getattr(parameter, mark)
        setattr(parameter, mark, value)
        try:
            return refused(lambda: MegatronAdapter(chunks, hf))
        finally:
            setattr(parameter, mark, before)

    Layout(tp=2).enter()
    chunks = build(hf, Layout(tp=2))
    proj, o_proj = "self_attention.linear_proj.weight", "self_attn.o_proj.weight"
    out["rule by columns"] = with_rule(ColumnParallel(proj, o_proj))
    out["rule replicated"] = with_rule(Replicated(proj, o_proj))
    out["router by rows"] = with_rule(RowParallel("mlp.router.weight", "mlp.gate.weight"))
    qkv = chunks[0].decoder.layers[0].self_attention.linear_qkv.weight
    out["marked by rows"] = with_mark(qkv, "partition_dim", 1)
    out["strides"] = with_mark(qkv, "partition_stride", 2)
    fc1 = chunks[0].decoder.layers[0].mlp.experts.local_experts[0].linear_fc1.weight
    out["strides of a gate"] = with_mark(fc1, "partition_stride", 2)
    out["fine"] = refused(lambda: MegatronAdapter(chunks, hf))
    Layout(ep=2).enter()
    chunks = build(hf, Layout(ep=2))
    layer = chunks[0].decoder.layers[0]
    out["reduced expert"] = with_mark(layer.mlp.experts.local_experts[0].linear_fc1.weight, "allreduce", True)
    out["unreduced attention"] = with_mark(layer.self_attention.linear_qkv.weight, "allreduce", False)
    out["wrong on one rank, which does not matter there"] = with_rule(ColumnParallel(proj, o_proj))
    return out


def gated_attention(checkpoints: Path) -> Result:
    """Each group of heads has gates too, as in Qwen3-Next."""
    hf = config_of("qwen3", checkpoints)
    layout = Layout(tp=2, overrides=(("attention_output_gate", True),))
    layout.enter()
    chunks = train(build(hf, layout))
    return {"place": place(), "trained": observe(MegatronAdapter(chunks, hf)), "raw": raw(inner(chunks))}


def zero_centered_norms(checkpoints: Path) -> Result:
    """Megatron holds norms less one, the checkpoint doesn't. They travel in a wider dtype than they have here, in which one more
    keeps their bits."""
    hf = config_of("llama", checkpoints)
    layout = Layout(tp=2, te=True, dtype=torch.bfloat16, overrides=(("layernorm_zero_centered_gamma", True),))
    layout.enter()
    chunks = build(hf, layout)
    with torch.no_grad():
        for name, parameter in chunks[0].named_parameters():
            if "norm" in name:
                parameter.fill_(2.0**-12)
    adapter = MegatronAdapter(chunks, hf, dtype_rules={"*norm.weight": torch.float32})
    return {"place": place(), "trained": observe(adapter), "raw": raw(chunks)}


def wrapped_in_float16_module(checkpoints: Path) -> Result:
    """bf16 in Megatron's wrappers: the router's bias counts as fp32 before it is, and stays the same manifest after.

    Dtype rules apply to the names of the manifest.
    """
    from megatron.core.transformer.module import Float16Module

    hf = config_of("deepseek_v3", checkpoints)
    layout = Layout(ep=2, te=True, dtype=torch.bfloat16)
    layout.enter()
    chunks = build(hf, layout)
    wrapped = [Float16Module(chunk.config, chunk) for chunk in chunks]
    router = chunks[0].decoder.layers[1].mlp.router
    before = str(router.expert_bias.dtype)
    adapter = MegatronAdapter(wrapped, hf, dtype_rules={"*norm.weight": torch.float32})
    manifest = adapter.manifest()
    train(wrapped)
    same = adapter.manifest() is manifest
    after = str(router.expert_bias.dtype)
    return {
        "place": place(),
        "trained": observe(adapter),
        "raw": raw(chunks),
        "bias": [before, after],
        "same": same,
    }


def several_updates(checkpoints: Path) -> Result:
    """Slices are the parameters' own memory and follow training; a model that changed is refused."""
    hf = config_of("qwen3", checkpoints)
    Layout(tp=2).enter()
    chunks = build(hf, Layout(tp=2))
    adapter = MegatronAdapter(chunks, hf)
    manifest = adapter.manifest()
    before = [piece.tensor.clone() for piece in adapter.slices()]
    train(chunks)
    storages = {p.untyped_storage().data_ptr() for p in chunks[0].parameters()}
    views = all(piece.tensor.untyped_storage().data_ptr() in storages for piece in adapter.slices())
    changed = sum(not torch.equal(piece.tensor, old) for piece, old in zip(adapter.slices(), before, strict=True))
    same = adapter.manifest() is manifest
    layer = chunks[0].decoder.layers[0]
    kept, layer.mlp.linear_fc2.weight = layer.mlp.linear_fc2.weight, torch.nn.Parameter(torch.ones(3, 3))
    reshaped = refused(adapter.manifest)
    layer.mlp.linear_fc2.weight = kept
    layer.extra = torch.nn.Parameter(torch.ones(2))
    appeared = refused(adapter.slices)
    del layer.extra
    kept.untyped_storage().resize_(0)  # as an offloader moves it away
    freed = refused(adapter.slices)
    kept.untyped_storage().resize_(kept.nbytes)
    healed = refused(adapter.slices)
    return {
        "views": views,
        "changed": [changed, len(before)],
        "same": same,
        "errors": [reshaped, appeared, freed, healed],
    }


def gathered_in_the_next_forward_pass(checkpoints: Path) -> Result:
    """The distributed optimizer steps a part of the parameters on each rank, and leaves the others' parts to be gathered."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    hf = config_of("qwen3", checkpoints)
    layout = Layout(te=True, dtype=torch.bfloat16)
    layout.enter()
    chunks = build(hf, layout)
    overlapped = {"use_distributed_optimizer": True, "overlap_param_gather": True}
    wrapped = data_parallel(chunks, DistributedDataParallelConfig(overlap_grad_reduce=True, **overlapped))
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-2, bf16=True, **overlapped), wrapped)
    adapter, bare = MegatronAdapter(wrapped, hf), MegatronAdapter(chunks, hf)
    out: Result = {"place": place(), "before": refused(adapter.manifest)}
    reduced = data_parallel(build(hf, layout), DistributedDataParallelConfig(overlap_grad_reduce=False, **overlapped))
    stepper = get_megatron_optimizer(OptimizerConfig(lr=1e-2, bf16=True, **overlapped), reduced)
    other = MegatronAdapter(reduced, hf)
    out["before its first step"] = refused(other.manifest)
    run_schedule(reduced)
    stepper.step()
    out["reduced at the end"] = refused(other.manifest)
    reduced[0].start_param_sync(force_sync=True)
    out["then gathered"] = refused(other.manifest)
    for way in ("forward", "sync"):
        run_schedule(wrapped)
        optimizer.step()
        out[f"no {way}"] = [refused(adapter.manifest), refused(adapter.slices), refused(bare.manifest)]
        if way == "forward":
            run_schedule(wrapped, forward_only=True)
            out["forwarded"] = refused(adapter.manifest)
        else:
            wrapped[0].start_param_sync(force_sync=True)
    return out | {"trained": observe(adapter), "raw": raw(chunks)}


def refuse(checkpoints: Path) -> Result:
    """Models that can't be sent rightly; most are wrong on rank 1 only, and an error on both."""
    hf = config_of("qwen3", checkpoints)
    second = dist.get_rank() == 1
    out: Result = {}
    Layout(pp=2).enter()
    chunks = build(hf, Layout(pp=2))
    if second:
        chunks[0].decoder.layers[1].mlp.extra = torch.nn.Parameter(torch.ones(2, 2))
    out["no rule"] = refused(lambda: MegatronAdapter(chunks, hf))
    out["no model"] = refused(lambda: MegatronAdapter(torch.nn.Linear(2, 2) if second else chunks, hf))
    if second:
        del chunks[0].decoder.layers[1].mlp.extra
    whole = MegatronModule(chunks[0].config)
    whole.language_model = chunks[0]
    out["a vision tower too"] = refused(lambda: source_for(whole, hf_config=hf))
    larger = {"model_type": "qwen3", "text_config": hf}
    out["its text model"] = refused(lambda: MegatronAdapter([whole.language_model], larger))
    out["tied in the text model"] = refused(
        lambda: MegatronAdapter(chunks, hf | {"text_config": {"tie_word_embeddings": True}})
    )
    out["no config"] = refused(lambda: source_for(chunks, hf_config=None if second else hf))
    out["no table"] = refused(lambda: MegatronAdapter(chunks, hf | {"model_type": "phimoe"}))
    out["tied"] = refused(lambda: MegatronAdapter(chunks, hf | {"tie_word_embeddings": True}))
    out["vocabulary"] = refused(lambda: MegatronAdapter(chunks, hf | {"vocab_size": 250 - second}))
    out["fine"] = refused(lambda: MegatronAdapter(chunks, hf))
    if second:
        with torch.device("meta"):
            chunks[0].decoder.final_layernorm.weight = torch.nn.Parameter(torch.ones(32))
    out["meta"] = refused(lambda: MegatronAdapter(chunks, hf))
    Layout(pp=2, vpp=2).enter()
    chunks = build(hf, Layout(pp=2, vpp=2))
    out["a chunk is missing"] = refused(lambda: MegatronAdapter(chunks[:1] if second else chunks, hf))
    out["any order of chunks that know their stage"] = refused(lambda: MegatronAdapter(chunks[::-1], hf))
    for chunk in chunks:
        chunk.vp_stage = None
    out["chunks in another order"] = refused(lambda: MegatronAdapter(chunks[::-1] if second else chunks, hf))
    Layout().enter()
    other = hf | ({"intermediate_size": 64} if second else {})
    out["another shape"] = refused(lambda: MegatronAdapter(build(other, Layout()), hf))
    deeper = hf | ({"num_hidden_layers": 3} if second else {})
    out["another depth"] = refused(lambda: MegatronAdapter(build(deeper, Layout()), hf))
    narrower = build(hf | {"num_attention_heads": 2}, Layout())
    narrower[0].config.num_attention_heads = 4
    out["another number of heads"] = refused(lambda: MegatronAdapter(narrower, hf))
    return out


def fallback_to_megatron_bridge(checkpoints: Path) -> Result:
    """A model that the tables don't have: Megatron-Bridge's export, which gathers, yielded on all ranks or on one."""
    Layout(tp=2).enter()
    bridge = BRIDGE.from_hf_pretrained(checkpoints / "gemma")
    provider = bridge.to_megatron_provider()
    provider.tensor_model_parallel_size = 2
    provider.attention_backend = AttnBackend.auto  # as the models before it: Megatron keeps that in the environment
    provider.finalize()
    chunks = provider.provide_distributed_model(wrap_with_ddp=False)

    def export() -> Iterator[tuple[str, torch.Tensor]]:
        return bridge.export_hf_weights(chunks, cpu=True, show_progress=False)

    source = ExportAdapter(export)
    result: Result = {
        "loaded": observe(source),
    }
    shift(chunks)
    result["shifted"] = observe(source)
    result["by rank 0"] = observe(ExportAdapter(lambda: (pair for pair in export() if dist.get_rank() == 0)))
    return result


def lora(kind: str, layout: Layout, *targets: str) -> Callable[[Path], Result]:
    """Megatron-Bridge's adapters, trained. It exports them merged; where it can't, they are merged in place, by itself."""

    def case(checkpoints: Path) -> Result:
        from megatron.bridge.peft.lora import LoRA, LoRAMerge

        hf = config_of(kind, checkpoints)
        layout.enter()
        chunks = build(hf, layout)
        before = raw(chunks)
        LoRA(target_modules=list(targets), dim=4, alpha=6)(chunks)
        wrapped = train(chunks, steps=2)
        source = MegatronAdapter(wrapped, hf)
        result: Result = {"place": place(), "merged": observe(source), "before": before}
        result["gathered"] = {name: tensor.clone() for name, tensor in gathered(source)}
        source.factors.config = SimpleNamespace(bucket_bytes=1)  # type: ignore[union-attr, assignment]
        small = observe(source)
        result["a bucket for each"] = {
            "more": small["collectives"] > result["merged"]["collectives"],
            "same": all(
                torch.equal(a, b) for (_, a), (_, b) in zip(small["slices"], result["merged"]["slices"], strict=True)
            ),
        }
        result["alone_refused"] = refused(lambda: MegatronLoRAAdapter(wrapped, hf))
        alone = None
        if result["alone_refused"]["error"] is None:
            alone = MegatronLoRAAdapter(wrapped, hf)
            result["alone"] = observe(alone)
        adapter = next(part.adapter for part in chunks[0].modules() if hasattr(part, "to_wrap"))
        adapter.alpha = 7
        result["scaled"] = refused(source.slices)
        result["alone_scaled"] = refused((alone or source).manifest)
        adapter.alpha = 6
        if layout.te:
            bridge = BRIDGE.from_hf_pretrained(checkpoints / kind.replace(" ", "_"))
            result["bridge"] = dict(bridge.export_hf_weights(chunks, cpu=True, show_progress=False))
        LoRA.disable_adapter_layers(LoRA(), chunks)
        result["disabled"] = refused(source.slices)
        if layout.tp == 1:
            LoRAMerge()(chunks, training=False)
            result["raw"] = [
                (name.replace(".to_wrap.", "."), tensor) for name, tensor in raw(chunks) if ".adapter." not in name
            ]
        return result

    return case


def lora_without_a_rule(checkpoints: Path) -> Result:
    """An adapter for each of queries, keys and values, where the layer has them in one; rows that are scaled; and an adapter,
    sent alone, of a layer whose columns the checkpoint has in another order."""
    from megatron.bridge.peft.canonical_lora import CanonicalLoRA
    from megatron.bridge.peft.dora import DoRA
    from megatron.bridge.peft.lora import LoRA

    hf = config_of("qwen3", checkpoints)
    Layout().enter()
    out: Result = {}
    for kind in (CanonicalLoRA, DoRA):
        chunks = build(hf, Layout())
        kind(dim=4)(chunks)
        out[kind.__name__] = refused(partial(MegatronAdapter, chunks, hf))
    hf = config_of("mimo", checkpoints)
    chunks = build(hf, Layout(mtp=1))
    LoRA(target_modules=["eh_proj"], dim=4)(chunks)
    out["other order"] = refused(partial(MegatronLoRAAdapter, chunks, hf))
    return out


SPECIAL: dict[int, dict[str, Callable[[Path], Result]]] = {
    2: {
        "ep2 our mixtral": registered_by_decorator,
        "tp2 our phi3": registered_by_a_plugin,
        "disagree": rules_and_marks_that_disagree,
        "gated attention": gated_attention,
        "zero-centered norms": zero_centered_norms,
        "float16 module": wrapped_in_float16_module,
        "several updates": several_updates,
        "refuse": refuse,
        "dp2 overlapped": gathered_in_the_next_forward_pass,
        "fallback": fallback_to_megatron_bridge,
        "lora tp2 qwen3 te": lora(
            "qwen3", Layout(tp=2, te=True), "linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"
        ),
        "lora ep2 qwen3_moe": lora("qwen3_moe", Layout(ep=2), "linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"),
        "lora ep2 qwen3_moe te": lora(
            "qwen3_moe", Layout(ep=2, te=True), "*.experts.linear_fc1", "*.experts.linear_fc2"
        ),
        "lora etp2 qwen3_moe te": lora(
            "qwen3_moe", Layout(tp=2, etp=2, te=True), "linear_qkv", "linear_fc1", "linear_fc2"
        ),
        "lora ep2 gpt_oss": lora("gpt_oss", Layout(ep=2), "linear_fc1", "linear_fc2"),
        "lora without a rule": lora_without_a_rule,
    },
    4: {"lora tp2 pp2 qwen3 te": lora("qwen3", Layout(tp=2, pp=2, te=True), "linear_proj", "*.layers.1.*.linear_fc1")},
}


def config_of(kind: str, checkpoints: Path) -> dict[str, Any]:
    return json.loads((checkpoints / kind.replace(" ", "_") / "config.json").read_text())


def inner(wrapped: list[Any]) -> list[Any]:
    return [one.module for one in wrapped]


def main(out: Path, checkpoints: Path, *, further: bool) -> None:
    torch.set_num_threads(1)
    os.environ["WEIGHTWIRE_PLUGINS"] = "tests.trainers.phi3_plugin"
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    results: dict[str, Result] = {}
    only = os.environ.get("ONLY", "")
    began_s = time.monotonic()
    combinations = (FULL if further else CASES)[dist.get_world_size()]
    cases: dict[str, Callable[[Path], Result]] = {
        name: partial(combination, kind, layout) for name, (kind, layout) in combinations.items()
    }
    for name, case in (cases | ({} if further else SPECIAL[dist.get_world_size()])).items():
        if re.search(only, name) is None:
            continue
        print(f"{time.monotonic() - began_s:.1f} s: {name}", flush=True)
        try:
            results[name] = case(checkpoints)
        except Exception:  # noqa: BLE001  the other ranks may wait for this one: end them all, the test shows this
            print(f"rank {dist.get_rank()}, {name}: {traceback.format_exc()}", file=sys.stderr, flush=True)
            os._exit(1)
        dist.barrier()
    torch.save(results, out / f"rank{dist.get_rank()}.pt")
    dist.barrier()
    mpu.destroy_model_parallel()  # which holds groups
    leave_process_groups()


if __name__ == "__main__":
    run_on_cpu()
    fake_transformer_engine()
    BRIDGE = import_bridge()
    without_fused_kernels()
    main(Path(sys.argv[1]), Path(sys.argv[2]), further=sys.argv[3:] == ["further"])
