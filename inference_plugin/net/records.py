"""What a replica has counted since its engine started, as a file beside its card: for `/metrics`, `/ready` and `weightwire top`.

The coordinator replaces the file after each commit. Reading it asks no process, so a scrape waits for nobody.
"""

from __future__ import annotations

import msgspec

from inference_plugin.net.addresses import replace_file, runtime_dir
from inference_plugin.wire.codec import decode_as
from inference_plugin.wire.errors import ProtocolError
from inference_plugin.wire.messages import ReplicaCard

__all__ = ["GroupRecord", "ReplicaRecord", "record_of", "save_record"]


class GroupRecord(msgspec.Struct, frozen=True):
    """Commits of one group. Seconds and bytes are sums over all commits; `failures` counts by error class."""

    version: int | None = None
    commits: int = 0
    failures: dict[str, int] = {}
    waited_s: float = 0.0
    install_s: float = 0.0
    stopped_s: float = 0.0
    installed_bytes: int = 0
    committed_at_unix_s: float = 0.0


class ReplicaRecord(msgspec.Struct, frozen=True):
    """All groups of a replica that took a commit, or failed to."""

    groups: dict[str, GroupRecord] = {}


def save_record(replica: str, record: ReplicaRecord) -> None:
    """Replaces the replica's record. Raises OSError if the directory can't be written."""
    replace_file(runtime_dir() / f"{replica}.counts", msgspec.msgpack.encode(record))


def record_of(card: ReplicaCard) -> ReplicaRecord:
    """What the replica of `card` has counted; an empty record where there is none, or one that can't be read."""
    try:
        return decode_as((runtime_dir(card.job) / f"{card.replica}.counts").read_bytes(), ReplicaRecord)
    except (OSError, ProtocolError):
        return ReplicaRecord()
