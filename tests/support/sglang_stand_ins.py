"""What SGLang has no kernel for on a CPU, so that its models start there, are loaded, and answer.

Importing this module, before SGLang's models are, gives an engine of this process, and of those that it forks:

- Triton's own interpreter for Triton's kernels (`TRITON_INTERPRET=1` in the environment, before Triton is imported);
- the attention named "triton" in torch: sinks (for each head one more score, which takes part in the softmax and has no
  value), soft caps, and caches of sliding windows that hold fewer tokens than those of other layers. Interpreted, one answer
  would take minutes;
- gated delta networks (Qwen3-Next, Qwen3.5), Kimi's, and Mamba-2 by the code for GPUs rather than by kernels for a CPU, which no
  package index has; their convolutions, gated norms and recurrences in torch;
- products of another dtype than their factors', MiniMax's norms, experts without a gate, and those of models that keep them
  themselves, in torch;
- FP8, and compressed-tensors' int8, as on a GPU: SGLang's own code quantises the weights and lays them out; products are those of
  the dequantised weights.

An engine loads, lays out and updates its weights as without these.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from tests.support import sglang_state_spaces as spaces
from tests.support import triton_interpreter

IMPORTED_BEFORE = ("sglang.srt.managers.scheduler", "sglang.srt.models.qwen3_moe", "sglang.srt.models.qwen3_vl")
"""What the next ones import: it stays what it is on a CPU."""
FOR_A_GPU = (
    "sglang.srt.layers.attention.mamba.mamba",
    "sglang.srt.layers.attention.linear.kernels.gdn_triton",
    "sglang.srt.layers.attention.linear.gdn_backend",
    "sglang.srt.layers.attention.linear.kernels.kda_triton",
    "sglang.srt.layers.attention.linear.kda_backend",
    "sglang.srt.models.qwen3_next",
    "sglang.srt.models.qwen3_5",
)


def import_for_a_gpu() -> None:
    """`mamba` has Triton's kernels on no CUDA device only where it takes the device for one of Intel's."""
    for name in IMPORTED_BEFORE:
        importlib.import_module(name)
    convolutions: Any = importlib.import_module("sglang.kernels.ops.mamba.causal_conv1d_triton")
    convolutions.causal_conv1d_fn = spaces.convolve
    convolutions.causal_conv1d_update = spaces.convolve_on
    for name in FOR_A_GPU:
        is_mamba = name.endswith("mamba.mamba")
        with (
            mock.patch("sglang.srt.utils.is_cpu", return_value=False),
            mock.patch("sglang.srt.utils.is_xpu", return_value=is_mamba),
        ):
            importlib.import_module(name)


library = torch.library.Library("aten", "IMPL")


def give() -> None:
    library.impl("mm.dtype", lambda one, other, dtype: one.to(dtype) @ other.to(dtype), "CPU")
    triton_interpreter.mend()
    torch.cpu.device = contextlib.nullcontext  # type: ignore[attr-defined]
    import_for_a_gpu()
    from sglang.kernels.ops.attention.fla import layernorm_gated
    from sglang.kernels.ops.attention.fla.fused_norm_gate import FusedRMSNormGated
    from sglang.srt.layers.attention import attention_registry
    from sglang.srt.layers.attention.linear.kernels import gdn_triton, kda_triton
    from sglang.srt.layers.attention.mamba import mamba
    from sglang.srt.layers.moe import fused_moe_native
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe
    from sglang.srt.layers.rotary_embedding import factory
    from sglang.srt.models import minimax_m2

    attention_registry.ATTENTION_BACKENDS["triton"] = _torch_attention()
    gdn_triton.chunk_gated_delta_rule = spaces.gated_delta_rule
    gdn_triton.fused_recurrent_gated_delta_rule_packed_decode = spaces.one_token_each
    kda_triton.chunk_kda = spaces.kimi_delta_rule
    kda_triton.fused_recurrent_kda_packed_decode = spaces.one_token_each_of_kimis
    mamba.mamba_chunk_scan_combined = spaces.state_space_dual
    mamba.selective_state_update = spaces.state_space_step
    FusedRMSNormGated.forward = _gated_norm
    layernorm_gated._get_sm_count = lambda _: 1
    fused_moe.fused_moe = _experts
    fused_moe_native.moe_forward_native = _or_one_by_one(fused_moe_native.moe_forward_native)
    factory.get_rope_cpu = _or_as_on_a_gpu(factory.get_rope_cpu, factory.get_rope)
    give_quantised()
    minimax_m2.rms_sumsq_serial = lambda *_: None
    minimax_m2.rms_apply_serial = _two_norms


def give_quantised() -> None:
    from sglang.srt.layers.quantization import fp8, utils
    from sglang.srt.layers.quantization.compressed_tensors import compressed_tensors, schemes

    compressed_tensors.CompressedTensorsConfig._check_scheme_supported = lambda *_, **__: True
    schemes.CompressedTensorsW8A8Int8.apply_weights = _linear_in_int8

    fp8._is_cpu = False
    fp8.cutlass_fp8_supported = lambda *_: True
    fp8.per_token_group_quant_fp8 = lambda x, _: _in_fp8(x, x.float().abs().amax(-1, keepdim=True) / FP8_MAX)
    fp8.scaled_fp8_quant = utils.scaled_fp8_quant = _quantised_in_fp8
    fp8.apply_fp8_linear = _linear_in_fp8
    fp8.dispatch_w8a8_block_fp8_linear = lambda **_: _linear_in_fp8_blocks
    fp8.Fp8MoEMethod.apply = _experts_in_fp8


FP8_MAX = torch.finfo(torch.float8_e4m3fn).max


def _in_fp8(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (x.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scale.float()


def _quantised_in_fp8(x: torch.Tensor, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    return _in_fp8(x, x.float().abs().max() / FP8_MAX if scale is None else scale)


def _linear_in_fp8(
    input: torch.Tensor,  # noqa: A002
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    input_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor:
    """weight: [columns, rows], with a scale for each row, or one. A static `input_scale` rounds the input, as FP8 does."""
    x = input.float()
    if input_scale is not None:
        x = _in_fp8(x, input_scale)[0].float() * input_scale
    out = x @ (weight.float() * weight_scale.float().reshape(1, -1))
    return (out if bias is None else out + bias).to(input.dtype)


def _linear_in_int8(_: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if (scale := layer.input_scale) is not None:
        x = ((x.float() / scale).round().clamp(-128, 127) * scale).to(x.dtype)
    return _linear_in_fp8(x, layer.weight, layer.weight_scale, bias=bias)


def _linear_in_fp8_blocks(
    input: torch.Tensor,  # noqa: A002
    weight: torch.Tensor,
    block_size: list[int],
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor:
    out = input.float() @ _dequantised(weight, weight_scale, block_size).mT
    return (out if bias is None else out + bias).to(input.dtype)


def _dequantised(weight: torch.Tensor, scale: torch.Tensor, block_size: list[int] | None) -> torch.Tensor:
    """weight: [..., rows, columns], with a scale for each block, or one for each matrix."""
    if block_size is None:
        return weight.float() * scale.float()[..., None, None]
    rows, columns = weight.shape[-2:]
    spread = scale.float().repeat_interleave(block_size[0], -2).repeat_interleave(block_size[1], -1)
    return weight.float() * spread[..., :rows, :columns]


def _experts_in_fp8(self: Any, layer: Any, dispatch_output: Any) -> Any:
    from sglang.srt.layers.moe.fused_moe_native import moe_forward_native
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

    blocks = self.quant_config.weight_block_size
    scales = "weight_scale_inv" if blocks else "weight_scale"
    x = dispatch_output.hidden_states
    dense = {
        f"{part}_weight": _dequantised(getattr(layer, f"{part}_weight"), getattr(layer, f"{part}_{scales}"), blocks).to(
            x.dtype
        )
        for part in ("w13", "w2")
    }
    experts = SimpleNamespace(num_experts=layer.num_experts, **dense)
    out = moe_forward_native(experts, x, dispatch_output.topk_output, self.moe_runner_config)
    return StandardCombineInput(hidden_states=out)


def _experts(
    hidden_states: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, topk_output: Any, moe_runner_config: Any
) -> torch.Tensor:
    from sglang.srt.layers.moe.fused_moe_native import moe_forward_native

    experts = SimpleNamespace(num_experts=len(w1), w13_weight=w1, w2_weight=w2)
    return moe_forward_native(experts, hidden_states, topk_output, moe_runner_config)


def _or_as_on_a_gpu(on_a_cpu: Callable[..., Any], on_a_gpu: Callable[..., Any]) -> Callable[..., Any]:
    """Rotary embeddings of latent attention: SGLang has one kind of them on a CPU."""

    def rotary(*arguments: Any) -> Any:
        scaling = arguments[5]
        return on_a_cpu(*arguments) if scaling else on_a_gpu(*arguments[:-1])  # without the device

    return rotary


def _or_one_by_one(known: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`moe_forward_native` that also has experts without a gate, whose activation is a squared ReLU (Nemotron-H), weights that
    scale an expert's input (Llama 4), and the same
    expert in two places of one token (LongCat, in those of experts that compute nothing)."""

    def forward(layer: Any, x: torch.Tensor, topk_output: Any, config: Any) -> torch.Tensor:
        weights, experts, _ = topk_output
        scaled = config.apply_router_weight_on_input
        twice = experts.sort(1).values.diff(dim=1) == 0
        if config.activation != "relu2" and not scaled and not twice.any():
            return known(layer, x, topk_output, config)
        out = torch.zeros(x.shape, dtype=torch.float32)
        for place in range(experts.shape[1]):
            weight = weights[:, place, None].float()
            up, down = (each[experts[:, place].long()].float() for each in (layer.w13_weight, layer.w2_weight))
            inner = torch.einsum("tmh,th->tm", up, x.float() * weight if scaled else x.float())
            if config.activation == "relu2":
                inner = inner.relu().square()
            else:
                gate, inner = inner.chunk(2, -1)
                inner = torch.nn.functional.silu(gate) * inner
            out += (1 if scaled else weight) * torch.einsum("thm,tm->th", down, inner)
        return out.to(x.dtype)

    return forward


def _gated_norm(self: Any, x: torch.Tensor, g: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    gate = torch.sigmoid(g.float()) if self.activation == "sigmoid" else torch.nn.functional.silu(g.float())
    return (_normed(x, self.weight, self.eps) * gate).to(x.dtype)


def _two_norms(
    x1: torch.Tensor, x2: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, _: None, __: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return _normed(x1, w1, eps).to(x1.dtype), _normed(x2, w2, eps).to(x2.dtype)


def _normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x.float(), x.shape[-1:], weight.float(), eps)


def _torch_attention() -> type:
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.layers.radix_attention import AttentionType
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    class TorchAttention(TorchNativeAttnBackend):
        def forward_extend(
            self, q: Any, k: Any, v: Any, layer: Any, batch: Any, save_kv_cache: bool = True, **more: Any
        ) -> torch.Tensor:
            return self._attend(q, k, v, layer, batch, batch.extend_seq_lens.tolist(), save_kv_cache, **more)

        def forward_decode(
            self, q: Any, k: Any, v: Any, layer: Any, batch: Any, save_kv_cache: bool = True, **more: Any
        ) -> torch.Tensor:
            return self._attend(q, k, v, layer, batch, [1] * batch.batch_size, save_kv_cache, **more)

        def _attend(
            self,
            q: torch.Tensor,
            k: torch.Tensor | None,
            v: torch.Tensor | None,
            layer: Any,
            batch: Any,
            new: list[int],
            save_kv_cache: bool,
            sinks: torch.Tensor | None = None,
        ) -> torch.Tensor:
            """`new`: how many tokens of each sequence are new, which are the rows of `q`."""
            pool = self.token_to_kv_pool
            if save_kv_cache and k is not None:
                pool.set_kv_buffer(layer, KVWriteLoc(batch.out_cache_loc, self.swa_out_cache_loc), k, v)
            keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
            copies = layer.tp_q_head_num // layer.tp_k_head_num
            out = []
            for sequence, rows in enumerate(q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim).split(new)):
                length = int(batch.seq_lens[sequence])
                places = self.req_to_token_pool.req_to_token[batch.req_pool_indices[sequence], :length]
                if self.use_sliding_window_kv_pool and pool.layers_mapping[layer.layer_id][1]:
                    places = pool.translate_loc_from_full_to_swa(places)
                key, value = (x[places].float().repeat_interleave(copies, 1) for x in (keys, values))
                scores = torch.einsum("qhd,khd->hqk", rows.float(), key) * layer.scaling
                if layer.logit_cap:
                    scores = layer.logit_cap * torch.tanh(scores / layer.logit_cap)
                behind = torch.arange(length - len(rows), length)[:, None] - torch.arange(length)[None, :]
                if layer.attn_type != AttentionType.ENCODER_ONLY:
                    scores.masked_fill_(behind < 0, -torch.inf)
                if (window := layer.sliding_window_size) is not None and window > -1:
                    scores.masked_fill_(behind > window, -torch.inf)
                if sinks is not None:
                    scores = torch.cat([scores, sinks.float()[:, None, None].expand(-1, len(rows), 1)], -1)
                weights = scores.softmax(-1)[..., :length]
                out.append(torch.einsum("hqk,khd->qhd", weights, value).to(q.dtype).flatten(1))
            return torch.cat(out)

    return TorchAttention


give()
