"""The model that an SGLang rank serves, with what belongs to it: LoRA slots, sleep mode, the draft model."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

from torch import nn

from inference_plugin.engines.drafts import HasDraft
from inference_plugin.engines.live_model import without_wrappers
from inference_plugin.engines.monkeypatch import contained
from inference_plugin.engines.sglang.draft import SglangDraft, borrowed, draft_of, drafting_models, holds_views
from inference_plugin.engines.sglang.idle import but_for_the_rest
from inference_plugin.engines.sglang.lora import SglangAdapterSlots
from inference_plugin.engines.sglang.model import SglangModel, skeleton_of
from inference_plugin.wire.messages import MemoryTag, SleepLevel

__all__ = ["ServedModel"]

logger = logging.getLogger("sglang.weightwire")


class ServedModel(HasDraft, SglangModel):
    """`install.contract.EngineModel` of what one rank serves."""

    def __init__(self, scheduler: Any) -> None:
        runner = scheduler.tp_worker.model_runner
        live: nn.Module = runner.model
        if scheduler.enable_lora:
            from sglang.srt.lora.layers import BaseLayerWithLoRA

            live = without_wrappers(live, BaseLayerWithLoRA)
            self.adapter_slots = SglangAdapterSlots(runner.lora_manager)
        super().__init__(scheduler, runner, live, skeleton_of(runner))
        self._updater = scheduler.weight_updater
        self.drafts: list[nn.Module] = []
        with contained("looking at the models that draft", logger):  # a plug-in of SGLang's may draft by anything
            self.drafts = drafting_models(scheduler)
            self.fixed_addresses |= any(holds_views(draft, self.live) for draft in self.drafts)
        self.note_draft(draft_of(scheduler))

    def versions_hang_on(self, draft: nn.Module) -> bool:
        """Whether somebody who loads weights into the draft writes weights of which a group has a version."""
        if isinstance(self.draft, SglangDraft) and self.draft.updated:
            return True
        return bool(borrowed(draft, self.live))

    def lost_by_a_reset(self, spared: Collection[str]) -> list[str]:
        lost = super().lost_by_a_reset(spared)
        if isinstance(self.draft, SglangDraft):
            return [*lost, *self.draft.lost_by_a_reset(spared)]
        return lost if self.draft is None else [*lost, "the draft model"]

    def why_no_sleep(self, level: SleepLevel) -> str | None:
        if not self._updater.memory_saver_adapter.enabled:
            return "SGLang was started without --enable-memory-saver (which needs a GPU)"
        if self._arguments.enable_weights_cpu_backup:
            return None
        if level == 1:
            return "SGLang keeps no copy of the weights without --enable-weights-cpu-backup: only level 2 is left"
        if self.draft is not None and not self._arguments.enable_draft_weights_cpu_backup:
            return (
                "without --enable-draft-weights-cpu-backup, level 2 discards the weights of the draft model too, which an update "
                "of the served model does not bring back"
            )
        return None

    def released(self) -> str:
        """Why no request can be computed now; "" if one can. SGLang would end at the released memory, or take what lies there,
        and keep in its cache what it computed with that."""
        tags = sorted(self._updater.offload_tags)
        return (
            f"SGLang has released its memory ({', '.join(tags)}): resume_memory_occupation takes it back"
            if tags
            else ""
        )

    def sleep(self, level: SleepLevel) -> None:
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        with but_for_the_rest(self._scheduler, True):  # the cache was flushed as the engine stopped
            self._updater.release_memory_occupation(ReleaseMemoryOccupationReqInput())

    def wake_up(self, tag: MemoryTag) -> None:
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        tags = ["weights"] if tag == "weights" else ["kv_cache", "cuda_graph"]
        self._updater.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=tags))
