"""The whole model as a Hugging Face state dict, from all ranks' Megatron parameters: gathered, concatenated and split
in memory, as converters that gather do it. Shares nothing with `trainer_adapters.sources.megatron.rules`.
"""

from __future__ import annotations

import re
from typing import Any

import torch

RENAMES = [
    (r"embedding\.word_embeddings\.weight", "model.embed_tokens.weight"),
    (r"decoder\.final_layernorm\.weight", "model.norm.weight"),
    (r"output_layer\.weight", "lm_head.weight"),
    (r"self_attention\.linear_qkv\.layer_norm_weight", "input_layernorm.weight"),
    (r"mlp\.linear_fc1\.layer_norm_weight", "post_attention_layernorm.weight"),
    (r"pre_mlp_layernorm", "post_attention_layernorm"),
    (r"self_attention\.linear_(q|kv)_up_proj\.layer_norm_weight", r"self_attn.\1_a_layernorm.weight"),
    (r"self_attention\.linear_proj", "self_attn.o_proj"),
    (r"self_attention\.linear_q_proj", "self_attn.q_proj"),
    (r"self_attention\.linear_q_down_proj", "self_attn.q_a_proj"),
    (r"self_attention\.linear_q_up_proj", "self_attn.q_b_proj"),
    (r"self_attention\.linear_kv_down_proj", "self_attn.kv_a_proj_with_mqa"),
    (r"self_attention\.linear_kv_up_proj", "self_attn.kv_b_proj"),
    (r"self_attention\.kv_layernorm", "self_attn.kv_a_layernorm"),
    (r"mlp\.router\.weight", "mlp.gate.weight"),
    (r"mlp\.router\.expert_bias", "mlp.gate.e_score_correction_bias"),
    (r"mlp\.shared_experts\.gate_weight", "mlp.shared_expert_gate.weight"),
    (r"linear_fc2", "down_proj"),
]


def assemble(ranks: list[dict[str, Any]], hf: dict[str, Any]) -> dict[str, torch.Tensor]:
    """`ranks`: what each rank has as "raw" (names with global layer numbers) and "place"."""
    parts: dict[str, dict[int, torch.Tensor]] = {}
    for rank in sorted(ranks, key=lambda one: -one["place"]["pp"]):  # the first stage's copy of an embedding wins
        at = rank["place"]
        for name, tensor in rank["raw"]:
            name, by_expert = _global_expert(name, at["ep"], hf, at["eps"])
            parts.setdefault(name, {})[at["etp"] if by_expert else at["tp"]] = tensor
    out: dict[str, torch.Tensor] = {}
    for name, by_tp in parts.items():
        if hf.get("tie_word_embeddings") and name == "output_layer.weight":
            continue
        shards = [by_tp[i] for i in sorted(by_tp)]
        for hf_name, tensor in _converted(name, shards, hf).items():
            out[hf_name] = tensor
    return out


def _global_expert(name: str, ep_rank: int, hf: dict[str, Any], ep_size: int) -> tuple[str, bool]:
    if ".experts." not in name:
        return name, False
    total = hf.get("num_experts") or hf.get("n_routed_experts") or hf["num_local_experts"]
    found = re.search(r"local_experts\.(\d+)\.(linear_fc.)\.weight|(linear_fc.)\.weight(\d+)", name)
    assert found, name
    local, which = (found[1], found[2]) if found[1] is not None else (found[4], found[3])
    prefix = name[: name.index(".experts.")]
    return f"{prefix}.experts.{int(local) + ep_rank * total // ep_size}.{which}.weight", True


def _converted(name: str, shards: list[torch.Tensor], hf: dict[str, Any]) -> dict[str, torch.Tensor]:
    layers = hf["num_hidden_layers"]
    name = name.replace("decoder.layers.", "model.layers.")
    if name.startswith("mtp."):
        name = re.sub(
            r"mtp\.layers\.(\d+)\.(transformer_layer\.)?", lambda m: f"model.layers.{layers + int(m[1])}.", name
        )
        name = name.replace("final_layernorm", "shared_head.norm")
    if name.endswith(("linear_qkv.weight", "linear_qkv.bias")):
        return _qkv(name, torch.cat(shards), hf)
    if re.search(r"linear_fc1\.weight$", name):
        halves = [shard.chunk(2) for shard in shards]
        name = _renamed(name, hf)
        return {
            name.replace("linear_fc1", "gate_proj"): torch.cat([half[0] for half in halves]),
            name.replace("linear_fc1", "up_proj"): torch.cat([half[1] for half in halves]),
        }
    whole = _joined(name, shards, hf)
    return {_renamed(name, hf): whole}


def _joined(name: str, shards: list[torch.Tensor], hf: dict[str, Any]) -> torch.Tensor:
    if re.search(r"(word_embeddings|output_layer)\.weight$", name):
        return torch.cat(shards)[: hf["vocab_size"]]
    if re.search(r"(linear_proj|linear_fc2)\.weight$", name):
        return torch.cat(shards, dim=1)
    if re.search(r"(up_proj|q_proj|eh_proj)\.weight$", name):
        return torch.cat(shards)
    if "down_proj" in name:
        rank = hf["q_lora_rank"] if "_q_" in name else hf["kv_lora_rank"] + hf["qk_rope_head_dim"]
        return shards[0] if len(shards[0]) == rank else torch.cat(shards)
    return shards[0]


def _qkv(name: str, fused: torch.Tensor, hf: dict[str, Any]) -> dict[str, torch.Tensor]:
    groups = hf["num_key_value_heads"]
    per_group = hf["num_attention_heads"] // groups
    head = hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]
    gated = hf.get("gated", False)
    rest = tuple(fused.shape[1:])
    heads = fused.reshape(groups, -1, head, *rest)
    q, k, v = heads[:, :per_group], heads[:, -2], heads[:, -1]
    if gated:
        q = torch.stack([q, heads[:, per_group : 2 * per_group]], dim=2)
    prefix, word = name[: name.index("self_attention")] + "self_attn.", name.rsplit(".", 1)[1]
    return {f"{prefix}{x}_proj.{word}": t.reshape(-1, *rest) for x, t in (("q", q), ("k", k), ("v", v))}


def _renamed(name: str, hf: dict[str, Any]) -> str:
    mla = "q_lora_rank" in hf
    name = re.sub(r"self_attention\.q_layernorm", "self_attn.q_a_layernorm" if mla else "self_attn.q_norm", name)
    name = re.sub(r"self_attention\.k_layernorm", "self_attn.k_norm", name)
    for pattern, to in RENAMES:
        name = re.sub(pattern, to, name)
    return name if mla else name.replace("mlp.shared_experts.", "mlp.shared_expert.")
