"""Quantises another source's weights as they are sent, into the format of the checkpoint that the engine was started from.

Each rank quantises the slices that it holds; nothing is gathered. The scale of a block that several slices have parts of follows
from the largest value of all of them: before the first slice, the ranks look at such tensors and exchange the largest values
(collective, four bytes for each block). The rank with a block's first value sends its scale.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import math
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from inference_plugin.devices import start_thread
from inference_plugin.wire.codec import decode_as
from inference_plugin.wire.config import Config
from inference_plugin.wire.errors import ArgumentError, ErrorInfo, ManifestMismatch, WeightwireError, first_few
from inference_plugin.wire.geometry import Box
from inference_plugin.wire.manifest import Manifest, TensorSpec
from inference_plugin.wire.tensors import torch_dtype
from trainer_adapters.sources.base import LocalSlice, WeightSource, WrappingSource
from trainer_adapters.sources.exchange import OwnGroup, exchange_bytes
from trainer_adapters.sources.left_behind import leave
from trainer_adapters.sources.quantization import Scheme, block_maxima, quantize, schemes_of

__all__ = ["QuantizedAdapter"]

logger = logging.getLogger(__name__)


class _Told(msgspec.Struct):
    """What a rank tells the others: of which tensors it has slices that end within a block, or its error."""

    cut: list[int] = []
    error: ErrorInfo | None = None


class QuantizedAdapter(WrappingSource):
    """A source that sends what `source` sends, with the weights quantised that `checkpoint` has quantised.

    `source`: any other source, with the checkpoint's names; its weights are in float32, bfloat16 or float16, in any sharding.
    `checkpoint`: what the engine was started from, a directory or a name in the hub of which this machine has a copy; only
    `config.json` and the headers of its files are read. Taken are FP8 in blocks (`quant_method: fp8`, with
    `weight_block_size`), 8-bit weights of compressed-tensors (FP8, INT8) with symmetric scales per channel or block, and its
    packed INT4 in symmetric groups; the formulas are in `trainer_adapters.sources.quantization`.

    Each quantised weight travels as the tensors that the checkpoint has of it. A weight is quantised from its value in
    the dtype in which `source` would send it, in float32.

    Make it on every rank of `process_group` (default: torch.distributed's), in the same order as other process groups: it
    makes one of its own. Raises `ArgumentError` for a checkpoint that can't be read or has what can't be made of weights, or is
    another one on another rank.
    `manifest()` raises `ManifestMismatch`, which names them, for weights of another shape than the checkpoint's, tied ones and
    ones of another kind of dtype, and where the checkpoint has none of the source's weights quantised.
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
        self._schemes = schemes_of(checkpoint)
        together = dist.is_available() and dist.is_initialized() and dist.get_world_size(process_group) > 1
        self._ranks = OwnGroup(process_group) if together else None
        self._check_alike()
        self._plain: Manifest | None = None
        self._manifest = Manifest(())
        self._quantised: dict[int, Scheme] = {}
        self._places: tuple[int, ...] = ()
        self._maxima: dict[int, torch.Tensor] = {}
        self._told: threading.Thread | None = None

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
                found += [scales, *self._shape_box(box)]
        return tuple(found)

    def made_together(self) -> frozenset[int]:
        together = {self._places[index] for index in self._ready().made_together()}
        if self._ranks is not None:
            together |= self._made()
        return frozenset(together)

    def expect_reads(self, times: int) -> None:
        # Tensors whose blocks are cut are looked at before: then the source is read once more for each time.
        # Whether another rank's are is not known yet.
        super().expect_reads(2 * times if self._ranks is not None or self._cut() else times)

    def adopt_dtypes(self, rules: Mapping[str, str]) -> bool:
        ours = {self._manifest.tensors[index].name for index in self._made()}
        return super().adopt_dtypes({name: dtype for name, dtype in rules.items() if name not in ours})

    def _made(self) -> set[int]:
        """The tensors, by index in the manifest, that this adapter makes of quantised weights."""
        return {
            self._places[index] + i for index, scheme in self._quantised.items() for i in range(len(scheme.tensors))
        }

    def _check_alike(self) -> None:
        """Collective; raises `ArgumentError` if ranks read different schemes: parts of a block would get different scales."""
        if self._ranks is None:
            return
        mine = hashlib.sha256(repr(sorted(self._schemes.items())).encode()).digest()
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
        for index, spec in enumerate(plain.tensors):
            places.append(len(tensors))
            if (scheme := self._schemes.get(spec.name)) is None:
                tensors.append(spec)
                continue
            if spec.shape != scheme.shape:
                wrong.append(f"{spec.name} is {list(spec.shape)} here and {list(scheme.shape)} in the checkpoint")
            elif spec.name in tied:
                wrong.append(f"{spec.name} is tied")
            elif not torch_dtype(spec.dtype).is_floating_point or torch_dtype(spec.dtype).itemsize == 1:
                wrong.append(f"{spec.name} is {spec.dtype}")
            quantised[index] = scheme
            tensors += scheme.tensors
        if wrong:
            raise ManifestMismatch(
                f"weights can't be quantised as {self._checkpoint} has them: {first_few(wrong)}",
                hint="give the checkpoint of the model that is trained, as the engine serves it",
                side="trainer",
            )
        if not quantised:
            raise ManifestMismatch(
                f"none of the source's tensors is a quantised weight of {self._checkpoint}, which has for example "
                f"{first_few(sorted(self._schemes)[:3])}",
                hint="the source must have the checkpoint's names: see rename= of the adapters",
                side="trainer",
            )
        self._plain, self._places, self._quantised = plain, tuple(places), quantised
        self._manifest = Manifest(tuple(tensors), plain.tied)

    def slices(self) -> Iterator[LocalSlice]:
        self._maxima = self._exchanged()
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
                if known is not None:
                    maxima = known[_touched(box, scheme)].to(values.device)
                else:
                    maxima = block_maxima(values, at, scheme.block)
                scales = scheme.scale(maxima)
                made = quantize(values, at, scheme, scales)
                del values
            yield LocalSlice(self._placed(box), made)
            del made
            if own := self._scales_box(box, scheme):
                rows, columns = (
                    slice(math.ceil(start / width) - start // width, None)
                    for start, width in zip(at, scheme.block, strict=True)
                )
                kept = scales[rows, columns].to(scheme.scales_dtype)
                yield LocalSlice(own, kept.reshape(own.sizes).contiguous())
                for shape in self._shape_box(box):
                    dtype = torch_dtype(self._manifest.tensors[shape.tensor].dtype)
                    yield LocalSlice(shape, torch.tensor(scheme.shape, dtype=dtype, device=kept.device))

    def _values(self, item: LocalSlice) -> torch.Tensor:
        """A slice's values in the dtype in which the source would send them."""
        assert self._plain is not None
        return item.tensor.detach().to(torch_dtype(self._plain.tensors[item.box.tensor].dtype))

    def _placed(self, box: Box) -> Box:
        """Where a box of the source's manifest lies in ours. Raises `ManifestMismatch` if it cuts a number that values share."""
        place, scheme = self._places[box.tensor], self._quantised.get(box.tensor)
        if scheme is None or scheme.in_a_word == 1:
            return Box(place, box.offsets, box.sizes)
        (top, left), (rows, columns), width = box.offsets, box.sizes, scheme.in_a_word
        if left % width or columns % width:
            raise ManifestMismatch(
                f"a shard of {self._manifest.tensors[place].name} has columns {left} to {left + columns - 1}; {width} of them "
                "lie in one number, which ranks can't share",
                hint=f"shard it by rows, or by a multiple of {width} columns; or send it in the engine's format by ExportAdapter",
                side="trainer",
            )
        return Box(place, (top, left // width), (rows, columns // width))

    def _shape_box(self, box: Box) -> list[Box]:
        """The shape that goes with a box of a weight whose values are packed: with the first one."""
        first = box.offsets == (0, 0) and len(self._quantised[box.tensor].tensors) == 3
        return [Box(self._places[box.tensor] + 2, (0,), (2,))] if first else []

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

    def _exchanged(self) -> dict[int, torch.Tensor]:
        """The largest absolute value of each block, of the tensors of which some rank has parts of blocks, by the tensor's index
        in the source's manifest. Collective; raises on all ranks what one of them raises."""
        if self._told is not None:
            self._told.join()  # it ends with the group's time limit
        if self._ranks is not None:
            self._ranks.renew()
        with self._telling() as told:
            told.cut = sorted(self._cut())
        grids = {tensor: self._quantised[tensor].grid for tensor in told.cut}
        if not grids:
            return {}
        flat = torch.zeros(sum(map(math.prod, grids.values())), device="cpu")
        parts = torch.split(flat, [math.prod(grid) for grid in grids.values()])
        found = {tensor: part.view(grid) for (tensor, grid), part in zip(grids.items(), parts, strict=True)}
        seen = dict.fromkeys(grids, 0)
        with self._telling(), torch.no_grad():
            for item in self._source.slices():
                if (maxima := found.get(item.box.tensor)) is not None:
                    scheme, at = self._quantised[item.box.tensor], (item.box.offsets[0], item.box.offsets[1])
                    own = block_maxima(self._values(item), at, scheme.block).nan_to_num(nan=math.inf, posinf=math.inf)
                    touched = _touched(item.box, scheme)
                    maxima[touched] = torch.maximum(maxima[touched], own.cpu())
                    seen[item.box.tensor] += item.tensor.numel()
        sums = torch.tensor(list(seen.values()), device="cpu")
        if self._ranks is not None:
            with self._ranks.used() as group:
                dist.all_reduce(flat, dist.ReduceOp.MAX, group=group)
                dist.all_reduce(sums, group=group)
        counted = zip(grids, sums.tolist(), strict=True)
        if parts_only := [t for t, held in counted if held != math.prod(self._quantised[t].shape)]:
            names = [self._manifest.tensors[self._places[tensor]].name for tensor in parts_only]
            raise ManifestMismatch(
                f"the ranks of this QuantizedAdapter hold only parts of {first_few(names)}",
                hint="make it after torch.distributed is initialised, for all ranks that send parts (process_group=)",
                side="trainer",
            )
        return found

    @contextlib.contextmanager
    def _telling(self) -> Iterator[_Told]:
        """What this rank does, and then tells the others; what it yields has afterwards what all of them told. A rank that fails
        raises its error at once, and tells it; all raise it: none waits in a collective for a rank that doesn't come."""
        told = _Told()
        try:
            yield told
        except BaseException as error:
            if self._ranks is not None:
                rank = dist.get_rank(self._ranks.group)
                told.error = WeightwireError.wrap(error).at(side="trainer", rank=rank).info()
                # Beside it: the others may still be in collectives of the source, which miss this rank.
                self._told = start_thread(functools.partial(self._tell, told), name="weightwire-telling")
                leave(self._told)
            raise
        if self._ranks is None:
            return
        everyone = self._exchange(told)
        if failed := next((one.error for one in everyone if one.error is not None), None):
            raise WeightwireError.of(failed)
        told.cut = sorted({tensor for one in everyone for tensor in one.cut})

    def _tell(self, told: _Told) -> None:
        try:
            self._exchange(told)
        except WeightwireError as error:
            logger.warning("weightwire: this rank can't tell the others that it failed: %s", error)

    def _exchange(self, told: _Told) -> list[_Told]:
        assert self._ranks is not None
        with self._ranks.used() as group:
            everyone = exchange_bytes(msgspec.msgpack.encode(told), group)
        return [decode_as(one, _Told) for one in everyone]


def _touched(box: Box, scheme: Scheme) -> tuple[slice, slice]:
    """The blocks that a box of a weight has parts of, down and across."""
    rows, columns = (
        slice(at // width, math.ceil((at + size) / width))
        for at, size, width in zip(box.offsets, box.sizes, scheme.block, strict=True)
    )
    return rows, columns


def _cuts(box: Box, scheme: Scheme) -> bool:
    """Whether a box of a weight begins or ends within a block."""
    return any(
        at % width or ((at + size) % width and at + size != length)
        for at, size, width, length in zip(box.offsets, box.sizes, scheme.block, scheme.shape, strict=True)
    )
