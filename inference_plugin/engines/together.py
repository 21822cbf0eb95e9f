"""The served model and its draft as one model, for a group that sends both: the draft's names begin with `draft.`.

One plan, one transaction and one commit then replace both. Nothing is copied: the joint model's modules are those of the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from inference_plugin.engines.live_model import LiveModel, with_children
from inference_plugin.wire.errors import EngineUnsupported
from inference_plugin.wire.groups import DRAFT_NAMES

__all__ = ["TogetherModel"]

_CHILD = DRAFT_NAMES.removesuffix(".")


class TogetherModel(LiveModel):
    """`install.contract.EngineModel` of a served model and its draft. Both are of one engine: it post-processes modules of either
    in the same way."""

    def __init__(self, served: LiveModel, draft: LiveModel) -> None:
        """Raises `EngineUnsupported` where one of the two can't be told from the other."""
        self._served, self._draft = served, draft
        if _CHILD in served.live._modules:
            raise EngineUnsupported(f"the served model has a module {_CHILD!r} of its own", phase="open")
        self.boundary, self.reads_finished = served.boundary, served.reads_finished
        self.runtime_state = served.runtime_state | draft.runtime_state
        self.derived_caches = served.derived_caches | draft.derived_caches
        self.cache_scales = served.cache_scales | draft.cache_scales
        self.placeholders = served.placeholders | draft.placeholders
        constants = {**served.constants, **_prefixed(draft.constants)}
        super().__init__(
            _joint(served.live, draft.live), served.device, _joint(served.skeleton, draft.skeleton), constants
        )
        drafts = {f"{_CHILD}.{name}" if name else _CHILD: paths for name, paths in draft.constructed.items()}
        self.constructed = {**served.constructed, **drafts}
        self.random_weights = served.random_weights or draft.random_weights
        self.fixed_addresses = served.fixed_addresses or draft.fixed_addresses
        self.captures_graphs = served.captures_graphs or draft.captures_graphs
        self.ranks = served.ranks
        self.lock = _Both(served.lock, draft.lock)  # type: ignore[assignment]

    def note_updated(self, keys: Iterable[str]) -> None:
        for key in keys:
            (self._draft if key.startswith(DRAFT_NAMES) else self._served).note_updated([_own(key)])

    def written_at(self, key: str) -> int:
        return (self._draft if key.startswith(DRAFT_NAMES) else self._served).written_at(_own(key))

    def checkpoint(self) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        return {**self._served.checkpoint(), **_prefixed(self._draft.checkpoint())}

    def load_weights(self, model: nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]) -> object:
        """On the two skeletons, whose modules are those of `model`."""
        own: dict[bool, list[tuple[str, torch.Tensor]]] = {False: [], True: []}
        for name, tensor in tensors:
            own[name.startswith(DRAFT_NAMES)].append((_own(name), tensor))
        loaded = self._served.load_weights(self._served.skeleton, iter(own[False]))
        self._draft.load_weights(self._draft.skeleton, iter(own[True]))
        return loaded

    def finishers(self) -> Mapping[str, Callable[[nn.Module], None]]:
        return {**self._served.finishers(), **_prefixed(self._draft.finishers())}

    def expert_places(self) -> str:
        return self._served.expert_places() + self._draft.expert_places()

    def derive_in_place(self) -> None:
        self._served.derive_in_place()
        self._draft.derive_in_place()

    def unfinishable(self) -> str | None:
        return self._served.unfinishable() or self._draft.unfinishable()

    def reads(self, module: nn.Module) -> tuple[str, ...]:
        return self._served.reads(module)

    def pads(self, module: nn.Module) -> bool:
        return self._served.pads(module)

    def read_rebuilt(
        self, module: nn.Module, parameter: str, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor | None:
        return self._served.read_rebuilt(module, parameter, shape, dtype)

    def computing(self) -> AbstractContextManager[None]:
        return self._served.computing()


class _Both:
    """Two locks as one, always taken in the same order."""

    def __init__(self, *locks: Any) -> None:
        self._locks = locks

    def __enter__(self) -> None:
        for lock in self._locks:
            lock.acquire()

    def __exit__(self, *_: object) -> None:
        for lock in reversed(self._locks):
            lock.release()


def _joint(served: nn.Module, draft: nn.Module) -> nn.Module:
    """The served model with its draft as one more child."""
    return with_children(served, {**served._modules, _CHILD: draft})


def _own(name: str) -> str:
    """The name in the model that it belongs to."""
    return name.removeprefix(DRAFT_NAMES)


def _prefixed(found: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{DRAFT_NAMES}{name}": value for name, value in found.items()}
