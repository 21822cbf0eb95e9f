"""A safetensors checkpoint on disk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from inference_plugin.cli.output import stop

if TYPE_CHECKING:
    import torch

__all__ = ["Checkpoint", "dtype_named"]

INDEX = "model.safetensors.index.json"
PEFT = "base_model.model."
"""How the names in PEFT's files begin. Published models with LoRA layers of their own (Phi-4-multimodal) have other names."""


class _Index(msgspec.Struct):
    """By name of a tensor, the file that holds it."""

    weight_map: dict[str, str]


class Checkpoint(Mapping[str, "torch.Tensor"]):
    """Whole tensors by name, each read when it is asked for. Ends the command where `path` is no checkpoint of a whole model, or
    where it is not clear which of two files holds a tensor."""

    def __init__(self, path: Path) -> None:
        """`path`: a directory with *.safetensors, or one such file. A directory's index says which file holds a tensor, as for
        engines and transformers: other files there may be of an earlier save, or hold the weights under other names."""
        try:
            from safetensors import safe_open
        except ImportError:
            raise stop(
                "reading a checkpoint needs safetensors: pip install '.[cli]' in a checkout of weightwire"
            ) from None
        if not path.exists():
            raise stop(f"{path} does not exist: give a directory or a file; names of a model hub are not looked up")
        named = _named_by_the_index(path)
        files = [path / file for file in sorted(set(named.values()))] or [path]
        if path.is_dir() and not named:
            files = sorted(path.glob("*.safetensors"))
        if not files or not all(file.is_file() for file in files):
            raise stop(f"{path} is no safetensors file and holds none")
        self._where: dict[str, Any] = {}
        first: dict[str, Path] = {}
        for file in files:
            try:
                handle: Any = safe_open(file, framework="pt")
            except Exception as error:  # noqa: BLE001 -- safetensors' own, or the file system's
                raise stop(f"{path} can't be read as safetensors: {error}") from None
            for name in handle.keys():  # noqa: SIM118 -- not a dict
                if named and path / named.get(name, "") != file:
                    continue
                if name in first:
                    raise stop(
                        f"{first[name].name} and {file.name} both hold {name}, and no {INDEX} says which is meant: "
                        "remove one of them, or name the file"
                    )
                first[name], self._where[name] = file, handle
        if lacking := sorted(set(named) - set(self._where)):
            raise stop(f"{path / INDEX} names {lacking[0]}, which {named[lacking[0]]} does not hold")
        if any(name.startswith(PEFT) and ".lora_B." in name for name in self._where):
            raise stop(
                f"{path} is a LoRA adapter, whose B engines need multiplied by the scaling (alpha / r): load it with "
                "PeftModel.from_pretrained, and give the model to SyncManager('lora.NAME').update; or merge it into its base"
            )

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._where[name].get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)


def _named_by_the_index(path: Path) -> dict[str, str]:
    """By name of a tensor, the file that holds it; empty where there is no index."""
    index = path / INDEX
    try:
        named = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map if index.is_file() else {}
    except (OSError, msgspec.MsgspecError) as error:
        raise stop(f"{index} can't be read: {error}") from None
    if missing := sorted(file for file in set(named.values()) if not (path / file).is_file()):
        raise stop(f"{index} names {missing[0]}, which is not there")
    return named


def dtype_named(name: str | None) -> torch.dtype | None:
    """The dtype that `--dtype` names; None if the option is not given. Ends the command if torch has no such dtype."""
    import torch

    found = getattr(torch, name, None) if name else None
    if name is not None and not isinstance(found, torch.dtype):
        raise stop(f"--dtype {name}: torch has no dtype of that name; such as bfloat16, float32")
    return found
