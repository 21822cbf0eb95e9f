"""Ctrl-C at a chosen point of a call."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType

__all__ = ["CtrlC", "interrupted"]


class CtrlC(BaseException):
    """What Ctrl-C raises."""


def interrupted(call: Callable[[], object], after: int) -> bool:
    """Makes a call, and raises in it after so many returns of functions that C implements: there Python looks for signals.
    Returns whether it was interrupted."""
    left = after

    def look(frame: FrameType, event: str, argument: object) -> None:
        nonlocal left
        if event == "c_return":
            left -= 1
            if not left:
                sys.setprofile(None)
                raise CtrlC

    sys.setprofile(look)
    try:
        call()
    except CtrlC:
        return True
    finally:
        sys.setprofile(None)
    return False


def answers(call: Callable[[], object]) -> bool:
    """Whether a call from another thread ends: what an interrupted call left locked would keep it waiting."""
    calling = threading.Thread(target=call, daemon=True)
    calling.start()
    calling.join(60)
    return not calling.is_alive()
