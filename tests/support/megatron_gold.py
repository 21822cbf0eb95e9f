"""The whole model as a Hugging Face state dict, from all ranks' Megatron parameters: gathered, concatenated and split
in memory, as converters that gather do it. Shares nothing with `trainer_adapters.sources.megatron.rules`.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from tests.support.megatron_models import EXPERTS, text_of

RENAMES = [
    (r"embedding\.word_embeddings\.weight", "model.embed_tokens.weight"),
    (r"decoder\.final_layernorm\.", "model.norm."),
    (r"output_layer\.weight", "lm_head.weight"),
    (r"self_attention\.linear_qkv\.layer_norm_", "input_layernorm."),
    (r"mlp\.linear_fc1\.layer_norm_", "post_attention_layernorm."),
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
    (r"self_attention\.core_attention\.softmax_offset", "self_attn.sinks"),
    (r"self_attention\.(A_log|dt_bias|conv1d|out_proj)", r"linear_attn.\1"),
    (r"self_attention\.out_norm", "linear_attn.norm"),
    (r"self_attention\.in_proj\.layer_norm_weight", "input_layernorm.weight"),
]
QWEN3_NEXT = [
    (r"mtp\.layers\.0\.enorm", "mtp.pre_fc_norm_embedding"),
    (r"mtp\.layers\.0\.hnorm", "mtp.pre_fc_norm_hidden"),
    (r"mtp\.layers\.0\.eh_proj", "mtp.fc"),
    (r"mtp\.layers\.0\.final_layernorm", "mtp.norm"),
]
QWEN3_5 = [*QWEN3_NEXT, (r"^model\.", "model.language_model.")]
LLAMA_4 = [(r"\.mlp\.", ".feed_forward."), (r"feed_forward\.gate\.", "feed_forward.router.")]
GEMMA_2 = [
    (r"post_attention_layernorm", "pre_feedforward_layernorm"),
    (r"self_attn\.o_proj\.post_layernorm", "post_attention_layernorm"),
    (r"mlp\.down_proj\.post_layernorm", "post_feedforward_layernorm"),
]
RENAMES_OF: dict[str, list[tuple[str, str]]] = {
    "mixtral": [
        (r"\.mlp\.", ".block_sparse_moe."),
        *((f"{a}_proj", b) for a, b in (("gate", "w1"), ("up", "w3"), ("down", "w2"))),
    ],
    "llama4_text": LLAMA_4,
    "llama4": [*LLAMA_4, (r"^", "language_model.")],
    "ernie4_5_moe": [(r"mlp\.gate\.e_score", "mlp.moe_statics.e_score")],
    "glm4": [(r"(self_attention|mlp)\.post_", "post_")],
    "nemotron_h": [
        (r"^model\.embed_tokens", "backbone.embeddings"),
        (r"^model\.norm\.|^decoder\.final_norm\.", "backbone.norm_f."),
        (r"^model\.", "backbone."),
        (r"\.(self_attn|mlp)\.", ".mixer."),
        (r"(input|post_attention)_layernorm|mixer\.in_proj\.layer_norm_(?=weight)", "norm."),
        (r"norm\.\.", "norm."),
    ],
    "gemma2": GEMMA_2,
    "gemma3_text": GEMMA_2,
    "gpt_oss": [(r"mlp\.gate\.", "mlp.router.")],
    "mimo": [
        (r"(mtp_layers\.\d+\.)enorm", r"\1token_layernorm"),
        (r"(mtp_layers\.\d+\.)hnorm", r"\1hidden_layernorm"),
        (r"(mtp_layers\.\d+\.)eh_proj", r"\1input_proj"),
    ],
    "qwen3_next": QWEN3_NEXT,
    "qwen3_5": QWEN3_5,
    "qwen3_5_moe": QWEN3_5,
}
MTP_LAYERS = {"mimo": "model.mtp_layers.", "qwen3_next": "mtp.layers."}
MTP_LAYERS |= dict.fromkeys(("qwen3_5", "qwen3_5_text", "qwen3_5_moe"), "mtp.layers.")
"""Where the checkpoint has its MTP layers, if not behind the others."""


def assemble(ranks: list[dict[str, Any]], hf: dict[str, Any]) -> dict[str, torch.Tensor]:
    """`ranks`: what each rank has as "raw" (names with global layer numbers) and "place"."""
    hf = text_of(hf)
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
    for pattern, to in RENAMES_OF.get(hf["model_type"], ()):
        out = {re.sub(pattern, to, name): tensor for name, tensor in out.items()}
    in_one = hf["model_type"] in ("gpt_oss", "llama4", "llama4_text")
    return _experts_in_one(out, in_turns=hf["model_type"] == "gpt_oss") if in_one else out


def _experts_in_one(apart: dict[str, torch.Tensor], *, in_turns: bool) -> dict[str, torch.Tensor]:
    """(experts, inputs, outputs), gates in the first half of the columns; of GPT-OSS in the even columns."""
    parts: dict[tuple[str, str, str], dict[int, torch.Tensor]] = {}
    out = {}
    for name, tensor in apart.items():
        if found := re.fullmatch(r"(.*\.experts\.)(\d+)\.(\w+)_proj\.(weight|bias)", name):
            parts.setdefault((found[1], found[3], found[4]), {})[int(found[2])] = tensor
        else:
            out[name] = tensor
    whole = {key: torch.stack([own[i] for i in range(len(own))]) for key, own in parts.items()}
    for (at, which, word), tensor in whole.items():
        end = "" if word == "weight" else "_bias"
        if which == "down":
            out[f"{at}down_proj{end}"] = tensor if end else tensor.mT
        elif which == "gate":
            both = torch.empty(len(tensor), 2 * tensor.shape[1], *tensor.shape[2:])
            gates, ups = (both[:, 0::2], both[:, 1::2]) if in_turns else both.chunk(2, dim=1)
            gates[:], ups[:] = tensor, whole[at, "up", word]
            out[f"{at}gate_up_proj{end}"] = both if end else both.mT
    return out


def _global_expert(name: str, ep_rank: int, hf: dict[str, Any], ep_size: int) -> tuple[str, bool]:
    if ".experts." not in name:
        return name, False
    total = next(filter(None, map(hf.get, EXPERTS)))
    found = re.search(r"local_experts\.(\d+)\.(linear_fc.)\.(weight|bias)|(linear_fc.)\.(weight|bias)(\d+)", name)
    assert found, name
    local, which, word = found.groups()[:3] if found[1] is not None else (found[6], found[4], found[5])
    prefix = name[: name.index(".experts.")]
    return f"{prefix}.experts.{int(local) + ep_rank * total // ep_size}.{which}.{word}", True


def _converted(name: str, shards: list[torch.Tensor], hf: dict[str, Any]) -> dict[str, torch.Tensor]:
    layers = hf["num_hidden_layers"]
    name = name.replace("decoder.layers.", "model.layers.")
    if name.startswith("mtp."):
        own = MTP_LAYERS.get(hf["model_type"])
        name = re.sub(
            r"mtp\.layers\.(\d+)\.((transformer|mtp_model)_layer\.)?",
            lambda m: f"{own}{m[1]}." if own else f"model.layers.{layers + int(m[1])}.",
            name,
        )
        name = name if own else name.replace("final_layernorm", "shared_head.norm")
        if hf["model_type"] == "mimo" and name.endswith("eh_proj.weight"):
            of_embedding, of_hidden = torch.cat(shards).chunk(2, dim=1)
            return {name: torch.cat([of_hidden, of_embedding], dim=1)}
    if name.endswith(("linear_qkv.weight", "linear_qkv.bias")):
        return _qkv(name, torch.cat(shards), hf)
    if ".mixer.in_proj.weight" in name or ".mixer.conv1d." in name:
        heads, state = hf["mamba_num_heads"] // len(shards), hf["n_groups"] * hf["ssm_state_size"] // len(shards)
        sizes = [heads * hf["mamba_head_dim"], state, state]
        sizes = [sizes[0], *sizes, heads] if "in_proj" in name else sizes
        split = [shard.split(sizes) for shard in shards]
        return {name: torch.cat([part[i] for i in range(len(sizes)) for part in split])}
    if ".mixer." in name and name.endswith((".D", "norm.weight")) and "layer_norm" not in name:
        return {name: torch.cat(shards)}
    if name.endswith("in_proj.weight"):
        return _delta_net(name, shards, hf)
    if name.endswith("conv1d.weight"):
        key = hf["linear_num_key_heads"] * hf["linear_key_head_dim"] // len(shards)
        value = hf["linear_num_value_heads"] * hf["linear_value_head_dim"] // len(shards)
        parts = [shard.split([key, key, value]) for shard in shards]
        return {_renamed(name, hf): torch.cat([part[i] for i in range(3) for part in parts])}
    if name.endswith("out_norm.weight"):
        return {_renamed(name, hf): shards[0] + 1}
    if re.search(r"linear_fc1\.(weight|bias)$", name) and hf["model_type"].startswith("nemotron"):
        return {_renamed(name, hf).replace("linear_fc1", "up_proj"): torch.cat(shards)}
    if name.endswith("expert_bias") and hf["model_type"] == "ernie4_5_moe":
        return {_renamed(name, hf): shards[0].unsqueeze(0)}
    if re.search(r"linear_fc1\.(weight|bias)$", name):
        halves = [shard.chunk(2) for shard in shards]
        name = _renamed(name, hf)
        gates, ups = (torch.cat([half[i] for half in halves]) for i in (0, 1))
        if hf["model_type"] in ("phi3", "glm4"):
            return {name.replace("linear_fc1", "gate_up_proj"): torch.cat([gates, ups])}
        return {name.replace("linear_fc1", "gate_proj"): gates, name.replace("linear_fc1", "up_proj"): ups}
    whole = _joined(name, shards, hf)
    return {_renamed(name, hf): whole}


def _joined(name: str, shards: list[torch.Tensor], hf: dict[str, Any]) -> torch.Tensor:
    if re.search(r"(word_embeddings|output_layer)\.weight$", name):
        return torch.cat(shards)[: hf["vocab_size"]]
    if re.search(r"(linear_proj|linear_fc2|out_proj)\.weight$", name):
        return torch.cat(shards, dim=1)
    if re.search(r"(up_proj|q_proj|eh_proj)\.weight$|softmax_offset|A_log|dt_bias", name):
        return torch.cat(shards)
    if "down_proj" in name:
        rank = hf["q_lora_rank"] if "_q_" in name else hf["kv_lora_rank"] + hf["qk_rope_head_dim"]
        return shards[0] if len(shards[0]) == rank else torch.cat(shards)
    return shards[0]


def _qkv(name: str, fused: torch.Tensor, hf: dict[str, Any]) -> dict[str, torch.Tensor]:
    groups = hf["num_key_value_heads"]
    per_group = hf["num_attention_heads"] // groups
    head = hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]
    gated = hf.get("gated", False) or "linear_num_key_heads" in hf
    rest = tuple(fused.shape[1:])
    heads = fused.reshape(groups, -1, head, *rest)
    q, k, v = heads[:, :per_group], heads[:, -2], heads[:, -1]
    if gated:
        q = torch.stack([q, heads[:, per_group : 2 * per_group]], dim=2)
    prefix, word = name[: name.index("self_attention")] + "self_attn.", name.rsplit(".", 1)[1]
    apart = {f"{prefix}{x}_proj.{word}": t.reshape(-1, *rest) for x, t in (("q", q), ("k", k), ("v", v))}
    return {f"{prefix}qkv_proj.{word}": torch.cat(list(apart.values()))} if hf["model_type"] == "phi3" else apart


def _delta_net(name: str, shards: list[torch.Tensor], hf: dict[str, Any]) -> dict[str, torch.Tensor]:
    ways, heads, values = len(shards), hf["linear_num_key_heads"], hf["linear_num_value_heads"]
    key, value = hf["linear_key_head_dim"], hf["linear_value_head_dim"] * values // heads
    here = heads // ways
    split = [
        shard.split([here * n for n in (key, key, value, value, values // heads, values // heads)]) for shard in shards
    ]
    by_head = [torch.cat([one[i].unflatten(0, (here, -1)) for one in split]) for i in range(6)]
    at = name[: name.index("self_attention")] + "linear_attn.in_proj_"
    if hf["model_type"].startswith("qwen3_5"):
        q, k, v, z, b, a = (part.flatten(0, 1) for part in by_head)
        return {f"{at}qkv.weight": torch.cat([q, k, v]), f"{at}z.weight": z, f"{at}b.weight": b, f"{at}a.weight": a}
    return {
        f"{at}qkvz.weight": torch.cat(by_head[:4], dim=1).flatten(0, 1),
        f"{at}ba.weight": torch.cat(by_head[4:], dim=1).flatten(0, 1),
    }


def _renamed(name: str, hf: dict[str, Any]) -> str:
    mla = "kv_lora_rank" in hf
    name = re.sub(r"self_attention\.q_layernorm", "self_attn.q_a_layernorm" if mla else "self_attn.q_norm", name)
    name = re.sub(r"self_attention\.k_layernorm", "self_attn.k_norm", name)
    for pattern, to in RENAMES:
        name = re.sub(pattern, to, name)
    return (
        name
        if {"n_shared_experts", "moe_num_shared_experts"} & hf.keys()
        else name.replace("mlp.shared_experts.", "mlp.shared_expert.")
    )
