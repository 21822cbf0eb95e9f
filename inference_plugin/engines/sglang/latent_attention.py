"""Multi-head latent attention in SGLang: the weights that its loaders derive from `kv_b_proj`, derived again for one module.

DeepSeek-V2, -V3, their relatives, Ling and Kimi Linear derive them at the end of each load (`post_load_weights`), from the
projection as the checkpoint has it, before a quantisation method post-processes that. Here the same method runs on a twin of
the model in which one attention module is a stand-in. Methods that take no such choice run on a model of one layer, whose
attention is the stand-in: Sarvam-MLA's, and LongCat-Flash's, which also scales two norms of each attention. MiniCPM3's loader
derives them itself, and then removes the projection: it runs so too, without tensors.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from inference_plugin.engines.live_model import with_submodule

__all__ = ["KV_PROJECTION", "derive_nothing", "latent_finishers", "projections_kept", "why_underivable"]

KV_PROJECTION = "kv_b_proj"
"""The submodule of an attention module whose weights the derived ones are made of."""

_DERIVED = ("w_kc", "w_vc", "w_scale", "w_scale_k", "w_scale_v")
"""The attributes in which attention modules keep the derived weights."""

_DRAFT_LAYER = "decoder"
"""A layer for multi-token prediction, the only one of a draft."""

_MODULES = "sglang.srt.models."

_KIMI = "kimi_linear", "KimiLinearForCausalLM"

_KNOWN = (
    ("deepseek_common.deepseek_weight_loader", "DeepseekV2WeightLoaderMixin"),
    ("deepseek_nextn", "DeepseekV3ForCausalLMNextN"),
    ("gigachat35", "GigaChat35ForCausalLM"),
    ("glm5_next", "Glm5NextForConditionalGeneration"),
    ("bailing_moe_linear", "BailingMoELinearForCausalLM"),
    ("bailing_moe_v3", "BailingMoeV3ForCausalLM"),
    _KIMI,
)
"""Models whose `post_load_weights` derives the weights of the layers that it is given, and does no more: SGLang's module, and
the class. Ling 2.5 and 3 have their own."""

_PARTS = ("self_attn", "attention")
"""What an attention module is called in its layer."""

_LONGCAT = "longcat_flash", "LongcatFlashForCausalLM"
_SARVAM = "sarvam_moe", "SarvamMLAForCausalLM"
"""Models with a method of their own: SGLang's module, and the class."""

_NORMS = ("q_a_layernorm", "kv_a_layernorm")
"""Submodules of LongCat's attention that its method scales."""

_GATHERED = ("w_kc_qrep", "q_b_proj_qrep_weight")
"""Weights that SGLang gathers over the ranks of a decode context (`--dcp-replicate-q-proj`)."""


def derive_nothing(skeleton: nn.Module) -> None:
    """From now on `post_load_weights` does nothing on `skeleton`: loads fill its parameters only."""
    for _, model in _models(skeleton):
        model.post_load_weights = _nothing
    for _, model in _of(skeleton, _LONGCAT):
        model.post_load_weights = _nothing
    for _, model in _of(skeleton, _SARVAM):
        model._set_mla_wkc_wvc = _nothing


@contextlib.contextmanager
def projections_kept(skeleton: nn.Module) -> Iterator[None]:
    """Around a load into `skeleton`: undoes what the loaders of MiniCPM3 and GLM-5 Next do to attention modules beside filling
    parameters. `derive_nothing` does not reach them."""
    attentions = *_mini_attentions(skeleton).values(), *(m.get_submodule(at) for _, m, at in _attentions(skeleton))
    held = [
        (
            attention,
            dict(attention._modules),
            {name: getattr(attention, name) for name in _DERIVED if hasattr(attention, name)},
        )
        for attention in attentions
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
    for name, model, attention in _attentions(skeleton):
        found[_below(name, attention)] = functools.partial(_derive, model, attention)
    for name, model in _of(skeleton, _SARVAM):
        for layer in _layers(model.model):
            found[_below(name, f"model.{layer}.self_attn")] = functools.partial(_derive_sarvam, model)
    for name, model in _of(skeleton, _LONGCAT):
        for number, half in itertools.product(range(model.config.num_hidden_layers), range(2)):
            attention = _below(name, f"model.layers.{number}.self_attn.{half}")
            found[attention] = functools.partial(_derive_longcat, model, "")
            for norm in _NORMS:
                found[f"{attention}.{norm}"] = functools.partial(_derive_longcat, model, norm)
    return found | dict.fromkeys(_mini_attentions(skeleton), _derive_by_a_load)


def why_underivable(model: nn.Module) -> str | None:
    """Why the weights that the load of `model` derived can't be derived again module by module; None if they can."""
    known = {id(one) for _, one in (*_models(model), *_of(model, _LONGCAT))}
    for name, module in model.named_modules():
        if hasattr(module, "post_load_weights") and id(module) not in known and not _only_delegates(module):
            return f"{type(module).__name__} post-processes as a whole"
        if any(isinstance(vars(module).get(gathered), torch.Tensor) for gathered in _GATHERED):
            return f"{name} gathers its derived weights over the ranks of a decode context"
    return None


def _models(root: nn.Module) -> list[tuple[str, Any]]:
    """The models below `root` whose `post_load_weights` we know, by name."""
    known = [kind.post_load_weights for kind in map(_class_of, _KNOWN) if kind is not None]
    return [
        (name, module)
        for name, module in root.named_modules()
        if getattr(type(module), "post_load_weights", None) in known
    ]


def _attentions(root: nn.Module) -> Iterator[tuple[str, Any, str]]:
    """The latent attention modules of these models: the model's name, the model, and the attention's name in it."""
    for name, model in _models(root):
        for layer, part in itertools.product(_layers(model.model), _PARTS):
            if hasattr(getattr(model.get_submodule(f"model.{layer}"), part, None), KV_PROJECTION):
                yield name, model, f"model.{layer}.{part}"


def _class_of(which: tuple[str, str]) -> Any:
    """A class of SGLang's models; None where SGLang lacks it, or has made no model of it."""
    module, name = which
    return getattr(sys.modules.get(_MODULES + module), name, None)


def _of(root: nn.Module, which: tuple[str, str]) -> list[tuple[str, Any]]:
    """The models of this class at or below `root`, by name."""
    kind = _class_of(which)
    return [(name, model) for name, model in root.named_modules() if kind is not None and isinstance(model, kind)]


def _below(root: str, name: str) -> str:
    return f"{root}.{name}" if root else name


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
    if _of(model, _KIMI):
        twin.config = SimpleNamespace(full_attention_layer_ids=[int(attention.split(".")[2])])
        type(model).post_load_weights(twin)
        return
    is_draft = _layers(model.model) == [_DRAFT_LAYER]
    type(model).post_load_weights(twin, is_nextn=is_draft, weight_names=[f"{attention}.{KV_PROJECTION}.weight"])


def _derive_sarvam(model: Any, stand_in: nn.Module) -> None:
    layers = [SimpleNamespace(self_attn=stand_in)]
    one = SimpleNamespace(model=SimpleNamespace(layers=layers), start_layer=0, end_layer=1)
    type(model)._set_mla_wkc_wvc(one)


def _derive_longcat(model: Any, norm: str, stand_in: nn.Module) -> None:
    """`norm`: which part of an attention `stand_in` stands for; "" if it stands for the attention itself."""
    attentions: list[Any] = [_Attention() if norm else stand_in, _Attention()]
    if norm:
        setattr(attentions[0], norm, stand_in)
    config = copy.copy(model.config)
    config.num_hidden_layers = 1
    layers = SimpleNamespace(layers=[SimpleNamespace(self_attn=attentions)])
    one: Any = SimpleNamespace(config=config, quant_config=model.quant_config, model=layers)
    type(model).post_load_weights(one)


class _Attention:
    """In the place of an attention: there is something to derive from, and nobody keeps what is derived."""

    qk_nope_head_dim = v_head_dim = 1
    w_kc = w_vc = w_scale = None

    def __init__(self) -> None:
        for part, shape in ((KV_PROJECTION, (2, 1)), *((norm, (1,)) for norm in _NORMS)):
            setattr(self, part, SimpleNamespace(weight=torch.zeros(shape)))


def _nothing(**_: Any) -> None: ...
