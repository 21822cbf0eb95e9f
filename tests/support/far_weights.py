"""Engines for a CPU whose weights lie in memory that the host can't touch (`far_memory`), as those of a GPU's engine do.

Each function is for the process that loads the model, before it does. The engine computes on copies of them, and keeps all
else, such as its KV cache, in the host's memory.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch

from tests.support import far_memory

__all__ = ["give_sglang", "give_vllm"]

DEVICE = "far:0"


def give_vllm(library: str) -> None:
    """vLLM must leave linear layers as they are loaded (`WEIGHTWIRE_TEST_LAYOUT=plain`): oneDNN packs memory of the host."""
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader
    from vllm.v1.worker.cpu_worker import CPUWorker

    far_memory.register(library)
    load_model, load_in_worker = BaseModelLoader.load_model, CPUWorker.load_model

    @functools.wraps(load_model)
    def loads_far(loader: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        vllm_config.load_config.device = DEVICE
        return _far(load_model(loader, vllm_config, *args, **kwargs))

    @functools.wraps(load_in_worker)
    def says_so(worker: Any, **kwargs: Any) -> None:
        load_in_worker(worker, **kwargs)
        worker.device = torch.device(DEVICE)

    BaseModelLoader.load_model, CPUWorker.load_model = loads_far, says_so
    torch.accelerator.empty_cache = lambda: None  # the device has none


def give_sglang(library: str) -> None:
    from sglang.srt.model_loader.loader import DefaultModelLoader

    far_memory.register(library)
    load_model, attend = DefaultModelLoader.load_model, torch.nn.functional.scaled_dot_product_attention

    @functools.wraps(load_model)
    def loads_far(loader: Any, *, model_config: Any, device_config: Any) -> Any:
        far = copy.copy(device_config)
        far.device = torch.device(DEVICE)
        return _far(load_model(loader, model_config=model_config, device_config=far))

    def attend_on_host(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """torch attends to keys and values of the query's device only."""
        return attend(query.cpu(), key.cpu(), value.cpu(), *args, **kwargs).to(query.device)

    DefaultModelLoader.load_model = loads_far
    torch.nn.functional.scaled_dot_product_attention = attend_on_host


def _far(model: torch.nn.Module) -> torch.nn.Module:
    assert {str(parameter.device) for parameter in model.parameters()} == {DEVICE}
    return model
