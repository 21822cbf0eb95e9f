"""The objects that a rank of `store` has uploaded: an anchor with all of its bytes, and the changes of each update since."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

from inference_plugin.transports.objects import ObjectStore
from inference_plugin.transports.pieces import Bytes
from inference_plugin.wire.config import Config
from inference_plugin.wire.geometry import Piece
from inference_plugin.wire.manifest import Manifest

__all__ = ["Chain", "Link", "StoredObject", "Told", "Upload"]

MOST_LINKS = 40
"""Updates of changes after an anchor: a worker that comes late reads them all, and the rank remembers their pieces."""

MOST_PIECES = 1 << 14
"""Of one object, so that a message about it stays small."""


class Told(NamedTuple):
    """Pieces of an object of a link, each with where it begins in the object and how many bytes it takes."""

    key: str
    follows: bytes
    pieces: Sequence[Piece]
    offsets: Sequence[int]
    sizes: Sequence[int]

    def only(self, chosen: Sequence[int]) -> Told:
        """These of the pieces, by number."""
        pieces, offsets = [self.pieces[i] for i in chosen], [self.offsets[i] for i in chosen]
        return Told(self.key, self.follows, pieces, offsets, [self.sizes[i] for i in chosen])


class StoredObject(NamedTuple):
    """Pieces that lie one after the other."""

    key: str
    pieces: tuple[Piece, ...]
    sizes: tuple[int, ...]

    def told(self, follows: bytes) -> Told:
        offsets = list(itertools.accumulate(self.sizes, initial=0))[:-1]
        return Told(self.key, follows, self.pieces, offsets, self.sizes)


@dataclass
class Link:
    """One update's objects. `name`: what its bytes are called. `follows`: the bytes that it changes, b"" where every piece is
    whole. A piece that changed in most places is whole in every link."""

    follows: bytes
    name: bytes
    objects: list[StoredObject] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return sum(sum(each.sizes) for each in self.objects)


class Chain:
    """The links that workers are told of."""

    def __init__(self) -> None:
        self._anchor: Link | None = None
        self._changes: list[Link] = []
        self._in_anchor = 0
        """How many of the changes the anchor has in it."""

    @property
    def links(self) -> list[Link]:
        return [*([self._anchor] if self._anchor is not None else ()), *self._changes]

    @property
    def keys(self) -> set[str]:
        return {each.key for link in self.links for each in link.objects}

    @property
    def is_long(self) -> bool:
        """Whether reading the changes since the anchor takes longer than reading a new one."""
        since = self._changes[self._in_anchor :]
        return (
            self._anchor is None or len(since) >= MOST_LINKS or sum(each.nbytes for each in since) > self._anchor.nbytes
        )

    @property
    def changes_little(self) -> bool:
        """Whether the last update's changes are few, in comparison with an anchor."""
        return self._anchor is not None and bool(self._changes) and 2 * self._changes[-1].nbytes < self._anchor.nbytes

    def begin(self, anchor: Link, beside: Link | None) -> None:
        """`beside`: the changes of the anchor's update, for workers that hold the one before. The older links are forgotten."""
        self._anchor, self._changes = anchor, [beside] if beside is not None else []
        self._in_anchor = len(self._changes)

    def extend(self, changes: Link) -> None:
        self._changes.append(changes)

    def path(self, held: bytes, manifest: Manifest) -> list[Told]:
        """What leads from the bytes called `held` to the last ones, in order. Of each piece only from where it was whole for the
        last time: before, it may have been cut in another way, or been another rank's."""
        assert self._anchor is not None
        after = next((i for i, link in enumerate(self._changes) if link.follows == held), None)
        links = self._changes[after:] if after is not None else [self._anchor, *self._changes[self._in_anchor :]]
        missing = {piece.box for each in links[-1].objects for piece in each.pieces}
        found: list[Told] = []
        for link in reversed(links):
            for each in reversed(link.objects):
                told = each.told(link.follows)
                if chosen := [i for i, piece in enumerate(each.pieces) if piece.box in missing]:
                    found.append(told.only(chosen))
                    missing -= {
                        told.pieces[i].box for i in chosen if told.sizes[i] == manifest.box_nbytes(told.pieces[i].box)
                    }
        return found[::-1]


class Upload:
    """Packs the pieces of one link into objects, of which some are uploaded at once. `uploaded` hears of each, in order."""

    def __init__(
        self,
        link: Link,
        store: ObjectStore,
        new_key: Callable[[], str],
        config: Config,
        until_s: float,
        uploaded: Callable[[Told], None],
    ) -> None:
        self.link = link
        self._store, self._new_key, self._until_s, self._uploaded = store, new_key, until_s, uploaded
        self._bucket_bytes, self._at_once = config.bucket_bytes, config.buffers
        self._under_way: collections.deque[tuple[StoredObject, Future[None] | None]] = collections.deque()
        self._pack_anew()

    def add(self, piece: Piece, data: Bytes) -> None:
        """Takes a piece, as `data`. Raises what an upload raised."""
        if len(self._data) + data.nbytes > self._bucket_bytes or len(self._pieces) == MOST_PIECES:
            self.flush()
        self._data += data.data
        self._pieces.append(piece)
        self._sizes.append(data.nbytes)
        self._settle_done()

    def flush(self) -> None:
        """Begins to upload what is packed, once few enough uploads are under way."""
        if not self._pieces:
            return
        while len(self._under_way) >= self._at_once:
            self._settle()
        packed = StoredObject(self._new_key(), tuple(self._pieces), tuple(self._sizes))
        self._under_way.append((packed, self._store.write(packed.key, bytes(self._data)) if self._data else None))
        self._pack_anew()
        self._settle_done()

    def finish(self) -> None:
        """Waits until all is uploaded."""
        self.flush()
        while self._under_way:
            self._settle()

    def _pack_anew(self) -> None:
        self._data = bytearray()
        self._pieces: list[Piece] = []
        self._sizes: list[int] = []

    def _settle_done(self) -> None:
        while self._under_way and ((call := self._under_way[0][1]) is None or call.done()):
            self._settle()

    def _settle(self) -> None:
        packed, call = self._under_way.popleft()
        if call is not None:
            self._store.result(call, f"writing object {packed.key}", self._until_s)
        self.link.objects.append(packed)
        self._uploaded(packed.told(self.link.follows))
