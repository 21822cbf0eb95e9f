"""Agrees with an engine's model on a manifest: the placement plan, its proof, the layout, and every refusal."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property

import torch

from inference_plugin.install.agreement import Agreement
from inference_plugin.install.contract import EngineModel
from inference_plugin.install.layout import LiveLayout
from inference_plugin.install.live_storages import live_ties
from inference_plugin.install.misfits import Misfits, expected_shape
from inference_plugin.install.parts import ProvenParts, prove_parts
from inference_plugin.install.plan import PlacementPlan, TensorInfo, grouped
from inference_plugin.install.proof import prove_plan
from inference_plugin.install.storages import keys_by_name, storage_views
from inference_plugin.install.trace import trace_plan
from inference_plugin.install.trial_load import LoaderCoverage, check_trial_fits, handed_out_bytes, loader_coverage
from inference_plugin.wire.dtype_hint import check_quantises_nothing, dtype_line, dtype_rules
from inference_plugin.wire.errors import (
    MAX_DTYPE_RULES,
    EngineUnsupported,
    ManifestMismatch,
    first_few,
    lacks_resources,
)
from inference_plugin.wire.host_memory import free_host_bytes
from inference_plugin.wire.manifest import Manifest
from inference_plugin.wire.tensors import dtype_name, torch_dtype

__all__ = ["agree"]


def agree(model: EngineModel, manifest: Manifest, *, partial: bool, sharing: int = 1) -> Agreement:
    """Traces and proves the placement plan for `manifest`, off the live model. The caller holds `model.lock`. `sharing`: number
    of replicas that do so on this host at the same moment.

    Raises `ManifestMismatch` if the trainer has to change something, `EngineUnsupported` if no update can keep the model correct,
    or if memory is too small for the trial loads.
    """
    return _Negotiation(model, manifest, partial, sharing).agree()


class _Negotiation:
    def __init__(self, model: EngineModel, manifest: Manifest, partial: bool, sharing: int) -> None:
        self._model = model
        self._sharing = sharing
        self._manifest = manifest
        self._partial = partial
        self._tensors = _tensor_infos(manifest)

    def agree(self) -> Agreement:
        if (why := self._model.unfinishable()) is not None:
            raise EngineUnsupported(f"this model can't be updated in place: {why}", phase="open")
        self._check_modules()
        expert_places = self._model.expert_places()
        ties = live_ties(self._model)
        traced = self._traced = self._trace().without_repeats()
        self._check_modules()  # again: with what the loader makes
        plan, apart = traced.tied(ties, self._manifest.sent_name)
        self._check_plan(plan)
        if apart:
            raise ManifestMismatch(
                f"the trainer and the engine tie different weights: {first_few(list(apart.values()))}",
                hint="the engine tied them because its checkpoint holds equal ones; tie them in the trainer too, or start "
                "the engine from a checkpoint whose configuration says tie_word_embeddings=false",
                phase="open",
            )
        why_loader = self._why_loader(plan, traced)
        uncovered, loaded, ignored = plan.uncovered, frozenset[str](), frozenset(traced.unused)
        proven = self._parts(traced, ties) if why_loader else ProvenParts()
        if proven.parts:
            uncovered = {**uncovered, **proven.uncovered}
        elif why_loader:
            why_loader += f"; not part by part: {proven.why}" if proven.why else ""
            coverage = self._cover_by_loader(self._tensors)
            ignored = self._ignored(coverage)
            loaded = coverage.written  # a trace that no proof bears out may have missed some
            uncovered = coverage.left(ties)
        layout = LiveLayout(self._model, plan, ties, loaded, self._free_for_trials())
        unfilled: tuple[str, ...] = ()
        if not self._partial:
            unfilled = self._check_whole(layout, uncovered)
        self._check_layout(layout)
        return Agreement(
            self._model,
            self._manifest,
            self._partial,
            plan,
            layout,
            ties,
            why_loader,
            proven.parts,
            self._passed_over(ignored),
            ignored,
            {name: self._manifest.tied[name] for name, _, _ in self._tensors if name in self._manifest.tied},
            unfilled,
            expert_places,
        )

    def _trace(self) -> PlacementPlan:
        """Traces the load. A second name of a tied weight at which the loader raises is left out: checkpoints don't have it
        either. If the engine needs it after all, `_check_whole` finds what it would have filled; nothing would in a part of a
        model, which is refused."""
        while True:
            plan = self._trace_load(self._tensors)
            if self._partial or not plan.broke or plan.broke_at not in self._manifest.tied:
                return plan
            self._tensors = [info for info in self._tensors if info[0] != plan.broke_at]

    @cached_property
    def _checkpoint(self) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        return self._model.checkpoint()

    @cached_property
    def _own_load(self) -> PlacementPlan:
        """The plan of the checkpoint that the engine was started from."""
        held = [(name, *self._checkpoint[name]) for name in grouped(self._checkpoint)]
        if {name: shape for name, shape, _ in held} == {name: shape for name, shape, _ in self._tensors}:
            return self._traced
        return self._trace_load(held) if held else PlacementPlan(refusal="it can't be read")

    def _passed_over(self, ignored: Collection[str]) -> tuple[int, ...]:
        """Tensors of the manifest, by index, from which the loader takes nothing, just as it does in the engine's own checkpoint.

        That checkpoint rules out misspelt names: it holds each of these tensors, in the same shape, and the engine serves it.
        A tensor in the shape of a vocabulary's table is never passed over: the trainer may train it as a head of its own, while
        the engine computes its logits with the table.
        """
        idle = set(ignored)
        idle -= {name for alias, name in self._manifest.tied.items() if alias not in idle}
        if not idle:
            return ()
        idle &= set(self._own_load.unused)
        placements = (*self._traced.placements, *self._own_load.placements)
        module_of = self._model.skeleton.get_submodule
        tables = {p.shape for p in placements if self._model.pads(module_of(p.dest.tensor.rpartition(".")[0]))}
        return tuple(
            i
            for i, spec in enumerate(self._manifest.tensors)
            if spec.name in idle and self._checkpoint[spec.name][0] == spec.shape and spec.shape not in tables
        )

    def _trace_load(self, tensors: Sequence[TensorInfo]) -> PlacementPlan:
        return trace_plan(self._model.skeleton, self._load, tensors, self._model.boundary)

    def _load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> object:
        return self._model.load_weights(self._model.skeleton, tensors)

    def _check_plan(self, plan: PlacementPlan) -> None:
        """Raises `ManifestMismatch` for names, shapes and dtypes that the loader can't take, and for tensors that it lacks."""
        if plan.made_of_nothing and (made := sorted(plan.made_of_nothing - self._own_load.made_of_nothing)):
            sent = {name for name, _, _ in self._tensors}
            others = [name for name in self._checkpoint if name not in sent]
            has = f"; the engine's checkpoint also has {first_few(others, 3)}" if others else ""
            raise ManifestMismatch(
                f"the engine's loader makes these of tensors that the trainer doesn't send: {first_few(made)}{has}",
                hint="put all of the tensors that the loader makes them of into this group",
                phase="open",
            )
        if plan.refusal is not None:
            if self._partial:
                raise ManifestMismatch(
                    f"the parameters that this part of the model writes cannot be determined: {plan.refusal}",
                    hint="send the whole model as one group",
                    phase="open",
                )
            if plan.broke and (listed := self._misfits.listed()):
                raise ManifestMismatch(
                    f"the engine's model can't take: {listed}",
                    hint=self._misfits.hint(),
                    phase="open",
                )
            return
        differ = self._differing(plan)
        if wrong := [f"{name}: {plan.dtype_conflicts[name]}" for name in differ]:
            changed = {self._manifest.sent_name(name): dtype for name, dtype in differ.items()}
            own = {spec.name: spec.dtype for spec in self._manifest.tensors}
            wanted = own | {name: dtype_name(dtype) for name, dtype in changed.items()}
            check_quantises_nothing(own, wanted)
            rules = dtype_rules(wanted)
            by_itself = 'dtype="engine" takes the engine\'s dtypes'
            if len(rules) > MAX_DTYPE_RULES:
                by_itself = f'these are {len(rules)} rules, and dtype="engine" takes {MAX_DTYPE_RULES} at most'
            error = ManifestMismatch(
                f"dtypes differ: {first_few(wrong, 3)}",
                hint=f"nothing is cast silently: {by_itself}; or give the trainer's adapter, or update, {dtype_line(wanted)}",
                phase="open",
            )
            error.dtypes = rules
            raise error
        if plan.doubled:
            raise ManifestMismatch(
                f"several tensors of the manifest fill the same elements: {first_few(list(plan.doubled))}", phase="open"
            )

    def _differing(self, plan: PlacementPlan) -> dict[str, torch.dtype]:
        """The engine's dtypes of tensors that its loader would cast. Without those of which its loader makes floats of integers,
        or the reverse, and had to do so at the start, too (the shapes and zeros of experts in four bits): no rule of dtypes
        would, and the loader does it again."""
        sent = {name: dtype for name, _, dtype in self._tensors}
        own = {name: dtype for name, (_, dtype) in self._checkpoint.items()}
        return {
            name: dtype
            for name, dtype in plan.dtypes_wanted.items()
            if own.get(name) != sent[name] or sent[name].is_floating_point == dtype.is_floating_point
        }

    @property
    def _misfits(self) -> Misfits:
        return Misfits(self._trace_load, self._tensors, self._traced, self._checkpoint)

    def _reshaped(self) -> str:
        """In words, the tensors whose shapes are not those of the engine's own checkpoint."""
        told = ((name, shape, expected_shape(self._checkpoint, name, shape)) for name, shape, _ in self._tensors)
        differ = [f"{name} {list(shape)}{expected}" for name, shape, expected in told if expected]
        return f"; shapes differ: {first_few(differ, 3)}" if differ else ""

    def _check_modules(self) -> None:
        """Raises `EngineUnsupported` for modules that the live model lacks. A loader that removes modules would remove them from
        the skeleton too, and a later load couldn't be traced there; one that makes modules (ColBERT's projection) has not run
        where an engine started with dummy weights. Modules that the post-processing of another module reads are exempt: the
        engine's file keeps them in the skeleton."""
        skeleton = self._model.skeleton
        live = {name for name, _ in self._model.live.named_modules(remove_duplicate=False)}
        read = {
            f"{name}.{part}"
            for name in self._model.finishers()
            for part in self._model.reads(skeleton.get_submodule(name))
        }
        held = [name for name, module in skeleton.named_modules() if module._parameters]
        if lacking := [name for name in held if name not in live and name not in read]:
            raise EngineUnsupported(
                f"the running engine lacks these modules, which its class or its loader makes: {first_few(lacking)}",
                hint="start it from a checkpoint that has them, not with dummy weights; where it derived something from them and "
                "then removed them, that can't be repeated while it runs: serve this model without updates",
                phase="open",
            )

    def _why_loader(self, plan: PlacementPlan, traced: PlacementPlan) -> str:
        """Why the engine's own loader has to install; "" if the plan can."""
        if plan.refusal is not None:
            return plan.refusal
        if plan.refused:
            return f"{first_few(list(plan.refused))} are computed while loading"
        wrong = self._prove(traced)
        return f"the placement plan failed its proof: {wrong}" if wrong else ""

    def _prove(self, traced: PlacementPlan) -> str:
        model = self._model  # the proof runs in host memory
        free_bytes = model.free_share_bytes(self._sharing) if model.device.type == "cpu" else free_host_bytes()
        return prove_plan(traced, model.skeleton, self._load, self._tensors, free_bytes, self._manifest.tied)

    def _free_for_trials(self) -> float:
        """Memory for trials of post-processing. A device tells by itself that it has too little, and keeps freed memory that
        doesn't count as free; a host ends the engine."""
        return self._model.free_share_bytes(self._sharing) if self._model.device.type == "cpu" else math.inf

    def _parts(self, traced: PlacementPlan, ties: Mapping[str, str]) -> ProvenParts:
        """The parts that the loader has to fill, if it can fill them one by one while a plan covers the rest."""
        if not traced.refused or not traced.refused.keys().isdisjoint({*ties, *ties.values()}):
            return ProvenParts()
        if self._prove(traced):
            return ProvenParts()
        model, free_bytes = self._model, self._model.free_share_bytes(self._sharing)
        return prove_parts(traced, model.skeleton, self._load, self._tensors, model.device, free_bytes)

    def _cover_by_loader(self, tensors: Sequence[TensorInfo]) -> LoaderCoverage:
        sizes = [torch.Size(shape).numel() * dtype.itemsize for _, shape, dtype in tensors]
        storages = sum(flat.nbytes for flat in storage_views(self._model.skeleton).values())
        check_trial_fits(storages + handed_out_bytes(sizes), self._model.free_share_bytes(self._sharing))
        try:
            return loader_coverage(self._model.skeleton, self._load, tensors, self._model.device)
        except Exception as error:
            if lacks_resources(error):
                raise
            raise EngineUnsupported(
                f"the engine's loader fails on trial weights: {type(error).__name__}: {error}", phase="open"
            ) from error

    def _ignored(self, coverage: LoaderCoverage) -> frozenset[str]:
        """Names of tensors from which the loader takes nothing, under any of their names. Tracing does not see everything that
        a loader does, so a load without these tensors must leave the same bytes."""
        unused, sent = set(self._traced.unused), self._manifest.tied
        taken = {sent.get(name, name) for name, _, _ in self._tensors if name not in unused}
        idle = frozenset(name for name in unused if sent.get(name, name) not in taken)
        if not idle:
            return idle
        try:
            without = self._cover_by_loader([info for info in self._tensors if info[0] not in idle])
        except EngineUnsupported:
            return frozenset()
        return idle if without == coverage else frozenset()

    def _check_whole(self, layout: LiveLayout, uncovered: Mapping[str, int]) -> tuple[str, ...]:
        """Raises `ManifestMismatch` if the manifest leaves out something that a checkpoint fills. Returns the parameters that
        the engine's own checkpoint does not fill either."""
        lacking = {name: count for name, count in uncovered.items() if not layout.needs_no_checkpoint(name)}
        unfilled = tuple(
            n for n, count in lacking.items() if layout.leaves(n) and self._own_load.uncovered.get(n) == count
        )
        left = {*unfilled, *(self._padded(layout) if lacking else ())}
        missing = [f"{name} ({count} elements)" for name, count in lacking.items() if name not in left]
        if missing:
            raise ManifestMismatch(
                f"no tensor of the manifest fills these parameters: {first_few(missing)}{self._reshaped()}",
                hint="send all of the model that this engine serves; partial=True if the group is meant to be a part of it",
                phase="open",
            )
        held = self._model.skeleton.get_parameter
        random = [n for n in unfilled if layout.keeps(n) and held(n).is_floating_point()]
        if self._model.random_weights and random:
            raise EngineUnsupported(
                f"the engine started with dummy weights, and no tensor of the manifest fills these: {first_few(random)}",
                hint="start it from its checkpoint, or send them too; partial=True leaves random numbers in them",
                phase="open",
            )
        unwritten = layout.unwritten_buffers()
        # A name that begins with an underscore (`_prob_scale`) is the engine's own: its loader would take the tensor, but no
        # checkpoint has it. Integers such as `position_ids` come from the constructor, and nobody trains them.
        buffer = self._model.skeleton.get_buffer
        own = {n for n in unwritten if n.rpartition(".")[2].startswith("_") or not buffer(n).is_floating_point()}
        if buffers := [n for n, built in unwritten.items() if not built or (n not in own and self._is_loaded(n))]:
            raise ManifestMismatch(
                f"no tensor of the manifest fills these buffers, which the engine reads from a checkpoint: {first_few(buffers)}",
                hint="let the trainer's adapter send its buffers; start the engine from a checkpoint if it has random weights",
                phase="open",
            )
        return unfilled

    def _padded(self, layout: LiveLayout) -> list[str]:
        """Parameters of which the engine's own checkpoint fills the same part as the manifest (DeepSeek-V4's sinks in vLLM): what
        the engine has put into the rest stays. None of those beside which that checkpoint has a tensor that the loader drops."""
        own = self._own_load
        gaps = own.gaps(own.extents.keys() & layout.gaps.keys())
        dropped = {_beside(name) for name in own.unused}
        near = {p.dest.tensor for p in own.placements if p.dest.tensor in gaps and _beside(p.source.tensor) in dropped}
        keys = {key for key, found in gaps.items() if found == layout.gaps[key] and key not in near}
        return [name for name, key in keys_by_name(self._model.skeleton).items() if key in keys]

    def _is_loaded(self, buffer: str) -> bool:
        """Whether the engine's loader takes this buffer from its own checkpoint; if that can't be told, from one that has it."""
        if self._own_load.refusal is None:
            return keys_by_name(self._model.skeleton)[buffer] in self._own_load.extents
        held = self._model.skeleton.get_buffer(buffer)
        plan = self._trace_load([(buffer, tuple(held.shape), held.dtype)])
        return plan.refusal is None and not plan.unused

    def _check_layout(self, layout: LiveLayout) -> None:
        """Raises if the live model holds something that an update would leave behind or destroy, or can't reach."""
        devices = {str(storage.device) for storage in layout.own_storages().values()}
        if len(devices) > 1:
            raise EngineUnsupported(
                f"the engine keeps its weights on several devices: {', '.join(sorted(devices))}",
                hint="start it without offloading weights to the host",
                phase="open",
            )
        if filled_over := layout.filled_over():
            raise ManifestMismatch(
                f"the engine's loader would write zeros where the engine holds weights: {first_few(filled_over)}"
                f"{self._reshaped()}",
                hint="the trainer's tensors for these are smaller than the engine's; " + self._misfits.hint(),
                phase="open",
            )
        if unknown := layout.unaccounted:
            raise EngineUnsupported(
                f"the engine holds these in another form, which its post-processing doesn't explain: {first_few(unknown)}",
                phase="open",
            )
        if unexplained := layout.unexplained:
            raise EngineUnsupported(
                f"the engine keeps tensors that an update might leave behind: {first_few(unexplained)}",
                hint="report the model and these names, so that they are moved; until then serve it without updates",
                phase="open",
            )
        if not self._partial:
            layout.check_apart()
        if self._partial and (halved := layout.halved()):
            raise ManifestMismatch(
                f"the engine packs each of these modules as a whole, and the group holds only a part of it: {first_few(halved)}",
                hint="put all tensors of such a module into one group",
                phase="open",
            )


def _beside(name: str) -> str:
    """The module in which the module of a tensor stands."""
    return name.rpartition(".")[0].rpartition(".")[0]


def _tensor_infos(manifest: Manifest) -> list[TensorInfo]:
    """Every name that the engine may ask for, tied ones included."""
    infos = [(spec.name, spec.shape, torch_dtype(spec.dtype)) for spec in manifest.tensors]
    for alias, name in manifest.tied.items():
        spec = manifest.tensors[manifest.index[name]]
        infos.append((alias, spec.shape, torch_dtype(spec.dtype)))
    by_name = {info[0]: info for info in infos}
    return [by_name[name] for name in grouped(by_name)]
