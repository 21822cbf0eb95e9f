"""Multi-head latent attention in SGLang: the weights that its loaders derive from `kv_b_proj`, derived again for one module.

DeepSeek-V2, -V3, their relatives and Kimi Linear derive them at the end of each load (`post_load_weights`), from the projection
as the checkpoint has it, before a quantisation method post-processes that. Here the same method runs on a twin of the model in
which one attention module is a stand-in. MiniCPM3's loader derives them itself, and then removes the projection: it runs
without tensors on a model of one layer, whose attention is the stand-in.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from inference_plugin.engines.live_model import with_submodule

__all__ = ["KV_PROJECTION", "derive_nothing", "latent_finishers", "projections_kept", "why_underivable"]

KV_PROJECTION = "kv_b_proj"
"""The submodule of an attention module whose weights the derived ones are made of."""

_DERIVED = ("w_kc", "w_vc", "w_scale")
"""The attributes in which MiniCPM3's loader keeps the derived weights."""

_DRAFT_LAYER = "decoder"
"""A layer for multi-token prediction, the only one of a draft."""

_GATHERED = ("w_kc_qrep", "q_b_proj_qrep_weight")
"""Weights that SGLang gathers over the ranks of a decode context (`--dcp-replicate-q-proj`)."""


def derive_nothing(skeleton: nn.Module) -> None:
    """From now on `post_load_weights` does nothing on `skeleton`: loads fill its parameters only."""
    for _, model in _models(skeleton):
        model.post_load_weights = _nothing


@contextlib.contextmanager
def projections_kept(skeleton: nn.Module) -> Iterator[None]:
    """Around a load into `skeleton`: undoes what MiniCPM3's loader does to attention modules beside filling parameters."""
    held = [
        (attention, dict(attention._modules), {name: getattr(attention, name, None) for name in _DERIVED})
        for attention in _mini_attentions(skeleton).values()
    ]
    try:
        yield
    finally:
        for attention, submodules, derived in held:
            attention._modules.clear()
            attention._modules.update(submodules)
            vars(attention).update(derived)


def latent_finishers(skeleton: nn.Module) -> Mapping[str, Callable[[nn.Module], None]]:
    """What derives the weights of each latent attention module, by the module's name; each is called with a stand-in for it."""
    found: dict[str, Callable[[nn.Module], None]] = {}
    for name, model in _models(skeleton):
        for layer in _layers(model.model):
            attention = f"model.{layer}.self_attn"
            if hasattr(model.get_submodule(attention), KV_PROJECTION):
                found[f"{name}.{attention}" if name else attention] = functools.partial(_derive, model, attention)
    return found | dict.fromkeys(_mini_attentions(skeleton), _derive_by_a_load)


def why_underivable(model: nn.Module) -> str | None:
    """Why the weights that the load of `model` derived can't be derived again module by module; None if they can."""
    known = {id(one) for _, one in _models(model)}
    for name, module in model.named_modules():
        if hasattr(module, "post_load_weights") and id(module) not in known and not _only_delegates(module):
            return f"{type(module).__name__} post-processes as a whole"
        if any(isinstance(vars(module).get(gathered), torch.Tensor) for gathered in _GATHERED):
            return f"{name} gathers its derived weights over the ranks of a decode context"
    return None


def _models(root: nn.Module) -> list[tuple[str, Any]]:
    """The models below `root` whose `post_load_weights` we know, by name."""
    try:
        from sglang.srt.models.deepseek_common.deepseek_weight_loader import DeepseekV2WeightLoaderMixin
    except ImportError:  # optional: the start has said what follows from that
        return []
    known = [DeepseekV2WeightLoaderMixin.post_load_weights]
    with contextlib.suppress(ImportError):  # optional, too
        from sglang.srt.models.deepseek_nextn import DeepseekV3ForCausalLMNextN

        known.append(DeepseekV3ForCausalLMNextN.post_load_weights)
    if (kimi := _kimi_linear()) is not None:
        known.append(kimi.post_load_weights)
    return [
        (name, module)
        for name, module in root.named_modules()
        if getattr(type(module), "post_load_weights", None) in known
    ]


def _kimi_linear() -> Any:
    """The class of Kimi Linear; None where SGLang lacks it."""
    with contextlib.suppress(ImportError):  # optional, too
        from sglang.srt.models.kimi_linear import KimiLinearForCausalLM

        return KimiLinearForCausalLM
    return None


class _Bare:
    """In a model's place: it has a language model, whose method does nothing, and nobody may ask for more."""

    language_model = SimpleNamespace(post_load_weights=lambda: None)

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)  # no AttributeError, which `hasattr` and `getattr` hide


def _only_delegates(module: Any) -> bool:
    """Whether `post_load_weights` does no more than calling that of its language model, as in models that read images."""
    try:
        type(module).post_load_weights(_Bare())
    except Exception:  # noqa: BLE001 -- it wants more than this
        return False
    return True


def _layers(model: Any) -> list[str]:
    """The layers of which `post_load_weights` derives."""
    if hasattr(model, _DRAFT_LAYER):
        return [_DRAFT_LAYER]
    return [f"layers.{number}" for number in range(model.start_layer, model.end_layer)]


def _mini_attentions(skeleton: nn.Module) -> dict[str, nn.Module]:
    """MiniCPM3's attention modules that still have a projection, by name."""
    try:
        from sglang.srt.models.minicpm3 import MiniCPM3AttentionMLA
    except ImportError:  # optional, too
        return {}
    return {
        name: module
        for name, module in skeleton.named_modules()
        if isinstance(module, MiniCPM3AttentionMLA) and KV_PROJECTION in module._modules
    }


def _derive_by_a_load(stand_in: nn.Module) -> None:
    from sglang.srt.models.minicpm3 import MiniCPM3ForCausalLM

    config = SimpleNamespace(num_hidden_layers=1, tie_word_embeddings=True)
    layers = SimpleNamespace(layers=[SimpleNamespace(self_attn=stand_in)])
    model: Any = SimpleNamespace(config=config, model=layers, num_experts=0, named_parameters=lambda: ())
    MiniCPM3ForCausalLM.load_weights(model, ())


def _derive(model: Any, attention: str, stand_in: nn.Module) -> None:
    twin: Any = with_submodule(model, attention, stand_in)
    if (kimi := _kimi_linear()) is not None and isinstance(model, kimi):
        twin.config = SimpleNamespace(full_attention_layer_ids=[int(attention.split(".")[2])])
        kimi.post_load_weights(twin)
        return
    is_draft = _layers(model.model) == [_DRAFT_LAYER]
    type(model).post_load_weights(twin, is_nextn=is_draft, weight_names=[f"{attention}.{KV_PROJECTION}.weight"])


def _nothing(**_: Any) -> None: ...
