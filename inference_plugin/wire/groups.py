"""Group names that say which weights of an engine are meant. Any other group is the served model, or a part of it."""

from __future__ import annotations

__all__ = ["ADAPTER_PREFIX", "DRAFT", "is_apart"]

ADAPTER_PREFIX = "lora."
"""A group `lora.<adapter>` is that adapter in the engine's LoRA slots."""

DRAFT = "draft"
"""The draft model of an engine that decodes speculatively."""


def is_apart(group: str) -> bool:
    """Whether the group holds no weights of the served model, so that an update of that model leaves it as it is."""
    return group == DRAFT or group.startswith(ADAPTER_PREFIX)
