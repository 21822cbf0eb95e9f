"""What a group asks of whatever installs it, and what an installer asks of the engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import nn

from inference_plugin.wire.manifest import Box, Manifest
from inference_plugin.wire.messages import BoxDigest

__all__ = ["AdapterPlace", "AdapterSlots", "Brake", "EngineModel", "InstallTerms", "Installer"]


@dataclass(frozen=True)
class InstallTerms:
    """What an installer answers to a manifest: the boxes it reads, and how it will install them."""

    needs: tuple[Box, ...]
    mechanism: Literal["plan", "loader"]
    install: Literal["copy", "standby"]
    why: str


Brake = Callable[[int], None]
"""Called between pieces of background work with the bytes just done; slows down, or raises to cancel."""


class EngineModel(Protocol):
    """What an engine file tells about its model; the only thing the installer knows of the engine."""

    live: nn.Module
    device: torch.device
    lock: threading.Lock
    """Held while the skeleton is in use."""

    @property
    def skeleton(self) -> nn.Module:
        """A second instance of the model's class on the meta device, as before `load_weights`."""

    def load_weights(self, model: nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]) -> object:
        """The engine's own loader on `model`. May be called on any thread, never on the live model."""

    def finishers(self) -> Mapping[str, Callable[[nn.Module], None]]:
        """The engine's post-processing after a load, by module name; called with a stand-in for that module."""

    def unfinishable(self) -> str | None:
        """Why the model's post-processing can't be repeated module by module; None if it can."""

    def pads(self, module: nn.Module) -> bool:
        """Whether the engine makes this module larger than the checkpoint has it (a padded vocabulary)."""

    def read_rebuilt(
        self, module: nn.Module, parameter: str, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor | None:
        """The plain parameter that a rebuilt live module computes with, read through its packed form; None if it can't."""

    def free_bytes(self) -> int:
        """Memory of the model's device that is free."""

    @property
    def fixed_addresses(self) -> bool:
        """Whether something (captured graphs, sleep mode) holds raw addresses of the live parameters."""

    def computing(self) -> AbstractContextManager[None]:
        """What must be set while the engine's post-processing runs (current configuration, no gradients)."""


@dataclass(frozen=True, slots=True)
class AdapterPlace:
    """A weight of the engine that adapters may change, as the checkpoint has it: (rows, columns)."""

    rows: int
    columns: int


class AdapterSlots(Protocol):
    """What an engine file tells about its LoRA slots. Tensors go by PEFT's names, modules by what stands before
    `.lora_A.weight` in them."""

    max_rank: int
    dtype: str
    """By torch's name."""

    def check(self, adapter: str) -> None:
        """Raises `EngineUnsupported` where no adapter of that name can be served."""

    def place(self, module: str) -> AdapterPlace | None:
        """The weight of a module; None for one that this rank doesn't have, or that takes no adapter here."""

    def held(self, adapter: str) -> object:
        """Engine's thread: what the adapter is now, for `put` to bring it back."""

    def put(self, adapter: str, what: object) -> None:
        """Engine's thread: from the next step on the adapter is this: tensors by their names, which are never written, or
        what `held` gave."""

    def read(self, adapter: str) -> Iterator[tuple[str, tuple[int, ...], torch.Tensor | str]]:
        """Engine's thread: what the slots hold, as a box of each tensor: name, offsets, values or why they can't be
        read."""


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
