"""Runs in a process of its own, in SGLang's environment: holds one `sgl.Engine` and does what the test asks.

Same protocol as `engine_driver.py`. Between two commands the engine's event loop runs while requests do.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import traceback
from pathlib import Path
from typing import Any, ClassVar

from tests.support import (
    engine_driver,
    far_memory,
    held_grammars,
    poison,
    sglang_host_cache,
    sglang_pool,
    sglang_speculation,
)

PASS_S = 0.005

if os.environ.get("WEIGHTWIRE_TEST_UNPINNED"):
    # SGLang's LoRA code asks for pinned memory whatever the device, and a torch without an accelerator has none to give.
    # The schedulers import this module as well, on the thread that runs the model: they are spawned from it.
    import torch
    from torch.overrides import TorchFunctionMode

    class Unpinned(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.Tensor.pin_memory:
                return args[0]
            return func(*args, **{name: value for name, value in (kwargs or {}).items() if name != "pin_memory"})

    Unpinned().__enter__()

if os.environ.get("WEIGHTWIRE_TEST_ALLOCATOR"):
    from tests.support import sglang_allocator

    sglang_allocator.give()

if os.environ.get(sglang_pool.VARIABLE):
    sglang_pool.give()

if os.environ.get(held_grammars.VARIABLE):
    held_grammars.give()

if asked := os.environ.get(sglang_speculation.VARIABLE):
    sglang_speculation.give(overlap=asked == "overlap")

if took_s := os.environ.get(sglang_host_cache.VARIABLE):
    sglang_host_cache.give(float(took_s))

if library := os.environ.get(far_memory.VARIABLE):
    from tests.support import far_weights

    far_weights.give_sglang(library)

poison.spread_if_asked()  # in the schedulers as well, which are spawned from this module


class Driver(engine_driver.Driver):
    last_turns: ClassVar[dict[str | None, str]] = {}
    """By session: the id of its last request, which the next one goes on from."""

    def _turn(self, session: str | None) -> dict[str, str] | None:
        if session is None:
            return None
        last = self.last_turns.get(session)
        return {"id": session} | ({} if last is None else {"rid": last})

    def step(self) -> None:
        self.llm.loop.run_until_complete(asyncio.sleep(PASS_S))
        self.tell_waiting()

    def do_open(self, kwargs: dict[str, Any], env: dict[str, str]) -> list[str]:
        os.environ.update(env)
        if env.get("WEIGHTWIRE_TEST_EXPLICIT"):
            from inference_plugin.engines.sglang import make_engine

            self.llm = make_engine(**kwargs)
        else:
            import sglang

            self.llm = sglang.Engine(**kwargs)
        return []

    def do_submit(self, requests: list[dict[str, Any]]) -> None:
        for request in requests:
            name = request["name"]
            self.requests[name] = engine_driver.begun(name)
            self.llm.loop.create_task(self._generate(self.requests[name], request))

    async def _generate(self, state: dict[str, Any], request: dict[str, Any]) -> None:
        try:
            stream = await self.llm.async_generate(
                input_ids=request["prompt"],
                sampling_params={
                    "temperature": 0,
                    "max_new_tokens": request["max_tokens"],
                    "ignore_eos": True,
                    "regex": request.get("regex"),
                    "beam_width": request.get("beams"),
                },
                stream=True,
                session_params=self._turn(request.get("session")),
                cache_salt=request.get("salt"),
                lora_path=request["lora"][0] if request.get("lora") else None,
                image_data=None if (seed := request.get("image")) is None else [engine_driver.image(seed)],
                audio_data=None if (seed := request.get("sound")) is None else [_wav(engine_driver.sound(seed))],
                return_logprob=bool(request.get("logprobs")),
            )
            async for chunk in stream:
                meta = chunk["meta_info"]
                self.last_turns[request.get("session")] = meta["id"]
                state["tokens"] = list(chunk["output_ids"])
                state["logprobs"] = [value for value, *_ in meta.get("output_token_logprobs", ())]
                state["cached"] = int(meta.get("cached_tokens", 0))
                state["versions"] = versions_of(meta, len(state["tokens"]))
                state["accepted"] = list(meta.get("spec_correct_drafts_histogram", ()))
                if (reason := meta.get("finish_reason")) is not None:
                    # What has a status is an HTTP error to a server's client; an engine's caller sees an abort.
                    state["finish_reason"] = "error" if reason.get("status_code") else reason["type"]
                    state["reason"] = reason.get("message")
        except Exception as error:  # noqa: BLE001 - what a client sees is what some tests are about
            traceback.print_exc()
            state["finish_reason"], state["reason"] = "error", f"{type(error).__name__}: {error}"
        state["finished"] = True

    def do_rpc(self, method: str, args: list[Any]) -> list[Any]:
        """A method of `sgl.Engine`."""
        return [str(getattr(self.llm, method)(*args))]

    def do_draft(self, directory: str) -> list[dict[str, str]]:
        """All that the draft model reaches, of each rank."""
        self.llm.collective_rpc("write_draft", directory=directory)
        return [json.loads(path.read_text()) for path in sorted(Path(directory).glob("draft-*.json"))]

    def do_load(self, model: str, by: str) -> None:
        """Weights that a user loads: by SGLang's own update from disk ("engine"), or from tensors."""
        if by == "engine":
            done, message, *_ = self.llm.update_weights_from_disk(model)
            assert done, message
        else:
            self.do_session("begin")
            self._send(model)
            self.do_session("end")

    def do_load_adapter(self, name: str, directory: str) -> None:
        """An adapter that a user sends to SGLang as tensors."""
        from safetensors.torch import load_file

        config = json.loads(Path(directory, "adapter_config.json").read_text())
        sent = load_file(f"{directory}/adapter_model.safetensors"), config
        done = self.llm.load_lora_adapter_from_tensors(name, *sent)
        assert done.success, done.error_message

    def do_session(self, which: str) -> None:
        """SGLang's own `begin_weight_update`, or its end."""
        from sglang.srt.managers import io_struct

        kind = getattr(io_struct, f"{which.capitalize()}WeightUpdateReqInput", None)
        if kind is not None:  # before, an update is a call of its own
            self._ask(f"{which}_weight_update", kind(), None)

    def _send(self, model: str) -> None:
        from safetensors.torch import load_file

        done, message = self.llm.update_weights_from_tensor(list(load_file(f"{model}/model.safetensors").items()))[:2]
        assert done, message

    def do_own_pause(self) -> None:
        """SGLang's own pause, as its `/pause_generation` asks for it: requests stand."""
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        self._ask("pause_generation", PauseGenerationReqInput(mode="in_place"))

    def do_own_resume(self) -> None:
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        self._ask("continue_generation", ContinueGenerationReqInput(torch_empty_cache=False))

    def do_own_sleep(self, level: int) -> None:
        """SGLang's `Engine.release_memory_occupation`. Whether the weights come back is for the engine's flags to say."""
        self.llm.release_memory_occupation()

    def do_own_wake_up(self, tags: list[str] | None = None) -> None:
        self.llm.resume_memory_occupation(tags)

    def do_abort_all(self) -> None:
        """What SGLang's `/abort_request` does for `abort_all`."""
        self.llm.tokenizer_manager.abort_request(abort_all=True)

    def _ask(self, name: str, *request: Any) -> Any:
        return self.llm.loop.run_until_complete(getattr(self.llm.tokenizer_manager, name)(*request))

    def do_reset_weights(self) -> list[Any]:
        """What SGLang's `/weights_checker` does for its action `reset_tensors`: success, and a message."""
        from sglang.srt.managers.io_struct import CheckWeightsReqInput

        asked = self.llm.tokenizer_manager.check_weights(CheckWeightsReqInput(action="reset_tensors"), None)
        return list(self.llm.loop.run_until_complete(asked)[:2])

    def close(self) -> None:
        if self.llm is not None:
            self.llm.shutdown()
        self.llm = None
        self.requests.clear()


def _wav(samples: Any) -> bytes:
    import io

    import soundfile

    file = io.BytesIO()
    soundfile.write(file, samples, 16_000, format="WAV", subtype="FLOAT")
    return file.getvalue()


def versions_of(meta: dict[str, Any], count: int) -> list[str]:
    """The version of each token, as SGLang stamped it."""
    versions = [str(meta.get("weight_version", ""))] * count
    for span in meta.get("weight_versions") or ():
        version, start, end = span.values() if isinstance(span, dict) else span
        for i in range(start, min(end, count)):
            versions[i] = str(version)
    return versions


if __name__ == "__main__":
    Driver(socket.socket(fileno=int(sys.argv[1]))).run()
    sys.stdout.flush()
    os._exit(0)
