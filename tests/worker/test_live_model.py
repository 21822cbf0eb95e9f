"""What the brake goes by: whether the engine is decoding."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from inference_plugin.engines import live_model as live
from inference_plugin.engines.live_model import LiveModel


def test_an_engine_is_decoding_through_all_of_a_step_and_a_while_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = LiveModel(nn.Linear(1, 1), torch.device("cpu"), nn.Linear(1, 1))
    assert not model.decoding()
    with model.step():
        assert model.decoding()
        monkeypatch.setattr(live, "DECODING_S", 0.0)  # a step longer than that
        assert model.decoding()
    assert not model.decoding()
    monkeypatch.setattr(live, "DECODING_S", 3600.0)
    assert model.decoding()


def test_a_step_that_fails_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    model = LiveModel(nn.Linear(1, 1), torch.device("cpu"), nn.Linear(1, 1))
    monkeypatch.setattr(live, "DECODING_S", 0.0)
    with pytest.raises(RuntimeError), model.step():
        raise RuntimeError
    assert not model.decoding()
