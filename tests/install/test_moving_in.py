"""What is moved into the live model where captured graphs hold addresses: what it computes with stays where it is."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from inference_plugin.install.rebuilt import RebuiltModule
from inference_plugin.install.standby import LiveTensor, StandbyWeights
from inference_plugin.wire.errors import CommitFailed


class Attention(nn.Module):
    """Computes with a tensor that it derived from a weight, laid out as columns, as latent attention does."""

    def __init__(self) -> None:
        super().__init__()
        self.w_kc = torch.zeros(3, 2).t()
        self.scale = 1.0


def test_a_derived_tensor_is_overwritten_in_place_and_its_old_values_come_back() -> None:
    live = Attention()
    held, address, strides = live.w_kc, live.w_kc.data_ptr(), live.w_kc.stride()
    new = RebuiltModule("attn", {("w_kc",): torch.ones(2, 3), ("scale",): 2.0})
    old = new.move_into(live, in_place=True)
    assert live.w_kc is held and (live.w_kc.data_ptr(), live.w_kc.stride()) == (address, strides)
    assert bool((live.w_kc == 1).all()) and live.scale == 2.0
    old.move_into(live, in_place=True)
    assert live.w_kc is held and not live.w_kc.any() and live.scale == 1.0


@pytest.mark.parametrize("other", [torch.ones(3, 2), torch.ones(2, 3, dtype=torch.bfloat16)])
def test_a_derived_tensor_of_another_form_is_refused_where_addresses_must_stay(other: torch.Tensor) -> None:
    live = Attention()
    with pytest.raises(CommitFailed, match=r"attn\.w_kc became .* its address must stay"):
        RebuiltModule("attn", {("w_kc",): other}).move_into(live, in_place=True)
    assert not live.w_kc.any()
    RebuiltModule("attn", {("w_kc",): other}).move_into(live, in_place=False)
    assert live.w_kc is other


@pytest.mark.parametrize("in_place", [True, False])
def test_a_swap_gives_back_what_was_there_also_where_two_tensors_share_memory(in_place: bool) -> None:
    memory, other = torch.arange(8.0), torch.arange(8.0) + 100
    views = {"a": memory[:6], "b": memory[2:]}
    address = memory.data_ptr()
    live = [LiveTensor("a", views, name, tensor) for name, tensor in views.items()]
    old = StandbyWeights(live, [other[:6], other[2:]], []).swap({}, in_place=in_place)
    assert views["a"].tolist() == other[:6].tolist() and views["b"].tolist() == other[2:].tolist()
    assert (views["a"].data_ptr() == address) is in_place
    old.swap({}, in_place=in_place)
    assert views["a"].tolist() == [0, 1, 2, 3, 4, 5] and views["b"].tolist() == [2, 3, 4, 5, 6, 7]
    assert views["a"].data_ptr() == address


@pytest.mark.parametrize("in_place", [True, False])
def test_a_swap_with_a_module_that_does_not_fit_leaves_everything_as_it_was(in_place: bool) -> None:
    live, weights = {"first": Attention(), "second": Attention()}, {"w": torch.zeros(4)}
    for module in live.values():
        module.weight = nn.Parameter(torch.zeros(2), requires_grad=False)
    written = live["second"].w_kc
    fits = RebuiltModule("first", {("w_kc",): torch.ones(2, 3), ("scale",): 2.0}, {"weight": torch.ones(2)})
    inner = {("w_kc",): frozenset({()})}
    attributes = {("scale",): 2.0, ("w_kc",): torch.ones(2, 4)}
    other = RebuiltModule("second", attributes, {"weight": torch.ones(2)}, inner, frozenset(inner))
    with pytest.raises(CommitFailed, match=r"second\.w_kc became .* doesn't fit"):
        StandbyWeights([LiveTensor("w", weights, "w", weights["w"])], [torch.ones(4)], [fits, other]).swap(
            live, in_place=in_place
        )
    assert not weights["w"].any() and live["second"].w_kc is written
    for module in live.values():
        assert module.scale == 1.0 and not module.w_kc.any() and not module.weight.any()


class Product:
    """Points to its scales, as an object of a kernel's library does: it holds no tensor."""

    def __init__(self, scales: torch.Tensor) -> None:
        self.scales = weakref.ref(scales.untyped_storage())


class Quantised(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.scales = nn.Parameter(torch.full((4,), value), requires_grad=False)
        self.product = Product(self.scales)
        self.products = [Product(self.scales)]


def test_what_an_object_was_made_from_lives_as_long_as_the_object_where_addresses_must_stay() -> None:
    live = Quantised(0)
    first, address = live.product, live.scales.data_ptr()
    replaced = []
    for value in (1, 2):
        made = Quantised(value)
        attributes = {("product",): made.product, ("products",): made.products}
        new = RebuiltModule("layer", attributes, {"scales": made.scales.detach()})
        replaced.append(new.move_into(live, in_place=True))
        del made, attributes, new
        assert live.product.scales() is not None and live.products[0].scales() is not None
        live.products.clear()
        assert live.product.scales() is not None, "also where another object that was made of them is gone"
        assert live.scales.data_ptr() == address and bool((live.scales == value).all())
    second = weakref.ref(live.product.scales())
    for old in reversed(replaced):
        old.move_into(live, in_place=True)
        assert live.product.scales() is not None
    assert live.product is first and not live.scales.any()
    gc.collect()
    assert second() is None, "nobody points to what the undone update brought"


def linear() -> None:
    """Is there before any update and after all of them, as `torch.nn.functional.linear` is."""


SINGLETON = Product(torch.empty(1))


def test_what_was_made_for_updates_that_are_over_is_freed_also_where_modules_share_an_object_that_stays() -> None:
    live = Quantised(0)
    made_from = []
    for value in range(1, 5):
        made = Quantised(value)
        made_from.append(weakref.ref(made.scales.untyped_storage()))
        attributes = {("product",): made.product, ("forward",): linear, ("products",): [SINGLETON]}
        RebuiltModule("layer", attributes, {"scales": made.scales.detach()}).move_into(live, in_place=True)
        del made, attributes
    gc.collect()
    assert [each() is None for each in made_from] == [True, True, True, False]
