"""The functions that are compiled from `_copying.c`, if this checkout's or wheel's build fits this code."""

from __future__ import annotations

import importlib
import logging
from typing import Any

__all__ = ["FUNCTIONS", "WHY_NOT", "load"]

logger = logging.getLogger(__name__)

INTERFACE = 1
"""Raised together with the number in `_copying.c`, whenever a function there is added, removed or called otherwise."""


def load() -> tuple[Any, str]:
    """The compiled module, and ""; or None, and why. A build of other code is not used: some of its functions may be missing, or
    take other arguments."""
    try:
        functions: Any = importlib.import_module("inference_plugin.wire._copying")
    except ImportError as error:
        return None, str(error)
    if (found := getattr(functions, "INTERFACE", 0)) != INTERFACE:
        why = f"{functions.__file__} was built from other code: its interface is {found}, this code needs {INTERFACE}"
        logger.warning(
            "weightwire: %s. numpy copies instead, which takes longer. Build it again: `python setup.py build_ext "
            "--inplace` in a checkout, else install weightwire again",
            why,
        )
        return None, why
    return functions, ""


FUNCTIONS, WHY_NOT = load()
"""The compiled module; None where there is none, and then why."""
