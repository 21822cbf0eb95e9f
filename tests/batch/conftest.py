"""The in-memory client in the place of the one that moves bytes."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.batch.memory_owner import MemoryClient, MemoryOwner


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> MemoryClient:
    client = MemoryClient()
    monkeypatch.setitem(sys.modules, "trainer_adapters.batch.client", client)
    return client


@pytest.fixture
def owner(client: MemoryClient) -> MemoryOwner:
    return MemoryOwner(client)


RAY_JOB = {"WEIGHTWIRE_JOB": f"ray-{os.getpid()}"}


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """A small Ray of its own. Its actors are of this test's job and import what the tests do."""
    ray = pytest.importorskip("ray")
    job = RAY_JOB | {"WEIGHTWIRE_RUNTIME_DIR": tempfile.mkdtemp(prefix="ww-ray-")}  # short: sockets lie in it
    root = str(Path(__file__).resolve().parents[2])
    ray.init(
        "local",  # not one that runs here already
        num_cpus=2,
        object_store_memory=100 << 20,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": job | {"PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}},
    )
    try:
        yield ray
    finally:
        ray.shutdown()
        shutil.rmtree(job["WEIGHTWIRE_RUNTIME_DIR"], ignore_errors=True)


@pytest.fixture
def ray_job(ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is of the job of Ray's actors, which find it in its runtime directory."""
    for name, value in ray.get_runtime_context().runtime_env["env_vars"].items():
        if name.startswith("WEIGHTWIRE_"):
            monkeypatch.setenv(name, value)
