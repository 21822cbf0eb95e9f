"""An SGLang engine that reads images, updated while it lives: no answer is made with an image that older weights encoded.

SGLang keeps what its vision tower made of an image under the image's hash, apart from its prefix cache.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.images import IMAGES, check_images
from tests.support.models import make_gemma3_vision
from tests.support.multimodal import FAMILIES
from tests.support.sglang_engines import PRELOADED, SglangDriver

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PROMPT = [1, 7, 507, 5, 9, 42]
TEXT = [1, 7, 5, 9, 42, 100]


class WithKernels(SglangDriver):
    preloads = ("tests.support.sglang_kernels", *PRELOADED)


def say(driver: SglangDriver, prompt: list[int], medium: str = "image") -> list[Any]:
    """How likely the tokens of an answer about each image were, and of one about none."""
    names = [name for seed in IMAGES for name in driver.submit([prompt], 8, logprobs=1, **{medium: seed})]
    done = driver.wait([*names, *driver.submit([TEXT], 8, logprobs=1)])
    assert [one["finish_reason"] for one in done] == ["length"] * len(done), done
    return [one["logprobs"] for one in done]


def agree(said: list[Any], expected: list[Any]) -> bool:
    """The last bits depend on the batch."""
    return all(one == pytest.approx(other, abs=1e-3) for one, other in zip(said, expected, strict=True))


def test_under_every_policy_the_next_answers_about_known_images_are_a_fresh_engines(
    runtime: Path, tmp_path: Path
) -> None:
    models = make_gemma3_vision(tmp_path / "a", seed=1), make_gemma3_vision(tmp_path / "b", seed=2)
    with SglangDriver(runtime) as driver:
        check_images(driver, models, PROMPT, lambda: say(driver, PROMPT), agree, enable_multimodal=True)


@pytest.mark.parametrize("kind", ["glm4v", "glm4v-moe", "paddleocr-vl"])  # others do not start on a CPU
def test_under_every_policy_the_families_that_people_train_answer_as_fresh_engines(
    runtime: Path, tmp_path: Path, kind: str
) -> None:
    family = FAMILIES[kind]
    models = family.make(tmp_path / "a", 1), family.make(tmp_path / "b", 2)
    medium = "sound" if family.sound else "image"
    with WithKernels(runtime) as driver:
        check_images(
            driver,
            models,
            family.prompt,
            lambda: say(driver, family.prompt, medium),
            agree,
            medium=medium,
            trained=family.trained,
            sent_as=None if family.dtype == "float32" else "engine",
            enable_multimodal=True,
            dtype=family.dtype,
        )
