"""A worker extension of vLLM, as another project would bring one: it must get along with Weightwire.

Importing it (in every engine process that builds a model, before the model is built) does seven things:

- with `WEIGHTWIRE_TEST_LAYOUT=plain` linear layers keep their weights as they were loaded, as on a GPU, instead of
  being packed by oneDNN;
- the kernel for experts, which on a CPU ignores which of them a rank has, no longer does;
- data-parallel ranks can share experts on a CPU (see `vllm_cpu_experts.py`);
- with `WEIGHTWIRE_TEST_POISON=1` memory that an installation makes starts as 0xFF (see `poison.py`);
- where vLLM has no kernel for quantised linear layers or experts, it takes a reference (see `reference_kernels.py` and
  `reference_experts.py`);
- vLLM's own reading of a LoRA adapter replaces the method of the class, as verl's and ms-swift's reading from tensors does;
- every step notes what the live weights were before and after it, so that ranks can be compared step by step.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import inspect
import json
import os
import threading
from pathlib import Path
from typing import Any

import torch
import vllm.model_executor.layers.utils as layer_utils
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager, WorkerLoRAManager
from vllm.v1.worker.worker_base import WorkerWrapperBase

from tests.support import async_scheduling, far_memory, far_weights, poison, reference_kernels, vllm_cpu_experts
from tests.support.memory_pool import MemoryPool
from tests.support.reachable import reachable, reachable_tensors
from tests.support.rig import eventually

__all__ = ["Extension"]

packed_gemm = layer_utils.dispatch_cpu_unquantized_gemm


def gemm(layer: torch.nn.Module, remove_weight: bool) -> None:
    """In place of `dispatch_cpu_unquantized_gemm`, which is looked up at each call."""
    if os.environ.get("WEIGHTWIRE_TEST_LAYOUT") == "plain":
        layer.cpu_linear = torch.nn.functional.linear
    else:
        packed_gemm(layer, remove_weight)


def only_own_experts(apply: Any) -> Any:
    """In place of `CPUUnquantizedExperts.apply`, which takes the numbers of all experts for places of this rank."""

    @functools.wraps(apply)
    def mapped(self: Any, *, topk_weights: Any, topk_ids: Any, expert_map: Any, **fields: Any) -> Any:
        if expert_map is not None:
            places = expert_map[topk_ids.long()]
            topk_weights = topk_weights.masked_fill(places < 0, 0)
            topk_ids = places.clamp(min=0).to(topk_ids.dtype)
        return apply(self, topk_weights=topk_weights, topk_ids=topk_ids, expert_map=expert_map, **fields)

    return mapped


layer_utils.dispatch_cpu_unquantized_gemm = gemm
with contextlib.suppress(ImportError):  # older versions
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    if not hasattr(CPUUnquantizedExperts.apply, "__wrapped__"):
        CPUUnquantizedExperts.apply = only_own_experts(CPUUnquantizedExperts.apply)
LRUCacheWorkerLoRAManager._load_adapter = inspect.unwrap(WorkerLoRAManager._load_adapter)
if library := os.environ.get(far_memory.VARIABLE):
    far_weights.give_vllm(library)
poison.spread_if_asked()
reference_kernels.fill_in()
with contextlib.suppress(ImportError):  # older versions
    from tests.support import reference_experts

    reference_experts.fill_in()
async_scheduling.streams_if_asked()

if not hasattr(WorkerWrapperBase.execute_model, "notes_steps"):
    original = WorkerWrapperBase.execute_model

    @functools.wraps(original)
    def execute_model(self: Any, scheduler_output: Any) -> Any:
        steps = getattr(self.worker, "ext_steps", None)
        if steps is None:
            return original(self, scheduler_output)
        before = weights_seen(self.worker)
        result = original(self, scheduler_output)
        steps.append((before, weights_seen(self.worker), scheduler_output.total_num_scheduled_tokens))
        return result

    execute_model.notes_steps = True  # type: ignore[attr-defined]
    WorkerWrapperBase.execute_model = execute_model


def _sleeps_by(worker: Any, sleep: Any, wake_up: Any) -> None:
    """Has the worker's class sleep and wake up by these: what the plug-in put on the worker itself stays before them."""
    kind = type(worker)
    worker.ext_sleeps_by = sleep, wake_up
    kind.sleep = lambda self, level=1: self.ext_sleeps_by[0](level)
    kind.wake_up = lambda self, tags=None: self.ext_sleeps_by[1](tags)


def _expert_layers(worker: Any) -> list[Any]:
    modules = worker.model_runner.get_model().modules()
    return [module for module in modules if "expert_map_manager" in vars(module)]


def weights_seen(worker: Any) -> list[float]:
    """One number of each norm of the live model: those of different layers, so that a mix shows."""
    model = worker.model_runner.get_model()
    return [
        float(p.detach().reshape(-1)[0])
        for name, p in model.named_parameters()
        if name.endswith(("layernorm.weight", "model.norm.weight"))
    ]


vllm_cpu_experts.fill_in(weights_seen)


class Extension:
    """Methods for `collective_rpc`. They return JSON text: it travels the same in every kind of engine."""

    def ext_about(self) -> str:
        linear = [m for m in self.model_runner.get_model().modules() if hasattr(m, "cpu_linear")]  # type: ignore[attr-defined]
        plain = bool(linear) and all(m.cpu_linear is torch.nn.functional.linear for m in linear)
        is_async = bool(self.vllm_config.scheduler_config.async_scheduling)  # type: ignore[attr-defined]
        return json.dumps({"pid": os.getpid(), "plain": plain, "linear": len(linear), "async": is_async})

    def ext_state(self) -> str:
        """Everything reachable that the model computes with."""
        return json.dumps(reachable(self.model_runner.get_model()))  # type: ignore[attr-defined]

    def ext_load(self, model: str, on: int | None = None) -> str:
        """What extensions of other projects do: the model's own loader takes a checkpoint, on all ranks or `on` one."""
        from safetensors.torch import load_file

        if on not in (None, self.rank):  # type: ignore[attr-defined]
            return json.dumps(False)
        self.model_runner.get_model().load_weights(load_file(f"{model}/model.safetensors").items())  # type: ignore[attr-defined]
        return json.dumps(True)

    def ext_load_later(self, model: str, go: str) -> str:
        """A thread of the worker's own loads a checkpoint once the file `go` is there, in no call on the workers. Then it makes a
        file of its rank beside it."""

        def load() -> None:
            eventually(Path(go).exists, "the word to load")
            self.ext_load(model)
            Path(f"{go}.{self.rank}").touch()  # type: ignore[attr-defined]

        threading.Thread(target=load, daemon=True).start()
        return "{}"

    def ext_draft_state(self) -> str:
        """Everything reachable that the draft model computes with."""
        return json.dumps(reachable(self.model_runner.get_draft_model()))  # type: ignore[attr-defined]

    def ext_expert_maps(self) -> str:
        """Of each layer of experts, which place of this rank each expert has; -1 for another rank's."""
        return json.dumps([layer.expert_map_manager.expert_map.tolist() for layer in _expert_layers(self)])

    def ext_swap_experts(self) -> str:
        """Ranks change experts: each place gets the expert that the next rank has in the same place. The weights stay."""
        for layer in _expert_layers(self):
            held = layer.expert_map_manager.expert_map
            held.copy_(held.roll(held.numel() // self.parallel_config.tensor_parallel_size))  # type: ignore[attr-defined]
        return self.ext_expert_maps()

    def ext_hold_shared_outputs(self, on: bool) -> str:
        """Shared experts hold what they computed, as in the middle of a step. Returns how many layers have some."""
        shared = [m for m in self.model_runner.get_model().modules() if type(m).__name__ == "SharedExperts"]  # type: ignore[attr-defined]
        for module in shared:
            module._output[0] = torch.zeros(2) if on else None  # noqa: SLF001
        return json.dumps(len(shared))

    def ext_say_that_experts_are_balanced(self, on: bool) -> str:
        """vLLM balances experts on a GPU only; the configuration says it all the same."""
        self.parallel_config.enable_eplb = on  # type: ignore[attr-defined]
        return "{}"

    def ext_fix_pipeline(self) -> str:
        """vLLM 0.32 on CPU with pipeline stages: what a warm-up would have made, and CPU skips."""
        runner = self.model_runner  # type: ignore[attr-defined]
        if runner.intermediate_tensors is None:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )
        return "{}"

    def ext_alter(self, rank: int, part: str) -> str:
        """Adds 1 to one element of the first parameter whose name ends in `part`, on one rank, behind everyone's back."""
        if self.rank != rank:  # type: ignore[attr-defined]
            return "{}"
        for name, parameter in self.model_runner.get_model().named_parameters():  # type: ignore[attr-defined]
            if name.endswith(part) and parameter.numel():
                with torch.no_grad():
                    parameter.view(-1)[-1] += 1
                return json.dumps({"altered": name})
        return "{}"

    def ext_compute_otherwise(self, module: str) -> str:
        """A packed module computes with other weights from now on; its parameters stay as they are."""
        packed = self.model_runner.get_model().get_submodule(module)  # type: ignore[attr-defined]
        compute = packed.cpu_linear
        packed.cpu_linear = lambda inputs, weight, bias: compute(inputs, weight, bias) * 2
        return "{}"

    def ext_keep_at_first_use(self, module: str, on: bool) -> str:
        """A module keeps a tensor of its input's size and its weights' values when it computes next; or drops what it kept."""
        found = self.model_runner.get_model().get_submodule(module)  # type: ignore[attr-defined]

        def keep(one: Any, *inputs: Any) -> None:
            hook.remove()
            one.norms_by_size = {(1, 2): next(one.parameters()).detach().float() * 2}

        if on:
            hook = found.register_forward_pre_hook(keep)
        else:
            del found.norms_by_size
        return "{}"

    def ext_give_allocator(self, everything: bool = False) -> str:
        """The smallest stand-in for the allocator that a CPU lacks: what is released holds nothing that could be used. Level 1
        brings it back, level 2 only the buffers, as vLLM does. `everything`: as in vLLM's own pool, not parameters alone are
        released but every tensor that modules reach; and the plug-in knows that their addresses must stay."""
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        held = reachable_tensors(model) if everything else dict(model.named_parameters())
        pool = [
            t.untyped_storage()
            for name, t in held.items()
            if not name.endswith("_cpu") and "._registered_adapters." not in name  # in host memory on a GPU too
        ]
        storages = {each.data_ptr(): each for each in pool}
        memory = [torch.empty(0, dtype=torch.uint8).set_(each) for each in storages.values() if each.nbytes()]
        kept: list[tuple[torch.Tensor, torch.Tensor]] = []

        def sleep(level: int = 1) -> None:
            with torch.inference_mode():
                back = memory if level == 1 else model.buffers()
                kept.extend((tensor, tensor.clone()) for tensor in back)
                for tensor in memory:
                    tensor.fill_(0xFF)

        def wake_up(tags: list[str] | None = None) -> None:
            with torch.inference_mode():
                while (tags is None or "weights" in tags) and kept:
                    tensor, value = kept.pop()
                    tensor.copy_(value)

        self.vllm_config.model_config.enable_sleep_mode = True  # type: ignore[attr-defined]
        if everything:
            self.weightwire_runtime.model.fixed_addresses = True  # type: ignore[attr-defined]
        _sleeps_by(self, sleep, wake_up)
        return "{}"

    def ext_give_light_sleep(self) -> str:
        """A stand-in for the allocator that releases nothing."""
        self.vllm_config.model_config.enable_sleep_mode = True  # type: ignore[attr-defined]
        _sleeps_by(self, lambda level: None, lambda tags: None)
        return "{}"

    def ext_far_bytes(self) -> str:
        """What is taken of the device `far`."""
        return json.dumps(far_memory.taken_bytes())

    def ext_sleep(self, level: int) -> str:
        """As an extension of another project's may do it: past vLLM's executor, which hears nothing of it."""
        self.sleep(level)  # type: ignore[attr-defined]
        return "{}"

    def ext_wake_up(self, tags: list[str] | None) -> str:
        self.wake_up(tags)  # type: ignore[attr-defined]
        return "{}"

    def ext_addresses(self) -> str:
        """Where each tensor lies that modules reach."""
        found = reachable_tensors(self.model_runner.get_model())  # type: ignore[attr-defined]
        return json.dumps({path: tensor.data_ptr() for path, tensor in found.items()})

    def ext_return_freed_memory(self) -> str:
        """So that what was freed before counts as free where memory is measured."""
        ctypes.CDLL(None).malloc_trim(0)
        return "{}"

    def ext_note_steps(self, on: bool) -> str:
        """Starts noting steps anew, or stops."""
        self.ext_steps: list[Any] | None = [] if on else None
        return "{}"

    def ext_get_steps(self) -> str:
        return json.dumps(self.ext_steps)

    def ext_give_pool(self) -> str:
        """As `ext_give_allocator`, of everything; who touches what is released ends the process, as on a GPU."""
        tensors = reachable_tensors(self.model_runner.get_model())  # type: ignore[attr-defined]
        pool = MemoryPool(tensor for name, tensor in tensors.items() if not name.endswith("_cpu"))
        self.vllm_config.model_config.enable_sleep_mode = True  # type: ignore[attr-defined]
        self.weightwire_runtime.model.fixed_addresses = True  # type: ignore[attr-defined]
        _sleeps_by(self, lambda level: pool.release(), lambda tags: pool.take_back())
        return "{}"

    def ext_hold_an_opening(self, held: str) -> str:
        """The next group that is opened stands in a load of its trial until the engine's thread is called to sleep. Then there is
        the file `held`."""
        model, called = self.model_runner.get_model(), threading.Event()  # type: ignore[attr-defined]
        kind, load = type(model), type(model).load_weights

        def holding(module: Any, *args: Any, **kwargs: Any) -> Any:
            if module is not model:
                kind.load_weights = load
                Path(held).touch()
                assert called.wait(600), "nobody called the engine's thread"
            return load(module, *args, **kwargs)

        def telling(call: Any) -> Any:
            @functools.wraps(call)
            def told(*args: Any, **kwargs: Any) -> Any:
                if Path(held).exists():
                    called.set()
                return call(*args, **kwargs)

            return told

        def slept(sleep: Any, level: int = 1) -> None:
            sleep(level)
            if Path(held).exists():
                called.set()

        kind.load_weights = holding
        self.weightwire_call, self.sleep = telling(self.weightwire_call), functools.partial(slept, self.sleep)  # type: ignore[attr-defined]
        return "{}"

    def ext_hold_a_load(self, go: str) -> str:
        """The live model's next load begins once the file `go` is there. Meanwhile there is a file of this rank beside it."""
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        kind, load = type(model), type(model).load_weights

        def holding(module: Any, *args: Any, **kwargs: Any) -> Any:
            if module is model:
                kind.load_weights = load
                Path(f"{go}.{self.rank}").touch()  # type: ignore[attr-defined]
                eventually(Path(go).exists, "the word to load")
            return load(module, *args, **kwargs)

        kind.load_weights = holding
        return "{}"
