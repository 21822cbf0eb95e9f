"""Runs in a process of its own: holds one vLLM `LLM` and does what the test asks, step by step.

Usage: engine_driver.py FD. FD is a stream socket of JSON lines, `{"id", "do", ...}`; each is answered by one line with
the same id and either `result` or `error`. Between two commands the engine steps while it has work, so that a test can
ask, update and look while requests are running.
"""

from __future__ import annotations

import gc
import json
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from typing import Any

import tests.support.gpu_classes
import tests.support.torchvision_here  # noqa: F401 -- before vLLM looks at a model
from tests.support import async_scheduling

PASS_S = 0.002

if os.environ.get("WEIGHTWIRE_TEST_START_FAULT"):  # processes that are spawned import this module as well
    from tests.support import start_faults

    start_faults.give()


class Driver:
    def __init__(self, connection: socket.socket) -> None:
        self.input = connection.makefile("r")  # two objects: one text stream is not for two threads
        self.output = connection.makefile("w")
        self.llm: Any = None
        self.dead = ""
        self.requests: dict[str, dict[str, Any]] = {}
        self.waiting: list[tuple[int, list[str]]] = []
        self.commands: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self.stepping = False
        signal.signal(signal.SIGINT, self.interrupt)
        threading.Thread(target=self.read, daemon=True).start()

    def interrupt(self, *_: object) -> None:
        """Ctrl-C, which only a step of the engine is to notice."""
        if self.stepping:
            raise KeyboardInterrupt

    def read(self) -> None:
        for line in self.input:
            self.commands.put(json.loads(line))
        self.commands.put(None)

    def answer(self, number: int, **fields: Any) -> None:
        self.output.write(json.dumps({"id": number, **fields}) + "\n")
        self.output.flush()

    def run(self) -> None:
        while True:
            busy = self.busy()
            try:
                command = self.commands.get(block=not busy)
            except queue.Empty:
                self.step()
                continue
            if command is None or command["do"] == "stop":
                self.close()
                if command is not None:
                    self.answer(command["id"], result=None)
                return
            number, do = command.pop("id"), command.pop("do")
            try:
                result = getattr(self, "do_" + do)(**command, **({"number": number} if do == "wait" else {}))
                if do != "wait":
                    self.answer(number, result=result)
            except Exception as error:  # noqa: BLE001 - whatever it is, the test gets it
                traceback.print_exc()
                self.answer(number, error=f"{type(error).__name__}: {error}")

    def busy(self) -> bool:
        return self.llm is not None and not self.dead and any(not r["finished"] for r in self.requests.values())

    def step(self) -> None:
        arrived = getattr(self.llm.llm_engine.engine_core, "outputs_queue", None)  # an in-process engine has none
        if arrived is not None and arrived.empty():
            time.sleep(PASS_S)  # a paused engine sends nothing: `step` would wait, and no command be taken
            return
        try:
            self.stepping = True
            outputs = self.llm.llm_engine.step()
            self.stepping = False
        except KeyboardInterrupt:  # as in a notebook, whose user goes on afterwards
            self.stepping = False
            return
        except Exception as error:  # noqa: BLE001 - a dead engine is what some tests are about
            traceback.print_exc()
            self.dead = f"{type(error).__name__}: {error}"
            outputs = []
            for request in self.requests.values():
                if not request["finished"]:
                    request.update(finished=True, finish_reason="dead", reason=self.dead)
        for output in outputs:
            if output.request_id not in self.requests:
                continue
            if hasattr(output.outputs, "data"):
                self.requests[output.request_id].update(rows=output.outputs.data.tolist(), finished=output.finished)
                continue
            one = output.outputs[0]
            self.requests[output.request_id].update(
                tokens=list(one.token_ids),
                logprobs=[sorted((i, p.logprob) for i, p in step.items()) for step in one.logprobs or ()],
                versions=_per_token(getattr(one, "weight_versions", None), len(one.token_ids)),  # since 0.32
                cached=output.num_cached_tokens or 0,
                finished=output.finished,
                finish_reason=one.finish_reason,
                reason=one.stop_reason,
            )
        self.tell_waiting()

    def tell_waiting(self) -> None:
        for number, ids in list(self.waiting):
            if all(self.requests[i]["finished"] for i in ids):
                self.waiting.remove((number, ids))
                self.answer(number, result=[self.requests[i] for i in ids])

    # --- commands ---------------------------------------------------------------------------------------------------

    def do_open_bare(self, kwargs: dict[str, Any]) -> None:
        from vllm import LLM

        async_scheduling.keep_if_asked()
        self.llm = LLM(**kwargs)

    def do_open(self, kwargs: dict[str, Any], env: dict[str, str]) -> list[str]:
        """With our extension in it, which tells of every worker."""
        os.environ.update(env)
        self.do_open_bare(kwargs)
        if kwargs.get("pipeline_parallel_size", 1) > 1:
            self.llm.collective_rpc("ext_fix_pipeline")
        return list(self.llm.collective_rpc("ext_about"))

    def do_environment(self, env: dict[str, str]) -> None:
        os.environ.update(env)

    def do_threads(self) -> list[str]:
        """The plug-in's threads in this process."""
        return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("weightwire-"))

    def do_close(self) -> None:
        self.close()

    def do_submit(self, requests: list[dict[str, Any]]) -> None:
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        self.must_live()
        for request in requests:
            params = SamplingParams(
                temperature=0, max_tokens=request["max_tokens"], ignore_eos=True, logprobs=request.get("logprobs")
            )
            name, lora = request["name"], request.get("lora")
            adapter = {"lora_request": LoRARequest(*lora)} if lora else {}
            self.requests[name] = begun(name)
            prompt: dict[str, Any] = {"prompt_token_ids": request["prompt"]}
            if (seed := request.get("image")) is not None:
                prompt["multi_modal_data"] = {"image": image(seed)}
            if (seed := request.get("sound")) is not None:
                prompt["multi_modal_data"] = {"audio": (sound(seed), 16_000)}
            if request.get("salt"):
                prompt["cache_salt"] = request["salt"]
            self.llm.llm_engine.add_request(name, prompt, params, **adapter)

    def do_pool(self, name: str, prompt: list[int], steps: int = 0) -> None:
        """A request of token-wise pooling: its answer has `rows`, one for each token of the prompt. With `steps` an in-process
        engine takes so many, and then stands by vLLM's own pause."""
        from vllm import PoolingParams

        self.must_live()
        self.requests[name] = begun(name)
        params = PoolingParams(task="token_embed", use_activation=False)
        self.llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, params)
        for _ in range(steps):
            self.step()
        if steps:  # now: it would take more of them before another command comes
            self.do_own_pause()

    def must_live(self) -> None:
        """A dead engine takes no step any more, so a test that waited for its answers would wait for ever."""
        if self.dead:
            raise RuntimeError(f"this engine has died: {self.dead}")

    def do_wait(self, names: list[str], number: int) -> None:
        self.waiting.append((number, names))
        self.tell_waiting()

    def do_look(self, names: list[str]) -> list[dict[str, Any]]:
        return [self.requests[name] for name in names]

    def do_drafted(self) -> list[int]:
        """How many tokens the draft model has proposed since the engine started, and how many of them were accepted."""
        values = {metric.name: getattr(metric, "value", 0) for metric in self.llm.get_metrics()}
        return [int(values[f"vllm:spec_decode_num_{which}_tokens"]) for which in ("draft", "accepted")]

    def do_rpc(self, method: str, args: list[Any]) -> list[Any]:
        return [json.loads(text) for text in self.llm.collective_rpc(method, args=tuple(args))]

    def do_checksums(self) -> list[dict[str, str]] | None:
        """What vLLM's own `/weight_checker` answers, by rank; None before 0.32, which has none."""
        from vllm.v1.worker.gpu_worker import Worker

        has_checker = hasattr(Worker, "compute_weight_checksums")
        return list(self.llm.collective_rpc("compute_weight_checksums")) if has_checker else None

    def do_own_pause(self) -> None:
        """vLLM's own pause, as its `/pause?mode=keep` asks for it: requests stand."""
        self._core("pause_scheduler", "keep", False)

    def do_own_resume(self) -> None:
        self._core("resume_scheduler")

    def do_own_release_kv_cache(self) -> None:
        """vLLM's `LLM.release_kv_cache_memory`."""
        self._core("release_kv_cache_memory")

    def do_own_sleep(self, level: int) -> None:
        """vLLM's `LLM.sleep`."""
        self.llm.sleep(level=level)

    def do_own_wake_up(self, tags: list[str] | None = None) -> None:
        self.llm.wake_up(tags=tags)

    def _core(self, method: str, *args: Any) -> Any:
        """A method of vLLM's engine core."""
        client = self.llm.llm_engine.engine_core
        if hasattr(client, "call_utility"):
            return client.call_utility(method, *args)
        return getattr(client.engine_core, method)(*args)

    def do_load(self, model: str, by: str) -> None:
        """Weights that a user loads: by vLLM's own reload ("engine"), by a worker extension of the user's, or in the caller's
        process by the model itself ("caller"). What was computed with those of before the user has to drop as well."""
        if by == "engine":
            self.llm.collective_rpc("reload_weights", kwargs={"weights_path": model})
        elif by == "caller":
            from safetensors.torch import load_file

            served = self.llm.llm_engine.model_executor.driver_worker.model_runner.get_model()
            served.load_weights(load_file(f"{model}/model.safetensors").items())
        else:
            self.llm.collective_rpc("ext_load", args=(model,))
        self.llm.reset_prefix_cache()

    def do_reset_weights(self) -> list[Any]:
        """What vLLM's `/weight_checker` does for its action `reset`."""
        return list(self.llm.collective_rpc("reset_weights"))

    def close(self) -> None:
        if self.llm is not None:
            self.llm.llm_engine.engine_core.shutdown()
        self.llm, self.dead = None, ""
        self.requests.clear()
        gc.collect()


def image(seed: int) -> Any:
    """An image of random pixels, the same for the same seed."""
    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (28, 28, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def sound(seed: int) -> Any:
    """Half a second of noise at 16 kHz, the same for the same seed."""
    import numpy as np

    return np.random.default_rng(seed).uniform(-1, 1, 8000).astype(np.float32)


def begun(name: str) -> dict[str, Any]:
    """What is known of a request when it starts; the driver fills the rest in."""
    nothing: dict[str, Any] = {"tokens": [], "logprobs": [], "versions": [], "cached": 0}
    return {"name": name, "finished": False, "finish_reason": None, "reason": None, **nothing}


def _per_token(spans: Any, count: int) -> list[str]:
    """The version of each token, as vLLM stamped it; "default" before the first update."""
    versions = [""] * count
    for span in spans or ():
        for i in range(span.start, min(span.end if span.end is not None else count, count)):
            versions[i] = str(span.version)
    return versions


if __name__ == "__main__":
    Driver(socket.socket(fileno=int(sys.argv[1]))).run()
    sys.stdout.flush()
    os._exit(0)
