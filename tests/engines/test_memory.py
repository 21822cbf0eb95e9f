"""How much memory an update takes in a real vLLM beside the live weights: what the policy holds, and that of a module or two.

Models of 100 to 200 MB, none of whose modules is large. A peak is the kernel's count of the worker's resident memory (`VmHWM`),
shared memory included, above what it is when `update` is called. From the third update of a manager on, the landing is mapped
already, and so is the second set of `standby`: what rises then is what making modules anew takes. `-rP` prints the figures.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from inference_plugin.wire.messages import InstallPolicy
from tests.support.checkpoints import REMOVED, Maker, load, maker_of
from tests.support.engines import Driver, eventually
from tests.support.families import LATENT, PLAIN_LATENT, ROUTED_EXPERTS, UNGROUPED_HEADS
from tests.support.memory import peak_of
from tests.support.quantised import that_start, w4a16
from tests.support.returning_plugin import RETURN_BYTES
from trainer_adapters import SyncManager

pytestmark = [pytest.mark.engine, pytest.mark.slow]

MIB = 1 << 20
PROOF_BYTES = 512 * MIB
"""A plan is proven, when the group is opened, in about this much memory."""
SPARE_BYTES = 24 * MIB
"""What an allocator may keep, and Python."""
DENSE: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 512,
    "decoder_sparse_step": 1,
}
DEEP: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 6,
}
FALCON: dict[str, Any] = {
    **UNGROUPED_HEADS,
    "num_attention_heads": 12,
    "intermediate_size": REMOVED,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class Case:
    """`modules`: what making one module takes, in times the largest module of the checkpoint."""

    maker: Maker
    modules: float
    engine: dict[str, Any] = field(default_factory=dict)


def case(stem: str, dtype: str, modules: float, shape: dict[str, Any], **engine: Any) -> Case:
    maker = maker_of(f"{stem}Config", f"{stem}ForCausalLM", dtype=getattr(torch, dtype), **shape)
    return Case(maker, modules, {"dtype": dtype, **engine})


CASES = {
    "packed": case("Llama", "bfloat16", 3, DENSE),
    "fp8 by the engine": case("Llama", "bfloat16", 10, DENSE, quantization="fp8_per_channel"),
    # vLLM spreads four bits over an int32, six times at once: 108 to 135 MiB for the 2.5 MiB of `gate_up_proj`
    "w4a16": Case(w4a16(**DENSE), 60, {"dtype": "bfloat16"}),
    "experts": case("Qwen3Moe", "bfloat16", 3, {**EXPERTS, "hidden_size": 512, "num_hidden_layers": 8}),
    "latent attention": case("DeepseekV2", "float32", 3, {**LATENT, **ROUTED_EXPERTS, **DEEP}, **PLAIN_LATENT),
    "loader, part by part": case("Falcon", "bfloat16", 4, {**FALCON, "hidden_size": 768, "num_hidden_layers": 12}),
}


@pytest.fixture(scope="module")
def driver(runtime: Path) -> Iterator[Driver]:
    with Driver(runtime, in_process=True, WEIGHTWIRE_PLUGINS="tests.support.returning_plugin:plugin") as one:
        yield one


def largest_module(tensors: Mapping[str, torch.Tensor]) -> int:
    """Bytes of the largest module of the engine, which makes one of the parts of a fused layer, and of a layer's experts."""
    sizes: Counter[str] = Counter()
    for name, tensor in tensors.items():
        module = re.sub(r"\.experts\..*", ".experts", name.rpartition(".")[0])
        sizes[re.sub(r"\.(q|k|v)_proj$", ".qkv", re.sub(r"\.(gate|up)_proj$", ".gate_up", module))] += tensor.nbytes
    return max(sizes.values())


@pytest.mark.parametrize("name", that_start(CASES))
def test_an_update_takes_the_memory_of_its_policy_and_of_a_module_or_two(
    driver: Driver, tmp_path: Path, name: str
) -> None:
    case = CASES[name]
    model = case.maker(tmp_path / "model", 1)
    first = load(model)
    others = {key: tensor if key.endswith("_shape") else tensor.roll(1, -1) for key, tensor in first.items()}
    sets = itertools.cycle([others, first])
    nbytes, largest = sum(tensor.nbytes for tensor in first.values()), largest_module(first)
    making = case.modules * largest + RETURN_BYTES + SPARE_BYTES
    driver.call("close")
    (about,) = driver.open(model, **case.engine)
    versions = itertools.count(1)
    print(f"{name}: {nbytes / MIB:.0f} MiB, the largest module {largest / MIB:.1f} MiB")
    policies: tuple[InstallPolicy, ...] = ("copy", "standby")
    for install in policies:
        peaks: list[int] = []
        with SyncManager(install=install, timeout_s=120) as manager:
            for _ in range(4):
                eventually(lambda: "weightwire-free" not in driver.call("threads"), what="the end of a freeing thread")
                driver.rpc("ext_return_freed_memory")
                with peak_of(about["pid"]) as peak:
                    (replica,) = manager.update(next(sets), next(versions)).replicas
                peaks.append(peak.nbytes)
        print(f"  {install}: {[round(peak / MIB) for peak in peaks]} MiB, {replica.extra_bytes / MIB:.0f} MiB reported")
        second_set = nbytes if replica.install == "standby" else 0
        assert replica.extra_bytes <= second_set + SPARE_BYTES
        landing, proof = (
            nbytes,
            min(3 * nbytes, PROOF_BYTES),
        )  # the first two updates each map a segment of the trainer's
        assert peaks[0] <= proof + landing + second_set + making
        assert peaks[1] <= landing + second_set + making
        assert max(peaks[2:]) <= second_set + making
