"""Group names that say which weights of an engine are meant. Any other group is the served model, or a part of it."""

from __future__ import annotations

__all__ = ["ADAPTER_PREFIX", "DRAFT", "DRAFT_NAMES", "is_apart"]

ADAPTER_PREFIX = "lora."
"""A group `lora.<adapter>` is that adapter in the engine's LoRA slots."""

DRAFT = "draft"
"""The draft model of an engine that decodes speculatively."""

DRAFT_NAMES = "draft."
"""Begins the names of a draft's tensors in a group that sends the served model and the draft together."""


def is_apart(group: str) -> bool:
    """Whether the group holds no weights of the served model, so that an update of that model leaves it as it is."""
    return group == DRAFT or group.startswith(ADAPTER_PREFIX)
