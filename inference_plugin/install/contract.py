"""What a group asks of whatever installs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from inference_plugin.wire.manifest import Box, Manifest
from inference_plugin.wire.messages import BoxDigest

__all__ = ["Brake", "InstallTerms", "Installer"]


@dataclass(frozen=True)
class InstallTerms:
    """What an installer answers to a manifest: the boxes it reads, and how it will install them."""

    needs: tuple[Box, ...]
    mechanism: Literal["plan", "loader"]
    install: Literal["copy", "standby"]
    why: str


Brake = Callable[[int], None]
"""Called between pieces of background work with the bytes just done; slows down, or raises to cancel."""


class Installer(Protocol):
    """Puts a checked segment into the live model of this worker. One per group; see `install.installer`."""

    def open(self, manifest: Manifest, policy: str, *, partial: bool) -> InstallTerms:
        """Agrees on a manifest, or raises `ManifestMismatch`. Never touches the live model."""

    def prepare(self, segment: torch.Tensor, brake: Brake) -> int:
        """Background half of an installation; returns the extra bytes it holds. Never touches the live model."""

    def install(self, segment: torch.Tensor) -> None:
        """Engine's thread, at a step boundary."""

    def undo(self, previous: torch.Tensor | None) -> None:
        """Engine's thread: back to what was served before `install`, complete or not. Raises if it can't be done."""

    def finish(self) -> None:
        """Engine's thread: the new version is confirmed on all ranks."""

    def discard(self) -> None:
        """Drops what `prepare` made."""

    def forget_segments(self) -> None:
        """Drops views of segments: the trainer that owned them is gone."""

    @property
    def claims(self) -> frozenset[str]:
        """The parameters that this installer writes: no two groups may share one."""

    @property
    def needs_previous(self) -> bool:
        """Whether `undo` will need the previous version's segment."""

    def read_back(self) -> Iterator[BoxDigest | tuple[str, str]]:
        """Engine's thread: digests of what the live parameters hold, or (parameter, why it can't be read)."""

    def close(self) -> None:
        """Frees everything but the live model."""
