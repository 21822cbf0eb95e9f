"""What a checkpoint holds: names, shapes and dtypes, from the headers of its files, and some tensors of it."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

__all__ = ["checkpoint_directory", "checkpoint_headers", "read_headers", "read_tensors"]

logger = logging.getLogger(__name__)

INDEX = "model.safetensors.index.json"


def checkpoint_headers(
    model: str, revision: str | None = None, subfolder: str = ""
) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and dtypes by name, of `model`: a directory, or a name in the hub of which this machine holds a copy. `subfolder`:
    where in it.

    Asks no network. Empty where there are no safetensors files, or where they can't be read.
    """
    try:
        return read_headers(checkpoint_directory(model, revision) / subfolder)
    except Exception as error:  # noqa: BLE001 - the hub's, safetensors' or the file system's: the checkpoint is then unknown
        logger.info("weightwire: the checkpoint %s can't be read: %s: %s", model, type(error).__name__, error)
        return {}


def checkpoint_directory(model: str, revision: str | None = None) -> Path:
    """Where the files of a model are, as in `checkpoint_headers`. Raises what the hub's library raises if they aren't here."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model, revision=revision, local_files_only=True))


def read_headers(directory: Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """`checkpoint_headers` of a directory. Raises OSError, or what safetensors raises, if files are missing or can't be read."""
    found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for file in _opened(directory):
        for name in file.keys():  # noqa: SIM118 - not a dict
            view = file.get_slice(name)
            shape = tuple(view.get_shape())
            found[name] = shape, (view[:0] if shape else file.get_tensor(name)).dtype
    return found


def read_tensors(directory: Path, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Tensors of a directory's files, by name. Raises as `read_headers` does; a name that isn't there is left out."""
    wanted = set(names)
    return {name: file.get_tensor(name) for file in _opened(directory) for name in wanted.intersection(file.keys())}


def _opened(directory: Path) -> Iterator[Any]:
    """The files of a checkpoint, each open until the next one is asked for."""
    from safetensors import safe_open

    index = directory / INDEX
    files = sorted(directory.glob("*.safetensors"))
    if index.is_file():  # as engines do: other files may hold the same weights under other names
        files = [directory / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    for path in files:
        with safe_open(path, framework="pt") as file:
            yield file
