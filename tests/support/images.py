"""An engine that reads images or hears sounds, under updates by every policy: no answer is made with one that older weights
encoded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

from inference_plugin.wire.messages import InFlight
from tests.engines.test_vllm_tokens import weights
from tests.support.managers import SyncManager
from tests.support.multimodal import load_trained

__all__ = ["IMAGES", "check_images"]

IMAGES = (1, 2)


def check_images(
    driver: Any,
    models: tuple[Path, Path],
    prompt: list[int],
    say: Callable[[], list[Any]],
    agree: Callable[[Any, Any], bool],
    *,
    medium: str = "image",
    trained: Callable[[Path], Any] = load_trained,
    sent_as: str | None = None,
    alone: bool = False,
    reach: Callable[[], object] = lambda: None,
    **options: Any,
) -> None:
    """An engine is updated under each policy, there and back, with a request about an image in flight; before that request ends
    and after it, it answers about known images as a fresh engine does. Its checkpoint's tensors are sent, and the model that
    transformers makes of them.

    `say`: its answer about each image first, then others; `agree` compares two answers. `medium`: "image" or "sound". `trained`:
    makes a trainer's model of a checkpoint. `sent_as`: the dtype of the updates. `alone`: an answer is only compared while no
    other request runs. `reach`: what the engine computes with. `options`: of the engine.
    """
    a, b = models
    fresh, reached = {}, {}
    for model in (b, a):
        driver.call("close")
        driver.open(model, **options)
        fresh[model], reached[model] = say(), reach()
    assert not agree(fresh[a][:1], fresh[a][1:2]) and not agree(fresh[a], fresh[b])
    for version, policy in enumerate(get_args(InFlight), 1):
        target = b if version % 2 else a
        with SyncManager(in_flight=policy, timeout_s=60) as manager:
            before = driver.submit([prompt], 200, **{medium: IMAGES[0]})
            driver.wait_for_tokens(before, 3)
            if policy != "drain":
                manager.pause(in_flight="keep")  # so that the request is in flight, however long the update takes
            model = weights(target) if version % 2 else trained(target)
            (report,) = manager.update(model, version, dtype=sent_as).replicas
            assert report.status == "committed", report
            manager.resume()
            assert alone or agree(say(), fresh[target]), (policy, target)
            driver.wait(before)
            assert agree(say(), fresh[target]), (policy, target)
            assert reach() == reached[target], (policy, target)
