"""What belongs to a draft model in SGLang, and what to the served one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from inference_plugin.engines.drafts import HasDraft, NoDraft
from inference_plugin.engines.sglang import api
from inference_plugin.engines.sglang.draft import borrowed, draft_of, drafting_models, holds_views
from inference_plugin.net.records import GroupRecord, ReplicaRecord
from inference_plugin.wire.errors import EngineUnsupported


def test_a_version_of_the_draft_is_not_the_version_that_the_server_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    records = {"model": GroupRecord(3, committed_at_unix_s=1.0), "draft": GroupRecord(100, committed_at_unix_s=2.0)}
    monkeypatch.setattr(api, "replicas_here", lambda: ["this one"])
    monkeypatch.setattr(api, "record_of", lambda _: ReplicaRecord(records))
    assert api.last_committed() == "3"
    del records["model"]
    assert api.last_committed() is None


def test_a_module_whose_parameter_the_served_model_holds_is_not_the_drafts() -> None:
    """SGLang puts the served model's parameters into modules of the draft."""
    served = nn.ModuleDict({"embed": nn.Embedding(4, 2), "head": nn.Linear(2, 4, bias=False)})
    draft = nn.ModuleDict({"embed": nn.Embedding(4, 2), "layer": nn.Linear(2, 2), "head": nn.Linear(2, 4, bias=False)})
    draft["embed"].weight = served["embed"].weight  # type: ignore[assignment]
    assert borrowed(draft, served) == {"embed"} and not holds_views(draft, served)


def test_a_slice_of_the_served_model_s_embedding_is_not_the_drafts_and_is_known_to_stay_behind() -> None:
    """SGLang gives each rank's draft its rows of Gemma's embedding, which the ranks have whole."""
    served = nn.ModuleDict({"embed": nn.Embedding(4, 2)}).requires_grad_(False)
    draft = nn.ModuleDict({"embed": nn.Embedding(2, 2), "layer": nn.Linear(2, 2)})
    del draft["embed"].weight
    draft["embed"].weight = served["embed"].weight[2:]  # type: ignore[index]
    assert borrowed(draft, served) == {"embed"} and holds_views(draft, served)
    served["embed"].weight.data = torch.zeros(4, 2)  # type: ignore[union-attr]
    assert draft["embed"].weight.any()  # type: ignore[operator, union-attr]


def test_a_draft_of_an_unknown_kind_keeps_its_weights_and_the_group_is_refused_with_the_reason() -> None:
    models = [nn.Linear(1, 1), nn.Linear(1, 1)]
    inner = SimpleNamespace(draft_runners=[SimpleNamespace(model=model) for model in models])
    scheduler: Any = SimpleNamespace(draft_worker=SimpleNamespace(draft_worker=inner))
    assert drafting_models(scheduler) == models
    none: Any = SimpleNamespace(draft_worker=SimpleNamespace(draft_worker=None))  # as drafting by n-grams
    assert drafting_models(none) == [] and draft_of(none) is None
    assert drafting_models(SimpleNamespace(draft_worker=None)) == []
    served = HasDraft(nn.Linear(1, 1), torch.device("cpu"), nn.Linear(1, 1))
    with pytest.raises(EngineUnsupported, match="none that can be updated"):
        served.draft_model()
    served.note_draft(NoDraft("nobody knows"))
    assert served.for_names(["weight"]) is served and "nobody knows" in served.leaves_out
    for ask in (served.draft_model, lambda: served.for_names(["weight", "draft.weight"])):
        with pytest.raises(EngineUnsupported, match="nobody knows"):
            ask()


class OfAPlugIn:
    """Who drafts may be of a plug-in of SGLang's."""

    @property
    def draft_worker(self) -> None:
        raise RuntimeError("not so")


def test_where_sglang_s_draft_cannot_even_be_looked_at_the_group_is_refused_and_no_more() -> None:
    assert isinstance(found := draft_of(SimpleNamespace(draft_worker=OfAPlugIn())), NoDraft)
    assert "not so" in found.why
