"""The dtype rules that an error offers are those that the engine wants, and can be pasted."""

from __future__ import annotations

import ast

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st

from inference_plugin.install.installer import ModelInstaller
from inference_plugin.wire.dtype_hint import MOST_RULES, dtype_line
from inference_plugin.wire.errors import ManifestMismatch
from inference_plugin.wire.tensors import torch_dtype
from tests.install.installing import update
from tests.support.plain_engine import WIDTH, PlainEngineModel, checkpoint, manifest_of
from trainer_adapters.sources.selection import DtypeRules

PARTS = st.sampled_from(["model", "layers", "0", "1", "12", "norm", "A_log", "weight"])
NAMES = st.builds(".".join, st.lists(PARTS, min_size=1, max_size=5))
FLOATS = st.sampled_from(["float32", "bfloat16", "float16"])


def pasted(line: str) -> DtypeRules:
    call = ast.parse(f"f({line})", mode="eval").body
    assert isinstance(call, ast.Call) and len(call.keywords) == 1
    assert call.keywords[0].arg in ("dtype", "dtype_rules")
    return DtypeRules(ast.literal_eval(call.keywords[0].value))


@example({"model": "bfloat16", "layers": "bfloat16", "model.0.0": "float32", "model.model.0": "float32"}, {})
@example({}, {"model": "int32", "layers": "int8"})
@given(
    st.dictionaries(NAMES, FLOATS, max_size=8), st.dictionaries(NAMES, st.sampled_from(["int64", "int8"]), max_size=3)
)
def test_the_line_says_of_every_tensor_what_the_engine_wants(floats: dict[str, str], numbers: dict[str, str]) -> None:
    wanted = numbers | floats
    assume(wanted)
    assert len(wanted) <= MOST_RULES
    native = {name: torch.float64 if "float" in dtype else torch.int64 for name, dtype in wanted.items()}
    rules = pasted(dtype_line(wanted))
    assert rules.resolve(native) == {name: torch_dtype(dtype) for name, dtype in wanted.items()}


@pytest.mark.parametrize("right", ["", "norm.weight"])
def test_an_update_in_other_dtypes_is_refused_with_the_line_that_makes_it_right(right: str) -> None:
    model = PlainEngineModel(2, 0, 1)
    tensors = {name: t if name == right else t.double() for name, t in checkpoint(1).items()}
    with pytest.raises(ManifestMismatch, match="dtypes differ") as raised:
        ModelInstaller(model).open(manifest_of(tensors), "copy", partial=False)
    line = raised.value.hint.rpartition("or update, ")[2]
    assert line.startswith("dtype_rules={") and line.endswith('"*": "bfloat16"}')
    dtypes = pasted(line).resolve({name: t.dtype for name, t in tensors.items()})
    ModelInstaller(model).open(manifest_of({n: t.to(dtypes[n]) for n, t in tensors.items()}), "copy", partial=False)


def test_no_cast_is_offered_in_place_of_a_quantisation() -> None:
    """The scales would stay those of the engine's own weights."""
    model = PlainEngineModel(2, 0, 1)
    for part in (model.live, model.skeleton):
        weight = part.get_parameter("layers.0.out.weight")
        quantised = torch.nn.Parameter(torch.empty_like(weight, dtype=torch.float8_e4m3fn), requires_grad=False)
        part.get_submodule("layers.0.out").register_parameter("weight", quantised)
    with pytest.raises(ManifestMismatch, match=r"quantised weights, .*layers\.0\.out\.weight \(1 in all\)") as raised:
        ModelInstaller(model).open(manifest_of(checkpoint(1)), "copy", partial=False)
    assert raised.value.dtypes == {} and "QuantizedAdapter" in raised.value.hint


def test_no_cast_is_offered_in_place_of_the_scales_of_a_quantised_trainer() -> None:
    """An update with dtype="engine" took the quantised values themselves for the weights. Who names the dtypes may do so."""
    model = PlainEngineModel(2, 0, 1)
    tensors = checkpoint(1)
    tensors["layers.0.out.weight"] = tensors["layers.0.out.weight"].to(torch.float8_e4m3fn)
    with pytest.raises(ManifestMismatch, match=r"lose their scales: layers\.0\.out\.weight \(1 in all\)") as raised:
        ModelInstaller(model).open(manifest_of(tensors), "copy", partial=False)
    assert raised.value.dtypes == {}
    dtypes = pasted(raised.value.hint.rpartition("or update, ")[2]).resolve({n: t.dtype for n, t in tensors.items()})
    ModelInstaller(model).open(manifest_of({n: t.to(dtypes[n]) for n, t in tensors.items()}), "copy", partial=False)


class OfIntegers(PlainEngineModel):
    """An engine whose loader makes floats of a tensor of its checkpoint, as SGLang's does of experts in four bits."""

    def checkpoint(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        tensors = checkpoint(0) | {"norm.weight": torch.arange(WIDTH)}
        return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def test_a_cast_of_integers_that_the_engine_did_at_its_start_is_done_again_and_no_other() -> None:
    """No dtype rule would do it: it turns integers into floats."""
    tensors = checkpoint(1) | {"norm.weight": torch.arange(WIDTH).flip(0)}
    model = OfIntegers(2, 0, 1)
    installer = ModelInstaller(model)
    manifest = manifest_of(tensors)
    assert installer.open(manifest, "copy", partial=False).mechanism == "loader"
    update(installer, manifest, tensors)
    assert model.live.get_parameter("norm.weight").tolist() == tensors["norm.weight"].tolist()
    for engine, sent in (
        (model, checkpoint(1)["norm.weight"].bfloat16()),
        (PlainEngineModel(2, 0, 1), tensors["norm.weight"]),
    ):
        with pytest.raises(ManifestMismatch, match=r"dtypes differ: norm\.weight"):
            ModelInstaller(engine).open(manifest_of(tensors | {"norm.weight": sent}), "copy", partial=False)
