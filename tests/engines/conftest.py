"""Checkpoints and the runtime directory that the tests with real engines share."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.support import models
from tests.support.engines import session_directory
from tests.support.lora_trainer import LoRATrainer

Checkpoint = Callable[..., Path]


@pytest.fixture(scope="session")
def runtime() -> Iterator[Path]:
    with session_directory() as path:
        yield path


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """`checkpoint("llama", tied=False, seed=1)`: a tiny float32 model on disk, made once."""
    makers = {"llama": models.make_llama, "qwen3": models.make_qwen3, "qwen3_moe": models.make_qwen3_moe}
    root = tmp_path_factory.mktemp("models")

    @functools.cache
    def make(kind: str, *, tied: bool, seed: int) -> Path:
        name = f"{kind}-{'tied' if tied else 'untied'}-{seed}"
        return makers[kind](root / name, seed=seed, tied=tied, dtype=torch.float32)

    return make


@pytest.fixture(scope="module")
def lora_trainer(runtime: Path) -> Iterator[LoRATrainer]:
    with LoRATrainer(Path(tempfile.mkdtemp(dir=runtime))) as trainer:
        yield trainer
