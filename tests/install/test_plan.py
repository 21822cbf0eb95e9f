"""Every loader idiom by itself: a replay of its plan is what it really does, or it is refused, and why."""

from __future__ import annotations

import gc
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from inference_plugin.install import proof, replay, row_copies
from inference_plugin.install.plan import PlacementPlan, TensorInfo
from inference_plugin.install.proof import prove_plan
from inference_plugin.install.replay import Copies, Replay, read_back
from inference_plugin.install.storages import storage_views
from inference_plugin.install.trace import trace_plan
from inference_plugin.wire.geometry import Box
from tests.support.rebasing import rebase

Loader = Callable[[nn.Module, dict[str, Tensor]], None]
BF16, F32 = torch.bfloat16, torch.float32


class Bag(nn.Module):
    """A model that is nothing but its tensors: name -> shape, or (shape, dtype)."""

    def __init__(self, shapes: dict[str, Any], buffers: dict[str, Any] | None = None) -> None:
        super().__init__()
        for table, add in ((shapes, self._add_parameter), (buffers or {}, self.register_buffer)):
            for name, spec in table.items():
                shape, dtype = spec if isinstance(spec[-1:], tuple) and _has_dtype(spec) else (spec, F32)
                add(name, torch.empty(shape, dtype=dtype))

    def _add_parameter(self, name: str, data: Tensor) -> None:
        self.register_parameter(name, nn.Parameter(data, requires_grad=False))


def _has_dtype(spec: Any) -> bool:
    return len(spec) == 2 and isinstance(spec[1], torch.dtype)


@contextmanager
def in_portions(*, budget_bytes: int = proof.BUDGET_BYTES, step_bytes: int = replay.STEP_BYTES) -> Iterator[None]:
    """Proofs load in batches, and replays copy in steps, of about these sizes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(proof, "BUDGET_BYTES", budget_bytes)
        patch.setattr(proof, "PART_BYTES", min(proof.PART_BYTES, budget_bytes // 3 + 1))
        patch.setattr(replay, "STEP_BYTES", step_bytes)
        patch.setattr(row_copies, "PART_BYTES", min(row_copies.PART_BYTES, step_bytes))
        yield


class Case:
    """A model, a loader for it, and the tensors of a checkpoint."""

    def __init__(
        self,
        make: Callable[[], nn.Module],
        load: Callable[..., object],
        tensors: dict[str, Any],
        **over: torch.dtype,
    ) -> None:
        self.make, self._load = make, load
        self.tensors: list[TensorInfo] = [(n, tuple(shape), over.get(n, F32)) for n, shape in tensors.items()]

    def loader(self, model: nn.Module) -> Callable[[Iterable[tuple[str, Tensor]]], object]:
        return lambda weights: [self._load(model, name, tensor) for name, tensor in weights]

    def skeleton(self) -> nn.Module:
        with torch.device("meta"):
            return self.make()

    def trace(self) -> PlacementPlan:
        skeleton = self.skeleton()
        return trace_plan(skeleton, self.loader(skeleton), self.tensors)

    def prove(self, plan: PlacementPlan) -> str:
        skeleton = self.skeleton()
        return prove_plan(plan, skeleton, self.loader(skeleton), self.tensors)

    def sources(self, seed: int = 0) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        made = {}
        for name, shape, dtype in self.tensors:
            values = torch.randint(-(2**31), 2**31 - 1, shape, generator=generator, dtype=torch.int64)
            made[name] = (values.to(torch.float64) / 2**24).to(dtype)
        return made

    def check(self) -> PlacementPlan:
        """The plan, after a replay was compared with a real load, read back, and proven."""
        plan = self.trace()
        assert plan.refusal is None
        assert plan.refused == {}
        sources = self.sources()
        real, replayed = self.make(), self.make()
        for flat in itertools.chain(storage_views(real).values(), storage_views(replayed).values()):
            flat.fill_(-77)
        with torch.no_grad():
            self.loader(real)((name, tensor.clone()) for name, tensor in sources.items())
        targets = storage_views(replayed)
        copies = Replay(Copies(plan.placements, plan.fills), sources, targets)
        for between in (None, lambda: None):  # on all cores, and step by step
            for flat in targets.values():
                flat.fill_(-77)
            copies.run(between=between)
            assert_same(storage_views(real), targets)

        boxes = plan.needs()
        parts = {n: cut(sources[n], box.offsets, box.sizes).contiguous() for n, box in boxes.items()}
        for flat in targets.values():
            flat.fill_(-77)
        Replay(Copies(rebase(plan.placements, boxes), plan.fills), parts, targets).run()
        assert_same(storage_views(real), targets)

        if not plan.doubled:
            for name, box, held in read_back(plan.placements, targets):
                assert held.is_contiguous()
                assert torch.equal(held, cut(sources[name], box.offsets, box.sizes))
        assert self.prove(plan) == ""
        return plan


def cut(tensor: Tensor, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
    return tensor[tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))]


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


def default(model: nn.Module, name: str, tensor: Tensor) -> None:
    model.get_parameter(name).data.copy_(tensor)


# -- idioms that are plain copies


def test_plain_copy_is_one_flat_placement() -> None:
    plan = Case(lambda: Bag({"w": (3, 4), "b": (4,)}), default, {"w": (3, 4), "b": (4,)}).check()
    assert [(p.source.tensor, p.dest.sizes, p.dest.strides) for p in plan.placements] == [
        ("w", (12,), (1,)),
        ("b", (4,), (1,)),
    ]
    assert plan.uncovered == {}
    assert plan.unused == ()
    assert plan.needs() == {"w": Box(0, (0, 0), (3, 4)), "b": Box(0, (0,), (4,))}


def test_fused_qkv_goes_to_row_offsets() -> None:
    rows = {"q": (0, 8), "k": (8, 4), "v": (12, 4)}

    def load(model: nn.Module, name: str, tensor: Tensor) -> None:
        model.get_parameter("qkv").data.narrow(0, *rows[name]).copy_(tensor)

    plan = Case(lambda: Bag({"qkv": (16, 6)}), load, {"v": (4, 6), "q": (8, 6), "k": (4, 6)}).check()
    assert [(p.source.tensor, p.dest.offset) for p in plan.placements] == [("q", 0), ("k", 48), ("v", 72)]
    assert plan.uncovered == {}


def test_one_fused_checkpoint_tensor_is_split_over_two_parameters() -> None:
    def load(model: nn.Module, name: str, tensor: Tensor) -> None:
        for part, rows in zip(("gate", "up"), tensor.chunk(2), strict=True):
            model.get_parameter(part).data.copy_(rows)

    plan = Case(lambda: Bag({"gate": (5, 3), "up": (5, 3)}), load, {"gate_up": (10, 3)}).check()
    assert [(p.source.offset, p.dest.tensor) for p in plan.placements] == [(0, "gate"), (15, "up")]


def test_stacked_gate_up_by_setitem() -> None:
    def load(model: nn.Module, name: str, tensor: Tensor) -> None:
        half = {"gate": slice(0, 5), "up": slice(5, 10)}[name]
        model.get_parameter("gate_up").data[half] = tensor

    Case(lambda: Bag({"gate_up": (10, 3)}), load, {"gate": (5, 3), "up": (5, 3)}).check()


@pytest.mark.parametrize("budget_bytes", [1 << 20, 1])
def test_moe_experts_are_stacked(budget_bytes: int) -> None:
    def load(model: nn.Module, name: str, tensor: Tensor) -> None:
        expert, kind = name.split(".")
        if kind == "down":
            model.get_parameter("w2").data[int(expert)].copy_(tensor)
        else:
            model.get_parameter("w13").data[int(expert)].narrow(0, 4 * (kind == "up"), 4).copy_(tensor)

    tensors = {f"{e}.{kind}": (4, 6) for e in range(3) for kind in ("gate", "up")}
    tensors |= {f"{e}.down": (6, 4) for e in range(3)}
    case = Case(lambda: Bag({"w13": (3, 8, 6), "w2": (3, 6, 4)}), load, tensors)
    with in_portions(budget_bytes=budget_bytes):
        plan = case.check()
    assert plan.uncovered == {}
    assert len(plan.placements) == 9


@pytest.mark.parametrize(("dim", "shape"), [(0, (4, 6)), (1, (8, 3))])
def test_a_tensor_parallel_rank_needs_only_its_slice(dim: int, shape: tuple[int, int]) -> None:
    def load(model: nn.Module, name: str, tensor: Tensor) -> None:
        size = model.get_parameter("w").shape[dim]
        model.get_parameter("w").data.copy_(torch.narrow(tensor, dim, size, size))

    plan = Case(lambda: Bag({"w": shape}), load, {"w": (8, 6)}).check()
    assert plan.needs() == {"w": Box(0, tuple(n if d == dim else 0 for d, n in enumerate(shape)), shape)}


def test_transposed_conv1d_is_one_strided_copy() -> None:
    case = Case(lambda: Bag({"w": (6, 4)}), lambda m, n, t: m.get_parameter(n).data.copy_(t.t()), {"w": (4, 6)})
    with in_portions(step_bytes=16):
        plan = case.check()
    assert len(plan.placements) == 1
    assert plan.needs() == {"w": Box(0, (0, 0), (4, 6))}


@pytest.mark.parametrize(
    "rearrange",
    [
        lambda t: t.t().contiguous(),
        lambda t: t.t().clone()[1:5, :3],
        lambda t: t.contiguous().to(F32).clone().t()[1:5, :3],
        lambda t: torch.empty(6, 4, device=t.device).copy_(t.t()),
        lambda t: t.view(2, 2, 6).transpose(0, 1).reshape(4, 6).t()[:4, :3],
    ],
)
def test_plain_rearranged_copies_are_followed(rearrange: Callable[[Tensor], Tensor]) -> None:
    shape = tuple(rearrange(torch.empty(4, 6)).shape)
    case = Case(lambda: Bag({"w": shape}), lambda m, n, t: m.get_parameter(n).data.copy_(rearrange(t)), {"w": (4, 6)})
    plan = case.trace()
    if plan.refused:  # allowed, but then with the reason
        assert plan.refused["w"].startswith("computed by aten.clone")
    else:
        case.check()


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_tensors_that_the_loader_joins_are_copies_side_by_side(dim: int) -> None:
    held: dict[str, Tensor] = {}

    def load(model: nn.Module, name: str, tensor: Tensor) -> None:
        held[name] = tensor
        if held.keys() == {"a", "b"}:
            model.get_parameter("ab").data.copy_(torch.cat([held.pop("a"), held.pop("b").t().contiguous()], dim))

    shapes = {"a": (2, 3), "b": (3, 4)} if dim == 0 else {"a": (2, 3), "b": (5, 2)}
    whole = (6, 3) if dim == 0 else (2, 8)
    plan = Case(lambda: Bag({"ab": whole}), load, shapes).check()
    assert plan.uncovered == {} and plan.unused == ()


def test_interleaved_rows_are_read_back_as_boxes() -> None:
    def load(model: nn.Module, name: str, tensor: Tensor) -> None:
        model.get_parameter("gate").data.copy_(tensor[:, ::2])
        model.get_parameter("up").data.copy_(tensor[:, 1::2])

    plan = Case(lambda: Bag({"gate": (2, 3, 5), "up": (2, 3, 5)}), load, {"gate_up": (2, 6, 5)}).check()
    assert plan.uncovered == {}
    assert plan.needs() == {"gate_up": Box(0, (0, 0, 0), (2, 6, 5))}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = Bag({"weight": (5, 4)})
        self.lm_head = Bag({})
        self.lm_head.weight = self.embed.weight


def test_tied_head_is_one_destination_and_its_checkpoint_tensor_unused() -> None:
    def load(model: nn.Module, name: str, tensor: Tensor) -> None:
        if not name.startswith("lm_head"):
            default(model, name, tensor)

    with in_portions(budget_bytes=1):
        plan = Case(Tied, load, {"lm_head.weight": (5, 4), "embed.weight": (5, 4)}).check()
    assert [p.dest.tensor for p in plan.placements] == ["embed.weight"]
    assert plan.unused == ("lm_head.weight",)
    assert plan.uncovered == {}


@pytest.mark.parametrize("names", list(itertools.permutations(["embed.weight", "lm_head.weight"])))
def test_a_loader_that_writes_a_tied_weight_once_is_proven_in_batches_of_any_size(names: tuple[str, str]) -> None:
    """By itself it writes either name; after the first of them it passes over the other."""
    skeleton = Case(Tied, default, {}).skeleton()
    tensors = [(name, (5, 4), F32) for name in names]

    def load(weights: Iterable[tuple[str, Tensor]]) -> None:
        written = set()
        for name, tensor in weights:
            if (parameter := skeleton.get_parameter(name)) not in written:
                written.add(parameter)
                parameter.data.copy_(tensor)

    plan = trace_plan(skeleton, load, tensors)
    assert plan.unused == names[1:]
    with in_portions(budget_bytes=1):
        assert prove_plan(plan, skeleton, load, tensors, 2 * 5 * 4 * 4 + 128, {"lm_head.weight": "embed.weight"}) == ""
        assert prove_plan(plan, skeleton, load, tensors) == (
            "embed.weight: the loader writes to it from tensors that by the plan don't reach it"
        ), "two tensors may differ"


def test_tied_head_that_is_loaded_too_is_reported_as_doubled() -> None:
    with in_portions(step_bytes=8):
        plan = Case(Tied, default, {"embed.weight": (5, 4), "lm_head.weight": (5, 4)}).check()
    assert plan.doubled == ("embed.weight",)
    assert [p.source.tensor for p in plan.placements] == ["embed.weight", "lm_head.weight"]


def test_trailing_rows_that_nobody_writes_are_reported_exactly() -> None:
    def load(model: nn.Module, name: str, tensor: Tensor) -> None:
        model.get_parameter(name).data[: len(tensor)].copy_(tensor)

    plan = Case(lambda: Bag({"e": (8, 4), "w": (2, 2)}), load, {"e": (5, 4), "w": (2, 2)}).check()
    assert plan.uncovered == {"e": 12}


def test_a_hole_in_the_middle_is_reported_exactly() -> None:
    def load(model: nn.Module, name: str, tensor: Tensor) -> None:
        model.get_parameter("w").data[:2].copy_(tensor[:2])
        model.get_parameter("w").data[3:].copy_(tensor[3:])

    plan = Case(lambda: Bag({"w": (5, 4), "never": (3,)}), load, {"w": (5, 4)}).check()
    assert plan.uncovered == {"w": 4, "never": 3}


def test_vocabulary_padding_that_the_loader_zeroes_is_a_fill() -> None:
    def load(model: nn.Module, name: str, tensor: Tensor) -> None:
        weight = model.get_parameter(name)
        weight[: len(tensor)].data.copy_(tensor)
        weight[len(tensor) :].data.fill_(0)

    plan = Case(lambda: Bag({"e": (8, 4), "even": (4, 4)}), load, {"e": (5, 4), "even": (4, 4)}).check()
    assert plan.uncovered == {}
    assert [(fill.dest.tensor, fill.dest.offset, fill.dest.sizes) for fill in plan.fills] == [("e", 20, (12,))]


def test_constants_by_setitem_and_zero_before_the_copy_are_fills() -> None:
    def load(model: nn.Module, name: str, tensor: Tensor) -> None:
        data = model.get_parameter(name).data
        data.zero_()
        data[6:] = 3
        data[:5] = tensor

    plan = Case(lambda: Bag({"e": (8, 4)}), load, {"e": (5, 4)}).check()
    assert plan.uncovered == {}
    assert plan.doubled == ()


def test_scalars_and_one_element_tensors() -> None:
    def load(model: nn.Module, name: str, tensor: Tensor) -> None:
        target = dict(model.named_parameters()) | dict(model.named_buffers())
        target[name].data.copy_(tensor.view(target[name].shape))

    case = Case(
        lambda: Bag({"one": (1,), "zero_d": ()}, {"scale": ()}),
        load,
        {"one": (), "zero_d": (1,), "scale": ()},
    )
    assert case.check().needs() == {"one": Box(0, (), ()), "zero_d": Box(0, (0,), (1,)), "scale": Box(0, (), ())}


def fill_in(model: nn.Module, name: str, tensor: Tensor) -> None:
    """As loaders do where parameter and tensor are one number in any shape."""
    {**dict(model.named_parameters()), **dict(model.named_buffers())}[name].data.fill_(tensor.item())


@pytest.mark.parametrize("dtype", [F32, BF16, torch.int64])
def test_a_number_that_the_loader_reads_and_fills_in_is_a_copy(dtype: torch.dtype) -> None:
    model = {f"p{i}": ((), dtype) for i in range(20)} | {"wide": ((3,), dtype)}
    tensors = dict.fromkeys([*model, "b"], (1,))
    case = Case(lambda: Bag(model, {"b": ((1,), dtype)}), fill_in, tensors, **dict.fromkeys(tensors, dtype))
    plan = case.check()
    assert {(p.source.tensor, p.dest.tensor, p.dest.numel) for p in plan.placements} == {
        (name, name, 3 if name == "wide" else 1) for name in tensors
    }
    assert plan.fills == ()
    assert plan.uncovered == {}


def test_the_only_number_of_a_ranks_part_that_the_loader_fills_in_is_a_copy() -> None:
    """As the decay of the only head that a rank has."""
    case = Case(lambda: Bag({"a": (1,)}), lambda m, n, t: fill_in(m, n, t.narrow(0, 1, 1)), {"a": (2,)})
    plan = case.check()
    assert [(p.source.tensor, p.source.offset, p.dest.tensor) for p in plan.placements] == [("a", 1, "a")]
    assert plan.needs()["a"].offsets == (1,)


def test_a_number_of_another_dtype_is_refused_where_it_is_filled_in() -> None:
    plan = Case(lambda: Bag({"s": ()}), fill_in, {"s": (1,)}, s=BF16).trace()
    assert plan.dtype_conflicts == {"s": "the trainer sends torch.bfloat16, the engine holds torch.float32 in s"}


@pytest.mark.parametrize(
    "load",
    [
        lambda m, n, t: m.s.data.copy_(t.view(())) if t.item() < 1 else None,
        lambda m, n, t: m.s.data.fill_(t.item() if t.item() < 1 else 1),
        lambda m, n, t: (fill_in(m, n, t), setattr(m, "scale", t.item())),
        lambda m, n, t: (v := t.item(), m.s.data.fill_(v), setattr(m, "scale", v)),
        lambda m, n, t: (v := t.item(), m.s.data.fill_(v), setattr(m, "scale", 1 / v)),
    ],
)
def test_a_number_that_the_loader_reads_for_something_else_refuses_the_plan(load: Callable[..., object]) -> None:
    plan = Case(lambda: Bag({"s": ()}), load, {"s": (1,)}).trace()
    assert plan.refusal == "aten._local_scalar_dense.default reads the values of s"


@pytest.mark.parametrize("compute", [lambda v: 2 * v, abs, lambda v: max(v, 0.0), lambda v: min(v, 0.0)])
def test_the_proof_finds_what_a_loader_makes_of_a_number(compute: Callable[[float], float]) -> None:
    case = Case(lambda: Bag({"s": ()}), lambda m, n, t: m.s.data.fill_(compute(t.item())), {"s": (1,)})
    plan = case.trace()
    assert plan.refusal is not None or plan.refused or case.prove(plan)


def test_empty_tensors_need_nothing() -> None:
    plan = Case(lambda: Bag({"w": (0, 4), "b": (2,)}), default, {"w": (0, 4), "b": (2,)}).check()
    assert [p.dest.tensor for p in plan.placements] == ["b"]
    assert plan.unused == ()


def test_a_broadcasting_copy_reads_its_source_many_times() -> None:
    case = Case(lambda: Bag({"w": (3, 4)}), lambda m, n, t: m.get_parameter("w").data.copy_(t), {"row": (4,)})
    with in_portions(step_bytes=16):
        plan = case.check()
    assert plan.needs() == {"row": Box(0, (0,), (4,))}


def test_columns_of_a_transposed_parameter() -> None:
    def make() -> nn.Module:
        model = nn.Module()
        model.w = nn.Parameter(torch.empty(6, 4).t(), requires_grad=False)
        return model

    def load(model: nn.Module, name: str, tensor: Tensor) -> None:
        first = int(name) * 3
        model.get_parameter("w").data[:, first : first + 3] = tensor

    assert Case(make, load, {"0": (4, 3), "1": (4, 3)}).check().uncovered == {}


def test_two_parameters_in_one_storage_are_covered_each_for_itself() -> None:
    def make() -> nn.Module:
        model = nn.Module()
        whole = torch.empty(6, 4)
        model.a = nn.Parameter(whole[:2], requires_grad=False)
        model.b = nn.Parameter(whole[2:], requires_grad=False)
        return model

    def load(model: nn.Module, name: str, tensor: Tensor) -> None:
        model.get_parameter(name).data[: len(tensor)] = tensor

    plan = Case(make, load, {"a": (2, 4), "b": (3, 4)}).check()
    assert plan.uncovered == {"b": 4}
    assert plan.extents == {"a": 24}


def test_order_of_names_does_not_matter() -> None:
    def load(model: nn.Module, name: str, tensor: Tensor) -> None:
        model.get_parameter("w").data.narrow(1, 2 * int(name), 2).copy_(tensor)

    tensors = {str(i): (3, 2) for i in range(4)}
    plans = [
        Case(lambda: Bag({"w": (3, 8)}), load, dict(order)).check()
        for order in (
            tensors.items(),
            reversed(tensors.items()),
            sorted(tensors.items(), key=lambda i: int(i[0]) % 2),
        )
    ]
    assert plans[0] == plans[1] == plans[2]


def test_odd_regions_are_counted_by_element() -> None:
    def load(model: nn.Module, name: str, tensor: Tensor) -> None:
        model.get_parameter("w").data.view(-1)[3:18:3].copy_(tensor)

    plan = Case(lambda: Bag({"w": (5, 4)}), load, {"w": (5,)}).check()
    assert plan.uncovered == {"w": 15}


# -- idioms that are refused


def refused(
    load: Callable[..., object], *, tensors: dict[str, Any] | None = None, **over: torch.dtype
) -> PlacementPlan:
    """The plan of a model with parameters `w` (4, 3) and `other` (2), whose loader does `load` for `w`."""

    def both(model: nn.Module, name: str, tensor: Tensor) -> None:
        if name == "other":
            default(model, name, tensor)
        else:
            load(model.get_parameter("w"), tensor)

    case = Case(lambda: Bag({"w": (4, 3), "other": (2,)}), both, (tensors or {"w": (4, 3)}) | {"other": (2,)}, **over)
    plan = case.trace()
    if plan.refusal is None:
        assert list(plan.refused) == ["w"]
        assert [p.dest.tensor for p in plan.placements] == ["other"]
        assert plan.uncovered == {}
        assert plan.unused == ()
        assert case.prove(plan) == ""
    else:
        assert (plan.placements, plan.refused) == ((), {})
        assert plan.refusal in case.prove(plan)
    return plan


@pytest.mark.parametrize(
    ("load", "reason"),
    [
        (lambda p, t: p.data.copy_(-torch.exp(t)), "computed by aten.neg"),
        (lambda p, t: p.data.copy_(t.to(BF16).to(F32)), "computed by aten._to_copy"),
        (lambda p, t: p.data.copy_(torch.cat([torch.exp(t[:2]), t[2:]])), "computed by aten.cat"),
        (lambda p, t: p.data.copy_(torch.cat([t, t])[2:6]), "computed by aten.cat"),
        (lambda p, t: p.data.copy_(torch.cat([t[:2], t[2:]]).mul_(2)), "computed by aten.mul_"),
        (lambda p, t: p.data.copy_(t.clone().mul_(2)), "computed by aten.mul_"),
        (lambda p, t: p.data.add_(t), "written by aten.add_"),
        (lambda p, t: torch.exp(t, out=p.data), "written by aten.exp.out"),
        (
            lambda p, t: p.data.index_put_((torch.arange(4, device=t.device),), t),
            "written by aten.index_put_",
        ),
        (
            lambda p, t: p.data.scatter_(0, torch.zeros_like(t, dtype=torch.int64), t),
            "written by aten.scatter_",
        ),
        (lambda p, t: p.data.fill_(t[0, 0]), "written by aten.fill_"),
        (lambda p, t: torch._foreach_copy_([p.data], [t]), "written by aten._foreach_copy_"),
        (lambda p, t: (p.data.copy_(t), p.data.mul_(2)), "written by aten.mul_"),
        (lambda p, t: (p.data.copy_(t), p.data[1:].fill_(0)), "filled with a constant after"),
        (lambda p, t: (p.data.copy_(t), p.data.copy_(-torch.exp(p.data))), "computed from what its module holds"),
        (lambda p, t: (t[0].zero_(), p.data.copy_(t)), "writes to the checkpoint tensor w"),
        (lambda p, t: (p.data.copy_(t), t[0].zero_()), "writes to the checkpoint tensor w"),
        (lambda p, t: p.data.view(torch.int32).copy_(t.view(torch.int32)), "view of another dtype"),
        (lambda p, t: setattr(p, "data", t), "is replaced by the loader"),
        (lambda p, t: setattr(p, "data", torch.exp(t)), "is replaced by the loader"),
        (lambda p, t: p.data.set_(t), "written by aten.set_"),
    ],
)
def test_what_is_more_than_a_copy_refuses_its_destination(load: Callable[..., object], reason: str) -> None:
    plan = refused(load)
    assert reason in plan.refused["w"]
    if "set_" not in reason:
        assert plan.refused_sources == {"w": ("w",)}


def test_a_cast_is_refused_and_named() -> None:
    plan = refused(lambda p, t: p.data.copy_(t), w=BF16)
    assert plan.refused["w"] == "cast from torch.bfloat16 to torch.float32"
    assert plan.dtype_conflicts == {"w": "the trainer sends torch.bfloat16, the engine holds torch.float32 in w"}


def test_what_the_loader_computes_of_another_parameter_of_the_module_is_computed_of_its_tensors() -> None:
    def load(model: nn.Module, name: str, tensor: Tensor) -> None:
        default(model, name, tensor)
        if name == "norm.w":
            model.norm.plus.copy_(model.norm.w.data).add_(1)

    def make() -> nn.Module:
        return nn.ModuleDict({"norm": Bag({"w": (3,)}, {"plus": (3,)}), "other": Bag({"w": (3,)})})

    case = Case(make, load, {"norm.w": (3,), "other.w": (3,)})
    plan = case.trace()
    assert plan.refused_sources == {"norm.w": ("norm.w",), "norm.plus": ("norm.w",)}
    assert [p.dest.tensor for p in plan.placements] == ["other.w"]
    assert (plan.refusal, case.prove(plan)) == (None, "")
    in_bfloat16 = Case(make, load, {"norm.w": (3,), "other.w": (3,)}, **{"norm.w": BF16})
    assert set(in_bfloat16.trace().dtype_conflicts) == {"norm.w"}, "the norm itself would be cast"


def test_a_cast_is_a_part_of_what_the_loader_computes_in_place() -> None:
    plan = refused(lambda p, t: (p.data.copy_(t), p.data.copy_(-torch.exp(p.data))), w=BF16)
    assert plan.refusal is None
    assert plan.refused_sources == {"w": ("w",)}
    assert plan.dtype_conflicts == {}


def swallow(do: Callable[[], object]) -> None:
    try:
        do()
    except Exception:  # noqa: BLE001 - as careless as the loaders that do this
        return


@pytest.mark.parametrize(
    ("load", "reason"),
    [
        (lambda p, t: p.data.copy_(t) if t.sum() > 0 else None, "reads the values of w"),
        (lambda p, t: p.data.copy_(torch.tensor(t.tolist())), "no data"),
        (lambda p, t: p.data.copy_(torch.from_numpy(t.numpy())), "numpy"),
        (lambda p, t: (swallow(lambda: t[0, 0].item()), p.data.copy_(t)), "reads the values of w"),
        (lambda p, t: torch.equal(p.data, t), "reads the values of the engine's own w, w"),
        (lambda p, t: p.data.copy_(t.t()), "must match"),
        (lambda p, t: (_ for _ in ()).throw(KeyError("no such weight")), "no such weight"),
        (lambda p, t: HIDDEN.copy_(t), "neither a parameter nor a buffer"),
        (lambda p, t: torch.exp(t, out=HIDDEN), "neither a parameter nor a buffer"),
        (lambda p, t: p.data[:2].copy_(p.data[2:]), "written from another parameter or buffer"),
    ],
)
def test_what_cannot_be_attributed_refuses_the_plan(load: Callable[..., object], reason: str) -> None:
    assert reason in str(refused(load).refusal)


@pytest.mark.parametrize("write", [Tensor.copy_, lambda b, t: b.fill_(0), lambda b, t: b.mul_(2), Tensor.add_])
def test_real_memory_in_a_skeleton_is_never_written(write: Callable[[Tensor, Tensor], object]) -> None:
    shared = torch.ones(3)

    def make() -> nn.Module:
        model = nn.Module()
        model.register_buffer("shared", shared)
        model.w = nn.Parameter(torch.empty(3), requires_grad=False)
        return model

    def load(model: nn.Module, name: str, tensor: Tensor) -> None:
        default(model, name, tensor)
        write(model.shared, tensor)

    case = Case(make, load, {"w": (3,)})
    plan = case.trace()
    assert list(plan.refused) == ["shared"]
    assert case.prove(plan) == ""
    assert torch.equal(shared, torch.ones(3))


HIDDEN = torch.empty(4, 3, device="meta")


def test_a_checkpoint_tensor_that_a_module_keeps_refuses_the_plan() -> None:
    def load(model: nn.Module, name: str, tensor: Tensor) -> None:
        default(model, name, tensor)
        model.kept = [tensor]

    plan = Case(lambda: Bag({"w": (2,)}), load, {"w": (2,)}).trace()
    assert plan.refusal == "the model keeps a tensor of the load in its attribute kept"


def test_a_parameter_that_the_loader_makes_is_refused() -> None:
    def load(model: nn.Module, name: str, tensor: Tensor) -> None:
        model.register_parameter("late", nn.Parameter(tensor, requires_grad=False))

    plan = Case(lambda: Bag({"w": (2,)}), load, {"x": (2,)}).trace()
    assert plan.refused == {"late": "late is made by the loader, not written in place"}
    assert plan.refused_sources == {"late": ("x",)}


def test_a_name_twice_is_the_callers_error() -> None:
    model = Bag({"w": (2,)})
    with pytest.raises(ValueError, match="twice"):
        trace_plan(model, lambda weights: None, [("w", (2,), F32), ("w", (2,), F32)])


# -- replay


def test_replay_stops_for_the_brake_between_pieces() -> None:
    case = Case(lambda: Bag({"w": (100, 10), "v": (7,)}), default, {"w": (100, 10), "v": (7,)})
    plan, model = case.trace(), case.make()
    sources, stops = case.sources(), []
    with in_portions(step_bytes=1000):
        Replay(Copies(plan.placements), sources, storage_views(model)).run(between=lambda: stops.append("stop"))
    assert sum(placement.nbytes for placement in plan.placements) == 4028
    assert len(stops) == 4, "after 28 bytes, and after each 1000 but the last"
    assert torch.equal(model.get_parameter("w"), sources["w"])
    assert torch.equal(model.get_parameter("v"), sources["v"])


def test_replay_writes_inference_tensors() -> None:
    with torch.inference_mode():
        model = Bag({"w": (4,)})
    case = Case(lambda: Bag({"w": (4,)}), default, {"w": (4,)})
    sources = case.sources()
    Replay(Copies(case.trace().placements), sources, storage_views(model)).run()
    assert torch.equal(model.get_parameter("w"), sources["w"])


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda s, d: s.pop("w"), "source w is missing"),
        (lambda s, d: d.pop("w"), "destination w is missing"),
        (lambda s, d: s.update(w=s["w"].to(BF16)), "source w is torch.bfloat16"),
        (lambda s, d: s.update(w=torch.empty(4, 3).t()), "source w is not contiguous"),
        (lambda s, d: s.update(w=torch.empty(2, 4)), "source w has 8 elements; the plan needs 12"),
        (lambda s, d: d.update(w=d["w"][:5]), "destination w has 5 elements"),
        (lambda s, d: s.update(w=s["w"].to("meta")), "source w is on meta"),
    ],
)
def test_replay_refuses_what_does_not_fit(spoil: Callable[..., object], reason: str) -> None:
    case = Case(lambda: Bag({"w": (3, 4)}), default, {"w": (3, 4)})
    plan, sources, destinations = case.trace(), case.sources(), storage_views(case.make())
    spoil(sources, destinations)
    with pytest.raises(ValueError, match=reason):
        Replay(Copies(plan.placements), sources, destinations)


# -- proof


@pytest.mark.parametrize(("part_bytes", "cores"), [(proof.PART_BYTES, 2), (1, 8), (5, 16)])
def test_the_proof_finds_a_wrong_plan(part_bytes: int, cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On any number of threads, each of which takes some bytes at once."""
    monkeypatch.setattr(proof, "PART_BYTES", part_bytes)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))

    def load(model: nn.Module, name: str, tensor: Tensor) -> None:
        model.get_parameter("w").data.narrow(0, 2 * (name == "b"), 2).copy_(tensor)

    def swapped(model: nn.Module, name: str, tensor: Tensor) -> None:
        load(model, {"a": "b", "b": "a"}[name], tensor)

    tensors = {"a": (2, 3), "b": (2, 3)}
    case = Case(lambda: Bag({"w": (4, 3)}), load, tensors)
    wrong = Case(lambda: Bag({"w": (4, 3)}), swapped, tensors).trace()
    assert case.prove(wrong) == "w: the replay differs from the real load"
    assert case.prove(case.trace()) == ""


@pytest.mark.parametrize("budget_bytes", [1 << 20, 1])
def test_the_proof_finds_writes_that_the_trace_did_not_see(budget_bytes: int) -> None:
    def load(model: nn.Module, name: str, tensor: Tensor) -> None:
        model.get_parameter(name).data.copy_(tensor)
        if not tensor.is_meta and name == "a":
            model.get_parameter("b").data[0] = tensor[0]

    case = Case(lambda: Bag({"a": (2,), "b": (2,)}), load, {"b": (2,), "a": (2,)})
    with in_portions(budget_bytes=budget_bytes):
        assert [line.partition(":")[0] for line in case.prove(case.trace()).split("; ")] == ["b"]


def test_the_proof_finds_a_source_that_only_a_real_load_changes() -> None:
    def load(model: nn.Module, name: str, tensor: Tensor) -> None:
        if not tensor.is_meta:
            tensor[1:].zero_()
        default(model, name, tensor)

    case = Case(lambda: Bag({"w": (5,)}), load, {"w": (5,)})
    assert case.prove(case.trace()) == "w: the loader changes the checkpoint tensor w"


def test_the_proof_finds_a_loader_that_is_only_real_off_meta() -> None:
    def load(model: nn.Module, name: str, tensor: Tensor) -> None:
        if tensor.is_meta:
            default(model, name, tensor)
        else:
            model.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    case = Case(lambda: Bag({"w": (5,)}), load, {"w": (5,)})
    assert case.prove(case.trace()) == "w: the loader replaces it instead of writing to it"


def test_copies_in_other_threads_are_not_seen_and_show_as_uncovered() -> None:
    def load(model: nn.Module, name: str, tensor: Tensor) -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(default, model, name, tensor).result()

    plan = Case(lambda: Bag({"w": (5,)}), load, {"w": (5,)}).trace()
    assert (plan.placements, plan.uncovered, plan.unused) == ((), {"w": 5}, ("w",))


@pytest.mark.parametrize("names", [("w", "s"), ("w",)])
def test_the_proof_finds_what_another_thread_writes_beside_the_plan(names: tuple[str, ...]) -> None:
    def load(model: nn.Module, name: str, tensor: Tensor) -> None:
        if name == "w":
            default(model, "w", tensor)
        if name == names[-1]:
            with ThreadPoolExecutor(1) as pool:
                pool.submit(default, model, "s", tensor).result()

    case = Case(lambda: Bag({"w": (5,), "s": (5,)}), load, dict.fromkeys(names, (5,)))
    plan = case.trace()
    assert (list(plan.extents), plan.uncovered) == (["w"], {"s": 5})
    assert case.prove(plan) == "s: the replay differs from the real load"


def test_a_loader_that_wants_every_name_is_proven_in_one_go() -> None:
    case = Case(lambda: Bag({"a": (2,), "b": (2,)}), default, {"a": (2,), "b": (2,)})

    def strict(model: nn.Module) -> Callable[[Iterable[tuple[str, Tensor]]], object]:
        def load(weights: Iterable[tuple[str, Tensor]]) -> None:
            given = dict(weights)
            assert given.keys() == {"a", "b"}, "missing weights"
            case.loader(model)(given.items())

        return load

    skeleton = case.skeleton()
    plan = trace_plan(skeleton, strict(skeleton), case.tensors)
    with in_portions(budget_bytes=1):
        assert prove_plan(plan, skeleton, strict(skeleton), case.tensors) == ""


def test_a_loader_that_raises_on_real_tensors_fails_the_proof() -> None:
    def load(model: nn.Module, name: str, tensor: Tensor) -> None:
        assert tensor.is_meta, "only meta"
        default(model, name, tensor)

    case = Case(lambda: Bag({"w": (5,)}), load, {"w": (5,)})
    assert case.prove(case.trace()).startswith("w: the real load raised AssertionError: only meta")


def test_the_skeleton_is_on_meta_again_with_its_own_objects_after_a_proof() -> None:
    case = Case(Tied, default, {"embed.weight": (5, 4)})
    skeleton = case.skeleton()
    before = skeleton.get_parameter("embed.weight")
    before.weight_loader = "kept"
    plan = trace_plan(skeleton, case.loader(skeleton), case.tensors)
    assert prove_plan(plan, skeleton, case.loader(skeleton), case.tensors) == ""
    assert skeleton.get_parameter("embed.weight") is skeleton.get_parameter("lm_head.weight") is before
    assert before.is_meta


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.float8_e4m3fn, torch.int64, torch.complex64, BF16])
def test_the_proof_takes_any_dtype_and_any_bits(dtype: torch.dtype) -> None:
    case = Case(lambda: Bag({}, {"w": ((3, 5), dtype)}), lambda m, n, t: m.w.copy_(t), {"w": (3, 5)}, w=dtype)
    assert case.prove(case.trace()) == ""


# -- random splits


@st.composite
def splits(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[tuple[int, ...], tuple[int, ...]]]]:
    """A shape and boxes that tile it."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    boxes = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 5))):
        at, dim = draw(st.integers(0, len(boxes) - 1)), draw(st.integers(0, len(shape) - 1))
        start, size = boxes.pop(at)
        where = draw(st.integers(0, size[dim]))
        for first, count in ((0, where), (where, size[dim] - where)):
            if count:
                offsets = tuple(o + first * (d == dim) for d, o in enumerate(start))
                boxes.append((offsets, tuple(count if d == dim else n for d, n in enumerate(size))))
    return shape, boxes


@settings(max_examples=60, deadline=None)
@given(splits(), st.randoms(), st.data())
def test_any_tiling_covers_exactly_and_comes_back(split: Any, random: Any, data: st.DataObject) -> None:
    shape, boxes = split
    order = list(range(len(shape)))
    random.shuffle(order)
    inverse = [order.index(d) for d in range(len(shape))]
    dropped = data.draw(st.integers(-1, len(boxes) - 1))
    kept = {str(i): box for i, box in enumerate(boxes) if i != dropped}

    def load(model: nn.Module, name: str, tensor: Tensor) -> None:
        cut(model.get_parameter("w").data, *kept[name]).copy_(tensor.permute(order))

    tensors = {name: tuple(size[inverse[d]] for d in range(len(shape))) for name, (_, size) in kept.items()}
    with in_portions(step_bytes=16):
        plan = Case(lambda: Bag({"w": shape}), load, tensors).check()
    missing = math.prod(boxes[dropped][1]) if dropped >= 0 else 0
    assert plan.uncovered == ({"w": missing} if missing else {})
    assert plan.doubled == ()


@settings(max_examples=60, deadline=None)
@given(splits(), st.data())
def test_any_slices_of_a_source_are_boxed_and_read_back(split: Any, data: st.DataObject) -> None:
    shape, boxes = split
    steps = [tuple(data.draw(st.integers(1, 3)) for _ in shape) for _ in boxes]

    def view(tensor: Tensor, i: int) -> Tensor:
        return cut(tensor, *boxes[i])[tuple(slice(None, None, step) for step in steps[i])]

    def load(model: nn.Module, name: str, tensor: Tensor) -> None:
        for i in range(len(boxes)):
            part = view(tensor, i)
            model.get_parameter(f"p{i}").data.copy_(part.reshape(-1) if part.is_contiguous() else part.flatten())

    sizes = {f"p{i}": (view(torch.empty(shape), i).numel(),) for i in range(len(boxes))}
    case = Case(lambda: Bag(sizes), load, {"w": shape})
    plan = case.trace()
    assert plan.refusal is None
    if not plan.refused:
        case.check()


def test_placements_are_nothing_that_the_garbage_collector_looks_through() -> None:
    """They live as long as the engine does, one for each tensor: looking through them would hold up its own thread."""
    case = Case(lambda: Bag({"w": (3, 4)}), default, {"w": (3, 4)})
    (placement,) = case.trace().placements
    gc.collect()  # which finds out that a tuple holds numbers only
    kept = [
        placement,
        placement.source,
        placement.dest,
        placement.shape,
        placement.source.sizes,
        placement.dest.strides,
    ]
    assert not any(map(gc.is_tracked, kept))
