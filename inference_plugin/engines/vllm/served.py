"""The model that a vLLM worker serves, with what belongs to it: LoRA slots, sleep mode, the draft model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from inference_plugin.engines.drafts import HasDraft
from inference_plugin.engines.live_model import without_wrappers
from inference_plugin.engines.vllm.draft import VllmDraft, draft_of
from inference_plugin.engines.vllm.lora import VllmAdapterSlots
from inference_plugin.engines.vllm.model import VllmModel, skeleton_of
from inference_plugin.engines.vllm.outside_caches import keeps_queries, why_stale
from inference_plugin.wire.errors import EngineUnsupported
from inference_plugin.wire.messages import MemoryTag, SleepLevel

__all__ = ["ServedModel"]


class ServedModel(HasDraft, VllmModel):
    """`install.contract.EngineModel` of what one worker serves."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        config = worker.vllm_config
        live: nn.Module = worker.model_runner.get_model()
        if config.lora_config is not None:
            from vllm.lora.layers import BaseLayerWithLoRA

            live = without_wrappers(live, BaseLayerWithLoRA)
            self.adapter_slots = VllmAdapterSlots(worker.model_runner.lora_manager)
        model_config = config.model_config
        super().__init__(live, torch.device(worker.device), config, model_config, skeleton_of(config, model_config))
        self.note_draft(draft_of(worker, live))
        if self.device.type == "cpu":
            # The sgl kernels use AMX tiles without asking the kernel first; a first forward of four tokens or fewer
            # would die of SIGILL.
            torch.cpu._init_amx()

    def why_stale(self) -> str | None:
        return why_stale(self._worker.vllm_config)

    def check_caches(self) -> None:
        super().check_caches()
        if keeps_queries(self.model_config, self._worker.get_supported_tasks()):
            raise EngineUnsupported(
                "this engine can't be updated: it scores documents against queries that it has computed before (late "
                "interaction), and an update between a query and its documents would end the engine",
                hint="start vLLM's server with --no-enable-flash-late-interaction, or an offline engine with "
                'pooler_config={"enable_flash_late_interaction": False}',
                phase="open",
            )

    def why_apart(self) -> str | None:
        """vLLM post-processes in one dtype."""
        serves_in = self.model_config.dtype
        if isinstance(self.draft, VllmDraft) and (drafts_in := self.draft.model_config.dtype) != serves_in:
            return f"the draft computes in {drafts_in}, the served model in {serves_in}"
        return None

    def why_no_sleep(self, level: SleepLevel) -> str | None:
        if not self.model_config.enable_sleep_mode:
            return "vLLM was started without --enable-sleep-mode (which needs a GPU)"
        if level == 2 and self.draft is not None:
            return "level 2 discards the weights of the draft model too, which an update of the served model does not bring back"
        return None

    def sleep(self, level: SleepLevel) -> None:
        self._worker.sleep(level=level)

    def wake_up(self, tag: MemoryTag) -> None:
        self._worker.wake_up(tags=[tag])
