"""Same GPU: trainer ranks write the workers' second sets of weights in the GPU's memory, in the engine's layout.

1. each worker makes a *zone*: one allocation of device memory for all that its installer copies plainly, and a *card*, a memfd
   that says the device, the memory's handle and which box lands where. The answer to `Begin` says where the card is.
2. every trainer rank takes a shared lock on each card, maps its zone, copies its slices there on the device, and digests them on
   the device, in its own memory. It ends the mapping, and then the lock, before it says that it wrote.
3. each worker takes the card's exclusive lock, so that nobody can map the zone any more, and compares the pieces with their
   digests, on the device.
4. the commit swaps pointers or, where captured graphs hold addresses, copies within the device's memory. The zone that is then
   free is the next update's.

A mapping of device memory can't be revoked. So a zone whose update did not commit is never used again, and its memory is freed
only once its card's lock shows that no rank has it mapped: the kernel ends a lock when its process ends, and not before.
"""

from __future__ import annotations

import contextlib
import fcntl
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated

import msgspec
import torch

from inference_plugin.devices import Runs, SharedMemory, device_of, in_use, present
from inference_plugin.net.addresses import here
from inference_plugin.transports.base import Delivery, Sender, Target, Transport, WriteStats
from inference_plugin.transports.device_pieces import PIECE_BYTES, DevicePieces, KnownRuns, KnownSpots
from inference_plugin.transports.segment import SegmentAddress, SharedSegment
from inference_plugin.transports.shm import TRANSPORT as SHM
from inference_plugin.transports.zone import AnyZone, ZoneReceiver, ZoneStaging
from inference_plugin.wire.codec import decode_as
from inference_plugin.wire.errors import DigestMismatch, ProtocolError, TransportUnavailable
from inference_plugin.wire.geometry import Box, Piece
from inference_plugin.wire.manifest import Manifest
from inference_plugin.wire.zone import ZoneLayout

__all__ = ["TRANSPORT"]

ZONES = 2
"""Used in turn: the one that a commit made current, and the next update's."""


class Probe(msgspec.Struct, frozen=True):
    """What the first trainer rank has: its host and runtime directory, and the devices whose memory it can map."""

    here: Annotated[str, msgspec.Meta(max_length=8192)]
    devices: Annotated[tuple[Annotated[str, msgspec.Meta(max_length=200)], ...], msgspec.Meta(max_length=1024)]


class Card(msgspec.Struct, frozen=True):
    """What a rank must know to write into a zone."""

    device: Annotated[str, msgspec.Meta(max_length=200)]
    handle: Annotated[bytes, msgspec.Meta(max_length=4096)]
    layout: ZoneLayout


class CardAddress(msgspec.Struct, frozen=True):
    """Where a card can be opened: its first bytes are the card."""

    segment: SegmentAddress
    nbytes: Annotated[int, msgspec.Meta(ge=1, lt=1 << 32)]


# --- the worker's side -------------------------------------------------------------------------------------------------------


class DeviceZone:
    """A worker's zone. Weights that lie in it keep its memory after `close`; so does whoever has it mapped."""

    def __init__(self, layout: ZoneLayout) -> None:
        device = in_use()
        self.layout = layout
        _check_fits(layout.nbytes)  # the digests' memory is torch's by then
        # The card outlives the zone: its lock says when the memory may be freed.
        self._lock = _WriterLock()
        memory = device.share(layout.nbytes, self._lock.free_when_unwritten)
        self.memory: torch.Tensor = memory.tensor
        card = msgspec.msgpack.encode(Card(device.uuid(), memory.handle, layout))
        self.address = CardAddress(self._lock.write(card), len(card))

    def seal(self) -> None:
        """From now on nobody can map it. Raises `ProtocolError` if a rank still has it mapped."""
        if not self._lock.take():
            raise ProtocolError("a trainer rank said that it wrote, and still has the zone mapped")

    def unseal(self) -> None:
        """Ranks may map it again."""
        self._lock.give_back()

    def close(self) -> None:
        """May be called twice."""
        self.memory = torch.empty(0, dtype=torch.uint8)


class _WriterLock:
    """The lock on a zone's card: shared by all who have the zone mapped, exclusive for the worker that sealed it."""

    def __init__(self) -> None:
        self._segment: SharedSegment | None = None

    def write(self, card: bytes) -> SegmentAddress:
        self._segment = SharedSegment.create(len(card))
        self._segment.write(0, card)
        return self._segment.address

    def take(self) -> bool:
        return self._segment is None or _lock(self._segment, fcntl.LOCK_EX)

    def give_back(self) -> None:
        if self._segment is not None:
            fcntl.flock(self._segment.fd, fcntl.LOCK_UN)

    def free_when_unwritten(self, free: Callable[[], None]) -> None:
        """`Unused` of the zone's memory. Another thread frees it: freeing waits for the device, and this may be the engine's."""

        def wait() -> None:
            if self._segment is not None:
                fcntl.flock(self._segment.fd, fcntl.LOCK_EX)  # until the last rank that has it mapped lets go or ends
                self._segment.close()
            free()

        with contextlib.suppress(RuntimeError):  # the interpreter is ending, and the memory with it
            threading.Thread(target=wait, name="weightwire-zone-end", daemon=True).start()


class DeviceZoneStaging(ZoneStaging):
    """The zone of one transaction, in a device's memory."""

    def __init__(self, receiver: ZoneReceiver, zone: DeviceZone, spots: KnownSpots) -> None:
        super().__init__(receiver, zone)
        self._seal = zone.seal
        self._spots = spots
        zone.unseal()

    def check(self, manifest: Manifest, pieces: Iterable[Piece], between: Callable[[], None], threads: int = 1) -> int:
        return self.start_check(manifest, pieces, between, threads)()

    def start_check(
        self, manifest: Manifest, pieces: Iterable[Piece], between: Callable[[], None], threads: int = 1
    ) -> Callable[[], int]:
        self._seal()
        pieces = tuple(pieces)
        spots = self._spots.of(manifest, (piece.box for piece in pieces), self.lying)
        found = device_of(self.segment.device).new_digests()
        for batch in spots:
            if batch.starts is None:
                found.add([lying.view(self.segment) for lying in batch.lying])
            else:
                found.add_runs([Runs(self.segment, batch.starts, batch.lengths)])
            between()

        def end() -> int:
            positions = [position for batch in spots for position in batch.pieces]
            for position, digest in zip(positions, found.end(), strict=True):
                if digest != pieces[position].digest:
                    raise DigestMismatch(f"{manifest.describe(pieces[position].box)} is not what the trainer sent")
            return sum(batch.nbytes for batch in spots)

        return end


class DeviceZoneReceiver(ZoneReceiver):
    """Two zones used in turn, in a device's memory."""

    def __init__(self) -> None:
        super().__init__()
        self._spots = KnownSpots()

    def _new_zone(self, layout: ZoneLayout) -> AnyZone:
        return DeviceZone(layout)

    def _new_staging(self, zone: AnyZone) -> ZoneStaging:
        assert isinstance(zone, DeviceZone)
        return DeviceZoneStaging(self, zone, self._spots)

    def check_probe(self, probe: bytes) -> None:
        offered = decode_as(probe, Probe)
        if offered.here != here():
            raise TransportUnavailable("cuda_ipc: the trainer is on another host, or has another runtime directory")
        if not (mine := in_use().uuid()) or mine not in offered.devices:
            raise TransportUnavailable(
                f"cuda_ipc: the trainer's first rank can't map memory of this worker's device {mine}",
                hint="transport 'shm' goes through the host's memory",
            )

    def land_in(self, layout: ZoneLayout, device: str) -> None:
        if device != in_use().type:
            raise TransportUnavailable(f"cuda_ipc: the weights are on {device}")
        _check_fits(ZONES * layout.nbytes, in_use().new_digests().held_bytes(layout.nbytes))
        self._layout, self._spots = layout, KnownSpots()

    def drop_kept(self) -> None:
        super().drop_kept()
        live, self._live = self._live, None
        if live is not None:
            live.close()  # weights that were swapped in keep its memory; copied ones don't need it


# --- the trainer's side ------------------------------------------------------------------------------------------------------


class CudaIpcSender(Sender):
    """Maps each zone for one `write`. It keeps the cards of the last two of each worker."""

    def __init__(self) -> None:
        self._cards: dict[str, Card] = {}
        self._runs = KnownRuns()

    def probe(self) -> bytes:
        return msgspec.msgpack.encode(Probe(here(), in_use().reachable()))

    def allocate(self, manifest: Manifest, busy: frozenset[str]) -> bytes:
        return b""

    def edges(self, manifest: Manifest, target: Target) -> Sequence[Box]:
        address = decode_as(target.landing, CardAddress)
        if (card := self._cards.get(address.segment.segment_id)) is None:
            with contextlib.closing(SharedSegment.attach(address.segment, writable=False)) as segment:
                card = self._card(segment, address, manifest)
        return [place.box for place in card.layout.places]

    def write(self, delivery: Delivery) -> tuple[list[Piece], WriteStats]:
        manifest, targets = delivery.manifest, delivery.targets
        stats = WriteStats()
        with contextlib.ExitStack() as mapped:
            zones = [self._mapped(manifest, target, mapped) for target in targets]
            batch = DevicePieces(
                manifest,
                zones,
                stats,
                self._runs,
                slices_last=delivery.slices_last,
                piece_bytes=delivery.piece_bytes,
            )
            for item in delivery.slices:
                batch.add(item)
                del item  # before the next one is made
                delivery.check_deadline(stats.nbytes)
            pieces = batch.end()
        for known in list(self._cards)[: -ZONES * len(targets)]:
            del self._cards[known]
        return pieces, stats

    def close(self) -> None:
        self._cards.clear()

    def _mapped(
        self, manifest: Manifest, target: Target, mapped: contextlib.ExitStack
    ) -> tuple[torch.Tensor, ZoneLayout]:
        """A worker's zone, mapped and locked until `mapped` ends."""
        address = decode_as(target.landing, CardAddress)
        segment = mapped.enter_context(contextlib.closing(SharedSegment.attach(address.segment, writable=False)))
        if not _lock(segment, fcntl.LOCK_SH):
            raise TransportUnavailable(
                f"cuda_ipc: rank {target.rank} of replica {target.replica} has sealed or dropped its zone"
            )
        mapped.callback(fcntl.flock, segment.fd, fcntl.LOCK_UN)  # a child forked meanwhile would keep it
        card = self._card(segment, address, manifest)
        memory: SharedMemory = in_use().attach(card.handle, card.layout.nbytes, card.device)
        mapped.callback(memory.close)
        mapped.callback(_wait_for, memory.tensor.device)
        return memory.tensor, card.layout

    def _card(self, segment: SharedSegment, address: CardAddress, manifest: Manifest) -> Card:
        """A zone's card. The last one that was asked for comes last; the zones of a worker share one `ZoneLayout`."""
        card = self._cards.pop(address.segment.segment_id, None)
        if card is None:
            card = segment.read(0, address.nbytes, Card)
            card.layout.check(manifest)
            same = (other.layout for other in self._cards.values() if other.layout == card.layout)
            card = Card(card.device, card.handle, next(same, card.layout))
        self._cards[address.segment.segment_id] = card
        return card


def _lock(segment: SharedSegment, kind: int) -> bool:
    try:
        fcntl.flock(segment.fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _wait_for(where: torch.device) -> None:
    """Returns once all copies of this thread into memory of that device have ended."""
    device = device_of(where)
    if where.index in (None, device.current()):
        device.synchronise()
    else:
        device.drain(where)


def _check_fits(nbytes: int, beside_bytes: int = 0) -> None:
    """Raises `TransportUnavailable` unless this process's device has so much memory free. `beside_bytes`: for digests."""
    device = in_use()
    if nbytes + beside_bytes > (free := device.free_bytes(torch.device(device.type, device.current() or 0))):
        takes = f"{nbytes >> 20} MiB" + (f" and {beside_bytes >> 20} MiB for its digests" if beside_bytes else "")
        raise TransportUnavailable(
            f"cuda_ipc: a second set of weights, {takes}, does not fit: {free >> 20} MiB of the device are free",
            hint="transport 'shm' with install='copy' holds at most one on the device",
        )


TRANSPORT = Transport(
    name="cuda_ipc",
    summary="same GPU: trainer ranks write a second set in its memory, which the commit swaps in or copies; digests on the GPU",
    preference=3,
    why_not=lambda: SHM.why_not() or present().why_not_shared(),
    sender=CudaIpcSender,
    receiver=DeviceZoneReceiver,
    copies_per_byte=1,  # trainer -> zone, which is swapped in
    sends=True,
    lands_in_zone=True,
    piece_bytes=PIECE_BYTES,
)
