"""Puts a checked segment into the live model of one worker, and takes it back out again.

The work is divided by what the engine does with a parameter after loading it:

- *plain*: the live parameter is what `load_weights` wrote. Its bytes are copied from the segment by the placement plan.
- *rebuilt*: the engine's post-processing made something else of it (packed it, say). The module is built anew aside,
  from the segment, by the engine's own post-processing, and the result is moved into the live module.

and by policy: `copy` writes the live parameters at the step boundary; `standby` prepares a second set in the
background and swaps it in. Where no plan was proven, the engine's own `load_weights` fills the second set.

Everything here that touches the live model runs on the engine's own thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import torch

from inference_plugin.install.contract import Brake, EngineModel, InstallTerms
from inference_plugin.install.layout import Aside, LiveLayout, Second
from inference_plugin.install.plan import PlacementPlan, TensorInfo, storage_views, trace_plan
from inference_plugin.install.proof import _materialised, prove_plan
from inference_plugin.install.replay import Replay, read_back
from inference_plugin.wire.digest import digest_bytes
from inference_plugin.wire.errors import (
    CommitFailed,
    EngineUnsupported,
    ManifestMismatch,
    TornReplica,
    first_few,
)
from inference_plugin.wire.manifest import Box, Manifest
from inference_plugin.wire.messages import BoxDigest
from inference_plugin.wire.tensors import box_view, bytes_view, dtype_name, torch_dtype

__all__ = ["ModelInstaller"]

STANDBY_MEMORY_FACTOR = 2.0
"""`auto` takes `standby` if the free memory is at least this many times the shard: packing needs room beside it."""

FREE_AFTER_S = 0.2
"""Replaced modules are given back this long after the commit, which must not wait for it."""

FREE_REST_S = 0.002
"""Between two of them the engine's thread runs."""


class ModelInstaller:
    """The installer of one group on one worker (see `groups.Installer` for who calls what on which thread)."""

    def __init__(self, model: EngineModel) -> None:
        self._model = model
        self._manifest: Manifest | None = None
        self._plan: PlacementPlan | None = None
        self._layout: LiveLayout | None = None
        self._mechanism: Literal["plan", "loader"] = "plan"
        self._why_loader = ""
        self._install: Literal["copy", "standby"] = "copy"
        self._replays: dict[tuple[int, str], Replay] = {}
        self._prepared: Second | None = None
        self._replaced: Second | None = None
        self._spare: Second | None = None
        self._touched = False

    # --- agreeing ----------------------------------------------------------------------------------------------------

    def open(self, manifest: Manifest, policy: str, *, partial: bool) -> InstallTerms:
        """Traces and proves the placement plan for `manifest`, off the live model. Raises `ManifestMismatch`."""
        if manifest != self._manifest:
            with self._model.lock:
                self._agree(manifest, partial)
        assert self._plan is not None and self._layout is not None
        self.discard()
        self._replays.clear()  # bound to segments of before, and to storages that a swap may have replaced
        self._install, why = self._choose(policy)
        if self._install == "copy":
            self._spare = None
        return InstallTerms(
            needs=self._needs(manifest),
            mechanism=self._mechanism,
            install=self._install,
            why="; ".join(filter(None, [self._why_loader, why])),
        )

    def _agree(self, manifest: Manifest, partial: bool) -> None:
        tensors = _tensor_infos(manifest)
        skeleton = self._model.skeleton
        plan = trace_plan(skeleton, self._load_skeleton, tensors)
        self._check(manifest, plan, tensors, partial)
        why_loader = plan.refusal or (
            f"{first_few(list(plan.refused))} are computed while loading" if plan.refused else ""
        )
        if not why_loader:
            proof = prove_plan(plan, skeleton, self._load_skeleton, tensors)
            if not proof.ok:
                why_loader = f"the placement plan failed its proof: {proof.reason}"
        layout = LiveLayout(self._model, plan)
        if filled := layout.filled_over():
            raise ManifestMismatch(
                f"the engine's loader would fill in zeros where the engine holds weights: {first_few(filled)}",
                hint="the trainer's tensors for these are smaller than the engine's",
                phase="open",
            )
        if unknown := layout.unaccounted:
            raise EngineUnsupported(
                f"the engine holds in a form of its own, and no post-processing accounts for it: {first_few(unknown)}",
                phase="open",
            )
        if partial and (halved := layout.halved()):
            raise ManifestMismatch(
                f"the engine packs these as one, and the group has a part of them only: {first_few(halved)}",
                hint="give all tensors of such a module to one group",
                phase="open",
            )
        if (why := self._model.unfinishable()) is not None:
            raise EngineUnsupported(f"this model can't be updated in place: {why}", phase="open")
        self._manifest, self._plan, self._layout = manifest, plan, layout
        self._mechanism, self._why_loader = ("loader" if why_loader else "plan"), why_loader
        self._replays.clear()

    def _check(self, manifest: Manifest, plan: PlacementPlan, tensors: list[TensorInfo], partial: bool) -> None:
        """Names, shapes and dtypes against what the loader does with them. Raises `ManifestMismatch`."""
        if plan.refusal is not None and partial:
            raise ManifestMismatch(
                f"what a part of the model writes can't be told: {plan.refusal}",
                hint="send the whole model as one group",
                phase="open",
            )
        if plan.refusal is not None:
            # The loader gave up on the whole: ask it tensor by tensor, which ones it can't take.
            if wrong := self._misfits(tensors):
                raise ManifestMismatch(f"the engine's model can't take: {first_few(wrong)}", phase="open")
            return
        if wrong := [f"{name}: {why}" for name, why in plan.dtype_conflicts.items()]:
            raise ManifestMismatch(
                f"dtypes differ: {first_few(wrong)}",
                hint="give the trainer's adapter a dtype rule for these names; nothing is cast silently",
                phase="open",
            )
        missing = [f"{name} ({count} elements)" for name, count in plan.uncovered.items() if name not in plan.padding]
        if missing and not partial:
            raise ManifestMismatch(f"parameters that nothing in the manifest fills: {first_few(missing)}", phase="open")
        if plan.doubled:
            raise ManifestMismatch(f"parameters filled twice: {first_few(list(plan.doubled))}", phase="open")

    def _misfits(self, tensors: list[TensorInfo]) -> list[str]:
        wrong = []
        for info in tensors:
            if (reason := trace_plan(self._model.skeleton, self._load_skeleton, [info]).refusal) is not None:
                wrong.append(f"{info[0]} {list(info[1])} {dtype_name(info[2])}: {reason}")
        return wrong

    def _choose(self, policy: str) -> tuple[Literal["copy", "standby"], str]:
        assert self._layout is not None
        if self._mechanism == "loader":
            return "standby", "the engine's own loader fills a second set"
        if policy != "auto":
            if policy == "standby" and self._model.fixed_addresses:
                return "copy", "captured graphs or sleep mode hold the parameters' addresses, which must stay"
            return ("standby" if policy == "standby" else "copy"), ""
        if self._model.fixed_addresses:
            return "copy", "captured graphs or sleep mode hold the parameters' addresses, which must stay"
        free, shard = self._model.free_bytes(), self._layout.nbytes
        if free < STANDBY_MEMORY_FACTOR * shard:
            return "copy", f"{free >> 20} MiB are free, too few for a second set of {shard >> 20} MiB"
        return "standby", f"{free >> 20} MiB are free"

    def _needs(self, manifest: Manifest) -> tuple[Box, ...]:
        assert self._plan is not None
        if self._mechanism == "loader":
            return tuple(manifest.whole(i) for i in range(len(manifest.tensors)))
        boxes: dict[int, Box] = {}
        for name, (offsets, sizes) in self._plan.needs().items():
            box = Box(manifest.index[manifest.tied.get(name, name)], offsets, sizes)
            boxes[box.tensor] = _hull(boxes[box.tensor], box) if box.tensor in boxes else box
        return tuple(boxes[i] for i in sorted(boxes))

    # --- background --------------------------------------------------------------------------------------------------

    def prepare(self, segment: torch.Tensor, brake: Brake) -> int:
        """Under `standby`: fills the second set and rebuilds modules from it. Returns the bytes held in addition."""
        assert self._layout is not None
        if self._install == "copy":
            self._replay(segment, "plain")  # bound now, so that the commit only copies
            return 0
        if self._mechanism == "loader":
            storages, aside_storages = self._load_second(segment)
        else:
            storages = self._second_storages()
            _spread(self._bind(segment, self._layout.plan_of("plain"), storages), brake)
            aside_storages = None
        asides = list(self._rebuild(segment, storages, brake, aside_storages))
        self._prepared = Second(self._layout.moves(storages), asides)
        return sum(t.nbytes for t in storages.values()) + self._layout.rebuilt_nbytes

    def _second_storages(self) -> dict[str, torch.Tensor]:
        """A storage per plain storage that the group writes: the last ones swapped out, or new ones.

        New ones start as copies, for bytes that no checkpoint tensor fills (padding).
        """
        assert self._layout is not None
        spare, self._spare = self._spare, None
        if spare is not None:
            return spare.storages
        return {name: view.clone() for name, view in self._layout.own_storages().items()}

    def _load_second(self, segment: torch.Tensor) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """The whole skeleton in memory, filled by the engine's own loader from copies of the staged tensors."""
        assert self._manifest is not None and self._layout is not None
        manifest, skeleton = self._manifest, self._model.skeleton
        sources = _sources(manifest, segment)
        shapes = storage_views(skeleton)
        with self._model.lock, _materialised(skeleton, set(shapes), self._model.device) as held:
            real = dict(held.flats)
            live, own = self._layout.live_storages(), self._layout.own_storages()
            for name, flat in real.items():
                if name in live and live[name].numel() == flat.numel():
                    flat.copy_(live[name])
            self._model.load_weights(skeleton, ((name, view.clone()) for name, view in sources.items()))
            plain = {name: flat for name, flat in real.items() if name in own}
            return plain, {name: flat for name, flat in real.items() if name not in live}

    def _rebuild(
        self,
        segment: torch.Tensor,
        storages: Mapping[str, torch.Tensor],
        brake: Brake,
        loaded: Mapping[str, torch.Tensor] | None = None,
    ) -> Iterator[Aside]:
        """Every rebuilt module, one after the other, from the segment (or from what the loader filled)."""
        assert self._layout is not None
        live = self._layout.live_storages()
        for name in self._layout.rebuilt:
            keys = self._layout.aside_keys(name)
            if loaded is None:
                memory = {key: self._layout.new_storage(key) for key in keys}
                _spread(self._bind(segment, self._layout.plan_of(name), memory), brake)
            else:
                memory = {key: loaded[key] for key in keys}
            yield self._layout.finish_aside(name, {**live, **storages, **memory})
            brake(sum(t.nbytes for t in memory.values()))

    # --- the engine's thread -----------------------------------------------------------------------------------------

    def install(self, segment: torch.Tensor) -> None:
        """Swaps the prepared set in (`standby`), or writes the live parameters and rebuilds modules (`copy`)."""
        assert self._layout is not None
        if self._install == "standby":
            if self._prepared is None:
                raise CommitFailed("nothing was prepared for this transaction", phase="commit")
            prepared, self._prepared = self._prepared, None
            prepared.check_current()
            self._touched = True
            self._replaced = self._layout.swap(prepared, in_place=self._model.fixed_addresses)
        else:
            self._touched = True
            self._write(segment)
        self._settle()

    def undo(self, previous: torch.Tensor | None) -> None:
        """Swaps back, or writes the previous version's segment again. Raises `TornReplica` if that is gone."""
        assert self._layout is not None
        if not self._touched:
            return
        if self._install == "standby":
            if self._replaced is None:
                raise TornReplica("the swap stopped half-way", phase="commit")
            replaced, self._replaced = self._replaced, None
            undone = self._layout.swap(replaced, in_place=self._model.fixed_addresses)
            self._spare = Second(undone.moves, [])
        elif previous is None:
            raise TornReplica("the previous version's bytes are gone", phase="commit")
        else:
            self._write(previous)
        self._settle()
        self._touched = False

    def finish(self) -> None:
        """The replaced set becomes the next standby; what was packed goes."""
        self._touched = False
        if self._replaced is not None:
            replaced, self._replaced = self._replaced, None
            if self._mechanism == "plan":
                self._spare, replaced = Second(replaced.moves, []), Second([], replaced.asides)
            if replaced.asides or replaced.moves:
                # Giving back a packed model's memory takes tens of milliseconds, in which the engine can decode.
                threading.Thread(target=_free, args=([replaced],), name="weightwire-free", daemon=True).start()
                del replaced

    def discard(self) -> None:
        """Drops what was prepared; its plain storages stay as the next standby."""
        if self._prepared is not None:
            if self._mechanism == "plan":
                self._spare = Second(self._prepared.moves, [])
            self._prepared = None

    def close(self) -> None:
        """Frees the second set."""
        self._prepared = self._replaced = self._spare = None
        self._replays.clear()
        _trim()

    def forget_segments(self) -> None:
        """Drops the bound replays, which hold views of segments."""
        self._replays.clear()

    @property
    def claims(self) -> frozenset[str]:
        return self._layout.written if self._layout is not None else frozenset()

    @property
    def needs_previous(self) -> bool:
        return self._install == "copy"

    def _settle(self) -> None:
        """Waits for copies that a device only queued: the segment may be written again from here on."""
        if self._model.device.type != "cpu":
            torch.accelerator.synchronize(self._model.device)

    def _write(self, segment: torch.Tensor) -> None:
        assert self._layout is not None
        with torch.no_grad():
            self._replay(segment, "plain").run()
        live = self._layout.live_storages()
        for aside in self._rebuild(segment, live, lambda _: None):
            self._layout.apply(aside, in_place=self._model.fixed_addresses)

    # --- after the installation --------------------------------------------------------------------------------------

    def read_back(self) -> Iterator[BoxDigest | tuple[str, str]]:
        """Digests of what the live parameters hold, box by box of the checkpoint tensors."""
        if self._layout is None or self._manifest is None:
            return
        plain = self._layout.plan_of("plain")
        yield from self._digests(plain, self._layout.live_storages(), exact=True)
        computed = self._layout.read_computed()
        yield from self._digests([p for p in plain if p.dest.tensor in computed], computed, exact=False)
        for name in self._layout.rebuilt:
            storages = self._layout.read_rebuilt(name)
            if isinstance(storages, str):
                yield name, storages
            else:
                yield from self._digests(self._layout.plan_of(name), storages, exact=False)

    def _digests(self, placements: Any, storages: Mapping[str, torch.Tensor], *, exact: bool) -> Iterator[BoxDigest]:
        assert self._manifest is not None
        for source, offsets, sizes, tensor in read_back(placements, storages):
            data = tensor if exact else _unsigned_zeros(tensor)
            yield BoxDigest(
                name=self._manifest.tied.get(source, source),
                offsets=tuple(offsets),
                sizes=tuple(sizes),
                dtype=dtype_name(tensor.dtype),
                digest=digest_bytes(bytes_view(data.contiguous().cpu()).numpy()),
                signed_zeros=exact,
            )

    # --- helpers -----------------------------------------------------------------------------------------------------

    def _load_skeleton(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> object:
        return self._model.load_weights(self._model.skeleton, tensors)

    def _replay(self, segment: torch.Tensor, part: str) -> Replay:
        """The bound replay into the live parameters, kept for the segments that are used in turn."""
        assert self._layout is not None
        key = (segment.data_ptr(), part)
        replay = self._replays.get(key)
        if replay is None:
            replay = self._bind(segment, self._layout.plan_of(part), self._layout.live_storages())
            while len(self._replays) >= 2:
                self._replays.pop(next(iter(self._replays)))
            self._replays[key] = replay
        return replay

    def _bind(self, segment: torch.Tensor, placements: Any, destinations: Mapping[str, torch.Tensor]) -> Replay:
        assert self._manifest is not None and self._plan is not None
        assert self._layout is not None
        own = self._layout.written
        fills = [fill for fill in self._plan.fills if fill.dest.tensor in destinations and fill.dest.tensor in own]
        return Replay(placements, _sources(self._manifest, segment), destinations, fills)


def _tensor_infos(manifest: Manifest) -> list[TensorInfo]:
    """Every name the engine may ask for, tied ones included."""
    infos = [(spec.name, spec.shape, torch_dtype(spec.dtype)) for spec in manifest.tensors]
    for alias, name in manifest.tied.items():
        spec = manifest.tensors[manifest.index[name]]
        infos.append((alias, spec.shape, torch_dtype(spec.dtype)))
    return infos


def _sources(manifest: Manifest, segment: torch.Tensor) -> dict[str, torch.Tensor]:
    sources = {spec.name: box_view(segment, manifest, manifest.whole(i)) for i, spec in enumerate(manifest.tensors)}
    return sources | {alias: sources[name] for alias, name in manifest.tied.items()}


def _hull(a: Box, b: Box) -> Box:
    starts = tuple(map(min, a.offsets, b.offsets))
    ends = tuple(max(x + m, y + n) for x, m, y, n in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True))
    return Box(a.tensor, starts, tuple(end - start for start, end in zip(starts, ends, strict=True)))


def _spread(replay: Replay, brake: Brake) -> None:
    """A replay in pieces, with the brake between them."""
    with torch.no_grad():
        replay.run(between=brake)


def _unsigned_zeros(tensor: torch.Tensor) -> torch.Tensor:
    return tensor + 0 if tensor.is_floating_point() and tensor.element_size() > 1 else tensor


def _free(owned: list[Second]) -> None:
    """Drops the only reference to what `owned` holds, a while later and bit by bit: each bit holds the interpreter up."""
    rest = threading.Event()
    rest.wait(FREE_AFTER_S)
    for second in owned:
        while second.asides:
            second.asides.pop()
            rest.wait(FREE_REST_S)
    owned.clear()
    _trim()


def _trim() -> None:
    """Gives freed memory back to the system: without it the heap of a packed standby grows with every update."""
    gc.collect(0)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
