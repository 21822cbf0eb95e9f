"""The ways to get a checked segment into the live model, one class each.

What the engine does with a parameter after loading it divides the work:

- *plain*: the live parameter is what `load_weights` wrote. The placement plan copies its bytes from the segment.
- *rebuilt*: the engine's post-processing transformed it (packed it, for example). The engine's own post-processing rebuilds
  the module on a stand-in, from the segment, and the result is moved into the live module.

`CopyInstaller` writes the live parameters at the step boundary; `StagedInstaller` (`staged.py`) does so from the device's
own memory. `StandbyInstaller` prepares a second set in the background and swaps it in. `install`, `undo` and `finish` run on
the engine's own thread, and only they touch the live model.

Under every policy, a module whose post-processing reduces over the ranks (`collectives`) is rebuilt at the commit.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from inference_plugin.devices import device_of
from inference_plugin.install.agreement import Agreement
from inference_plugin.install.collectives import Operand, Share, own_share, shares_of
from inference_plugin.install.contract import Throttle
from inference_plugin.install.memory import ReturningMemory, ask_for_large_pages, free_later, return_freed_memory
from inference_plugin.install.plan import Placement
from inference_plugin.install.rebuilt import RebuiltModule
from inference_plugin.install.replay import Copies, Replay
from inference_plugin.install.standby import StandbyWeights
from inference_plugin.install.trial_load import poison
from inference_plugin.wire.errors import CommitFailed, EngineUnsupported, ProtocolError, TornReplica, first_few
from inference_plugin.wire.geometry import Box

__all__ = ["CopyInstaller", "PolicyInstaller", "StandbyInstaller", "Tensors", "WayBack", "poisoned_like"]

Tensors = Mapping[str, torch.Tensor]

RETURN_BYTES = 128 << 20
"""While modules are made anew, freed memory is given back each time that this process has grown by as much: else the heap keeps
what post-processing leaves behind, a model's worth of it or several."""


@dataclass
class WayBack:
    """What undoing an unconfirmed installation needs: whether it touched the live model, and the weights that it replaced.

    `shares`: those of all ranks for the version that is installed or being installed; `shares_before`: for the version before,
    while one is being installed.
    """

    touched: bool = False
    replaced: StandbyWeights | None = None
    shares: tuple[Share, ...] = ()
    shares_before: tuple[Share, ...] | None = None


class PolicyInstaller(abc.ABC):
    """What all policies have in common. `way_back` outlives new terms."""

    install_policy: Literal["copy", "standby", "streaming"]
    mechanism: Literal["plan", "loader"] = "plan"

    def __init__(self, agreement: Agreement, way_back: WayBack) -> None:
        self._agreement = agreement
        self._model = agreement.model
        self._layout = agreement.layout
        self._way_back = way_back
        self._operands: dict[str, list[Operand]] = {}
        """What this rank sends to the others for the prepared update, by module."""
        self._known: dict[tuple[str, frozenset[str]], Copies] = {}
        """What `_bind` has found out, by module and storages."""
        self._made_from: tuple[int, ...] | None = None
        """Which updates had written the storages of others from which something was made beforehand; None if nothing was."""

    def check(self, segment: torch.Tensor) -> None:
        """Raises `ManifestMismatch` if the bytes are such that the order of a load would decide what the engine holds."""
        if self._agreement.plan.repeats:
            self._agreement.check_repeats(self._agreement.tensors_in(segment))

    @property
    def holds_second_set(self) -> bool:
        """Whether the memory of a second set is held between updates."""
        return False

    @abc.abstractmethod
    def prepare(self, segment: torch.Tensor, throttle: Throttle) -> int:
        """The background half of an installation; returns the additional bytes that it holds."""

    def place(self, box: Box, tensor: torch.Tensor) -> None:
        raise ProtocolError(f"install={self.install_policy!r} takes whole updates only")

    def share(self) -> bytes:
        return own_share(self._operands)

    def install(self, segment: torch.Tensor, shares: Sequence[bytes] = ()) -> None:
        self._way_back.shares_before, self._way_back.shares = self._way_back.shares, shares_of(shares)
        self._drain()  # steps that the engine has queued still read the old weights
        self._model.note_updated(self._layout.written)
        self._put(segment)
        self._model.note_updated(self._layout.written)  # another group's preparation may have read some of it meanwhile
        self._drain()  # the segment may be written again from here on

    def undo(self, previous: torch.Tensor | None) -> None:
        """Raises `TornReplica` if the previous version is gone."""
        if self._way_back.shares_before is not None:  # else this rank failed before it began to install
            self._way_back.shares, self._way_back.shares_before = self._way_back.shares_before, None
        if self._way_back.touched:
            self._put_back(previous)
            self._model.note_updated(self._layout.written)
            self._drain()
            self._way_back.touched = False

    def finish(self) -> None:
        self._way_back.touched, self._way_back.shares_before = False, None
        replaced, self._way_back.replaced = self._way_back.replaced, None
        if replaced is not None:
            free_later(self._keep(replaced))

    @abc.abstractmethod
    def _put(self, segment: torch.Tensor) -> None:
        """Sets `way_back.touched` before it changes the live model."""

    @abc.abstractmethod
    def _put_back(self, previous: torch.Tensor | None) -> None: ...

    def _keep(self, weights: StandbyWeights) -> StandbyWeights:
        """Keeps those parts of a replaced set that the next update can use; returns the rest."""
        return weights

    def discard(self) -> None:  # noqa: B027 -- copy prepares nothing
        """Drops what was prepared."""

    def forget_segments(self) -> None:  # noqa: B027 -- standby keeps none
        """Drops views of segments."""

    def drop_second_set(self) -> None:  # noqa: B027 -- copy on the host has none
        """Frees the second set that the next update would use."""

    def close(self) -> None:
        """Frees everything but the live model."""
        self._way_back.replaced = None
        self.forget_segments()
        return_freed_memory()

    def _drain(self) -> None:
        """Returns once nothing reads or writes weights any more."""
        device_of(self._model.device).drain(self._model.device)

    def _check_fits(self, nbytes: int) -> None:
        """Before a second set is allocated: raises `EngineUnsupported`, with both numbers, if it no longer fits."""
        if nbytes > (free := self._model.free_share_bytes()):
            raise EngineUnsupported(
                f"a second set of {nbytes >> 20} MiB does not fit: {free >> 20} MiB are free for this rank",
                hint="free memory, or open the group with install='copy', which needs no second set if a plan was proven",
                phase="seal",
            )

    def _sources(self, segment: torch.Tensor) -> Tensors:
        """What placements read, as `_reading` makes them."""
        return self._agreement.segment_views(segment)

    def _reading(self, placements: list[Placement]) -> list[Placement]:
        """Placements as they read what `prepare` received."""
        return self._agreement.in_segment(placements)

    def _copies(self, placements: list[Placement], keys: Collection[str]) -> Copies:
        """These placements, and the constants that the loader writes into the storages `keys`."""
        return Copies(placements, [fill for fill in self._agreement.plan.fills if fill.dest.tensor in keys])

    def _bind(self, module: str, sources: Tensors, destinations: Tensors) -> Replay:
        """The copies into the storages from which `module` is rebuilt, or with "" into plain ones; found out once, because a
        model may have tens of thousands."""
        known = module, frozenset(destinations)
        if known not in self._known:
            placements = self._layout.rebuilt_placements[module] if module else self._layout.plain_placements
            self._known[known] = self._copies(self._reading(placements), destinations)
        return Replay(self._known[known], sources, destinations)

    def _fill_constants(self, storages: Tensors) -> None:
        """Writes what the engine's loader writes whatever the trainer sends."""
        with torch.inference_mode():
            for fill in self._agreement.plan.fills:
                if fill.dest.tensor in storages:
                    fill.dest.of(storages[fill.dest.tensor]).fill_(fill.value)

    def _rebuild(
        self, names: Iterable[str], sources: Tensors, storages: Tensors, throttle: Throttle
    ) -> Iterator[RebuiltModule]:
        """Rebuilds modules one after the other. `storages`: the plain storages of the update."""
        return_memory = ReturningMemory(RETURN_BYTES)
        for name in names:
            memory = self._memory_of(name, sources, throttle)
            yield self._layout.rebuild(name, {**storages, **memory}, self._way_back.shares)
            del memory
            return_memory()
            throttle()

    def _make_beforehand(self, sources: Tensors, storages: Tensors, throttle: Throttle) -> list[RebuiltModule]:
        """The modules that are rebuilt while the engine decodes. `storages`: as for `_rebuild`."""
        self._layout.keep_gaps(storages)
        self._made_from = self._others_written()
        return list(self._rebuild(self._layout.beforehand, sources, storages, throttle))

    def check_made(self) -> None:
        """Raises `CommitFailed` if another group has written what modules were rebuilt from beforehand."""
        if self._made_from not in (None, self._others_written()):
            raise CommitFailed(
                "another group has written parameters from which modules of this update were made: "
                f"{first_few(self._layout.others)}",
                hint="update again, or put these parameters into one group",
                phase="commit",
            )

    def _others_written(self) -> tuple[int, ...]:
        return tuple(map(self._model.written_at, self._layout.others))

    def _note_operands(self, sources: Tensors, plain: Callable[[str], Tensors], throttle: Throttle) -> None:
        """Notes what this rank sends to the others for the modules that are rebuilt at the commit. `plain`: returns, by module,
        the plain storages of the update from which the module is rebuilt."""
        self._operands = {}
        for name in self._layout.reducing:
            memory = self._memory_of(name, sources, throttle)
            self._operands[name] = self._layout.operands(name, {**plain(name), **memory})
            throttle()

    def _memory_of(self, module: str, sources: Tensors, throttle: Throttle) -> dict[str, torch.Tensor]:
        """The storages that exist only for rebuilding a module, filled."""
        memory = {key: self._layout.new_storage(key) for key in self._layout.rebuilt_keys(module)}
        self._bind(module, sources, memory).run(between=throttle)
        return memory


class CopyInstaller(PolicyInstaller):
    """Overwrites the live parameters. The way back is the segment of the previous version."""

    install_policy = "copy"

    KEPT = 2
    """Number of segments whose replay stays bound: the trainer uses them in turn."""

    def __init__(self, agreement: Agreement, way_back: WayBack) -> None:
        super().__init__(agreement, way_back)
        self._bound: dict[str, dict[int, Replay]] = {}

    def prepare(self, segment: torch.Tensor, throttle: Throttle) -> int:
        self._into_live(segment, self._layout.live_storages())  # so that the commit only copies
        sources = self._sources(segment)
        self._made_from = self._others_written() if self._layout.reducing else None
        self._note_operands(sources, lambda module: self._plain_of(module, sources), throttle)
        return 0

    def _plain_of(self, module: str, sources: Tensors) -> Tensors:
        """Copies of the live plain storages from which a module is rebuilt, with the values that the commit will write."""
        live = self._layout.own_storages()
        copies = {key: live[key].clone() for key in self._layout.plain_keys(module) if key in live}
        placements = [p for p in self._layout.plain_placements if p.dest.tensor in copies]
        Replay(self._copies(self._reading(placements), copies), sources, copies).run()
        return copies

    def _put(self, segment: torch.Tensor) -> None:
        live = self._layout.live_storages()
        replay = self._into_live(segment, live)
        self._way_back.touched = True
        self._write(replay, segment, live)

    def _put_back(self, previous: torch.Tensor | None) -> None:
        if previous is None:
            raise TornReplica("the previous version's bytes are gone", phase="commit")
        live = self._layout.live_storages()
        self._write(self._into_live(previous, live), previous, live)

    def forget_segments(self) -> None:
        self._bound.clear()

    def _write(self, replay: Replay, segment: torch.Tensor, live: Tensors) -> None:
        replay.run()
        for module in self._rebuild(self._layout.rebuilt, self._sources(segment), live, lambda: None):
            self._layout.move_in(module)
        self._layout.reset_references()

    def _into_live(self, segment: torch.Tensor, live: Tensors) -> Replay:
        return self._kept(
            "live", segment.data_ptr(), live, lambda: self._bind("", self._sources(segment), live).ready()
        )

    def _kept(self, kind: str, source: int, destinations: Tensors, bind: Callable[[], Replay]) -> Replay:
        """The replay of this kind that was bound to the memory at `source` before, or a new one: for a new source, and where the
        engine has given a parameter other memory since."""
        kept = self._bound.setdefault(kind, {})
        replay = kept.get(source)
        if replay is None or not replay.writes_to(destinations):
            while len(kept) >= self.KEPT:
                kept.pop(next(iter(kept)))
            replay = kept[source] = bind()
        return replay


class StandbyInstaller(PolicyInstaller):
    """Swaps a prepared set in. The replaced set is the way back, and afterwards the next standby."""

    install_policy = "standby"

    def __init__(self, agreement: Agreement, way_back: WayBack) -> None:
        super().__init__(agreement, way_back)
        self._prepared: StandbyWeights | None = None
        self._spare: StandbyWeights | None = None

    @property
    def holds_second_set(self) -> bool:
        return self._spare is not None

    def prepare(self, segment: torch.Tensor, throttle: Throttle) -> int:
        storages, modules = self._fill(segment, throttle)
        self._prepared = self._layout.second_set(storages, modules)
        return sum(t.nbytes for t in storages.values()) + self._layout.rebuilt_nbytes

    def _fill(self, segment: torch.Tensor, throttle: Throttle) -> tuple[dict[str, torch.Tensor], list[RebuiltModule]]:
        """The second set: storages of plain parameters by key, and rebuilt modules."""
        storages, sources = self._second_storages(), self._sources(segment)
        return storages, self._fill_rest(storages, sources, throttle)

    def _fill_rest(
        self, storages: dict[str, torch.Tensor], sources: Tensors, throttle: Throttle
    ) -> list[RebuiltModule]:
        """Copies what the plan places into the second set, and makes the rebuilt modules."""
        self._bind("", sources, storages).run(between=throttle)
        modules = self._make_beforehand(sources, storages, throttle)
        self._note_operands(sources, lambda _: storages, throttle)
        return modules

    def _make_at_commit(self, segment: torch.Tensor, storages: Tensors) -> list[RebuiltModule]:
        """The modules whose post-processing reduces over the ranks."""
        return list(self._rebuild(self._layout.reducing, self._sources(segment), storages, lambda: None))

    def _second_storages(self) -> dict[str, torch.Tensor]:
        """A storage for each plain storage that the group writes: those that were swapped out last, or new ones, which start as
        0xFF."""
        own = {} if self._spare is not None else self._layout.own_storages()
        self._check_fits(sum(t.nbytes for t in own.values()) + self._layout.rebuilt_nbytes)
        spare, self._spare = self._spare, None
        return spare.storages if spare is not None else {key: poisoned_like(live) for key, live in own.items()}

    def _put(self, segment: torch.Tensor) -> None:
        if self._prepared is None:
            raise CommitFailed("nothing was prepared for this transaction", phase="commit")
        if self._layout.gaps:
            self._layout.keep_gaps(self._prepared.storages)
        if self._layout.reducing:
            self._prepared.modules += self._make_at_commit(segment, self._prepared.storages)
        prepared, self._prepared = self._prepared, None
        prepared.check_current()
        self._way_back.touched = True
        try:
            self._way_back.replaced = self._layout.swap(prepared)
        except CommitFailed:
            self._way_back.touched = False
            raise
        self._layout.reset_references()

    def _put_back(self, previous: torch.Tensor | None) -> None:
        replaced, self._way_back.replaced = self._way_back.replaced, None
        if replaced is None:
            raise TornReplica("the swap stopped half-way", phase="commit")
        self._keep(self._layout.swap(replaced))
        self._layout.reset_references()

    def _keep(self, weights: StandbyWeights) -> StandbyWeights:
        self._spare = StandbyWeights(weights.tensors, weights.data, [])
        return StandbyWeights([], [], weights.modules)

    def discard(self) -> None:
        if self._prepared is not None:
            self._keep(self._prepared)
            self._prepared = None

    def drop_second_set(self) -> None:
        self._spare = None
        return_freed_memory()

    def close(self) -> None:
        self._prepared = self._spare = None
        super().close()


def poisoned_like(tensor: torch.Tensor) -> torch.Tensor:
    """New memory for a storage, which starts as 0xFF."""
    memory = torch.empty_like(tensor)
    ask_for_large_pages(memory)
    poison(memory)
    return memory
