"""A vLLM engine that reads images, updated while it lives: no answer is made with an image that older weights encoded.

vLLM keeps two things of an image: its pixels, in the API server and in the engine core, and what the vision tower made of them.
Only the latter depends on the weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from inference_plugin.wire.messages import InFlight
from tests.engines.test_vllm_tokens import weights
from tests.support.engines import Driver
from tests.support.managers import SyncManager
from tests.support.models import make_llava, make_paligemma
from trainer_adapters import ModuleAdapter

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PROMPTS = {"paligemma": [1, 7, 5, 9, 42], "llava": [1, 7, 511, 5, 9, 42]}
IMAGES = (1, 2)


@pytest.fixture(scope="module")
def driver(runtime: Path) -> Iterator[Driver]:
    with Driver(runtime) as one:
        yield one
    assert one.leftovers() == [] and one.family() == []


def say(driver: Driver, prompt: list[int]) -> list[Any]:
    """The tokens and the likeliest alternatives of an answer about each image."""
    names = [name for image in IMAGES for name in driver.submit([prompt], 8, logprobs=3, image=image)]
    done = driver.wait(names)
    assert [one["finish_reason"] for one in done] == ["length"] * len(IMAGES), done
    return [(one["tokens"], one["logprobs"]) for one in done]


@pytest.mark.parametrize("kind", PROMPTS)
def test_under_every_policy_the_next_answers_about_known_images_are_a_fresh_engines(
    driver: Driver, tmp_path: Path, kind: str
) -> None:
    make = {"paligemma": make_paligemma, "llava": make_llava}[kind]
    a, b = (make(tmp_path / f"{kind}-{seed}", seed=seed) for seed in (1, 2))
    fresh = {}
    for model in (b, a):
        driver.call("close")
        driver.open(model)
        fresh[model] = say(driver, PROMPTS[kind])
    (of_one, of_other) = fresh[a]
    assert of_one != of_other and fresh[a] != fresh[b]
    for version, policy in enumerate(get_args(InFlight), 1):
        target = b if version % 2 else a
        with SyncManager(in_flight=policy, timeout_s=60) as manager:
            before = driver.submit([PROMPTS[kind]], 200, image=IMAGES[0])
            driver.wait_for_tokens(before, 3)
            if policy != "drain":
                manager.pause(in_flight="keep")  # so that the request is in flight, however long the update takes
            (report,) = manager.update(ModuleAdapter(weights(target)), version).replicas
            assert report.status == "committed", report
            manager.resume()
            assert say(driver, PROMPTS[kind]) == fresh[target], (policy, target)
            driver.wait(before)
            assert say(driver, PROMPTS[kind]) == fresh[target], (policy, target)
