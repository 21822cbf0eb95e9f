"""The live model of a worker, as far as it is alike on all engines."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import sys
import threading
import time
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from inference_plugin.devices import device_of
from inference_plugin.install.adapter import AdapterInstaller
from inference_plugin.install.contract import AdapterSlots, Installer
from inference_plugin.install.graph import Boundary, Path, tensors_under
from inference_plugin.install.installer import LastProof, ModelInstaller
from inference_plugin.install.stand_in import frozen
from inference_plugin.wire.errors import EngineUnsupported
from inference_plugin.wire.groups import ADAPTER_PREFIX, DRAFT
from inference_plugin.wire.messages import MemoryTag, SleepLevel

__all__ = ["COMPILED_IN", "ROTARY_TABLES", "LiveModel", "with_children", "with_submodule", "without_wrappers"]

ROTARY_TABLES = frozenset(
    {
        *("_freqs_cached", "_freqs_cis", "freqs_cache", "freqs_cis", "precomputed_freqs_cis"),
        *("_rope_by_thw_cache", "_rot_pos_ids_cache"),  # by the size of an image
    }
)
"""Attributes in which vision towers of both engines keep positions and angles once an image has asked for them: no weights."""

COMPILED_IN = "torch.compile takes weights for constants here, and compiled steps would go on with the old ones"

DECODING_S = 0.1
"""An engine counts as decoding for this long after a step."""


class LiveModel:
    """`install.contract.EngineModel` of one worker, for an engine whose model has a `load_weights` and whose layers are
    post-processed by a `quant_method` of theirs, or not at all. An engine's file overrides what it does otherwise."""

    fixed_addresses = False
    captures_graphs = False
    reads_finished = True
    post_processing: type | tuple[type, ...] = ()
    """The classes of the engine's `quant_method`s that post-process."""
    padded: type | tuple[type, ...] = ()
    """The classes of modules that the engine pads on purpose."""
    adapter_slots: AdapterSlots | None = None
    """The engine's own LoRA slots, where it has some."""

    prefix = ""
    leaves_out = ""
    lost = ""
    """What this engine has lost that no update brings back, in words; set by `RankRuntime`."""
    ranks = 1
    """Ranks of the replica; set by `RankRuntime`."""

    runtime_state: frozenset[str] = frozenset()
    """Attributes of layers that are working memory, by name."""
    derived_caches: frozenset[str] = frozenset()
    """Attributes of layers that are dicts of what was derived from weights while the engine computed, by name."""
    cache_scales: frozenset[str] = frozenset()
    placeholders: frozenset[str] = frozenset()
    random_weights = False
    boundary = Boundary()

    def __init__(
        self,
        live: nn.Module,
        device: torch.device,
        skeleton: nn.Module,
        constants: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self.live = live
        self.device = device
        self.skeleton = skeleton
        self.constants = constants or {}
        self.constructed: Mapping[str, Mapping[Path, Any]] = {
            name: {path: frozen(tensor) for path, tensor in tensors_under(module, self.boundary)}
            for name, module in skeleton.named_modules()
        }
        self.lock = threading.Lock()
        self.updated: dict[str, int] = {}
        """Storages, by key, that an update has written since the engine started; as `written_at`."""
        self._writes = 0
        self._last_proof = LastProof()
        self._stepping = False
        self._stepped_at_s = -math.inf

    def installer(self, group: str) -> Installer:
        """The installer of a group: its name says whether it is an adapter, the draft model, or else the served model."""
        self.check_caches()
        if group == DRAFT:
            draft = self.draft_model()
            return ModelInstaller(draft, draft._last_proof)
        if not group.startswith(ADAPTER_PREFIX):
            return ModelInstaller(self, self._last_proof)
        if self.adapter_slots is None:
            raise EngineUnsupported(
                f"group {group!r} is a LoRA adapter, and this engine has no LoRA slots",
                hint="start the engine with LoRA enabled, or send the merged model with MergedLoRAAdapter",
                phase="open",
            )
        return AdapterInstaller(self.adapter_slots, group.removeprefix(ADAPTER_PREFIX), self.check_caches)

    def check_caches(self) -> None:
        if self.lost:
            raise EngineUnsupported(
                f"this engine can't be updated: {self.lost}", hint="restart the engine", phase="open"
            )
        if (why := self.why_stale()) is not None:
            raise EngineUnsupported(
                f"this engine can't be updated: {why}, and would answer new requests from it",
                hint="start the engine without that cache; one inside the engine forgets at each update",
                phase="open",
            )

    def why_stale(self) -> str | None:
        """Which cache outside the engine keeps what the old weights computed, after an update too; None if there is none."""
        return None

    def draft_model(self) -> LiveModel:
        """The draft model of an engine that decodes speculatively. Raises `EngineUnsupported` where none can be updated."""
        raise EngineUnsupported(
            f"group {DRAFT!r} is the draft model of speculative decoding, and this engine has none that can be updated",
            hint="give a group of the served model another name",
            phase="open",
        )

    def and_draft(self) -> list[LiveModel]:
        """The models whose weights share memory that the engine releases: this one, and the draft where there is one."""
        return [self]

    def for_names(self, names: Collection[str]) -> LiveModel:
        return self

    def note_updated(self, keys: Iterable[str]) -> None:
        self._writes += 1
        self.updated.update(dict.fromkeys(keys, self._writes))
        self._last_proof.agreement = None  # it may leave to the engine what is written here

    def written_at(self, key: str) -> int:
        return self.updated.get(key, 0)

    def checkpoint(self) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        return {}

    def load_weights(self, model: nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]) -> object:
        return model.load_weights(tensors)  # type: ignore[operator]

    def finishers(self) -> Mapping[str, Callable[[nn.Module], None]]:
        methods = {name: getattr(module, "quant_method", None) for name, module in self.skeleton.named_modules()}
        return {
            name: _finish
            for name, method in methods.items()
            if method is not None and isinstance(method, self.post_processing)
        }

    def expert_places(self) -> str:
        return ""

    def derive_in_place(self) -> None: ...

    def reads(self, module: nn.Module) -> tuple[str, ...]:
        return ()

    def unfinishable(self) -> str | None:
        inductor = sys.modules.get("torch._inductor.config")  # else nothing was compiled
        if getattr(inductor, "freezing", False):
            return f"{COMPILED_IN} (TORCHINDUCTOR_FREEZING=1)"
        for name, held in itertools.chain(self.live.named_parameters(), self.live.named_buffers()):
            if hasattr(held, "__tensor_flatten__"):
                return f"{name} has no memory of its own: it is torchao's {type(held).__name__}, or the like"
        return None

    def pads(self, module: nn.Module) -> bool:
        return isinstance(module, self.padded)

    def read_rebuilt(
        self, module: nn.Module, parameter: str, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor | None:
        return None

    def free_bytes(self) -> int:
        return device_of(self.device).free_bytes(self.device)

    def free_share_bytes(self, replicas: int = 1) -> int:
        return self.free_bytes() // (self.ranks * replicas if self.device.type == "cpu" else 1)

    def computing(self) -> AbstractContextManager[None]:
        return torch.no_grad()

    def why_no_sleep(self, level: SleepLevel) -> str | None:
        """Why the engine, as it was started, can't sleep as deep as `level`; None if it can."""
        return "this engine has no sleep mode"

    def sleep(self, level: SleepLevel) -> None:
        """Engine's own thread, nothing in flight: releases the device memory of weights and KV cache. Called only where
        `why_no_sleep` gave None."""
        raise EngineUnsupported("this engine has no sleep mode")

    def wake_up(self, tag: MemoryTag) -> None:
        """Takes the memory of `tag` back, with its contents where the level kept them."""
        raise EngineUnsupported("this engine has no sleep mode")

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Around each of the engine's steps, on its own thread."""
        self._stepping = True
        try:
            yield
        finally:
            self._stepped_at_s = time.monotonic()
            self._stepping = False

    def decoding(self) -> bool:
        """Whether a step runs, however long, or ended within `DECODING_S`. Any thread."""
        return self._stepping or time.monotonic() - self._stepped_at_s < DECODING_S


def without_wrappers(model: nn.Module, wrapper: type[nn.Module]) -> nn.Module:
    """The model as it was before the engine put wrappers with a `base_layer` around some of its modules: views of the modules
    with a wrapper somewhere below them, and otherwise the model's own modules."""
    done: dict[int, nn.Module] = {}

    def visit(module: nn.Module) -> nn.Module:
        if id(module) not in done:
            if isinstance(module, wrapper):
                base: Any = module.base_layer
                done[id(module)] = visit(base)
            else:
                children = {name: child if child is None else visit(child) for name, child in module._modules.items()}
                done[id(module)] = with_children(module, children)
        return done[id(module)]

    return visit(model)


def with_children(module: nn.Module, children: dict[str, Any]) -> nn.Module:
    """A view of `module` with these children: what is set on one is set on the other. `module` itself where they are its own."""
    if children == module._modules:
        return module
    kind: Any = type(module)
    view = object.__new__(_class_of_views(kind))
    view.__dict__ = module.__dict__
    object.__setattr__(view, "_children", children)
    return view


def with_submodule(module: nn.Module, name: str, replacement: nn.Module) -> nn.Module:
    """A twin of `module` with another submodule under the dotted `name`. It shares all else with `module`; attributes that
    are set on the twin stay there."""
    first, _, rest = name.partition(".")
    child = module._modules[first]
    assert child is not None
    twin: nn.Module = object.__new__(type(module))
    inner = with_submodule(child, rest, replacement) if rest else replacement
    twin.__dict__ = module.__dict__ | {"_modules": {**module._modules, first: inner}}
    return twin


@functools.cache
def _class_of_views(kind: type[nn.Module]) -> type[nn.Module]:
    """`kind`, but the children lie beside the attributes instead of among them."""

    def child(view: Any, name: str) -> Any:
        return view._children[name] if name in view._children else kind.__getattr__(view, name)

    inside = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__slots__": ("_children",),
        "_modules": property(lambda view: view._children),
        "__getattr__": child,
    }
    return types.new_class(kind.__name__, (kind,), exec_body=lambda names: names.update(inside))


def _finish(module: nn.Module) -> None:
    """An engine's post-processing of one module."""
    method: Any = module.quant_method
    method.process_weights_after_loading(module)
