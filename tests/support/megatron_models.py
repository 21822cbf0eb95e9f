"""The same tiny models twice: as Hugging Face checkpoints, and built by Megatron-Core in its own parallel groups.

Imports neither transformers nor Megatron at its top: the checkpoints are written where transformers is, the models are
built where Megatron is.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

VOCAB, PADDED_TO = 250, 8
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 1}
MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
}
DEEPSEEK_MOE = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}


GDN = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "full_attention_interval": 4,
}


LLAMA_4 = {
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 2,
    "intermediate_size_mlp": 40,
    "pad_token_id": 0,
}
VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": SHAPE["hidden_size"],
    "num_position_embeddings": 16,
    "patch_size": 4,
}
LLAMA_4_VISION = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vision_output_dim": SHAPE["hidden_size"],
    "image_size": 28,
    "projector_input_dim": 16,
    "projector_output_dim": 16,
}


EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
"""What configs call the number of experts in a layer."""


@dataclass(frozen=True)
class Kind:
    """A Hugging Face model: prefix of its classes, and what differs from `SHAPE`."""

    prefix: str
    overrides: dict[str, Any]
    bridge: bool = True
    """Megatron-Bridge 0.3.1 can load and export it."""
    text: bool = False
    """The configuration is that of the text model."""
    vision: dict[str, Any] | None = None
    """The vision tower of a model whose text model is described by the rest."""
    model_type: str = ""
    """For a model whose classes transformers doesn't have, and whose tensors are named as those of `prefix`."""


KINDS = {
    "llama": Kind("Llama", {}),
    "mqa": Kind("Llama", {"num_key_value_heads": 1}),
    "qwen2": Kind("Qwen2", {"head_dim": 8}),
    "qwen3": Kind("Qwen3", {}),
    "qwen3 tied": Kind("Qwen3", {"tie_word_embeddings": True}),
    "qwen3_moe": Kind("Qwen3Moe", MOE),
    "qwen2_moe": Kind("Qwen2Moe", MOE | {"shared_expert_intermediate_size": 40, "head_dim": 8}, bridge=False),
    "deepseek_v3": Kind("DeepseekV3", {k: v for k, v in SHAPE.items() if k != "head_dim"} | MLA | DEEPSEEK_MOE),
    "deepseek_v2": Kind(
        "DeepseekV2", {k: v for k, v in SHAPE.items() if k != "head_dim"} | MLA | DEEPSEEK_MOE | {"q_lora_rank": None}
    ),
    "kimi_k2": Kind(
        "DeepseekV3",
        {k: v for k, v in SHAPE.items() if k != "head_dim"} | MLA | DEEPSEEK_MOE,
        bridge=False,
        model_type="kimi_k2",
    ),
    "glm4_moe_lite": Kind(
        "Glm4MoeLite", {k: v for k, v in SHAPE.items() if k != "head_dim"} | MLA | DEEPSEEK_MOE, bridge=False
    ),
    "glm4_moe": Kind("Glm4Moe", DEEPSEEK_MOE | {"use_qk_norm": True, "attention_bias": True}),
    "mixtral": Kind("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, bridge=False),
    "gpt_oss": Kind("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2, "pad_token_id": 0}),
    "mimo": Kind("Qwen2", {"head_dim": 8}, bridge=False, model_type="mimo"),
    "seed_oss": Kind("SeedOss", {"attention_bias": True}, bridge=False),
    "olmoe": Kind("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 4, "head_dim": 8}),
    "qwen3_next": Kind("Qwen3Next", MOE | GDN | {"shared_expert_intermediate_size": 40}),
    "qwen3_5": Kind("Qwen3_5", GDN | {"tie_word_embeddings": True}, bridge=False, vision=VISION),
    "qwen3_5_text": Kind("Qwen3_5", GDN, bridge=False, text=True),
    "qwen3_5_moe": Kind("Qwen3_5Moe", MOE | GDN | {"shared_expert_intermediate_size": 40}, bridge=False, vision=VISION),
    "nemotron": Kind("Nemotron", {"norm_eps": 1e-5}),
    "gemma": Kind("Gemma", {"tie_word_embeddings": True}),
    "gemma2": Kind("Gemma2", {"tie_word_embeddings": True}),
    "gemma3": Kind("Gemma3", {"tie_word_embeddings": True}, text=True),
    "glm4": Kind("Glm4", {"attention_bias": True, "pad_token_id": 0}, bridge=False),
    "ernie4_5_moe": Kind(
        "Ernie4_5_Moe",
        {
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": 24,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
        },
        bridge=False,
    ),
    "llama4": Kind("Llama4", LLAMA_4, bridge=False, vision=LLAMA_4_VISION),
    "llama4_text": Kind("Llama4", LLAMA_4, bridge=False, text=True),
    "nemotron_h": Kind(
        "NemotronH",
        {
            "layers_block_type": ["mamba", "moe", "attention", "mamba", "mlp", "moe"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 8,
            "n_groups": 2,
            "ssm_state_size": 6,
            "n_routed_experts": 4,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 40,
        },
    ),
    "phi3": Kind("Phi3", {"head_dim": 8, "pad_token_id": 0}, bridge=False),
}


def write_checkpoint(kind: str, directory: Path) -> None:
    """Random weights as `save_pretrained` writes them, norms and biases too."""
    import transformers

    entry = KINDS[kind]
    torch.manual_seed(7)
    described = SHAPE | entry.overrides
    if entry.vision:
        tied = described["tie_word_embeddings"]
        described = {"text_config": described, "vision_config": entry.vision, "tie_word_embeddings": tied}
    config = getattr(transformers, f"{entry.prefix}{'Text' * entry.text}Config")(**described)
    model = getattr(transformers, f"{entry.prefix}For{'ConditionalGeneration' if entry.vision else 'CausalLM'}")(config)
    with torch.no_grad():
        for tensor in [*model.parameters(), *(b for n, b in model.named_buffers() if "correction_bias" in n)]:
            if tensor.dim() == 1:
                tensor.add_(torch.randn_like(tensor) * 0.1)
    model.save_pretrained(directory)
    if entry.model_type:
        path = directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": entry.model_type}))


@dataclass(frozen=True)
class Layout:
    """Megatron's parallel sizes, and which layers the model is made of."""

    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    ep: int = 1
    etp: int | None = None
    te: bool = False
    dtype: torch.dtype = torch.float32
    mtp: int = 0
    padded: bool = False
    """The vocabulary is padded, which Megatron-Bridge 0.3.1 does not do."""
    trains: bool = True
    """False where gloo can't run a step: it gathers no parts of different sizes, which expert and expert-tensor
    parallelism together ask for. The weights are then moved without gradients."""
    overrides: tuple[tuple[str, Any], ...] = ()

    def enter(self) -> None:
        """Makes Megatron's process groups for this layout and destroys those of the last one: each holds three threads of gloo,
        one of which wakes a hundred times a second."""
        from megatron.core import parallel_state

        for group in filter(None, parallel_state._global_process_group_list or ()):
            dist.destroy_process_group(group)
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            self.tp,
            self.pp,
            virtual_pipeline_model_parallel_size=self.vpp,
            expert_model_parallel_size=self.ep,
            expert_tensor_parallel_size=self.etp or self.tp,
        )


def text_of(hf: dict[str, Any]) -> dict[str, Any]:
    """The config of the text model, which has the kind of the whole."""
    depth = {"num_hidden_layers": len(hf["layers_block_type"])} if "layers_block_type" in hf else {}
    return hf | hf.get("text_config", {}) | depth | {"model_type": hf["model_type"]}


def build(hf: dict[str, Any], layout: Layout) -> list[Any]:
    """This rank's chunks of `GPTModel` or `MambaModel` for a config.json, in the groups that `layout.enter()` made."""
    hf = text_of(hf)
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
    from megatron.core.models.mamba.mamba_model import MambaModel

    torch.manual_seed(11)
    config = _config(hf, layout)
    multiple = PADDED_TO * layout.tp if layout.padded else 1
    chunks = []
    for stage in range(layout.vpp) if layout.vpp else [None]:
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage)
        if hf["model_type"] == "nemotron_h":
            pattern = "".join(HYBRID[kind] for kind in hf["layers_block_type"])
            ends = {"pre_process": first, "post_process": last}
            chunks.append(
                MambaModel(config, _hybrid_spec(config), hf["vocab_size"], 64, hybrid_override_pattern=pattern, **ends)
            )
            continue
        spec = _spec(hf, config, layout, stage)
        mtp = get_gpt_mtp_block_spec(config, spec, layout.te, vp_stage=stage) if layout.mtp and last else None
        model = GPTModel(
            config,
            spec,
            -(-hf["vocab_size"] // multiple) * multiple,
            max_sequence_length=64,
            pre_process=first,
            post_process=last,
            share_embeddings_and_output_weights=bool(hf.get("tie_word_embeddings")),
            position_embedding_type="rope",
            mtp_block_spec=mtp,
            vp_stage=stage,
        )
        chunks.append(model)
    return chunks


def _spec(hf: dict[str, Any], config: Any, layout: Layout, stage: int | None) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    if "linear_num_key_heads" in hf:
        from megatron.core.models.gpt import experimental_attention_variant_module_specs as variants

        return variants.get_transformer_block_with_experimental_attention_variant_spec(config, vp_stage=stage)
    spec = get_gpt_decoder_block_spec(
        config, layout.te, normalization="RMSNorm", qk_l2_norm=config.qk_l2_norm, vp_stage=stage
    )
    if hf["model_type"] == "glm4":
        for layer in spec.layer_specs:
            layer.module = _with_norms_after(layer.module, inside=not layout.te)
    if hf["model_type"] in ("gemma2", "gemma3_text"):
        from tests.support.megatron_cpu import STAND_INS

        for layer in spec.layer_specs:
            layer.submodules.self_attention.submodules.linear_proj = STAND_INS["TERowParallelLinearLayerNorm"]
            layer.submodules.mlp.submodules.linear_fc2 = STAND_INS["TERowParallelLinearLayerNorm"]
    if hf["model_type"] == "olmoe":
        from megatron.bridge.models.olmoe.olmoe_provider import OLMoESelfAttention

        for layer in spec.layer_specs:
            layer.submodules.self_attention.module = OLMoESelfAttention
    return spec


HYBRID = {"mamba": "M", "linear_attention": "M", "moe": "E", "attention": "*", "full_attention": "*", "mlp": "-"}
"""Megatron's signs for the kinds of layers in a hybrid model."""


def _hybrid_spec(config: Any) -> Any:
    """Megatron's own, of stand-ins for Transformer Engine."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
    from megatron.core.ssm.mamba_block import MambaStack, MambaStackSubmodules
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    backend = gpt_layer_specs.TESpecProvider()
    inwards, outwards = backend.column_parallel_layer_norm_linear(), backend.row_parallel_linear()
    mixer = ModuleSpec(MambaMixer, submodules=MambaMixerSubmodules(in_proj=inwards, out_proj=outwards))
    attention = SelfAttentionSubmodules(
        linear_qkv=inwards, core_attention=backend.core_attention(), linear_proj=outwards
    )
    attends = ModuleSpec(SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=attention)
    mlp = ModuleSpec(MLP, submodules=MLPSubmodules(linear_fc1=inwards, linear_fc2=outwards))
    moe = get_moe_module_spec_for_backend(backend, config.num_moe_experts, moe_grouped_gemm=True)
    norm = backend.layer_norm(rms_norm=True)

    def layer(kind: type, **parts: Any) -> Any:
        return ModuleSpec(kind, submodules=TransformerLayerSubmodules(**parts))

    add = get_bias_dropout_add
    layers = MambaStackSubmodules(
        mamba_layer=ModuleSpec(MambaLayer, submodules=MambaLayerSubmodules(mixer=mixer, mamba_bda=add)),
        attention_layer=layer(TransformerLayer, self_attention=attends, self_attn_bda=add),
        mlp_layer=layer(MLPLayer, mlp=mlp, mlp_bda=add),
        moe_layer=layer(TransformerLayer, pre_mlp_layernorm=norm, mlp=moe, mlp_bda=add),
    )
    return ModuleSpec(MambaStack, submodules=layers)


def _with_norms_after(layer: type, *, inside: bool) -> type:
    """A decoder layer with norms after attention and MLP. They are its own, as in slime, or `inside` the two, as in ms-swift."""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    class Layer(layer):  # type: ignore[misc, valid-type]
        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(config, *args, **kwargs)
            for part, name in ((self.self_attention, "post_self_attn_layernorm"), (self.mlp, "post_mlp_layernorm")):
                norm = WrappedTorchNorm(config, config.hidden_size, 1e-5)
                setattr(part if inside else self, name, norm)
                part.register_forward_hook(lambda _, inputs, outputs, norm=norm: (norm(outputs[0]), outputs[1]))

    return Layer


def _config(hf: dict[str, Any], layout: Layout) -> Any:
    from megatron.core.fusions.fused_bias_geglu import quick_gelu
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    kind = hf["model_type"]
    experts = next(filter(None, map(hf.get, EXPERTS)), None)
    fields: dict[str, Any] = {
        "num_layers": hf["num_hidden_layers"],
        "hidden_size": hf["hidden_size"],
        "ffn_hidden_size": hf.get("intermediate_size_mlp") or hf.get("intermediate_size"),
        "num_attention_heads": hf["num_attention_heads"],
        "num_query_groups": hf["num_key_value_heads"],
        "kv_channels": hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"],
        "normalization": "RMSNorm",
        "layernorm_epsilon": 1e-5,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "add_qkv_bias": kind in ("qwen2", "qwen2_moe", "mimo") or bool(hf.get("attention_bias")),
        "qk_layernorm": kind in ("qwen3", "qwen3_moe", "olmoe", "gemma3_text")
        or bool(hf.get("use_qk_norm") or hf.get("kv_lora_rank") or hf.get("linear_num_key_heads")),
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp or layout.tp,
        "sequence_parallel": bool(experts) and layout.tp > 1,
        "params_dtype": layout.dtype,
        "pipeline_dtype": layout.dtype,
        "bf16": layout.dtype == torch.bfloat16,
        "mtp_num_layers": layout.mtp or None,
        # What the CPU needs.
        "use_cpu_initialization": True,
        "gradient_accumulation_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "batch_p2p_comm": False,
        "overlap_p2p_comm": layout.vpp is not None,
    }
    if experts:
        fields |= {
            "num_moe_experts": experts,
            "moe_router_topk": hf.get("num_experts_per_tok") or hf["moe_k"],
            "moe_ffn_hidden_size": hf.get("moe_intermediate_size") or hf["intermediate_size"],
            "moe_grouped_gemm": layout.te,
            "moe_token_dispatcher_type": "alltoall",
            "moe_router_load_balancing_type": "none",
        }
    if "shared_expert_intermediate_size" in hf:
        fields |= {
            "moe_shared_expert_intermediate_size": hf["shared_expert_intermediate_size"],
            "moe_shared_expert_gate": True,
        }
    if kind == "gpt_oss":
        fields |= {
            "add_bias_linear": True,
            "add_qkv_bias": False,
            "softmax_type": "learnable",
            "activation_func": quick_gelu,
            "activation_func_clamp_value": 7.0,
            "glu_linear_offset": 1.0,
        }
    if kind == "nemotron":
        fields |= {
            "normalization": "LayerNorm",
            "gated_linear_unit": False,
            "activation_func": torch.nn.functional.relu,
            "layernorm_zero_centered_gamma": True,
        }
    if kind.startswith("gemma"):
        fields |= {"layernorm_zero_centered_gamma": True}
    if "linear_num_key_heads" in hf:
        fields |= {name: value for name, value in hf.items() if name in GDN and name.startswith("linear")}
        fields |= {
            "layernorm_zero_centered_gamma": True,
            "attention_output_gate": True,
            "experimental_attention_variant": "gated_delta_net",
            "linear_attention_freq": [int(kind == "linear_attention") for kind in hf["layer_types"]],
            "deterministic_mode": True,  # whose gated delta rule is torch's
        }
    if kind == "nemotron_h":
        fields |= {
            "gated_linear_unit": False,
            "activation_func": torch.nn.functional.relu,
            "is_hybrid_model": True,
            "mamba_num_heads": hf["mamba_num_heads"],
            "mamba_head_dim": hf["mamba_head_dim"],
            "mamba_num_groups": hf["n_groups"],
            "mamba_state_dim": hf["ssm_state_size"],
            "moe_shared_expert_intermediate_size": hf["moe_shared_expert_intermediate_size"],
            "moe_router_enable_expert_bias": True,
            "moe_router_score_function": "sigmoid",
        }
    if kind.startswith("llama4"):
        fields |= {
            "moe_layer_freq": [int(i in hf["moe_layers"]) for i in range(hf["num_hidden_layers"])],
            "moe_shared_expert_intermediate_size": hf["intermediate_size"],
            "moe_router_score_function": "sigmoid",
            "moe_apply_probs_on_input": True,
            "qk_l2_norm": True,
        }
    if kind == "ernie4_5_moe":
        dense = hf["moe_layer_start_index"]
        fields |= {
            "moe_layer_freq": [0] * dense + [1] * (hf["num_hidden_layers"] - dense),
            "moe_shared_expert_intermediate_size": hf["moe_num_shared_experts"] * hf["moe_intermediate_size"],
            "moe_router_enable_expert_bias": True,
            "moe_router_score_function": "sigmoid",
        }
    if "first_k_dense_replace" in hf:
        dense = hf["first_k_dense_replace"]
        fields |= {
            "moe_layer_freq": [0] * dense + [1] * (hf["num_hidden_layers"] - dense),
            "moe_shared_expert_intermediate_size": hf["n_shared_experts"] * hf["moe_intermediate_size"],
        }
        if kind != "deepseek_v2":
            fields |= {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
    if "kv_lora_rank" not in hf:
        return TransformerConfig(**(fields | dict(layout.overrides)))
    fields |= {
        "multi_latent_attention": True,
        "q_lora_rank": hf["q_lora_rank"],
        "kv_lora_rank": hf["kv_lora_rank"],
        "qk_head_dim": hf["qk_nope_head_dim"],
        "qk_pos_emb_head_dim": hf["qk_rope_head_dim"],
        "v_head_dim": hf["v_head_dim"],
        "rope_type": "rope",
    }
    return MLATransformerConfig(**(fields | dict(layout.overrides)))


@torch.no_grad()
def shift(chunks: list[Any]) -> list[Any]:
    """Moves each value by a function of the value, so that copies stay copies. Returns the chunks."""
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.mul_(1.03).add_(0.01)
    return chunks


def train(chunks: list[Any], *, steps: int = 1) -> list[Any]:
    """AdamW steps through Megatron's own schedule and gradient reduction. Returns the chunks as the training loop has
    them: in `DistributedDataParallel`."""
    from megatron.core.distributed import DistributedDataParallelConfig

    wrapped = data_parallel(chunks, DistributedDataParallelConfig())
    parameters = [p for one in wrapped for p in one.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    for _ in range(steps):
        run_schedule(wrapped)
        for p in parameters:
            p.grad = p.main_grad.to(p.dtype)
        optimizer.step()
    return wrapped


def data_parallel(chunks: list[Any], ddp_config: Any) -> list[Any]:
    """The chunks in Megatron's `DistributedDataParallel`, with the first rank's values."""
    from megatron.core.distributed import DistributedDataParallel, finalize_model_grads

    config = getattr(chunks[0], "module", chunks[0]).config
    config.finalize_model_grads_func = finalize_model_grads
    wrapped = [DistributedDataParallel(config, ddp_config, chunk) for chunk in chunks]
    for one in wrapped:
        one.broadcast_params()
    return wrapped


def run_schedule(wrapped: list[Any], *, forward_only: bool = False) -> None:
    """Megatron's schedule of one step, up to the reduced gradients."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    tokens = torch.arange(16).view(1, 16) * 7 % VOCAB
    positions = torch.arange(16).view(1, 16)
    mask = torch.ones(1, 1, 16, 16).triu(1).bool()

    def forward(batches: Any, model: Any) -> Any:
        output = model(tokens, positions, mask, labels=tokens.roll(-1, 1))
        return output, lambda loss: (loss.float().mean(), {})

    for one in wrapped if not forward_only else ():
        one.zero_grad_buffer()
    get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=[None] * len(wrapped) if len(wrapped) > 1 else None,
        model=wrapped if len(wrapped) > 1 else wrapped[0],
        num_microbatches=2,
        seq_length=16,
        micro_batch_size=1,
        forward_only=forward_only,
    )
