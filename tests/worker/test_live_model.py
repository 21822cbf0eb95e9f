"""What an engine's model tells of itself: whether the engine is decoding, and how much memory a rank may take."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from inference_plugin.engines import live_model as live
from inference_plugin.engines.live_model import LiveModel
from inference_plugin.engines.skeleton import Skeleton
from inference_plugin.engines.together import TogetherModel

LOADS = SimpleNamespace(load_format="auto")
"""What vLLM's configuration says of a load."""


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


def test_a_draft_and_its_served_model_as_one_count_on_one_ranks_part_of_the_free_memory() -> None:
    from inference_plugin.engines.vllm.model import VllmModel

    settings = SimpleNamespace(dtype=torch.float32, enforce_eager=True, enable_sleep_mode=False)
    served, draft = (
        VllmModel(
            nn.Sequential(nn.Linear(2, 2)),
            torch.device("cpu"),
            SimpleNamespace(model_config=settings, cache_config=SimpleNamespace(cache_dtype="auto"), load_config=LOADS),
            settings,
            Skeleton(nn.Sequential(nn.Linear(2, 2, device="meta")), {}),
        )
        for _ in range(2)
    )
    served.ranks = draft.ranks = 2
    draft.random_weights = True
    together = TogetherModel(served, draft)
    assert together.random_weights
    served.free_bytes = together.free_bytes = lambda: 1000  # type: ignore[method-assign]
    assert served.free_share_bytes() == together.free_share_bytes() == 500
    assert together.free_share_bytes(5) == 100


def test_a_model_whose_weights_are_compiled_in_as_constants_is_refused_by_the_name_of_the_setting() -> None:
    from torch._inductor import config as inductor

    model = LiveModel(nn.Linear(1, 1), torch.device("cpu"), nn.Linear(1, 1))
    assert model.unfinishable() is None
    with inductor.patch(freezing=True):
        assert "TORCHINDUCTOR_FREEZING" in (model.unfinishable() or "")


def why_vllm_is_refused(device: str, mode: Any = 0, cache: Any = None, **options: bool) -> str:
    """Why updates of an engine of vLLM are refused; `mode` and `options` say how it compiles."""
    from inference_plugin.engines.vllm.model import VllmModel

    settings = SimpleNamespace(
        dtype=torch.float32,
        enforce_eager=True,
        enable_sleep_mode=False,
        cache_config=cache or SimpleNamespace(cache_dtype="auto"),
        parallel_config=SimpleNamespace(enable_eplb=False),
        load_config=LOADS,
        compilation_config=SimpleNamespace(mode=mode, inductor_compile_config=options),
    )
    settings.model_config = settings
    skeleton = Skeleton(nn.Linear(1, 1, device="meta"), {})
    return VllmModel(nn.Linear(1, 1), torch.device(device), settings, settings, skeleton).unfinishable() or ""


def test_vllm_that_makes_the_scales_of_its_cache_of_its_first_weights_is_refused() -> None:
    """An update set one of the two forms in which a layer keeps a scale to 1, and left the other one (vLLM 0.27.1)."""
    for dtype, calculated in (("fp8", True), ("fp8", False), ("auto", True)):
        cache = SimpleNamespace(cache_dtype=dtype, calculate_kv_scales=calculated)
        why = why_vllm_is_refused("cuda", cache=cache)
        assert ("calculate_kv_scales" in why) == (dtype == "fp8" and calculated)


def test_vllm_on_a_cpu_that_tunes_what_it_compiles_is_refused() -> None:
    """It takes weights for constants then."""
    from vllm.config import CompilationMode

    why = why_vllm_is_refused
    assert "max_autotune" in why("cpu", CompilationMode.DYNAMO_TRACE_ONCE, max_autotune=True)
    assert why("cpu", CompilationMode.DYNAMO_TRACE_ONCE) == why("cpu", CompilationMode.NONE, max_autotune=True) == ""
    assert why("cuda", CompilationMode.VLLM_COMPILE, max_autotune=True) == ""


def test_what_vllm_reads_from_files_beside_the_checkpoint_counts_as_filled_by_it(tmp_path: Path) -> None:
    """Else a whole model without it would be committed, as if nothing had filled it (BGE-M3's heads)."""
    from inference_plugin.engines.vllm.model import VllmModel

    save_file({"body.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    settings = SimpleNamespace(
        dtype=torch.float32, enforce_eager=True, enable_sleep_mode=False, model=str(tmp_path), revision=None
    )
    config = SimpleNamespace(model_config=settings, cache_config=SimpleNamespace(cache_dtype="auto"), load_config=LOADS)
    skeleton: Any = nn.ModuleDict({name: nn.Linear(2, 2, bias=False, device="meta") for name in ("body", "head")})

    def held(*prefixes: str) -> list[str]:
        skeleton.secondary_weights = [SimpleNamespace(prefix=prefix) for prefix in prefixes]
        model = VllmModel(skeleton, torch.device("cpu"), config, settings, Skeleton(skeleton, {}))
        return sorted(model.checkpoint())

    assert held() == ["body.weight"]
    assert held("head.") == ["body.weight", "head.weight"]
    assert held("") == []  # of these the names are unknown
    (tmp_path / "encoder").mkdir()
    save_file({"own.weight": torch.ones(2, 2)}, tmp_path / "encoder" / "model.safetensors")
    skeleton.secondary_weights = [
        SimpleNamespace(prefix="", model_or_path=str(tmp_path), revision=None, subfolder="encoder")
    ]
    model = VllmModel(skeleton, torch.device("cpu"), config, settings, Skeleton(skeleton, {}))
    assert sorted(model.checkpoint()) == ["body.weight", "own.weight"]  # Kimi-Audio's encoder


class Router(nn.Module):
    """As Gemma 4's in SGLang: its first step folds its scale into the weight of its norm."""

    def __init__(self, folded: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((2,), 3.0))
        self.weight, self._scale_fused = torch.ones(2), folded

    def fuse_scale(self) -> None:
        self.weight.copy_(self.scale)
        self._scale_fused = True


def test_a_router_that_has_folded_its_scale_folds_the_new_one() -> None:
    from inference_plugin.engines.sglang.model import SglangModel

    folded, not_yet = Router(True), Router(False)
    SglangModel.derive_in_place(cast(Any, SimpleNamespace(_folding=[folded, not_yet], _angles=[])))
    assert folded.weight.tolist() == [3, 3] and not_yet.weight.tolist() == [1, 1]


class Rope(nn.Module):
    """As InternS1-Pro's in SGLang: its first step sums up angles."""

    def __init__(self, summed: bool) -> None:
        super().__init__()
        self.cos_coef = nn.Parameter(torch.full((2,), 3.0))
        self.cos_sin_cache, self.update_buffer = torch.ones(2), summed

    def _compute_cos_sin_cache(self) -> torch.Tensor:
        return self.cos_coef * 2


def test_learned_rotary_embeddings_that_were_summed_up_are_summed_up_anew_in_the_same_memory() -> None:
    from inference_plugin.engines.sglang.model import SglangModel

    summed, not_yet = Rope(True), Rope(False)
    held = summed.cos_sin_cache
    SglangModel.derive_in_place(cast(Any, SimpleNamespace(_folding=[], _angles=[summed, not_yet])))
    assert held.tolist() == [6, 6] and not_yet.cos_sin_cache.tolist() == [1, 1]


@pytest.mark.parametrize("loads", [1, 2])
def test_a_second_load_finds_the_parameters_that_are_there_now(loads: int) -> None:
    """SDAR and InternS1-Pro in SGLang keep those that their first load found."""
    from inference_plugin.engines.sglang.model import SglangModel

    class Keeps(nn.Linear):
        def load_weights(self, tensors: Any) -> None:
            if not hasattr(self, "_cached_params_dict"):
                self._cached_params_dict = dict(self.named_parameters())
            for name, tensor in tensors:
                self._cached_params_dict[name].data.copy_(tensor)

    model: Any = Keeps(1, 1, bias=False)
    unbound: Any = object.__new__(SglangModel)
    for number in range(loads):
        model.weight = nn.Parameter(torch.zeros(1, 1))
        unbound.load_weights(model, [("weight", torch.full((1, 1), number + 1.0))])
        assert model.weight.item() == number + 1


@pytest.mark.parametrize(
    ("drafts", "backup", "of_draft", "sleeps"),
    [(True, False, False, False), (True, False, True, True), (True, True, False, True), (False, False, False, True)],
)
def test_sglang_sleeps_on_level_2_unless_the_weights_of_a_draft_would_be_gone(
    drafts: bool, backup: bool, of_draft: bool, sleeps: bool
) -> None:
    from inference_plugin.engines.sglang.served import ServedModel

    saver = SimpleNamespace(memory_saver_adapter=SimpleNamespace(enabled=True))
    flags = SimpleNamespace(enable_weights_cpu_backup=backup, enable_draft_weights_cpu_backup=of_draft)
    model: Any = SimpleNamespace(_updater=saver, _arguments=flags, draft=object() if drafts else None)
    assert (ServedModel.why_no_sleep(model, 2) is None) == sleeps
    assert (ServedModel.why_no_sleep(model, 1) is None) == backup


class OfNoKind:
    """As SGLang's methods for MXFP4 on some GPUs: of no class that the others have."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        layer.scale.data.mul_(2)  # type: ignore[union-attr, operator]


def test_sglang_s_post_processing_is_repeated_whatever_class_it_is_of() -> None:
    from inference_plugin.engines.sglang.model import SglangModel

    layer = nn.Module()
    layer.scale = nn.Parameter(torch.ones(2), requires_grad=False)
    layer.quant_method = OfNoKind()
    plain = nn.Linear(2, 2)
    plain.quant_method = None
    model = SglangModel.__new__(SglangModel)
    model.skeleton = nn.ModuleDict({"experts": layer, "plain": plain})
    ((name, finish),) = model.finishers().items()
    finish(layer)
    assert (name, layer.scale.tolist()) == ("experts", [2, 2])


def test_a_cache_that_an_engine_gets_while_it_runs_ends_its_updates() -> None:
    from inference_plugin.install.installer import ModelInstaller
    from inference_plugin.wire.errors import EngineUnsupported

    class Attached(LiveModel):
        cache: str | None = None

        def why_stale(self) -> str | None:
            return self.cache

    model = Attached(nn.Linear(1, 1), torch.device("cpu"), nn.Linear(1, 1))
    installer = model.installer("policy")
    assert isinstance(installer, ModelInstaller)
    installer.check_terms()
    model.cache = "a store keeps what the old weights computed"
    with pytest.raises(EngineUnsupported, match="a store keeps"):
        installer.check_terms()
    model.cache, model.adapter_slots = None, cast(Any, object())
    adapter = model.installer("lora.policy")
    adapter.check_terms()
    model.cache = "a store keeps what the old adapter computed"
    with pytest.raises(EngineUnsupported, match="a store keeps"):
        adapter.check_terms()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(2, 2)
        self.norm = nn.LayerNorm(2)
        self.derived: torch.Tensor | None = None


class Wrapper(nn.Module):
    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base_layer = base
        self.slots = nn.Parameter(torch.ones(2))


def test_what_is_set_on_a_model_without_its_wrappers_is_set_on_the_model_that_the_engine_runs() -> None:
    """SGLang with LoRA went on computing with weights that had been derived for a copy of its attention."""
    model = nn.Sequential(Attention(), nn.Linear(2, 2))
    attention, project = model[0], model[0].project
    attention.project = Wrapper(project)
    seen: Any = live.without_wrappers(model, Wrapper)
    assert seen is not model and seen[1] is model[1] and isinstance(seen[0], Attention)
    assert seen[0].project is project and seen.get_submodule("0.project") is project
    assert [name for name, _ in seen.named_parameters()] == [
        *("0.project.weight", "0.project.bias", "0.norm.weight", "0.norm.bias"),
        *("1.weight", "1.bias"),
    ]
    seen[0].derived = torch.ones(3)
    assert attention.derived is seen[0].derived
    attention.late = torch.zeros(1)
    assert seen[0].late is attention.late
    del seen[0].derived
    assert not hasattr(attention, "derived")
    seen[0].norm.weight = nn.Parameter(torch.zeros(2))
    assert attention.norm.weight is seen[0].norm.weight
    assert attention.project.base_layer is project, "the engine's own is untouched"
    with pytest.raises(AttributeError, match="absent"):
        _ = seen[0].absent
