"""SGLang: its HTTP server, in its own environment, as a trainer's user runs it.

Its own ways are driven from the trainer's rank 0 over HTTP, as RL frameworks do it. Two of them take a request for each
bucket, so they need a pause: without one SGLang decodes with a mixture of weights between two buckets, or waits before
each until all requests have ended. What they do is what is best for them here:

- Everything is gathered into buckets before the pause. Frameworks gather bucket by bucket inside it, for memory's sake;
  that stops generation for the whole update and is not faster, since a paused scheduler spins, on one of our two cores.
- One bucket after the other. Gathering the next one meanwhile, in the pause, only makes both slower on two cores.
- A reload is one request and needs no pause.

How they are counted:

- `seconds`: from the trainer's call until the answer to the last request, gathering included.
- `stopped_s`: from the answer to `pause_generation` until `continue_generation` is sent; under the reload, the time of
  its request. What requests in flight do to it is left out: there are none.
"""

from __future__ import annotations

import base64
import contextlib
import io
import itertools
import json
import shutil
import socket
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from benchmarks import gather
from benchmarks.engines.base import Engine, Sample, Weights
from benchmarks.processes import ROOT, Process, Remote

FROM_TENSOR = "update_weights_from_tensor, flattened buckets"
FROM_DISTRIBUTED = "update_weights_from_distributed, flattened buckets, gloo"
FROM_DISK = "save safetensors + update_weights_from_disk"

GROUP = "bench"
START_TIMEOUT_S = 300.0
REQUEST_TIMEOUT_S = 300.0

ARGUMENTS = """--device cpu --dtype bfloat16 --attention-backend torch_native --sampling-backend pytorch
    --disable-cuda-graph --context-length 1024 --max-total-tokens 4096 --max-running-requests 8 --disable-radix-cache
    --sleep-on-idle --skip-tokenizer-init --skip-server-warmup --log-level warning --host 127.0.0.1"""


class Sglang(Engine):
    name = "sglang"
    title = "SGLang"
    layouts = ("plain",)
    ways = (FROM_TENSOR, FROM_DISTRIBUTED, FROM_DISK)

    def __init__(self, model: Path, tp: int, layout: str, scratch: Path, environment: dict[str, str]) -> None:
        port = free_port()
        own = {
            "SGLANG_USE_CPU_ENGINE": "1",
            # A core for each rank. The first binds threads only where SGLang has its AMX kernels.
            "SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(rank) for rank in range(tp)),
            "OMP_NUM_THREADS": "1",
        }
        command = [str(ROOT / ".venvs/sglang/bin/python"), "-m", "sglang.launch_server", *ARGUMENTS.split()]
        command += ["--model-path", str(model), "--tp-size", str(tp), "--port", str(port)]
        self._process = Process(command, scratch / "engine.log", environment | own)
        self._url = f"http://127.0.0.1:{port}"
        self._tp = tp
        self._checkpoint = scratch / "checkpoint"
        self._checkpoint.mkdir()
        shutil.copy(model / "config.json", self._checkpoint)

    def connect(self, trainer: Remote) -> None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not self._healthy():
            self._process.check("starting SGLang", deadline_s)
            time.sleep(0.3)
        self.decode(tokens=2, requests=1)
        trainer.ask("connect", url=self._url, tp=self._tp, port=free_port())

    def decode(self, tokens: int, requests: int) -> list[float]:
        body = {
            "input_ids": [[1 + i, 5, 9, 7, 3] for i in range(requests)],
            "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
            "stream": True,
        }
        ends: list[float] = []
        with open_url(f"{self._url}/generate", body) as answer:
            for line in answer:  # each token of each request as it is made
                if line.startswith(b"data: {") and json.loads(line[6:]).get("index", 0) == 0:
                    ends.append(time.monotonic())
        return ends

    def update(self, way: str, trainer: Remote, weights: Weights) -> Sample:
        # Written on the way: gathering 3 (into a socket, out of it, into the tensor), the engine's load 1, and
        copies, extra_bytes, command = {
            # the bucket, and the bucket again where the engine can see it
            FROM_TENSOR: (6, weights.nbytes + 2 * weights.largest, {"way": "from_tensor"}),
            # the bucket, into a socket, out of it
            FROM_DISTRIBUTED: (7, weights.nbytes + self._tp * weights.largest, {"way": "from_distributed"}),
            # a clone, bytes, the page cache
            FROM_DISK: (7, 2 * weights.nbytes, {"way": "from_disk", "path": str(self._checkpoint)}),
        }[way]
        answer = trainer.ask("native", after_step=True, **command)
        result = answer["result"]
        messages = result["messages"] + len(weights.metas)
        return Sample(answer["seconds"], result["stopped_s"], messages, copies, extra_bytes)

    def stop(self) -> None:
        self._process.stop()

    def _healthy(self) -> bool:
        with contextlib.suppress(OSError), open_url(f"{self._url}/health") as answer:
            return bool(answer.status == 200)
        return False


class Sender:
    """The trainer's side of SGLang's own ways: each method is called on every rank, rank 0 speaks to the server.

    The buckets are made as SGLang's `FlattenedTensorBucket` and `MultiprocessingSerializer` make them, which the
    trainer's environment lacks.
    """

    def __init__(self, model: Any, url: str, tp: int, port: int) -> None:
        self._model, self._url, self._tp = model, url, tp
        self._pool = ThreadPoolExecutor(1)
        self._messages = 0
        self._group: Any = None
        self._leads = dist.get_rank() == 0
        if self._leads:
            # Handles of the other strategy can be opened only by processes of one family.
            torch.multiprocessing.set_sharing_strategy("file_system")
            self._group = self._join(port)
            self._messages = 0

    def from_tensor(self) -> dict[str, Any] | None:
        """Buckets in shared memory; each rank of the engine gets a handle, opens it and loads."""
        gathered = []
        for bucket in gather.gathered_buckets(self._model):
            if self._leads:
                payload = {"flattened_tensor": gather.flat(bucket), "metadata": flat_metadata(bucket)}
                # One for each rank: a handle counts who opened it.
                gathered.append((payload, [pickled(payload) for _ in range(self._tp)]))
        with self._stopped() as taken:
            for number, (_, handles) in enumerate(gathered, 1):
                request = {"serialized_named_tensors": handles}
                self._post("update_weights_from_tensor", request | how(last=number == len(gathered)))
        return self._result(taken)

    def from_distributed(self) -> dict[str, Any] | None:
        """Buckets by broadcast: while the engine's handler receives, rank 0 sends."""
        gathered = []
        for bucket in gather.gathered_buckets(self._model):
            if self._leads:
                request = {
                    "names": [name for name, _ in bucket],
                    "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
                    "shapes": [list(tensor.shape) for _, tensor in bucket],
                    "group_name": GROUP,
                }
                gathered.append((gather.flat(bucket), request))
        with self._stopped() as taken:
            for number, (flat, request) in enumerate(gathered, 1):
                request |= how(last=number == len(gathered))
                loaded = self._pool.submit(self._post, "update_weights_from_distributed", request)
                gather.broadcast(self._group, flat)
                loaded.result()
                self._messages += 1
        return self._result(taken)

    def from_disk(self, path: str) -> dict[str, Any] | None:
        """A checkpoint, and one request to load it."""
        gather.save(self._model, path)
        started_s = time.perf_counter()
        if self._leads:
            self._post("update_weights_from_disk", {"model_path": path})
        return self._result([time.perf_counter() - started_s])

    @contextlib.contextmanager
    def _stopped(self) -> Iterator[list[float]]:
        """Pauses the engine and opens a session; yields where the seconds will stand."""
        taken: list[float] = []
        if not self._leads:
            yield taken
            return
        self._post("pause_generation", {"mode": "retract"})
        started_s = time.perf_counter()
        self._post("begin_weight_update", {})
        yield taken
        self._post("end_weight_update", {})
        taken.append(time.perf_counter() - started_s)
        self._post("continue_generation", {"torch_empty_cache": False})

    def _result(self, taken: list[float]) -> dict[str, Any] | None:
        if not self._leads:
            return None
        messages, self._messages = self._messages, 0
        return {"stopped_s": taken[0], "messages": messages}

    def _post(self, verb: str, body: dict[str, Any]) -> None:
        self._messages += 1
        with open_url(f"{self._url}/{verb}", body) as answer:
            answer.read()

    def _join(self, port: int) -> Any:
        """The group of all ranks of the engine and this one, which is its rank 0."""
        size = self._tp + 1
        store = dist.TCPStore(
            "127.0.0.1", port, size, is_master=True, wait_for_workers=False, timeout=timedelta(minutes=2)
        )
        body = {
            "master_address": "127.0.0.1",
            "master_port": port,
            "rank_offset": 1,
            "world_size": size,
            "group_name": GROUP,
            "backend": "gloo",
        }
        joined = self._pool.submit(self._post, "init_weights_update_group", body)
        # The prefixes that SGLang and torch give a group made by its name.
        for prefix in (GROUP, f"{GROUP}/", "cpu/"):
            store = dist.PrefixStore(prefix, store)
        group = gather.group(store, 0, size)
        joined.result()
        return group


def how(*, last: bool) -> dict[str, Any]:
    """Of each bucket; the caches are flushed once, with the last."""
    return {"load_format": "flattened_bucket", "flush_cache": last}


def flat_metadata(bucket: list[tuple[str, torch.Tensor]]) -> list[SimpleNamespace]:
    """Where each tensor lies in the bucket."""
    ends = list(itertools.accumulate(tensor.nbytes for _, tensor in bucket))
    return [
        SimpleNamespace(
            name=name,
            shape=tensor.shape,
            dtype=tensor.dtype,
            start_idx=end - tensor.nbytes,
            end_idx=end,
            numel=tensor.nbytes,
        )
        for (name, tensor), end in zip(bucket, ends, strict=True)
    ]


def pickled(payload: dict[str, Any]) -> str:
    """A tensor goes into shared memory, and its handle into the result. Base64, as SGLang takes it over HTTP."""
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump(payload)
    return base64.b64encode(buffer.getvalue()).decode()


def open_url(url: str, body: dict[str, Any] | None = None) -> Any:
    """A GET, or a POST of JSON. Raises `urllib.error.HTTPError` where SGLang refuses."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    return urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=REQUEST_TIMEOUT_S)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
