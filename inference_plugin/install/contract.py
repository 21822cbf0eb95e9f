"""The contracts of an installer: with the group that drives it, and with the engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import nn

from inference_plugin.install.graph import Boundary
from inference_plugin.wire.geometry import Box
from inference_plugin.wire.manifest import Manifest
from inference_plugin.wire.messages import BoxDigest
from inference_plugin.wire.zone import ZoneLayout

__all__ = ["AdapterPlace", "AdapterSlots", "Throttle", "EngineModel", "InstallTerms", "Installer"]


@dataclass(frozen=True)
class InstallTerms:
    """An installer's answer to a manifest: the boxes that it reads, and how it will install them."""

    needs: tuple[Box, ...]
    mechanism: Literal["plan", "loader"]
    install: Literal["copy", "standby", "streaming"]
    why: str
    derived: tuple[str, ...] = ()
    """Names of what the engine makes anew of the parameters that an update writes."""
    untouched: tuple[str, ...] = ()
    """Parameters and buffers of the model that an update neither writes nor derives."""
    passed_over: tuple[int, ...] = ()
    """Tensors of the manifest, by index, that the engine's loader passes over, here as in the engine's own checkpoint."""
    zone: ZoneLayout | None = None
    """What a zone has to be, where `prepare` is to be given one in the place of a segment."""
    device: str = "cpu"
    """The type of device that holds the live weights; a zone lies in memory of the same type."""


Throttle = Callable[[int], None]
"""Called between steps of background work with bytes done; slows the caller down, or raises to cancel."""


class EngineModel(Protocol):
    """An engine's model, as its engine file describes it: the only thing that an installer knows of the engine."""

    live: nn.Module
    device: torch.device
    lock: threading.Lock
    """Held while the skeleton is in use."""

    @property
    def skeleton(self) -> nn.Module:
        """A second instance of the model's class on the meta device, as before `load_weights`."""

    @property
    def constants(self) -> Mapping[str, torch.Tensor]:
        """The constructor's values of the skeleton's buffers and of its small parameters, by name."""

    @property
    def runtime_state(self) -> frozenset[str]:
        """Names of attributes in which the engine keeps working memory, such as the KV cache: never weights."""

    def for_names(self, names: Collection[str]) -> EngineModel:
        """The model that takes tensors of these names: this one, or one that holds another model of the engine too."""

    @property
    def prefix(self) -> str:
        """Put before the names of parameters where two groups are compared: two models of an engine may use one name."""

    @property
    def leaves_out(self) -> str:
        """What else the engine computes with that an update of this model leaves as it is, in words; "" if nothing."""

    @property
    def updated(self) -> set[str]:
        """Storages, by key, that an update has written since the engine started; installers add to it."""

    @property
    def boundary(self) -> Boundary:
        """Packages of the engine whose objects hold no weights: configurations, process groups."""

    def checkpoint(self) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shapes and dtypes of what the engine's own checkpoint holds, by name; empty where that can't be told."""

    def load_weights(self, model: nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]) -> object:
        """Runs the engine's own loader on `model`, never on the live model. May be called on any thread."""

    def finishers(self) -> Mapping[str, Callable[[nn.Module], None]]:
        """The engine's post-processing after a load, by module name. Each is called with a stand-in for that module."""

    def expert_places(self) -> str:
        """A digest of which experts this rank holds, and in which places; "" where experts stay where the model's class puts
        them. The skeleton's loader places experts as the live model has them now."""

    def reads(self, module: nn.Module) -> tuple[str, ...]:
        """The submodules, by attribute, whose weights the post-processing of `module` reads."""

    @property
    def reads_finished(self) -> bool:
        """Whether those submodules are post-processed before the modules that read them; else these read what a load wrote."""

    def unfinishable(self) -> str | None:
        """Why the model's post-processing can't be repeated module by module; None if it can."""

    def pads(self, module: nn.Module) -> bool:
        """Whether the engine makes this module larger than the checkpoint has it (a padded vocabulary)."""

    def read_rebuilt(
        self, module: nn.Module, parameter: str, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor | None:
        """The plain parameter that a rebuilt live module computes with, read from its packed form; None if it can't be read."""

    def free_bytes(self) -> int:
        """Free memory of the model's device."""

    def free_share_bytes(self) -> int:
        """This rank's share of it. Ranks in host memory ask at the same moment, and each would find all of it free; so each may
        count on its part only, also where some of them are on other hosts."""

    @property
    def fixed_addresses(self) -> bool:
        """Whether something (captured graphs, sleep mode) holds raw addresses of the live parameters."""

    def computing(self) -> AbstractContextManager[None]:
        """The context in which the engine's post-processing runs (current configuration, no gradients)."""


@dataclass(frozen=True, slots=True)
class AdapterPlace:
    """The checkpoint's shape of a weight that adapters may change: (rows, columns)."""

    rows: int
    columns: int


class AdapterSlots(Protocol):
    """An engine's LoRA slots, as its engine file describes them. Tensors have PEFT's names; a module's name is the part before
    `.lora_A.weight`."""

    max_rank: int
    dtype: str
    """torch's name of it."""

    def check(self, adapter: str) -> None:
        """Raises `EngineUnsupported` where no adapter of that name can be served."""

    def place(self, module: str) -> AdapterPlace | None:
        """The weight of a module; None if this rank lacks the module, or it takes no adapter."""

    def held(self, adapter: str) -> object:
        """Engine's thread: the adapter as it is now, for `put` to restore."""

    def put(self, adapter: str, what: object) -> None:
        """Engine's thread: replaces the adapter from the next step on. `what`: tensors by name, which are never written, or
        what `held` returned."""

    def read(self, adapter: str) -> Iterator[tuple[str, tuple[int, ...], torch.Tensor | str]]:
        """Engine's thread: what the slots hold, a box of each tensor: name, offsets, and values, or why they can't be
        read."""


class Installer(Protocol):
    """Puts a checked segment into the live model of this worker. One per group."""

    def open(self, manifest: Manifest, policy: str, *, partial: bool, zone: bool = False) -> InstallTerms:
        """Agrees on a manifest, or raises `ManifestMismatch`. Never touches the live model. `zone`: trainer ranks are to write
        the second set themselves; raises `TransportUnavailable` where they can't."""

    def check_terms(self) -> None:
        """Any thread: raises `ManifestMismatch` where the engine has changed since `open`, so that the terms no longer fit it."""

    def prepare(self, segment: torch.Tensor, throttle: Throttle) -> int:
        """Background half of an installation; returns the bytes that it holds in addition. Never touches the live model."""

    def place(self, box: Box, tensor: torch.Tensor) -> None:
        """Engine's thread, before `install`, where the terms are `streaming`: writes a checked piece into the live model."""

    def share(self) -> bytes:
        """Engine's thread, after `prepare`: what the ranks of the replica tell each other of this update, from this one."""

    def install(self, segment: torch.Tensor, shares: Sequence[bytes] = ()) -> None:
        """Engine's thread, at a step boundary. `shares`: of all ranks."""

    def undo(self, previous: torch.Tensor | None) -> None:
        """Engine's thread: restores what was served before `install`, which may have failed half-way. Raises if it can't."""

    def finish(self) -> None:
        """Engine's thread: the new version is confirmed on all ranks."""

    def discard(self) -> None:
        """Drops the result of `prepare`."""

    def forget_segments(self) -> None:
        """Drops views of segments: the trainer that owned them is gone."""

    @property
    def claims(self) -> frozenset[str]:
        """The parameters that this installer writes. No two groups may share one."""

    @property
    def needs_previous(self) -> bool:
        """Whether `undo` will need the previous version's segment."""

    def read_back(self) -> Iterator[BoxDigest | tuple[str, str]]:
        """Engine's thread: digests of what the live parameters hold, or (parameter, why it can't be read)."""

    def close(self) -> None:
        """Frees everything but the live model."""
