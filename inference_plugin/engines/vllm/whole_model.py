"""What a class of vLLM's models does with all weights after a load (`process_weights_after_loading` of the model itself), after
what vLLM does for single modules.

It may do nothing as the engine was started: Kimi-Linear's only prepares experts for DeepGEMM's mega kernel. DeepSeek-V4's sums
parts of a weight of the first layer up, which is done again on a stand-in for that layer; with a vision tower beside it the
method only calls that. Anything else is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode

from inference_plugin.engines.live_model import with_submodule
from inference_plugin.install.graph import Boundary, helpers_under, state_of
from inference_plugin.install.stand_in import frozen

__all__ = ["finish_nothing_in", "whole_finishers", "why_whole"]

HOOK = "process_weights_after_loading"
SUM = "finalize_mhc_broadcast_weights"
DONE = "_weights_finalized"
"""Set by the method of a model with a vision tower."""


def finish_nothing_in(skeleton: nn.Module) -> None:
    """From now on a load of `skeleton` fills its parameters only: some classes call their method themselves as well."""
    within = [module for module in skeleton.modules() if hasattr(getattr(module, "model", None), SUM)]
    for module in (skeleton, *within):
        if hasattr(module, HOOK):
            setattr(module, HOOK, _nothing)


def whole_finishers(skeleton: Any) -> Mapping[str, Callable[[nn.Module], None]]:
    """What the method does to single modules, by their names; each is called with a stand-in for its module."""
    name, inner = _summing(skeleton)
    if not hasattr(skeleton, HOOK) or inner is None or inner.start_layer >= inner.end_layer:
        return {}
    first = f"layers.{inner.start_layer}"
    return {f"{name}.{first}": functools.partial(_sum, inner, first)}


def _summing(skeleton: nn.Module) -> tuple[str, Any]:
    """The part that sums a weight up, and its name; None if there is none."""
    return next(((name, part) for name, part in skeleton.named_modules() if hasattr(part, SUM)), ("", None))


def _sum(inner: Any, first: str, stand_in: nn.Module) -> None:
    getattr(with_submodule(inner, first, stand_in), SUM)()


def why_whole(skeleton: Any, boundary: Boundary) -> str | None:
    """Why what the method does can't be done again for single modules; None if it can. Ask once: it runs on the skeleton, and may
    do there only once what it does. It does nothing if it looks at no tensor and sets nothing."""
    if not hasattr(skeleton, HOOK):
        return None
    (_, inner), before = _summing(skeleton), _held(skeleton, boundary)
    if inner is not None:
        setattr(inner, SUM, _nothing)
    try:
        with _NoTensor():
            getattr(type(skeleton), HOOK)(skeleton)
    except Exception as error:  # noqa: BLE001 -- whatever it needs, it does something
        return f"{type(skeleton).__name__} post-processes as a whole ({error})"
    finally:
        if inner is not None:
            delattr(inner, SUM)
    changed = _held(skeleton, boundary) != before
    return f"{type(skeleton).__name__} post-processes as a whole" if changed else None


def _held(skeleton: nn.Module, boundary: Boundary) -> dict[str, Any]:
    """What modules and their helpers hold, comparable."""
    found = {}
    for name, module in skeleton.named_modules():
        helpers = [(path, frozen(state_of(helper))) for path, helper in helpers_under(module, boundary)]
        found[name] = (frozen({key: value for key, value in vars(module).items() if key != DONE}), helpers)
    return found


def _nothing() -> None: ...


class _NoTensor(TorchFunctionMode):
    """Raises where something is done to a tensor, or asked of one."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"it uses {getattr(func, '__qualname__', func)}")
