"""Imports Megatron and Megatron-Bridge, for processes that others are forked from; patches nothing."""

from __future__ import annotations

from tests.support.megatron_cpu import import_bridge

import_bridge()
