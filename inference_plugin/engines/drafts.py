"""The draft model of speculative decoding, as far as it is alike on all engines: a model of its own beside the served one.

An engine may put parts of the served model in the place of the draft's: the embedding, the head. They belong to the served
model. Updates of the draft leave them alone, and refuse a tensor that would go there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from dataclasses import dataclass
from typing import TypeVar

from torch import nn

from inference_plugin.engines.live_model import LiveModel, with_children
from inference_plugin.engines.skeleton import Skeleton
from inference_plugin.wire.errors import EngineUnsupported

__all__ = ["NoDraft", "skeleton_without", "updatable", "without_modules"]

Draft = TypeVar("Draft", bound=LiveModel)


@dataclass(frozen=True)
class NoDraft:
    """A draft model that cannot be updated, and why."""

    why: str

    @property
    def told(self) -> str:
        return f"the draft model keeps its old weights: {self.why}"


def updatable(draft: Draft | NoDraft, ranks: int) -> Draft:
    """The draft, of a replica of `ranks` ranks. Raises `EngineUnsupported` where it can't be updated."""
    if isinstance(draft, NoDraft):
        hint = "restart the engine with the new draft, or keep the old one"
        raise EngineUnsupported(draft.why, hint=hint, phase="open")
    draft.ranks = ranks
    return draft


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
