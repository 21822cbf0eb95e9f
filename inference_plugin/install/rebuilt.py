"""Modules that the engine makes anew after a load (packs, quantises): built on a stand-in, then moved into the live module."""

from __future__ import annotations

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

__all__ = ["RebuiltModule", "operands", "rebuild"]


@dataclass
class RebuiltModule:
    """The parts of a rebuilt module that differ from the live one: attributes by path, tensors by name."""

    module: str
    attributes: dict[Path, Any] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    def move_into(self, live: nn.Module, *, in_place: bool) -> RebuiltModule:
        """Engine's thread: puts these parts into the live module; returns the parts that it had.

        `in_place`: addresses of parameters, and of tensors in attributes, must stay. Raises `CommitFailed` where a shape or dtype
        makes that impossible.
        """
        old = RebuiltModule(self.module)
        for path, value in self.attributes.items():
            *way, name = path
            node = child_at(live, tuple(way))
            present = getattr(node, str(name), None)
            if in_place and isinstance(present, torch.Tensor) and isinstance(value, torch.Tensor):
                _check_form(words(self.module, path), present, value)
                old.attributes[path] = _overwrite(present, value)
            else:
                old.attributes[path] = _set(node, str(name), value)
        for name, tensor in self.tensors.items():
            holder = live._parameters if name in live._parameters else live._buffers
            held = holder[name]
            assert held is not None
            # A buffer is often referred to by others, and small: its address stays.
            alike = held.shape == tensor.shape and held.dtype == tensor.dtype
            if in_place or (holder is live._buffers and alike):
                _check_form(f"{self.module}.{name}", held, tensor)
                old.tensors[name] = _overwrite(held, tensor)
            else:
                old.tensors[name] = held.data
                held.data = tensor
        return old


def operands(post: PostProcessing, module: str, trial: Trial, updated: Mapping[str, torch.Tensor]) -> list[Operand]:
    """This rank's part of what post-processing of `module` reduces over the ranks, for the storages of an update, by key."""
    noted = Noted(limit=trial.reductions)
    try:
        post.finish(module, post.stand_in(module, post.weights(updated), noted), noted)
    except AllNoted:
        return noted.operands
    raise EngineUnsupported(
        f"post-processing of {module} did not talk to the other ranks with these weights, and did in the proof",
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

    Storages of the keys in `plain` travel by themselves. `answers`: of what it reduces over the ranks. Raises
    `EngineUnsupported` where post-processing did with these weights what it did not do in its trial.
    """
    stand_in = post.stand_in(module, post.weights(updated), answers)
    post.finish(module, stand_in, answers)
    live = post.live_modules[module]
    rebuilt = RebuiltModule(module)
    for path, value in stand_in.changes().items():
        if path in trial.settled and post.settled(module, path, value, stand_in):
            continue
        if (path not in trial.moved and path not in trial.settled) or stand_in.captures_itself(value):
            raise EngineUnsupported(
                f"post-processing set {words(module, path)} with these weights, and not in the proof", phase="seal"
            )
        rebuilt.attributes[path] = stand_in.for_live(value, live)
    buffers = stand_in.written_buffers()
    for name, tensor in {**stand_in.module._parameters, **buffers}.items():
        travels = name not in buffers and post.storages.key_of.get(f"{module}.{name}") in plain
        if tensor is not None and not travels and name in {**live._parameters, **live._buffers}:
            rebuilt.tensors[name] = tensor.detach()
    return rebuilt


def _check_form(name: str, held: torch.Tensor, tensor: torch.Tensor) -> None:
    """Raises `CommitFailed` where `tensor` can't be written over what is held."""
    if held.shape != tensor.shape or held.dtype != tensor.dtype:
        raise CommitFailed(
            f"{name} became {tuple(tensor.shape)} {tensor.dtype}, and its address must stay", phase="commit"
        )


def _overwrite(held: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Writes over a tensor in its place; returns what it held."""
    before = held.detach().clone()
    held.data.copy_(tensor)
    return before


def _set(node: Any, name: str, value: Any) -> Any:
    """Sets or removes an attribute behind the back of `__setattr__`; returns what was there."""
    table = node._modules if isinstance(node, nn.Module) and name in node._modules else vars(node)
    old = table.pop(name, ABSENT)
    if value is not ABSENT:
        (node._modules if isinstance(value, nn.Module) and isinstance(node, nn.Module) else vars(node))[name] = value
    return old
