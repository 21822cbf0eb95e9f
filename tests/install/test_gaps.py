"""Elements that an update leaves unwritten in a storage that it writes: in a buffer, or beside the parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import pytest
import torch
from torch import nn

from inference_plugin.engines.live_model import LiveModel
from inference_plugin.engines.skeleton import build_skeleton
from inference_plugin.install.installer import ModelInstaller
from inference_plugin.install.negotiation import agree
from inference_plugin.install.policies import WayBack
from inference_plugin.install.staged import StagedInstaller
from inference_plugin.wire.errors import ManifestMismatch
from inference_plugin.wire.manifest import Manifest
from tests.install.installing import segment_of, update
from tests.install.test_zones import Zoned
from tests.support.plain_engine import manifest_of

ROWS, HELD = 4, 8
CONSTRUCTED = 7.0


class Model(nn.Module):
    """Computes with all of `table`, which the checkpoint's tensors `table` and `more` fill."""

    def __init__(self, is_buffer: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(ROWS, ROWS), requires_grad=False)
        whole = torch.full((HELD,), CONSTRUCTED)
        if is_buffer:
            self.register_buffer("table", whole)
        else:
            self.table = nn.Parameter(whole[:ROWS], requires_grad=False)

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            if name == "weight":
                self.weight.data.copy_(tensor)
            else:
                start = ROWS if name == "more" else 0
                self.table.data[start : start + ROWS].copy_(tensor)  # type: ignore[union-attr, index]

    def whole_table(self) -> list[float]:
        return torch.empty(0).set_(self.table.untyped_storage()).tolist()  # type: ignore[union-attr, call-overload, no-any-return]


class Engine(LiveModel):
    def __init__(self, is_buffer: bool, *more: str) -> None:
        skeleton = build_skeleton(lambda: Model(is_buffer), torch.no_grad())
        live = Model(is_buffer)
        live.load_weights(weights(1.0, *more).items())
        super().__init__(live, torch.device("cpu"), *skeleton)

    def free_bytes(self) -> int:
        return 1 << 30


def weights(value: float, *more: str) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((ROWS, ROWS), value), **{n: torch.full((ROWS,), value) for n in ("table", *more)}}


@pytest.mark.parametrize("is_buffer", [True, False])
@pytest.mark.parametrize("policy", ["copy", "standby"])
def test_what_no_tensor_fills_keeps_its_bytes_in_buffers_and_beside_parameters(policy: str, is_buffer: bool) -> None:
    model = Engine(is_buffer)
    installer = ModelInstaller(model)
    manifest = manifest_of(weights(0.0))
    assert installer.open(manifest, policy, partial=False).install == policy
    for value in (2.0, 3.0, 4.0):
        update(installer, manifest, weights(value))
        assert model.live.whole_table() == [value] * ROWS + [CONSTRUCTED] * (HELD - ROWS)  # type: ignore[operator]


def test_a_part_of_a_buffer_that_the_engines_checkpoint_filled_must_be_sent() -> None:
    model = Engine(True, "more")
    installer = ModelInstaller(model)
    with pytest.raises(ManifestMismatch, match="fills these buffers, which the engine reads from a checkpoint: table"):
        installer.open(manifest_of(weights(0.0)), "copy", partial=False)
    manifest = manifest_of(weights(0.0))
    installer.open(manifest, "standby", partial=True)
    update(installer, manifest, weights(2.0))
    assert model.live.whole_table() == [2.0] * ROWS + [1.0] * (HELD - ROWS)  # type: ignore[operator]
    whole = manifest_of(weights(0.0, "more"))
    installer.open(whole, "standby", partial=False)
    update(installer, whole, weights(3.0, "more"))
    assert model.live.whole_table() == [3.0] * HELD  # type: ignore[operator]


class Padded(nn.Module):
    """Computes with the first half of `table`, unless the checkpoint has `more`. Its loader drops all other tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.full((HELD,), CONSTRUCTED), requires_grad=False)

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            if name in ("table", "more"):
                self.table.data.narrow(0, ROWS if name == "more" else 0, ROWS).copy_(tensor)


class PaddedEngine(LiveModel):
    model: type[nn.Module] = Padded

    def __init__(self, *more: str) -> None:
        self.tensors = {name: torch.full((ROWS,), 1.0) for name in ("table", *more)}
        live = self.model()
        live.load_weights(self.tensors.items())  # type: ignore[operator]
        super().__init__(live, torch.device("cpu"), *build_skeleton(self.model, torch.no_grad()))

    def free_bytes(self) -> int:
        return 1 << 30

    def checkpoint(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in self.tensors.items()}


@pytest.mark.parametrize("policy", ["copy", "standby"])
def test_what_an_engine_pads_a_parameter_with_stays_where_its_own_checkpoint_leaves_it_too(policy: str) -> None:
    """As DeepSeek-V4's sinks in vLLM, which a kernel wants for 64 heads or 128."""
    model = PaddedEngine()
    installer = ModelInstaller(model)
    manifest = manifest_of({"table": torch.zeros(ROWS)})
    assert installer.open(manifest, policy, partial=False).install == policy
    for value in (2.0, 3.0, 4.0):
        update(installer, manifest, {"table": torch.full((ROWS,), value)})
        assert model.live.table.tolist() == [value] * ROWS + [CONSTRUCTED] * (HELD - ROWS)  # type: ignore[union-attr, operator]


@pytest.mark.parametrize("checkpoint", [("more",), ("dropped",)])
def test_a_part_of_a_parameter_that_the_engines_checkpoint_may_fill_must_be_sent(checkpoint: tuple[str, ...]) -> None:
    """A tensor that the loader drops may be one that it would take in another order."""
    installer = ModelInstaller(PaddedEngine(*checkpoint))
    with pytest.raises(
        ManifestMismatch, match=r"no tensor of the manifest fills these parameters: table \(4 elements\)"
    ):
        installer.open(manifest_of({"table": torch.zeros(ROWS)}), "copy", partial=False)


class Doubles:
    """A quantisation method that derives a tensor from all of a parameter, and leaves the parameter as it is."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        layer.doubled = layer.table.detach() * 2  # type: ignore[union-attr, operator]


class Doubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Padded()
        self.inner.quant_method = Doubles()  # type: ignore[assignment]

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.inner.load_weights(tensors)


class DoubledEngine(PaddedEngine):
    model, post_processing = Doubled, Doubles

    def __init__(self, *more: str) -> None:
        super().__init__(*more)
        Doubles().process_weights_after_loading(self.live.inner)  # type: ignore[arg-type]


def updates(
    how: str, model: LiveModel, manifest: Manifest, *, partial: bool
) -> Callable[[Mapping[str, torch.Tensor]], None]:
    """A function that installs these tensors and confirms them."""
    if how == "zone":
        zoned = Zoned(model, manifest, partial=partial)
        return lambda tensors: zoned.update(tensors, [manifest.whole(0)])
    if how == "staged":  # as on a device with room for a second set
        installer: StagedInstaller | ModelInstaller = StagedInstaller(
            agree(model, manifest, partial=partial), WayBack()
        )
    else:
        installer = ModelInstaller(model)
        installer.open(manifest, how, partial=partial)

    def install(tensors: Mapping[str, torch.Tensor]) -> None:
        segment = segment_of(dict(tensors), manifest)
        installer.prepare(segment, lambda: None)
        installer.install(segment)
        installer.finish()

    return install


@pytest.mark.parametrize("checkpoint", [(), ("more",)], ids=["padded", "a-part"])
@pytest.mark.parametrize("how", ["copy", "standby", "zone", "staged"])
def test_what_is_derived_of_a_parameter_follows_the_elements_that_no_tensor_fills(
    how: str, checkpoint: tuple[str, ...]
) -> None:
    model, manifest = DoubledEngine(*checkpoint), manifest_of({"table": torch.zeros(ROWS)})
    install = updates(how, model, manifest, partial=bool(checkpoint))
    left = 1.0 if checkpoint else CONSTRUCTED
    for value in (2.0, 3.0, 4.0):
        install({"table": torch.full((ROWS,), value)})
        whole = [value] * ROWS + [left] * (HELD - ROWS)
        assert model.live.inner.table.tolist() == whole  # type: ignore[union-attr, operator]
        assert model.live.inner.doubled.tolist() == [2 * each for each in whole]  # type: ignore[union-attr, operator]
