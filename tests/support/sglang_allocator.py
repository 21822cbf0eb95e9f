"""The smallest stand-in for the memory saver that SGLang lacks on a CPU: weights that are released hold nothing that could be
used, and come back as they were."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["give"]

_kept: dict[str, torch.Tensor] = {}


def give() -> None:
    """Puts it into this process, in the place of the one that does nothing."""
    from sglang.srt.utils.torch_memory_saver_adapter import _TorchMemorySaverAdapterNoop as Saver

    Saver.enabled = True
    Saver.pause = _pause
    Saver.resume = _resume


def _parameters() -> dict[str, torch.nn.Parameter]:
    from inference_plugin.engines.sglang import hooks

    assert hooks.served_rank is not None
    return dict(hooks.served_rank.model.live.named_parameters())


def _pause(_: Any, tag: str) -> None:
    if tag == "weights":
        for name, parameter in _parameters().items():
            _kept[name] = parameter.detach().clone()
            parameter.data.fill_(float("nan"))


def _resume(_: Any, tag: str) -> None:
    if tag == "weights":
        for name, parameter in _parameters().items():
            parameter.data.copy_(_kept.pop(name))
