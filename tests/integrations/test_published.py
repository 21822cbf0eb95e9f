"""Pages that show lines for a project that has no place for an adapter file: the lines fit its published source.

The release that the page names is unpacked without its dependencies, read, and never imported. Nothing of it runs here; a page
says whether its lines were run by hand.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from inference_plugin.engines.patch_points import PatchPoint
from inference_plugin.engines.source_places import Release, wrong_in
from tests.support.engines import ROOT
from tests.support.pages import blocks

pytestmark = [pytest.mark.integration, pytest.mark.slow]

PIP_S = 300


@dataclass(frozen=True)
class Lines:
    """What a page's lines replace and read."""

    replaced: dict[str, str]
    """A function of the lines, and the class of theirs (`module:Class`) whose method of that name it replaces."""
    read: dict[str, tuple[str, ...]]
    """What the lines read of `self`, by class of theirs."""
    places: tuple[PatchPoint, ...] = ()
    """What else the lines use, and what the page names."""
    looked_up: tuple[tuple[str, str], ...] = ()
    """A name of a module of theirs that the lines bind anew (`module:name`), and what looks it up afterwards: a method of theirs
    when it is called (`module:Class.method`), or a module that the lines run as a program (`module:`)."""


SWIFT, TITAN = "swift.rlhf_trainers", "torchtitan.experiments.rl"
PAGES = {
    "torchtitan": Lines(
        {
            "push_model_state_dict": f"{TITAN}.actors.trainer:PolicyTrainer",
            "_pull_model_state_dict": f"{TITAN}.actors.generator:VLLMGenerator",
            "load_weights": f"{TITAN}.models.vllm_wrapper:VLLMModelWrapper",
        },
        {
            f"{TITAN}.actors.trainer:PolicyTrainer": ("model", "policy_version", "sd_adapter"),
            f"{TITAN}.actors.generator:VLLMGenerator": (
                "policy_version",
                "_pull_model_state_dict_future",
                "_model_state_dict_pull_request",
            ),
            f"{TITAN}.models.vllm_wrapper:VLLMModelWrapper": ("model", "state_dict_adapter", "config"),
            "torchtitan.models.common.attention:FusedQKVLinear": ("wqkv", "heads_per_kv", "r_dim"),
        },
        (
            PatchPoint(f"{TITAN}.components.weight_sync:WeightSyncManager.start_async_push_pull", ("version",)),
            PatchPoint(f"{TITAN}.components.weight_sync:WeightSyncManager.wait_prev_push"),
            PatchPoint(f"{TITAN}.components.weight_sync:WeightSyncManager.wait_prev_pull"),
            PatchPoint("torchtitan.protocols.state_dict_adapter:BaseStateDictAdapter.to_hf", ("state_dict",)),
        ),
        (
            (f"{TITAN}.controller:PolicyTrainer", f"{TITAN}.controller:Controller.setup_async"),
            (f"{TITAN}.controller:VLLMGenerator", f"{TITAN}.controller:Controller.setup_async"),
            (f"{TITAN}.actors.generator:EngineArgs", f"{TITAN}.actors.generator:VLLMGenerator.__init__"),
        ),
    ),
    "skyrl": Lines(
        dict.fromkeys(
            ("init_model", "init_weight_sync_state", "broadcast_to_inference_engines"),
            "skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker:FSDPPolicyWorkerBase",
        ),
        {"skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker:FSDPPolicyWorkerBase": ("model",)},
        (
            PatchPoint(
                "skyrl.train.config.config:InferenceEngineConfig",
                ("model_dtype", "external_proxy_url", "external_server_urls", "distributed_executor_backend"),
            ),
            PatchPoint("skyrl.train.config.config:SkyRLTrainConfig.from_cli_overrides", ("args",)),
            PatchPoint("skyrl.train.entrypoints.main_base:BasePPOExp.run"),
            PatchPoint("skyrl.train.utils.utils:initialize_ray", ("cfg",)),
            PatchPoint("skyrl.train.utils.utils:validate_cfg", ("cfg",)),
            PatchPoint("skyrl.backends.skyrl_train.weight_sync:_VLLM_RECEIVE_BACKENDS"),
            PatchPoint("skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker:PolicyWorker"),
            PatchPoint("skyrl.backends.skyrl_train.distributed.fsdp_utils:apply_fsdp2", ("model",)),
            PatchPoint("skyrl.backends.skyrl_train.distributed.fsdp_utils:fsdp2_load_full_state_dict", ("model",)),
        ),
        (
            *(
                (
                    f"skyrl.backends.skyrl_train.distributed.fsdp_strategy:{name}",
                    "skyrl.backends.skyrl_train.distributed.fsdp_strategy:FSDPStrategy._fsdp_init_model",
                )
                for name in ("apply_fsdp2", "fsdp2_load_full_state_dict")
            ),
            (
                "skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker:PolicyWorker",
                "skyrl.train.entrypoints.main_base:BasePPOExp._setup_trainer",
            ),
        ),
    ),
    "openrlhf": Lines(
        dict.fromkeys(
            ("init_model_from_pretrained", "broadcast_to_vllm"), "openrlhf.trainer.ray.ppo_actor:PolicyModelActor"
        ),
        {"openrlhf.trainer.ray.ppo_actor:PolicyModelActor": ("actor",)},
        (
            PatchPoint("openrlhf.trainer.ray.ppo_actor:ActorPPOTrainer.broadcast_to_vllm"),
            PatchPoint("openrlhf.cli.train_ppo_ray:train"),
            PatchPoint("openrlhf.trainer.ray.vllm_worker_wrap:WorkerWrap.update_weight"),
            PatchPoint("openrlhf.trainer.ray.vllm_worker_wrap:WorkerWrap.update_weight_cuda_ipc"),
            PatchPoint("openrlhf.trainer.ray.vllm_worker_wrap:WorkerWrap.init_process_group"),
        ),
        (("openrlhf.trainer.ray.ppo_actor:PolicyModelActor", "openrlhf.cli.train_ppo_ray:"),),
    ),
    "areal": Lines(
        {"update_weights": "areal.engine.fsdp_engine:FSDPEngine"},
        {"areal.engine.fsdp_engine:FSDPEngine": ("model",)},
        (
            PatchPoint("areal.engine.fsdp_engine:FSDPEngine._offload_aware_context"),
            PatchPoint("areal.engine.fsdp_engine:FSDPPPOActor"),
            PatchPoint("areal.api.io_struct:WeightUpdateMeta", ("type", "version")),
            PatchPoint("areal.api.engine_api:TrainEngine.connect_engine", ("engine", "meta")),
            PatchPoint("areal.api.engine_api:TrainEngine.set_version", ("version",)),
        ),
        (("areal.engine:FSDPPPOActor", "areal.trainer.rl_trainer:PPOTrainer._create_train_engine"),),
    ),
    "ms_swift": Lines(
        {
            "_move_model_to_vllm": f"{SWIFT}.rollout_mixin:RolloutTrainerMixin",
            "_get_grpo_lora_request": "swift.infer_engine.grpo_vllm_engine:GRPOVllmEngine",
            "_get_grpo_lora_request_async": "swift.infer_engine.grpo_vllm_engine:GRPOVllmEngine",
        },
        {
            f"{SWIFT}.rollout_mixin:RolloutTrainerMixin": ("rollout_enable_lora",),
            "swift.infer_engine.vllm_engine:VllmEngine": ("enable_lora",),
        },
        (
            PatchPoint(f"{SWIFT}.rollout_mixin:RolloutTrainerMixin._wait_queue"),
            PatchPoint(f"{SWIFT}.vllm_client:VLLMClient.init_communicator", ("self", "device")),
            PatchPoint("swift.arguments.base_args.base_args:BaseArguments._import_external_plugins"),
        ),
    ),
}


@pytest.fixture(scope="module", params=list(PAGES))
def page(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def release(page: str, tmp_path_factory: pytest.TempPathFactory) -> Release:
    """The release that the page was written from, as pip unpacks it."""
    (named,) = re.findall(r"the source of ([\w-]+) ([\d.]+\d), the released package", text_of(page))
    directory = tmp_path_factory.mktemp(page)
    command = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "--no-input",
        "install",
        "--quiet",
        "--no-deps",
    ]
    command += ["--only-binary", ":all:", "--no-compile", "--ignore-requires-python", "--target", str(directory)]
    ran = subprocess.run([*command, "==".join(named)], capture_output=True, text=True, timeout=PIP_S)
    if ran.returncode:
        pytest.skip(f"pip can't get {' '.join(named)}: {ran.stderr.strip().splitlines()[-1]}")

    @functools.cache
    def read(path: str) -> str | None:
        file = directory / path
        return file.read_text() if file.is_file() else None

    return Release(*named, read)


def text_of(page: str) -> str:
    return (ROOT / "docs" / "integrations" / f"{page}.md").read_text()


def functions_of(page: str) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    """The functions of the page's lines, those in its classes too."""
    lines = "\n".join(block.text for block in blocks(ROOT / "docs" / "integrations" / f"{page}.md", "python"))
    nodes = ast.walk(ast.parse(lines))
    return {node.name: node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def class_of(release: Release, place: str) -> ast.ClassDef:
    module, _, name = place.partition(":")
    tree = release.module(module)
    assert tree is not None, f"{release.distribution} {release.version} has no {module}"
    (found,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    return found


def method_of(release: Release, place: str, name: str) -> Any:
    (found,) = [node for node in class_of(release, place).body if getattr(node, "name", "") == name]
    return found


def endpoints_of(method: Any) -> set[str]:
    """The decorators by which an actor's method can be called from other processes."""
    return {text for each in method.decorator_list if "endpoint" in (text := ast.unparse(each))}


def kept_by(node: ast.AST) -> Iterator[str]:
    """What a method, or the methods of a class, set on `self`."""
    for each in ast.walk(node):
        if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store) and ast.unparse(each.value) == "self":
            yield each.attr


def test_a_function_of_the_lines_has_the_name_and_the_parameters_of_the_method_that_it_replaces(
    page: str, release: Release
) -> None:
    ours = functions_of(page)
    for name, place in PAGES[page].replaced.items():
        theirs = method_of(release, place, name)
        assert isinstance(theirs, type(ours[name])), f"{name}: only one of the two is a coroutine function"
        assert [each.arg for each in ours[name].args.args] == [each.arg for each in theirs.args.args]
        assert len(ours[name].args.defaults) == len(theirs.args.defaults)
        assert endpoints_of(theirs) == endpoints_of(ours[name])


def test_a_function_of_the_lines_sets_what_the_method_that_it_replaces_sets(page: str, release: Release) -> None:
    """Itself, or by calling it. Others may wait for it: torchtitan's pull ends once a future has its result."""
    ours = functions_of(page)
    for name, place in PAGES[page].replaced.items():
        theirs = method_of(release, place, name)
        if f"super().{name}(" not in ast.unparse(ours[name]):
            assert set(kept_by(theirs)) - set(kept_by(ours[name])) == set()


def test_what_the_lines_bind_anew_is_looked_up_where_it_is_used(page: str, release: Release) -> None:
    """As a global of the module in which they bind it, or by an import from there that runs afterwards."""
    if not PAGES[page].looked_up:  # the lines set methods on their classes
        for name, place in PAGES[page].replaced.items():
            assert f"\n{place.partition(':')[2]}.{name} = {name}\n" in text_of(page)
    for bound, user in PAGES[page].looked_up:
        (home, _, name), (module, _, method) = bound.partition(":"), user.partition(":")
        theirs: ast.AST | None = release.module(module)
        if method:
            in_class, _, called = method.partition(".")
            theirs = method_of(release, f"{module}:{in_class}", called)
        assert theirs is not None, f"{release.distribution} {release.version} has no {module}"
        nodes = list(ast.walk(theirs))
        assert name in {node.id for node in nodes if isinstance(node, ast.Name)}
        imports = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module == home]
        assert module == home or name in {alias.name for each in imports for alias in each.names}


def test_what_the_lines_read_of_their_class_is_set_there(page: str, release: Release) -> None:
    for place, names in PAGES[page].read.items():
        assert set(names) - set(kept_by(class_of(release, place))) == set()


def test_the_places_that_the_page_names_are_there(page: str, release: Release) -> None:
    wrong = {point.place: why for point in PAGES[page].places if (why := wrong_in(release, point))}
    assert wrong == {}
