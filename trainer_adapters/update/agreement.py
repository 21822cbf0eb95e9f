"""Checks, without a collective, that the trainer's ranks have the same model.

Claims are the boxes that each rank is going to write. They go to rank 0 with the first update, and again when they change. Rank
0 compares them with the manifest, so that a box that no rank or two ranks write is named before a byte moves. Copies are boxes
that a rank holds and another rank sends, if nothing keeps the two equal. Their digests are compared in some of the updates.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from inference_plugin.transports.pieces import pieces_of
from inference_plugin.wire.config import PIECE_BYTES
from inference_plugin.wire.cover import check_exact_cover
from inference_plugin.wire.digest import digest_bytes
from inference_plugin.wire.errors import ManifestMismatch, first_few
from inference_plugin.wire.geometry import Box, Piece
from inference_plugin.wire.manifest import Manifest
from inference_plugin.wire.messages import Ready
from trainer_adapters.sources.base import LocalSlice

__all__ = ["Claims", "digests_of", "what_differs"]

HINT = (
    "build the same model and the same adapter on every rank; DTensorAdapter(process_group=...) says which ranks are "
    "one trainer"
)


class Claims:
    """The last claims of each rank on which the ranks agreed; on ranks above 0, only the rank's own."""

    def __init__(self) -> None:
        self._agreed: dict[int, tuple[str, tuple[Box, ...]]] = {}
        self._alike = ""
        self._updates = 0

    def is_new(self, manifest: Manifest) -> bool:
        """On ranks above 0: whether rank 0 may not know this manifest. It counts as unknown from then until they agree."""
        known, self._alike = self._alike, ""
        return known != manifest.fingerprint

    def news(
        self, rank: int, manifest: Manifest, claims: tuple[Box, ...] | None
    ) -> tuple[tuple[Box, ...] | None, bool]:
        """`(claims, same)` for `Ready`: claims that rank 0 knows already are not sent again. Other ones count as unknown from
        here on until the ranks agree: after a failure nobody knows which of them rank 0 has."""
        same = claims is not None and self._agreed.get(rank) == (manifest.fingerprint, claims)
        if not same:
            self._agreed.pop(rank, None)
        return (None, True) if same else (claims, False)

    def agree(self, rank: int, manifest: Manifest, claims: tuple[Box, ...] | None) -> None:
        """Rank 0 has heard a rank's claims, and the ranks have one manifest."""
        self._alike = manifest.fingerprint
        if claims is None:
            self._agreed.pop(rank, None)
        else:
            self._agreed[rank] = (manifest.fingerprint, claims)

    def check(self, manifest: Manifest, mine: tuple[Box, ...] | None, readies: Sequence[Ready]) -> None:
        """On rank 0: raises `ManifestMismatch` if the ranks' claims don't cover the manifest exactly.

        It does nothing if no claims are new, or if a rank does not know its claims: then the pieces that the ranks wrote are
        checked.
        """
        fresh = [ready for ready in readies if not ready.same_claims]
        if not fresh and self.news(0, manifest, mine)[1]:
            return
        self._updates = 0
        self.agree(0, manifest, mine)
        for ready in fresh:
            self.agree(ready.rank, manifest, ready.claims)
        ranks = [0, *(ready.rank for ready in readies)]
        if any(self._agreed.get(rank, ("",))[0] != manifest.fingerprint for rank in ranks):
            return
        owned = [(box, f"rank {rank}") for rank in ranks for box in self._agreed[rank][1]]
        try:
            check_exact_cover(manifest, owned)
        except ManifestMismatch as error:
            for rank in (0, *(ready.rank for ready in fresh)):  # these will be told again
                self._agreed.pop(rank, None)
            message = f"the trainer's ranks don't hold the model, each byte once: {error.message}"
            raise ManifestMismatch(message, hint=HINT, side="trainer") from None

    def copies_are_due(self) -> bool:
        """Whether rank 0 has copies compared in this update: in the 1st, 2nd, 4th, 8th, ... since the claims changed, or since
        a comparison failed. Copies that differ once stay different, so ever rarer comparisons still find them, and cost little in
        the long run."""
        self._updates += 1
        return self._updates & (self._updates - 1) == 0

    @contextmanager
    def comparing(self, copies: bool) -> Iterator[None]:
        """Around the writing of all ranks. If it fails while `copies` are compared, the next update compares them: nobody knows
        that they are equal."""
        try:
            yield
        except BaseException:
            if copies:
                self._updates = 0
            raise


def digests_of(manifest: Manifest, slices: Iterable[LocalSlice], piece_bytes: int = PIECE_BYTES) -> Iterator[Piece]:
    """The pieces of at most `piece_bytes` into which `slices` would be cut, with their digests."""
    for item in slices:
        yield from (Piece(cut.box, digest_bytes(data)) for cut, data in pieces_of(manifest, item, piece_bytes))
        del item  # before the next one is made


def what_differs(manifest: Manifest, sent: Mapping[int, Iterable[Piece]], copies: Mapping[int, Iterable[Piece]]) -> str:
    """Names the copies that differ from the sent pieces, with ranks and digests; "" if there are none. A copy whose box was sent
    in other pieces is not compared."""
    compared = {piece.box for pieces in copies.values() for piece in pieces}
    if not compared:
        return ""
    senders = {
        piece.box: (rank, piece.digest) for rank, pieces in sent.items() for piece in pieces if piece.box in compared
    }
    differ: dict[Box, list[str]] = {}
    for rank, pieces in copies.items():
        for piece in pieces:
            sender, digest = senders.get(piece.box, (rank, piece.digest))
            if digest != piece.digest:
                words = differ.setdefault(
                    piece.box, [f"{manifest.describe(piece.box)}: {digest:016x} on rank {sender}"]
                )
                words.append(f"{piece.digest:016x} on rank {rank}")
    return first_few([", ".join(words) for words in differ.values()]) if differ else ""
