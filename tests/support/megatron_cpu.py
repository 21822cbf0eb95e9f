"""Megatron-Core 0.16.1 and Megatron-Bridge 0.3.1 on a machine without a GPU and without Transformer Engine.

Building a model needs almost nothing of this; a training step through Megatron's own schedules does. Call
`run_on_cpu()` before a model is built, `fake_transformer_engine()` for layers with Transformer Engine's class and
parameter names, `import_bridge()` for Megatron-Bridge, `without_fused_kernels()` for the models that it makes.

Run as a script, `megatron_cpu.py SCRIPT ARGUMENTS`, it does all of this and then runs the script, as it is: one that was
written for GPUs with Transformer Engine.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import runpy
import sys
import types
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode


class _Anything(type):
    """A class whose attributes are such classes, and whose instances can be called and asked for anything."""

    def __new__(cls, name: str, bases: tuple[type, ...] = (), body: dict[str, Any] | None = None) -> Any:
        answers = {"__init__": lambda self, *a, **k: None, "__call__": lambda self, *a, **k: self}
        return super().__new__(cls, name, bases, {**answers, "__getattr__": _answer, **(body or {})})

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name)


def _answer(self: Any, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Anything(name)()


STAND_INS: dict[str, Any] = {}
"""Classes of `fake_transformer_engine()`, by the names that Megatron-Bridge has for the real ones, in its LoRA or in a model."""


class _OnCpu(TorchFunctionMode):
    """Schedules and point-to-point buffers ask for `device="cuda"` outright."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs = {**kwargs, "device": "cpu"}
        return func(*args, **kwargs)


def run_on_cpu() -> None:
    """Patches torch.cuda and Megatron so that models are built and trained on the CPU, with gloo."""
    import megatron.core.ssm.gated_delta_net as gated_delta_net
    import megatron.core.transformer.moe.moe_utils as moe_utils
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher
    import megatron.core.transformer.torch_norm as torch_norm
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    with _pretended("triton"):  # for kernels of inference
        import megatron.core.ssm.mamba_mixer as mamba_mixer

    _OnCpu().__enter__()
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *a: None
    torch.Tensor.cuda = lambda self, *a, **k: self
    # The optimizers ask whether they have GPU tensors by the name of their type.
    type_of = torch.Tensor.type

    def type_on_gpu(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = type_of(self, *args, **kwargs)
        return found.replace("torch.", "torch.cuda.") if isinstance(found, str) and ".cuda." not in found else found

    torch.Tensor.type = type_on_gpu
    nn.Module.cuda = lambda self, *a, **k: self
    # Dropout on the GPU draws from a generator of its own; there is neither here.
    CudaRNGStatesTracker.fork = lambda self, *a, **k: contextlib.nullcontext()
    CudaRNGStatesTracker.add = lambda self, *a, **k: None
    # The mixture of experts overlaps its copies on side streams.
    torch.cuda.Stream = torch.cuda.Event = _Anything("Stream")
    torch.cuda.current_stream = lambda *a: torch.cuda.Stream()
    torch.cuda.stream = lambda *a: contextlib.nullcontext()
    torch.Tensor.record_stream = lambda self, *a: None
    # With `deterministic_mode`, this norm is all that a gated delta net takes from flash-linear-attention.
    gated_delta_net.HAVE_FLA, gated_delta_net.l2norm = True, partial(nn.functional.normalize, dim=-1)
    mamba_mixer.HAVE_MAMBA_SSM, mamba_mixer.ExtendedRMSNorm = True, _NormByGroup
    mamba_mixer.mamba_split_conv1d_scan_combined = _scan
    # Without Transformer Engine the name is read but was never set.
    moe_utils.te_general_gemm = None
    # Splits that all_to_all_single takes as numbers come from the GPU as arrays.
    token_dispatcher.maybe_move_tensor_to_cpu = lambda t, *a, **k: t.numpy() if isinstance(t, torch.Tensor) else t
    # torch's norm refuses sequence parallelism, which MoE with tensor parallelism asks for; what it needs is this mark.
    build = torch_norm.WrappedTorchNorm.__new__

    def norm(cls: Any, config: Any, *args: Any, **kwargs: Any) -> nn.Module:
        on, config.sequence_parallel = config.sequence_parallel, False
        try:
            made = build(cls, config, *args, **kwargs)
        finally:
            config.sequence_parallel = on
        for parameter in made.parameters():
            parameter.sequence_parallel = on
        return made

    torch_norm.WrappedTorchNorm.__new__ = norm

    class Attention:
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            return (_Attention if "k_channels" in kwargs else DotProductAttention)(*args, **kwargs)

    LocalSpecProvider.core_attention = lambda self: Attention
    # gloo scatters the storage order of a chunk that is not contiguous, silently (Megatron-Bridge's loading does that).
    scatter = dist.scatter
    dist.scatter = lambda tensor, scatter_list=None, **k: scatter(
        tensor, None if scatter_list is None else [one.contiguous() for one in scatter_list], **k
    )


class _NormByGroup(nn.Module):
    """In the place of the norm of `mamba_ssm`."""

    def __init__(self, width: int, *, eps: float, group_size: int, dtype: torch.dtype, **_: Any) -> None:
        super().__init__()
        self.weight, self.eps, self.group_size = nn.Parameter(torch.ones(width, dtype=dtype)), eps, group_size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        groups = x.unflatten(-1, (-1, self.group_size))
        return nn.functional.rms_norm(groups, (self.group_size,), eps=self.eps).flatten(-2) * self.weight


def _scan(
    projected: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    dt_bias: torch.Tensor,
    a: torch.Tensor,
    *,
    D: torch.Tensor,  # noqa: N803  the name of the argument
    headdim: int,
    ngroups: int,
    **_: Any,
) -> torch.Tensor:
    """In the place of the kernel of `mamba_ssm`: Mamba-2, step by step. (batch, steps, rows of the input projection)"""
    heads = len(dt_bias)
    inner = heads * headdim
    gate, x, dt = projected.split([inner, len(weight), heads], dim=-1)
    x = nn.functional.pad(x.mT, (weight.shape[1] - 1, 0))
    x = nn.functional.silu(nn.functional.conv1d(x, weight[:, None], bias, groups=len(weight))).mT
    x, b, c = x.split([inner, (len(weight) - inner) // 2, (len(weight) - inner) // 2], dim=-1)
    x = x.unflatten(-1, (heads, headdim))
    b, c = (one.unflatten(-1, (ngroups, -1)).repeat_interleave(heads // ngroups, dim=2) for one in (b, c))
    dt = nn.functional.softplus(dt + dt_bias)
    state, out = torch.zeros(1), []
    for t in range(x.shape[1]):
        kept = state * (dt[:, t] * a).exp()[..., None, None]
        state = kept + (dt[:, t, :, None] * x[:, t])[..., None] * b[:, t, :, None]
        out.append((state * c[:, t, :, None]).sum(-1) + D[:, None] * x[:, t])
    return (torch.stack(out, dim=1).flatten(-2) * nn.functional.silu(gate)).to(projected.dtype)


class _Attention(nn.Module):
    """Causal attention without parameters, for MLA: Megatron's own takes one width of heads for all three."""

    def __init__(self, config: Any, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return out.permute(2, 0, 1, 3).flatten(2)


@contextlib.contextmanager
def _pretended(*packages: str) -> Iterator[None]:
    """While this is entered, these packages can be imported, with everything in them."""

    class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
        def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
            if name.split(".")[0] in packages:
                return importlib.machinery.ModuleSpec(name, self, is_package=True)
            return None

        def create_module(self, spec: Any) -> Any:
            module = types.ModuleType(spec.name)
            module.__getattr__ = lambda name: _Anything.__getattr__(_Anything(spec.name), name)
            return module

        def exec_module(self, module: Any) -> None:
            pass

    finder = Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


def import_bridge() -> Any:
    """Megatron-Bridge's AutoBridge. It imports Transformer Engine, ModelOpt and Triton at its top and then doesn't use
    them; Megatron-Core must be imported before, so that it knows that they are not there."""
    import megatron.core.models.gpt.gpt_layer_specs  # noqa: F401

    with _pretended("transformer_engine", "modelopt", "triton"):
        from megatron.bridge import AutoBridge
        from megatron.bridge.peft import utils
    for name, stand_in in STAND_INS.items():
        setattr(utils, name, stand_in)
    return AutoBridge


def without_fused_kernels() -> None:
    """What Megatron-Bridge's providers turn on, and a CPU doesn't have."""
    from megatron.bridge.models.gpt_provider import GPTModelProvider

    finalize = GPTModelProvider.finalize

    def finalized(self: Any) -> None:
        for name in ("gradient_accumulation", "bias_activation", "bias_dropout", "masked_softmax", "apply_rope"):
            setattr(self, f"{name}_fusion", False)
        self.moe_permute_fusion = self.persist_layer_norm = self.batch_p2p_comm = False
        finalize(self)

    GPTModelProvider.finalize = finalized


def fake_transformer_engine() -> None:
    """Makes Megatron's Transformer Engine specs build CPU layers with Transformer Engine's class and parameter names.

    Class names matter: Megatron-Bridge tells from them how a parameter is divided.
    """
    import megatron.core.models.gpt.experimental_attention_variant_module_specs as variants
    import megatron.core.models.gpt.gpt_layer_specs as specs
    import megatron.core.ssm.mamba_block as mamba_block
    import megatron.core.transformer.multi_latent_attention as mla
    import megatron.core.transformer.transformer_block as transformer_block
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.parallel_state import get_expert_tensor_parallel_world_size
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP

    def add_norm(module: nn.Module, prefix: str, config: Any, hidden_size: int) -> None:
        weight = nn.Parameter(
            torch.full((hidden_size,), 1.0 - config.layernorm_zero_centered_gamma, dtype=config.params_dtype)
        )
        bias = nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))
        for name, parameter in {"weight": weight, "bias": bias}.items():
            if name == "bias" and config.normalization != "LayerNorm":
                continue
            parameter.sequence_parallel = config.sequence_parallel
            module.register_parameter(prefix + name, parameter)

    def normed(x: torch.Tensor, module: nn.Module, prefix: str) -> torch.Tensor:
        weight, bias = getattr(module, f"{prefix}weight"), getattr(module, f"{prefix}bias", None)
        weight = weight + int(module.config.layernorm_zero_centered_gamma)
        if bias is None:
            return nn.functional.rms_norm(x, x.shape[-1:], weight, 1e-5)
        return nn.functional.layer_norm(x, x.shape[-1:], weight, bias, 1e-5)

    class TENorm(nn.Module):
        def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5) -> None:
            super().__init__()
            self.config = config
            add_norm(self, "", config, hidden_size)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return normed(x, self, "")

    class TEColumnParallelLinear(ColumnParallelLinear):
        pass

    class TERowParallelLinear(RowParallelLinear):
        pass

    class TERowParallelLinearLayerNorm(TERowParallelLinear):
        """Megatron-Bridge's, of Gemma 2 and 3."""

        def __init__(self, input_size: int, output_size: int, *, config: Any, **kwargs: Any) -> None:
            super().__init__(input_size, output_size, config=config, **kwargs)
            self.post_layernorm = TENorm(config, output_size)

        def forward(self, x: torch.Tensor) -> Any:
            output, bias = super().forward(x)
            return self.post_layernorm(output), bias

    class TELayerNormColumnParallelLinear(ColumnParallelLinear):
        def __init__(self, input_size: int, output_size: int, *, config: Any, **kwargs: Any) -> None:
            super().__init__(input_size, output_size, config=config, **kwargs)
            add_norm(self, "layer_norm_", config, input_size)

        def forward(self, x: torch.Tensor, *args: Any) -> Any:
            return super().forward(normed(x, self, "layer_norm_"), *args)

    class TELinear(nn.Module):
        """The duplicated kind: every tensor-parallel rank holds all of it, and Transformer Engine still marks it."""

        def __init__(self, input_size: int, output_size: int, *, config: Any, parallel_mode: str, **_: Any) -> None:
            super().__init__()
            assert parallel_mode == "duplicated"
            self.parallel_mode = None
            self.weight = nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
            config.init_method(self.weight)
            self.weight.tensor_model_parallel, self.weight.partition_dim = True, 0
            self.weight.sequence_parallel = config.sequence_parallel

        def forward(self, x: torch.Tensor) -> Any:
            return nn.functional.linear(x, self.weight), None

    class _Grouped(nn.Module):
        """Experts side by side as weight0, weight1, ...; divided by expert-tensor parallelism, and not marked so."""

        dim = 0

        def __init__(
            self,
            experts: int,
            input_size: int,
            output_size: int,
            *,
            config: Any,
            bias: bool,
            skip_bias_add: bool,
            **_: Any,
        ) -> None:
            super().__init__()
            self.num_gemms, self.config, self.skip_bias_add = experts, config, skip_bias_add
            shape = [output_size, input_size]
            shape[self.dim] //= get_expert_tensor_parallel_world_size()
            self.out_features, self.in_features = shape
            for i in range(experts):
                weight = nn.Parameter(torch.empty(shape, dtype=config.params_dtype))
                config.init_method(weight)
                weight.allreduce = config.expert_model_parallel_size == 1
                self.register_parameter(f"weight{i}", weight)
                if bias:
                    self.register_parameter(f"bias{i}", nn.Parameter(torch.zeros(shape[0], dtype=config.params_dtype)))
                    getattr(self, f"bias{i}").allreduce = weight.allreduce

        def forward(self, x: torch.Tensor, splits: list[int]) -> Any:
            parts = torch.split(x, splits)
            biases = [getattr(self, f"bias{i}", None) for i in range(self.num_gemms)]
            left = biases if self.skip_bias_add and biases[0] is not None else None
            done = [
                nn.functional.linear(part, getattr(self, f"weight{i}"), None if left else biases[i])
                for i, part in enumerate(parts)
            ]
            return torch.cat(done), left

    class TEColumnParallelGroupedLinear(_Grouped):
        pass

    class TERowParallelGroupedLinear(_Grouped):
        dim = 1

    class FakeTESpecProvider(LocalSpecProvider):
        def linear(self) -> type:
            return TELinear

        def column_parallel_linear(self) -> type:
            return TEColumnParallelLinear

        def row_parallel_linear(self) -> type:
            return TERowParallelLinear

        def fuse_layernorm_and_linear(self) -> bool:
            return True

        def column_parallel_layer_norm_linear(self) -> type:
            return TELayerNormColumnParallelLinear

        def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> type:
            return TENorm

        def grouped_mlp_modules(self, moe_use_grouped_gemm: bool, moe_use_legacy_grouped_gemm: bool) -> Any:
            if moe_use_grouped_gemm:
                return TEGroupedMLP, MLPSubmodules(
                    linear_fc1=TEColumnParallelGroupedLinear, linear_fc2=TERowParallelGroupedLinear
                )
            return SequentialMLP, MLPSubmodules(linear_fc1=TEColumnParallelLinear, linear_fc2=TERowParallelLinear)

    STAND_INS.update(
        TELinear=TELinear,
        TELayerNormColumnParallelLinear=TELayerNormColumnParallelLinear,
        TERowParallelLinearLayerNorm=TERowParallelLinearLayerNorm,
        TECL=(TEColumnParallelGroupedLinear,),  # the others are recognised by what they inherit from
        TERL=(TERowParallelGroupedLinear,),
    )
    specs.TESpecProvider = variants.TESpecProvider = FakeTESpecProvider
    specs.TENorm = mamba_block.TENorm = transformer_block.LayerNormImpl = TENorm
    mla.TELinear, mla.TEColumnParallelLinear = TELinear, TEColumnParallelLinear


if __name__ == "__main__":
    run_on_cpu()
    fake_transformer_engine()
    import_bridge()
    without_fused_kernels()
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
