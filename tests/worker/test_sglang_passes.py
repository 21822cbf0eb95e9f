"""What SGLang has at a commit or a sleep beside its weights: passes whose tokens it hasn't processed, encodings of images, and
grammars that it compiles."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from inference_plugin.engines.sglang.scheduler import forget_encodings
from inference_plugin.engines.sglang.served import ServedModel
from inference_plugin.engines.sglang.stamps import stamp_all, tokens_made


class Copied:
    """The mark after which a result is in the host's memory."""

    def __init__(self, accepted: torch.Tensor) -> None:
        self.accepted = accepted

    def synchronize(self) -> None:
        self.accepted.copy_(torch.tensor([3, 1]))


@pytest.mark.parametrize(("decodes", "made"), [(True, [3, 1]), (False, [1, 1])])
def test_tokens_that_speculative_decoding_has_accepted_are_counted_once_they_are_there(
    decodes: bool, made: list[int]
) -> None:
    accepted = torch.zeros(2, dtype=torch.int32)
    batch = SimpleNamespace(reqs=["a", "b"], forward_mode=SimpleNamespace(is_decode=lambda: decodes))
    assert tokens_made(batch, SimpleNamespace(accept_lens=accepted, copy_done=Copied(accepted))) == made


def test_a_pass_makes_one_token_of_each_request_otherwise() -> None:
    batch = SimpleNamespace(reqs=["a", "b"], forward_mode=SimpleNamespace(is_decode=lambda: True))
    assert tokens_made(batch, SimpleNamespace(accept_lens=None, copy_done=None)) == [1, 1]
    assert tokens_made(batch, SimpleNamespace()) == [1, 1], "of an embedding model"


def test_a_request_of_a_diffusion_model_that_rests_at_an_update_keeps_the_stamp_of_its_earlier_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SGLang computes the prompts of others first, and finds such a request neither in a batch nor in its queue."""
    for name in ("sglang", "sglang.srt", "sglang.srt.utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    context: Any = ModuleType("sglang.srt.runtime_context")
    context.get_serving = lambda: SimpleNamespace(weight_version="1")
    versions: Any = ModuleType("sglang.srt.utils.weight_versions")
    versions.WeightVersionEvent = lambda *event: event
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", context)
    monkeypatch.setitem(sys.modules, "sglang.srt.utils.weight_versions", versions)
    resting, seen, unbegun = (
        SimpleNamespace(output_ids=ids, weight_version_events=[]) for ids in ([5] * 8, [6] * 4, [])
    )
    scheduler = SimpleNamespace(
        dllm_manager=SimpleNamespace(waiting_queue=[resting, seen, unbegun]),
        enable_overlap=False,
        record_weight_version_change=lambda new_version: seen.weight_version_events.append(("1", 4)),
    )
    stamp_all(scheduler, "2")
    assert [one.weight_version_events for one in (resting, seen, unbegun)] == [[("1", 8)], [("1", 4)], []]


def test_encodings_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sglang", "sglang.srt", "sglang.srt.managers", "sglang.srt.managers.mm_schedule"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    schedule: Any = sys.modules["sglang.srt.managers.mm_schedule"]
    monkeypatch.setattr(sys.modules["sglang.srt.managers"], "mm_schedule", schedule, raising=False)
    for cache in (None, {7: "an image"}):
        schedule.embedding_cache = cache
        forget_encodings()
        assert not cache


def test_an_engine_that_compiles_a_grammar_falls_asleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's release of memory fails where it counts as busy, and it does while it compiles. Nothing of that request is there
    yet."""
    for name in ("sglang", "sglang.srt", "sglang.srt.managers", "sglang.srt.managers.io_struct"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    requests: Any = sys.modules["sglang.srt.managers.io_struct"]
    requests.ReleaseMemoryOccupationReqInput = SimpleNamespace
    grammars = SimpleNamespace(grammar_queue=["a request"])
    model: Any = object.__new__(ServedModel)
    vars(model)["_scheduler"] = SimpleNamespace(
        grammar_manager=grammars,
        enable_hierarchical_cache=True,
        waiting_queue=[],
        is_fully_idle=lambda ignore_waiting=False: True,
    )
    seen = []
    vars(model)["_updater"] = SimpleNamespace(
        release_memory_occupation=lambda _: seen.append(list(grammars.grammar_queue))
    )
    model.sleep(1)
    assert seen == [[]] and grammars.grammar_queue == ["a request"]
