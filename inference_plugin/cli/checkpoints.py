"""A safetensors checkpoint on disk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inference_plugin.cli.output import stop

if TYPE_CHECKING:
    import torch

__all__ = ["Checkpoint", "dtype_named"]


class Checkpoint(Mapping[str, "torch.Tensor"]):
    """Whole tensors by name, each read when it is asked for. Ends the command where `path` is no checkpoint."""

    def __init__(self, path: Path) -> None:
        """`path`: a directory with *.safetensors, or one such file."""
        try:
            from safetensors import safe_open
        except ImportError:
            raise stop(
                "reading a checkpoint needs safetensors: pip install '.[cli]' in a checkout of weightwire"
            ) from None
        if not path.exists():
            raise stop(f"{path} does not exist")
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        if not files or not all(file.is_file() for file in files):
            raise stop(f"{path} is no safetensors file and holds none")
        try:
            handles: list[Any] = [safe_open(file, framework="pt") for file in files]
        except Exception as error:  # noqa: BLE001 -- safetensors' own, or the file system's
            raise stop(f"{path} can't be read as safetensors: {error}") from None
        self._where = {name: handle for handle in handles for name in handle.keys()}  # noqa: SIM118 -- not a dict

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._where[name].get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)


def dtype_named(name: str | None) -> torch.dtype | None:
    """The dtype that `--dtype` names; None if the option is not given. Ends the command if torch has no such dtype."""
    import torch

    found = getattr(torch, name, None) if name else None
    if name is not None and not isinstance(found, torch.dtype):
        raise stop(f"--dtype {name}: torch has no dtype of that name")
    return found
