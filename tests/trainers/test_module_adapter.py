"""Sources of whole tensors: what they call the tensors, what they refuse, and how data-parallel ranks divide
the work."""

from __future__ import annotations

import gc
import subprocess
import sys
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim.swa_utils import AveragedModel

from inference_plugin.wire.cover import check_exact_cover
from inference_plugin.wire.errors import ArgumentError, ManifestMismatch
from inference_plugin.wire.manifest import Manifest, TensorSpec
from inference_plugin.wire.tensors import box_view
from trainer_adapters import DtypeRules, ExportAdapter, LocalSlice, ModuleAdapter, WeightSource
from trainer_adapters.sources.chosen import source_for
from trainer_adapters.sources.sharing import MIN_CUT_BYTES, share_boxes


def received(*sources: WeightSource) -> dict[str, torch.Tensor]:
    """What arrives when these sources, one a rank, write into one segment; checks that they agree and cover
    it."""
    manifest = sources[0].manifest()
    segment = torch.zeros(manifest.layout.nbytes, dtype=torch.uint8)
    boxes = []
    for rank, source in enumerate(sources):
        assert source.manifest() == manifest
        for piece in source.slices():
            assert tuple(piece.tensor.shape) == piece.box.sizes
            assert not piece.tensor.requires_grad
            box_view(segment, manifest, piece.box).copy_(piece.tensor)
            boxes.append((piece.box, f"rank {rank}"))
    check_exact_cover(manifest, boxes)
    return {spec.name: box_view(segment, manifest, manifest.whole(i)) for i, spec in enumerate(manifest.tensors)}


def names(source: WeightSource) -> list[str]:
    return [spec.name for spec in source.manifest().tensors]


class Net(nn.Module):
    """Two layers, one of them frozen, and one buffer of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.second = nn.Linear(5, 2, bias=False).requires_grad_(False)
        self.register_buffer("kept", torch.arange(4))
        self.register_buffer("passing", torch.ones(2), persistent=False)
        self.register_buffer("absent", None)


# --- the contract ------------------------------------------------------------------------------------------


def test_an_incomplete_source_cannot_be_made() -> None:
    class Half(WeightSource):
        def manifest(self) -> Manifest:
            return Manifest(())

    with pytest.raises(TypeError, match="slices"):
        Half()  # type: ignore[abstract]


def test_importing_the_package_loads_no_torch_no_engine_and_no_ray() -> None:
    check = (
        "import sys, trainer_adapters as t; assert 'ModuleAdapter' in dir(t);"
        "print([m for m in ('torch', 'ray', 'vllm', 'sglang', 'transformers') if m in sys.modules]);"
        "from trainer_adapters import ModuleAdapter, FSDPAdapter, WeightSource;"
        "print([m for m in ('ray', 'vllm', 'sglang', 'transformers') if m in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True, timeout=600)
    assert ran.stdout.split("\n")[:2] == ["[]", "[]"]
    with pytest.raises(ImportError, match="Nonesuch"):
        from trainer_adapters import Nonesuch  # noqa: F401


# --- modules -----------------------------------------------------------------------------------------------


def test_a_module_gives_parameters_frozen_ones_and_persistent_buffers_like_its_state_dict() -> None:
    net = Net()
    arrived = received(ModuleAdapter(net))
    state = net.state_dict()
    assert list(arrived) == list(state)
    for name, tensor in state.items():
        assert arrived[name].dtype == tensor.dtype
        assert torch.equal(arrived[name], tensor)


@pytest.mark.parametrize(("kind", "extra"), [("all", {"kept", "passing"}), ("none", set())])
def test_buffers_can_be_all_or_none(kind: str, extra: set[str]) -> None:
    weights = {"first.weight", "first.bias", "second.weight"}
    assert set(names(ModuleAdapter(Net(), include_buffers=kind))) == weights | extra


def test_slices_are_the_parameters_own_memory() -> None:
    net = Net()
    pieces = list(ModuleAdapter(net).slices())
    assert {piece.tensor.data_ptr() for piece in pieces} == {t.data_ptr() for t in net.state_dict().values()}


def tied_llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 20, "intermediate_size": 26, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=51, num_key_value_heads=1, head_dim=10, tie_word_embeddings=True, **shape)
    )


def test_a_tied_transformers_model_sends_the_name_that_its_checkpoints_have() -> None:
    model = tied_llama()
    manifest = ModuleAdapter(model).manifest()
    assert manifest.tied == {"lm_head.weight": "model.embed_tokens.weight"}
    assert [spec.name for spec in manifest.tensors] == [name for name, _ in model.named_parameters()]

    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    with pytest.raises(ManifestMismatch, match=r"declared tied, but two tensors each.*lm_head.weight and model.embed"):
        ModuleAdapter(model).manifest()
    assert "lm_head.weight" not in names(ModuleAdapter(model, rename={"lm_head.weight": None}))


@pytest.mark.parametrize("wrap", [torch.compile, checkpoint_wrapper])
def test_declared_ties_hold_whatever_was_put_around_a_part_of_the_model(wrap: Callable[[nn.Module], nn.Module]) -> None:
    model = tied_llama()
    model.model = wrap(model.model)
    assert ModuleAdapter(model).manifest().tied == {"lm_head.weight": "model.embed_tokens.weight"}
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    with pytest.raises(ManifestMismatch, match=r"declared tied, but two tensors each"):
        ModuleAdapter(model).manifest()


def test_the_declared_copy_is_not_the_name_that_travels_even_if_it_comes_first() -> None:
    class Tied(nn.Module):
        _tied_weights_keys = ("head.weight",)  # as transformers 4 has it

        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(3, 5, bias=False)
            self.embed = nn.Embedding(5, 3)
            self.embed.weight = self.head.weight

    inside = Tied()
    inside.head = torch.compile(inside.head)
    for model in (Tied(), checkpoint_wrapper(Tied()), torch.compile(Tied()), inside):
        manifest = ModuleAdapter(model).manifest()
        assert [spec.name for spec in manifest.tensors] == ["embed.weight"]
        assert manifest.tied == {"head.weight": "embed.weight"}


def test_weights_that_share_memory_but_not_the_parameter_object_are_tied() -> None:
    net = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    net[1].weight = nn.Parameter(net[0].weight.data)
    assert ModuleAdapter(net).manifest().tied == {"1.weight": "0.weight"}
    assert ModuleAdapter(net.state_dict()).manifest().tied == {"1.weight": "0.weight"}


def test_a_transposed_view_of_the_same_memory_is_another_tensor() -> None:
    weight = torch.arange(9.0).view(3, 3)
    arrived = received(ModuleAdapter({"a": weight, "b": weight.T}))
    assert torch.equal(arrived["b"], weight.T)


def test_a_shared_submodule_is_sent_once_under_its_first_name() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(2, 2)
            self.b = self.a

    manifest = ModuleAdapter(Shared()).manifest()
    assert manifest.tied == {"b.weight": "a.weight", "b.bias": "a.bias"}
    assert manifest.nbytes == 4 * 6


def test_wrappers_leave_no_trace_in_names() -> None:
    plain = nn.Sequential(OrderedDict(block=nn.Linear(2, 3), out=nn.Linear(3, 1)))
    expected = list(plain.state_dict())
    wrapped = nn.Sequential(OrderedDict(block=checkpoint_wrapper(plain.block), out=torch.compile(plain.out)))
    assert names(ModuleAdapter(wrapped)) == expected
    assert names(ModuleAdapter(torch.compile(wrapped))) == expected
    assert names(ModuleAdapter(nn.DataParallel(wrapped))) == expected
    state = {f"_orig_mod.module.{name}": tensor for name, tensor in plain.state_dict().items()}
    assert names(ModuleAdapter(state)) == expected


def test_an_averaged_model_sends_its_averages_under_the_models_names() -> None:
    trained = Net()
    averaged = AveragedModel(trained)
    averaged.update_parameters(trained)
    with torch.no_grad():
        trained.first.weight += 2
    averaged.update_parameters(trained)
    sent = received(ModuleAdapter(averaged))
    assert list(sent) == names(ModuleAdapter(trained))
    torch.testing.assert_close(sent["first.weight"], trained.first.weight.detach() - 1)


def test_a_submodule_that_is_called_module_keeps_its_name() -> None:
    net = nn.Module()
    net.module = nn.Linear(2, 2)
    net.head = nn.Linear(2, 1)
    assert names(ModuleAdapter(net)) == ["module.weight", "module.bias", "head.weight", "head.bias"]


def test_names_that_become_equal_without_their_wrappers_are_refused() -> None:
    state = {"_orig_mod.w": torch.ones(2), "w": torch.zeros(2)}
    with pytest.raises(ManifestMismatch, match=r"duplicate names: w \(from _orig_mod.w, w\)"):
        ModuleAdapter(state).manifest()


# --- renaming and dtypes -----------------------------------------------------------------------------------


def test_renaming_by_mapping_and_by_function_and_leaving_out() -> None:
    net = Net()
    by_mapping = received(ModuleAdapter(net, rename={"first.weight": "model.w", "kept": None}))
    assert set(by_mapping) == {"model.w", "first.bias", "second.weight"}
    assert torch.equal(by_mapping["model.w"], net.first.weight)
    by_function = ModuleAdapter(net, rename=lambda name: f"model.{name}" if "first" in name else None)
    assert names(by_function) == ["model.first.weight", "model.first.bias"]


def test_renaming_mistakes_are_refused() -> None:
    with pytest.raises(ManifestMismatch, match="rename has names that the model doesn't: frist"):
        ModuleAdapter(Net(), rename={"frist.weight": "x"}).manifest()
    with pytest.raises(ManifestMismatch, match=r"duplicate names: x \(from first.weight, first.bias, second"):
        ModuleAdapter(Net(), rename=lambda name: "x", include_buffers="none").manifest()
    with pytest.raises(ManifestMismatch, match="empty or too long"):
        ModuleAdapter(Net(), rename={"kept": ""}).manifest()


def test_include_and_exclude_choose_by_the_names_of_the_manifest() -> None:
    net = Net()
    assert names(ModuleAdapter(net, include=["first.*", "kept"])) == ["kept", "first.weight", "first.bias"]
    assert names(ModuleAdapter(net, exclude=["*.bias", "kept"])) == ["first.weight", "second.weight"]
    source = ModuleAdapter(net, rename={"kept": "model.kept"}, include=["*.weight", "model.*"], exclude=["second.*"])
    assert set(received(source)) == {"first.weight", "model.kept"}


@pytest.mark.parametrize("patterns", [{"include": ["first.*", "thrid.*"]}, {"exclude": ["thrid.*"]}])
def test_a_filter_pattern_that_matches_nothing_is_refused(patterns: dict[str, list[str]]) -> None:
    with pytest.raises(ManifestMismatch, match=r"patterns match no name: thrid.\* \(1 in all\)"):
        ModuleAdapter(Net(), **patterns).manifest()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"include": "*.weight"}, r"include='\*.weight' is no list of patterns"),
        ({"exclude": 3}, "exclude=3 is no list of patterns"),
        ({"exclude": [3]}, r"exclude=\[3\] is no list of patterns"),
        ({"rename": "first"}, "rename='first' is neither a function of a name nor a mapping"),
        ({"rename": {"kept": 3}}, "rename={'kept': 3} is neither a function of a name nor a mapping"),
        ({"dtype_rules": ["*.weight"]}, r"dtype_rules have '\*.weight', which is no pair"),
        ({"dtype_rules": {3: "bfloat16"}}, r"dtype_rules have \(3, 'bfloat16'\), which is no pair"),
        ({"dtype_rules": 0}, "0, of type int, is neither a dtype nor rules"),
    ],
)
def test_names_and_rules_of_another_form_are_refused_as_the_adapter_is_made(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        ModuleAdapter(Net(), **wrong)


def test_a_function_that_renames_to_what_is_no_name_is_told_what_it_returned() -> None:
    rename: Any = len
    with pytest.raises(ArgumentError, match=r"rename\('.*'\) returned \d+, a int"):
        ModuleAdapter(Net(), rename=rename).manifest()


def test_the_other_name_of_a_tied_weight_travels_where_the_first_is_left_out() -> None:
    weight = torch.ones(2)
    manifest = ModuleAdapter({"a": weight, "b": weight}, exclude=["a"]).manifest()
    assert ([spec.name for spec in manifest.tensors], manifest.tied) == (["b"], {})


def test_dtype_rules_say_what_travels_and_the_first_match_wins() -> None:
    net = Net()
    rules = {"first.bias": torch.float32, "kept": "int32", "*": torch.bfloat16}
    source = ModuleAdapter(net, dtype_rules=rules)
    assert {spec.name: spec.dtype for spec in source.manifest().tensors} == {
        "first.weight": "bfloat16",
        "first.bias": "float32",
        "second.weight": "bfloat16",
        "kept": "int32",
    }
    assert {piece.tensor.dtype for piece in source.slices()} == {torch.float32, torch.int64}, "the sender casts"
    assert torch.equal(received(source)["first.weight"], net.first.weight.to(torch.bfloat16))


def test_nothing_is_cast_without_a_rule() -> None:
    state = {
        "a": torch.ones(2, dtype=torch.float64),
        "b": torch.ones(2, dtype=torch.float8_e4m3fn),
        "c": torch.ones(2),
    }
    assert [spec.dtype for spec in ModuleAdapter(state).manifest().tensors] == [
        "float64",
        "float8_e4m3fn",
        "float32",
    ]


@pytest.mark.parametrize("adapter", [ModuleAdapter, ExportAdapter])
def test_the_dtypes_of_an_engine_are_taken_where_that_was_asked_for_alone(
    adapter: type[ModuleAdapter | ExportAdapter],
) -> None:
    state = {"a": torch.full((2,), 1 / 3), "b": torch.full((2,), 1 / 3)}
    rules = {"b": "float16", "*": "bfloat16"}
    fixed = adapter(lambda: state.items(), dtype_rules={"a": "float16"})
    assert not fixed.adopt_dtypes(rules) and not fixed.engine_dtypes
    source = adapter(lambda: state.items(), dtype_rules="engine")
    assert [spec.dtype for spec in source.manifest().tensors] == ["float32", "float32"]
    assert source.adopt_dtypes(rules) and source.engine_dtypes == rules
    assert not source.adopt_dtypes(rules), "a second refusal for the same dtypes is final"
    got = received(source)
    assert torch.equal(got["a"], state["a"].bfloat16()) and torch.equal(got["b"], state["b"].half())
    assert source.adopt_dtypes({"*": "float16"}), "another engine"
    assert received(source)["a"].dtype == torch.float16


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"frist.*": torch.bfloat16}, r"never apply: 'frist.\*' \(matches no name\)"),
        (
            {"*": torch.bfloat16, "first.*": torch.float32},
            r"'first.\*' \(hidden by '\*', which comes first\)",
        ),
        ({"first.*": "bf16"}, "unknown dtype 'bf16'"),
        ({"first.*": torch.quint8}, "unknown dtype 'quint8'"),
        ({"*": torch.bfloat16}, r"kind of numbers: kept is torch.int64, rule '\*' says torch.bfloat16"),
    ],
)
def test_dtype_rules_that_cannot_be_meant_are_refused(rules: dict[str, torch.dtype], message: str) -> None:
    with pytest.raises(ManifestMismatch, match=message):
        ModuleAdapter(Net(), dtype_rules=rules).manifest()


def test_a_dtype_rule_for_the_name_that_does_not_travel_says_which_one_does() -> None:
    weight = torch.ones(2)
    with pytest.raises(ManifestMismatch, match=r"'b' \(b is tied and travels as a\)"):
        ModuleAdapter({"a": weight, "b": weight}, dtype_rules={"b": torch.bfloat16}).manifest()


def test_dtype_rules_are_ordered_pairs_too_and_a_last_catch_all_may_be_idle() -> None:
    rules = DtypeRules([("a*", torch.float16), ("*", torch.bfloat16)])
    assert rules.resolve({"a": torch.float32, "ab": torch.float32}) == {
        "a": torch.float16,
        "ab": torch.float16,
    }
    assert DtypeRules(rules).rules == rules.rules
    assert DtypeRules().resolve({"a": torch.int8}) == {"a": torch.int8}


def test_a_thousand_rules_of_one_name_each_are_applied_at_once_and_in_their_order() -> None:
    """An engine that holds single layers in another dtype has such rules; each name was matched with each of them."""
    named = {f"layers.{i}.weight": "float32" for i in range(0, 3000, 3)}
    rules = DtypeRules({"layers.0.weight": "float16", "layers.[1-2].*": "float64"} | named | {"*": "bfloat16"})
    began_s = time.process_time()
    found = rules.resolve({f"layers.{i}.weight": torch.float32 for i in range(3000)})
    assert time.process_time() - began_s < 1, "it was 6 s"
    assert [str(found[f"layers.{i}.weight"]).removeprefix("torch.") for i in range(5)] == [
        "float32", "float64", "float64", "float32", "bfloat16"
    ]  # fmt: skip


# --- tensors of every kind ---------------------------------------------------------------------------------


def test_strided_scalar_and_empty_tensors_arrive_as_they_are() -> None:
    base = torch.arange(24.0).view(4, 6)
    state = {
        "transposed": base.T,
        "strided": base[::2, 1::3],
        "expanded": torch.tensor([1.0, 2.0]).expand(3, 2),
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 7),
        "empty too": torch.empty(3, 0),
        "truth": torch.tensor([True, False]),
        "conjugated": torch.tensor([1 + 2j]).conj(),
    }
    arrived = received(ModuleAdapter(state))
    for name, tensor in state.items():
        assert arrived[name].shape == tensor.shape
        assert torch.equal(arrived[name], tensor), name


@pytest.mark.parametrize(
    ("tensor", "why"),
    [
        (torch.ones(2, device="meta"), "w is on the meta device"),
        (torch.ones(2, 2).to_sparse(), "w is torch.sparse_coo"),
        (torch.ones((1,) * 9), "w has 9 dimensions, and at most 8 can travel"),
        (nn.UninitializedParameter(), "w is a UninitializedParameter, which has no values"),
        (b"pickled", "w is a bytes, which has no values"),
        (torch.ones(2, dtype=torch.uint16), "w: torch.uint16 can't travel"),
    ],
    ids=["meta", "sparse", "9-d", "lazy", "no tensor", "uint16"],
)
def test_tensors_that_cannot_be_sent_are_named(tensor: object, why: str) -> None:
    state = {"fine": torch.ones(1), "w": tensor}
    with pytest.raises(ManifestMismatch, match=why):
        ModuleAdapter(state).manifest()
    assert names(ModuleAdapter(state, rename={"w": None})) == ["fine"]


@pytest.mark.parametrize(
    "compute",
    [
        nn.utils.parametrizations.weight_norm,
        nn.utils.parametrizations.orthogonal,
        nn.utils.weight_norm,
        nn.utils.spectral_norm,
        lambda layer: nn.utils.prune.l1_unstructured(layer, "weight", 0.5),
    ],
    ids=["weight_norm", "orthogonal", "weight_norm by a hook", "spectral_norm by a hook", "pruned"],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_a_weight_that_a_module_computes_from_others_is_refused_by_its_name(
    compute: Callable[[nn.Module], Any],
) -> None:
    net = Net()
    source = ModuleAdapter(net)
    assert "first.weight" in names(source)
    compute(net.first)
    for made in (source, ModuleAdapter(net)):
        with pytest.raises(ManifestMismatch, match=r"computes these weights .*: first\.weight \(1 in all\)"):
            made.manifest()
    assert names(ModuleAdapter(net, exclude=["first.*"])) == ["kept", "second.weight"]


def test_freed_memory_is_not_read() -> None:
    net = nn.Linear(3, 3)
    net.weight.untyped_storage().resize_(0)
    with pytest.raises(ManifestMismatch, match="weight has no memory"):
        ModuleAdapter(net).manifest()


class Quantised(torch.Tensor):
    """As Transformer Engine's quantised parameters: it looks like bf16, has its values in another tensor and no address, and
    tells torch.compile nothing of that tensor."""

    values_in_fp8: torch.Tensor

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> Quantised:
        made: Quantised = torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.bfloat16)
        made.values_in_fp8 = values.to(torch.float8_e4m3fn)
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.ops.aten.detach.default:
            return Quantised(args[0].values_in_fp8)
        plain = [one.values_in_fp8.bfloat16() if isinstance(one, Quantised) else one for one in args]
        return func(*plain, **kwargs or {})


def test_parameters_without_memory_of_their_own_are_refused_and_not_taken_for_one_tied_weight() -> None:
    net = nn.Module()
    net.a = nn.Parameter(Quantised(torch.full((4, 4), 1.0)), requires_grad=False)
    net.b = nn.Parameter(Quantised(torch.full((4, 4), 2.0)), requires_grad=False)
    with pytest.raises(ManifestMismatch, match=r"a is a Quantised, which has no memory of its own.* b is a Quantised"):
        ModuleAdapter(net).manifest()


# --- mappings and iterables --------------------------------------------------------------------------------


def test_lists_of_pairs_and_callables_work_again_and_again() -> None:
    net = Net()
    for source in (
        ModuleAdapter(list(net.state_dict().items())),
        ModuleAdapter(lambda: iter(net.state_dict().items())),
        ModuleAdapter(net.state_dict),
        ModuleAdapter(net.named_parameters),
    ):
        for _ in range(2):
            with torch.no_grad():
                net.first.weight.add_(1)
            assert torch.equal(received(source)["first.weight"], net.first.weight)


def test_an_iterator_that_can_be_read_once_is_refused_with_advice() -> None:
    with pytest.raises(TypeError, match=r"a generator can be read only once.*pass a callable"):
        ModuleAdapter(Net().named_parameters())
    with pytest.raises(TypeError, match="not int"):
        ModuleAdapter(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [Net().parameters, lambda: None, lambda: Net().second.weight.unbind()])
def test_a_function_that_returns_no_pairs_is_told_what_to_give(given: Any) -> None:
    """A tensor of two rows would be taken for a pair of them."""
    with pytest.raises(ArgumentError, match=r"such as model\.named_parameters"):
        ModuleAdapter(given).manifest()


@pytest.mark.parametrize("given", [list(Net().named_parameters()), Net()])
def test_an_export_that_is_no_function_is_refused_before_the_ranks_meet(given: Any) -> None:
    with pytest.raises(ArgumentError, match=r"is no function .*model\.named_parameters, without the brackets"):
        ExportAdapter(given)


def test_a_callable_that_returns_its_iterator_twice_is_found_out() -> None:
    once = iter([("a", torch.ones(2))])
    source = ModuleAdapter(lambda: once)
    with pytest.raises(
        ManifestMismatch, match=r"the model yielded 0 tensors, but the manifest was made from 1.*fresh iterator"
    ):
        list(source.slices())


def test_two_tensors_of_one_name_are_refused() -> None:
    with pytest.raises(ManifestMismatch, match="duplicate names: a"):
        ModuleAdapter([("a", torch.ones(1)), ("a", torch.ones(1))]).manifest()


def test_a_producer_holds_one_tensor_at_a_time() -> None:
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def produce() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal most
        for i in range(5):
            most = max(most, sum(ref() is not None for ref in alive))
            tensor = torch.full((3,), float(i))
            alive.append(weakref.ref(tensor))
            yield f"t{i}", tensor
            del tensor

    gc.collect()
    total = 0.0
    for piece in ModuleAdapter(produce).slices():
        total += float(piece.tensor.sum())
        del piece
    assert total == 3 * (0 + 1 + 2 + 3 + 4)
    assert most == 0


def test_a_producer_that_reuses_one_buffer_is_not_taken_for_tied_weights() -> None:
    buffer = torch.zeros(2)

    class Lazy(Mapping[str, torch.Tensor]):
        def __getitem__(self, name: str) -> torch.Tensor:
            return buffer.fill_(float(name))

        def __iter__(self) -> Iterator[str]:
            return iter(("1", "2"))

        def __len__(self) -> int:
            return 2

    source = ModuleAdapter(Lazy())
    assert source.manifest().tied == {}
    assert {name: float(tensor[0]) for name, tensor in received(source).items()} == {"1": 1.0, "2": 2.0}


def in_one_buffer(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Fills the same memory for each tensor, as a trainer's gathering may."""
    memory = torch.empty(max(tensor.nbytes for tensor in tensors.values()), dtype=torch.uint8)
    for name, tensor in tensors.items():
        yield name, memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)


class MadeWhenAsked(dict[str, torch.Tensor]):
    def items(self) -> Any:
        return in_one_buffer(dict(super().items()))


class ListedWhenAsked(list[tuple[str, torch.Tensor]]):
    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return in_one_buffer(dict(super().__iter__()))


@pytest.mark.parametrize("make", [MadeWhenAsked, lambda held: ListedWhenAsked(held.items())], ids=["dict", "list"])
def test_a_dict_or_list_that_makes_each_tensor_in_one_buffer_is_read_one_by_one(make: Any) -> None:
    state = {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(6.0).view(2, 3) + 6, "c": torch.arange(4.0) + 12}
    source = source_for(make(state))
    for _ in range(2):
        arrived = received(source)
        assert list(arrived) == list(state) and not source.manifest().tied
        for name, tensor in state.items():
            assert torch.equal(arrived[name], tensor), name


@pytest.mark.parametrize("gather", [dict, list])
def test_tensors_that_were_gathered_into_one_buffer_are_refused(gather: Any) -> None:
    state = {"a": torch.ones(2, 3), "b": torch.ones(4), "c": torch.ones(5), "d": torch.ones(2, 3), "e": torch.ones(1)}
    problem = r"can't be sent: c begins where a and b begin, in a third shape,.* d begins.* e begins.* \(3 in all\)"
    with pytest.raises(ManifestMismatch, match=problem):
        source_for(gather(in_one_buffer(state))).manifest()
    assert names(source_for(lambda: in_one_buffer(state))) == list(state)


def test_a_head_may_be_the_first_rows_of_the_embedding_and_parts_may_be_views_of_one_tensor() -> None:
    whole = torch.arange(24.0).view(8, 3)
    state = {"embed": whole, "head": whole[:5], "again": whole[:5], "q": whole[2:4], "k": whole[4:6]}
    arrived = received(ModuleAdapter(state))
    assert ModuleAdapter(state).manifest().tied == {"again": "head"}
    for name, tensor in arrived.items():
        assert torch.equal(tensor, state[name])


def test_a_producer_that_changes_between_passes_is_an_error_and_the_next_update_works() -> None:
    rows = 2

    def produce() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.ones(1)
        yield "b", torch.ones(rows, 3)

    source = ModuleAdapter(produce)
    source.manifest()
    rows = 4
    with pytest.raises(ManifestMismatch, match=r"b: torch.float32 \[4, 3\].*made from b: torch.float32 \[2, 3\]"):
        list(source.slices())
    assert received(source)["b"].shape == (4, 3)


# --- changes between updates -------------------------------------------------------------------------------


def test_the_manifest_is_the_same_object_while_the_model_keeps_its_shape() -> None:
    net = Net()
    source = ModuleAdapter(net)
    manifest = source.manifest()
    net.first.weight = nn.Parameter(torch.ones(5, 3))
    assert source.manifest() is manifest
    assert torch.equal(received(source)["first.weight"], torch.ones(5, 3))
    net.first = torch.compile(net.first)
    assert source.manifest() is manifest
    assert torch.equal(received(source)["first.weight"], torch.ones(5, 3))


def test_the_manifest_follows_parameters_that_come_go_or_change() -> None:
    net = Net()
    source = ModuleAdapter(net)
    source.manifest()
    net.third = nn.Linear(1, 1)
    del net.second
    net.first.weight = nn.Parameter(torch.ones(5, 4))
    with pytest.raises(ManifestMismatch) as caught:
        source.slices()
    for part in (
        "third.weight appeared",
        "second.weight vanished",
        "[5, 3] is now first.weight: torch.float32 [5, 4]",
    ):
        assert part in str(caught.value)
    assert "third.weight" in received(source)
    assert "second.weight" not in names(source)


def _outcome(source: WeightSource) -> tuple[Any, ...]:
    """The manifest and the bytes that arrive, or why the model can't be sent."""
    try:
        return source.manifest().fingerprint, {name: values.tolist() for name, values in received(source).items()}
    except ManifestMismatch as error:
        return type(error), str(error)


CHANGES: dict[str, Callable[[Any], object]] = {
    "memory moves": lambda net: setattr(net.first.weight, "data", net.first.weight.data + 1),
    "another shape in the same memory": lambda net: setattr(net.first.weight, "data", net.first.weight.data.view(2, 8)),
    "another order in the same memory": lambda net: setattr(net.first.weight, "data", net.first.weight.data.t()),
    "another dtype in the same memory": lambda net: setattr(net.kept, "data", net.kept.data.view(torch.float64)),
    "tied": lambda net: setattr(net.first.weight, "data", net.other.weight.data),
    "tied as a parameter": lambda net: setattr(net.first, "weight", net.other.weight),
    "freed": lambda net: net.first.weight.untyped_storage().resize_(0),
    "on the meta device": lambda net: net.first.to("meta"),
    "replaced": lambda net: setattr(net.first, "weight", nn.Parameter(torch.full((4, 4), 7.0))),
    "sparse": lambda net: net.register_buffer("kept", torch.ones(2, 2).to_sparse()),
    "a buffer of the same name": lambda net: net.register_buffer("kept", torch.arange(4.0)),
    "swapped": lambda net: net._modules.update(first=net.other, other=net.first),
    "negated in the same memory": lambda net: setattr(net, "kept", torch._neg_view(net.kept)),
    "a name more": lambda net: setattr(net, "third", nn.Linear(1, 1)),
    "the other order of names": lambda net: net._modules.update(first=net._modules.pop("first")),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_an_adapter_that_knows_the_model_sees_each_change_as_a_new_adapter_does(
    change: Callable[[Any], object],
) -> None:
    class Square(Net):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.other = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    net = Square()
    source = ModuleAdapter(net)
    before = _outcome(source)
    change(net)
    after = _outcome(source)
    assert after == _outcome(ModuleAdapter(net))
    assert after != before


# --- data parallel -----------------------------------------------------------------------------------------


@given(
    st.lists(
        st.tuples(st.sampled_from(["uint8", "float32"]), st.lists(st.integers(0, 40), max_size=3)),
        max_size=12,
    ),
    st.integers(1, 9),
    st.sampled_from([1, 64, 1 << 20]),
)
@settings(max_examples=200, deadline=None)
def test_ranks_with_the_same_copy_divide_every_byte_and_send_none_twice(
    tensors: list[tuple[str, list[int]]], world_size: int, cut: int
) -> None:
    import trainer_adapters.sources.sharing as module

    manifest = Manifest(tuple(TensorSpec(f"t{i}", d, tuple(s)) for i, (d, s) in enumerate(tensors)))
    everything = [manifest.whole(i) for i in range(len(manifest.tensors))]
    before, module.MIN_CUT_BYTES = module.MIN_CUT_BYTES, cut
    try:
        shares = [share_boxes(manifest, everything, rank, world_size) for rank in range(world_size)]
    finally:
        module.MIN_CUT_BYTES = before
    boxes = [(box, f"rank {rank}") for rank, share in enumerate(shares) for box in share.values()]
    check_exact_cover(manifest, boxes)
    assert all(manifest.box_nbytes(box) for box, _ in boxes), "an empty share"


def test_a_large_tensor_is_cut_so_that_ranks_send_about_the_same() -> None:
    model = {"embed": torch.ones(251, 9000), "norm": torch.ones(100), "one": torch.ones(1, 600_000)}
    sources = [ModuleAdapter(model, rank=rank, world_size=4) for rank in range(4)]
    arrived = received(*sources)
    assert all(bool((tensor == 1).all()) for tensor in arrived.values())
    manifest = sources[0].manifest()
    sent = [sum(manifest.box_nbytes(piece.box) for piece in source.slices()) for source in sources]
    assert max(sent) - min(sent) <= 2 * 9000 * 4


@pytest.mark.parametrize("layers", [12, 28])
def test_ranks_compare_some_of_each_kind_of_matrix(layers: int) -> None:
    """Of 28 layers with seven matrices, every seventh matrix is one kind: experts that only one rank has would not be seen."""
    kinds = {"q": 4, "k": 2, "v": 2, "o": 4, "gate": 9, "up": 9, "down": 9}
    model = {f"layers.{i}.{kind}.weight": torch.ones(rows, 4) for i in range(layers) for kind, rows in kinds.items()}
    for rank in range(2):
        source = ModuleAdapter(model, rank=rank, world_size=2)
        names = [source.manifest().tensors[piece.box.tensor].name for piece in source.kept_equal()]
        assert {name.split(".")[2] for name in names} == set(kinds)
        assert len(names) <= 16


def test_ranks_compare_trained_vectors_and_no_statistics_of_their_own_batches() -> None:
    """A bias or a norm whose gradients one rank did not reduce is a mixed model as any other; running means are not."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.LayerNorm(4))
    model[2].weight.requires_grad_(False)
    compared = set()
    for rank in range(2):
        source = ModuleAdapter(model, rank=rank, world_size=2)
        compared |= {source.manifest().tensors[piece.box.tensor].name for piece in source.kept_equal()}
    assert compared == {"0.weight", "0.bias", "1.weight", "1.bias", "2.bias"}


def test_small_tensors_stay_whole() -> None:
    model = {f"t{i}": torch.full((100, 3), float(i)) for i in range(9)}
    sources = [ModuleAdapter(model, rank=rank, world_size=4) for rank in range(4)]
    received(*sources)
    pieces = [piece for source in sources for piece in source.slices()]
    assert len(pieces) == 9
    assert MIN_CUT_BYTES > 100 * 3 * 4


def test_rank_0_sends_everything_if_told() -> None:
    model = Net()
    sources = [ModuleAdapter(model, rank=rank, world_size=3, only_rank_0=True) for rank in range(3)]
    received(*sources)
    assert [len(list(source.slices())) for source in sources] == [4, 0, 0]


def test_every_rank_runs_a_producer_to_its_end() -> None:
    """A producer may talk to the other ranks, so none of them may stop when its share is done."""
    ended = []

    def produce() -> Iterator[tuple[str, torch.Tensor]]:
        for i in range(4):
            yield f"t{i}", torch.ones(5)
        ended.append(True)

    sources = [ModuleAdapter(produce, rank=rank, world_size=2) for rank in range(2)]
    pieces: list[list[LocalSlice]] = [list(source.slices()) for source in sources]
    assert [len(part) for part in pieces] == [2, 2]
    assert len(ended) == 4, "two passes, each by two ranks"


def test_ranks_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rank must be in 0..1, not 2"):
        ModuleAdapter(Net(), rank=2, world_size=2)
    with pytest.raises(ValueError, match="together"):
        ModuleAdapter(Net(), rank=0)


def test_a_scan_of_an_unchanged_model_sets_off_no_garbage_collection() -> None:
    """Of models with tens of thousands of tensors Python would look through all its objects, several times an update."""
    adapter = ModuleAdapter({f"experts.{i}.w": torch.ones(2) for i in range(6000)})
    manifest, collections = adapter.manifest(), [0]
    gc.collect()

    def count(phase: str, info: Mapping[str, int]) -> None:
        collections[0] += phase == "start"

    gc.callbacks.append(count)
    try:
        assert adapter.manifest() is manifest
    finally:
        gc.callbacks.remove(count)
    assert collections == [0]
