"""An installer's contracts: with the group that drives it, with the engine's model, and with the engine's LoRA slots."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import nn

from inference_plugin.install.graph import Boundary, Path
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
    """Names of what the engine's post-processing derives from the parameters that an update writes."""
    untouched: tuple[str, ...] = ()
    """Parameters and buffers of the model that an update neither writes nor derives."""
    passed_over: tuple[int, ...] = ()
    """Tensors of the manifest, by index, from which the engine's loader takes nothing, as in the engine's own checkpoint."""
    zone: ZoneLayout | None = None
    """The layout of the zone, if `prepare` will get a zone instead of a segment."""
    device: str = "cpu"
    """Type of the device that holds the live weights; a zone lies in memory of the same type."""
    takes_bytes: int = 0
    """Host memory beside the live weights that updates will take and that is not held yet."""


Throttle = Callable[[], None]
"""Background work calls this between its steps; it slows the caller down, or raises to cancel the work."""


class EngineModel(Protocol):
    """An engine's model, as its engine file describes it. An installer knows nothing else of the engine."""

    live: nn.Module
    device: torch.device
    lock: threading.Lock
    """Held while the skeleton is in use."""

    @property
    def skeleton(self) -> nn.Module:
        """A second instance of the model's class on the meta device, in its state before `load_weights`."""

    @property
    def constants(self) -> Mapping[str, torch.Tensor]:
        """The values that the constructor gave the skeleton's buffers and small parameters, by name."""

    @property
    def constructed(self) -> Mapping[str, Mapping[Path, Any]]:
        """The tensors that the constructor alone, before any load, leaves on modules of the skeleton beside parameters and
        buffers, by module and path, each as `stand_in.frozen`."""

    @property
    def runtime_state(self) -> frozenset[str]:
        """Names of attributes in which the engine keeps working memory, such as the KV cache: never weights."""

    @property
    def derived_caches(self) -> frozenset[str]:
        """Names of attributes of modules that are dicts of what the engine derived from weights while it computed, such as a
        table of positions for each size of an image. A commit empties them."""

    @property
    def cache_scales(self) -> frozenset[str]:
        """Names of attributes that hold numbers of the weights by which the engine scales its cached keys and values."""

    @property
    def placeholders(self) -> frozenset[str]:
        """Names of classes of modules that keep another one and never compute with it."""

    def for_names(self, names: Collection[str]) -> EngineModel:
        """The model that takes tensors of these names: this one, or one that also holds another model of the engine."""

    @property
    def prefix(self) -> str:
        """Stands before the names of parameters when two groups are compared: two models of an engine may use the same name."""

    @property
    def leaves_out(self) -> str:
        """In words, other weights that the engine computes with and that an update of this model doesn't change; "" if none."""

    def note_updated(self, keys: Iterable[str]) -> None:
        """An update is about to write these storages, or has."""

    def written_at(self, key: str) -> int:
        """Which `note_updated` since the engine started last named this storage, counted from 1; 0 for none."""

    @property
    def random_weights(self) -> bool:
        """Whether the engine started with random numbers for weights, without a checkpoint's (load format dummy)."""

    @property
    def boundary(self) -> Boundary:
        """Packages of the engine whose objects hold no weights: configurations, process groups."""

    def checkpoint(self) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shapes and dtypes of the tensors in the engine's own checkpoint, by name; empty if it cannot be read."""

    def load_weights(self, model: nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]) -> object:
        """Runs the engine's own loader on `model`, never on the live model. May be called on any thread."""

    def finishers(self) -> Mapping[str, Callable[[nn.Module], None]]:
        """The engine's post-processing after a load, by module name. Each is called with a stand-in for that module."""

    def check_caches(self) -> None:
        """Raises `EngineUnsupported` while a cache outside the engine keeps what the old weights computed, also after an update.
        An engine may get one while it runs."""

    def expert_places(self) -> str:
        """A digest of which experts this rank holds, and in which places; "" if experts stay where the model's class puts them.
        The skeleton's loader puts experts where the live model has them now."""

    def derive_in_place(self) -> None:
        """Engine's thread, after weights were written: derives again, into the same memory, what the engine has derived in its
        first step and never derives again."""

    def reads(self, module: nn.Module) -> tuple[str, ...]:
        """The submodules, by attribute, whose weights the post-processing of `module` reads."""

    @property
    def reads_finished(self) -> bool:
        """Whether those submodules are post-processed before the modules that read them. If not, these read what a load wrote."""

    def unfinishable(self) -> str | None:
        """Why the model's post-processing can't be repeated module by module; None if it can."""

    def pads(self, module: nn.Module) -> bool:
        """Whether this module is larger in the engine than in the checkpoint (a padded vocabulary)."""

    def read_rebuilt(
        self, module: nn.Module, parameter: str, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor | None:
        """The plain parameter behind the packed form that a rebuilt live module computes with; None if it can't be read."""

    def free_share_bytes(self, replicas: int = 1) -> int:
        """This rank's share of the device's free memory. Ranks in host memory ask at the same moment, and each would find all of
        it free; so each counts on an equal part only, even if some ranks are on other hosts. So does each of `replicas` on one
        host."""

    @property
    def fixed_addresses(self) -> bool:
        """Whether something (captured graphs, sleep mode) holds raw addresses of the live parameters."""

    @property
    def captures_graphs(self) -> bool:
        """Whether captured graphs or compiled code hold what a step computed with: also numbers, and tensors of objects that
        nothing refers to any more."""

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
    """torch's name of the slots' dtype."""

    def check(self, adapter: str) -> None:
        """Raises `EngineUnsupported` if the engine can't serve an adapter of this name."""

    def place(self, module: str) -> AdapterPlace | None:
        """The weight of a module; None if this rank lacks the module, or it takes no adapter."""

    def held(self, adapter: str) -> object:
        """Engine's thread: the adapter as it is now, for `put` to restore."""

    def put(self, adapter: str, what: object) -> None:
        """Engine's thread: replaces the adapter from the next step on. `what`: tensors by name, which are never written, or
        what `held` returned."""

    def read(self, adapter: str) -> Iterator[tuple[str, tuple[int, ...], torch.Tensor | str]]:
        """Engine's thread: a box of each tensor that the slots hold: name, offsets, and the values or the reason why they can't
        be read."""

    def refill(self) -> None:
        """Engine's thread: fills the slots again whose memory was discarded, from the engine's copies on the host."""


class Installer(Protocol):
    """Puts a checked segment into the live model of this worker. One per group."""

    def open(
        self, manifest: Manifest, policy: str, *, partial: bool, zone: bool = False, sharing: int = 1
    ) -> InstallTerms:
        """Agrees on a manifest, or raises `ManifestMismatch`. Never touches the live model. `zone`: trainer ranks will write the
        second set themselves; raises `TransportUnavailable` if they can't. `sharing`: number of replicas that share the free
        memory of this host."""

    def check_terms(self) -> None:
        """Any thread: raises `ManifestMismatch` if the engine has changed since `open`, so that the terms no longer fit it, and
        `EngineUnsupported` if it can't be updated any longer."""

    def check_model(self) -> None:
        """Engine's thread, before a commit: raises `EngineUnsupported` if `prepare` found what the engine has kept since `open`
        and an update would leave behind."""

    def prepare(self, segment: torch.Tensor, throttle: Throttle) -> int:
        """The background half of an installation; returns the additional bytes that it holds. Never touches the live model."""

    def place(self, box: Box, tensor: torch.Tensor) -> None:
        """Engine's thread, before `install`, only under `streaming`: writes a checked piece into the live model."""

    def share(self) -> bytes:
        """Engine's thread, after `prepare`: what this rank sends to the other ranks of the replica for this update."""

    def install(self, segment: torch.Tensor, shares: Sequence[bytes] = ()) -> None:
        """Engine's thread, at a step boundary. `shares`: what `share` returned on each rank."""

    def undo(self, previous: torch.Tensor | None) -> None:
        """Engine's thread: restores the weights of before `install`, which may have failed half-way. Raises if it can't."""

    def finish(self) -> None:
        """Engine's thread: the new version is confirmed on all ranks."""

    def discard(self) -> None:
        """Drops the result of `prepare`."""

    def free_kept(self) -> None:
        """Frees what is kept for the next update, and drops all views of segments: the trainer is gone."""

    @property
    def claims(self) -> frozenset[str]:
        """The parameters that this installer writes. No two groups may share one."""

    @property
    def scales_cache(self) -> bool:
        """Whether updates may change numbers by which cached keys and values are read: none may be kept then."""

    @property
    def needs_previous(self) -> bool:
        """Whether `undo` will need the previous version's segment."""

    def read_back(self) -> Iterator[BoxDigest | tuple[str, str]]:
        """Engine's thread: digests of the live parameters' values, or (parameter, why it can't be read)."""

    def close(self) -> None:
        """Frees everything but the live model."""
