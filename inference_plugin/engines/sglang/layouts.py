"""Which of SGLang's layouts are served, and in which the weights must stay where they are."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

__all__ = ["captures_graphs", "lends_addresses", "why_copied", "why_unserved"]

_ELSEWHERE: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "weight_cache_mode": (("off",), "a daemon holds the weights, and other engines compute with the same memory"),
    "dwdp_size": ((0, 1), "ranks compute with copies of each other's experts"),
    "kt_weight_path": ((None,), "experts on the host are read from files of their own"),
    "language_only": ((False,), "another engine makes encodings of images and sounds"),
    "cpu_offload_gb": ((0,), "some of the weights lie on the host"),
    "offload_group_size": ((-1, 0), "some of the weights lie on the host"),
    "enable_cp_decode_attn_tp": ((False,), "ranks decode with slices of weights that they keep"),
}
"""Options of SGLang by which weights lie where no update reaches them: the values that switch an option off, and what holds
otherwise."""

_COPIES = ("_param_flat", "_gate_cache")
"""Attributes of kernels for Kimi's linear attention: copies of its decay and bias, by the address or identity of a parameter."""


def why_unserved(scheduler: Any, parallel: Any) -> str:
    """Why this layout isn't served; "" if it is. In a layout that is served, a turn reaches all ranks in the same pass, between
    two steps, and the weights are this engine's alone."""
    for option, (off, why) in _ELSEWHERE.items():
        value = getattr(scheduler.server_args, option, off[0])  # not every version has all of them
        if value not in off:
            return f"{why} ({option}={value})"
    if getattr(scheduler.server_args, "enable_torch_compile", False) and scheduler.server_args.device == "cpu":
        return "SGLang compiles decoding on a CPU with the weights as constants (enable_torch_compile)"
    if getattr(scheduler, "enable_pdmux", False):
        return "enable_pdmux computes a prompt some layers at a time, with other work in between, and heeds no pause"
    if scheduler.disaggregation_mode.value != "null":
        return (
            "disaggregated decoding goes on from what another engine, with weights of its own, has computed of a prompt"
        )
    grouped = getattr(parallel, "attn_dp_enabled", parallel.attn_dp_size > 1)  # before 0.5.22 only the size tells
    if grouped and parallel.enable_dp_attention_local_control_broadcast:
        return "local control broadcast keeps one group's control requests from the others"
    if parallel.pp_size > 1:
        beside = {
            "data-parallel attention": grouped,
            "speculative decoding": not scheduler.spec_algorithm.is_none(),
            "hierarchical sparse attention": scheduler.enable_hisparse,
        }
        if found := [what for what, there in beside.items() if there]:
            return f"pipeline parallelism with {' and '.join(found)} has no rule here"
    return ""


_TAKEN = "_aligned_parameter_cache"
"""Where FlashInfer's kernel for gated delta networks keeps parameters as it computes with them, by identity: views of them, or
copies where it needs another dtype or alignment."""


def why_copied(backend: Any, *, fixed_addresses: bool) -> str | None:
    """Which kernel under an attention backend keeps copies of weights that it never makes anew; None if none does.
    `fixed_addresses`: weights stay where they are, so that views of them are as good as they."""
    seen, stack = {id(backend)}, [backend]
    while stack:
        one = stack.pop()
        if isinstance(one, (list, tuple, dict)):
            inside = list(one.values() if isinstance(one, dict) else one)
        elif type(one).__module__.startswith("sglang.srt.layers.attention"):
            held = getattr(one, "__dict__", {})
            if copies := [name for name in _COPIES if name in held]:
                return (
                    f"{type(one).__name__} keeps copies of weights ({copies[0]}) that no update reaches; another kernel for "
                    "linear attention, such as Triton's, keeps none"
                )
            if _TAKEN in held and not (fixed_addresses and _are_views(held[_TAKEN])):
                return (
                    f"{type(one).__name__} keeps parameters as it took them ({_TAKEN}), and no update reaches those; Triton's "
                    "kernel for linear attention keeps none"
                )
            inside = list(held.values())
        else:
            continue
        for child in inside:
            if id(child) not in seen:
                seen.add(id(child))
                stack.append(child)
    return None


def _are_views(taken: Mapping[Any, tuple[Any, Any]]) -> bool:
    """Whether each parameter was taken as it lies in memory. Nothing is known before the first request."""
    return bool(taken) and all(
        made.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr()
        for parameter, made in taken.values()
    )


def captures_graphs() -> bool:
    """Whether this SGLang captures graphs on a GPU: they hold raw addresses of weights."""
    if os.environ.get("SGLANG_VIT_ENABLE_CUDA_GRAPH", "").lower() in ("true", "1", "yes", "y"):
        return True  # of image encoders, whatever the options for phases are
    try:
        # `disable_cuda_graph` doesn't tell: the option of a phase outweighs it
        from sglang.srt.model_executor.cuda_graph_config import cuda_graph_fully_disabled
    except ImportError:  # optional: weights are copied, then
        return True
    return not cuda_graph_fully_disabled()


def lends_addresses(arguments: Any) -> bool:
    """Whether other engines load their weights from raw addresses in this one. `arguments`: SGLang's own."""
    told = getattr(arguments, "remote_instance_weight_loader_start_seed_via_transfer_engine", False)
    return told or getattr(arguments, "remote_instance_weight_loader_backend", "nccl") != "nccl"
