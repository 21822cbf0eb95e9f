"""Models whose weights vLLM keeps in a form of its own: an update is right, or refused by name when the group is opened.

Each case is five updates in a row in one in-process engine, each held against a fresh engine: greedy tokens and
log-probabilities, bit for bit. Memory that the installation makes starts as 0xFF.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inference_plugin.wire.errors import ManifestMismatch
from tests.engines.conftest import Versions
from tests.support import checkpoints
from tests.support.quantised import that_start
from tests.support.reachable import differences
from tests.support.trials import House, Source, incomplete, not_refused, too_small, trial, whole
from trainer_adapters import ModuleAdapter, SyncManager

pytestmark = [pytest.mark.engine, pytest.mark.slow]

ENGINE: dict[str, dict[str, Any]] = {
    "apertus": {"dtype": "bfloat16"},
    "fp8-kv-scales": {"dtype": "bfloat16", "kv_cache_dtype": "fp8"},
    "fp8-kv-scales-whole": {"dtype": "bfloat16", "kv_cache_dtype": "fp8"},
    "gpt-oss-bfloat16": {"dtype": "bfloat16"},
    "gpt-oss-float16": {"dtype": "float16"},
    "w8a8-int8": {"dtype": "bfloat16"},
}
"""Arguments beside those of every engine here."""

TYING = re.compile(r"\b(un)?t(ie|ied|ies|ying)\b", re.IGNORECASE)

RIGHT = [
    ("llama-padded", False),
    ("llama-padded", True),
    ("dense-and-moe", False),
    ("dense-and-moe", True),
    ("shipped-head", False),
    ("shipped-head", True),
    ("mixtral", False),
    ("gemma3", False),
    ("opt", False),
    ("gpt2", True),
]
"""Kind, and whether linear layers stay plain."""

KEPT_ELSEWHERE = [
    "w8a8-int8",
    "gpt-oss-float16",
    "gpt-oss-bfloat16",
    "fp8-kv-scales",
    "fp8-kv-scales-whole",
    "bloom",
    "apertus",
]


@pytest.fixture(scope="module")
def house(runtime: Path) -> Iterator[House]:
    one = House(runtime)
    yield one
    one.close()


LAYOUTS = pytest.mark.parametrize("plain", [False, True], ids=["packed", "plain"])
POLICIES = pytest.mark.parametrize("install", ["copy", "standby"])


def layout_id(value: object) -> str | None:
    return None if not isinstance(value, bool) else "plain" if value else "packed"


@POLICIES
@pytest.mark.parametrize(("kind", "plain"), RIGHT, ids=layout_id)
def test_five_updates_in_a_row_are_a_fresh_engine_bit_for_bit(
    house: House, versions: Versions, kind: str, plain: bool, install: str
) -> None:
    outcome = trial(house, *versions(kind), plain=plain, install=install, **ENGINE.get(kind, {}))
    print(outcome)  # shown with -rP
    assert outcome.end == "right", outcome


@pytest.mark.parametrize(
    ("partial", "install"),
    [(False, "copy"), (False, "standby"), (True, "standby")],
    ids=["all-copy", "all-standby", "partial-standby"],
)
@LAYOUTS
@pytest.mark.parametrize("kind", that_start(KEPT_ELSEWHERE))
def test_five_updates_in_a_row_reach_what_hangs_beside_the_modules(
    house: House, versions: Versions, kind: str, partial: bool, plain: bool, install: str
) -> None:
    """`partial`: every tensor of the checkpoint all the same, by a group that needn't fill what the checkpoint lacks."""
    outcome = trial(house, *versions(kind), plain=plain, install=install, partial=partial, **ENGINE.get(kind, {}))
    print(outcome)  # shown with -rP
    assert outcome.end != "right" or "k_scale" not in outcome.text, "verify reads them"
    assert kind != "w8a8-int8" or "weight" not in outcome.text, "verify reads int8 back, though vLLM packs it"
    lacks_scales = kind == "fp8-kv-scales" and partial  # of a part of a group nothing tells what the rest holds
    assert outcome.end == ("refused" if lacks_scales else "right"), outcome


@LAYOUTS
def test_int8_weights_that_vllm_packs_are_read_back_and_one_wrong_element_shows(
    house: House, versions: Versions, plain: bool
) -> None:
    outcome = trial(house, *versions("w8a8-int8"), plain=plain, install="standby", updates=1, **ENGINE["w8a8-int8"])
    assert (outcome.end, outcome.text) == ("right", "")
    assert house.serves is not None
    tensors = checkpoints.load(house.serves)
    with SyncManager(timeout_s=60) as manager:
        assert manager.verify(tensors).ok
        name = "model.layers.1.mlp.down_proj.weight"
        tensors[name] = tensors[name].clone()
        tensors[name][-1, -1] ^= 1
        (replica,) = manager.verify(tensors).replicas
        assert len(replica.differ) == 1 and name in replica.differ[0], replica


@pytest.mark.parametrize(
    ("kind", "plain"),
    [
        ("dense-and-moe", False),
        ("dense-and-moe", True),
        ("llama-padded", True),
        ("opt", False),
        ("gpt-oss-bfloat16", False),
        ("apertus", False),
    ],
    ids=layout_id,
)
def test_a_manifest_that_lacks_anything_is_refused_when_the_group_is_opened(
    house: House, versions: Versions, kind: str, plain: bool
) -> None:
    """Each tensor in turn, the end of a tensor of each kind, whole experts, layers and kinds; the engine goes on as it was."""
    model_a, model_b = versions(kind)
    options = {"plain": plain, **ENGINE.get(kind, {})}
    fresh_b = house.fresh_says(model_b, **options)
    fresh_a = house.at(model_a, **options)
    tensors = checkpoints.load(model_b)
    house.serves = None
    wrong = not_refused([*incomplete(tensors), *too_small(tensors)])
    assert not wrong, f"{len(wrong)} not refused: " + "; ".join(wrong)
    assert house.say() == fresh_a
    with SyncManager(timeout_s=60) as manager:
        manager.update(whole(model_b), 100)
    assert house.say() == fresh_b


@POLICIES
@LAYOUTS
def test_what_a_partial_update_does_not_send_keeps_its_bytes(
    house: House, versions: Versions, tmp_path_factory: pytest.TempPathFactory, plain: bool, install: str
) -> None:
    """Three fresh engines to compare with: A, B, and A with B's second layer."""
    model_a, model_b = versions("llama-padded")
    a, b = checkpoints.load(model_a), checkpoints.load(model_b)
    second = {name for name in a if ".layers.1." in name}
    mixed = tmp_path_factory.getbasetemp() / "mixed"
    if not mixed.exists():
        shutil.copytree(model_a, mixed)
        checkpoints.rewrite(mixed, {name: (b if name in second else a)[name] for name in a})
    says = {model: house.fresh_says(model, plain=plain) for model in (mixed, model_b)}
    says[model_a] = house.at(model_a, plain=plain)
    house.serves = None
    with SyncManager(install=install, partial=True, timeout_s=60) as manager:  # type: ignore[arg-type]
        for tensors, names, expected in [
            (b, a.keys(), model_b),
            (a, a.keys(), model_a),
            (b, second, mixed),
            (a, second, model_a),
            (b, a.keys(), model_b),
            (a, a.keys() - second, mixed),
            (a, second, model_a),
        ] * 2:
            house.version += 1
            manager.update(ModuleAdapter({name: t for name, t in tensors.items() if name in names}), house.version)
            said = house.say()
            assert said.answers == says[expected].answers, [m.name for m in says if said.answers == says[m].answers]
            assert not differences(said.state, says[expected].state)
    house.serves = model_a


# --- heads that the engine ties, and trainers that tie otherwise ------------------------------------------------------

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def tied(checkpoint: Path) -> ModuleAdapter:
    """A trainer whose head is its embedding, as transformers has it."""
    tensors = checkpoints.load(checkpoint)
    return ModuleAdapter(tensors | {HEAD: tensors[EMBEDDING]})


def embedding_alone(checkpoint: Path) -> ModuleAdapter:
    """A trainer that sends no head at all."""
    return ModuleAdapter({name: t for name, t in checkpoints.load(checkpoint).items() if name != HEAD})


def untied(checkpoint: Path) -> ModuleAdapter:
    """A trainer whose head became another."""
    tensors = checkpoints.load(checkpoint)
    return ModuleAdapter(tensors | {HEAD: tensors[EMBEDDING].flip(0).contiguous()})


@POLICIES
@pytest.mark.parametrize("trainer", [tied, embedding_alone], ids=lambda trainer: str(trainer.__name__))
@LAYOUTS
@pytest.mark.parametrize("kind", ["retied-head", "qwen3"])
def test_a_tied_head_stays_right_in_five_updates_in_a_row_where_the_engine_tied_it_while_loading(
    house: House, versions: Versions, kind: str, trainer: Source, plain: bool, install: str
) -> None:
    outcome = trial(house, *versions(kind), plain=plain, install=install, source=trainer)
    print(outcome)
    assert outcome.end == "right", outcome


@POLICIES
@LAYOUTS
def test_a_head_sent_beside_an_equal_embedding_is_right_or_refused_with_a_word_on_tying(
    house: House, versions: Versions, plain: bool, install: str
) -> None:
    outcome = trial(house, *versions("retied-head"), plain=plain, install=install)
    print(outcome)
    assert outcome.end == "right" or (outcome.end == "refused" and TYING.search(outcome.text)), outcome


@POLICIES
@LAYOUTS
@pytest.mark.parametrize("kind", ["retied-head", "qwen3"])
def test_a_trainer_with_a_head_of_its_own_is_refused_by_an_engine_that_tied_it_with_a_word_on_tying(
    house: House, versions: Versions, kind: str, plain: bool, install: str
) -> None:
    model_a, model_b = versions(kind)
    fresh = house.at(model_a, plain=plain)
    house.version += 1
    house.serves, serves = None, house.serves
    with SyncManager(install=install, timeout_s=60) as manager:  # type: ignore[arg-type]
        with pytest.raises(ManifestMismatch, match=TYING) as caught:
            manager.update(untied(model_b), house.version)
        print(caught.value)
        assert caught.value.phase == "open"
    assert house.say() == fresh
    house.serves = serves


@POLICIES
@LAYOUTS
def test_a_trainer_with_a_tied_head_gives_an_untied_engine_both_or_is_refused_with_a_word_on_tying(
    house: House, versions: Versions, plain: bool, install: str
) -> None:
    """The engine's own checkpoint ships a head that differs from the embedding."""
    model_a, model_b = versions("shipped-head")[0], versions("retied-head")[1]
    fresh_b = house.fresh_says(model_b, plain=plain)
    fresh_a = house.at(model_a, plain=plain)
    serves, house.serves = fresh_a, None
    with SyncManager(install=install, timeout_s=60) as manager:  # type: ignore[arg-type]
        for model, source, fresh in [(model_b, tied, fresh_b), (model_a, whole, fresh_a)] * 2:
            house.version += 1
            refusal = None
            try:
                manager.update(source(model), house.version)
                serves = fresh
            except ManifestMismatch as error:
                refusal = str(error)
            assert refusal is None or TYING.search(refusal)
            assert house.say() == serves
