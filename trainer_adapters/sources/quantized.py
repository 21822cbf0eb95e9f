"""Quantises another source's weights as they are sent, into the format of the checkpoint that the engine was started from.

Each rank quantises the slices that it holds; nothing is gathered. The scale of a block that several slices have parts of follows
from the largest value of all of them: before the first slice, the ranks look at such tensors and exchange the largest values
(collective, four bytes for each block). So they do for a scale of a whole matrix. The rank with a block's first value sends its
scale.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from inference_plugin.wire.config import Config
from inference_plugin.wire.errors import ArgumentError, ManifestMismatch, first_few
from inference_plugin.wire.geometry import Box
from inference_plugin.wire.manifest import Manifest, TensorSpec
from inference_plugin.wire.tensors import dtype_name, torch_dtype
from trainer_adapters.sources.base import LocalSlice, WeightSource, WrappingSource
from trainer_adapters.sources.exchange import OwnGroup, exchange_bytes
from trainer_adapters.sources.quantization import Scheme, block_maxima, largest, quantize
from trainer_adapters.sources.quantized_checkpoint import read_checkpoint
from trainer_adapters.sources.telling import Telling

__all__ = ["QuantizedAdapter"]


class QuantizedAdapter(WrappingSource):
    """A source that sends what `source` sends, with the weights quantised that `checkpoint` has quantised.

    `source`: any other source, with the checkpoint's names; its weights are in float32, bfloat16 or float16, in any sharding.
    `checkpoint`: what the engine was started from, a directory or a name in the hub of which this machine has a copy. Taken are
    FP8 and INT8 with symmetric scales per block, channel or tensor, INT4 in groups, NVFP4 and MXFP8, as DeepSeek, Qwen,
    compressed-tensors and ModelOpt write them (`trainer_adapters.sources.quantized_checkpoint`); the formulas are in
    `trainer_adapters.sources.quantization`.

    Each quantised weight travels as the tensors that the checkpoint has of it; what was measured (scales of activations and
    caches) travels with it as the checkpoint has it. A weight is quantised from its value in
    the dtype in which `source` would send it, in float32.

    Make it on every rank of `process_group` (default: torch.distributed's), in the same order as other process groups: it
    makes one of its own. Raises `ArgumentError` for a checkpoint that can't be read or has nothing that can be made of weights,
    or is another one on another rank.
    `manifest()` raises `ManifestMismatch`, which names them, for weights that can't be made as the checkpoint has them, of
    another shape, tied, or of another kind of dtype, and where the checkpoint has none of the source's weights quantised.
    """

    def __init__(
        self, source: WeightSource, checkpoint: str | Path, *, process_group: dist.ProcessGroup | None = None
    ) -> None:
        if not isinstance(source, WeightSource):
            raise ArgumentError(
                f"QuantizedAdapter quantises what another source sends, not a {type(source).__name__}",
                hint="make the adapter that fits the model first: QuantizedAdapter(FSDPAdapter(model), checkpoint)",
            )
        self._source: WeightSource = source
        self._checkpoint = str(checkpoint)
        together = dist.is_available() and dist.is_initialized() and dist.get_world_size(process_group) > 1
        self._ranks = OwnGroup(process_group) if together else None
        self._telling = Telling(self._ranks)
        with self._telling.what_all_need():  # all ranks raise what one of them does
            self._has = read_checkpoint(checkpoint)
        self._check_alike()
        self._plain: Manifest | None = None
        self._manifest = Manifest(())
        self._quantised: dict[int, Scheme] = {}
        self._places: tuple[int, ...] = ()
        self._beside: dict[int, str] = {}
        self._maxima: dict[int, torch.Tensor] = {}
        self._largest: dict[int, torch.Tensor] = {}

    def configure(self, config: Config) -> None:
        super().configure(config)
        if self._ranks is not None:
            self._ranks.configure(config)

    def manifest(self) -> Manifest:
        plain = self._source.manifest()
        if plain != self._plain:
            self._plan(plain)
        return self._manifest

    def claims(self) -> tuple[Box, ...] | None:
        if (claimed := self._ready().claims()) is None:
            return None
        found: list[Box] = []
        for box in claimed:
            found.append(self._placed(box))
            if (scheme := self._quantised.get(box.tensor)) is not None and (scales := self._scales_box(box, scheme)):
                found += [scales, *map(self._whole, self._with_first_value(box))]
        return tuple(found)

    def made_together(self) -> frozenset[int]:
        together = {self._places[index] for index in self._ready().made_together()}
        if self._ranks is not None:
            together |= self._made()
        return frozenset(together)

    def expect_reads(self, times: int) -> None:
        # Tensors whose blocks are cut are looked at before: then the source is read once more for each time.
        # Whether another rank's are is not known yet.
        before = self._ranks is not None or self._wholes() or self._cut()
        super().expect_reads(2 * times if before else times)

    def adopt_dtypes(self, rules: Mapping[str, str]) -> bool:
        ours = {self._manifest.tensors[index].name for index in self._made()}
        return super().adopt_dtypes({name: dtype for name, dtype in rules.items() if name not in ours})

    def _made(self) -> set[int]:
        """The tensors, by index in the manifest, that this adapter makes."""
        made = {
            self._places[index] + i for index, scheme in self._quantised.items() for i in range(len(scheme.tensors))
        }
        return made.union(self._beside)

    def _check_alike(self) -> None:
        """Collective; raises `ArgumentError` if ranks read different schemes: parts of a block would get different scales."""
        if self._ranks is None:
            return
        kept = sorted((name, str(values.dtype), values.tolist()) for name, values in self._has.kept.items())
        mine = hashlib.sha256(repr((sorted(self._has.schemes.items()), kept)).encode()).digest()
        with self._ranks.used() as group:
            everyone = exchange_bytes(mine, group)
        if apart := [rank for rank, one in enumerate(everyone) if one != everyone[0]]:
            raise ArgumentError(
                f"trainer ranks {apart} have another quantised checkpoint under {self._checkpoint!r} than rank 0",
                hint="give all ranks the checkpoint of the engine; on several hosts, the same revision",
                side="trainer",
                rank=apart[0],
            )

    def _ready(self) -> WeightSource:
        if self._plain is None:
            self.manifest()
        return self._source

    def _plan(self, plain: Manifest) -> None:
        """Takes a manifest of the source. Raises `ManifestMismatch`."""
        tied = {*plain.tied, *plain.tied.values()}
        wrong: list[str] = []
        tensors: list[TensorSpec] = []
        places: list[int] = []
        quantised: dict[int, Scheme] = {}
        beside: dict[int, str] = {}
        names, modules = {spec.name for spec in plain.tensors}, _modules(plain)
        own = {name.rpartition(".")[0] for name in names}
        if strange := [name for name in self._has.strange if name in names or name.rpartition(".")[0] in own]:
            raise ManifestMismatch(
                f"{self._checkpoint} has tensors that can't be made of the trainer's weights: {first_few(strange)}",
                hint="what can be made is on the documentation's page of QuantizedAdapter; weights must be symmetric",
                side="trainer",
            )
        for index, spec in enumerate(plain.tensors):
            places.append(len(tensors))
            if (scheme := self._has.schemes.get(spec.name)) is None:
                tensors.append(spec)
                continue
            if spec.shape != scheme.shape:
                wrong.append(f"{spec.name} is {list(spec.shape)} here and {list(scheme.shape)} in the checkpoint")
            elif spec.name in tied:
                wrong.append(f"{spec.name} is tied")
            elif not torch_dtype(spec.dtype).is_floating_point or torch_dtype(spec.dtype).itemsize == 1:
                wrong.append(f"{spec.name} is {spec.dtype}")
            tensors += scheme.tensors
            if not quantised:
                kept = {
                    n: one for n, one in self._has.kept.items() if n not in names and n.rpartition(".")[0] in modules
                }
                beside = dict(enumerate(kept, len(tensors)))
                tensors += [TensorSpec(n, dtype_name(one.dtype), tuple(one.shape)) for n, one in kept.items()]
            quantised[index] = scheme
        if wrong:
            raise ManifestMismatch(
                f"weights can't be quantised as {self._checkpoint} has them: {first_few(wrong)}",
                hint="give the checkpoint of the model that is trained, as the engine serves it",
                side="trainer",
            )
        if not quantised:
            raise ManifestMismatch(
                f"none of the source's tensors is a quantised weight of {self._checkpoint}, which has for example "
                f"{first_few(sorted(self._has.schemes)[:3])}",
                hint="the source must have the checkpoint's names (see rename= of the adapters); a part of the model without "
                "quantised weights needs no QuantizedAdapter",
                side="trainer",
            )
        self._plain, self._places, self._quantised, self._beside = plain, tuple(places), quantised, beside
        self._manifest = Manifest(tuple(tensors), plain.tied)

    def slices(self) -> Iterator[LocalSlice]:
        self._maxima, self._largest = self._exchanged()
        yield from super().slices()

    def _changed(self, slices: Iterator[LocalSlice], *, anew: bool) -> Iterator[LocalSlice]:
        for item in slices:
            box = item.box
            if (scheme := self._quantised.get(box.tensor)) is None:
                yield LocalSlice(self._placed(box), item.tensor)
                continue
            with torch.no_grad():
                values = self._values(item)
                del item  # before the next one is made
                at = (box.offsets[0], box.offsets[1])
                known = self._maxima.get(box.tensor)
                if known is None and not anew and _cuts(box, scheme):
                    continue  # the beginning of a copy: the rest of its last blocks is gone
                of_matrix = self._largest[box.tensor].to(values.device) if scheme.shares is not None else None
                if scheme.one_scale and of_matrix is not None:
                    maxima = of_matrix.reshape(1, 1)
                elif known is not None:
                    maxima = known[_touched(box, scheme)].to(values.device)
                else:
                    maxima = block_maxima(values, at, scheme.block)
                scales = scheme.scales(maxima, of_matrix)
                made = quantize(values, at, scheme, scales.factors)
                del values
            yield LocalSlice(self._placed(box), made)
            device = made.device
            del made
            if own := self._scales_box(box, scheme):
                rows, columns = (
                    slice(math.ceil(start / width) - start // width, None)
                    for start, width in zip(at, scheme.block, strict=True)
                )
                yield LocalSlice(own, scales.stored[rows, columns].reshape(own.sizes).contiguous())
                for place in self._with_first_value(box):
                    one = self._has.kept[self._beside[place]] if place in self._beside else scales.of_matrix
                    assert one is not None
                    whole = self._whole(place)
                    yield LocalSlice(whole, one.to(device).reshape(whole.sizes))

    def _values(self, item: LocalSlice) -> torch.Tensor:
        """A slice's values in the dtype in which the source would send them."""
        assert self._plain is not None
        return item.tensor.detach().to(torch_dtype(self._plain.tensors[item.box.tensor].dtype))

    def _placed(self, box: Box) -> Box:
        """Where a box of the source's manifest lies in ours. Raises `ManifestMismatch` if it cuts a number that values share."""
        place, scheme = self._places[box.tensor], self._quantised.get(box.tensor)
        if scheme is None or scheme.in_a_number == 1:
            return Box(place, box.offsets, box.sizes)
        (top, left), (rows, columns), width = box.offsets, box.sizes, scheme.in_a_number
        if left % width or columns % width:
            raise ManifestMismatch(
                f"a shard of {self._manifest.tensors[place].name} has columns {left} to {left + columns - 1}; {width} of them "
                "lie in one number, which ranks can't share",
                hint=f"shard it by rows, or by a multiple of {width} columns; or send it in the engine's format by ExportAdapter",
                side="trainer",
            )
        return Box(place, (top, left // width), (rows, columns // width))

    def _with_first_value(self, box: Box) -> list[int]:
        """The tensors, by index in our manifest, that go with a box of a quantised weight if it has the first value: the scale of
        the matrix and, with the first of these weights, what the checkpoint has beside them."""
        if any(box.offsets):
            return []
        of_matrix = [self._places[box.tensor] + i for i in range(2, len(self._quantised[box.tensor].tensors))]
        return of_matrix + (list(self._beside) if box.tensor == next(iter(self._quantised)) else [])

    def _whole(self, place: int) -> Box:
        shape = self._manifest.tensors[place].shape
        return Box(place, (0,) * len(shape), shape)

    def _scales_box(self, box: Box, scheme: Scheme) -> Box | None:
        """The scales that go with a box of a weight: of the blocks whose first value it has. None if there are none."""
        starts = [math.ceil(at / width) for at, width in zip(box.offsets, scheme.block, strict=True)]
        ends = [math.ceil((at + n) / width) for at, n, width in zip(box.offsets, box.sizes, scheme.block, strict=True)]
        sizes = [end - start for start, end in zip(starts, ends, strict=True)]
        if 0 in sizes:
            return None
        dims = len(scheme.tensors[1].shape)
        return Box(self._places[box.tensor] + 1, tuple(starts[:dims]), tuple(sizes[:dims]))

    def _cut(self) -> set[int]:
        """The quantised tensors, by index in the source's manifest, of which this rank has slices that end within a block."""
        if (claimed := self._ready().claims()) is None:
            raise ManifestMismatch(
                f"a {type(self._source).__name__} doesn't know its slices beforehand, so that ranks can't share blocks",
                hint="give a source that has claims()",
                side="trainer",
            )
        boxes = [box for box in claimed if box.tensor in self._quantised]
        for box in boxes:
            self._placed(box)  # or it raises
        return {box.tensor for box in boxes if _cuts(box, self._quantised[box.tensor])}

    def _wholes(self) -> list[int]:
        """The quantised tensors, by index in the source's manifest, of whose values the largest is asked for."""
        return [index for index, scheme in self._quantised.items() if scheme.shares is not None]

    def _exchanged(self) -> tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]:
        """The largest absolute value of each block, of the tensors of which some rank has parts of blocks; and that of the whole
        matrix, with those that it shares a scale with, where it is asked for. Both by the tensor's index in the source's
        manifest. Collective; raises on all ranks what one of them raises."""
        self._telling.begin()
        with self._telling.what_all_need() as needed:
            needed |= self._cut()
        cut = sorted(needed)
        grids = [(tensor, self._quantised[tensor].grid) for tensor in cut]
        grids += [(tensor, (1, 1)) for tensor in self._wholes()]
        if not grids:
            return {}, {}
        flat = torch.zeros(sum(math.prod(grid) for _, grid in grids), dtype=torch.float32, device="cpu")
        parts = torch.split(flat, [math.prod(grid) for _, grid in grids])
        views = [(tensor, part.view(grid)) for (tensor, grid), part in zip(grids, parts, strict=True)]
        found, tops = dict(views[: len(cut)]), dict(views[len(cut) :])
        seen = dict.fromkeys([tensor for tensor, _ in grids], 0)
        with self._telling.what_all_need(), torch.no_grad():
            for item in self._source.slices():
                if (tensor := item.box.tensor) in seen:
                    self._look(item, found.get(tensor), tops.get(tensor))
                    seen[tensor] += item.tensor.numel()
        sums = torch.tensor(list(seen.values()), device="cpu")
        if self._ranks is not None:
            with self._ranks.used() as group:
                dist.all_reduce(flat, dist.ReduceOp.MAX, group=group)
                dist.all_reduce(sums, group=group)
        counted = zip(seen, sums.tolist(), strict=True)
        if parts_only := [t for t, held in counted if held != math.prod(self._quantised[t].shape)]:
            names = [self._manifest.tensors[self._places[tensor]].name for tensor in parts_only]
            raise ManifestMismatch(
                f"the ranks of this QuantizedAdapter hold only parts of {first_few(names)}",
                hint="make it after torch.distributed is initialised, for all ranks that send parts (process_group=)",
                side="trainer",
            )
        shared: dict[str | None, torch.Tensor] = {}
        for tensor, top in tops.items():
            shares = self._quantised[tensor].shares
            shared[shares] = torch.maximum(shared.get(shares, top), top)
        return found, {tensor: shared[self._quantised[tensor].shares].reshape(()) for tensor in tops}

    def _look(self, item: LocalSlice, maxima: torch.Tensor | None, top: torch.Tensor | None) -> None:
        """Enters what a slice has, into the largest values of blocks and into that of the matrix."""
        scheme, values = self._quantised[item.box.tensor], self._values(item)
        if maxima is not None:
            own = block_maxima(values, (item.box.offsets[0], item.box.offsets[1]), scheme.block)
            touched = _touched(item.box, scheme)
            maxima[touched] = torch.maximum(maxima[touched], _countable(own))
        if top is not None:
            torch.maximum(top, _countable(largest(values)), out=top)


def _touched(box: Box, scheme: Scheme) -> tuple[slice, slice]:
    """The blocks that a box of a weight has parts of, down and across."""
    rows, columns = (
        slice(at // width, math.ceil((at + size) / width))
        for at, size, width in zip(box.offsets, box.sizes, scheme.block, strict=True)
    )
    return rows, columns


def _cuts(box: Box, scheme: Scheme) -> bool:
    """Whether a box of a weight begins or ends within a block that has a scale of its own."""
    return not scheme.one_scale and any(
        at % width or ((at + size) % width and at + size != length)
        for at, size, width, length in zip(box.offsets, box.sizes, scheme.block, scheme.shape, strict=True)
    )


def _countable(maxima: torch.Tensor) -> torch.Tensor:
    """On the CPU, with infinity for NaN, which a collective may lose."""
    return maxima.nan_to_num(nan=math.inf, posinf=math.inf).cpu()


def _modules(manifest: Manifest) -> set[str]:
    """The modules that hold its tensors, at any depth."""
    names = [spec.name.split(".")[:-1] for spec in manifest.tensors]
    return {module for name in names for module in itertools.accumulate(name, "{}.{}".format)}
