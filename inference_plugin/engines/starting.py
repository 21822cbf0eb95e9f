"""Tells `weightwire status` of an engine that is starting, and is no replica yet.

An engine starts in several processes, and the mark goes from one to the next: the one in which a user asked for the engine sets
it first, and the one that loads the model takes it over.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

from inference_plugin.engines.monkeypatch import contained
from inference_plugin.net import diagnosis
from inference_plugin.wire.errors import WeightwireError

__all__ = ["begin_start", "end_start", "ends_start"]

_marks: list[Path] = []
"""Files of this process's engine that is starting; one at most."""


def begin_start(engine: str, model: object, logger: logging.Logger) -> None:
    """From now on this process starts `engine`, and no process that it descends from does. Never raises."""
    end_start()
    with contained("noting that the engine starts", logger):
        try:
            _marks.append(diagnosis.note_start(engine, f"model {model}"))
        except (OSError, WeightwireError) as error:
            logger.warning("weightwire: until it is a replica, `weightwire status` won't show this engine: %s", error)


def end_start() -> None:
    """The engine is a replica, runs without us, or could not start. Never raises."""
    while _marks:
        with contextlib.suppress(OSError):
            _marks.pop().unlink(missing_ok=True)


@contextlib.contextmanager
def ends_start() -> Iterator[None]:
    """Around the end of an engine's start."""
    try:
        yield
    finally:
        end_start()
