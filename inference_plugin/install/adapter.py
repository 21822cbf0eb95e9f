"""LoRA adapters in the engine's own slots: an installer for groups that are named `lora.<adapter>`.

The manifest has the adapter's tensors under PEFT's names, `base_model.model.<module>.lora_A.weight` (rank, in) and
`...lora_B.weight` (out, rank). The trainer multiplies B by the scaling, so that no scaling has to travel: the engine uses
the tensors as if alpha were the rank. Every worker receives whole tensors and cuts out its own part, as the engine does
with an adapter from disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import torch

from inference_plugin.install.contract import AdapterSlots, InstallTerms, Throttle
from inference_plugin.install.verify import box_digest
from inference_plugin.wire.errors import (
    EngineUnsupported,
    ManifestMismatch,
    ProtocolError,
    TransportUnavailable,
    first_few,
)
from inference_plugin.wire.geometry import Box
from inference_plugin.wire.manifest import Manifest, TensorSpec
from inference_plugin.wire.messages import BoxDigest
from inference_plugin.wire.tensors import box_view

__all__ = ["AdapterInstaller"]

Factors: TypeAlias = dict[str, tuple[TensorSpec, TensorSpec]]

_A, _B = ".lora_A.weight", ".lora_B.weight"


class AdapterInstaller:
    """`contract.Installer` of one adapter. It keeps the replaced adapter until the new one is confirmed."""

    def __init__(self, slots: AdapterSlots, name: str, check_caches: Callable[[], None]) -> None:
        """`check_caches`: as of `contract.EngineModel`."""
        self._slots = slots
        self._check_caches = check_caches
        self._name = name
        self._manifest: Manifest | None = None
        self._needs: tuple[Box, ...] = ()
        self._next: dict[str, torch.Tensor] | None = None
        self._before: object = None
        self._replaced = False

    def open(
        self, manifest: Manifest, policy: str, *, partial: bool, zone: bool = False, sharing: int = 1
    ) -> InstallTerms:
        """Compares names, dtypes and shapes with the engine's slots. Raises `ManifestMismatch` with the names."""
        if zone:
            raise TransportUnavailable("zone: the engine loads an adapter into its slots itself")
        if policy == "streaming":
            raise EngineUnsupported("streaming: an adapter goes into its slots as a whole", hint="use install='auto'")
        self._slots.check(self._name)
        needed: list[int] = []
        problems: list[str] = []
        dtypes: list[str] = []
        for module, (a, b) in _pairs(manifest).items():
            if (place := self._slots.place(module)) is None:
                continue  # another pipeline stage has it; if none has, the manager refuses it
            needed += [manifest.index[a.name], manifest.index[b.name]]
            rank = a.shape[0]
            if (a.shape, b.shape) != ((rank, place.columns), (place.rows, rank)):
                problems.append(
                    f"{module} has A {list(a.shape)} and B {list(b.shape)}, the engine's weight is "
                    f"{[place.rows, place.columns]}"
                )
            elif rank > self._slots.max_rank:
                problems.append(f"{module} has rank {rank}, the engine's slots have {self._slots.max_rank}")
            elif {a.dtype, b.dtype} != {self._slots.dtype}:
                dtypes.append(
                    f"{module} has A in {a.dtype} and B in {b.dtype}, the engine's slots are {self._slots.dtype}"
                )
        if problems:
            raise ManifestMismatch(
                f"the adapter doesn't fit the engine's LoRA slots: {first_few(problems)}",
                hint="start the engine with a larger maximal rank",
            )
        if dtypes:
            error = ManifestMismatch(
                f"dtypes differ: {first_few(dtypes, 3)}",
                hint=f'nothing is cast silently: give update dtype="{self._slots.dtype}", or dtype="engine" for the engine\'s',
            )
            error.dtypes = {"*": self._slots.dtype}
            raise error
        self.discard()
        self._manifest, self._needs = manifest, tuple(manifest.whole(i) for i in sorted(needed))
        return InstallTerms(self._needs, "loader", "standby", "the engine's own LoRA slots")

    def check_terms(self) -> None:
        self._check_caches()  # the slots stay where they are

    def check_model(self) -> None:
        """Nothing in the model is derived from an adapter."""

    def prepare(self, segment: torch.Tensor, throttle: Throttle) -> int:
        assert self._manifest is not None
        self._next = {}
        nbytes = 0
        for box in self._needs:
            tensor = box_view(segment, self._manifest, box).clone()
            self._next[self._manifest.tensors[box.tensor].name] = tensor
            throttle()
            nbytes += tensor.nbytes
        return nbytes

    def place(self, box: Box, tensor: torch.Tensor) -> None:
        raise ProtocolError("an adapter is installed as a whole")

    def share(self) -> bytes:
        return b""

    def install(self, segment: torch.Tensor, shares: Sequence[bytes] = ()) -> None:
        assert self._next is not None
        self._before = self._slots.held(self._name)
        self._replaced = True
        self._slots.put(self._name, self._next)

    def undo(self, previous: torch.Tensor | None) -> None:
        if self._replaced:
            self._slots.put(self._name, self._before)
        self._replaced, self._before = False, None

    def finish(self) -> None:
        self._next, self._before, self._replaced = None, None, False

    def discard(self) -> None:
        self._next = None

    def free_kept(self) -> None:
        """Nothing is kept: the prepared tensors are copies, which the commit puts into the slots."""

    @property
    def claims(self) -> frozenset[str]:
        return frozenset({f"LoRA adapter {self._name}"})

    @property
    def scales_cache(self) -> bool:
        return False

    @property
    def needs_previous(self) -> bool:
        return False

    def read_back(self) -> Iterator[BoxDigest | tuple[str, str]]:
        for name, offsets, tensor in self._slots.read(self._name):
            yield (name, tensor) if isinstance(tensor, str) else box_digest(name, offsets, tensor, exact=True)

    def close(self) -> None:
        self.discard()


def _pairs(manifest: Manifest) -> Factors:
    """A and B by module name. Raises `ManifestMismatch` for any other tensor, and for A or B alone."""
    found: dict[str, dict[str, TensorSpec]] = {}
    unknown = []
    for spec in manifest.tensors:
        kind = next((kind for kind in (_A, _B) if spec.name.endswith(kind)), None)
        if kind is None or len(spec.shape) != 2:
            unknown.append(spec.name)
        else:
            found.setdefault(spec.name.removesuffix(kind), {})[kind] = spec
    if unknown or manifest.tied:
        raise ManifestMismatch(
            f"these tensors are neither A nor B of a LoRA layer: {first_few([*unknown, *manifest.tied])}",
            hint="a group named lora.<adapter> takes what LoRAAdapter sends; adapters of embeddings, experts and whole "
            "modules can be merged with MergedLoRAAdapter",
        )
    if single := [module for module, pair in found.items() if len(pair) == 1]:
        raise ManifestMismatch(f"these LoRA layers have A without B, or B without A: {first_few(single)}")
    return {module: (pair[_A], pair[_B]) for module, pair in found.items()}
