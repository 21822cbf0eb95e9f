"""Quantised engines under load: every token is of the version that it is stamped with, while updates alternate.

No other program computes as a quantised kernel does. So the witness is a fresh engine of each version: it is given what came
before a token and says what is likeliest to follow. `recompute` has each token computed with keys and values of its own version.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from tests.engines.test_vllm_one_version import which_set
from tests.support.engines import Driver
from tests.support.families import FAMILIES, make_versions
from tests.support.managers import SyncManager
from tests.support.quantised import that_start
from tests.support.trials import whole

pytestmark = [pytest.mark.engine, pytest.mark.slow]

RUNNING, UPDATES = 3, 8
TOKENS = {"llama-fp8-by-the-engine": 64, "llama-w8a8-int8": 200, "llama-w4a16": 200}
"""Length of a request. torch takes 10 ms of CPU for each product of fp8 weights: an update falls into a few tokens there."""
EVERY = 10
"""Of tokens that are not beside a change of the version, one in so many is looked at."""
NEAR = 0.02
"""Two log-probabilities that are this close are a tie: a kernel rounds otherwise in another batch."""


def prefixes(prompt: list[int], request: dict[str, Any], version: int) -> list[tuple[list[int], int]]:
    """What came before each token of one version that is looked at, and the token."""
    tokens, stamps = request["tokens"], [which_set(stamp) for stamp in request["versions"]]
    return [
        (prompt + tokens[:i], tokens[i])
        for i in range(len(tokens))
        if stamps[i] == version and (i % EVERY == 0 or len(set(stamps[max(0, i - 2) : i + 3])) > 1)
    ]


def explained(engine: Driver, asked: list[tuple[list[int], int]]) -> int:
    """How many of the tokens this engine would have chosen too."""
    answers = engine.wait(engine.submit([prefix for prefix, _ in asked], 1, logprobs=5))
    found = 0
    for (_, token), answer in zip(asked, answers, strict=True):
        likely = {int(i): value for i, value in answer["logprobs"][0]}
        found += token in likely and max(likely.values()) - likely[token] <= NEAR
    return found


@pytest.mark.parametrize("name", that_start(TOKENS))
@pytest.mark.parametrize("install", ["copy", "standby"])
def test_every_token_of_a_quantised_engine_is_of_its_version_while_updates_alternate(
    runtime: Path, tmp_path: Path, name: str, install: str
) -> None:
    family, rng = FAMILIES[name], random.Random(0)
    models = make_versions(family, tmp_path)
    prompts: dict[str, list[int]] = {}
    with Driver(runtime, in_process=True) as engine:
        engine.open(models[0], dtype=family.dtype, max_model_len=256, **family.vllm)
        with SyncManager(in_flight="recompute", install=install, timeout_s=120) as manager:  # type: ignore[arg-type]
            for version in range(1, UPDATES + 1):
                unfinished = sum(not request["finished"] for request in engine.look(list(prompts)))
                made = [[rng.randrange(1, 500) for _ in range(8)] for _ in range(RUNNING - unfinished)]
                if made:
                    prompts |= dict(zip(names := engine.submit(made, TOKENS[name]), made, strict=True))
                    engine.wait_for_tokens(names, 2)
                (replica,) = manager.update(whole(models[version % 2]), version).replicas
                assert (replica.status, replica.install) == ("committed", install)
            done = engine.wait(list(prompts))
        crossing = sum(len(set(request["versions"])) > 1 for request in done)
        assert crossing, "no request ran across an update"
        by_version = [
            list(itertools.chain(*(prefixes(prompts[r["name"]], r, which) for r in done))) for which in (0, 1)
        ]
        assert all(len(asked) > RUNNING for asked in by_version)
        for which, asked in enumerate(by_version):
            engine.call("close")
            engine.open(models[which], dtype=family.dtype, max_model_len=256, **family.vllm)
            assert explained(engine, asked) == len(asked)
            other = by_version[1 - which]
            assert explained(engine, other) <= len(other) // 2, "the two versions can't be told apart"
