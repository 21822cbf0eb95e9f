"""What a quantised checkpoint has: how each weight is kept, and what was measured when it was made.

Known are the forms in which published checkpoints come (`quant_method` in `config.json`; the schemes are in `quantization.py`):

- "fp8": blocks, under `NAME_scale_inv`, as DeepSeek and Qwen publish; without blocks, one `NAME_scale` per tensor;
- "compressed-tensors", as llm-compressor writes: 8 bits per channel, block or tensor, INT4 in groups, NVFP4, MXFP8;
- "modelopt": FP8, NVFP4 and MXFP8; "mxfp8" and "nvfp4" are the same under other names, as MiniMax and miles write them.

What was measured on data (scales of activations and of caches) is kept as it is: no update changes it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import torch

from inference_plugin.wire.checkpoint_headers import checkpoint_directory, read_headers, read_tensors
from inference_plugin.wire.errors import ArgumentError, first_few
from inference_plugin.wire.manifest import TensorSpec
from inference_plugin.wire.tensors import dtype_name
from trainer_adapters.sources.quantization import FP8, MXFP8, NVFP4, EightBits, FP8InBlocks, PackedInt4, Scheme

__all__ = ["QuantizedCheckpoint", "read_checkpoint"]

Headers: TypeAlias = Mapping[str, tuple[tuple[int, ...], torch.dtype]]

METHODS = ("fp8", "compressed-tensors", "modelopt", "mxfp8", "nvfp4")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
EXPONENTS = (torch.uint8, torch.float8_e8m0fnu)
MX_COLUMNS, NVFP4_COLUMNS = 32, 16
KEPT = (
    "input_scale",
    "activation_scale",
    "input_zero_point",
    "input_global_scale",
    "output_scale",
    "q_scale",
    "k_scale",
    "v_scale",
    "kv_scale",
    "weight_shape",
)
"""The last parts of names of tensors that are sent as the checkpoint has them."""
LAST = ("o_proj", "out_proj", "wo", "dense", "down_proj", "w2", "fc2", "c_proj")
"""Layers whose input is what others of their module have made: no engine fuses them with these."""
STRANGE = ("weight_zero_point", "weight_g_idx", "g_idx", "pre_quant_scale")
"""Those of tensors on which a weight's stored values depend, and that can't be made."""


@dataclass(frozen=True)
class QuantizedCheckpoint:
    schemes: Mapping[str, Scheme]
    """How a weight is kept, by its name."""
    kept: Mapping[str, torch.Tensor]
    """By name, what was measured when the checkpoint was made, and the shapes of packed weights."""
    strange: tuple[str, ...] = ()
    """Names of tensors that can't be made of the trainer's weights."""


class _Weights(msgspec.Struct):
    """What compressed-tensors says of the weights of a group of layers."""

    num_bits: int = 8
    type: str = "int"
    symmetric: bool = True
    strategy: str | None = None
    group_size: int | None = None
    block_structure: list[int] | None = None


class _Group(msgspec.Struct):
    weights: _Weights | None = None


class _About(msgspec.Struct):
    """`quantization_config`, as far as it tells of weights."""

    quant_method: str | None = None
    weight_block_size: list[int] | None = None
    scale_fmt: str | None = None
    config_groups: dict[str, _Group] | None = None
    transform_config: dict[str, Any] | None = None

    def weights(self, bits: int) -> list[_Weights]:
        """Those that have so many bits. Fewer than 8 may lie in bytes, too."""
        found = [group.weights for group in (self.config_groups or {}).values()]
        return [one for one in found if one is not None and one.num_bits == bits]


def read_checkpoint(checkpoint: str | Path) -> QuantizedCheckpoint:
    """Reads a quantised checkpoint's `config.json`, the headers of its files, and what it keeps beside weights.

    `checkpoint`: a directory with `config.json` and safetensors files, or a name in the hub of which this machine has a copy.
    Raises `ArgumentError` if it can't be read, is not quantised, or has nothing that can be made of the trainer's weights.
    """
    try:
        directory = checkpoint_directory(str(checkpoint))
        about = msgspec.convert(_config(directory), _About)
        headers = read_headers(directory)
    except Exception as error:
        raise _unreadable(checkpoint, error) from error
    if about.quant_method not in METHODS:
        raise ArgumentError(
            f"{directory} has quant_method {about.quant_method!r} in its config.json; known are {', '.join(METHODS)}",
            hint="serve the checkpoint in the trainer's dtype and let the engine quantise it, or send tensors in the engine's "
            "format by ExportAdapter",
        )
    if about.transform_config:
        raise ArgumentError(
            f"{directory} has a transform_config: its weights are rotated, and the engine turns what they are multiplied with",
            hint="start the engine from a checkpoint without transforms, or send rotated weights by ExportAdapter",
        )
    schemes: dict[str, Scheme] = {}
    strange: list[str] = []
    for name, (_, dtype) in headers.items():
        weight = name.removesuffix("_packed")
        if name.rpartition(".")[2] in STRANGE:
            strange.append(name)
        elif weight != name or (dtype in (FP8, torch.int8, torch.uint8) and not _is_kept(name, headers)):
            if (scheme := _scheme(weight, about, headers)) is None:
                strange.append(name)
            else:
                schemes[weight] = scheme
    if not schemes:
        beside = f"; it has {first_few(sorted(strange))}" if strange else ""
        raise ArgumentError(
            f"{directory} has no weight in FP8, INT8, INT4, NVFP4 or MXFP8 that can be made of the trainer's{beside}",
            hint="what can be made is on the documentation's page of QuantizedAdapter",
        )
    kept = [name for name in headers if name.rpartition(".")[2] in KEPT]
    one_scale = {weight: scheme.tensors[1].name for weight, scheme in schemes.items() if scheme.one_scale}
    try:
        values = read_tensors(directory, [*kept, *one_scale.values()])
    except Exception as error:
        raise _unreadable(checkpoint, error) from error
    for weight, scheme in schemes.items():
        if scheme.shares is not None:
            scale = values[one_scale[weight]].item() if weight in one_scale else None
            schemes[weight] = replace(scheme, shares=_shares(weight, scheme.shape[1], scale))
    return QuantizedCheckpoint(schemes, {name: values[name] for name in kept}, tuple(sorted(strange)))


def _config(directory: Path) -> Any:
    """`quantization_config`: that of the model, as engines read it, or of its text alone; older ones of ModelOpt have their own
    file. With the methods' usual names."""
    config = json.loads((directory / "config.json").read_text())
    given: Any = {}
    for part in (config, config.get("text_config") or {}):
        given = given or part.get("quantization_config") or part.get("compression_config") or {}
    if not given and (own := directory / "hf_quant_config.json").is_file():
        given = json.loads(own.read_text()).get("quantization", {})
    if not isinstance(given, dict):
        return given
    method = str(given.get("quant_method") or ("modelopt" if "quant_algo" in given else "")).lower()
    if method.startswith("modelopt"):
        method = "modelopt"
    return given | {"quant_method": method.replace("compressed_tensors", "compressed-tensors")}


def _unreadable(checkpoint: str | Path, error: Exception) -> ArgumentError:
    return ArgumentError(
        f"the quantised checkpoint {str(checkpoint)!r} can't be read: {type(error).__name__}: {error}",
        hint="give the directory of the checkpoint that the engine was started from; a name of the hub is found if this "
        "machine has a copy (`hf download`)",
    )


def _is_kept(name: str, headers: Headers) -> bool:
    """Whether it is no weight: measured, or a scale."""
    weight = name.removesuffix("_inv").removesuffix("_scale")
    is_scale = weight != name and (weight in headers or f"{weight}_packed" in headers)
    return is_scale or name.rpartition(".")[2] in KEPT


def _scheme(weight: str, about: _About, headers: Headers) -> Scheme | None:
    """How the weight is kept; None if that is not known."""
    values = f"{weight}_packed" if f"{weight}_packed" in headers else weight
    scales = next((name for name in (f"{weight}_scale_inv", f"{weight}_scale") if name in headers), "")
    if not scales or len(headers[values][0]) != 2:
        return None
    (rows, columns), dtype = headers[values]
    grid, scales_dtype = headers[scales]
    if dtype == torch.int32:
        return _int4(rows, columns * PackedInt4.in_a_number, values, scales, about, headers)
    if dtype == torch.uint8:
        return _nvfp4(weight, rows, columns * NVFP4.in_a_number, values, scales, headers)
    if f"{weight}_global_scale" in headers or f"{weight}_scale_2" in headers:
        return None
    shape, specs = (rows, columns), _specs(headers, values, scales)
    if dtype == FP8 and scales_dtype in EXPONENTS and grid == _grid(shape, (1, MX_COLUMNS)):
        return MXFP8(shape, (1, MX_COLUMNS), specs) if columns % MX_COLUMNS == 0 else None
    in_blocks = scales.endswith("_inv") and about.weight_block_size is not None
    if scales_dtype not in (*FLOATS, torch.float8_e8m0fnu) or (in_blocks and dtype != FP8):
        return None
    eight_bits = about.quant_method != "compressed-tensors" or about.weights(8)
    if math.prod(grid) == 1 and not in_blocks and scales_dtype in FLOATS and eight_bits:
        return EightBits(shape, shape, specs, shares="")
    for block in _blocks(shape, about, in_blocks=in_blocks):
        blocks = _grid(shape, block)
        if grid == blocks or (blocks[1] == 1 and grid == blocks[:1]):
            if in_blocks:
                exponents = about.scale_fmt == "ue8m0" or scales_dtype == torch.float8_e8m0fnu
                return FP8InBlocks(shape, block, specs, power_of_two=exponents)
            return EightBits(shape, block, specs) if scales_dtype in FLOATS else None
    return None


def _int4(rows: int, columns: int, values: str, scales: str, about: _About, headers: Headers) -> Scheme | None:
    grid, dtype = headers[scales]
    for group in about.weights(4):
        width = group.group_size or 0
        if (group.strategy, group.type, group.symmetric) != ("group", "int", True) or dtype not in FLOATS:
            continue
        if width > 0 and width % PackedInt4.in_a_number == columns % width == 0 and grid == (rows, columns // width):
            return PackedInt4((rows, columns), (1, width), _specs(headers, values, scales))
    return None


def _nvfp4(weight: str, rows: int, columns: int, values: str, scales: str, headers: Headers) -> Scheme | None:
    divides = values != weight
    of_matrix = f"{weight}_global_scale" if divides else f"{weight}_scale_2"
    whole, whole_dtype = headers.get(of_matrix, ((0,), None))
    if math.prod(whole) != 1 or whole_dtype != torch.float32 or columns % NVFP4_COLUMNS:
        return None
    if headers[scales] != (_grid((rows, columns), (1, NVFP4_COLUMNS)), FP8):
        return None
    specs = _specs(headers, values, scales, of_matrix)
    return NVFP4((rows, columns), (1, NVFP4_COLUMNS), specs, shares="", divides=divides)


def _shares(weight: str, columns: int, scale: float | None) -> str:
    """The same for the weights that an engine may fuse: layers of one module with the same input. `scale`: that of FP8 or INT8,
    which must be equal, too. An engine quantises fused weights in 8 bits anew where their scales differ; in NVFP4 it multiplies
    all by one of the scales."""
    module, _, layer = weight.removesuffix(".weight").rpartition(".")
    return weight if layer in LAST else f"{module}, {columns} columns: {scale}"


def _specs(headers: Headers, *names: str) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(name, dtype_name(headers[name][1]), headers[name][0]) for name in names)


def _grid(shape: tuple[int, int], block: tuple[int, int]) -> tuple[int, int]:
    return math.ceil(shape[0] / block[0]), math.ceil(shape[1] / block[1])


def _blocks(shape: tuple[int, int], about: _About, *, in_blocks: bool) -> list[tuple[int, int]]:
    """The blocks that a weight may be divided into, as the config says."""
    if in_blocks:
        sizes = [about.weight_block_size]
    else:
        sizes = [[1, shape[1]] for one in about.weights(8) if one.strategy == "channel" and one.symmetric]
        sizes += [one.block_structure for one in about.weights(8) if one.strategy == "block"]
        if about.quant_method == "modelopt":  # FP8_PER_CHANNEL_PER_TOKEN
            sizes.append([1, shape[1]])
    return [(size[0], size[1]) for size in sizes if size is not None and len(size) == 2 and min(size) > 0]
