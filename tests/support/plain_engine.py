"""An engine without an engine: the real coordinator, worker server, groups and installer around a plain torch module.

It is the test rig for faults of the protocol: worker processes whose "engine's own thread" is a loop over a pipe, and a
coordinator process whose "steps" are the turns of a loop, so that a test can hold a step boundary back, make an installation
fail, look at the live parameters, and kill any process. Real engines are tested in `tests/engines`.

    coordinator process:   ReplicaCoordinator (control thread)  +  the loop: commands between two steps
    worker process:  RankRuntime (REP thread, stager)  +  the loop: operations, in order

A test talks to the loop through a Unix socket (`Rig` in `rig.py`), one JSON line each way.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from multiprocessing.connection import Connection, Pipe
from typing import Any

import msgspec
import torch
from torch import nn

from inference_plugin.engines.control import EngineControl
from inference_plugin.engines.coordinator import open_coordinator
from inference_plugin.engines.live_model import LiveModel
from inference_plugin.engines.operations import RankReply
from inference_plugin.engines.rank_runtime import RankIdentity, RankRuntime
from inference_plugin.net import addresses
from inference_plugin.plugins import hookimpl, plugin_manager
from inference_plugin.wire.digest import digest_bytes
from inference_plugin.wire.geometry import Box
from inference_plugin.wire.manifest import Manifest, TensorSpec
from inference_plugin.wire.messages import InFlight, MemoryTag, SleepLevel
from inference_plugin.wire.tensors import bytes_view, dtype_name
from tests.support import poison
from trainer_adapters.sources.base import LocalSlice, WeightSource

FREE_BYTES = "RIG_FREE_BYTES"
"""How much memory each worker finds free."""

PARENT = "RIG_PARENT"
"""The process that is said to have started the coordinator's; none without it."""

TIED = {"head.weight": "embed.weight"}
VOCABULARY, WIDTH = 48, 16


# --- the checkpoint ---------------------------------------------------------------------------------------------------


def checkpoint(seed: int, layers: int = 2) -> dict[str, torch.Tensor]:
    """A version of the weights: 6 tensors per layer and 2 more, bf16 beside float32 norms. The head is tied."""
    random = torch.Generator().manual_seed(seed)

    def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(shape, generator=random).to(dtype)

    tensors = {"embed.weight": draw(VOCABULARY, WIDTH)}
    for i in range(layers):
        for name in ("q", "k", "v", "out"):
            tensors[f"layers.{i}.{name}.weight"] = draw(WIDTH, WIDTH)
        tensors[f"layers.{i}.out.bias"] = draw(WIDTH)
        tensors[f"layers.{i}.norm.weight"] = draw(WIDTH, dtype=torch.float32)
    tensors["norm.weight"] = draw(WIDTH, dtype=torch.float32)
    return tensors


def manifest_of(tensors: Mapping[str, torch.Tensor], tied: Mapping[str, str] | None = None) -> Manifest:
    specs = tuple(TensorSpec(n, dtype_name(t.dtype), tuple(t.shape)) for n, t in tensors.items())
    return Manifest(specs, dict(tied or {})).check()


class ShardSource(WeightSource):
    """Each of `world` ranks holds the rows that are its own of every tensor whose rows divide, and every
    `world`-th of the others."""

    def __init__(self, tensors: dict[str, torch.Tensor], rank: int = 0, world: int = 1) -> None:
        self.tensors = tensors
        self.rank = rank
        self.world = world
        self.tied = TIED if "embed.weight" in tensors else {}

    def manifest(self) -> Manifest:
        return manifest_of(self.tensors, self.tied)

    def slices(self) -> Iterator[LocalSlice]:
        for i, tensor in enumerate(self.tensors.values()):
            if tensor.dim() and tensor.shape[0] and tensor.shape[0] % self.world == 0:
                rows = tensor.shape[0] // self.world
                offsets = (self.rank * rows, *(0,) * (tensor.dim() - 1))
                part = tensor.narrow(0, self.rank * rows, rows)
                yield LocalSlice(Box(i, offsets, tuple(part.shape)), part)
            elif i % self.world == self.rank:
                yield LocalSlice(Box(i, (0,) * tensor.dim(), tuple(tensor.shape)), tensor)


# --- the model --------------------------------------------------------------------------------------------------------


class PlainModel(nn.Module):
    """One tensor-parallel rank: rows of the embedding and of the fused qkv, columns of `out`, norms and biases whole."""

    def __init__(self, layers: int, rank: int, tp: int) -> None:
        super().__init__()
        self.rank, self.tp = rank, tp
        self.embed = nn.Embedding(VOCABULARY // tp, WIDTH, dtype=torch.bfloat16)
        self.layers = nn.ModuleList(_Layer(tp) for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, VOCABULARY // tp, bias=False, dtype=torch.bfloat16)
        self.head.weight = self.embed.weight

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        parameters = dict(self.named_parameters())
        loaded = set()
        for name, tensor in tensors:
            if name == "head.weight":
                continue
            stem, _, last = name.rpartition(".")
            fused, _, part = stem.rpartition(".")
            if part in ("q", "k", "v"):
                rows = WIDTH // self.tp
                target = parameters[f"{fused}.qkv.{last}"].narrow(0, "qkv".index(part) * rows, rows)
                tensor = tensor.narrow(0, self.rank * rows, rows)
            else:
                target = parameters[name]
                for dim in range(tensor.dim()):
                    if target.shape[dim] != tensor.shape[dim]:
                        tensor = tensor.narrow(dim, self.rank * target.shape[dim], target.shape[dim])
            target.data.copy_(tensor)
            loaded.add(name)
        return loaded


class _Layer(nn.Module):
    def __init__(self, tp: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH // tp, bias=False, dtype=torch.bfloat16)
        self.out = nn.Linear(WIDTH // tp, WIDTH, bias=True, dtype=torch.bfloat16)
        self.norm = nn.LayerNorm(WIDTH, bias=False)


def live_digests(model: nn.Module) -> dict[str, int]:
    """xxh3-64 of every parameter's bytes."""
    return {
        name: digest_bytes(bytes_view(parameter.detach().contiguous()).numpy())
        for name, parameter in model.named_parameters()
    }


def digests_expected(tensors: Mapping[str, torch.Tensor], tp: int = 1, layers: int = 2) -> list[dict[str, int]]:
    """What the live parameters of every rank hold once `tensors` are loaded the engine's own way."""
    expected = []
    for rank in range(tp):
        model = PlainModel(layers, rank, tp)
        model.load_weights(tensors.items())
        expected.append(live_digests(model))
    return expected


class Faults:
    """A plug-in that makes a step of an installation fail on this rank, once."""

    def __init__(self) -> None:
        self.steps: list[str] = []

    @hookimpl
    def weightwire_installing(self, step: str) -> None:
        if step in self.steps:
            self.steps.remove(step)
            raise RuntimeError(f"the test lets {step!r} fail")


class PlainEngineModel(LiveModel):
    """What the installer knows of this engine (`EngineModel`)."""

    def __init__(self, layers: int, rank: int, tp: int) -> None:
        with torch.device("meta"):
            skeleton = PlainModel(layers, rank, tp)
        super().__init__(PlainModel(layers, rank, tp), torch.device("cpu"), skeleton)
        self.load_weights(self.live, checkpoint(0, layers).items())
        self.faults = Faults()
        self._kept: dict[str, torch.Tensor] = {}

    def free_bytes(self) -> int:
        return int(os.environ.get(FREE_BYTES, 1 << 30))

    def why_no_sleep(self, level: SleepLevel) -> str | None:
        return None

    def sleep(self, level: SleepLevel) -> None:
        """The smallest stand-in for an allocator: memory that is released holds nothing that could be taken for weights."""
        self.faults.weightwire_installing("sleep")
        parameters = dict(self.live.named_parameters())
        self._kept = {name: p.detach().clone() for name, p in parameters.items()} if level == 1 else {}
        for parameter in parameters.values():
            parameter.data.fill_(math.nan)

    def wake_up(self, tag: MemoryTag) -> None:
        self.faults.weightwire_installing(f"wake {tag}")
        if tag == "weights":
            for name, parameter in self.live.named_parameters():
                if name in self._kept:
                    parameter.data.copy_(self._kept[name])


# --- a worker process -------------------------------------------------------------------------------------------------


def run_worker(pipe: Connection, replica: str, rank: int, tp: int, layers: int) -> None:
    """The worker's own thread: one operation after the other until the pipe ends."""
    torch.set_num_threads(1)
    poison.spread()
    model = PlainEngineModel(layers, rank, tp)
    faults = model.faults
    plugin_manager().register(faults)
    runtime = RankRuntime(RankIdentity(replica, rank, tp_rank=rank, ranks=tp), model)
    pipe.send_bytes(msgspec.msgpack.encode(RankReply("start", rank, card=runtime.card())))
    with contextlib.suppress(EOFError, OSError):
        while True:
            request = pipe.recv_bytes()
            kind, content = request[:1], request[1:]
            if kind == b"C":
                pipe.send_bytes(runtime.call(content))
            elif kind == b"P":
                pipe.send_bytes(json.dumps(live_digests(model.live)).encode())
            else:
                if content:
                    faults.steps.append(content.decode())
                else:
                    faults.steps.clear()
                pipe.send_bytes(b"")
    runtime.close()


# --- the coordinator process ------------------------------------------------------------------------------------------------


class PlainControl(EngineControl):
    """`EngineControl` over the loop's queue. `held` keeps the loop from its next step boundary."""

    def __init__(self, pipes: list[Connection]) -> None:
        self.commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.open_boundary = threading.Event()
        self.open_boundary.set()
        self.log: list[str] = []
        self.refusal: str | None = None
        self.undone = 0
        self.counting = threading.Lock()
        self._pipes = pipes
        self._drained: list[Future[None]] = []

    def submit(self, command: Callable[[], None]) -> None:
        with self.counting:
            self.undone += 1
        self.commands.put(command)

    def ask(self, kind: bytes, content: bytes = b"", rank: int | None = None) -> list[bytes]:
        pipes = self._pipes if rank is None else [self._pipes[rank]]
        for pipe in pipes:
            pipe.send_bytes(kind + content)
        return [pipe.recv_bytes() for pipe in pipes]

    def call_ranks(self, request: bytes) -> list[bytes]:
        return self.ask(b"C", request)

    def pause(self, in_flight: InFlight) -> Future[None] | None:
        self.log.append(f"pause:{in_flight}")
        if in_flight != "drain":
            return None
        self._drained.append(Future())  # until the test says that the requests in flight have ended
        return self._drained[-1]

    def drained(self) -> None:
        while self._drained:
            self._drained.pop().set_result(None)

    def hold(self, asleep: frozenset[MemoryTag]) -> None:
        self.log.append(":".join(["hold", *sorted(asleep)]))

    def resume(self) -> None:
        self.log.append("resume")

    def installed(self, group: str, stamp: str, txn: str, in_flight: InFlight) -> None:
        self.log.append(f"installed:{group}:{stamp}")

    def refuse(self, reason: str | None) -> None:
        self.refusal = reason


def run_coordinator(directory: str, tp: int, layers: int, control_path: str) -> None:
    """A replica: forks its workers, publishes its card, and turns its loop until it is told to stop."""
    torch.set_num_threads(1)
    os.environ["WEIGHTWIRE_RUNTIME_DIR"] = directory
    replica = addresses.new_replica_id("plain")
    pipes = []
    for rank in range(tp):
        ours, theirs = Pipe()
        if os.fork() == 0:
            die_with_parent()
            ours.close()
            for other in pipes:
                other.close()
            run_worker(theirs, replica, rank, tp, layers)
            os._exit(0)
        theirs.close()
        pipes.append(ours)
    replies = [msgspec.msgpack.decode(pipe.recv_bytes(), type=RankReply) for pipe in pipes]
    control = PlainControl(pipes)
    stop = threading.Event()
    threading.Thread(target=_serve_tests, args=(control_path, control, stop), daemon=True).start()
    cards = [reply.card for reply in replies]
    parent = int(os.environ.get(PARENT, "0"))
    lacks = tuple(filter(None, [os.environ.get("WEIGHTWIRE_TEST_LACKS")]))
    coordinator = open_coordinator(
        control,
        replica,
        cards,
        engine="plain",
        engine_version="0",
        model=os.environ.get("RIG_MODEL", "plain"),
        dtype="float32",
        tp=tp,
        parent_pid=parent,
        lacks=lacks,
    )
    while True:
        command = control.commands.get()
        control.open_boundary.wait()
        if command is None:
            break
        command()
        with control.counting:
            control.undone -= 1
    coordinator.close()
    for pipe in pipes:
        pipe.close()


def _serve_tests(path: str, control: PlainControl, stop: threading.Event) -> None:
    """One JSON line each way. What looks at a rank runs in the loop, between two steps, like everything else."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    connection, _ = listener.accept()
    stream = connection.makefile("rw")
    for line in stream:
        stream.write(json.dumps(_answer_test(json.loads(line), control)) + "\n")
        stream.flush()


def _answer_test(request: dict[str, Any], control: PlainControl) -> Any:
    what = request["do"]
    if what == "hold":
        while control.undone:  # a command may be answered and not yet counted as done: it must not be seen as waiting
            time.sleep(0.001)
        control.open_boundary.clear()
    elif what == "go on":
        control.open_boundary.set()
    elif what == "stop":
        control.open_boundary.set()
        control.submit(None)  # type: ignore[arg-type]
    elif what == "drained":
        control.submit(control.drained)
    elif what == "state":
        return {"log": control.log, "refusal": control.refusal, "waiting": control.undone}
    elif what == "look":
        looks: queue.SimpleQueue[tuple[str | None, list[bytes]]] = queue.SimpleQueue()
        control.submit(lambda: looks.put((control.refusal, control.ask(b"P"))))
        refusal, digests = looks.get(timeout=300)
        return {"refusal": refusal, "held": [json.loads(each) for each in digests]}
    else:
        answers: queue.SimpleQueue[list[bytes]] = queue.SimpleQueue()
        kind, content = (b"P", b"") if what == "peek" else (b"F", request["step"].encode())
        control.submit(lambda: answers.put(control.ask(kind, content, request.get("rank"))))
        found = answers.get(timeout=300)
        return [json.loads(answer) for answer in found] if what == "peek" else None
    return None


def die_with_parent() -> None:
    """This process is killed when the one that forked it ends: no test leaves one behind."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() == 1:
        os._exit(1)
