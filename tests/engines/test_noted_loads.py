"""Loads into a live model are noted, and whatever else is loaded is loaded as before."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from torch import nn

from inference_plugin.engines.noted_loads import LOADED, note_loads, noted_so_far


def model_class() -> Any:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.loaded: list[str] = []

        def load_weights(self, names: Iterable[str]) -> set[str]:
            taken = list(names)
            self.loaded += taken
            return set(taken)

    return Model


def test_of_two_models_of_one_class_only_the_live_ones_are_noted_until_the_end() -> None:
    kind = model_class()
    live, skeleton = kind(), kind()
    heard: list[str] = []
    end = note_loads(live, heard.append)
    before = noted_so_far()
    assert skeleton.load_weights(["a"]) == {"a"} and heard == [] and noted_so_far() == before
    assert live.load_weights(iter(["b", "c"])) == {"b", "c"} and live.loaded == ["b", "c"]
    assert heard == [LOADED] and noted_so_far() == before + 1
    end()
    live.load_weights(["d"])
    assert heard == [LOADED]


def test_a_class_that_calls_the_loader_of_its_base_is_noted_and_loads_once() -> None:
    base = model_class()

    class Derived(base):  # type: ignore[misc]
        def load_weights(self, names: Iterable[str]) -> Any:
            return super().load_weights(f"model.{name}" for name in names)

    served, draft = Derived(), base()
    heard: list[str] = []
    ends = [note_loads(served, heard.append), note_loads(draft, heard.append)]
    served.load_weights(["a"])
    assert served.loaded == ["model.a"] and set(heard) == {LOADED}
    heard.clear()
    draft.load_weights(["b"])
    assert draft.loaded == ["b"] and heard == [LOADED]
    for end in ends:
        end()


def test_a_load_through_a_stand_in_is_none_of_the_live_model_and_is_done() -> None:
    """SGLang's MiniCPM3 derives weights in its loader, which is called with a namespace in place of the model."""
    kind = model_class()
    heard: list[str] = []
    end = note_loads(kind(), heard.append)
    stand_in = SimpleNamespace(loaded=[])
    assert kind.load_weights(stand_in, ["a"]) == {"a"} and stand_in.loaded == ["a"] and heard == []
    end()


def test_a_load_is_done_also_where_it_cannot_be_noted() -> None:
    live = model_class()()

    def fail(_: str) -> None:
        raise RuntimeError("the worker has ended")

    end = note_loads(live, fail)
    assert live.load_weights(["a"]) == {"a"} and live.loaded == ["a"]
    end()


def test_a_model_without_a_loader_has_nothing_to_note() -> None:
    note_loads(nn.Linear(1, 1), lambda _: None)()


def test_a_loader_that_a_model_was_given_of_its_own_is_noted_too_until_the_end() -> None:
    """As SGLang's `flash_rl` does: it calls the class's loader as that was before."""
    live = model_class()()
    original = live.load_weights
    live.load_weights = own = lambda names: original([f"own {name}" for name in names])
    heard: list[str] = []
    end = note_loads(live, heard.append)
    assert live.load_weights(["a"]) == {"own a"} and heard == [LOADED]
    end()
    assert live.load_weights is own
    live.load_weights(["b"])
    assert heard == [LOADED] and live.loaded == ["own a", "own b"]
