"""Plug-in points for third parties, by pluggy: transports, Megatron architectures and listeners.

A plug-in is found through the entry point group `weightwire`, or named as `module:object` in `WEIGHTWIRE_PLUGINS`
(comma-separated; set it for the trainer and for the engine alike). A plug-in that can't be imported breaks nothing: where
something is missing that it may provide, the error names it, with the reason.
"""

from __future__ import annotations

import functools
import os
import traceback
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from inference_plugin.wire.errors import WeightwireError
    from inference_plugin.wire.messages import ReplicaCard
    from inference_plugin.wire.reports import UpdateReport

__all__ = ["HookSpecs", "PluginManager", "hookimpl", "plugin_manager"]

hookspec = pluggy.HookspecMarker("weightwire")
hookimpl = pluggy.HookimplMarker("weightwire")


class HookSpecs:
    """What a plug-in may implement; each implementation may take any subset of the arguments."""

    @hookspec
    def weightwire_transports(self) -> Sequence[Any]:
        """Transports to add to the registry; each is an `inference_plugin.transports.base.Transport`."""
        raise AssertionError("a specification is never called")

    @hookspec
    def weightwire_megatron_architectures(self) -> Mapping[str, Any]:
        """On a trainer: Megatron architectures to add, by `model_type` of Hugging Face configs; each is a
        `trainer_adapters.sources.megatron.Architecture`."""
        raise AssertionError("a specification is never called")

    @hookspec
    def weightwire_installing(self, group: str, version: int, rank: int, step: str) -> None:
        """On a worker, on the engine's own thread, before `step` ("install", "undo"). Raising makes that step fail."""

    @hookspec
    def weightwire_committed(self, replica: str, group: str, version: int, stopped_s: float) -> None:
        """In the coordinator's process, on a thread of its own, once all ranks serve `version`; no step ran for `stopped_s`."""

    @hookspec
    def weightwire_state_changed(self, replica: str, rank: int, group: str, state: str) -> None:
        """On a worker, after a group's state changed, on a thread for listeners, so that a slow one delays nobody else."""

    @hookspec
    def weightwire_phase(self, operation: str, group: str, version: int | None, phase: str, rank: int) -> None:
        """On a trainer rank, before each phase of an operation. Raising fails the operation, unless it has committed.

        `operation`: "update", "verify" or "catch_up" (an update for one replica, in a thread of its own). Rank 0 goes through
        "agree", "stage" (all ranks write), "seal", "commit" and "report", a verification through "agree", "stage" and
        "compare"; the other ranks through "agree", "stage" and "report" (they tell rank 0 what they wrote)."""

    @hookspec
    def weightwire_update_staged(self, group: str, version: int, seconds: float) -> None:
        """On a trainer's rank 0, when every rank has written."""

    @hookspec
    def weightwire_update_committed(self, report: UpdateReport) -> None:
        """On a trainer's rank 0, when at least one replica serves the version."""

    @hookspec
    def weightwire_update_failed(self, group: str, version: int, error: WeightwireError) -> None:
        """On a trainer's rank 0, when no replica took the version."""

    @hookspec
    def weightwire_replica_joined(self, group: str, card: ReplicaCard) -> None:
        """On a trainer's rank 0, when a replica takes part in an update, or is caught up, for the first time."""

    @hookspec
    def weightwire_replica_lost(self, group: str, replica: str, reason: str) -> None:
        """On a trainer's rank 0, when a replica no longer takes part."""

    @hookspec
    def weightwire_replica_state(self, group: str, status: Any) -> None:
        """On a trainer's rank 0, when a replica's state or the reason for it changes; `status` is a
        `trainer_adapters.ReplicaStatus`."""


class PluginManager(pluggy.PluginManager):
    """Knows the hook specifications; `broken` maps plug-ins that couldn't be loaded to the reason."""

    def __init__(self) -> None:
        super().__init__("weightwire")
        self.broken: dict[str, str] = {}
        self.add_hookspecs(HookSpecs)
        for entry_point in metadata.entry_points(group="weightwire"):
            self._add(entry_point)
        for name in filter(None, os.environ.get("WEIGHTWIRE_PLUGINS", "").split(",")):
            self._add(metadata.EntryPoint(name.strip(), name.strip(), "weightwire"))

    def _add(self, entry_point: metadata.EntryPoint) -> None:
        try:
            plugin: Any = entry_point.load()
            self.register(plugin, entry_point.name)
        except Exception as error:  # noqa: BLE001 -- a third party's import; the reason is kept and shown
            line = traceback.format_exception_only(error)[-1].strip()
            self.broken[entry_point.name] = line


@functools.cache
def plugin_manager() -> PluginManager:
    """This process's plug-ins, loaded at the first call."""
    return PluginManager()
