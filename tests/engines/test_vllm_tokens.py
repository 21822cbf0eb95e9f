"""Real vLLM engines, updated while they live: their greedy tokens are those of a fresh engine with the new weights.

The reference is `transformers` in float32 on the checkpoint that the update was made of; the engine's own start is held
against it as well, so "equal to transformers" and "equal to a fresh engine" are the same.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from inference_plugin.transports.nixl_agent import has_nixl
from inference_plugin.wire.config import Config
from inference_plugin.wire.errors import EngineUnsupported, ManifestMismatch, VersionConflict
from tests.engines.conftest import Checkpoint
from tests.support.engines import Driver, Server, eventually
from tests.support.greedy import greedy_batch
from tests.support.managers import SyncManager
from trainer_adapters import ModuleAdapter

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SHORT = [1, 5, 9]
"""Fewer than five tokens: an engine whose first forward is that short once died of it."""
LONG = [(7 * i) % 500 + 1 for i in range(160)]
"""Longer than a block of the prefix cache."""
PROMPTS = [SHORT, [11, 23, 42, 99, 100, 7, 8, 250, 251, 300], LONG]
COUNT = 10
IN_FLIGHT = ["keep", "recompute", "abort", "drain"]


@functools.cache
def reference(model: Path) -> list[list[int]]:
    """What `transformers` says to `PROMPTS`."""
    return greedy_batch(model, PROMPTS, COUNT)


def weights(model: Path) -> dict[str, torch.Tensor]:
    return dict(load_file(model / "model.safetensors"))


def source(model: Path) -> ModuleAdapter:
    return ModuleAdapter(weights(model))


def check_life(
    tokens: Callable[[Sequence[Sequence[int]], int], list[list[int]]],
    model_a: Path,
    model_b: Path,
    *,
    replicas: int = 1,
    zones: bool = False,
) -> int:
    """From the start to B and back, by each policy and transport, at every stop verified and compared. `zones`: the engine
    has plain weights, which the trainer writes itself, twice into each of two zones. Returns the version that is served in the
    end, which is A."""
    assert tokens([SHORT], COUNT) == reference(model_a)[:1]
    assert tokens(PROMPTS, COUNT) == reference(model_a)
    assert reference(model_a) != reference(model_b)
    version = 0
    ways = (
        ("copy", "shm"),
        ("standby", "zmq"),
        ("standby", "zone" if zones else "shm"),
        ("streaming", "stream"),
        ("copy", "zmq"),
    )
    for install, transport in ways:
        with SyncManager(install=install, transport=transport, timeout_s=180) as manager:  # type: ignore[arg-type]
            for model in (model_b, model_a) * (2 if transport == "zone" else 1):
                version += 1
                report = manager.update(source(model), version)
                assert [(r.status, r.version, r.install, r.transport) for r in report.replicas] == [
                    ("committed", version, install, transport)
                ] * replicas
                assert tokens(PROMPTS, COUNT) == reference(model), (install, transport, model)
                verified = manager.verify(source(model))
                assert verified.ok and len(verified.replicas) == replicas, verified
            wrong = manager.verify(source(model_b))
            assert not wrong.ok
            assert all([words for words in r.differ if "differs" in words] for r in wrong.replicas)
            almost = weights(model_a)
            last = max(name for name in almost if name.endswith("down_proj.weight"))
            almost[last][-1, -1] += 1
            for replica in manager.verify(ModuleAdapter(almost)).replicas:
                assert replica.differ and all(last in words and "differs" in words for words in replica.differ)
    near = weights(model_a)
    for tensor in near.values():
        tensor.view(-1)[::97] += 1
    for transport in ("delta", "store"):
        with SyncManager(install="copy" if zones else "standby", transport=transport, timeout_s=180) as manager:
            for sent in (source(model_b), ModuleAdapter(near), source(model_a)):
                version += 1
                report = manager.update(sent, version)
                assert [r.status for r in report.replicas] == ["committed"] * replicas
                assert manager.verify(sent).ok
            assert report.egress_bytes < 0.1 * replicas * report.bytes, (
                "few elements of the third differ from the second's"
            )
            assert tokens(PROMPTS, COUNT) == reference(model_a)
    return version


# --- one process, many engines ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def house(runtime: Path) -> Iterator[Driver]:
    with Driver(runtime, in_process=True) as driver:
        yield driver
    assert driver.leftovers() == [] and driver.family() == []


@pytest.mark.parametrize(
    ("kind", "tied", "plain"),
    [
        ("llama", False, False),
        ("llama", True, True),
        ("qwen3", True, False),
        ("qwen3", False, True),
        ("qwen3_moe", False, True),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_an_updated_engine_is_a_fresh_engine_for_every_architecture_tie_and_layout(
    house: Driver, checkpoint: Checkpoint, kind: str, tied: bool, plain: bool
) -> None:
    model_a, model_b = (checkpoint(kind, tied=tied, seed=seed) for seed in (1, 2))
    try:
        (about,) = house.open(model_a, plain=plain)
        assert about["plain"] is plain
        fresh = house.call("checksums")
        check_life(house.tokens, model_a, model_b, zones=plain)
        assert house.call("checksums") == fresh, "by vLLM's own checker of weights it is as it started, with A"
    finally:
        house.call("close")
    try:
        house.open(model_b, plain=plain)
        assert house.tokens(PROMPTS, COUNT) == reference(model_b), "a fresh engine with B"
        assert fresh is None or house.call("checksums") != fresh
    finally:
        house.call("close")
    assert house.leftovers() == []


# --- engines with processes of their own ----------------------------------------------------------------------------------

ENGINES: dict[str, dict[str, Any]] = {
    "tp1": {"kind": "qwen3", "tied": True, "plain": False, "kwargs": {}},
    "tp2": {"kind": "llama", "tied": False, "plain": False, "kwargs": {"tensor_parallel_size": 2}},
    "tp2-plain": {"kind": "qwen3", "tied": True, "plain": True, "kwargs": {"tensor_parallel_size": 2}},
    "pp2": {"kind": "llama", "tied": False, "plain": False, "kwargs": {"pipeline_parallel_size": 2}},
}


class Live:
    """An engine of `ENGINES`, its two models, and the version that it serves."""

    def __init__(self, driver: Driver, ranks: int, model_a: Path, model_b: Path) -> None:
        self.driver = driver
        self.ranks = ranks
        self.models = {"A": model_a, "B": model_b}
        self.version = 0
        self.serves = "A"

    def update(self, which: str, manager: SyncManager | None = None, **options: Any) -> None:
        """By a manager of its own, with these options, if none is given."""
        self.version += 1
        with contextlib.nullcontext(manager) if manager else SyncManager(timeout_s=180, **options) as sync:
            report = sync.update(source(self.models[which]), self.version)
        assert [r.status for r in report.replicas] == ["committed"]
        self.serves = which

    def source(self, which: str) -> ModuleAdapter:
        return source(self.models[which])

    def assert_serves(self, which: str) -> None:
        done = self.driver.generate(PROMPTS, COUNT)
        assert [r["tokens"] for r in done] == reference(self.models[which]), f"{which}, version {self.version}: {done}"


@pytest.fixture(scope="module")
def live(
    request: pytest.FixtureRequest, runtime: Path, checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Live]:
    case = ENGINES[request.param]
    profiled = {"WEIGHTWIRE_PROFILE_DIR": str(tmp_path_factory.mktemp("traces"))} if request.param == "tp2" else {}
    model_a, model_b = (checkpoint(case["kind"], tied=case["tied"], seed=seed) for seed in (1, 2))
    with Driver(runtime, **profiled) as driver:
        about = driver.open(model_a, plain=case["plain"], max_model_len=1024, **case["kwargs"])
        assert [a["plain"] for a in about] == [case["plain"]] * len(about)
        yield Live(driver, len(about), model_a, model_b)
    assert driver.leftovers() == [] and driver.family() == []


@pytest.mark.parametrize("live", list(ENGINES), indirect=True)
def test_updates_through_every_policy_and_transport_and_back_again(live: Live) -> None:
    (card,) = live.driver.cards
    assert [w.rank for w in card.workers] == list(range(live.ranks))
    live.version = check_life(live.driver.tokens, live.models["A"], live.models["B"])


@pytest.mark.skipif(not has_nixl(), reason="NIXL is in the environment of the newest vLLM only")
@pytest.mark.parametrize("live", list(ENGINES), indirect=True)
def test_workers_read_updates_out_of_the_trainers_memory(live: Live) -> None:
    patient = Config(control_timeout_s=60.0)  # on a busy machine making NIXL's agent takes seconds
    for which in "BA":
        live.update(which, install="standby", transport="nixl", config=patient)
        live.assert_serves(which)


@pytest.mark.parametrize("live", ["tp1", "tp2"], indirect=True)
def test_a_number_that_is_served_is_taken_again_with_its_weights_alone(live: Live) -> None:
    """From the manager that sent it and from another one: the number may stand for other weights."""
    live.update("B")
    with SyncManager() as manager:
        for _ in range(2):
            with pytest.raises(VersionConflict, match="other weights"):
                manager.update(live.source("A"), live.version)
            live.assert_serves("B")
            report = manager.update(live.source("B"), live.version)
            assert [(r.status, r.version) for r in report.replicas] == [("committed", live.version)]
            live.assert_serves("B")


@pytest.mark.parametrize("live", ["tp2"], indirect=True)
def test_coordinator_and_workers_leave_a_trace_of_an_update(live: Live) -> None:
    live.update("B")
    directory = Path(live.driver.environment["WEIGHTWIRE_PROFILE_DIR"])
    found = eventually(lambda: len(files := list(directory.glob(f"policy.v{live.version}.*.json"))) == 3 and files)
    traces = {path.name.split(".")[3]: json.loads(path.read_text())["traceEvents"] for path in found}
    spans = {who: {e["name"]: e for e in events if e["ph"] == "X"} for who, events in traces.items()}
    assert set(spans) == {"coordinator", "worker0", "worker1"}
    asked = spans["coordinator"]["install"]
    for rank in (0, 1):
        done = spans[f"worker{rank}"]["install"]
        assert asked["ts"] <= done["ts"] and done["ts"] + done["dur"] <= asked["ts"] + asked["dur"]
    live.assert_serves("B")


@pytest.mark.parametrize("live", ["tp1", "tp2"], indirect=True)
def test_an_older_version_is_refused_and_changes_nothing(live: Live) -> None:
    live.update("B")
    with SyncManager() as manager, pytest.raises(VersionConflict, match=str(live.version)) as caught:
        manager.update(live.source("A"), live.version - 1)
    assert caught.value.group == "policy" and caught.value.hint
    live.assert_serves("B")


@pytest.mark.parametrize("install", ["copy", "standby"])
@pytest.mark.parametrize("in_flight", IN_FLIGHT)
@pytest.mark.parametrize("live", ["tp1"], indirect=True)
def test_a_cached_prefix_of_the_old_weights_is_not_used_after_an_idle_update(
    live: Live, in_flight: str, install: str
) -> None:
    live.update("A", install=install, in_flight=in_flight)
    for which in ("B", "A"):
        live.driver.tokens([LONG, LONG], COUNT)
        live.update(which, install=install, in_flight=in_flight)
        live.assert_serves(which)


@pytest.mark.parametrize("live", ["tp1"], indirect=True)
def test_a_conversation_that_keeps_its_cache_finds_it_after_an_update_and_nobody_else_does(live: Live) -> None:
    check_kept_caches(live)


def check_kept_caches(live: Live) -> None:
    """While nothing runs, and while another request holds blocks of its own."""

    def cached(salt: str | None) -> int:
        (done,) = live.driver.wait(live.driver.submit([LONG], 4, salt=salt))
        return int(done["cached"])

    mine, other = "weightwire-keep:mine", "weightwire-keep:other"
    with SyncManager(in_flight="keep", timeout_s=180) as manager:
        live.update("A", manager)
        assert (cached(mine), cached(None)) == (0, 0) and cached(mine) > 0 < cached(None)
        for busy in (False, True):
            running = live.driver.submit([PROMPTS[1]], max_tokens=800) if busy else []
            live.driver.wait_for_tokens(running, 1)
            live.update("A" if live.serves == "B" else "B", manager)
            assert (cached(None), cached(other if busy else "other")) == (0, 0)
            assert cached(mine) > 0
            live.driver.wait(running)
    live.assert_serves(live.serves)


def check_requests_in_flight(live: Live, in_flight: str) -> None:
    """Requests that a commit overtakes end as the policy says, and what they cached serves no new request."""
    driver = live.driver
    with SyncManager(in_flight=in_flight, timeout_s=180) as manager:  # type: ignore[arg-type]
        live.update("A", manager)
        for length in (200, 400, *[800] * 38):  # a fast engine gets longer requests
            before, old = live.serves, str(live.version)
            running = driver.submit([LONG, PROMPTS[1]], max_tokens=length)
            driver.wait_for_tokens(running, 3)
            live.update("A" if before == "B" else "B", manager)
            late = driver.submit(PROMPTS, COUNT)  # while the others hold the blocks of this very prefix, if they do
            ended = driver.wait(running)
            done = driver.wait(late)
            new = str(live.version)
            assert [r["tokens"] for r in done] == reference(live.models[live.serves])
            assert [set(r["versions"]) for r in done] == [{new}] * len(done)
            if in_flight == "drain" or not any(
                len(r["tokens"]) == length and set(r["versions"]) == {old} for r in ended
            ):
                break  # on a slow machine they may have ended before the commit: once more
        else:
            pytest.fail("no request was ever in flight at a commit")
    if in_flight == "abort":
        assert [r["finish_reason"] for r in ended] == ["abort"] * 2
        assert all(0 < len(r["tokens"]) < length and set(r["versions"]) == {old} for r in ended)
    else:
        assert [(r["finish_reason"], len(r["tokens"])) for r in ended] == [("length", length)] * 2
        expected = {old} if in_flight == "drain" else {old, new}
        assert [set(r["versions"]) for r in ended] == [expected] * 2
    for request, whole in zip(ended, greedy_batch(live.models[before], [LONG, PROMPTS[1]], 40), strict=True):
        count = min(request["versions"].count(old), 40)
        assert request["tokens"][:count] == whole[:count], "what the old weights had to say"
    live.assert_serves(live.serves)


@pytest.mark.parametrize("in_flight", IN_FLIGHT)
@pytest.mark.parametrize("live", ["tp1", "pp2"], indirect=True)
def test_requests_in_flight_follow_the_policy_and_their_blocks_serve_no_new_request(live: Live, in_flight: str) -> None:
    check_requests_in_flight(live, in_flight)


@pytest.mark.parametrize("live", ["tp1", "tp2", "tp2-plain", "pp2"], indirect=True)
def test_verify_tells_when_one_element_of_one_rank_was_altered_behind_our_back(live: Live) -> None:
    live.update("B")
    with SyncManager() as manager:
        assert manager.verify(live.source("B")).ok
        for rank in range(live.ranks):
            altered = [answer["altered"] for answer in live.driver.rpc("ext_alter", rank, "layernorm.weight") if answer]
            assert len(altered) == 1
            report = manager.verify(live.source("B"))
            assert not report.ok
            (replica,) = report.replicas
            assert [words for words in replica.differ if altered[0] in words and words.startswith(f"rank {rank}:")]
            live.update("B")
            assert manager.verify(live.source("B")).ok
    live.assert_serves("B")


@pytest.mark.parametrize("live", ["tp2"], indirect=True)
def test_verify_reads_what_the_engine_computes_with_where_it_keeps_a_packed_copy_beside_the_parameter(
    live: Live,
) -> None:
    live.update("B")
    with SyncManager() as manager:
        assert manager.verify(live.source("B")).ok
        live.driver.rpc("ext_compute_otherwise", "lm_head")
        (replica,) = manager.verify(live.source("B")).replicas
        assert replica.differ and all("lm_head.weight" in words for words in replica.differ)
        live.update("A")
        live.update("B")
        assert manager.verify(live.source("B")).ok
    live.assert_serves("B")


@pytest.mark.parametrize("live", ["tp2"], indirect=True)
def test_what_a_layer_derives_from_weights_after_the_group_was_opened_refuses_the_next_update_by_name(
    live: Live,
) -> None:
    live.update("B")
    live.driver.rpc("ext_keep_at_first_use", "model.layers.1.input_layernorm", True)
    live.update("A")  # nothing is kept until the layer computes
    live.assert_serves("A")
    for _ in range(2):
        with pytest.raises(EngineUnsupported, match=r"model\.layers\.1\.input_layernorm\.norms_by_size\.\(1, 2\)"):
            live.update("B")
        live.assert_serves("A")
    live.driver.rpc("ext_keep_at_first_use", "model.layers.1.input_layernorm", False)
    live.update("B")
    live.assert_serves("B")


def _without(tensors: dict[str, torch.Tensor]) -> Any:
    del tensors["model.layers.1.mlp.down_proj.weight"], tensors["model.layers.0.self_attn.k_proj.weight"]
    return tensors


def _extra(tensors: dict[str, torch.Tensor]) -> Any:
    return tensors | {f"model.layers.{i}.nonsense": torch.zeros(3) for i in range(20)}


def _shape(tensors: dict[str, torch.Tensor]) -> Any:
    name = "model.layers.1.mlp.down_proj.weight"
    return tensors | {name: tensors[name][:, :-1].contiguous()}


def _dtype(tensors: dict[str, torch.Tensor]) -> Any:
    name = "model.layers.1.mlp.down_proj.weight"
    return tensors | {name: tensors[name].to(torch.bfloat16)}


def _twice(tensors: dict[str, torch.Tensor]) -> Any:
    name = "model.layers.1.mlp.down_proj.weight"
    return [*tensors.items(), (name, tensors[name].clone())]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (_without, "down_proj"),
        (_without, r"layers\.0\.self_attn\.(qkv|k)_proj"),
        (_extra, "nonsense.*20 in all|20 in all.*nonsense"),
        (_shape, "down_proj"),
        (_dtype, "down_proj"),
        (_twice, "down_proj"),
    ],
    ids=["missing", "missing-part-of-a-fused-one", "unknown", "shape", "dtype", "duplicate"],
)
@pytest.mark.parametrize("live", ["tp1", "tp2"], indirect=True)
def test_a_manifest_that_does_not_fit_is_refused_with_names_before_anything_changes(
    live: Live, change: Callable[[dict[str, torch.Tensor]], Any], expected: str
) -> None:
    live.update("A")
    with SyncManager() as manager:
        with pytest.raises(ManifestMismatch, match=expected) as caught:
            manager.update(ModuleAdapter(change(weights(live.models["B"]))), live.version + 1)
        assert "in all" in str(caught.value) or "twice" in str(caught.value)
        live.assert_serves("A")
        live.version += 1
        manager.update(live.source("B"), live.version)
    live.assert_serves("B")


# --- the server, data parallel ---------------------------------------------------------------------------------------------


def test_every_data_parallel_rank_of_a_server_is_a_replica_and_takes_the_update(
    runtime: Path, checkpoint: Checkpoint
) -> None:
    model_a, model_b = (checkpoint("qwen3", tied=True, seed=seed) for seed in (1, 2))
    with Server(runtime, model_a, arguments=["--data-parallel-size", "2"]) as server:
        assert sorted(card.dp_rank for card in server.cards) == [0, 1]

        def tokens(prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
            by_rank = [[server.tokens(prompt, count, dp_rank=rank) for prompt in prompts] for rank in (0, 1)]
            assert by_rank[0] == by_rank[1]
            return by_rank[0]

        check_life(tokens, model_a, model_b, replicas=2)
        with SyncManager(timeout_s=180) as manager, manager.paused() as report:
            assert [replica.state for replica in report.replicas] == ["paused"] * 2
            assert server.request("GET", "/health")[0] == 200
        assert tokens(PROMPTS, COUNT) == reference(model_a)
    assert server.leftovers() == [] and server.family() == []
