"""An SGLang engine that reads images, updated while it lives: no answer is made with an image that older weights encoded.

SGLang keeps what its vision tower made of an image under the image's hash, apart from its prefix cache.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest

from inference_plugin.wire.messages import InFlight
from tests.engines.test_vllm_tokens import weights
from tests.support.managers import SyncManager
from tests.support.models import make_gemma3_vision
from tests.support.sglang_engines import SglangDriver
from trainer_adapters import ModuleAdapter

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PROMPT = [1, 7, 507, 5, 9, 42]
IMAGES = (1, 2)


def say(driver: SglangDriver) -> list[Any]:
    """How likely the tokens of an answer about each image were."""
    done = driver.wait([name for image in IMAGES for name in driver.submit([PROMPT], 8, logprobs=1, image=image)])
    assert [one["finish_reason"] for one in done] == ["length"] * len(IMAGES), done
    return [one["logprobs"] for one in done]


def agree(said: list[Any], expected: list[Any]) -> bool:
    """The last bits depend on the batch."""
    return all(one == pytest.approx(other, abs=1e-3) for one, other in zip(said, expected, strict=True))


def test_under_every_policy_the_next_answers_about_known_images_are_a_fresh_engines(
    runtime: Path, tmp_path: Path
) -> None:
    a, b = (make_gemma3_vision(tmp_path / f"model-{seed}", seed=seed) for seed in (1, 2))
    with SglangDriver(runtime) as driver:
        fresh = {}
        for model in (b, a):
            driver.call("close")
            driver.open(model, enable_multimodal=True)
            fresh[model] = say(driver)
        assert not agree(fresh[a][:1], fresh[a][1:]) and not agree(fresh[a], fresh[b])
        for version, policy in enumerate(get_args(InFlight), 1):
            target = b if version % 2 else a
            with SyncManager(in_flight=policy, timeout_s=60) as manager:
                before = driver.submit([PROMPT], 200, image=IMAGES[0])
                driver.wait_for_tokens(before, 3)
                if policy != "drain":
                    manager.pause(in_flight="keep")  # so that the request is in flight, however long the update takes
                (report,) = manager.update(ModuleAdapter(weights(target)), version).replicas
                assert report.status == "committed", report
                manager.resume()
                assert agree(say(driver), fresh[target]), (policy, target)
                driver.wait(before)
                assert agree(say(driver), fresh[target]), (policy, target)
