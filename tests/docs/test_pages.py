"""The pages say what is so: their links lead somewhere, their code imports what there is, and names in them exist."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import trainer_adapters
import weightwire
from tests.support.pages import PAGES, Block, anchors, blocks, code, links, name
from tests.support.rig import ROOT

PYTHON_BLOCKS = [block for page in PAGES for block in blocks(page, "python")]
OURS = ("inference_plugin", "trainer_adapters", "weightwire")
INTEGRATIONS = "trainer_adapters.integrations."
ELSEWHERE = {
    "areal",
    "deepspeed",
    "megatron",
    "monarch",
    "my_package",
    "openrlhf",
    "prime_rl",
    "roll",
    "sglang",
    "skyrl",
    "slime",
    "swift",
    "torchtitan",
    "train",  # slime's program
    "trl",
    "verl",
}
"""What the pages import that this environment lacks."""
CODE = [*OURS, "tests", "examples", "benchmarks", "tools"]


@pytest.mark.parametrize("block", PYTHON_BLOCKS, ids=str)
def test_a_block_of_python_compiles_and_every_name_that_it_imports_exists(block: Block) -> None:
    tree = compile(block.text, str(block), "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    missing = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            missing += [alias.name for alias in node.names if not exists(alias.name)]
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None and not node.level
            missing += [f"{node.module}.{each.name}" for each in node.names if not exists(node.module, each.name)]
    assert missing == []


def exists(module: str, attribute: str = "") -> bool:
    if module.partition(".")[0] in ELSEWHERE:
        return True
    if module.partition(".")[0] not in OURS and importlib.util.find_spec(module.partition(".")[0]) is None:
        return False
    if module.startswith(INTEGRATIONS) and importlib.util.find_spec(module.removeprefix(INTEGRATIONS)) is None:
        text = (ROOT / f"{module.replace('.', '/')}.py").read_text()  # it imports its project, which isn't here
        return not attribute or re.search(rf"^(class|def) {attribute}\b", text, re.MULTILINE) is not None
    found = importlib.import_module(module)
    return not attribute or hasattr(found, attribute) or importlib.util.find_spec(f"{module}.{attribute}") is not None


@pytest.mark.parametrize("block", PYTHON_BLOCKS, ids=str)
def test_a_block_of_python_passes_only_arguments_that_our_classes_take(block: Block) -> None:
    tree = compile(block.text, str(block), "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    unknown = []
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        called = call.func.id if isinstance(call.func, ast.Name) else ""
        if called in trainer_adapters.__all__:
            parameters = inspect.signature(getattr(trainer_adapters, called)).parameters
            unknown += [f"{called}({each.arg}=)" for each in call.keywords if each.arg and each.arg not in parameters]
    assert unknown == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_link_of_a_page_leads_to_a_file_and_a_heading(page: Path) -> None:
    broken = []
    for link in links(page):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_variables_make_targets_and_files_that_a_page_names_exist(page: Path) -> None:
    variables = set(re.findall(r"\bWEIGHTWIRE_[A-Z][A-Z_]*[A-Z]\b", page.read_text()))
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    used: set[str] = set()
    files: set[str] = set()
    for text in code(page):
        used |= set(re.findall(r"(?:^|[^\w.])make ([a-z][a-z-]*)", text))
        files |= set(re.findall(rf"(?<![\w/.])((?:{'|'.join(CODE)})/[\w/]+\.(?:py|c))\b", text))
    assert {variable for variable in variables if variable not in known_text()} == set()
    assert used - targets == set()
    assert {file for file in files if not (ROOT / file).exists()} == set()


def known_text(cache: list[str] = []) -> str:  # noqa: B006 -- read once
    if not cache:
        cache.append("\n".join(p.read_text() for folder in CODE for p in sorted((ROOT / folder).rglob("*.py"))))
        cache[0] += "".join(f" WEIGHTWIRE_{field.upper()}" for field in trainer_adapters.Config.__struct_fields__)
    return cache[0]


def test_every_command_of_the_command_line_that_the_pages_name_exists() -> None:
    shown = subprocess.run([sys.executable, "-m", "weightwire", "--help"], capture_output=True, text=True, check=True)
    there = set(re.findall(r"^[^\w\n]*([a-z][a-z-]+) {2,}\S", shown.stdout, re.MULTILINE))
    assert {"status", "doctor", "verify", "keygen"} <= there
    named = {
        (command, name(page))
        for page in PAGES
        for text in code(page)
        for command in re.findall(r"(?:^|\$ |-m )weightwire ([a-z][a-z-]+)\b", text, re.MULTILINE)
    }
    assert len(named) > 10
    assert {(command, page) for command, page in named if command not in there} == set()


def test_what_the_pages_install_is_a_checkout_with_extras_that_there_are() -> None:
    """No package index has a release of ours."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    commands = [
        match
        for page in PAGES
        for text in code(page)
        for match in re.findall(r"pip install +'?([\w.]+)(?:\[(\w+)\])?", text)
    ]
    ours = [(what, extra) for what, extra in commands if what in (".", "weightwire")]
    assert len(ours) > 4 and {what for what, _ in ours} == {"."}
    assert {extra for _, extra in ours if extra} <= set(extras)


def test_what_errors_tell_a_user_to_install_is_a_checkout_with_extras_that_there_are() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    source = "\n".join(path.read_text() for folder in OURS for path in sorted((ROOT / folder).rglob("*.py")))
    told = re.findall(r"pip install +'?([\w.]+)(?:\[(\w+)\])?", source)
    ours = [(what, extra) for what, extra in told if what in (".", "weightwire")]
    assert len(ours) > 4 and {what for what, _ in ours} == {"."}
    assert {extra for _, extra in ours if extra} <= set(extras)


def test_every_page_of_docs_is_in_the_navigation_of_the_site() -> None:
    listed = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    there = {str(page.relative_to(ROOT / "docs")) for page in PAGES if page.is_relative_to(ROOT / "docs")}
    assert there == listed


# --- README -----------------------------------------------------------------------------------------------------------


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 130


def test_the_readme_has_a_light_and_a_dark_picture_of_the_same_content() -> None:
    for stem in ("docs/assets/overview", "benchmarks/results/update"):
        light, dark = ((ROOT / f"{stem}-{theme}.svg").read_text() for theme in ("light", "dark"))
        assert light != dark
        assert re.sub("#[0-9a-f]{6}", "", light) == re.sub("#[0-9a-f]{6}", "", dark)


def test_a_page_is_found_wrong_if_it_is(tmp_path: Path) -> None:
    """The checks above see something."""
    page = tmp_path / "page.md"
    page.write_text(
        "# One `two`, three\n\n[a](#one-two-three) [b](gone.md)\n\n```python\nimport trainer_adapters\n```\n"
    )
    assert anchors(page) == {"one-two-three"}
    assert list(links(page)) == ["#one-two-three", "gone.md"]
    assert not exists("trainer_adapters", "Nonsense") and not exists("no_such_package")


def test_the_reference_has_every_public_name() -> None:
    page = (ROOT / "docs" / "reference.md").read_text()
    there = re.findall(r"^::: weightwire\.(\w+)$", page, re.MULTILINE)
    assert sorted(there) == sorted(name for name in weightwire.__all__ if not name.startswith("__"))


def test_the_layout_in_contributing_names_every_module() -> None:
    layout = (ROOT / "CONTRIBUTING.md").read_text().partition("## Layout and arrows")[2].partition("\n## ")[0]
    named = set(re.findall(r"\w+", layout))
    modules = [path for package in OURS for path in (ROOT / package).rglob("*.py") if not path.stem.startswith("__")]
    assert [str(path.relative_to(ROOT)) for path in modules if path.stem not in named] == []
