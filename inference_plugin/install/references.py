"""Accounts for every tensor on a live module that is no registered parameter, or refuses the model.

Updates follow three kinds: views of a parameter in other objects, values that an engine computes from weights at first use, and
its caches of such values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Hashable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from inference_plugin.install.graph import (
    Boundary,
    Path,
    child_at,
    children_of,
    helpers_under,
    is_helper,
    modules_under,
    state_of,
    tensors_under,
    words,
)
from inference_plugin.install.late_values import NO_WEIGHTS, LateValues
from inference_plugin.install.plan import PlacementPlan
from inference_plugin.install.post_processing import PostProcessing
from inference_plugin.install.stand_in import ABSENT, frozen
from inference_plugin.install.standby import LiveTensor
from inference_plugin.install.storages import equal_bytes, storage_id
from inference_plugin.install.traced import numbers_under, plain_numbers
from inference_plugin.install.trials import Trial
from inference_plugin.wire.errors import EngineUnsupported, first_few

__all__ = ["LiveReferences"]


class _Reset(NamedTuple):
    """An attribute that is a parameter after a load, and that the engine replaces by its own copy at first use."""

    holder: dict[str, Any]
    name: str
    value: torch.Tensor


class LiveReferences:
    """`written`: the storages that updates write, by key.

    `plan`: that of a load which was also run for real on the skeleton since it was traced: numbers that differ after the two are
    made of the weights.

    `unexplained`: tensors that no update writes or derives, that the constructor didn't make, and that are no working memory.
    `apart`: parameters of modules that hang on the model and are not registered in it.
    """

    def __init__(
        self,
        post: PostProcessing,
        trials: Mapping[str, Trial],
        written: Collection[str],
        plan: PlacementPlan,
    ) -> None:
        self._post = post
        self._model = post.model
        held = plain_numbers(self._model.skeleton, self._model.boundary) if plan.numbers else ()
        self._kept = plan.kept | {place for place, numbers in held if plan.numbers.get(place) != numbers}
        """The attributes in which a load leaves numbers that it makes of a checkpoint."""
        self._elsewhere = plan.elsewhere
        self.views: list[LiveTensor] = []
        """Views of live storages that are no registered parameters."""
        self._resets: list[_Reset] = []
        self._lazy_numbers: list[tuple[dict[str, Any], str]] = []
        self._caches = [
            cache
            for module in post.live_modules.values()
            for name in self._model.derived_caches
            if isinstance(cache := vars(module).get(name), dict)
        ]
        self._working = self._model.runtime_state | self._model.derived_caches
        self._live = {key: tensor for key, tensor in post.storages.tensors.items() if tensor.numel()}
        self.unexplained: list[str] = []
        for name, module in post.live_modules.items():
            skeleton = post.skeleton_modules.get(name)
            if skeleton is None or (name and is_helper(module, self._model.boundary)):
                continue
            self.unexplained += self._look_at(name, module, skeleton, trials.get(name), written)
        self.apart = list(self._apart())
        replaced = [] if self._model.fixed_addresses else list(self._moved(trials))
        self._late = LateValues(post.live_modules, self._working, replaced, self._model.boundary)

    def look(self) -> None:
        """Any thread: looks for tensors that the engine has kept since the group was opened."""
        self._late.look()

    def check(self) -> None:
        """Engine's thread, between two steps: raises `EngineUnsupported` if tensors that `look` found are still there."""
        if late := self._late.confirmed():
            raise EngineUnsupported(
                f"since the group was opened the engine has kept tensors that an update might leave behind: {first_few(late)}",
                hint="report the model and these names, so that updates follow them; until then restart the engine to update it",
            )

    def reset(self) -> None:
        """Engine's thread: restores the attributes that the engine replaced at first use to what a load leaves there, and empties
        its caches of what it derived, so that the engine derives them again."""
        for cache in self._caches:
            cache.clear()
        for reset in self._resets:
            if reset.holder.get(reset.name) is not reset.value:
                reset.holder[reset.name] = reset.value
        for holder, name in self._lazy_numbers:
            if isinstance(holder.get(name), float):
                holder[name] = None
        self._model.derive_in_place()

    def _apart(self) -> Iterator[str]:
        known = {id(module) for module in self._post.live_modules.values()}
        registered = {id(held) for module in self._post.live_modules.values() for held in module._parameters.values()}
        for name, module in self._post.live_modules.items():
            if name and is_helper(module, self._model.boundary):
                continue
            for path, other in modules_under(module, self._model.boundary, self._model.placeholders):
                if id(other) in known or not self._model.runtime_state.isdisjoint(path):
                    continue
                known.add(id(other))
                for parameter, held in other.named_parameters():
                    if held.numel() and id(held) not in registered and self._post.storages.key_in_live(held) is None:
                        yield words(name, (*path, *parameter.split(".")))

    def _moved(self, trials: Mapping[str, Trial]) -> Iterator[Any]:
        for name, trial in trials.items():
            for path in trial.moved:
                with contextlib.suppress(LookupError, AttributeError):  # absent from the live module
                    yield child_at(self._post.live_modules[name], path)

    def _look_at(
        self, name: str, module: nn.Module, skeleton: nn.Module, trial: Trial | None, written: Collection[str]
    ) -> list[str]:
        found: list[str] = []
        cold = dict(tensors_under(skeleton, self._model.boundary))
        constructed = self._model.constructed.get(name, {})  # `cold` also has what a load has left there
        loaded = {path for path, was in constructed.items() if path in cold and self._is_loaded(cold[path], was)}
        explained = (*trial.moved, *trial.settled) if trial is not None else ()
        kept = {attribute for owner, attribute in self._kept if owner == name}
        for path, tensor in tensors_under(module, self._model.boundary):
            if not tensor.numel() or not self._working.isdisjoint(path):
                continue
            if path in loaded and not equal_bytes(tensor, cold[path]):
                if not any(path[: len(known)] == known for known in explained):
                    found.append(words(name, path))
            elif tensor.dtype in NO_WEIGHTS:
                continue
            elif (key := self._post.storages.key_in_live(tensor)) is not None:
                if not self._post.storages.is_registered(tensor):
                    holder = child_at(module, path[:-1])
                    table = _table(holder, path[-1], self._model.boundary)
                    self.views.append(LiveTensor(key, table, path[-1], tensor))  # type: ignore[arg-type]
            elif path in constructed:
                continue
            elif not any(path[: len(known)] == known for known in explained):
                found.append(words(name, path))
        found += [
            words(name, (attribute,))
            for attribute in kept
            if any(True for _ in numbers_under(module, attribute, self._model.boundary, set()))
        ]
        if trial is not None and trial.moved:
            found += self._watch_lazy_numbers(name, skeleton, module, trial)
        for path, tensor in cold.items():
            referred = self._post.storages.key_in_skeleton(tensor)
            if referred not in self._live or referred not in written or any(path[: len(k)] == k for k in explained):
                continue
            if (problem := self._follow(module, path, self._live[referred])) is not None:
                found.append(f"{words(name, path)} ({problem})")
        return found

    def _is_loaded(self, tensor: torch.Tensor, constructed: Any) -> bool:
        """Whether a load has replaced this tensor of the skeleton, or written to it, beside parameters and buffers."""
        is_other = frozen(tensor) != constructed or storage_id(tensor) in self._elsewhere
        return is_other and self._post.storages.key_in_skeleton(tensor) is None

    def _watch_lazy_numbers(self, name: str, skeleton: nn.Module, module: nn.Module, trial: Trial) -> list[str]:
        """Follows attributes of a module's helpers that are None after a load: an engine may keep values there that it computes
        from scales at first use. Returns the attributes that it has computed already and that captured graphs may hold."""
        found: list[str] = []
        for path, helper in helpers_under(skeleton, self._model.boundary):
            for attribute, value in state_of(helper).items():
                if value is not None or (*path, attribute) in trial.moved:
                    continue
                try:
                    holder = child_at(module, path)
                except (LookupError, AttributeError):
                    continue
                held = vars(holder).get(attribute, ABSENT) if hasattr(holder, "__dict__") else ABSENT
                if isinstance(held, float) and self._model.fixed_addresses:
                    found.append(f"{words(name, (*path, attribute))} (computed at first use)")
                elif held is None or isinstance(held, float):
                    self._lazy_numbers.append((vars(holder), attribute))
        return found

    def _follow(self, module: nn.Module, path: Path, parameter: torch.Tensor) -> str | None:
        """Follows an attribute that is a parameter after a load. Returns why an update can't keep it correct, or None."""
        try:
            holder, held = child_at(module, path[:-1]), child_at(module, path)
        except (LookupError, AttributeError):
            return None  # the engine holds it no longer
        if held is parameter or (isinstance(held, torch.Tensor) and self._post.storages.key_in_live(held) is None):
            if not isinstance(holder, (list, tuple)) and hasattr(holder, "__dict__") and path[-1] in vars(holder):
                if held is not parameter and self._model.fixed_addresses:
                    return "the engine's own copy of a parameter, at an address that must stay"
                self._resets.append(_Reset(vars(holder), str(path[-1]), parameter))
            elif held is not parameter:
                return "the engine's own copy of a parameter"
        return None


def _table(holder: Any, name: Hashable, boundary: Boundary) -> Any:
    """The dict in which `holder` keeps the value of this name; a copy of what it holds if that is in no dict."""
    own = holder if isinstance(holder, dict) else getattr(holder, "__dict__", {})
    return own if name in own else dict(children_of(holder, boundary))
