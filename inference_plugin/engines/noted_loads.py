"""Notes that somebody else loads weights into the live model: an engine's own command, or a user's extension."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from inference_plugin.engines.monkeypatch import contained

__all__ = ["LOADED", "note_loads", "noted_so_far"]

logger = logging.getLogger(__name__)

LOADED = "the model's own loader, and not Weightwire, wrote the weights"

_live: weakref.WeakKeyDictionary[Any, Callable[[str], object]] = weakref.WeakKeyDictionary()
"""By live model. Not an attribute of the model: an update follows all that these reach."""

_loads = 0


def note_loads(model: Any, forget: Callable[[str], object]) -> Callable[[], None]:
    """Has `forget` called before each load into the live model; Weightwire itself loads into skeletons only. Returns what ends
    it."""
    _live[model] = forget
    kind = type(model)
    load = getattr(kind, "load_weights", None)
    if callable(load) and not hasattr(load, "weightwire_notes"):
        kind.load_weights = _noted(load)
    # SGLang's loader `flash_rl` gives a model one of its own, which calls the class's as it was before.
    own = vars(model).get("load_weights")
    if callable(own):

        @functools.wraps(own)
        def own_load_weights(*args: Any, **kwargs: Any) -> Any:
            _note(model)
            return own(*args, **kwargs)

        model.load_weights = own_load_weights

    def end() -> None:
        _live.pop(model, None)
        if callable(own):
            model.load_weights = own

    return end


def noted_so_far() -> int:
    """The number of loads that were noted in this process."""
    return _loads


def _note(model: Any) -> None:
    global _loads
    with contained("noting a load", logger):
        # A model may be loaded through a stand-in, of which nothing is known.
        if isinstance(model, nn.Module) and (forget := _live.get(model)) is not None:
            _loads += 1
            forget(LOADED)


def _noted(load: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load)
    def load_weights(self: Any, *args: Any, **kwargs: Any) -> Any:
        _note(self)
        return load(self, *args, **kwargs)

    load_weights.weightwire_notes = True  # type: ignore[attr-defined]
    return load_weights
