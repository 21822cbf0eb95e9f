"""How a live model lies in memory beside its skeleton, which of its modules the engine rebuilds after loading, and how a
second set takes the place of the first."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from inference_plugin.install.contract import EngineModel
from inference_plugin.install.plan import PlacementPlan, storage_views
from inference_plugin.install.proof import with_data
from inference_plugin.wire.errors import CommitFailed, first_few
from inference_plugin.wire.tensors import bytes_view

__all__ = ["Aside", "LiveLayout", "Move", "Second"]


@dataclass
class Aside:
    """A rebuilt module's new parts: what differs from the live module's, attributes and tensors by name."""

    module: str
    attributes: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors.values())


class Move(NamedTuple):
    """One live tensor and the data it is to hold: `holder[name] is tensor`, and `key` names its storage."""

    key: str
    holder: dict[str, Any]
    name: str
    tensor: torch.Tensor
    data: torch.Tensor


@dataclass
class Second:
    """A complete second set, ready to be swapped in: data of plain parameters, parts of rebuilt modules."""

    moves: list[Move]
    asides: list[Aside]

    @property
    def storages(self) -> dict[str, torch.Tensor]:
        """The plain storages of the set, flat, by their keys."""
        found: dict[str, torch.Tensor] = {}
        for move in self.moves:
            if move.key not in found:
                found[move.key] = _flat(move.data)
        return found

    def check_current(self) -> None:
        """Raises `CommitFailed` where the engine replaced a parameter since the set was made."""
        if gone := [move.key for move in self.moves if move.holder.get(move.name) is not move.tensor]:
            raise CommitFailed(
                f"the engine replaced parameters while the update was prepared: {first_few(gone)}",
                hint="the next update prepares anew",
                phase="commit",
            )


class LiveLayout:
    """How the live model's storages correspond to the skeleton's, which modules are rebuilt, and the swap."""

    def __init__(self, model: EngineModel, plan: PlacementPlan) -> None:
        self._model = model
        self._plan = plan
        self._finishers = dict(model.finishers())
        self._skeleton_modules = dict(model.skeleton.named_modules())
        self._live_modules = dict(model.live.named_modules())
        self._shapes = storage_views(model.skeleton)
        self._key_of = _keys_by_name(model.skeleton)
        self.rebuilt: dict[str, frozenset[str]] = {}
        trial: dict[Any, frozenset[str] | None] = {}
        for name in self._finishers:
            kind = self._kind(name)
            if kind not in trial:
                trial[kind] = self._try_finishing(name)
            if (replaced := trial[kind]) is not None:
                self.rebuilt[name] = replaced
        own_form = {self._key_of[f"{m}.{p}"] for m, ps in self.rebuilt.items() for p in ps}
        live = self._live_by_key()
        self._plain = {key for key in self._shapes if key not in own_form and key in live}
        self.written = frozenset(p.dest.tensor for p in plan.placements) | frozenset(plan.refused)
        self._own = frozenset(self._shapes) if plan.refusal is not None else self.written
        # A group that is a part of the model leaves alone what it doesn't write.
        self.rebuilt = {
            name: parts
            for name, parts in self.rebuilt.items()
            if not (keys := self._keys_of(name)) or not keys.isdisjoint(self._own)
        }
        self.unaccounted = sorted(
            key for key in {p.dest.tensor for p in plan.placements} if key not in self._plain and key not in own_form
        )
        self._placements: dict[str, list[Any]] = {"plain": [], **{name: [] for name in self.rebuilt}}
        owner = {key: name for name in self.rebuilt for key in self.aside_keys(name)}
        for placement in plan.placements:
            key = placement.dest.tensor
            if key in self._plain or key in owner:
                self._placements["plain" if key in self._plain else owner[key]].append(placement)

    @property
    def nbytes(self) -> int:
        """Bytes of this worker's shard as the checkpoint has it."""
        return sum(view.nbytes for view in self._shapes.values())

    @property
    def rebuilt_nbytes(self) -> int:
        return sum(self._shapes[key].nbytes for name in self.rebuilt for key in self.aside_keys(name))

    def plan_of(self, part: str) -> list[Any]:
        """Placements into plain parameters ("plain") or into one rebuilt module's."""
        return self._placements[part]

    def aside_keys(self, module: str) -> list[str]:
        """Storages that exist only aside, for building `module`."""
        return sorted({self._key_of[f"{module}.{p}"] for p in self.rebuilt[module]} - self._plain)

    def new_storage(self, key: str) -> torch.Tensor:
        shape = self._shapes[key]
        return torch.zeros(shape.shape, dtype=shape.dtype, device=self._device(key))

    def live_storages(self) -> dict[str, torch.Tensor]:
        """Each plain storage of the live model as a flat tensor, by its key."""
        live = self._live_by_key()
        return {key: live[key] for key in self._plain}

    def own_storages(self) -> dict[str, torch.Tensor]:
        """Those of the live storages that the group writes."""
        return {key: flat for key, flat in self.live_storages().items() if key in self._own}

    def halved(self) -> list[str]:
        """Modules that the engine rebuilds as one, of whose parameters the group has a part only."""
        found = []
        for name in self.rebuilt:
            missing = self._plan.uncovered.keys() & self.aside_keys(name)
            if self._model.pads(self._live_modules[name]):  # else what is left at the end is another group's
                missing -= set(self._plan.padding)
            if missing:
                found.append(name)
        return found

    def filled_over(self) -> list[str]:
        """Where the loader fills in constants that the live model doesn't hold: what was sent is too small.

        Modules that the engine pads are left out: started with random weights, it has them in the padding as well.
        """
        live = self.live_storages()
        wrong = []
        for fill in self._plan.fills:
            key = fill.dest.tensor
            if key in live and not self._model.pads(self._live_modules[key.rpartition(".")[0]]):
                held = fill.dest.of(live[key])
                if not bool((held == fill.value).all()):
                    wrong.append(f"{key} ({held.numel()} elements)")
        return wrong

    def finish_aside(self, module: str, storages: Mapping[str, torch.Tensor]) -> Aside:
        """Runs the engine's post-processing on a stand-in for `module` that holds `storages`; what came of it."""
        stand_in = self._stand_in(module, storages)
        before = dict(stand_in.__dict__)
        given = dict(stand_in._buffers)
        with self._model.computing():
            self._finishers[module](stand_in)
        live = self._live_modules[module]
        aside = Aside(module)
        for name, value in stand_in.__dict__.items():
            if name not in ("_parameters", "_buffers", "_modules") and before.get(name, _ABSENT) is not value:
                aside.attributes[name] = value
        made: dict[str, torch.Tensor | None] = {**stand_in._parameters, **stand_in._buffers}
        for name, made_tensor in made.items():
            if made_tensor is None or (name in given and made_tensor is given[name]):
                continue
            if self._key_of.get(f"{module}.{name}") not in self._plain and name in {
                **live._parameters,
                **live._buffers,
            }:
                aside.tensors[name] = made_tensor.detach()
        return aside

    def apply(self, aside: Aside, *, in_place: bool) -> Aside:
        """Moves a rebuilt module's parts into the live module; returns those it had."""
        live = self._live_modules[aside.module]
        old = Aside(aside.module)
        for name, value in aside.attributes.items():
            old.attributes[name] = live.__dict__.get(name)
            live.__dict__[name] = value
        for name, tensor in aside.tensors.items():
            holder = live._parameters if name in live._parameters else live._buffers
            held = holder[name]
            assert held is not None
            if in_place and held.shape == tensor.shape:
                old.tensors[name] = held.detach().clone()
                held.data.copy_(tensor)
            else:
                old.tensors[name] = held.data
                held.data = tensor
        return old

    def moves(self, storages: Mapping[str, torch.Tensor]) -> list[Move]:
        """What puts `storages`, by key, in the place of the live ones; made in the background, so that the swap is
        short whatever the size of the model."""
        moves: list[Move] = []
        seen: set[int] = set()
        for name, holder, own_name, tensor in _held_tensors(self._model.live):
            other = storages.get(self._key_of.get(name, ""))
            if other is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                data = other.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
                moves.append(Move(self._key_of[name], holder, own_name, tensor, data))
        return moves

    def swap(self, second: Second, *, in_place: bool) -> Second:
        """Puts a second set in the place of the live one; returns what was there. No bytes move unless `in_place`."""
        replaced = Second([], [])
        for move in second.moves:
            tensor = move.tensor
            held = tensor.data
            replaced.moves.append(move._replace(data=held.clone() if in_place else held))
            if in_place:
                held.copy_(move.data)
            else:
                tensor.data = move.data
        for aside in second.asides:
            replaced.asides.append(self.apply(aside, in_place=in_place))
        return replaced

    def read_rebuilt(self, module: str) -> dict[str, torch.Tensor] | str:
        """The plain parameters that a rebuilt live module computes with; a reason if they can't be read."""
        found: dict[str, torch.Tensor] = {}
        for parameter in self.rebuilt[module]:
            key = self._key_of[f"{module}.{parameter}"]
            if key in self._plain:
                continue
            meta = self._skeleton_modules[module]._parameters[parameter]
            assert meta is not None
            with self._model.computing():
                plain = self._model.read_rebuilt(self._live_modules[module], parameter, tuple(meta.shape), meta.dtype)
            if plain is None:
                return f"the engine's form of {parameter} can't be read back"
            found[key] = plain.reshape(-1)
        return found

    def read_computed(self) -> dict[str, torch.Tensor]:
        """Of rebuilt modules whose parameters stay plain beside the form that they compute with: what that form holds, by
        the parameters' keys; without those that can't be read."""
        found: dict[str, torch.Tensor] = {}
        for name in self.rebuilt:
            for parameter, meta in self._skeleton_modules[name]._parameters.items():
                if meta is None or (key := self._key_of[f"{name}.{parameter}"]) not in self._plain & self._own:
                    continue
                with self._model.computing():
                    plain = self._model.read_rebuilt(self._live_modules[name], parameter, tuple(meta.shape), meta.dtype)
                if plain is not None:
                    found[key] = plain.reshape(-1)
        return found

    def _kind(self, module: str) -> Any:
        stand_in = self._skeleton_modules[module]
        return (
            type(stand_in),
            type(getattr(stand_in, "quant_method", None)),
            tuple((n, tuple(p.shape), p.dtype) for n, p in stand_in._parameters.items() if p is not None),
            tuple(
                sorted(n for n, p in self._live_modules[module]._parameters.items() if p is not None and p.numel() == 0)
            ),
        )

    def _keys_of(self, module: str) -> set[str]:
        """The storages that a module's own parameters lie in."""
        parameters = self._skeleton_modules[module]._parameters
        return {self._key_of[f"{module}.{name}"] for name, tensor in parameters.items() if tensor is not None}

    def _try_finishing(self, module: str) -> frozenset[str] | None:
        """The parameters that post-processing makes something else of; None if it changes nothing at all."""
        storages = {key: self.new_storage(key) for key in self._keys_of(module)}
        for flat in storages.values():
            bytes_view(flat).random_(0, 64)
        stand_in = self._stand_in(module, storages)
        given = dict(stand_in._parameters)
        before = {name: p.detach().clone() for name, p in given.items() if p is not None}
        attributes = dict(stand_in.__dict__)
        with self._model.computing():
            self._finishers[module](stand_in)
        live = self._live_modules[module]
        replaced = {
            name
            for name, old in before.items()
            if (now := stand_in._parameters.get(name)) is None
            or now is not given[name]
            or now.shape != old.shape
            or now.dtype != old.dtype
            or not torch.equal(bytes_view(now.detach().contiguous()), bytes_view(old.contiguous()))
        }
        changed = any(
            attributes.get(name, _ABSENT) is not value and live.__dict__.get(name, _ABSENT) is not value
            for name, value in stand_in.__dict__.items()
            if name not in ("_parameters", "_buffers", "_modules")
        )
        return frozenset(replaced) if replaced or changed else None

    def _stand_in(self, module: str, storages: Mapping[str, torch.Tensor]) -> nn.Module:
        """A copy of the skeleton's module whose parameters are views of `storages`."""
        original = self._skeleton_modules[module]
        stand_in: nn.Module = copy.copy(original)
        stand_in.__dict__ = dict(original.__dict__)
        stand_in._parameters = {}
        stand_in._buffers = dict(original._buffers)
        for name, meta in original._parameters.items():
            if meta is None:
                stand_in._parameters[name] = None
                continue
            flat = storages[self._key_of[f"{module}.{name}"]]
            data = flat.as_strided(meta.shape, meta.stride(), meta.storage_offset())
            stand_in._parameters[name] = cast(nn.Parameter, with_data(meta, data))
        return stand_in

    def _live_by_key(self) -> dict[str, torch.Tensor]:
        """Live storages that have the skeleton's size and dtype, as flat tensors."""
        found: dict[str, torch.Tensor] = {}
        for name, tensor in _named_tensors(self._model.live):
            key = self._key_of.get(name)
            if key is None or key in found:
                continue
            flat = _flat(tensor)
            if flat.dtype == self._shapes[key].dtype and flat.numel() == self._shapes[key].numel() and flat.numel():
                found[key] = flat
        return found

    def _device(self, key: str) -> torch.device:
        for name, tensor in _named_tensors(self._model.live):
            if self._key_of.get(name) == key:
                return tensor.device
        return torch.device("cpu")


_ABSENT = object()


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _held_tensors(model: nn.Module) -> Iterator[tuple[str, dict[str, Any], str, torch.Tensor]]:
    """Every parameter and buffer: its full name, the dict that holds it, its name there, itself."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for holder in (module._parameters, module._buffers):
            for name, tensor in holder.items():
                if tensor is not None:
                    yield f"{prefix}.{name}" if prefix else name, holder, name, tensor


def _keys_by_name(model: nn.Module) -> dict[str, str]:
    """The key (first name) of the storage that each parameter or buffer lies in."""
    first: dict[int, str] = {}
    return {name: first.setdefault(tensor.untyped_storage()._cdata, name) for name, tensor in _named_tensors(model)}


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor's storage, as a flat tensor of its dtype."""
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.detach().as_strided((count,), (1,), 0)
