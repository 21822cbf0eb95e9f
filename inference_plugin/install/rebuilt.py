"""Rebuilds modules that the engine transforms after a load (packs, quantises): on a stand-in, then moved into the live module."""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from inference_plugin.install.collectives import AllNoted, Answers, Noted, Operand
from inference_plugin.install.graph import Path, child_at, words
from inference_plugin.install.post_processing import PostProcessing
from inference_plugin.install.stand_in import ABSENT
from inference_plugin.install.trials import Trial
from inference_plugin.wire.errors import CommitFailed, EngineUnsupported

__all__ = ["RebuiltModule", "before_writing", "operands", "rebuild"]


@dataclass
class RebuiltModule:
    """The parts of a rebuilt module that differ from the live one: attributes by path, tensors by name.

    `inner`, `constant`: as in `Trial`. `values`: live tensors, each with the values that it is to get back. `copied`: the tensors
    are copies of those that the attributes were made from.
    """

    module: str
    attributes: dict[Path, Any] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    inner: Mapping[Path, frozenset[Path]] = field(default_factory=dict)
    constant: frozenset[Path] = frozenset()
    values: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    copied: bool = False

    def move_into(self, live: nn.Module, *, in_place: bool) -> RebuiltModule:
        """Engine's thread: puts these parts into the live module; returns the replaced parts.

        `in_place`: addresses of parameters, and of tensors in attributes, must stay; so an object with an entry in `inner` stays,
        and the tensors inside it are overwritten. Other objects are replaced all the same, and may point to the tensors that they
        were made from (oneDNN's matrix products do, to scales): those tensors live as long as the objects, even if only their
        values were written into the live module. Raises `CommitFailed`, and nothing has changed, if a shape or dtype makes that
        impossible, or for want of memory.
        """
        old = RebuiltModule(self.module, inner=self.inner, constant=self.constant, copied=in_place)
        replaced: dict[Path, Any] = {}
        moved: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        written = list(self.values)
        for path, value in self.attributes.items():
            present = getattr(child_at(live, path[:-1]), str(path[-1]), None)
            if in_place and isinstance(present, torch.Tensor) and isinstance(value, torch.Tensor):
                written.append((present, _fitting(words(self.module, path), present, value)))
            elif path in self.inner and (in_place or path in self.constant):
                for inside in self.inner[path]:
                    held, made = child_at(present, inside), child_at(value, inside)
                    written.append((held, _fitting(words(self.module, (*path, *inside)), held, made)))
            else:
                replaced[path] = value
        for name, tensor in self.tensors.items():
            holder = live._parameters if name in live._parameters else live._buffers
            parameter = holder[name]
            assert parameter is not None
            # Other objects often refer to a buffer, and buffers are small: write in place, so that the address stays.
            alike = parameter.shape == tensor.shape and parameter.dtype == tensor.dtype
            if in_place or (holder is live._buffers and alike):
                written.append((parameter, _fitting(f"{self.module}.{name}", parameter, tensor)))
            else:
                moved.append((name, parameter, tensor))
        # A tensor that several objects hold is written once.
        once = list({id(held): (held, value) for held, value in reversed(written)}.values())
        old.values = [(held, before_writing(held.detach())) for held, _ in once]
        for path, value in replaced.items():
            old.attributes[path] = _set(child_at(live, path[:-1]), str(path[-1]), value)
        for name, parameter, tensor in moved:
            old.tensors[name], parameter.data = parameter.data, tensor
        for held, value in once:
            _distinct(held).copy_(_distinct(value, like=held))
        if written and not self.copied:
            _outlive(list(replaced.values()), [value for _, value in written])
        return old


def before_writing(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a live tensor that is about to be overwritten. Raises `CommitFailed` where there is no memory for it."""
    try:
        return tensor.clone()
    except RuntimeError as error:
        raise CommitFailed(f"no memory for the values that were there: {error}", phase="commit") from error


def operands(
    post: PostProcessing, module: str, trial: Trial, updated: Mapping[str, torch.Tensor], plain: Collection[str]
) -> list[Operand]:
    """This rank's operands in the reductions over the ranks by post-processing of `module`. `updated`, `plain`: as for
    `rebuild`."""
    noted = Noted(limit=trial.reductions)
    try:
        post.finish(module, post.stand_in(module, post.weights(updated, plain), noted), noted)
    except AllNoted:
        return noted.operands
    raise EngineUnsupported(
        f"post-processing of {module} reduces nothing over the ranks with these weights, but did so with trial weights",
        phase="seal",
    )


def rebuild(
    post: PostProcessing,
    module: str,
    trial: Trial,
    updated: Mapping[str, torch.Tensor],
    plain: Collection[str],
    answers: Answers | None = None,
) -> RebuiltModule:
    """Runs the engine's post-processing on a stand-in for `module` over the storages of an update, by key.

    The result leaves out parameters in the storages `plain`, which are installed by themselves. `answers`: for what
    post-processing reduces over the ranks. Raises `EngineUnsupported` if post-processing sets something that it did not set in
    its trial.
    """
    stand_in = post.stand_in(module, post.weights(updated, plain), answers)
    post.finish(module, stand_in, answers)
    live = post.live_modules[module]
    rebuilt = RebuiltModule(module, inner=trial.inner, constant=trial.constant)
    for path, value in stand_in.changes().items():
        if path in trial.settled and post.settled(module, path, value, stand_in):
            continue
        if (path not in trial.moved and path not in trial.settled) or stand_in.captures_itself(value):
            raise EngineUnsupported(
                f"post-processing set {words(module, path)} with these weights, but not with trial weights",
                phase="seal",
            )
        _check_not_captured(post, module, path, value)
        rebuilt.attributes[path] = stand_in.for_live(value, live)
    buffers = stand_in.written_buffers()
    for name, tensor in {**stand_in.module._parameters, **buffers}.items():
        _check_marks(f"{module}.{name}", tensor, live._parameters.get(name))
        travels = name not in buffers and post.storages.key_of.get(f"{module}.{name}") in plain
        if tensor is not None and not travels and name in {**live._parameters, **live._buffers}:
            rebuilt.tensors[name] = tensor.detach()
    return rebuilt


def _check_not_captured(post: PostProcessing, module: str, path: Path, value: Any) -> None:
    """Raises `EngineUnsupported` if `value` is another number than the engine has, and captured graphs may hold that."""
    if not isinstance(value, (int, float)) or not post.model.captures_graphs:
        return
    held = child_at(post.live_modules[module], path)
    if value != held:
        raise EngineUnsupported(
            f"with these weights post-processing makes {words(module, path)} {value}, and captured graphs go on with {held}",
            hint="keep such scales as they were when the engine started, or start it without captured graphs",
            phase="seal",
        )


def _check_marks(name: str, made: torch.Tensor | None, held: torch.Tensor | None) -> None:
    """Raises `EngineUnsupported` if post-processing marks a parameter otherwise than the live one is marked, by a number or a
    text in an attribute of the tensor (SGLang: whether all scales are powers of two). The engine chooses kernels by it."""
    for attribute, mark in vars(made).items() if made is not None and held is not None else ():
        if isinstance(mark, (int, float, str)) and vars(held).get(attribute, mark) != mark:
            raise EngineUnsupported(
                f"with these weights post-processing makes {name}.{attribute} {mark!r}, and the engine runs with "
                f"{vars(held)[attribute]!r}",
                hint="send weights that are quantised as those with which the engine was started",
                phase="seal",
            )


def _fitting(name: str, held: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, if it can be written over `held`; else raises `CommitFailed`."""
    if held.shape != tensor.shape or held.dtype != tensor.dtype:
        raise CommitFailed(
            f"{name} became {tuple(tensor.shape)} {tensor.dtype}, which doesn't fit, and its address must stay",
            phase="commit",
        )
    return tensor


def _distinct(tensor: torch.Tensor, like: torch.Tensor | None = None) -> torch.Tensor:
    """`tensor` without the repeated elements of `like`, by default of itself: torch writes no expanded tensor."""
    strides = (tensor if like is None else like).stride()
    return tensor.data[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in strides)]


_made_from: dict[int, list[torch.Tensor]] = {}
"""By the `id` of an object that lives: the tensors that it may point to."""


def _outlive(value: Any, tensors: list[torch.Tensor]) -> None:
    """Keeps `tensors` alive until the objects in `value` are gone or get other tensors: an object that outlives all updates keeps
    one set."""
    if isinstance(value, (list, tuple)):
        for each in value:
            _outlive(each, tensors)
    elif isinstance(value, dict):
        _outlive(list(value.values()), tensors)
    elif not isinstance(value, type) and (not inspect.isroutine(value) or _is_made(value)):
        with contextlib.suppress(TypeError):  # a number or a text, say, which points to nothing
            if id(value) not in _made_from:
                weakref.finalize(value, _made_from.pop, id(value), None).atexit = False
            _made_from[id(value)] = tensors


def _is_made(routine: Any) -> bool:
    """Whether a function captures something, or a method is of an object. Others were there before."""
    return bool(getattr(routine, "__closure__", None)) or inspect.ismethod(routine)


def _set(node: Any, name: str, value: Any) -> Any:
    """Sets or removes an attribute without calling `__setattr__`; returns the old value."""
    table = node._modules if isinstance(node, nn.Module) and name in node._modules else vars(node)
    old = table.pop(name, ABSENT)
    if value is not ABSENT:
        (node._modules if isinstance(value, nn.Module) and isinstance(node, nn.Module) else vars(node))[name] = value
    return old
