"""Numbers in environment variables: checked when they are read, refused by name."""

from __future__ import annotations

import math
import os

__all__ = ["seconds"]

DAY_S = 86400.0


def seconds(variable: str, default_s: float) -> float:
    """The seconds that an environment variable gives, above 0 and a day at most. Raises ValueError, naming it."""
    if not (text := os.environ.get(variable)):
        return default_s
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= DAY_S:
        raise ValueError(f"{variable}={text!r}: a number of seconds above 0, a day at most")
    return value
