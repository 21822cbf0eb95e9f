"""The engines that can be measured."""

from __future__ import annotations

from typing import Any

from benchmarks.engines import sglang, vllm
from benchmarks.engines.base import Engine

ENGINES: dict[str, type[Engine]] = {"vllm": vllm.Vllm, "sglang": sglang.Sglang}
SENDERS: dict[str, Any] = {"vllm": vllm.Sender, "sglang": sglang.Sender}
"""What drives an engine's own ways in the trainer's ranks."""
