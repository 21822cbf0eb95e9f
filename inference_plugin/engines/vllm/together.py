"""The served model and its draft as one model, for a group that sends both: the draft's names begin with `draft.`.

One plan, one transaction and one commit then replace both. Nothing is copied: the joint model's modules are those of the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from inference_plugin.engines.live_model import with_children
from inference_plugin.engines.skeleton import Skeleton
from inference_plugin.engines.vllm.model import VllmModel
from inference_plugin.wire.errors import EngineUnsupported
from inference_plugin.wire.groups import DRAFT_NAMES

__all__ = ["TogetherModel"]

_CHILD = DRAFT_NAMES.removesuffix(".")


class TogetherModel(VllmModel):
    """`install.contract.EngineModel` of a served model and its draft."""

    def __init__(self, served: VllmModel, draft: VllmModel) -> None:
        """Raises `EngineUnsupported` where one of the two can't be told from the other."""
        self._served, self._draft = served, draft
        if _CHILD in served.live._modules:
            raise EngineUnsupported(f"the served model has a module {_CHILD!r} of its own", phase="open")
        if (drafts_in := draft.model_config.dtype) != (serves_in := served.model_config.dtype):
            raise EngineUnsupported(
                f"the draft computes in {drafts_in}, the served model in {serves_in}",
                hint=f"update the draft as group {_CHILD!r}",
                phase="open",
            )
        skeleton = Skeleton(_joint(served.skeleton, draft.skeleton), {**served.constants, **_prefixed(draft.constants)})
        super().__init__(
            _joint(served.live, draft.live), served.device, served.engine_config, served.model_config, skeleton
        )
        drafts = {f"{_CHILD}.{name}" if name else _CHILD: paths for name, paths in draft.constructed.items()}
        self.constructed = {**served.constructed, **drafts}
        self.fixed_addresses, self.captures_graphs = served.fixed_addresses, served.captures_graphs
        self.ranks = served.ranks
        self.lock = _Both(served.lock, draft.lock)  # type: ignore[assignment]
        self.updated = served.updated
        self.updated.update(_prefixed(dict.fromkeys(draft.updated)))

    def checkpoint(self) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        return {**self._served.checkpoint(), **_prefixed(self._draft.checkpoint())}

    def load_weights(self, model: nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]) -> object:
        """On the two skeletons, whose modules are those of `model`."""
        own: dict[bool, list[tuple[str, torch.Tensor]]] = {False: [], True: []}
        for name, tensor in tensors:
            own[name.startswith(DRAFT_NAMES)].append((name.removeprefix(DRAFT_NAMES), tensor))
        loaded = self._served.load_weights(self._served.skeleton, iter(own[False]))
        self._draft.load_weights(self._draft.skeleton, iter(own[True]))
        return loaded

    def finishers(self) -> Mapping[str, Callable[[nn.Module], None]]:
        return {**self._served.finishers(), **_prefixed(self._draft.finishers())}

    def expert_places(self) -> str:
        return self._served.expert_places() + self._draft.expert_places()

    def unfinishable(self) -> str | None:
        return self._served.unfinishable() or self._draft.unfinishable()


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


def _prefixed(found: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{DRAFT_NAMES}{name}": value for name, value in found.items()}
