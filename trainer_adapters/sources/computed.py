"""Weights that a module computes from other tensors at each use: torch's parametrizations, pruning, weight and spectral norm.

The module's parameters are then not what it computes with, and their names are not those of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch.nn.utils.parametrize import is_parametrized
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from inference_plugin.wire.errors import ManifestMismatch, first_few
from trainer_adapters.sources.streams import walk

__all__ = ["refuse_computed"]


def refuse_computed(module: torch.nn.Module, sent: Collection[str]) -> None:
    """Raises `ManifestMismatch` if one of the tensors `sent`, by the module's names, only serves to compute a weight."""
    computed = [weight for weight, sources in _computed(module) if any(name.startswith(sources) for name in sent)]
    if computed:
        raise ManifestMismatch(
            f"the model computes these weights from other tensors at each use: {first_few(computed)}",
            hint="make them plain parameters before (torch.nn.utils.parametrize.remove_parametrizations, prune.remove, "
            "remove_weight_norm, remove_spectral_norm), or send what a checkpoint would have, by ExportAdapter",
            side="trainer",
        )


def _computed(module: torch.nn.Module) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each such weight's name, and how the names of what it is computed from begin."""
    for prefix, part in walk(module):
        if is_parametrized(part):
            parametrizations = part.parametrizations
            assert isinstance(parametrizations, torch.nn.ModuleDict)
            for name in parametrizations:
                yield prefix + name, (f"{prefix}parametrizations.{name}.",)
        for hook in part._forward_pre_hooks.values():
            if isinstance(hook, WeightNorm | SpectralNorm):
                yield prefix + hook.name, (f"{prefix}{hook.name}_",)
            elif isinstance(hook, BasePruningMethod):
                yield prefix + hook._tensor_name, (f"{prefix}{hook._tensor_name}_",)
