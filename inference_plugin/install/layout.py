"""Sorts the storages of a live model: an update copies them (*plain*), the engine rebuilds them (*rebuilt*), or they stay."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from functools import cached_property

import torch

from inference_plugin.install.collectives import Operand, Reduced, Share
from inference_plugin.install.contract import EngineModel
from inference_plugin.install.graph import words
from inference_plugin.install.live_storages import LiveStorages
from inference_plugin.install.padding import Padding
from inference_plugin.install.plan import Fill, Placement, PlacementPlan
from inference_plugin.install.post_processing import PostProcessing
from inference_plugin.install.rebuilt import RebuiltModule, operands, rebuild
from inference_plugin.install.references import LiveReferences
from inference_plugin.install.standby import LiveTensor, StandbyWeights
from inference_plugin.install.storages import equal_bytes, flat, held_tensors, named_tensors
from inference_plugin.install.trial_load import poison
from inference_plugin.install.trials import needs_no_checkpoint, run_trials
from inference_plugin.install.unpacking import Unpacking
from inference_plugin.wire.errors import EngineUnsupported, ManifestMismatch, first_few

__all__ = ["LiveLayout"]


class LiveLayout:
    """A live model under a placement plan.

    `ties`: what `live_ties` returned. `loaded`: the storages that the engine's own loader writes; empty if the plan does. Raises
    `EngineUnsupported` if post-processing can't be repeated, or if a trial of it takes more than `free_bytes`.
    """

    def __init__(
        self,
        model: EngineModel,
        plan: PlacementPlan,
        ties: Mapping[str, str],
        loaded: Collection[str],
        free_bytes: float,
    ) -> None:
        self._model = model
        self._plan = plan
        self._storages = LiveStorages(model, ties)
        self._key_of = self._storages.key_of
        self._post = PostProcessing(self._storages, plan.extents)
        self._trials = run_trials(self._post, free_bytes)
        rebuilt = {name: trial.replaced for name, trial in self._trials.items() if trial.rebuilds}
        own_form = {self._key_of[f"{module}.{name}"] for module, names in rebuilt.items() for name in names}
        own_form |= {key for module in rebuilt for key in self._removed_keys(module)}
        placed = {placement.dest.tensor for placement in plan.placements}
        self.written = frozenset(placed | {ties.get(key, key) for key in (*plan.refused, *loaded)})
        """The storages that updates write, by key."""
        made = {self._key_of.get(f"{m}.{name}", "") for m, trial in self._trials.items() for name in trial.writes}
        self._plain = self._storages.unchanged().keys() - own_form - (made - self.written)  # made of the constructor's
        # A group that holds a part of the model leaves those modules alone in which it writes nothing.
        self.rebuilt = {
            name: parts
            for name, parts in rebuilt.items()
            if not (keys := self._keys_of(name)) or not keys.isdisjoint(self.written)
        }
        """The parameters that the engine transforms, by rebuilt module."""
        self.reducing = tuple(name for name in self.rebuilt if self._trials[name].reductions)
        """Rebuilt modules whose post-processing reduces over the ranks: they are rebuilt at the commit."""
        self.beforehand = tuple(name for name in self.rebuilt if name not in self.reducing)
        """Rebuilt modules that are rebuilt before the commit, while the engine decodes."""
        self.others = tuple(sorted(set().union(*map(self._keys_of, self.rebuilt)) & self._plain - self.written))
        """Plain storages, by key, from which modules are rebuilt and that the group leaves to others."""
        self.unaccounted = sorted(placed - self._plain - own_form)
        """Storages that the engine holds in another form, which its post-processing doesn't explain."""
        self.rebuilt_placements: dict[str, list[Placement]] = {name: [] for name in self.rebuilt}
        """By rebuilt module: the placements into the storages that exist only for rebuilding it."""
        self.plain_placements: list[Placement] = []
        owners: dict[str, list[str]] = {}
        for name in self.rebuilt:
            for key in self.rebuilt_keys(name):
                owners.setdefault(key, []).append(name)
        for placement in plan.placements:
            key = placement.dest.tensor
            if key in self._plain:
                self.plain_placements.append(placement)
            for name in owners.get(key, ()):
                self.rebuilt_placements[name].append(placement)
        self._references = LiveReferences(self._post, self._trials, self.written, plan)
        self._uncovered = {self._key_of[name] for name in plan.uncovered} | plan.gapped
        """Storages of which the plan leaves elements unwritten."""
        self.gaps = plan.gaps(plan.gapped & self.written & self._plain)
        """The ranges of elements that an update leaves as they are in storages that it writes in part, by key."""
        self._padding = Padding(self._post, plan, self._uncovered)

    # --- the parts of the model --------------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Bytes of this worker's shard, in the checkpoint's form."""
        return sum(shape.nbytes for shape in self._storages.shapes.values())

    @property
    def rebuilt_nbytes(self) -> int:
        return sum(self._storages.shapes[key].nbytes for name in self.rebuilt for key in self.rebuilt_keys(name))

    @property
    def derived(self) -> tuple[str, ...]:
        """Names of what the engine's post-processing derives from the parameters that an update writes."""
        trials = {name: self._trials[name] for name in self.rebuilt}
        made = {name: (*t.moved, *((n,) for n in t.buffers | t.added)) for name, t in trials.items()}
        return tuple(sorted(words(name, path) for name, paths in made.items() for path in paths))

    @property
    def untouched(self) -> tuple[str, ...]:
        """Parameters and buffers of the live model that an update neither writes nor derives."""
        derived = set(self.derived)
        left = (n for n, t, _ in named_tensors(self._model.live) if t.numel() and n not in derived)
        return tuple(sorted(n for n in left if self._key_of.get(n) not in self.written))

    @property
    def unexplained(self) -> list[str]:
        """Tensors on live modules that an update might leave behind: parameters and buffers that neither the model's class nor
        post-processing made, and tensors in attributes (see `LiveReferences.unexplained`)."""
        modules = [self._post.live_modules[name] for name in self._trials]
        made = {
            id(tensor) for module in modules for tensor in (*module._parameters.values(), *module._buffers.values())
        }
        held = named_tensors(self._model.live)
        strangers = [n for n, t, _ in held if t.numel() and n not in self._key_of and id(t) not in made]
        return [*strangers, *self._references.unexplained]

    def is_current(self) -> bool:
        """Whether the live model has the modules that it had when this was made."""
        return self._post.is_current()

    def check_current(self) -> None:
        """Raises `ManifestMismatch` if it has others: an update would write the old ones."""
        if not self.is_current():
            raise ManifestMismatch(
                "somebody has put other modules into the engine's model since the group was opened",
                hint="the next update opens the group again by itself",
            )

    def check_apart(self) -> None:
        """Raises `EngineUnsupported` if the engine computes with parameters that are not registered in its model."""
        if apart := self._references.apart:
            raise EngineUnsupported(
                f"the engine keeps parameters outside its model, where no update reaches them: {first_few(apart)}",
                hint="if the trainer leaves these as they are, send the others as a part of the model (partial=True)",
                phase="open",
            )

    def needs_no_checkpoint(self, parameter: str) -> bool:
        """Whether this parameter is right although no checkpoint tensor fills it, or all of it: post-processing does."""
        module, _, name = parameter.rpartition(".")
        keys = self._plan.extents.keys() & (self.rebuilt_keys(module) if module in self.rebuilt else ())
        padded = self._key_of[parameter] in keys and self._padding.is_overwritten(module, keys)
        return padded or needs_no_checkpoint(self._post, module, name)

    def leaves(self, parameter: str) -> bool:
        """Whether this parameter is as it was when the engine started, stays so, and nothing is derived from it. In a module that
        each update makes anew: whether the update takes the constructor's value, as a load does that doesn't write it."""
        key, module = self._key_of[parameter], parameter.rpartition(".")[0]
        anew = module in self.rebuilt and key in self._model.constants
        return key not in self.written and (not self._model.written_at(key) if key in self._plain else anew)

    def keeps(self, parameter: str) -> bool:
        """Whether updates leave what the live model has of this parameter in its place."""
        return self._key_of[parameter] in self._plain - self.written

    def halved(self) -> list[str]:
        """Rebuilt modules of whose parameters the group holds only a part: the engine rebuilds a module as a whole."""
        return [name for name in self.rebuilt if not self._padding.is_overwritten(name, self.rebuilt_keys(name))]

    def filled_over(self) -> list[str]:
        """Storages that the loader would fill with constants that the live model doesn't hold: the trainer's tensor is too small.
        Without modules that the engine pads: an engine that started with random weights has them in the padding as well."""
        live, wrong = self.live_storages(), list[str]()
        for fill in self._plan.fills:
            key = fill.dest.tensor
            if key in live and not self._model.pads(self._post.live_modules[key.rpartition(".")[0]]):
                held = fill.dest.of(live[key])
                if not bool((held == fill.value).all()) and (count := self._left_filled(fill, live[key])):
                    wrong.append(f"{key} ({count} elements)")
        return wrong

    def _left_filled(self, fill: Fill, live: torch.Tensor) -> int:
        """The number of elements that keep the constant after a load (tensors are copied over it), if the live model holds others
        in some of them."""
        left = torch.ones_like(live, dtype=torch.bool)
        for placement in self._plan.placements:
            if placement.dest.tensor == fill.dest.tensor:
                placement.dest.of(left).fill_(False)
        kept = fill.dest.of(left)
        return int(kept.sum()) if bool((kept & (fill.dest.of(live) != fill.value)).any()) else 0

    def unwritten_buffers(self) -> dict[str, bool]:
        """Buffers that a checkpoint may hold and that an update neither writes nor derives; for each, whether the live model
        holds the constructor's value. Of those that it writes in part, the ones whose rest holds other values."""
        found: dict[str, bool] = {}
        for name, module in self._post.live_modules.items():
            trial = self._trials.get(name)
            for own_name, held in module._buffers.items():
                full = f"{name}.{own_name}" if name else own_name
                constant = self._model.constants.get(full)
                if held is None or not held.numel() or own_name in module._non_persistent_buffers_set:
                    continue
                derived = trial is not None and (own_name in trial.buffers or (own_name,) in trial.settled)
                if constant is None or derived:
                    continue
                if (key := self._key_of.get(full, "")) not in self.written:
                    found[full] = equal_bytes(held, constant)
                elif any(not equal_bytes(flat(held)[a:b], flat(constant)[a:b]) for a, b in self.gaps.get(key, ())):
                    found[full] = False
        return found

    # --- plain storages ----------------------------------------------------------------------------------------------

    def live_storages(self) -> dict[str, torch.Tensor]:
        """Each plain storage of the live model as a flat tensor, by key. Raises `ManifestMismatch` if one that the group writes
        has changed its form. Others may, such as a table of rotary embeddings that takes the dtype of the first step."""
        live = self._storages.unchanged()
        if gone := sorted((self._plain & self.written) - live.keys()):
            raise ManifestMismatch(
                f"the engine has changed the size or dtype of these since the group was opened: {first_few(gone)}",
                hint="start the engine anew, or undo that",
            )
        return {key: live[key] for key in self._plain & live.keys()}

    def own_storages(self) -> dict[str, torch.Tensor]:
        """The live storages that the group writes."""
        return {key: storage for key, storage in self.live_storages().items() if key in self.written}

    def keep_gaps(self, storages: Mapping[str, torch.Tensor]) -> None:
        """Copies the live values of elements that the group leaves unwritten: before modules are rebuilt from these storages, and
        again at the commit, because the engine may write such elements."""
        live = self.live_storages() if self.gaps else {}
        for key in self.gaps.keys() & storages.keys():
            for start, stop in self.gaps[key]:
                storages[key][start:stop].copy_(live[key][start:stop])

    def second_set(self, storages: Mapping[str, torch.Tensor], modules: list[RebuiltModule]) -> StandbyWeights:
        """The set that replaces the live storages by `storages`, by key, and modules by rebuilt ones. Made in the background, so
        that the swap is short for any size of model."""
        self.live_storages()  # raises if one changed its form
        tensors = list(self._held(storages))
        data: list[torch.Tensor] = []
        for key, _, _, tensor in tensors:
            other = storages[key]
            whole = other if other.dtype == tensor.dtype else other.view(tensor.dtype)
            data.append(whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()))
        return StandbyWeights(tensors, data, modules)

    def is_whole(self, second: StandbyWeights) -> bool:
        """Whether a set that was made for an earlier update still replaces all that the group writes: the engine has replaced
        no tensor since."""
        live = [each.tensor for each in self._held(self.written & self._plain)]
        replaced = [each.tensor for each in second.tensors]
        return len(live) == len(replaced) and all(map(operator.is_, live, replaced))

    def _held(self, keys: Container[str]) -> Iterator[LiveTensor]:
        """The live model's tensors in the storages of these keys, each once."""
        seen: set[int] = set()
        all_held = held_tensors(self._model.live)
        held = (LiveTensor(self._key_of.get(n, ""), holder, own, tensor) for n, holder, own, tensor in all_held)
        for live in itertools.chain(held, self._references.views):
            if live.key in keys and id(live.tensor) not in seen:
                seen.add(id(live.tensor))
                yield live

    def swap(self, second: StandbyWeights) -> StandbyWeights:
        """Engine's thread: replaces the live set by a second set; returns the replaced set. `CommitFailed`: it is as it was."""
        return second.swap(self._post.live_modules, in_place=self._model.fixed_addresses)

    # --- rebuilt modules ---------------------------------------------------------------------------------------------

    def rebuilt_keys(self, module: str) -> list[str]:
        """The storages that exist only for rebuilding `module`."""
        own = {self._key_of[f"{module}.{name}"] for name in self.rebuilt[module]}
        return sorted((own | self._read_keys(module)) - self._plain)

    @cached_property
    def rebuilding(self) -> dict[str, torch.Tensor]:
        """The storages, on meta, that exist only for rebuilding modules and that a load writes, by key."""
        keys = (p.dest.tensor for placements in self.rebuilt_placements.values() for p in placements)
        return {key: self._storages.shapes[key] for key in keys}

    def plain_keys(self, module: str) -> list[str]:
        """The plain storages that `module` is also rebuilt from."""
        return sorted(self._keys_of(module) & self._plain)

    def new_storage(self, key: str) -> torch.Tensor:
        """Memory for a storage, which has its first bytes if a load by the plan may leave some of them unwritten."""
        shape = self._storages.shapes[key]
        storage = torch.empty(shape.shape, dtype=shape.dtype, device=self._storages.device_of(key))
        if key in self._model.constants or key not in self._plan.extents or key in self._uncovered:
            self.start_storage(key, storage)
        return storage

    def start_storage(self, key: str, storage: torch.Tensor) -> None:
        """Gives a storage the bytes that it has in the engine before a load: the constructor's value if that is known, else
        0xFF."""
        if (constant := self._model.constants.get(key)) is not None and constant.numel() == storage.numel():
            storage.copy_(constant.reshape(-1))
        else:
            poison(storage)

    def operands(self, module: str, updated: Mapping[str, torch.Tensor]) -> list[Operand]:
        """This rank's part of what the module's post-processing reduces over the ranks."""
        return operands(self._post, module, self._trials[module], updated, self._plain)

    def rebuild(self, module: str, updated: Mapping[str, torch.Tensor], shares: Sequence[Share] = ()) -> RebuiltModule:
        """The module's new parts, from the storages of an update by key; see `rebuilt.rebuild`. `shares`: those of all ranks, for
        modules in `reducing`."""
        answers = Reduced(module, shares) if module in self.reducing else None
        return rebuild(self._post, module, self._trials[module], updated, self._plain, answers)

    def move_in(self, rebuilt: RebuiltModule, *, in_place: bool = False) -> None:
        """Engine's thread: puts a rebuilt module's parts into the live module. `in_place`: nothing live may lie in the memory in
        which they were made."""
        live = self._post.live_modules[rebuilt.module]
        rebuilt.move_into(live, in_place=in_place or self._model.fixed_addresses)

    def look_at_references(self) -> None:
        """Any thread; see `LiveReferences.look`."""
        self._references.look()

    def check_references(self) -> None:
        """Engine's thread, between two steps; see `LiveReferences.check`."""
        self._references.check()

    def reset_references(self) -> None:
        """Engine's thread, after the live storages were written; see `LiveReferences.reset`."""
        self._references.reset()

    # --- reading back ------------------------------------------------------------------------------------------------

    def unpacking(self) -> Unpacking:
        """For `read_rebuilt`; a caller that reads many modules uses one for all of them."""
        return Unpacking(self._post, self._trials)

    def read_rebuilt(self, module: str, unpacking: Unpacking) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """The plain parameters that a rebuilt live module computes with, flat, by key; and the reasons why others can't be
        read, by key."""
        found, unreadable = dict[str, torch.Tensor](), dict[str, str]()
        for parameter in self.rebuilt[module]:
            key = self._key_of[f"{module}.{parameter}"]
            if key in self._plain:
                continue
            read = self._read(module, parameter)
            if read is None and (read := unpacking.read(module, parameter)) is None:
                unreadable[key] = f"the engine's form of {parameter} can't be read back"
            else:
                found[key] = read
        for key in self._read_keys(module) - self._plain:
            if (read := unpacking.read_derived(module, key)) is not None:
                found[key] = read
            elif key in self._removed_keys(module):
                unreadable[key] = f"the engine keeps only what it computed from {key}"
        return found, unreadable

    def read_computed(self, unpacking: Unpacking) -> dict[str, torch.Tensor]:
        """The values, by key, of plain parameters that rebuilt modules hold a second time in the form that they compute with;
        only of those that can be read."""
        found: dict[str, torch.Tensor] = {}
        plain = self._plain & self.written
        for name in self.rebuilt:
            for parameter, held in self._post.skeleton_modules[name]._parameters.items():
                key = self._key_of[f"{name}.{parameter}"] if held is not None else ""
                if key in plain and (read := self._read(name, parameter)) is not None:
                    found[key] = read
            for key in self._read_keys(name) & plain:
                if (read := unpacking.read_derived(name, key)) is not None:
                    found[key] = read
        return found

    def _read(self, module: str, parameter: str) -> torch.Tensor | None:
        meta = self._post.skeleton_modules[module]._parameters[parameter]
        assert meta is not None
        with self._model.computing():
            live = self._post.live_modules[module]
            plain = self._model.read_rebuilt(live, parameter, tuple(meta.shape), meta.dtype)
        return None if plain is None else plain.reshape(-1)

    # --- helpers -----------------------------------------------------------------------------------------------------

    def _keys_of(self, module: str) -> set[str]:
        """The storages of a module's own parameters, and those of the modules that its post-processing reads."""
        parameters = self._post.skeleton_modules[module]._parameters
        own = {self._key_of[f"{module}.{name}"] for name, tensor in parameters.items() if tensor is not None}
        return own | self._read_keys(module)

    def _read_keys(self, module: str) -> set[str]:
        """The storages of the modules that the post-processing of `module` reads."""
        return set().union(*map(self._keys_of, self._post.read_by(module).values()))

    def _removed_keys(self, module: str) -> set[str]:
        """The storages of modules that the post-processing of `module` reads, and that the live model no longer has."""
        gone = (read for read in self._post.read_by(module).values() if read not in self._post.live_modules)
        return set().union(*map(self._keys_of, gone))
