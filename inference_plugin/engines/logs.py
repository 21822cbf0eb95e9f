"""Shows what the plug-in logs as the engine shows its own lines."""

from __future__ import annotations

import logging

__all__ = ["log_like"]

_OURS = "inference_plugin"


class _Borrowed(logging.Handler):
    """Gives records to the handlers of the engine's logger, unless the program has configured the root logger, which gets them
    anyway: a line never appears twice."""

    def __init__(self, engine: logging.Logger) -> None:
        super().__init__()
        self._engine = engine

    def emit(self, record: logging.LogRecord) -> None:
        if logging.getLogger().handlers:
            return
        for handler in self._engine.handlers:
            if record.levelno >= handler.level:
                handler.handle(record)


def log_like(engine: str) -> None:
    """Has our loggers show what the logger `engine` shows: for an engine that configures its own logger and not the root, so that
    nobody would see our INFO. A level or a handler that the user gave our logger stays; so does the root logger."""
    ours, theirs = logging.getLogger(_OURS), logging.getLogger(engine)
    if ours.handlers or ours.level != logging.NOTSET or not theirs.handlers:
        return
    ours.addHandler(_Borrowed(theirs))
    ours.setLevel(theirs.getEffectiveLevel())
