"""Real vLLM engines in processes of their own, for tests: started with a deadline, ended whatever happens.

Every engine gets a job name of its own in one short runtime directory, and a log that is shown when something fails.
While one is open, `WEIGHTWIRE_RUNTIME_DIR` and `WEIGHTWIRE_JOB` of the test process point to it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import psutil

from inference_plugin.net import diagnosis
from inference_plugin.net.addresses import discover
from inference_plugin.wire.messages import ReplicaCard
from tests.support import poison, second_runner
from tests.support.preloaded import SHOW_STACKS, ForkedProgram, nursery

__all__ = [
    "INTEGRATIONS_PYTHON",
    "OLD_PYTHON",
    "ROOT",
    "Driver",
    "Engine",
    "HttpEngine",
    "Server",
    "eventually",
    "flags_of",
    "segments_of",
    "session_directory",
]

ROOT = Path(__file__).parents[2]
OLD_PYTHON = str(ROOT / ".venvs" / "vllm-old" / "bin" / "python")
"""Of an environment with an older vLLM."""
INTEGRATIONS_PYTHON = os.environ.get("WEIGHTWIRE_TEST_VLLM_PYTHON", sys.executable)
"""Of the environment whose vLLM other projects' trainers run into; `tools/versions.py` names older ones."""
START_TIMEOUT_S = 900.0
"""A last resort: an ordinary start is six processes that import 10 seconds each, and the machine may be shared."""
ANSWER_TIMEOUT_S = 180.0

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_NO_USAGE_STATS": "1",
    "PYTHONPATH": str(ROOT),
    "PYTHONUNBUFFERED": "1",
    "TORCH_COMPILE_DISABLE": "1",  # vLLM compiles a small function of a sharded embedding: 5 seconds for each rank
    poison.VARIABLE: "1",
    **second_runner.VARIABLES,
}
ENGINE_ARGUMENTS: dict[str, Any] = {
    "enforce_eager": True,
    "max_model_len": 256,
    "max_num_seqs": 8,
    "dtype": "float32",
    "seed": 0,
    "kv_cache_memory_bytes": 64 << 20,
}
PRELOADED = (
    *second_runner.PRELOADS,
    "vllm",
    "vllm.entrypoints.openai.api_server",
    "vllm.entrypoints.llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "compressed_tensors",  # of which each worker imports all
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.qwen3",
    "vllm.model_executor.models.qwen3_moe",
    "transformers",
    *(f"inference_plugin.engines.vllm.{module}" for module in ("hooks", "worker", "api", "lora", "weight_transfer")),
    "tests.support.poison",
)
EXTENSION = "tests.support.vllm_extension.Extension"

T = TypeVar("T")
_numbers = itertools.count()


def eventually(look: Callable[[], T], *, timeout_s: float = 300.0, what: str = "") -> T:
    """The first true value of `look`. Fails the test, saying `what`, when there is none in time."""
    deadline_s = time.monotonic() + timeout_s
    while not (found := look()):
        assert time.monotonic() < deadline_s, f"not within {timeout_s:g} s: {what or look}"
        time.sleep(0.02)
    return found


@contextlib.contextmanager
def session_directory() -> Iterator[Path]:
    """A runtime directory with a path short enough for sockets, removed at the end. `Engine.leftovers`: what is left."""
    path = Path(tempfile.mkdtemp(prefix="ww-", dir="/tmp"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


class Engine:
    """One engine and all processes it started. Use it as a context manager."""

    python = sys.executable
    preloads: tuple[str, ...] = PRELOADED
    """What its processes have imported when they start; () starts an interpreter of its own, as a user does."""
    constants: tuple[str, ...] = tuple(ENVIRONMENT)
    """Variables that the preloaded modules may read while they are imported: the same for every engine."""

    def __init__(self, runtime: Path, *, job: str = "", **environment: str) -> None:
        number = next(_numbers)
        self.job = job or f"t{os.getpid()}-{number}"
        self.runtime = runtime
        self.log = runtime / f"engine-{number}.log"
        self.environment = {
            **os.environ,
            **ENVIRONMENT,
            "WEIGHTWIRE_RUNTIME_DIR": str(runtime),
            "WEIGHTWIRE_JOB": self.job,
            **environment,
        }
        self.process: subprocess.Popen[bytes] | ForkedProgram | None = None
        self._family: dict[int, psutil.Process] = {}
        self._before: dict[str, str | None] = {}

    def start(self) -> None:
        raise NotImplementedError

    def stop(self) -> None:
        """Asks it to end; `__exit__` kills what is left."""
        raise NotImplementedError

    def __enter__(self) -> Any:
        self.use()
        try:
            self.start()
        except BaseException:
            self.kill()
            self.leave()
            print(self.log_tail(), file=sys.stderr)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.family()
        try:
            if kind is None:
                self.stop()
                # Its other processes follow by themselves, and only then is nothing of theirs left.
                eventually(lambda: not self.family(), what=f"the end of {self.family()}")
        except BaseException as error:
            kind = type(error)
            raise
        finally:
            if kind is not None:
                self._show_stacks()
            self.kill()
            self.leave()

    def _show_stacks(self) -> None:
        """Prints where the threads of its processes stand, in the kernel and in Python, and the end of their log."""
        family = self.family()
        print("still alive:", *map(_left_of, family), sep="\n", file=sys.stderr)
        left = [process for process in family if _takes(SHOW_STACKS, process.pid)]
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(SHOW_STACKS)
        time.sleep(1.0 if left else 0.0)  # nothing says when they have written it
        print(self.log_tail(400), file=sys.stderr)

    def use(self) -> None:
        """From now on managers of this process find this engine."""
        for name in ("WEIGHTWIRE_RUNTIME_DIR", "WEIGHTWIRE_JOB"):
            self._before.setdefault(name, os.environ.get(name))
            os.environ[name] = self.environment[name]

    def family(self) -> list[psutil.Process]:
        """Every living process that this engine started, as far as it was ever seen."""
        if self.process is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                root = psutil.Process(self.process.pid)
                for process in (root, *root.children(recursive=True)):
                    self._family.setdefault(process.pid, process)
        return [process for process in self._family.values() if _alive(process)]

    @property
    def cards(self) -> list[ReplicaCard]:
        return discover(self.job)

    @property
    def stamps(self) -> bool:
        """Whether answers say which version of the weights made them; old versions of the engine don't."""
        return not any("answers don't say" in what for card in self.cards for what in card.lacks)

    def leftovers(self) -> list[str]:
        """Sockets and cards in this engine's job directory, after a reader of it swept those of dead processes; a manager
        of this process has a socket there for as long as it lives.

        (vLLM kills an engine core that is slow to stop, as any is on a busy machine; SGLang kills its schedulers always.)
        """
        ended = not self._before
        self.use()
        try:
            _ = self.cards
        finally:
            if ended:
                self.leave()
        directory = self.runtime / self.job
        ours = f"registry-{os.getpid()}-"
        found = [p.name for p in directory.glob("*") if p.suffix != ".report"] if directory.exists() else []
        return sorted(name for name in found if not name.startswith(ours))

    def log_tail(self, lines: int = 60) -> str:
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        # An engine's configuration is some lines of 10,000 characters, for which a report has no room.
        return "\n".join([f"--- the end of {self.log.name}", *(line[:400] for line in text.splitlines()[-lines:])])

    def _run(
        self, module: str, arguments: Sequence[str], fd: int | None = None
    ) -> subprocess.Popen[bytes] | ForkedProgram:
        """`python -m module arguments [fd]`, from a preloaded process unless `preloads` is empty."""
        if self.preloads:
            variables = tuple((name, self.environment[name]) for name in self.constants)
            return nursery(self.python, self.preloads, variables).start(
                module, arguments, self.environment, self.log, fd
            )
        fds = () if fd is None else (fd,)
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [self.python, "-m", module, *arguments, *map(str, fds)],
                pass_fds=fds,
                cwd=ROOT,
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def kill(self) -> None:
        family = self.family()
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        if self.process is not None:
            self.process.wait(30)
        psutil.wait_procs(family, timeout=30)

    def leave(self) -> None:
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self._before.clear()


def free_port() -> int:
    """A port of this host that nobody listens on just now. It is not of those that the system gives to whoever names none (32768
    and above), any of which may be taken by the time that a server asks for it."""
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", 30_000 + secrets.randbelow(2_768)))
            return int(probe.getsockname()[1])


def flags_of(options: Mapping[str, Any]) -> list[str]:
    """Options of Python as those of a command line."""
    flags: list[str] = []
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        flags += [flag] if value is True else [flag, str(value)]
    return flags


class HttpEngine(Engine):
    """An engine behind a port of this host."""

    port = 0

    def serve(self, module: str, arguments: Sequence[str], options: dict[str, Any]) -> None:
        """Starts a server with `options` as flags on a free port, and waits until it is healthy."""
        self.port = free_port()
        flags = flags_of({"host": "127.0.0.1", "port": self.port, **options})
        process = self.process = self._run(module, [*arguments, *flags])
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not self._healthy():
            assert process.poll() is None, "the server ended while it started"
            assert time.monotonic() < deadline_s, f"the server was not healthy within {START_TIMEOUT_S:g} s"
            time.sleep(0.3)
        self.family()

    def _healthy(self) -> bool:
        with contextlib.suppress(OSError):
            return self.request("GET", "/health")[0] == 200
        return False

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, Any]]:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json", **(headers or {})},
        )
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S) as response:
                status, text = response.status, response.read()
        except urllib.error.HTTPError as error:
            status, text = error.code, error.read()
        return status, json.loads(text) if text else {}

    def text(self, path: str) -> str:
        """The body of a GET that must succeed."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=ANSWER_TIMEOUT_S) as response:
            text: str = response.read().decode()
        return text


class Driver(Engine):
    """An `LLM` held by `engine_driver.py`. `in_process`: everything in that one process, one engine after another."""

    module = "tests.support.engine_driver"

    def __init__(self, runtime: Path, *, in_process: bool = False, job: str = "", **environment: str) -> None:
        super().__init__(runtime, job=job, VLLM_ENABLE_V1_MULTIPROCESSING="0" if in_process else "1", **environment)
        self._ours, self._theirs = socket.socketpair()
        self._ids = itertools.count()
        self._names = itertools.count()
        self._buffer = b""
        self._replies: dict[int, dict[str, Any]] = {}

    def start(self) -> None:
        fd = self._theirs.fileno()
        self.process = self._run(self.module, [], fd)
        self._theirs.close()

    def stop(self) -> None:
        self.call("stop", timeout_s=60)
        assert self.process is not None
        self.process.wait(60)

    def open(self, model: Path, *, plain: bool = False, **kwargs: Any) -> list[dict[str, Any]]:
        """Starts an engine on `model`; what each worker's extension says of itself."""
        arguments = {"model": str(model), "worker_extension_cls": EXTENSION, **ENGINE_ARGUMENTS, **kwargs}
        layout = {"WEIGHTWIRE_TEST_LAYOUT": "plain" if plain else "packed"}
        about = self.call("open", timeout_s=START_TIMEOUT_S, kwargs=arguments, env=layout)
        self.family()
        return [json.loads(text) for text in about]

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int = 16) -> list[dict[str, Any]]:
        """All prompts at once, to the end."""
        return self.wait(self.submit(prompts, max_tokens))

    def tokens(self, prompts: Sequence[Sequence[int]], max_tokens: int = 16) -> list[list[int]]:
        """As `generate`; every request must have ended well."""
        done = self.generate(prompts, max_tokens)
        assert [r["finish_reason"] for r in done] == ["length"] * len(prompts), done
        return [r["tokens"] for r in done]

    def submit(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int = 16,
        lora: tuple[str, int, str] | None = None,
        logprobs: int | None = None,
        image: int | None = None,
        sound: int | None = None,
        salt: str | None = None,
        regex: str | None = None,
        session: str | None = None,
        beams: int | None = None,
    ) -> list[str]:
        """Starts requests and returns their names. `lora`: name, number and path of an adapter. `logprobs`: how many of each
        token's are noted (vLLM). `image`, `sound`: the seed of one in each prompt. `salt`: of their prefix cache.
        `regex`: what the answers must match; `session`: whose turns they are; `beams`: of a beam search (SGLang)."""
        names = [f"r{next(self._names)}" for _ in prompts]
        more = {"lora": lora, "logprobs": logprobs, "image": image, "sound": sound, "salt": salt}
        more |= {"regex": regex, "session": session, "beams": beams}
        requests = [
            {"name": name, "prompt": list(prompt), "max_tokens": max_tokens, **more}
            for name, prompt in zip(names, prompts, strict=True)
        ]
        self.call("submit", requests=requests)
        return names

    def wait(self, names: list[str], timeout_s: float = ANSWER_TIMEOUT_S) -> list[dict[str, Any]]:
        result: list[dict[str, Any]] = self.call("wait", names=names, timeout_s=timeout_s)
        return result

    def look(self, names: list[str]) -> list[dict[str, Any]]:
        """How far requests are."""
        result: list[dict[str, Any]] = self.call("look", names=names)
        return result

    def wait_for_tokens(self, names: list[str], count: int) -> None:
        """Until every one of these requests has at least `count` tokens."""
        eventually(
            lambda: all(len(r["tokens"]) >= count for r in self.look(names)),
            timeout_s=ANSWER_TIMEOUT_S,
            what=f"{count} tokens of each of {names}",
        )

    def rpc(self, method: str, *args: Any) -> list[Any]:
        result: list[Any] = self.call("rpc", method=method, args=list(args))
        return result

    def call(self, do: str, *, timeout_s: float = ANSWER_TIMEOUT_S, **fields: Any) -> Any:
        """One command. Raises RuntimeError with the driver's error, AssertionError with the log when it is late or dead."""
        number = next(self._ids)
        self._ours.sendall(json.dumps({"id": number, "do": do, **fields}).encode() + b"\n")
        deadline_s = time.monotonic() + timeout_s
        while number not in self._replies:
            self._ours.settimeout(max(0.01, deadline_s - time.monotonic()))
            try:
                received = self._ours.recv(1 << 16)
            except (TimeoutError, ConnectionError) as error:
                raise AssertionError(f"{do!r}: {error!r} after {timeout_s:g} s\n{self.log_tail()}") from None
            assert received, f"the driver ended in {do!r}\n{self.log_tail()}"
            *lines, self._buffer = (self._buffer + received).split(b"\n")
            for line in lines:
                reply = json.loads(line)
                self._replies[reply["id"]] = reply
        reply = self._replies.pop(number)
        if "error" in reply:
            raise RuntimeError(f"{reply['error']}\n{self.log_tail()}")
        return reply["result"]


class Server(HttpEngine):
    """vLLM's OpenAI-compatible API server on a port of its own."""

    def __init__(
        self,
        runtime: Path,
        model: Path,
        *,
        plain: bool = False,
        arguments: Sequence[str] = (),
        preloaded: bool = True,
        **environment: str,
    ):
        super().__init__(runtime, WEIGHTWIRE_TEST_LAYOUT="plain" if plain else "packed", **environment)
        self.model = model
        self.arguments = list(arguments)
        self.preloads = self.preloads if preloaded else ()

    def start(self) -> None:
        arguments = ["--model", str(self.model), "--worker-extension-cls", EXTENSION, *self.arguments]
        is_async = self.environment.get("WEIGHTWIRE_TEST_ASYNC") == "1"
        module = "tests.support.async_server" if is_async else "vllm.entrypoints.openai.api_server"
        self.serve(module, arguments, ENGINE_ARGUMENTS)

    def stop(self) -> None:
        """As an operator does. Where the machine is slow vLLM kills its engine cores; the next reader then cleans up."""
        assert self.process is not None
        self.process.terminate()
        self.process.wait(60)
        eventually(lambda: not self.family(), what=f"the end of {self.family()}")
        assert self.cards == []

    def complete(
        self, prompt: Sequence[int], max_tokens: int = 16, dp_rank: int | None = None
    ) -> tuple[int, dict[str, Any]]:
        """HTTP status and answer of `/v1/completions`; `dp_rank` names the replica that is to answer."""
        body = {
            "model": str(self.model),
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        headers = {} if dp_rank is None else {"X-data-parallel-rank": str(dp_rank)}
        return self.request("POST", "/v1/completions", body, headers)

    def stream(self, path: str, **body: Any) -> str:
        """Everything that a streamed answer sent."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            data=json.dumps({"model": str(self.model), "stream": True, **body}).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S) as response:
            text: str = response.read().decode()
        return text

    def tokens(self, prompt: Sequence[int], max_tokens: int = 16, dp_rank: int | None = None) -> list[int]:
        status, answer = self.complete(prompt, max_tokens, dp_rank)
        assert status == 200, answer
        tokens: list[int] = answer["choices"][0]["token_ids"]
        return tokens


@contextlib.contextmanager
def noted_starts(job: str) -> Iterator[list[int]]:
    """The processes that `weightwire status` shows as starting an engine, in the order in which they appear."""
    seen: list[int] = []
    done = threading.Event()

    def look() -> None:
        while not done.wait(0.02):
            for text in diagnosis.starting(job):
                if (pid := int(text.split(" process ")[1].split(":")[0])) not in seen:
                    seen.append(pid)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield seen
    finally:
        done.set()
        looking.join()


def check_starts(server: HttpEngine, starts: Sequence[int]) -> None:
    """The process that the user started was shown first, then the one that loads the model, and now none is. (A server that ended
    while it started was started again.)"""
    assert server.process is not None
    loads = server.cards[0].pid
    living = [pid for pid in starts if psutil.pid_exists(pid)]
    assert living == [server.process.pid, loads], (starts, server.process.pid, loads)
    assert diagnosis.starting(server.job) == []


def segments_of(process: psutil.Process) -> list[int]:
    """Inodes of Weightwire's shared segments that a process has open or mapped."""
    found = set()
    with contextlib.suppress(OSError):
        for fd in Path(f"/proc/{process.pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if "memfd:weightwire" in str(fd.readlink()):
                    found.add(fd.stat().st_ino)
        for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
            if "memfd:weightwire" in line:
                found.add(int(line.split()[4]))
    return sorted(found)


def _takes(number: int, pid: int) -> bool:
    """Whether a process has a handler for that signal, which ends others."""
    try:
        (caught,) = re.findall(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    except (OSError, ValueError):
        return False
    return bool(int(caught, 16) >> (number - 1) & 1)


def _left_of(process: psutil.Process) -> str:
    """The process; where its main thread has ended and others have not, a line for each thread: its state, its name, and what it
    waits for in the kernel, as far as can be read."""
    lines = [str(process)]
    with contextlib.suppress(psutil.NoSuchProcess, OSError):
        if process.status() == psutil.STATUS_ZOMBIE:
            for task in sorted(Path(f"/proc/{process.pid}/task").iterdir()):
                state = (task / "stat").read_text().rpartition(")")[2].split()[0]
                told = [(task / name).read_text().strip() for name in ("comm", "wchan", "syscall")]
                lines.append(" ".join([state, *told]))
    return "\n    ".join(lines)


def _alive(process: psutil.Process) -> bool:
    try:
        # The main thread of a killed process may be a zombie while others still hold its memory and sockets.
        ended = process.status() == psutil.STATUS_ZOMBIE and process.num_threads() <= 1
        return bool(process.is_running() and not ended)
    except psutil.NoSuchProcess:
        return False
