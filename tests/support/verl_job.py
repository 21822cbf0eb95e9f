"""Runs in verl's environment: a Ray of its own, verl's own trainer in two Ray actors, and the checkpoint manager that the config
names, made as verl's trainers make it.

Usage: verl_job.py MODEL. Commands are JSON lines on stdin, `{"do", ...}`; each is answered by one on stdout, `{"result"}` or
`{"error": {"type", "text", ...}}`. The engines are the test's; a replica here is verl's class with the Ray handle of a server.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import json
import os
import socket
import sys
import threading
import traceback
from types import SimpleNamespace
from typing import Any

import ray
from hydra import compose, initialize_config_module
from verl.checkpoint_engine import CheckpointEngineManager, CheckpointEngineRegistry
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.import_utils import load_class_from_fqn
from verl.workers.config.disaggregation import DisaggregationConfig
from verl.workers.rollout.replica import RolloutMode, RolloutReplica, get_rollout_replica_class

from inference_plugin.wire.errors import WeightwireError
from tests.support.verl_server import Server as SleepyServer
from tests.support.verl_server import tokens_of
from tests.support.verl_worker import TrainerWorker

RANKS = 2
ROLLOUT = "actor_rollout_ref.rollout"
BACKEND = [
    f"+{ROLLOUT}.checkpoint_manager_class=trainer_adapters.integrations.verl.WeightwireManager",
    f"{ROLLOUT}.checkpoint_engine.backend=weightwire",
    f"{ROLLOUT}.checkpoint_engine.custom_backend_module=trainer_adapters.integrations.verl",
]
TRAINER = [
    "actor_rollout_ref.actor.strategy=fsdp2",
    "actor_rollout_ref.actor.use_torch_compile=False",
    "actor_rollout_ref.actor.fsdp_config.use_torch_compile=False",
    "actor_rollout_ref.actor.fsdp_config.model_dtype=fp32",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.model.use_remove_padding=False",
    "actor_rollout_ref.model.enable_gradient_checkpointing=False",
    "+actor_rollout_ref.model.override_config.attn_implementation=eager",
    f"{ROLLOUT}.name=vllm",
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=1",
    "trainer.device=cpu",
]
SGLANG = [
    f"{ROLLOUT}.name=sglang",
    f"{ROLLOUT}.dtype=float32",
    f"{ROLLOUT}.max_num_seqs=8",
    f"{ROLLOUT}.tensor_model_parallel_size={RANKS}",
]
"""verl's own servers for it, on a CPU."""
SGLANG += [
    f"+{ROLLOUT}.engine_kwargs.sglang.{option}"
    for option in (
        "device=cpu",
        "attention_backend=torch_native",
        "sampling_backend=pytorch",
        "max_total_tokens=4096",
        "disable_cuda_graph=true",
        "sleep_on_idle=true",
        "random_seed=0",
    )
]
VLLM = [
    f"{ROLLOUT}.dtype=float32",
    f"+{ROLLOUT}.enable_sleep_mode=False",  # vLLM's allocator needs a GPU: verl_vllm.py stands in for it
    f"{ROLLOUT}.enforce_eager=True",
    f"{ROLLOUT}.max_num_seqs=8",
    f"{ROLLOUT}.tensor_model_parallel_size=1",
    f"+{ROLLOUT}.engine_kwargs.vllm.kv_cache_memory_bytes={64 << 20}",
    f"+{ROLLOUT}.engine_kwargs.vllm.worker_extension_cls=tests.support.verl_vllm.Extension",
]
OWN_SERVERS = {"sglang": SGLANG, "vllm": VLLM}
SETTINGS: tuple[str, ...] = (
    "HF_HUB_OFFLINE",
    "OMP_NUM_THREADS",
    "PYTHONPATH",
    "VERL_PLATFORM",
    "VERL_USE_EXTERNAL_MODULES",
)
SETTINGS += ("VERL_ENGINE_DEVICE", "VERL_LOGGING_LEVEL", "WEIGHTWIRE_JOB", "WEIGHTWIRE_RUNTIME_DIR")
SETTINGS += ("WEIGHTWIRE_TEST_MEMORY", "WEIGHTWIRE_TEST_NO_DEVICES", "WEIGHTWIRE_TEST_SGLANG_SITE")
SETTINGS += ("WEIGHTWIRE_TEST_IPC", "WEIGHTWIRE_TEST_RAY_RESOURCE", "WEIGHTWIRE_TEST_VERL_SITE")
SETTINGS += ("SGLANG_USE_CPU_ENGINE", "SGLANG_CPU_OMP_THREADS_BIND", "TRANSFORMERS_OFFLINE")


@ray.remote
class Server:
    """What verl's server knows of an update: the step that its answers are stamped with. It would also note a disturbance."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def set_global_steps(self, global_steps: int) -> None:
        self.steps.append(global_steps)

    def get_steps(self) -> list[int]:
        return self.steps


class Replica(RolloutReplica):  # type: ignore[misc]
    """verl's replica of an engine that runs already. Methods that would disturb generation are noted. `url`: a server on the
    trainer's own devices, which sleeps."""

    disturbed: list[str] = []  # noqa: RUF012 -- one for all replicas
    url = ""

    async def launch_servers(self) -> None:
        self.world_size = 1  # ranks of the engine that runs
        self.rollout_mode = RolloutMode.HYBRID if self.url else RolloutMode.STANDALONE
        self.servers = [SleepyServer.remote(self.url, "") if self.url else Server.remote()]  # type: ignore[attr-defined]

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        self.disturbed.append("abort_all_requests")

    async def release_kv_cache(self) -> None:
        self.disturbed.append("release_kv_cache")

    async def resume_kv_cache(self) -> None:
        self.disturbed.append("resume_kv_cache")

    async def resume_generation(self) -> None:
        self.disturbed.append("resume_generation")


class Job:
    def __init__(self, model: str) -> None:
        self.model = model
        self.group: Any = None
        variables = {name: os.environ[name] for name in SETTINGS if name in os.environ}
        ray.init(
            "local",  # whatever cluster runs on this host
            num_cpus=4 * RANKS + 1,
            num_gpus=RANKS,
            include_dashboard=False,
            log_to_driver=False,
            runtime_env={"env_vars": variables},
        )

    def do_start(self, url: str = "", own: str = "", megatron: str = "", **options: Any) -> None:
        """verl's trainer, and the manager: these lines are those of its trainers. A trainer that is there already ends. `own`:
        the engine of verl's own server, on the trainer's devices."""
        kind, trainer = TrainerWorker, TRAINER
        if megatron:
            from tests.support.verl_megatron import MEGATRON, MegatronWorker

            sharded = f"actor_rollout_ref.actor.megatron.{megatron}_model_parallel_size={RANKS}"
            kind, trainer = MegatronWorker, [*MEGATRON, sharded]
        if self.group is not None:
            ray.get(self.group.execute_checkpoint_engine(["close"] * RANKS))
            for each in self.group.workers:
                ray.kill(each)
        path = f"{ROLLOUT}.checkpoint_engine.engine_kwargs"
        ours = [f"+{path}.weightwire.{name}={value}" for name, value in options.items()]
        with initialize_config_module("verl.trainer.config", version_base=None):
            model = f"actor_rollout_ref.model.path={self.model}"
            self.config = compose(
                "ppo_trainer", overrides=[model, *trainer, *BACKEND, *ours, *OWN_SERVERS.get(own, [])]
            )
        config = self.config.actor_rollout_ref
        worker = RayClassWithInitArgs(ray.remote(kind), config=config, role="actor")
        self.group = RayWorkerGroup(
            RayResourcePool([RANKS], use_gpu=own == "vllm", max_colocate_count=1), worker, device_name="cpu"
        )
        self.group.init_model()
        replica = get_rollout_replica_class(own) if own else Replica
        self.replica = replica(0, config.rollout, config.model)
        self.replica.url = url
        asyncio.run(self.replica.init_hybrid(self.group) if own else self.replica.launch_servers())
        manager = load_class_from_fqn(config.rollout.checkpoint_manager_class, "CheckpointEngineManager")
        settings = omega_conf_to_dataclass(config.rollout.checkpoint_engine)
        self.manager = manager(config=settings, actor_wg=self.group, replicas=[self.replica])
        assert isinstance(self.manager, CheckpointEngineManager)

    def do_change(self, seed: int) -> None:
        self.group.change(seed)

    def do_export(self, directory: str) -> None:
        self.group.export(directory)

    def do_fail(self, rank: int) -> None:
        self.group.fail(rank)

    def do_update(self, step: int | None) -> dict[str, float]:
        figures: dict[str, float] = self.manager.update_weights(step)
        return figures

    def do_update_alone(self, step: int) -> dict[str, float]:
        """As verl's own manager has a trainer rank call its backend: with a generator."""
        figures: dict[str, float] = ray.get(self.group.update_weights(global_steps=step, mode="weightwire"))[0]
        return figures

    def do_sleep(self) -> None:
        self.manager.sleep_replicas()

    def do_tokens(self, prompts: list[list[int]], count: int) -> list[list[int]]:
        return tokens_of(self.replica, prompts, count)

    def do_step(self) -> int:
        """The step that verl's own server says its answers are of."""
        step: int = ray.get(self.replica.servers[0].__ray_call__.remote(lambda server: server.global_steps))
        return step

    def do_expect(self, replicas: int = 1, ranks: int = 1) -> None:
        """As if verl had so many, of so many ranks each."""
        self.manager.replicas = [self.replica] * replicas
        self.replica.world_size = ranks

    def do_misuse(self, kind: str) -> None:
        """What the manager, the backend and the trainers of `main_ppo` refuse."""
        from trainer_adapters.integrations.verl_trainers import WeightwireSeparateAsync, WeightwireSync

        if kind == "trainer's replicas":
            WeightwireSeparateAsync(self.config)
        if kind == "trainer's backend":
            trainer = WeightwireSync.__new__(WeightwireSync)
            trainer.config = copy.deepcopy(self.config)
            trainer.config.actor_rollout_ref.rollout.checkpoint_engine.backend = "naive"
            trainer.init()
        if kind == "option":
            CheckpointEngineRegistry.new("weightwire", bucket_size=1 << 20, time_out_s=3)
        settings = copy.copy(self.manager.config)
        replica = copy.copy(self.replica)
        if kind == "backend":
            settings.backend = "naive"
        if kind == "replica":
            replica.rollout_mode = RolloutMode.COLOCATED
        if kind in ("engine", "disaggregated"):
            replica.rollout_mode = RolloutMode.HYBRID
            parts = DisaggregationConfig(enabled=kind == "disaggregated")
            name = "sglang" if parts.enabled else "trtllm"
            replica.config = dataclasses.replace(replica.config, name=name, disaggregation=parts)
        type(self.manager)(config=settings, actor_wg=self.group, replicas=[replica])

    def do_wake(self, kind: str) -> None:
        """A server of SGLang's that has gone, refuses, or is silent."""
        from trainer_adapters.integrations.verl import wake_up

        with socket.create_server(("127.0.0.1", 0)) as server:
            address = "{}:{}".format(*server.getsockname())
            if kind == "gone":
                server.close()
            if kind == "refuses":
                threading.Thread(target=refuse, args=(server,), daemon=True).start()
            config = dataclasses.replace(self.replica.config, name="sglang")
            wake_up([SimpleNamespace(replica_rank=0, server_address=address, config=config)], "weights", 1.0)

    def do_look(self) -> dict[str, Any]:
        return {"disturbed": Replica.disturbed, "steps": ray.get(self.replica.servers[0].get_steps.remote())}


def refuse(server: socket.socket) -> None:
    connection, _ = server.accept()
    with connection:
        connection.recv(1 << 16)
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 4\r\n\r\nbusy")


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what verl and Ray print is for the log
    job = Job(sys.argv[1])
    print("ready", file=answers, flush=True)
    try:
        for line in sys.stdin:
            command = json.loads(line)
            try:
                answer = {"result": getattr(job, "do_" + command.pop("do"))(**command)}
            except Exception as error:  # noqa: BLE001 -- whatever it is, the test gets it
                traceback.print_exc()
                names = [kind.__name__ for kind in type(error).__mro__]
                rank = error.rank if isinstance(error, WeightwireError) else None
                answer = {"error": {"types": names, "text": str(error), "rank": rank}}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
