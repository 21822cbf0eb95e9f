"""The functions that are compiled from `_copying.c`, if this checkout's or wheel's build fits this code."""

from __future__ import annotations

import importlib
import logging
from typing import Any

__all__ = ["FUNCTIONS", "WHY_NOT", "load"]

logger = logging.getLogger(__name__)

INTERFACE = 2
"""Raised together with the number in `_copying.c`, whenever a function there takes other arguments or returns something else."""

NAMES = (
    "copy_groups", "copy_rows", "copy_rows_and_digest", "copy_table", "digest_rows", "has_all_bits", "populate", "tensor_rows",
    "tensors_over",
)  # fmt: skip
"""The functions that this code calls."""


def load() -> tuple[Any, str]:
    """The compiled module, and ""; or None, and why. A build of other code is not used: some of its functions may be missing, or
    take other arguments."""
    try:
        functions: Any = importlib.import_module("inference_plugin.wire._copying")
    except ImportError as error:
        return None, str(error)
    found = getattr(functions, "INTERFACE", None)
    missing = [name for name in NAMES if not hasattr(functions, name)]
    if found == INTERFACE and not missing:
        return functions, ""
    lacks = f", and it lacks {', '.join(missing)}" if missing else ""
    why = f"{functions.__file__} was built from other code: its interface is {found}, this code's is {INTERFACE}{lacks}"
    logger.warning(
        "weightwire: %s. numpy copies instead, which takes longer. Build it again: `python setup.py build_ext --inplace` in a "
        "checkout, else install weightwire again",
        why,
    )
    return None, why


FUNCTIONS, WHY_NOT = load()
"""The compiled module; None where there is none, and then why."""
