"""The draft model of speculative decoding, which vLLM's proposer builds and the group `draft` updates."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from inference_plugin.engines.drafts import DraftModel, NoDraft, skeleton_without, without_modules
from inference_plugin.engines.vllm.model import VllmModel, skeleton_of
from inference_plugin.wire.errors import WeightwireError
from inference_plugin.wire.groups import DRAFT

__all__ = ["VllmDraft", "draft_of"]

logger = logging.getLogger(__name__)


class VllmDraft(DraftModel, VllmModel):
    """`install.contract.EngineModel` of the draft model."""


def draft_of(worker: Any, served: nn.Module) -> VllmDraft | NoDraft | None:
    """The worker's draft model; None where it drafts without weights, or not at all. `served`: the served model."""
    runner: Any = worker.model_runner
    if not hasattr(runner, "get_draft_model"):  # before 0.26
        drafts = getattr(getattr(runner, "drafter", None), "model", None) is not None
        return NoDraft("this version of vLLM gives no access to it") if drafts else None
    live: Any = runner.get_draft_model()
    if live is None:
        return None
    proposer: Any = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
    if (why := _why_not(proposer, live)) is not None:
        return NoDraft(why)
    try:
        draft = _draft_model(worker, proposer, live, served)
        logger.info("weightwire: group %r updates the draft model, a %s", DRAFT, type(live).__name__)
        return draft
    except Exception as error:  # noqa: BLE001 -- whatever it is, the served model can be updated
        logger.warning("weightwire: the draft model can't be updated: %s", error)
        return NoDraft(WeightwireError.wrap(error).message)


def _draft_model(worker: Any, proposer: Any, live: nn.Module, served: nn.Module) -> VllmDraft:
    from vllm.config import set_current_vllm_config

    own_config, prefix = _MADE[_kind(proposer)]
    with set_current_vllm_config(worker.vllm_config):
        config = own_config(proposer)
    model_config = proposer.speculative_config.draft_model_config
    skeleton = skeleton_of(config, model_config, prefix)
    with_adapters: nn.Module = worker.model_runner.get_model()  # whose modules LoRA may have wrapped
    borrowed = {*_borrowed(live, served), *_borrowed(live, with_adapters)}
    device = torch.device(worker.device)
    own = without_modules(live, borrowed)
    draft = VllmDraft(own, device, config, model_config, skeleton_without(skeleton, borrowed))
    draft.note_graphs(worker.vllm_config)
    return draft


def _by_proposer(proposer: Any) -> Any:
    return proposer._create_draft_vllm_config()


def _by_overrides(speculator: Any) -> Any:
    return speculator.speculative_config.apply_draft_overrides(speculator.vllm_config)


def _kept(speculator: Any) -> Any:
    return speculator._draft_vllm_config


_MADE: Mapping[str, tuple[Callable[[Any], Any], str]] = {
    "vllm.v1.spec_decode.draft_model.DraftModelProposer": (_by_proposer, "draft_model"),
    "vllm.v1.spec_decode.eagle.EagleProposer": (_by_proposer, ""),
    # those of vLLM's second model runner, which GPUs have
    "vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator.StandaloneARSpeculator": (_kept, "draft_model"),
    "vllm.v1.worker.gpu.spec_decode.eagle.speculator.EagleSpeculator": (_by_overrides, ""),
    "vllm.v1.worker.gpu.spec_decode.mtp.speculator.MTPSpeculator": (_by_overrides, ""),
}
"""The proposers that compute nothing from a draft's weights beforehand: the configuration and the prefix with which each builds
its draft."""


def _kind(proposer: Any) -> str:
    return f"{type(proposer).__module__}.{type(proposer).__qualname__}"


def _why_not(proposer: Any, live: Any) -> str | None:
    """Why vLLM's proposer would go on with the old weights of a draft that was updated; None if it would not."""
    if _kind(proposer) not in _MADE:
        return f"what {type(proposer).__name__} computes from the draft's weights is not known"
    if not isinstance(live, nn.Module):
        return f"it runs inside a {type(live).__name__}"
    if getattr(proposer, "parallel_drafting", False):
        return "with parallel drafting vLLM keeps a mask computed from the draft's first weights"
    return None


def _borrowed(live: nn.Module, served: nn.Module) -> Iterator[str]:
    """The modules of a draft that are the served model's own, by name in the draft."""
    own = set(map(id, served.modules()))
    for name, module in live.named_modules(remove_duplicate=False):
        if name and id(module) in own:
            yield name
