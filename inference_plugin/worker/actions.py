"""What a worker's groups ask their shell to do: answer, start work that takes time, tell listeners, log.

Plain data; the shell (`groups`, `work`) performs it.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from inference_plugin.wire.errors import WeightwireError
from inference_plugin.wire.geometry import Piece
from inference_plugin.wire.messages import Bucket, GroupOpened, GroupState, OpenGroup, Relay

__all__ = [
    "Action", "AgreeOnTerms", "Cancel", "CheckPieces", "CleanUp", "CloseWork", "DropStaging", "Fail", "FreeMemory",
    "KeepTerms", "MapStaging", "Mapped", "PassOn", "PutInForce", "ReceiveBucket", "Reply", "SettleStaging", "Stage",
    "StartWork", "StateChanged", "Terms", "Warn", "WayBack", "WeightsState", "Work",
]  # fmt: skip

# --- work: what takes time. One at a time for each group, but for `Stage`, which runs beside it -----------------------


class AgreeOnTerms(Struct, frozen=True):
    """The transport and the installer agree on terms; the result is `Terms`."""

    request: OpenGroup


class PutInForce(Struct, frozen=True):
    """The terms that were agreed last are in force. `previous`: the transaction of the way back, which goes."""

    previous: str = ""


class KeepTerms(Struct, frozen=True):
    """The terms that were agreed last are refused: the installer returns to those of `request`, if there are any."""

    request: OpenGroup | None


class MapStaging(Struct, frozen=True):
    """Opens the staging memory of a transaction by the terms in force; the result is `Mapped`."""

    txn: str
    version: int
    segment: bytes


class ReceiveBucket(Struct, frozen=True):
    """Puts a bucket's bytes into the staging memory, or into the live parameters where they are streamed."""

    txn: str
    bucket: Bucket
    payload: memoryview


class PassOn(Struct, frozen=True):
    """Starts to relay buckets to other workers."""

    txn: str
    relay: Relay


class CheckPieces(Struct, frozen=True):
    """Checks that the list of pieces covers what this worker needs, and that it is the one that `digest` names."""

    txn: str
    pieces: tuple[Piece, ...]
    digest: str


class Stage(Struct, frozen=True):
    """Waits for all bytes, compares each piece with its digest, and lets the installer prepare; the result is `Sealed`."""

    txn: str
    digest: str


class CleanUp(Struct, frozen=True):
    """Frees what a dropped transaction held."""

    txn: str


class SettleStaging(Struct, frozen=True):
    """The transaction is committed, and its staging is kept as the way back."""

    txn: str


class DropStaging(Struct, frozen=True):
    """Frees the staging of a committed transaction. `reused`: its memory is another transaction's by now, and stays."""

    txn: str
    reused: bool = False


class FreeMemory(Struct, frozen=True):
    """Frees what is kept between updates. `previous`: the transaction of the way back, which goes."""

    previous: str = ""


class CloseWork(Struct, frozen=True):
    """Frees all that the group holds; its last work."""

    previous: str = ""


Work = (
    AgreeOnTerms
    | PutInForce
    | KeepTerms
    | MapStaging
    | ReceiveBucket
    | PassOn
    | CheckPieces
    | Stage
    | CleanUp
    | SettleStaging
    | DropStaging
    | FreeMemory
    | CloseWork
)


class Terms(Struct, frozen=True):
    """Result of `AgreeOnTerms`. `opened`: the answer to `OpenGroup`; `claims`: the parameters that an update
    writes; `whole`: such an update is one of the whole model."""

    opened: GroupOpened
    claims: frozenset[str]
    whole: bool


class Mapped(Struct, frozen=True):
    """Result of `MapStaging`. `takes_late`: buckets may come after the seal was asked for. `landing`: where the trainer writes,
    if that is memory of this worker. `streams`: the bytes go into the live parameters while the update is being committed."""

    segment_id: str
    takes_late: bool
    landing: bytes = b""
    streams: bool = False


# --- actions ----------------------------------------------------------------------------------------------------------


class Reply(Struct, frozen=True):
    """Answers `asker`."""

    asker: Any
    body: Any


class Fail(Struct, frozen=True):
    """Answers `asker` with an error."""

    asker: Any
    error: WeightwireError


class StartWork(Struct, frozen=True):
    """Starts work for a group; `WorkEnded` reports its end. `member` tells groups of one name apart: one may still be
    closing while the next is opened."""

    member: int
    group: str
    number: int
    work: Work


class Cancel(Struct, frozen=True):
    """Work for a dropped transaction ends as soon as it can."""

    member: int
    txn: str


class StateChanged(Struct, frozen=True):
    """Tells listeners of a group's new state."""

    group: str
    state: GroupState


class Warn(Struct, frozen=True):
    """Logs a warning."""

    text: str


class WayBack(Struct, frozen=True):
    """Answer to `StartUndo`: the version and the transaction to go back to (no transaction if its bytes are not kept), and the
    transaction that is undone."""

    version: int = -1
    txn: str = ""
    undone: str = ""


class WeightsState(Struct, frozen=True):
    """Answer to `LookAtWeights`: the installed version, and how often the live parameters may have been written so far."""

    version: int | None
    writes: int


Action = Reply | Fail | StartWork | Cancel | StateChanged | Warn
