"""What a worker's function returns, and the part of a store that a worker uses."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

from inference_plugin.wire.errors import BatchError
from inference_plugin.wire.messages.rollout import MAX_TAGS
from trainer_adapters.batch.records import (
    ClearReport,
    Entry,
    Owner,
    TagValue,
    VersionSpan,
    check_versions,
    is_unicode,
)

__all__ = ["Generate", "Generated", "RowStore", "checked_tags"]

MAX_TAG_CHARS = 4096
MAX_TAG_NAME_CHARS = 256


class Generated(NamedTuple):
    """What a task made: rows by key as `Store.put` takes them, the weight versions they were generated with, and tags.

    Tags go through the controller, rows do not: keep tags few and small. They are in `Rollout.tags` and `batch.tags`.
    """

    data: Mapping[str, Any]
    versions: VersionSpan | None = None
    tags: Mapping[str, TagValue] = {}


Generate = Callable[[str, Any], Awaitable[Generated | Mapping[str, Any]]]
"""The user's function: `await generate(task_id, payload)`. It may raise, and is cancelled where its result is not wanted."""


class RowStore(Protocol):
    """What a worker needs of `trainer_adapters.batch.store.Store`."""

    owner: Owner

    def put(
        self, task_id: str, data: Mapping[str, Any], versions: VersionSpan | None = None, timeout_s: float = 0.0
    ) -> tuple[Entry, ...]: ...

    def clear(self, task_ids: Any) -> ClearReport: ...

    def held(self, task_ids: Iterable[str]) -> set[str]: ...


def checked_tags(made: Generated) -> dict[str, TagValue]:
    """The tags of what a function returned. Raises `BatchError` for invalid data, versions or tags."""
    if not isinstance(made.data, Mapping):
        raise BatchError(
            f"the worker's function returned a {type(made.data).__name__}",
            hint="return Generated(data, versions, tags), or the data alone: rows by key",
        )
    check_versions(made.versions)
    if len(made.tags) > MAX_TAGS:
        raise BatchError(f"{len(made.tags)} tags; allowed are {MAX_TAGS}")
    for name, value in made.tags.items():
        if type(name) is not str or len(name) > MAX_TAG_NAME_CHARS:
            raise BatchError(f"the tag name {name!r:.300} must be a str of at most {MAX_TAG_NAME_CHARS} characters")
        if type(value) not in (type(None), bool, int, float, str):
            raise BatchError(
                f"tag {name!r} is a {type(value).__name__}; allowed are None, bool, int, float and str",
                hint="put rows into data; tags are for what the controller needs to see",
            )
        for text in (name, value):
            if isinstance(text, str) and not is_unicode(text):
                raise BatchError(f"tag {name!r} holds a surrogate in {text!r:.300}, which no message can carry")
        if isinstance(value, str) and len(value) > MAX_TAG_CHARS:
            raise BatchError(f"tag {name!r} has {len(value)} characters; allowed are {MAX_TAG_CHARS}")
        if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
            raise BatchError(f"tag {name!r} does not fit into 64 bits: {value}")
    return dict(made.tags)
