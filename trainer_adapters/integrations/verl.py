"""verl (extra `verl`): a checkpoint manager whose `update_weights` is a Weightwire update, and the backend that it needs.

1. Each trainer rank has a `WeightwireEngine`, verl's name for its end of a transfer, and in it a `SyncManager`;
2. `WeightwireManager.update_weights`, on the driver, has rank 0 wait until all of verl's engines have registered;
3. all ranks update: each asks its training engine for its tensors, and they go straight into the inference engines;
4. once the version is committed, the replicas' servers are told, by their Ray handles, which step they answer for.

Generation goes on: no request is aborted, no KV cache is released, no worker group is built. Replicas that sleep on the trainer's
own devices take their weights' memory back before step 3, and the rest of it afterwards. An error of any rank is raised.
Where verl makes its own manager, the backend works alone; docs/integrations/verl.md says what that cannot promise.
Written against verl 0.9.1.
"""

from __future__ import annotations

import asyncio
import functools
import http.client
import json
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, TypeAlias

import ray
import torch

from inference_plugin.wire.config import Config
from inference_plugin.wire.errors import (
    ArgumentError,
    ConfigError,
    PeerLost,
    ReplicaAsleep,
    SyncTimeout,
    TransportUnavailable,
)
from trainer_adapters.events import harmless
from trainer_adapters.integrations.options import await_ranks, checked_options
from trainer_adapters.integrations.read_once import GeneratorUpdates
from trainer_adapters.manager import SyncManager
from trainer_adapters.sources.export import ExportAdapter
from trainer_adapters.sources.fsdp1 import managed_parameters

try:
    from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineManager, CheckpointEngineRegistry
    from verl.utils.device import get_torch_device
    from verl.utils.model import convert_weight_keys
    from verl.utils.ray_utils import auto_await
    from verl.workers.rollout.replica import RolloutMode
except ImportError as missing:
    raise TransportUnavailable(
        f"verl can't be imported: {missing}",
        hint="pip install '.[verl]' in a checkout of weightwire, into verl's environment",
    ) from missing

__all__ = ["BACKEND", "WeightwireEngine", "WeightwireManager"]

logger = logging.getLogger(__name__)

BACKEND = "weightwire"
HANDS_OVER_ENGINE = "delta_sharded"
"""The mode in which verl's worker gives its backend the training engine, which can be asked again and again, in place of a
generator of tensors, which can be read once."""
OF_PEFT = "base_model.model."
"""What PEFT adds to the names of parameters, and verl's export takes away."""
GRACE_S = 30.0
"""Time in which the other ranks report their errors after the first one."""
TOLD_S = 10.0
Named: TypeAlias = Iterable[tuple[str, torch.Tensor]]
Figures: TypeAlias = dict[str, float]
Tag: TypeAlias = Literal["weights", "kv_cache"]


@CheckpointEngineRegistry.register(BACKEND)
class WeightwireEngine(CheckpointEngine):  # type: ignore[misc]
    """A trainer rank's end of an update; verl makes one in each rank, and an idle one beside each inference engine.

    `weights`: "export" sends what the training engine's `get_per_tensor_param` yields (verl's names, gathered by verl, twice
    in the first update: once for names, shapes and dtypes); "module" sends the module's own shards and gathers nothing.
    `dtype`: in which all tensors travel; default: as the trainer holds them. `options`: `SyncManager`'s arguments. verl's
    `bucket_size` is not used. Raises `ConfigError` for arguments that `SyncManager` does not take.
    """

    wire_format = "delta_flush"
    """Of verl's formats the one whose empty stream means: nothing to load, tell the server its step."""

    def __init__(
        self,
        bucket_size: int = 0,
        is_master: bool = False,
        *,
        weights: Literal["export", "module"] = "export",
        dtype: str | None = None,
        **options: Any,
    ) -> None:
        self._options = checked_options(options, dtype, f"checkpoint_engine.engine_kwargs.{BACKEND}", ConfigError)
        if weights not in ("export", "module"):
            raise ConfigError(f"checkpoint_engine.engine_kwargs.{BACKEND}: weights={weights!r}: 'export' or 'module'")
        self._weights, self._dtype = weights, dtype
        self._manager: SyncManager | None = None
        self._source: ExportAdapter | None = None
        self._version: int | None = None
        self._shares_devices = False

    def join(self, engine_ranks: int, shares_devices: bool = False) -> None:
        """Makes the `SyncManager`, together with the other ranks; rank 0 waits until engines of so many ranks have registered.
        Raises `SyncTimeout`. `shares_devices`: some replicas are about to take memory of this rank's device back."""
        if self._manager is None:
            self._manager = SyncManager(**self._options)
            self._updates = GeneratorUpdates(self._manager, self._dtype)
        await_ranks(self._manager, engine_ranks)
        self._shares_devices = shares_devices
        if shares_devices:
            get_torch_device().empty_cache()

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> Figures:
        """Collective over the trainer's ranks: every replica serves `weights` when this returns, as version `global_steps` if
        that is higher than the last one, else as the next version. `weights`: verl's training engine, or a generator.

        It keeps this actor's event loop: nothing else may train while the weights are read. Raises what `SyncManager.update`
        raises, on all ranks, and for a replica that was lost, unless `on_failure` or `stragglers` say what is to be done.
        """
        if self._manager is None:
            self.join(1)
        assert self._manager is not None
        last = self._version
        version = global_steps if global_steps is None or last is None or global_steps > last else None
        if self._weights == "module" and is_engine(weights):
            config = getattr(weights.model_config, "hf_config", None)
            report = self._manager.update(weights.module, version, dtype=self._dtype, hf_config=config)
        elif is_engine(weights):
            try:  # the source is kept: only the first update has to find out names, shapes and dtypes
                if self._source is None:
                    ties = ties_of(weights)
                    self._source = ExportAdapter(
                        functools.partial(exported, weights), tied=ties, exclude=ties, dtype_rules=self._dtype
                    )
                report = self._manager.update(self._source, version)
            except BaseException:
                self._source = None  # on all ranks, as the error is: what is sent may be another model now
                raise
        else:
            report = self._updates.update(weights, version)
        self._version = report.version
        if self._options.keys().isdisjoint(("on_failure", "stragglers")):
            report.raise_failed()  # a lost replica too: verl does not start it again, and would go on asking it
        if self._shares_devices and is_engine(weights):
            with harmless("making room for the KV caches of replicas"):  # the version is committed
                make_room(weights)
        return {
            "weightwire/version": report.version,
            "weightwire/replicas": len(report.replicas) - len(report.failed),
            "weightwire/bytes": report.bytes,
            "weightwire/seconds": report.seconds,
            "weightwire/stopped_s": max(replica.stopped_s for replica in report.replicas),
        }

    def close(self) -> None:
        """Closes this rank's `SyncManager`."""
        if self._manager is not None:
            self._manager.close()

    # --- what verl's own manager calls, on trainer ranks and beside inference engines ---------------------------------

    def prepare(self) -> dict[str, Any]:
        return {}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: Sequence[Any]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Who takes part: the trainer's ranks. The replicas are found by their registration, all of them."""
        return {"engine_ranks": [rollout_world_size] * actor_wg_world_size}, {"engine_ranks": [0] * rollout_world_size}

    def init_process_group(self, engine_ranks: int) -> None:
        """`engine_ranks`: of a trainer's rank; 0 beside an inference engine."""
        if engine_ranks:
            self.join(engine_ranks)

    def finalize(self) -> None:
        """Nothing: the manager lives on, and with it what the replicas know of the model."""

    def receive_weights(self, global_steps: int | None = None) -> Iterator[Any]:
        """Nothing comes this way: the inference engine beside this process has the weights already."""
        return iter(())


class WeightwireManager(CheckpointEngineManager):  # type: ignore[misc]
    """verl's `checkpoint_manager_class`: `update_weights` is one Weightwire update into all replicas.

    Replicas on the trainer's devices (verl's `HYBRID`) may be asleep when `update_weights` is called, and are awake afterwards.
    Raises `ConfigError` for another backend, and `ArgumentError` for replicas that it can't wake.
    """

    def __init__(self, config: Any, actor_wg: Any, replicas: list[Any]) -> None:
        if config.backend != BACKEND:
            raise ConfigError(
                f"checkpoint_engine.backend is {config.backend!r}, and checkpoint_manager_class is Weightwire's",
                hint=f"set checkpoint_engine.backend={BACKEND} and checkpoint_engine.custom_backend_module={__name__}",
            )
        super().__init__(config, actor_wg, [])
        self.add_replicas(replicas)
        timeout_s = config.engine_kwargs.get(BACKEND, {}).get("timeout_s")
        self._timeout_s = Config.from_environment().but(timeout_s=timeout_s).timeout_s

    def add_replicas(self, replicas: list[Any]) -> None:
        """Replicas that the next update has to reach as well."""
        for replica in replicas:
            if replica.rollout_mode is RolloutMode.STANDALONE or (shares_devices(replica) and can_wake(replica)):
                continue
            kind = "disaggregated " * replica.config.disaggregation.enabled + replica.config.name
            raise ArgumentError(
                f"replica {replica.replica_rank} is a {kind} in {replica.rollout_mode}, and Weightwire can't wake it",
                hint="standalone replicas, and vLLM or SGLang on the trainer's devices; leave others to verl's own manager "
                "(naive)",
            )
        super().add_replicas(replicas)

    @auto_await  # type: ignore[untyped-decorator]
    async def update_weights(self, global_steps: int | None = None) -> Figures:
        """Brings the trainer's weights into every replica, as version `global_steps`; figures for verl's log.

        Raises `SyncTimeout` if engines of fewer ranks have registered than verl has, and what any trainer rank raises. Replicas
        that took the version keep it; the others serve the one before, or what sleeps on the trainer's devices goes on sleeping.
        `ReplicaAsleep`: the version is committed, but one of those did not take its KV cache's memory back.
        """
        return await asyncio.to_thread(self._update, global_steps)

    def _update(self, global_steps: int | None) -> Figures:
        ranks = self.actor_wg.world_size
        limit_s = 2 * self._timeout_s + GRACE_S  # the ranks have deadlines of their own; this is for one that hangs
        sleepers = [
            replica for replica in self.replicas if shares_devices(replica) and replica.config.free_cache_engine
        ]
        joined = self.actor_wg.execute_checkpoint_engine(
            ["join"] * ranks, [sum(replica.world_size for replica in self.replicas)] * ranks, [bool(sleepers)] * ranks
        )
        _results(joined, limit_s)
        wake_up(sleepers, "weights", limit_s)
        sent = self.actor_wg.update_weights(global_steps=global_steps, mode=HANDS_OVER_ENGINE)
        figures: Figures = _results(sent, limit_s)[0]
        try:
            wake_up(sleepers, "kv_cache", limit_s)
        except Exception as error:
            version = int(figures["weightwire/version"])
            raise ReplicaAsleep(
                f"version {version} is committed, but a replica did not take the memory of its KV cache back: {error!r}",
                hint="it generates nothing: is its device out of memory? The next update_weights wakes it; vLLM with several "
                "ranks has to be restarted",
                side="trainer",
                version=version,
            ) from error
        finally:
            if global_steps is not None:
                self._tell(global_steps)
        return figures

    def _tell(self, global_steps: int) -> None:
        """Has the servers stamp their answers with the step. The version is committed: a server that can't be told, because
        it died meanwhile, does not change that."""
        servers = [server for replica in self.replicas for server in replica.servers]
        answers = [server.set_global_steps.remote(global_steps) for server in servers]
        if answers:
            ray.wait(answers, num_returns=len(answers), timeout=TOLD_S)
        for server, answer in zip(servers, answers, strict=True):
            try:
                ray.get(answer, timeout=0)
            except ray.exceptions.RayError as error:  # GetTimeoutError is one of them
                logger.warning("weightwire: %s has step %d, but could not be told: %s", server, global_steps, error)


def is_engine(weights: object) -> bool:
    """Whether this is verl's training engine rather than a generator of tensors."""
    return hasattr(weights, "get_per_tensor_param")


def make_room(engine: Any) -> None:
    """Frees memory of this rank's device before the replicas on it take their KV cache's back. Where verl keeps parameters on the
    host between steps, the export may have left them on the device."""
    if engine.is_param_offload_enabled:
        engine.to("cpu", model=True, optimizer=False, grad=False)
    get_torch_device().synchronize()
    get_torch_device().empty_cache()


def shares_devices(replica: Any) -> bool:
    """Whether the replica runs on the trainer's own devices, and sleeps while those train."""
    return replica.rollout_mode is RolloutMode.HYBRID


def can_wake(replica: Any) -> bool:
    """Whether `wake_up` reaches all of the replica's engines: a disaggregated SGLang has several, behind one address."""
    config = replica.config
    return bool(config.name == "vllm" or (config.name == "sglang" and not config.disaggregation.enabled))


def wake_up(replicas: Sequence[Any], tag: Tag, limit_s: float) -> None:
    """Has the engines take this memory back, all at once. Nothing is to do where a replica is awake. Raises what Ray raises,
    `SyncTimeout` and `PeerLost`."""
    by_http = [replica for replica in replicas if replica.config.name == "sglang"]
    servers = [server for replica in replicas if replica not in by_http for server in replica.servers]
    _results([server.wake_up.remote(tags=[tag]) for server in servers], limit_s, "server")
    with ThreadPoolExecutor(max(1, len(by_http))) as threads:
        list(threads.map(functools.partial(resume_memory, tag=tag, limit_s=limit_s), by_http))


def resume_memory(replica: Any, tag: Tag, limit_s: float) -> None:
    """Asks SGLang itself, as verl's workers do: verl's server for it refuses to wake a replica on the trainer's devices."""
    server = http.client.HTTPConnection(replica.server_address, timeout=limit_s)
    whose = f"SGLang of replica {replica.replica_rank} at {replica.server_address}"
    body, kind = json.dumps({"tags": [tag]}), {"Content-Type": "application/json"}
    try:
        server.request("POST", "/resume_memory_occupation", body, kind)
        answer = server.getresponse()
        status, text = answer.status, answer.read().decode(errors="replace")
    except TimeoutError:
        raise SyncTimeout(f"{whose} did not take its {tag} back within {limit_s:g} s", side="trainer") from None
    except (OSError, http.client.HTTPException) as error:
        raise PeerLost(f"{whose} did not take its {tag} back: {error!r}", side="trainer") from error
    finally:
        server.close()
    if status != http.client.OK:
        raise PeerLost(f"{whose} did not take its {tag} back: HTTP {status}: {text[:500]}", side="trainer")


def exported(engine: Any) -> Named:
    """What verl's training engine hands over, anew at each call. Raises `ArgumentError` for LoRA that is not merged."""
    weights, adapter = engine.get_per_tensor_param()
    if adapter is not None:
        raise ArgumentError(
            "verl's training engine keeps its LoRA adapter apart from the weights",
            hint="set actor_rollout_ref.model.lora.merge=True, or use the backend naive",
        )
    return weights  # type: ignore[no-any-return]


def ties_of(engine: Any) -> dict[str, str]:
    """The second names of parameters that the module of verl's training engine has under several, each with the first name. The
    export yields a copy under each, and an engine that ties them has no place for the second."""
    module = engine.module
    if not isinstance(module, torch.nn.Module):  # Megatron's, whose export yields them once
        return {}
    inner = getattr(module, "_fsdp_wrapped_module", module)
    named: list[tuple[str, object]] = [
        (prefix + name, p) for prefix, _, own in managed_parameters(module) for name, p in own.items()
    ]  # FSDP1's, which may be no parameters of the module any more
    named = named or list(module.named_parameters(remove_duplicate=False))
    own = {name.replace(OF_PEFT, ""): p for name, p in named}
    first: dict[int, str] = {}
    by_name = convert_weight_keys(own, inner)
    return {name: known for name, p in by_name.items() if (known := first.setdefault(id(p), name)) != name}


def _results(asked: Sequence[Any], limit_s: float, whose: str = "trainer rank") -> list[Any]:
    """What the trainer's ranks answer, or the replicas' servers. Raises the first one's error (rank 0 knows most), else that of
    another one; one that neither answers nor fails is a `SyncTimeout`."""
    deadline_s = time.monotonic() + limit_s
    waiting, errors = list(asked), {}
    while waiting:
        done, waiting = ray.wait(waiting, timeout=max(0.0, deadline_s - time.monotonic()))
        if not done:
            break
        try:
            ray.get(done[0])
        except Exception as error:  # noqa: BLE001 -- raised below, when the other ranks have said theirs
            errors[asked.index(done[0])] = error
            deadline_s = min(deadline_s, time.monotonic() + GRACE_S)
    if errors:
        raise errors[min(errors)]
    if waiting:
        silent = ", ".join(str(asked.index(one)) for one in waiting)
        raise SyncTimeout(f"{whose} {silent} did not answer within {limit_s:g} s", side="trainer")
    return list(ray.get(list(asked)))
