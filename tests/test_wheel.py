"""The wheel, as a user gets it: built from the sources, and installed where this repository has never been.

The other packages of that environment are those of the tests' own, so that nothing has to be downloaded.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
import urllib.request
import venv
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import models
from tests.support.engines import ENGINE_ARGUMENTS, ENVIRONMENT, ROOT, START_TIMEOUT_S, free_port, session_directory

pytestmark = [pytest.mark.slow, pytest.mark.full]

SOURCES = ("inference_plugin", "trainer_adapters", "weightwire", "pyproject.toml", "setup.py", "README.md", "LICENSE")
TEN_LINES = """
import torch

from trainer_adapters import ModuleAdapter, SyncManager, UpdateReport


def train(model: torch.nn.Module, steps: int) -> list[UpdateReport]:
    with SyncManager(install="standby", timeout_s=60) as manager:
        source = ModuleAdapter(model, dtype_rules={"*": torch.bfloat16})
        return [manager.update(source, step) for step in range(1, steps + 1)]
"""
WRONG = "from trainer_adapters import SyncManager\n\nSyncManager(install='sideways')\n"


def built(directory: Path, **environment: str) -> zipfile.ZipFile:
    """The wheel of a clean copy of the sources."""
    copy = directory / "sources"
    for name in SOURCES:
        source, target = ROOT / name, copy / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
        else:
            shutil.copy(source, target)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir"]
    environment = {**os.environ, **environment}
    subprocess.run([*command, directory, copy], env=environment, capture_output=True, check=True, text=True)
    (wheel,) = directory.glob("*.whl")
    return zipfile.ZipFile(wheel)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a program of an environment into which the wheel is installed, elsewhere than in the repository."""
    directory = tmp_path_factory.mktemp("wheel")
    with built(directory) as wheel:
        pass
    home = directory / "environment"
    venv.create(home, with_pip=False)
    own = home / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    # A directory of a .pth file is searched, its own .pth files are not read: no editable install of ours is found there.
    (own / "others.pth").write_text(sysconfig.get_path("purelib"))
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        home / "bin" / "python",
        "install",
        "--no-deps",
        "--no-index",
        "--quiet",
    ]
    subprocess.run([*pip, "--ignore-installed", str(wheel.filename)], capture_output=True, check=True, text=True)

    def run(program: str, *arguments: str, ok: bool = True) -> subprocess.CompletedProcess[str]:
        ours = ("PYTHONPATH", "WEIGHTWIRE_TEST_")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        ran = subprocess.run(
            [home / "bin" / program, *arguments],
            cwd=directory,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (ran.returncode == 0) is ok, ran.stdout + ran.stderr
        return ran

    run.home = home  # type: ignore[attr-defined]
    return run


def test_a_wheel_says_by_its_tag_whether_the_compiled_copy_is_in_it(tmp_path: Path) -> None:
    for name, environment in (("compiled", {}), ("pure", {"CC": "/bin/false"})):
        (tmp_path / name).mkdir()
        with built(tmp_path / name, **environment) as wheel:
            names = wheel.namelist()
            has_copy = any(each.endswith("_copying.abi3.so") for each in names)
            tag = Path(str(wheel.filename)).stem.split("-", 2)[2]
        assert has_copy is (name == "compiled")
        assert tag.startswith("cp311-abi3-linux") if has_copy else tag == "py3-none-any"
        assert {"trainer_adapters/py.typed", "inference_plugin/py.typed", "weightwire/py.typed"} <= set(names)
        assert not [each for each in names if each.startswith(("tests/", "benchmarks/", "tools/"))]


def test_a_users_ten_lines_are_typed_against_the_installed_wheel(installed: Any, tmp_path: Path) -> None:
    for text, code in ((TEN_LINES, 0), (WRONG, 1)):
        (tmp_path / "user.py").write_text(text)
        command = [sys.executable, "-m", "mypy", "--strict", "--python-executable", installed.home / "bin" / "python"]
        environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")}
        ran = subprocess.run(
            [*command, "user.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert ran.returncode == code, ran.stdout + ran.stderr
    assert "sideways" in ran.stdout or "arg-type" in ran.stdout


@pytest.fixture
def served(installed: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """The URL of vLLM's server, started as a user starts it, and the checkpoint that it serves."""
    model = models.make_qwen3(tmp_path / "a", seed=1, tied=True, dtype=torch.float32)
    with session_directory() as runtime:
        for name, value in {**ENVIRONMENT, "WEIGHTWIRE_RUNTIME_DIR": str(runtime)}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("PYTHONPATH")
        port = free_port()
        flags = ["--model", str(model), "--host", "127.0.0.1", "--port", str(port)]
        for name, value in ENGINE_ARGUMENTS.items():
            flags += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
        log = (tmp_path / "log").open("wb")
        server = subprocess.Popen(
            [installed.home / "bin" / "python", "-m", "vllm.entrypoints.openai.api_server", *flags],
            cwd=tmp_path,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            deadline_s = time.monotonic() + START_TIMEOUT_S
            while not _healthy(port):
                assert server.poll() is None and time.monotonic() < deadline_s, (tmp_path / "log").read_text()[-3000:]
                time.sleep(0.3)
            yield f"http://127.0.0.1:{port}", model
        finally:
            server.terminate()
            server.wait(60)
            log.close()


def _healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def test_a_server_beside_the_installed_wheel_takes_a_checkpoint_that_the_command_pushes(
    installed: Any, served: tuple[str, Path], tmp_path: Path
) -> None:
    url, _ = served
    where = installed(
        "python", "-c", "import weightwire, inference_plugin; print(weightwire.__file__, inference_plugin.__file__)"
    )
    assert str(ROOT) not in where.stdout
    (replica,) = json.loads(installed("weightwire", "status", "--json").stdout)["replicas"]
    assert replica["state"] == "serving"
    other = models.make_qwen3(tmp_path / "b", seed=2, tied=True, dtype=torch.float32)
    installed("weightwire", "push", str(other), "--verify")
    probed = installed("weightwire", "verify", "--checkpoint", str(other), "--probe", url, "--json")
    assert json.loads(probed.stdout)["probe"]["largest_difference"] < 0.01
    assert "no problem" in installed("weightwire", "doctor").stdout.lower()
