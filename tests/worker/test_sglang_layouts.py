"""Layouts of SGLang, most of which only a GPU can have: which are served, and where weights must stay."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from inference_plugin.engines.sglang.layouts import captures_graphs, lends_addresses, why_copied, why_unserved

ONE_RANK = SimpleNamespace(attn_dp_enabled=False, attn_dp_size=1, pp_size=1)


def scheduler(mode: str = "null", pdmux: bool = False, **options: Any) -> Any:
    usual = {
        "weight_cache_mode": "off",
        "dwdp_size": 1,
        "kt_weight_path": None,
        "cpu_offload_gb": 0,
        "offload_group_size": -1,
    }
    return SimpleNamespace(
        server_args=SimpleNamespace(**{**usual, **options}),
        enable_pdmux=pdmux,
        disaggregation_mode=SimpleNamespace(value=mode),
    )


def test_one_engine_with_its_own_weights_is_served() -> None:
    assert why_unserved(scheduler(), ONE_RANK) == ""
    assert why_unserved(SimpleNamespace(**{**vars(scheduler()), "server_args": SimpleNamespace()}), ONE_RANK) == ""


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("weight_cache_mode", "client"),
        ("dwdp_size", 4),
        ("kt_weight_path", "/experts"),
        ("cpu_offload_gb", 2),
        ("offload_group_size", 4),
        ("language_only", True),
        ("enable_cp_decode_attn_tp", True),
    ],
)
def test_weights_that_no_update_reaches_are_refused_by_the_name_of_the_option(option: str, value: Any) -> None:
    assert f"{option}={value}" in why_unserved(scheduler(**{option: value}), ONE_RANK)


def test_weights_that_are_compiled_into_decoding_on_a_cpu_are_refused() -> None:
    compiled = {device: scheduler(device=device, enable_torch_compile=True) for device in ("cpu", "cuda")}
    assert "enable_torch_compile" in why_unserved(compiled["cpu"], ONE_RANK)
    assert why_unserved(compiled["cuda"], ONE_RANK) == ""
    assert why_unserved(scheduler(device="cpu", enable_torch_compile=False), ONE_RANK) == ""


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_half_an_engine_is_refused(mode: str) -> None:
    assert "disaggregated" in why_unserved(scheduler(mode), ONE_RANK)


def test_a_loop_that_computes_a_prompt_in_several_passes_is_refused() -> None:
    assert "enable_pdmux" in why_unserved(scheduler(pdmux=True), ONE_RANK)


class Part:
    """Of SGLang's attention on a GPU."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


class Slotted:
    """So are some of its tables of positions."""

    __slots__ = ("rows",)


for kind in (Part, Slotted):
    kind.__module__ = "sglang.srt.layers.attention.linear.kernels"


@pytest.mark.parametrize("copies", ["_param_flat", "_gate_cache"])
def test_a_kernel_that_keeps_copies_of_weights_is_refused_wherever_it_is(copies: str) -> None:
    dispatcher = Part(decode_kernel=Part(), extend_kernel=Part(**{copies: {}}))
    backend = Part(table=Slotted(), attn_backend_list=[Part(), Part(kernels={"linear": dispatcher})])
    dispatcher.backend = backend
    assert copies in (why_copied(backend, fixed_addresses=True) or "")
    dispatcher.extend_kernel = Part()
    for fixed in (True, False):
        assert why_copied(backend, fixed_addresses=fixed) is None and why_copied(None, fixed_addresses=fixed) is None


def test_a_kernel_that_keeps_parameters_as_it_took_them_is_served_where_these_are_views_that_stay() -> None:
    """FlashInfer's, for Qwen3-Next and Qwen3.5."""
    decay, bias = torch.ones(4), torch.ones(4)
    views = {("A_log", 1, None): (decay, decay.view(-1)), ("dt_bias", 2, None): (bias, bias.view(-1))}
    copies = {**views, ("A_log", 3, torch.float32): (decay, decay.clone())}

    def why(taken: Any, *, fixed: bool = True) -> str:
        return why_copied(Part(kernel=Part(_aligned_parameter_cache=taken)), fixed_addresses=fixed) or ""

    assert why(views) == ""
    assert "_aligned_parameter_cache" in why(copies)
    assert "_aligned_parameter_cache" in why({}), "nothing is known yet"
    assert "_aligned_parameter_cache" in why(views, fixed=False)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """SGLang's module that knows whether steps are captured."""
    packages = "sglang", "sglang.srt", "sglang.srt.model_executor", "sglang.srt.model_executor.cuda_graph_config"
    for name in packages:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    return sys.modules[packages[-1]]


@pytest.mark.parametrize("captured", [True, False])
def test_graphs_that_an_option_of_their_own_switches_on_hold_addresses(graphs: Any, captured: bool) -> None:
    graphs.cuda_graph_fully_disabled = lambda: not captured
    assert captures_graphs() is captured


def test_addresses_stay_where_nobody_can_say_whether_graphs_hold_them(graphs: Any) -> None:
    assert captures_graphs()


@pytest.mark.parametrize(
    "options",
    [
        {"remote_instance_weight_loader_start_seed_via_transfer_engine": True},
        {"remote_instance_weight_loader_backend": "modelexpress"},
    ],
)
def test_addresses_from_which_other_engines_load_stay(options: dict[str, Any]) -> None:
    assert lends_addresses(SimpleNamespace(**options)) and not lends_addresses(SimpleNamespace())


@pytest.mark.parametrize(("value", "captured"), [("1", True), ("True", True), ("0", False), ("", False)])
def test_graphs_of_image_encoders_hold_addresses_too(
    graphs: Any, monkeypatch: pytest.MonkeyPatch, value: str, captured: bool
) -> None:
    graphs.cuda_graph_fully_disabled = lambda: True
    monkeypatch.setenv("SGLANG_VIT_ENABLE_CUDA_GRAPH", value)
    assert captures_graphs() is captured
