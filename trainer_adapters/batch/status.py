"""Where the rows of a batch are."""

from __future__ import annotations

import enum

__all__ = ["BatchStatus"]


class BatchStatus(enum.Enum):
    """Where the rows of a batch are.

    | keys | data is here | rows | status   | item access         | assignment          | `fetch`        |
    |------|--------------|------|----------|---------------------|---------------------|----------------|
    | yes  | yes          | any  | `LOCAL`  | the rows, even if 0 | yes                 | does nothing   |
    | yes  | no           | >= 1 | `REMOTE` | raises `NotFetched` | raises `NotFetched` | makes it LOCAL |
    | yes  | no           | 0    | `EMPTY`  | raises `NotFetched` | raises `NotFetched` | makes it LOCAL |
    | no   | -            | 0    | `EMPTY`  | raises `UnknownKey` | makes it LOCAL      | does nothing   |

    The third line is an empty chunk of a REMOTE batch: it keeps its keys and joins LOCAL and REMOTE batches alike. All keys of a
    batch have one status. A fetch that fails leaves the batch REMOTE. Every operation accepts every status, except those that
    read rows (`batch[key]`, `dense`, `padded`) and for `concat` and `union` of LOCAL beside REMOTE.
    """

    LOCAL = "local"
    REMOTE = "remote"
    EMPTY = "empty"
