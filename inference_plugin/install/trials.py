"""Finds out what post-processing does to each kind of module, on stand-ins with trial weights.

Everything that post-processing sets, in the module or in an object behind it, either moves at each update, or equals what the
live module holds for any weights. Anything else refuses the model.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from inference_plugin.install.collectives import Noted
from inference_plugin.install.graph import PLAIN, Path, child_at, equivalent, is_helper, words
from inference_plugin.install.inner_tensors import inner_tensors
from inference_plugin.install.post_processing import PostProcessing
from inference_plugin.install.stand_in import ABSENT, StandIn
from inference_plugin.install.storages import equal_bytes, storage_id
from inference_plugin.install.trial_load import check_trial_fits
from inference_plugin.wire.errors import EngineUnsupported, first_few

__all__ = ["Trial", "finished_alike", "kind_of", "needs_no_checkpoint", "run_trials"]

CHOICES = (bool, enum.Enum, torch.dtype, type)
"""Types of values by which post-processing may choose what it does, beside texts without the numbers in them: the names of layers
differ in these. Of others only the type counts: numbers often differ from layer to layer."""


@dataclass(frozen=True)
class Trial:
    """The effect of post-processing on one kind of module."""

    replaced: frozenset[str]
    """Parameters that it transforms."""
    moved: frozenset[Path]
    """Attributes that depend on the weights."""
    settled: frozenset[Path]
    """Attributes that it sets to what the live module holds, for any weights."""
    buffers: frozenset[str]
    """Buffers that it writes with values that depend on the weights."""
    added: frozenset[str]
    """Parameters that it adds, with memory of their own or that of a parameter that it removes."""
    reductions: int = 0
    """How often it reduces a tensor over the ranks."""
    inner: Mapping[Path, frozenset[Path]] = field(default_factory=dict)
    """By attribute that is an object: the tensors inside it, which are overwritten where addresses must stay. Objects that can't
    be updated so are missing."""
    constant: frozenset[Path] = frozenset()
    """Objects in `inner` that do not depend on the weights: the live one stays wherever it differs, with what the engine has put
    into it since."""
    decides: bool = False
    """Whether a settled attribute is a number: weights other than those of the trials may decide otherwise."""
    writes: frozenset[str] = frozenset()
    """All buffers that it writes."""

    @property
    def rebuilds(self) -> bool:
        return bool(self.replaced or self.moved or self.buffers or self.added or self.decides)


def run_trials(post: PostProcessing, free_bytes: float) -> dict[str, Trial]:
    """The trial of every module that the engine finishes, by name; modules of one kind share their trial. Raises
    `EngineUnsupported`, also for a module of which two stand-ins take more than `free_bytes`, before it takes anything."""
    kinds: dict[Any, Trial] = {}
    trials = {}
    for name in post.finishers:
        kind = kind_of(post, name)
        if kind not in kinds:
            # Two stand-ins, and a copy of the first one's weights to compare with.
            check_trial_fits(3 * post.storage_bytes(name), free_bytes, f"the engine's post-processing of {name}")
            kinds[kind] = _try(post, name)
        trials[name] = kinds[kind]
    return trials


def kind_of(post: PostProcessing, module: str) -> Any:
    """A value that is equal for modules that are post-processed in the same way."""
    skeleton, boundary = post.skeleton_modules[module], post.model.boundary
    live = post.live_modules.get(module) or skeleton
    registered = {**skeleton._parameters, **skeleton._buffers}
    helpers = tuple(
        (name, type(value), tuple((n, _choice(v)) for n, v in sorted(vars(value).items())))
        for name, value in sorted({**vars(skeleton), **skeleton._modules}.items())
        if value is not None and is_helper(value, boundary) and hasattr(value, "__dict__")
    )
    return (
        type(skeleton),
        helpers,
        tuple((name, _choice(value)) for name, value in sorted(vars(skeleton).items())),
        tuple((n, tuple(t.shape), t.dtype) for n, t in registered.items() if t is not None),
        tuple(sorted(n for n, p in live._parameters.items() if p is not None and p.numel() == 0)),
        tuple(kind_of(post, read) for read in post.read_by(module).values()),
    )


_NUMBERS_IN_NAMES = re.compile(r"(?<=\.)\d+(?=\.|$)")


def _choice(value: Any) -> Any:
    if isinstance(value, str) and not isinstance(value, enum.Enum):
        return _NUMBERS_IN_NAMES.sub("#", value)
    return value if isinstance(value, CHOICES) else type(value)


def _try(post: PostProcessing, module: str) -> Trial:
    """Finishes two stand-ins with different weights. What both and the live module hold does not depend on the weights."""
    asked = Noted(), Noted()
    one, other = (post.stand_in(module, post.noise(seed), asked[seed - 1]) for seed in (1, 2))
    given = {name: held for name, held in one.parameters.items() if held is not None}
    before = {name: held.detach().clone() for name, held in given.items()}
    post.finish(module, one, asked[0])
    post.finish(module, other, asked[1])
    _check_reductions(post, module, *asked)
    replaced = {
        name
        for name, held in before.items()
        if (now := one.module._parameters.get(name)) is not given[name] or not equal_bytes(now, held)
    }
    moved, settled, inner, constant = _sort_attributes(post, module, one, other)
    live = post.live_modules[module]
    buffers = set()
    for name, made in one.written_buffers().items():
        if equal_bytes(other.module._buffers.get(name), made) and equal_bytes(live._buffers.get(name), made):
            settled.add((name,))
        else:
            buffers.add(name)
    added, reductions = _added_by(post, module, one), len(asked[0].operands)
    sorted_out = frozenset(replaced), frozenset(moved), frozenset(settled), frozenset(buffers)
    decides = any(path in settled and isinstance(value, (int, float)) for path, value in one.changes().items())
    writes = frozenset(one.written_buffers())
    return Trial(*sorted_out, added, reductions, inner, frozenset(constant), decides, writes)


def _added_by(post: PostProcessing, module: str, finished: StandIn) -> frozenset[str]:
    """The parameters that post-processing added, with memory of their own or that of a parameter that it removed. Raises
    `EngineUnsupported` if the live module holds other parameters than the finished stand-in, or other views of its weights."""
    held = {name for name, p in post.live_modules[module]._parameters.items() if p is not None and p.numel()}
    made = {name: p for name, p in finished.module._parameters.items() if p is not None and p.numel()}
    if wrong := sorted(held ^ made.keys()):
        raise EngineUnsupported(
            f"{module} of the live model differs from what the engine's post-processing makes: {first_few(wrong)}",
            hint="if the engine started with dummy weights, start it from its checkpoint: its loader may make what it lacks",
            phase="open",
        )
    added = {name for name in made if finished.parameters.get(name) is None}
    regions = {name: region for name in added if (region := finished.region(made[name])) is not None}
    # A view of a parameter that the live module lacks is that parameter, renamed: it is rebuilt with the module.
    views = {name for name, region in regions.items() if region.tensor in post.storages.tensors}
    if wrong := [name for name in sorted(views) if not post.settled(module, (name,), made[name], finished)]:
        raise EngineUnsupported(
            f"{module} of the live model is not the view of its weights that the engine's post-processing makes: "
            f"{first_few(wrong)}",
            phase="open",
        )
    return frozenset(added - views)


def _check_reductions(post: PostProcessing, module: str, one: Noted, other: Noted) -> None:
    """Raises `EngineUnsupported` if the weights or earlier answers decide what a module reduces over the ranks."""
    if len(one.operands) != len(other.operands):
        raise EngineUnsupported(
            f"post-processing of {module} reduces over the ranks for some weights only", phase="open"
        )
    if len(one.operands) > 1:
        answered_otherwise = Noted(factor=2)
        post.finish(module, post.stand_in(module, post.noise(1), answered_otherwise), answered_otherwise)
        if answered_otherwise.operands != one.operands:
            raise EngineUnsupported(
                f"post-processing of {module} reduces values over the ranks that depend on earlier answers",
                phase="open",
            )


def _sort_attributes(
    post: PostProcessing, module: str, one: StandIn, other: StandIn
) -> tuple[set[Path], set[Path], dict[Path, frozenset[Path]], set[Path]]:
    """Sorts the attributes that post-processing set on two finished stand-ins into those to move and those that are settled. With
    `Trial.inner` and `Trial.constant`."""
    changes, again = one.changes(), other.changes()
    if apart := sorted(map(str, changes.keys() ^ again.keys())):
        raise EngineUnsupported(
            f"post-processing of {module} sets {first_few(apart)} for some weights only", phase="open"
        )
    moved: set[Path] = set()
    settled: set[Path] = set()
    inner: dict[Path, frozenset[Path]] = {}
    constant: set[Path] = set()
    for path, value in changes.items():
        if one.captures_itself(value):
            raise EngineUnsupported(f"{words(module, path)} holds the module that it belongs to", phase="open")
        alike = equivalent(value, again[path], _same_in(one, other), post.model.boundary)
        is_object = value is not ABSENT and not isinstance(value, (torch.Tensor, *PLAIN))
        if is_object and (found := _inner_tensors(post, module, path, value, again[path], one)) is not None:
            inner[path] = found
            constant |= {path} if alike else set()
        if path in constant or (alike and post.settled(module, path, value, one)):
            settled.add(path)
        else:
            moved.add(path)
            _check_movable(module, path, value, one, post.live_modules[module])
            # A number is compared with each update's (`rebuilt`).
            stays = isinstance(value, (torch.Tensor, int, float)) or (path in inner if is_object else alike)
            if post.model.captures_graphs and not stays:
                raise EngineUnsupported(
                    f"captured graphs or compiled code hold {words(module, path)}, which depends on the weights in more than "
                    "tensors that an update can overwrite",
                    hint="start the engine eagerly, or leave what it is made of out of the group (partial=True)",
                    phase="open",
                )
    return moved, settled, inner, constant


def _inner_tensors(
    post: PostProcessing, module: str, path: Path, value: Any, again: Any, one: StandIn
) -> frozenset[Path] | None:
    """The tensors inside an object that two finished stand-ins hold at `path`; see `inner_tensors`."""

    def is_placed(made: torch.Tensor, held: Any) -> bool | None:
        if (region := one.region(made)) is None:
            return None
        own = post.storages.tensors.get(region.tensor)
        return isinstance(held, torch.Tensor) and own is not None and storage_id(held) == storage_id(own)

    try:
        live = child_at(post.live_modules[module], path)
    except (LookupError, AttributeError):
        return None
    return inner_tensors(value, again, live, is_placed, post.model.runtime_state, post.model.boundary)


def _check_movable(module: str, path: Path, value: Any, stand_in: StandIn, live: nn.Module) -> None:
    """Raises `EngineUnsupported` if `value` can't be moved to `path` of the live module."""
    try:
        stand_in.for_live(value, live)
        node = child_at(live, path[:-1])
    except (LookupError, AttributeError) as error:
        raise EngineUnsupported(f"the live model has no {words(module, path)}: {error}", phase="open") from None
    if value is not ABSENT and not hasattr(node, "__dict__"):
        raise EngineUnsupported(f"{words(module, path)} can't be set from outside", phase="open")
    if isinstance(value, torch.Tensor) and value.is_meta:
        raise EngineUnsupported(f"{words(module, path)} is derived from values that no checkpoint holds", phase="open")


def needs_no_checkpoint(post: PostProcessing, module: str, name: str) -> bool:
    """Whether the engine's parameter `name` of `module` is right although no checkpoint tensor fills it: post-processing writes
    over whatever it holds; or the live module holds what post-processing derives from the constructor's value, so that the
    engine's own checkpoint did not fill it either.

    Never so for one that post-processing leaves as it is: a checkpoint may hold the constructor's value as well.
    """
    key = post.storages.key_of.get(f"{module}.{name}", "")
    if module not in post.finishers or key not in post.model.constants:
        return False
    constructed = post.noise(1)
    value_then = constructed(key)
    value_else = (value_then.double().abs() + 1).to(value_then.dtype)
    if bool((value_then.double() == value_else.double()).any()):
        return False  # so large that the trial is none

    def otherwise(asked: str) -> torch.Tensor:
        return value_else if asked == key else constructed(asked)

    built, other = post.stand_in(module, constructed, Noted()), post.stand_in(module, otherwise, Noted())
    post.finish(module, built, Noted())
    try:
        post.finish(module, other, Noted())
        is_told = True
    except Exception:  # noqa: BLE001 -- a value that the engine does not take: everything may depend on it
        is_told = False
    changes = other.changes()
    for path, value in built.changes().items():
        alike = is_told and equivalent(value, changes.get(path, ABSENT), _same_in(built, other), post.model.boundary)
        if not alike and not post.settled(module, path, value, built):
            return False
    live = post.live_modules[module]
    for made, there, held in (
        (built.module._parameters, other.module._parameters, live._parameters),
        (built.module._buffers, other.module._buffers, live._buffers),
    ):
        for own, tensor in made.items():
            if tensor is None or own == name or (is_told and equal_bytes(there.get(own), tensor)):
                continue
            if not equal_bytes(held.get(own), tensor):
                return False
    left = built.module._parameters.get(name)
    if left is None or (is_told and equal_bytes(other.module._parameters.get(name), left)):
        return True
    return not equal_bytes(left, post.model.constants[key]) and equal_bytes(live._parameters.get(name), left)


def finished_alike(post: PostProcessing, one: StandIn, other: StandIn) -> bool:
    """Whether post-processing has set the same on two stand-ins, beside parameters and buffers."""
    changes, again = one.changes(), other.changes()
    same = _same_in(one, other)
    return changes.keys() == again.keys() and all(
        equivalent(value, again[path], same, post.model.boundary) for path, value in changes.items()
    )


def _same_in(one: StandIn, other: StandIn) -> Callable[[torch.Tensor, torch.Tensor], bool]:
    """A test whether tensors of two stand-ins are the same part of the same storage, or have equal bytes."""

    def same(a: torch.Tensor, b: torch.Tensor) -> bool:
        where = one.region(a)
        return where == other.region(b) if where is not None else equal_bytes(a, b)

    return same
