"""Proves a placement plan: compares the engine's own load of random bytes with a replay of the plan, bit for bit.

`prove_plan` runs the real `load_weights` on the skeleton, batch by batch so that memory stays bounded, and then replays the
plan into the same memory, which starts with the same scrambled bytes again. Every storage must have the same digest after
both, as a whole: a region that only one of them wrote differs. The loader must not have written anywhere else, nor to the
checkpoint tensors.
"""

from __future__ import annotations

import itertools
import math
import os
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from inference_plugin.install.plan import Fill, LoadWeights, Placement, PlacementPlan, TensorInfo
from inference_plugin.install.replay import Copies, Replay
from inference_plugin.install.storages import keys_by_name, storage_id, storage_views, written_tensors
from inference_plugin.install.trial_load import check_trial_fits, in_batches, materialised
from inference_plugin.wire.digest import digest_bytes
from inference_plugin.wire.errors import EngineUnsupported, lacks_resources
from inference_plugin.wire.tensors import bytes_view

__all__ = ["BUDGET_BYTES", "Groups", "Member", "prove_plan"]

BUDGET_BYTES = 512 << 20
"""About the most bytes that a proof loads at once."""

PART_BYTES = 8 << 20
"""A thread fills or digests so many bytes at once."""

MOST_THREADS = 8

_Write = TypeVar("_Write", Placement, Fill)

Member: TypeAlias = tuple[str, str]
"""A name after its kind: "source" of a checkpoint tensor, "planned" or "refused" of a destination, "module"."""


def prove_plan(
    plan: PlacementPlan,
    skeleton: nn.Module,
    load_weights: LoadWeights,
    tensors: Sequence[TensorInfo],
    free_bytes: float = math.inf,
    tied: Mapping[str, str] | None = None,
) -> str:
    """Proves `plan`, as traced from `skeleton`, `load_weights` and `tensors`. Returns what is wrong with it; "" if it is proven.

    `tied`: names of tensors that have the bytes of another one, each with the name of that (`Manifest.tied`). They are loaded
    together: a loader may write whichever comes first and pass over the other.

    Uses about `BUDGET_BYTES` at a time, less where `free_bytes` are fewer; more if one set of tensors that belong together (the
    experts of a layer) is larger, or if the loader insists on every name. Raises `EngineUnsupported`, before it takes anything,
    if that is more than is free. Leaves the skeleton as it was, apart from what its loader keeps in plain attributes.
    """
    if plan.refusal is not None:
        return f"the plan is refused: {plan.refusal}"
    # The engine may generate meanwhile, on the other cores.
    threads = min(MOST_THREADS, max(1, len(os.sched_getaffinity(0)) // 2))
    try:
        with ThreadPoolExecutor(threads, thread_name_prefix="weightwire-proof") as pool:
            proof = _Proof(plan, skeleton, load_weights, tensors, free_bytes, tied or {}, _Noise(pool))
            findings = proof.run_batches(min(BUDGET_BYTES, free_bytes))
    except EngineUnsupported:
        raise
    except Exception as error:  # a plan that doesn't fit the skeleton at all
        if lacks_resources(error):
            raise
        text = f"{type(error).__name__}: {error}"
        findings = dict.fromkeys(plan.extents, text) or {"": text}
    reason = "; ".join(f"{name}: {text}" if name else text for name, text in list(findings.items())[:3])
    return reason + (f"; and {len(findings) - 3} more" if len(findings) > 3 else "")


class _Batch(NamedTuple):
    """Checkpoint tensors that are loaded together, and every destination that they reach."""

    sources: tuple[str, ...]
    planned: tuple[str, ...]
    refused: tuple[str, ...]
    nbytes: int
    """The memory that they take."""


class Groups:
    """Disjoint sets (union-find)."""

    def __init__(self) -> None:
        self._parent: dict[Member, Member] = {}

    def join(self, one: Member, other: Member) -> None:
        self._parent[self._root(one)] = self._root(other)

    def sets(self) -> list[list[Member]]:
        found: dict[Member, list[Member]] = defaultdict(list)
        for member in self._parent:
            found[self._root(member)].append(member)
        return list(found.values())

    def _root(self, member: Member) -> Member:
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
        tied: Mapping[str, str],
        noise: _Noise,
    ) -> None:
        self._free_bytes = free_bytes
        self._plan, self._skeleton, self._load_weights = plan, skeleton, load_weights
        self._infos = {name: (shape, dtype) for name, shape, dtype in tensors}
        self._order = {name: i for i, name in enumerate(self._infos)}
        self._tied = {alias: name for alias, name in tied.items() if {alias, name} <= self._infos.keys()}
        self._placements = _by_dest(plan.placements)
        self._fills = _by_dest(plan.fills)
        self._noise = noise
        self._originals = storage_views(skeleton)
        storages = {name: flat.nbytes for name, flat in self._originals.items()}
        sent = {n: torch.Size(s).numel() * dtype.itemsize for n, s, dtype in tensors if n not in self._tied}
        self._nbytes = {"source": sent, "planned": storages, "refused": storages}
        """The memory of tensors and storages in a proof. Tied tensors share theirs."""
        idle = {keys_by_name(skeleton)[name] for name in plan.uncovered} - plan.extents.keys() - plan.refused.keys()
        self._idle = sorted(idle) if sum(storages[key] for key in idle) <= BUDGET_BYTES // 8 else []
        """Destinations that the plan doesn't write: in each batch, because `_Watch` doesn't see what other threads write."""
        self._memory = _Memory(0)

    def run_batches(self, budget_bytes: float) -> dict[str, str]:
        findings: dict[str, str] = {}
        batches = self._batches(budget_bytes)
        self._take(max((batch.nbytes for batch in batches), default=0))
        try:
            for batch in batches:
                findings |= self._run_batch(batch)
        except _LoaderRaised as error:
            # Some loaders insist on every name: try again with all of them.
            members = [("source", name) for name in self._infos]
            members += [("planned", name) for name in self._plan.extents]
            members += [("refused", name) for name in self._plan.refused]
            everything = self._batch(members)
            self._take(everything.nbytes)
            try:
                return self._run_batch(everything)
            except _LoaderRaised as again:
                return dict.fromkeys(self._plan.extents, str(again)) or {"": str(error)}
        return findings

    def _batches(self, budget_bytes: float) -> list[_Batch]:
        """The connected sets of sources and destinations, packed into batches that fit the budget, in checkpoint order."""
        plan, groups = self._plan, Groups()
        for placement in plan.placements:
            groups.join(("source", placement.source.tensor), ("planned", placement.dest.tensor))
        for dest, names in plan.refused_sources.items():
            for name in names:
                groups.join(("source", name), ("refused", dest))
        for name in plan.unused:  # loaded too: the plan says that they write nothing
            groups.join(("source", name), ("source", name))
        for alias, name in self._tied.items():
            groups.join(("source", alias), ("source", name))
        unused = {("source", name) for name in plan.unused}
        components = [c for c in groups.sets() if any(kind == "planned" or (kind, name) in unused for kind, name in c)]
        components.sort(key=lambda c: min(self._order[name] for kind, name in c if kind == "source"))
        packed = in_batches(components, self._cost, budget_bytes)
        return [self._batch(list(itertools.chain(*some))) for some in packed]

    def _batch(self, members: Sequence[Member]) -> _Batch:
        names: dict[str, list[str]] = {kind: [] for kind in self._nbytes}
        members = [*members, *(("planned", key) for key in self._idle)]
        for kind, name in members:
            names[kind].append(name)
        sources = sorted(names["source"], key=self._order.__getitem__)
        return _Batch(tuple(sources), tuple(names["planned"]), tuple(names["refused"]), self._cost(members))

    def _cost(self, members: Iterable[Member]) -> int:
        return sum(_aligned(self._nbytes[kind].get(name, 0)) for kind, name in members)

    def _take(self, nbytes: int) -> None:
        check_trial_fits(nbytes, self._free_bytes)
        self._memory = _Memory(0)  # frees the old memory before the new is taken
        self._memory = _Memory(nbytes)

    def _run_batch(self, batch: _Batch) -> dict[str, str]:
        self._memory.reuse()
        sources = {name: self._source(name) for name in batch.sources if name not in self._tied}
        self._noise.fill(sources)
        for tensor in sources.values():
            if tensor.numel() == 1 and tensor.dtype in _WIDE_FLOATS:
                tensor.nan_to_num_(nan=1.0).abs_()
        sources = {name: sources[self._tied.get(name, name)] for name in batch.sources}
        sent = self._noise.digests(sources)
        with materialised(self._skeleton, {*batch.planned, *batch.refused}, self._memory.empty) as held:
            self._noise.fill({_scramble(name): flat for name, flat in held.flats.items()})
            strays = self._load(sources)
            findings = dict.fromkeys(strays, "the loader writes to it from tensors that by the plan don't reach it")
            for name in held.rebound(self._skeleton) & set(batch.planned):
                findings[name] = "the loader replaces it instead of writing to it"
            changed = {name for name, digest in self._noise.digests(sources).items() if digest != sent[name]}
            for dest in batch.planned:
                if names := sorted(changed & {p.source.tensor for p in self._placements[dest]}):
                    findings[dest] = f"the loader changes the checkpoint tensor {names[0]}"
                elif dest not in held.flats:
                    findings.setdefault(dest, "not in the skeleton")
            return findings | self._compare({d: held.flats[d] for d in batch.planned if d not in findings}, sources)

    def _source(self, name: str) -> Tensor:
        shape, dtype = self._infos[name]
        return self._memory.empty(torch.Size(shape).numel(), dtype=dtype).view(shape)

    def _load(self, sources: Mapping[str, Tensor]) -> set[str]:
        """Runs the real load; returns the destinations that it wrote although they have no memory in this batch."""
        watch = _Watch({storage_id(flat): name for name, flat in self._originals.items()})
        try:
            with torch.no_grad(), watch:
                self._load_weights(iter(list(sources.items())))
        except Exception as error:
            if lacks_resources(error):
                raise
            raise _LoaderRaised(f"the real load raised {type(error).__name__}: {error}") from error
        return watch.strays - self._plan.refused.keys()

    def _compare(self, loaded: Mapping[str, Tensor], sources: Mapping[str, Tensor]) -> dict[str, str]:
        """Replays the plan in the place of what was loaded. Findings by destination."""
        by_loader = self._noise.digests(loaded)
        self._noise.fill({_scramble(dest): flat for dest, flat in loaded.items()})
        findings = {}
        for dest, flat in loaded.items():
            try:
                Replay(Copies(self._placements[dest], self._fills[dest]), sources, {dest: flat}).run()
            except (ValueError, RuntimeError) as error:
                if lacks_resources(error):
                    raise
                findings[dest] = f"the plan doesn't fit: {error}"
        for dest, digest in self._noise.digests(loaded).items():
            if digest != by_loader[dest]:
                findings.setdefault(dest, "the replay differs from the real load")
        return findings


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


class _Memory:
    """Memory that batches take one after the other: the first write to new memory costs ten times as much as the next one."""

    def __init__(self, nbytes: int) -> None:
        self._bytes = torch.empty(nbytes, dtype=torch.uint8).numpy()
        self._taken = 0

    def reuse(self) -> None:
        """Nobody uses anymore what `empty` returned so far."""
        self._taken = 0

    def empty(self, numel: int, *, dtype: torch.dtype) -> Tensor:
        """A flat tensor with a storage of its own, uninitialised."""
        start, nbytes = self._taken, numel * dtype.itemsize
        self._taken += _aligned(nbytes)
        return torch.from_numpy(self._bytes[start : start + nbytes]).view(dtype)


class _Noise:
    """Reproducible random bytes: a pool of prime length, tiled from an offset that follows from the label. The threads of `pool`
    fill and digest memory, a part at a time.

    All bit patterns occur, including NaN, because copies keep them. Exceptions: of a boolean only the last bit is random, and a
    single number is neither negative nor NaN. Some loaders read its value and fill something with it, which does not keep the
    bits of a NaN.
    """

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        generator = torch.Generator().manual_seed(0)
        self._bytes = torch.randint(0, 256, (_POOL_BYTES,), dtype=torch.uint8, generator=generator).numpy()
        self._pool = pool

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Fills contiguous tensors, each by its label."""

        list(self._pool.map(self._fill, _parts(tensors)))

    def digests(self, tensors: Mapping[str, Tensor]) -> dict[str, list[int]]:
        """The digests of each tensor's parts, by label."""
        found: dict[str, list[int]] = {label: [] for label in tensors}
        for digests in self._pool.map(
            lambda parts: [(each.label, digest_bytes(each.data)) for each in parts], _parts(tensors)
        ):
            for label, digest in digests:
                found[label].append(digest)
        return found

    def _fill(self, parts: Iterable[_Part]) -> None:
        for part in parts:
            out, done = part.data, 0
            first = (zlib.crc32(part.label.encode()) + part.start) % _POOL_BYTES
            while done < out.size:
                chunk = self._bytes[first : first + out.size - done]
                out[done : done + chunk.size] = chunk
                done, first = done + chunk.size, 0
            if part.is_bool:
                out &= 1


class _Part(NamedTuple):
    """Some bytes of a tensor, from byte `start` on, as numpy's: torch would use several threads for a call, which wait for each
    other."""

    label: str
    start: int
    data: Any
    is_bool: bool


def _parts(tensors: Mapping[str, Tensor]) -> list[list[_Part]]:
    """What the threads do at once: parts of about `PART_BYTES` together, because a model may have tens of thousands of small
    tensors."""
    parts = (
        _Part(label, start, data[start : start + PART_BYTES], tensor.dtype == torch.bool)
        for label, tensor in tensors.items()
        for data in (bytes_view(tensor).numpy(),)
        for start in range(0, data.size, PART_BYTES)
    )
    return in_batches(parts, lambda part: part.data.size, PART_BYTES)


_WIDE_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_ALIGNMENT = 64
_POOL_BYTES = (1 << 20) - 3  # the largest prime below a megabyte: no row length of a weight divides it


def _scramble(dest: str) -> str:
    return f"scramble {dest}"


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _by_dest(writes: Iterable[_Write]) -> defaultdict[str, list[_Write]]:
    found: defaultdict[str, list[_Write]] = defaultdict(list)
    for write in writes:
        found[write.dest.tensor].append(write)
    return found
