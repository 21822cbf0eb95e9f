"""The draft model of speculative decoding, as far as it is alike on all engines: a model of its own beside the served one.

An engine may put parts of the served model in the place of the draft's: the embedding, the head. They belong to the served
model. Updates of the draft leave them alone, and refuse a tensor that would go there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from dataclasses import dataclass

from torch import nn

from inference_plugin.engines.live_model import LiveModel, with_children
from inference_plugin.engines.skeleton import Skeleton
from inference_plugin.engines.together import TogetherModel
from inference_plugin.wire.errors import EngineUnsupported
from inference_plugin.wire.groups import DRAFT, DRAFT_NAMES

__all__ = ["DraftModel", "HasDraft", "NoDraft", "skeleton_without", "without_modules"]


class DraftModel(LiveModel):
    """`install.contract.EngineModel` of the draft model, as far as it is alike on all engines."""

    prefix = DRAFT_NAMES
    told = f"the draft model is not part of this group: group {DRAFT!r} updates it, or names that begin with {DRAFT_NAMES!r}"


@dataclass(frozen=True)
class NoDraft:
    """A draft model that cannot be updated, and why."""

    why: str

    @property
    def told(self) -> str:
        return f"the draft model keeps its old weights: {self.why}"


class HasDraft(LiveModel):
    """The served model of an engine that may decode speculatively, as far as it is alike on all engines."""

    draft: DraftModel | NoDraft | None = None
    """None where the engine drafts without weights, or not at all."""
    _together: TogetherModel | None = None

    def note_draft(self, draft: DraftModel | NoDraft | None) -> None:
        """The engine has this draft model beside the served one."""
        self.draft = draft
        if draft is not None:
            self.leaves_out = draft.told

    def and_draft(self) -> list[LiveModel]:
        return [self, self.draft] if isinstance(self.draft, DraftModel) else [self]

    def draft_model(self) -> LiveModel:
        """The draft. Raises `EngineUnsupported` where there is none, or it can't be updated."""
        if self.draft is None:
            return super().draft_model()
        if isinstance(self.draft, NoDraft):
            hint = "restart the engine with the new draft, or keep the old one"
            raise EngineUnsupported(self.draft.why, hint=hint, phase="open")
        self.draft.ranks = self.ranks
        return self.draft

    def for_names(self, names: Collection[str]) -> LiveModel:
        """With the draft, if the group sends tensors of it too."""
        if self.draft is None or not any(name.startswith(DRAFT_NAMES) for name in names):
            return self
        draft = self.draft_model()
        if (why := self.why_apart()) is not None:
            raise EngineUnsupported(why, hint=f"update the draft as group {DRAFT!r}", phase="open")
        if self._together is None:
            self._together = TogetherModel(self, draft)
        return self._together

    def why_apart(self) -> str | None:
        """Why one commit can't take the draft together with the served model; None if it can."""
        return None


def skeleton_without(skeleton: Skeleton, names: Collection[str]) -> Skeleton:
    """The draft's skeleton, from which the modules that are the served model's are removed."""
    for name in names:
        with contextlib.suppress(AttributeError):  # inside another one that is gone
            holder, _, own = name.rpartition(".")
            delattr(skeleton.model.get_submodule(holder), own)
    constants = {
        name: value
        for name, value in skeleton.constants.items()
        if not any(name.startswith(f"{module}.") for module in names)
    }
    return skeleton._replace(constants=constants)


def without_modules(module: nn.Module, names: Collection[str], at: str = "") -> nn.Module:
    """The live draft without these submodules. Its other modules keep their parameters; those above what is left out are
    views."""
    children: dict[str, nn.Module | None] = {}
    for own, child in module._modules.items():
        name = f"{at}{own}"
        if name not in names:
            children[own] = child if child is None else without_modules(child, names, f"{name}.")
    return with_children(module, children)
