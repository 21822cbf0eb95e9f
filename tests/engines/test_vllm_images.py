"""A vLLM engine that reads images, updated while it lives: no answer is made with an image that older weights encoded.

vLLM keeps two things of an image: its pixels, in the API server and in the engine core, and what the vision tower made of them.
Only the latter depends on the weights.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.test_vllm_tokens import weights
from tests.support import second_runner
from tests.support.engines import PRELOADED, Driver
from tests.support.images import IMAGES, check_images
from tests.support.managers import SyncManager
from tests.support.models import make_gemma3_vision, make_llava, make_paligemma, make_qwen_vl
from tests.support.multimodal import FAMILIES
from tests.support.torchvision_here import VARIABLE
from trainer_adapters import ModuleAdapter

pytestmark = [pytest.mark.engine, pytest.mark.slow]

TEXT = [1, 7, 5, 9, 42, 100]
Kind = tuple[Callable[..., Path], list[int]]
"""What makes a checkpoint, and a prompt with the place of an image."""

KINDS: dict[str, Kind] = {
    "paligemma": (make_paligemma, [1, 7, 5, 9, 42]),
    "llava": (make_llava, [1, 7, 511, 5, 9, 42]),
}
BY_TORCHVISION: dict[str, Kind] = {
    "qwen2-vl": (functools.partial(make_qwen_vl, generation="Qwen2"), [1, 7, 508, 509, 510, 5, 9, 42]),
    "qwen2.5-vl": (functools.partial(make_qwen_vl, generation="Qwen2_5_"), [1, 7, 508, 509, 510, 5, 9, 42]),
    "gemma3": (make_gemma3_vision, [1, 7, 507, 5, 9, 42]),
}
"""Their processors of images need torchvision."""


class WithTorchvision(Driver):
    preloads = (*second_runner.PRELOADS, "tests.support.torchvision_here", *PRELOADED)
    constants = (*Driver.constants, VARIABLE)


@pytest.fixture(scope="module")
def driver(runtime: Path) -> Iterator[Driver]:
    with Driver(runtime) as one:
        yield one
    assert one.leftovers() == [] and one.family() == []


def say(driver: Driver, prompt: list[int], medium: str = "image") -> list[Any]:
    """The tokens and the likeliest alternatives of an answer about each image, and of one about none. One after another: what
    else is in a batch may change the last bits."""
    asked = [(prompt, {medium: seed}) for seed in IMAGES] + [(TEXT, {})]
    done = [driver.wait(driver.submit([tokens], 8, logprobs=3, **more))[0] for tokens, more in asked]
    assert [one["finish_reason"] for one in done] == ["length"] * len(done), done
    return [(one["tokens"], one["logprobs"]) for one in done]


@pytest.mark.parametrize("kind", KINDS)
def test_under_every_policy_the_next_answers_about_known_images_are_a_fresh_engines(
    driver: Driver, tmp_path: Path, kind: str
) -> None:
    check(driver, tmp_path, *KINDS[kind])


@pytest.fixture  # for one test at a time: while it is open, the trainers' job is its engine's, not the other driver's
def with_torchvision(runtime: Path) -> Iterator[Driver]:
    with WithTorchvision(runtime, **{VARIABLE: "1"}) as one:
        yield one
    assert one.leftovers() == [] and one.family() == []


@pytest.mark.parametrize("kind", BY_TORCHVISION)
def test_under_every_policy_models_whose_images_torchvision_prepares_answer_as_fresh_engines(
    with_torchvision: Driver, tmp_path: Path, kind: str
) -> None:
    check(with_torchvision, tmp_path, *BY_TORCHVISION[kind])


@pytest.mark.parametrize("kind", FAMILIES)
def test_under_every_policy_the_families_that_people_train_answer_as_fresh_engines_and_reach_the_same(
    with_torchvision: Driver, tmp_path: Path, kind: str
) -> None:
    family, driver = FAMILIES[kind], with_torchvision
    models = family.make(tmp_path / "a", 1), family.make(tmp_path / "b", 2)
    medium = "sound" if family.sound else "image"
    check_images(
        driver,
        models,
        family.prompt,
        lambda: say(driver, family.prompt, medium),
        operator.eq,
        medium=medium,
        trained=family.trained,
        sent_as=None if family.dtype == "float32" else "engine",
        alone=family.alone,
        reach=lambda: driver.rpc("ext_state"),
        # vLLM's packed layout answers nothing about images of this one in bfloat16, on a CPU that multiplies in it.
        **{"dtype": family.dtype, "plain": kind == "llama4", **family.vllm},
    )


def check(driver: Driver, directory: Path, make: Callable[..., Path], prompt: list[int]) -> None:
    models = make(directory / "a", seed=1), make(directory / "b", seed=2)
    check_images(driver, models, prompt, lambda: say(driver, prompt), operator.eq)


def test_requests_in_flight_that_are_computed_anew_have_their_image_encoded_anew(
    driver: Driver, tmp_path: Path
) -> None:
    """Several requests about one image, as a group of samples is: all but the first found the image's keys and values in the
    prefix cache, so nobody but the engine core had its pixels for them."""
    a, b = (make_paligemma(tmp_path / f"model-{seed}", seed=seed) for seed in (1, 2))
    prompt, other = [1, 7, *range(5, 65), 9, 42], KINDS["paligemma"][1]
    fresh = {}
    for model in (b, a):
        driver.call("close")
        driver.open(model, block_size=32, max_model_len=1024)
        fresh[model] = say(driver, prompt), say(driver, other)
    assert (say(driver, prompt), say(driver, other)) == fresh[a] != fresh[b]
    # From this request on `keep` turns the prefix root each time.
    driver.wait(driver.submit([prompt], 2, salt="weightwire-keep:1"))
    version = 0
    for pause, policy in (("recompute", "keep"), ("keep", "recompute")):
        for target in (b, a):
            version += 1
            with SyncManager(in_flight=policy, timeout_s=60) as manager:
                manager.versions()  # it knows the replica: its pause comes at once
                before = driver.submit([prompt] * 3, 200, image=IMAGES[0])
                driver.wait_for_tokens(before, 3)
                manager.pause(in_flight=pause)
                (report,) = manager.update(ModuleAdapter(weights(target)), version).replicas
                assert report.status == "committed", report
                manager.resume()
                answers = say(driver, prompt), say(driver, other)
                done = driver.wait(before)
                assert [(one["finish_reason"], len(one["tokens"])) for one in done] == [("length", 200)] * 3
                assert answers == fresh[target], (policy, target)
                assert (say(driver, prompt), say(driver, other)) == fresh[target], (policy, target)
