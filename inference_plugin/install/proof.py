"""Proves a placement plan: compares the engine's own load of random bytes with a replay of the plan, bit for bit.

`prove_plan` runs the real `load_weights` on the skeleton, batch by batch so that memory stays bounded, and replays the
plan into a second set of tensors that started with the same scrambled bytes. Afterwards every storage must be equal in
both, as a whole: a region that only one of them wrote differs. The loader must not have written anywhere else, nor to the
checkpoint tensors.
"""

from __future__ import annotations

import math
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from inference_plugin.install.plan import Fill, LoadWeights, Placement, PlacementPlan, TensorInfo
from inference_plugin.install.replay import Replay
from inference_plugin.install.storages import storage_id, storage_views, written_tensors
from inference_plugin.install.trial_load import check_trial_fits, materialised
from inference_plugin.wire.errors import EngineUnsupported

__all__ = ["BUDGET_BYTES", "prove_plan"]

BUDGET_BYTES = 512 << 20
"""About the most bytes that a proof loads at once."""

_Write = TypeVar("_Write", Placement, Fill)


def prove_plan(
    plan: PlacementPlan,
    skeleton: nn.Module,
    load_weights: LoadWeights,
    tensors: Sequence[TensorInfo],
    free_bytes: float = math.inf,
) -> str:
    """Proves `plan`, as traced from `skeleton`, `load_weights` and `tensors`. Returns what is wrong with it; "" if it is proven.

    Uses about `BUDGET_BYTES` at a time, less where `free_bytes` are fewer; more if one set of tensors that belong together (the
    experts of a layer) is larger, or if the loader insists on every name. Raises `EngineUnsupported`, before it takes anything,
    if that is more than is free. Leaves the skeleton as it was, apart from what its loader keeps in plain attributes.
    """
    if plan.refusal is not None:
        return f"the plan is refused: {plan.refusal}"
    proof = _Proof(plan, skeleton, load_weights, tensors, free_bytes)
    try:
        findings = proof.run_batches(_batches(plan, tensors, proof.storage_bytes(), min(BUDGET_BYTES, free_bytes)))
    except EngineUnsupported:
        raise
    except Exception as error:  # noqa: BLE001 - a plan that doesn't fit the skeleton at all
        findings = dict.fromkeys(plan.extents, f"{type(error).__name__}: {error}")
        findings = findings or {"": f"{type(error).__name__}: {error}"}
    reason = "; ".join(f"{name}: {text}" if name else text for name, text in list(findings.items())[:3])
    return reason + (f"; and {len(findings) - 3} more" if len(findings) > 3 else "")


class _Batch(NamedTuple):
    """Checkpoint tensors that are loaded together, and every destination that they reach."""

    sources: tuple[str, ...]
    planned: tuple[str, ...]
    refused: tuple[str, ...]
    nbytes: int
    """What loading and replaying them takes."""


def _batches(
    plan: PlacementPlan, tensors: Sequence[TensorInfo], storage_bytes: Mapping[str, int], budget_bytes: float
) -> list[_Batch]:
    """The connected sets of sources and destinations, packed into batches that fit the budget, in checkpoint order."""
    groups = _Groups()
    for placement in plan.placements:
        groups.join(("source", placement.source.tensor), ("planned", placement.dest.tensor))
    for dest, names in plan.refused_sources.items():
        for name in names:
            groups.join(("source", name), ("refused", dest))
    for name in plan.unused:  # loaded too: the plan says that they write nothing
        groups.join(("source", name), ("source", name))
    components = [c for c in groups.sets() if any(kind == "planned" for kind, _ in c) or c[0][1] in plan.unused]
    cost = _Cost(tensors, storage_bytes)
    order = {name: i for i, (name, _, _) in enumerate(tensors)}
    components.sort(key=lambda c: min(order[name] for kind, name in c if kind == "source"))
    packed: list[list[tuple[str, str]]] = []
    room = 0.0
    for component in components:
        nbytes = cost.of(component)
        if not packed or nbytes > room:
            packed.append([])
            room = budget_bytes
        packed[-1] += component
        room -= nbytes
    return [_batch(members, order, cost.of(members)) for members in packed]


class _Cost:
    """What tensors and storages take in a proof. A planned destination takes its memory twice: loaded and replayed."""

    def __init__(self, tensors: Sequence[TensorInfo], storage_bytes: Mapping[str, int]) -> None:
        self._nbytes = {
            "source": {name: torch.Size(shape).numel() * dtype.itemsize for name, shape, dtype in tensors},
            "planned": {name: 2 * nbytes for name, nbytes in storage_bytes.items()},
            "refused": storage_bytes,
        }

    def of(self, members: Iterable[tuple[str, str]]) -> int:
        return sum(self._nbytes[kind].get(name, 0) for kind, name in members)


def _batch(members: Iterable[tuple[str, str]], order: Mapping[str, int], nbytes: int) -> _Batch:
    names: dict[str, list[str]] = defaultdict(list)
    for kind, name in members:
        names[kind].append(name)
    return _Batch(
        tuple(sorted(names["source"], key=order.__getitem__)),
        tuple(names["planned"]),
        tuple(names["refused"]),
        nbytes,
    )


class _Groups:
    """Disjoint sets (union-find)."""

    def __init__(self) -> None:
        self._parent: dict[tuple[str, str], tuple[str, str]] = {}

    def join(self, one: tuple[str, str], other: tuple[str, str]) -> None:
        self._parent[self._root(one)] = self._root(other)

    def sets(self) -> list[list[tuple[str, str]]]:
        found: dict[tuple[str, str], list[tuple[str, str]]] = defaultdict(list)
        for member in self._parent:
            found[self._root(member)].append(member)
        return list(found.values())

    def _root(self, member: tuple[str, str]) -> tuple[str, str]:
        self._parent.setdefault(member, member)
        while self._parent[member] != member:
            self._parent[member] = member = self._parent[self._parent[member]]
        return member


class _LoaderRaised(Exception):
    pass


class _Proof:
    """Loads and replays batches. Findings map a destination to what is wrong with it."""

    def __init__(
        self,
        plan: PlacementPlan,
        skeleton: nn.Module,
        load_weights: LoadWeights,
        tensors: Sequence[TensorInfo],
        free_bytes: float,
    ) -> None:
        self._free_bytes = free_bytes
        self._plan, self._skeleton, self._load_weights = plan, skeleton, load_weights
        self._infos = {name: (shape, dtype) for name, shape, dtype in tensors}
        self._placements = _by_dest(plan.placements)
        self._fills = _by_dest(plan.fills)
        self._noise = _Noise()
        self._originals = storage_views(skeleton)

    def storage_bytes(self) -> dict[str, int]:
        return {name: flat.nbytes for name, flat in self._originals.items()}

    def run_batches(self, batches: Sequence[_Batch]) -> dict[str, str]:
        findings: dict[str, str] = {}
        check_trial_fits(max((batch.nbytes for batch in batches), default=0), self._free_bytes)
        try:
            for batch in batches:
                findings |= self._run_batch(batch)
        except _LoaderRaised as error:
            # Some loaders insist on every name: try again with all of them.
            everything = _Batch(
                tuple(self._infos),
                tuple(self._plan.extents),
                tuple(self._plan.refused),
                sum(batch.nbytes for batch in batches),
            )
            check_trial_fits(everything.nbytes, self._free_bytes)
            try:
                return self._run_batch(everything)
            except _LoaderRaised as again:
                return dict.fromkeys(self._plan.extents, str(again)) or {"": str(error)}
        return findings

    def _run_batch(self, batch: _Batch) -> dict[str, str]:
        sources = {name: self._noise.tensor(name, *self._infos[name]) for name in batch.sources}
        with materialised(self._skeleton, {*batch.planned, *batch.refused}, torch.device("cpu")) as held:
            for name, flat in held.flats.items():
                self._noise.fill(flat, _scramble(name))
            strays = self._load(sources)
            findings = dict.fromkeys(strays, "the loader writes to it from tensors that by the plan don't reach it")
            for name in held.rebound(self._skeleton) & set(batch.planned):
                findings[name] = "the loader replaces it instead of writing to it"
            findings |= self._mutated(batch, sources)
            for dest in batch.planned:
                wrong = "" if dest in findings else self._compare(dest, held.flats.get(dest), sources)
                if wrong:
                    findings[dest] = wrong
        return findings

    def _load(self, sources: Mapping[str, Tensor]) -> set[str]:
        """Runs the real load; returns the destinations that it wrote although they have no memory in this batch."""
        watch = _Watch({storage_id(flat): name for name, flat in self._originals.items()})
        try:
            with torch.no_grad(), watch:
                self._load_weights(iter(list(sources.items())))
        except Exception as error:
            raise _LoaderRaised(f"the real load raised {type(error).__name__}: {error}") from error
        return watch.strays - self._plan.refused.keys()

    def _mutated(self, batch: _Batch, sources: Mapping[str, Tensor]) -> dict[str, str]:
        findings = {}
        for name, tensor in sources.items():
            if not _same_bytes(tensor, self._noise.tensor(name, *self._infos[name])):
                for dest in batch.planned:
                    if any(p.source.tensor == name for p in self._placements[dest]):
                        findings[dest] = f"the loader changes the checkpoint tensor {name}"
        return findings

    def _compare(self, dest: str, loaded: Tensor | None, sources: Mapping[str, Tensor]) -> str:
        if loaded is None:
            return "not in the skeleton"
        replayed = torch.empty_like(loaded)
        self._noise.fill(replayed, _scramble(dest))
        try:
            Replay(self._placements[dest], sources, {dest: replayed}, self._fills[dest]).run()
        except (ValueError, RuntimeError) as error:
            return f"the plan doesn't fit: {error}"
        return "" if _same_bytes(loaded, replayed) else "the replay differs from the real load"


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves its modes untyped
    """Notes which of `storages` are written. Skips a write to one in real memory, which may be the live model's."""

    def __init__(self, storages: Mapping[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages = storages
        self.strays: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for tensor in written_tensors(func, args, kwargs or {}):
            if storage_id(tensor) in self._storages:
                self.strays.add(self._storages[storage_id(tensor)])
                if not tensor.is_meta:
                    return tensor
        return func(*args, **(kwargs or {}))


class _Noise:
    """Reproducible random bytes: a pool of prime length, tiled from an offset that follows from the label.

    All bit patterns occur, including NaN, because copies keep them. Exceptions: of a boolean only the last bit is random, and a
    single number is neither negative nor NaN. Some loaders read its value and fill something with it, which does not keep the
    bits of a NaN.
    """

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self._pool = torch.randint(0, 256, (_POOL_BYTES,), dtype=torch.uint8, generator=generator)

    def tensor(self, label: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        flat = torch.empty(torch.Size(shape).numel(), dtype=dtype)
        self.fill(flat, label)
        if flat.numel() == 1 and dtype in _WIDE_FLOATS:
            flat.nan_to_num_(nan=1.0).abs_()
        return flat.view(shape)

    def fill(self, flat: Tensor, label: str) -> None:
        out = flat.view(torch.uint8)
        first = zlib.crc32(label.encode()) % _POOL_BYTES
        done = 0
        while done < out.numel():
            chunk = self._pool[first : first + out.numel() - done]
            out[done : done + chunk.numel()].copy_(chunk)
            done, first = done + chunk.numel(), 0
        if flat.dtype == torch.bool:
            out &= 1


_WIDE_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_POOL_BYTES = (1 << 20) - 3  # the largest prime below a megabyte: no row length of a weight divides it


def _scramble(dest: str) -> str:
    return f"scramble {dest}"


def _same_bytes(one: Tensor, other: Tensor) -> bool:
    wide = torch.int64 if one.nbytes % 8 == 0 else torch.uint8
    return torch.equal(one.reshape(-1).view(wide), other.reshape(-1).view(wide))


def _by_dest(writes: Iterable[_Write]) -> defaultdict[str, list[_Write]]:
    found: defaultdict[str, list[_Write]] = defaultdict(list)
    for write in writes:
        found[write.dest.tensor].append(write)
    return found
