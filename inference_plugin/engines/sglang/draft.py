"""The draft model of speculative decoding, which SGLang's draft worker holds and the group `draft` updates."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from inference_plugin.engines.drafts import DraftModel, NoDraft, skeleton_without, without_modules
from inference_plugin.engines.sglang.model import SglangModel, skeleton_of
from inference_plugin.wire.errors import WeightwireError
from inference_plugin.wire.groups import DRAFT

__all__ = ["SglangDraft", "borrowed", "draft_of", "drafting_models", "holds_views"]

logger = logging.getLogger("sglang.weightwire")

_KNOWN = {
    "sglang.srt.speculative.eagle_worker_v2.EAGLEWorkerV2",
    "sglang.srt.speculative.standalone_worker_v2.StandaloneWorkerV2",
}
"""The workers that compute nothing from a draft's weights beforehand: of EAGLE, of layers for multi-token prediction, and of a
draft model of its own."""


class SglangDraft(DraftModel, SglangModel):
    """`install.contract.EngineModel` of the draft model."""

    placeholders = frozenset({"StagePlan"})
    """It keeps the norm that a head of EAGLE removes from its first layer, and does not apply it."""


def drafting_models(scheduler: Any) -> list[nn.Module]:
    """The live models that propose tokens, of whatever kind. Drafting by n-grams has none."""
    inner = getattr(scheduler.draft_worker, "draft_worker", None)
    runners = getattr(inner, "draft_runners", None)
    if runners is None:
        runners = [getattr(inner, name) for name in ("draft_runner", "model_runner") if hasattr(inner, name)][:1]
    return [runner.model for runner in runners]


def draft_of(scheduler: Any) -> SglangDraft | NoDraft | None:
    """The scheduler's draft model; None where it drafts without weights, or not at all."""
    try:
        worker = scheduler.draft_worker
        if worker is None or getattr(worker, "draft_worker", worker) is None:
            return None
        if (why := _why_not(worker)) is not None:
            return NoDraft(why)
        runner = worker.draft_worker.draft_runner
        names = borrowed(runner.model, scheduler.tp_worker.model_runner.model)
        with _as_built():
            skeleton = skeleton_of(runner)
        live = without_modules(runner.model, names)
        draft = SglangDraft(scheduler, runner, live, skeleton_without(skeleton, names))
        logger.info("weightwire: group %r updates the draft model, a %s", DRAFT, type(runner.model).__name__)
        return draft
    except Exception as error:  # noqa: BLE001 -- whatever it is, the served model can be updated
        logger.warning("weightwire: the draft model can't be updated: %s", error)
        return NoDraft(WeightwireError.wrap(error).message)


def borrowed(draft: nn.Module, served: nn.Module) -> set[str]:
    """The modules of a draft that hold memory of the served model's parameters, by name in the draft."""
    theirs = {_memory(parameter) for parameter in served.parameters()}
    return {
        name
        for name, module in draft.named_modules(remove_duplicate=False)
        if any(_memory(tensor) in theirs for tensor in _held(module))
    }


def holds_views(draft: nn.Module, served: nn.Module) -> bool:
    """Whether the draft holds memory of the served model in tensors of its own, which stay behind where that gets other memory.
    SGLang slices Gemma's embedding, which each rank has whole, for a draft that divides its own."""
    own = {id(parameter) for parameter in served.parameters()}
    theirs = {_memory(parameter) for parameter in served.parameters()}
    return any(
        id(tensor) not in own and _memory(tensor) in theirs for module in draft.modules() for tensor in _held(module)
    )


def _held(module: nn.Module) -> list[torch.Tensor]:
    """The tensors of a module itself; a plain attribute may stand where a parameter was."""
    held = (*module._parameters.values(), *module._buffers.values(), *vars(module).values())
    return [tensor for tensor in held if isinstance(tensor, torch.Tensor)]


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _why_not(worker: Any) -> str | None:
    """Why SGLang would go on with the old weights of a draft that was updated; None if it would not."""
    from sglang.srt.runtime_context import get_parallel

    if f"{type(worker).__module__}.{type(worker).__qualname__}" not in _KNOWN:
        return f"what {type(worker).__name__} computes from the draft's weights is not known"
    layout = getattr(worker.draft_worker, "parallel_layout", None)  # before 0.5.23 it has one of its own
    if get_parallel().attn_dp_size > 1 and (layout is None or layout.tp_group is not None):
        return "with data-parallel attention SGLang builds it in other groups of ranks than the served model"
    if worker.draft_worker.hot_token_id is not None:
        return "with a map of tokens SGLang computes with a copy of some rows of a head"
    return None


@contextlib.contextmanager
def _as_built() -> Iterator[None]:
    """The settings with which SGLang builds a draft with experts."""
    from sglang.srt.layers.moe.utils import (
        draft_model_build_scope,
        speculative_moe_a2a_backend_context,
        speculative_moe_backend_context,
    )

    with speculative_moe_backend_context(), speculative_moe_a2a_backend_context(), draft_model_build_scope():
        yield
