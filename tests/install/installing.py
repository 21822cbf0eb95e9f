"""Giving an installer a segment, as its group does."""

from __future__ import annotations

import torch

from inference_plugin.install.installer import ModelInstaller
from inference_plugin.wire.manifest import Manifest
from inference_plugin.wire.tensors import box_view

__all__ = ["segment_of", "update"]


def segment_of(tensors: dict[str, torch.Tensor], manifest: Manifest) -> torch.Tensor:
    """A segment with these tensors, as trainer ranks write it."""
    segment = torch.zeros(manifest.layout.nbytes, dtype=torch.uint8)
    for i, spec in enumerate(manifest.tensors):
        box_view(segment, manifest, manifest.whole(i)).copy_(tensors[spec.name])
    return segment


def update(installer: ModelInstaller, manifest: Manifest, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """A whole update, confirmed; returns its segment."""
    segment = segment_of(tensors, manifest)
    installer.prepare(segment, lambda: None)
    installer.check_model()
    installer.install(segment)
    installer.finish()
    return segment
