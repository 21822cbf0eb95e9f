"""Checkpoints and the runtime directory that the tests with real engines share."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.support import checkpoints, models, poison
from tests.support.engines import session_directory
from tests.support.lora_trainer import LoRATrainer

Checkpoint = Callable[..., Path]
Versions = Callable[[str], tuple[Path, Path]]


@pytest.fixture(scope="module", autouse=True)
def poisoned() -> Iterator[None]:
    """The trainer's side of it: segments that start as 0xFF."""
    undo = poison.spread()
    yield
    undo()


@pytest.fixture(scope="session")
def runtime() -> Iterator[Path]:
    with session_directory() as path:
        yield path


@pytest.fixture(scope="session", autouse=True)
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The store of the transport of that name, for engines and their trainers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WEIGHTWIRE_STORE_URL", f"file://{tmp_path_factory.mktemp('store')}")
        yield


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """`checkpoint("llama", tied=False, seed=1)`: a tiny float32 model on disk, made once."""
    makers = {
        "llama": models.make_llama,
        "llama_deep": functools.partial(models.make_llama, num_hidden_layers=4),  # for three stages of a pipeline
        "qwen3": models.make_qwen3,
        "qwen3_wide": functools.partial(models.make_qwen3, vocab_size=65536),  # its embedding fills several buckets
        "qwen3_large": functools.partial(models.make_qwen3, vocab_size=65536, hidden_size=320),  # 80 MiB
        "qwen3_moe": models.make_qwen3_moe,
    }
    root = tmp_path_factory.mktemp("models")

    @functools.cache
    def make(kind: str, *, tied: bool, seed: int) -> Path:
        name = f"{kind}-{'tied' if tied else 'untied'}-{seed}"
        return makers[kind](root / name, seed=seed, tied=tied, dtype=torch.float32)

    return make


@pytest.fixture(scope="session")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Versions:
    """`versions("gpt2")`: two checkpoints of a kind of `checkpoints.MAKERS`, made once."""
    root = tmp_path_factory.mktemp("versions")

    @functools.cache
    def make(kind: str) -> tuple[Path, Path]:
        one, two = (checkpoints.make(kind, root / f"{kind}-{seed}", seed) for seed in (1, 2))
        return one, two

    return make


@pytest.fixture(scope="module")
def lora_trainer(runtime: Path) -> Iterator[LoRATrainer]:
    with LoRATrainer(Path(tempfile.mkdtemp(dir=runtime))) as trainer:
        yield trainer
