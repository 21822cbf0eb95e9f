"""Updates from generators that can be read once, of which a framework passes a new one for each update."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from inference_plugin.wire.errors import ArgumentError, ManifestMismatch
from inference_plugin.wire.host_memory import check_fits
from inference_plugin.wire.reports import UpdateReport
from inference_plugin.wire.tensors import bytes_view
from trainer_adapters.manager import SyncManager
from trainer_adapters.sources.export import ExportAdapter

__all__ = ["GeneratorUpdates"]

CHECKED_BYTES = 64 << 20
"""Free memory is asked for each time that the copy of a model has grown by as much."""

MEMORY = "the first update keeps what the generator yields: give rank 0's host more memory"


class GeneratorUpdates:
    """Updates of one manager, each from a new generator. `dtype`: in which all tensors travel. `process_group`: the manager's."""

    def __init__(
        self,
        manager: SyncManager,
        dtype: torch.dtype | str | None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self._manager = manager
        self._process_group = process_group
        self._dtype = dtype
        self._once = ReadOnce(is_sender=manager.rank == 0)
        self._source: ExportAdapter | None = None

    def update(self, weights: Iterable[tuple[str, torch.Tensor]], version: int | None = None) -> UpdateReport:
        """As `SyncManager.update`; collective like it. A failed update's names and shapes are forgotten, on all ranks as the
        error is raised on all: what is sent next may be another model. Raises `ProtocolError`, on all ranks, while one of them
        still waits in the generator of a failed update for a rank whose generator failed: the two would mix their tensors.

        A generator may yield a tied weight under each of its names; an engine that ties the two has no place for the second
        name, which is then left out (`ReadOnce.leave_out_copies`)."""
        self._once.give(weights)
        try:
            if self._source is not None:
                return self._manager.update(self._source, version)
            try:
                return self._first(version)
            except ManifestMismatch as refusal:
                if refusal.phase != "open":
                    raise
                self._once.leave_out_copies()
                try:
                    return self._first(version)  # all ranks raised the refusal, so all try again
                except ManifestMismatch:
                    raise refusal from None
        except BaseException:
            self._once, self._source = ReadOnce(is_sender=self._manager.rank == 0), None
            raise
        finally:
            self._once.forget()

    def _first(self, version: int | None) -> UpdateReport:
        self._source = OnceAdapter(self._once, self._dtype, self._process_group)
        return self._manager.update(self._source, version)


class OnceAdapter(ExportAdapter):
    """Tells `once` how often the next update reads it."""

    def __init__(
        self, once: ReadOnce, dtype: torch.dtype | str | None, process_group: dist.ProcessGroup | None
    ) -> None:
        self._once = once
        super().__init__(once, dtype_rules=dtype, process_group=process_group)

    def expect_reads(self, times: int) -> None:
        self._once.reads = times


class ReadOnce:
    """Makes an export of generators that can be read only once, one for each update.

    An `ExportAdapter` reads its first export twice, and an update over several transports reads each export once for each of
    them: then the sender, rank 0, keeps what it reads (the whole model) in host memory until the update is over. Else it passes
    tensors on directly. The other ranks run theirs only for its collectives, and send nothing.

    `reads`: how often the update reads its export. The first export is read once more before, for its names.
    """

    def __init__(self, *, is_sender: bool) -> None:
        self._given: Iterable[tuple[str, torch.Tensor]] | None = None
        self._is_sender = is_sender
        self._kept: list[tuple[str, torch.Tensor]] | None = None
        self._copied = ""
        self._copies: frozenset[str] = frozenset()
        self.reads = 2

    def give(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """What the next update reads. Raises `ArgumentError` for what cannot be read."""
        if not isinstance(weights, Iterable):
            raise ArgumentError(
                f"weights are a {type(weights).__name__}",
                hint="a generator of pairs (name, tensor) is taken",
                side="trainer",
            )
        self._given = weights

    def forget(self) -> None:
        """The update is over: frees what was kept for it."""
        self._kept = None

    def leave_out_copies(self) -> None:
        """The sender leaves out, from now on, the matrices that are byte for byte an earlier one of what it keeps, if that is
        always the same one: the table of a vocabulary, of which the model's head is a second name."""
        copies: dict[str, str] = {}
        matrices: dict[Any, list[tuple[str, torch.Tensor]]] = {}
        for name, tensor in self._kept or ():
            if tensor.dim() == 2:
                alike = matrices.setdefault((tensor.shape, tensor.dtype, bytes(raw(tensor[:1]).numpy())), [])
                first = next((one for one, other in alike if torch.equal(raw(other), raw(tensor))), None)
                alike.append((name, tensor))
                if first is not None:
                    copies[name] = first
        if len(set(copies.values())) == 1:
            self._copied, self._copies = next(iter(copies.values())), frozenset(copies)

    def __call__(self) -> Iterator[tuple[str, torch.Tensor]]:
        given, self._given = self._given, None
        if given is None:
            yield from self._without_copies(self._kept or ())
            return
        if not self._is_sender:
            for _ in given:
                pass
        elif self.reads == 1:
            yield from self._without_copies(given)
        else:
            self._kept = copies_of(given)
            yield from self._without_copies(self._kept)

    def _without_copies(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Raises `ManifestMismatch` for a copy that is none any more: the engine would compute with the other tensor."""
        if not self._copies:
            yield from pairs
            return
        table = None
        for name, tensor in pairs:
            if name == self._copied:
                table = raw(tensor.to("cpu", copy=True))
            if name not in self._copies:
                yield name, tensor
            elif table is None or not torch.equal(raw(tensor.cpu()), table):
                raise ManifestMismatch(
                    f"{name} differs from {self._copied}, with which the engine ties it",
                    hint="tie the two in the trainer too, or start the engine from a checkpoint whose configuration says "
                    "tie_word_embeddings=false",
                    side="trainer",
                )
            del tensor  # else it would live while the next one is made


def copies_of(pairs: Iterable[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    """The pairs, their tensors copied into host memory. Reads to the end also where a copy fails, because other ranks gather with
    this one. Raises `TransportUnavailable` if they don't fit."""
    kept: list[tuple[str, torch.Tensor]] = []
    failed: Exception | None = None
    asked_bytes = 0
    for pair in pairs:
        if failed is not None:
            continue
        try:
            if (nbytes := nbytes_of(pair)) > asked_bytes:
                asked_bytes = max(nbytes, CHECKED_BYTES)
                check_fits(asked_bytes, "more of rank 0's copy of the model", MEMORY)
            asked_bytes -= nbytes
            kept.append(copied(pair))
        except Exception as error:  # noqa: BLE001 -- raised at the end
            failed, kept = error, []
        del pair  # before the next tensor is made
    if failed is not None:
        raise failed
    return kept


def nbytes_of(pair: Any) -> int:
    match pair:
        case (_, torch.Tensor() as tensor):
            return int(tensor.nbytes)
    return 0


def copied(pair: Any) -> Any:
    """The pair, its tensor copied into host memory. What is no such pair is left as it is: the adapter refuses it by name."""
    match pair:
        case (name, torch.Tensor() as tensor):
            return name, tensor.detach().to("cpu", copy=True)
    return pair


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes: those of a NaN equal themselves."""
    return bytes_view(tensor.contiguous())
