"""Survey of model families: update tiny random models of each in real engines, and write ``docs/models.md``.

    .venvs/vllm/bin/python -m tools.models                     # every family, on vLLM and on SGLang
    .venvs/vllm/bin/python -m tools.models --engine sglang     # on one engine; what is known of the other stays
    .venvs/vllm/bin/python -m tools.models --only llama gemma2 # these families; what is known of the others stays
    .venvs/vllm/bin/python -m tools.models --page              # only writes the page again

Each family is tried per engine and layout: fresh engines of two versions, A and B, tell what is right; then an engine of A is
updated five times, to B and back, and must answer each time bit for bit as the fresh engine does. The table of families is
``tests/support/families.py``. Results are kept in ``benchmarks/results/models.json``; the page is made of them.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from inference_plugin.wire.messages import InstallPolicy
from tests.support import poison
from tests.support.engines import ROOT, session_directory
from tests.support.families import FAMILIES, Family, make_versions
from tests.support.family_trials import FamilyTrial, Host, SglangHost, VllmHost, run_trial

RESULTS = ROOT / "benchmarks" / "results" / "models.json"
PAGE = ROOT / "docs" / "models.md"

ENGINES = {"vllm": "vLLM", "sglang": "SGLang"}
LAYOUTS = {"vllm": {"packed": False, "plain": True}, "sglang": {"its own": False}}
"""Layouts of each engine, and whether linear layers keep their weights as they were loaded."""
HOSTS: dict[str, type[Host]] = {"vllm": VllmHost, "sglang": SglangHost}
SEVERITY = ("right", "cannot be told", "does not start", "refused", "failed", "WRONG")
"""Outcomes; a family's outcome is the last of these that one of its layouts has."""
WITHOUT_ANSWERS = "and answers were not"
"""In the words of a trial that compares only what an engine's modules reach."""
WORDS_LENGTH = 240
"""Longest text of the last column, in characters."""

Row = dict[str, Any]


def survey(engine: str, families: list[Family], install: InstallPolicy) -> None:
    """Tries each family in each layout of one engine; notes each row as soon as it is known."""
    version = engine_version(engine)
    with session_directory() as runtime, tempfile.TemporaryDirectory(prefix="families-") as directory:
        host = HOSTS[engine](runtime)
        try:
            for family in families:
                for layout, trial in try_family(host, family, Path(directory), layouts_of(engine, family), install):
                    row = {"family": family.name, "engine": engine, "layout": layout}
                    row |= {name: without_paths(value, directory) for name, value in asdict(trial).items()}
                    row |= {"answer": family.answer, "engine_version": version, "date": today()}
                    note(row)
                    say(f"{engine} {family.name} {layout}: {row['outcome']} {row['words'][:300]}")
        finally:
            host.close()


def layouts_of(engine: str, family: Family) -> dict[str, bool]:
    """The layouts in which a family is tried; no GPU has the packed one of a CPU."""
    on_gpus = engine == "vllm" and family.gpu_class
    return {layout: plain for layout, plain in LAYOUTS[engine].items() if plain or not on_gpus}


def try_family(
    host: Host, family: Family, directory: Path, layouts: dict[str, bool], install: InstallPolicy
) -> Iterator[tuple[str, FamilyTrial]]:
    """A trial in each layout. Whatever goes wrong is an outcome: no family ends the survey."""
    try:
        versions = make_versions(family, directory)
    except Exception as error:  # noqa: BLE001
        words = f"transformers makes no checkpoint: {type(error).__name__}: {error}"
        yield from ((layout, FamilyTrial("does not start", words)) for layout in layouts)
        return
    for layout, plain in layouts.items():
        try:
            yield layout, run_trial(host, family, versions, plain=plain, install=install)
        except Exception as error:  # noqa: BLE001
            host.kill()
            yield layout, FamilyTrial("failed", f"the survey itself: {type(error).__name__}: {error}")
    for version in versions:
        shutil.rmtree(version)


def without_paths(value: Any, directory: str) -> Any:
    """A text without this machine's paths."""
    if not isinstance(value, str):
        return value
    text = value.replace(f"{directory}/", "").replace(f"{ROOT}/", "")
    return re.sub(r"(?<![\w.])/(?:tmp|home|root|work|usr|opt|var)/[^\s'\",:;)]*/", ".../", text)


def engine_version(engine: str) -> str:
    """The version of an engine in its environment."""
    found = [
        re.match(rf"{engine}(?:_cpu)?-(\d[^-+]*)", path.name)
        for path in (ROOT / ".venvs" / engine).glob("lib/python3*/site-packages/*.dist-info")
    ]
    return next((match.group(1).removesuffix(".dist") for match in found if match), "unknown")


def today() -> str:
    return datetime.datetime.now(tz=datetime.UTC).date().isoformat()


def say(text: str) -> None:
    print(f"models: {text}", flush=True)


def read_results() -> list[Row]:
    """Those of layouts that are tried today."""
    rows: list[Row] = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    known = {(engine, family.name): layouts_of(engine, family) for engine in ENGINES for family in FAMILIES.values()}
    return [row for row in rows if row["layout"] in known.get((row["engine"], row["family"]), LAYOUTS[row["engine"]])]


def note(row: Row) -> None:
    """Adds a row in place of the one of the same family, engine and layout, and writes the page again."""
    rows = {_key(known): known for known in [*read_results(), row]}
    RESULTS.write_text(json.dumps([rows[key] for key in sorted(rows)], indent=1) + "\n")
    PAGE.write_text(page(list(rows.values())))


def _key(row: Row) -> tuple[str, str, str]:
    return row["engine"], row["family"], row["layout"]


# --- the page ------------------------------------------------------------------------------------------------------------------


def page(rows: list[Row]) -> str:
    """``docs/models.md``."""
    parts = [
        "# Model families\n",
        "<!-- Written by `make models`; changes made here are lost. -->\n",
        INTRODUCTION,
        "\n".join(_summary(rows, engine) for engine in ENGINES) + "\n",
        *(_section(rows, engine) for engine in ENGINES),
    ]
    return "\n".join(parts)


INTRODUCTION = """\
Which model families Weightwire updates, tried on a CPU with tiny random models in real engines. For each family,
`make models` makes two versions of one model, A and B, and notes what a fresh engine of each answers: greedy tokens and their
log-probabilities, or the vectors of a pooling model. Then it updates an engine of A five times, to B and back (with
`dtype="engine"`), and compares the answers after each update with those of the fresh engine, bit for bit. It also compares every
tensor and value that the model's modules reach; in SGLang since 2026-11-30, which most of its rows are older than.

- **right**: all five updates were committed, and each answer was that of a fresh engine. Where an engine does not repeat its own
  answers, or loads a model that it cannot compute with on this CPU, the last column says so: there only what the modules reach is
  compared.
- **refused**: Weightwire refused the first update by a typed error before anything changed; the engine serves what it served.
- **failed**: an update broke off later than that, or the engine did; the last column says which.
- **WRONG**: the engine answers otherwise than a fresh engine. This is a bug in Weightwire, and `make models` fails.
- **does not start**: the engine does not load even a fresh model of this family on this CPU; its words are in the last column.
- **cannot be told**: the engine does not repeat its own answers, nor what its modules reach; or both versions answer the same.

*...-without-its-kernel* are weights that vLLM quantises while it loads, and has no kernel for on this CPU. A kernel of
the tests multiplies by the dequantised weights instead. Such a row shows that loading and post-processing are repeated; its
tokens are that kernel's. For `fp8_per_tensor` vLLM lacks the kernel that quantises, and the tests bring that; torch
multiplies. Its activations share one scale per batch, so a prompt whose beginning is cached is answered otherwise than
before: engines of this row run without the prefix cache.

Of checkpoints that are quantised, vLLM multiplies NVFP4 and MXFP8 as it does on a GPU without a kernel for them; the tests bring
the products of blocks in FP8, of MXFP4 and of experts, as above.

*bailing_moe* (Ling), *mimo*, *mistral_large_3* and *solar* are models that transformers lacks: another of its models has the same
tensors, and the checkpoint has the published names and configuration. Others that it lacks, such as *step3_text*, are written by
name and shape. For experts without a gate (*nemotron_h_moe*) vLLM has no kernel on a CPU: the tests multiply.

Models that read images or hear sounds, such as *qwen3-vl*, are asked about two of them in vLLM, beside text (*whisper* about
sounds only, *kimi-k2.5*, *cohere2-vision*, *keye*, *keye-vl-1.5*, *llama4-vision*, *llava-next-video*, *minicpm-o2.6*,
*muse-glimmer*, *nvlm-d*, *ovis2.5* and *step3-vl* about text only), and in SGLang about text only. In vLLM their towers are
compared as part of what the modules reach. [Which of them were updated with a request about an image in flight](support.md)
says what else is known.

The configurations of *internvl-chat*, *h2ovl*, *nvlm-d*, *skywork-r1v*, *keye...*, *kimi-vl*, *minicpm-...2.6*, *molmo2*,
*nemotron-nano-vl*, *ernie4.5-vl*, *ovis2.5*, *dots-ocr*, *step3-vl*, *bailing_moe_v2_5*, *bailing_moe_v3*, *nemotron_nas*,
*nomic-embedding*, *gte-...*, *snowflake-embedding* and *jina-v3-embedding* come as code in the checkpoint, as published ones
do; *ernie4.5-vl*, *keye...*, *kimi-vl*, *minicpm-...2.6*, *molmo2* and *ultravox* have processors of the tests,
*granite-speech* ears of the tests. The adapter that vLLM adds to *jina-v5-embedding* while it loads is that of the checkpoint
which the engine started from. Asked about an image, vLLM 0.32 doesn't answer for *hunyuan-vl* in the packed layout. It does
not start *interns1-pro*: the tests give its class the attribute that it lacks.

*deepseek_v32*, *deepseek_v4*, *deepseek_v4-vision*, *deepseek_v4.1* (without its tables of n-grams), *glm_moe_dsa*, *hy_v4*,
*inkling_text*, *kimi_linear*, *kimi_k3_text*, *minimax-m3*, *qwen4-exp* (its table of n-grams on the device) and
*qwen4_exp_text* are tried with vLLM's classes for NVIDIA's GPUs, which compute nothing on a CPU; so are *bailing_moe_v2_5*,
*bailing_moe_v3* (Ling 2.5 and 3) and *glm5-next*, of which vLLM has one class, and experts in four bits, laid out as for
Marlin. vLLM's own code makes, loads and post-processes them; the tests only replace vLLM's choice of a class and of a backend
for attention, packages of kernels that are missing, and CUDA's streams.

vLLM packs the convolutions of Mamba-2 in bfloat16 on a CPU with AVX512-BF16 (*nemotron-nano-vl*): this layout is refused there.

*longcat_flash* is without the tensors that transformers makes for experts that compute nothing. On a CPU vLLM routes ungrouped
experts by softmax only: *minimax_m2* is tried with that, not with the sigmoid of the published models; and Mamba-2 hybrids run
without the prefix cache there.

*Mechanism* and *policy* are those of the update's report; *verified* is what `SyncManager.verify` says after the last update.
vLLM is tried in two layouts: *packed* (linear layers are packed by oneDNN, its default on a CPU) and *plain* (as on a GPU).

SGLang lacks CPU kernels for some models. The tests bring these in torch, or let Triton interpret SGLang's own for GPUs, where a
row below says *stand-ins*: such an engine loads, lays out and updates its weights as it does without them, and its tokens are
those of the stand-ins. Where it says *as on a GPU*, SGLang also takes its code for CUDA where it makes, loads and post-processes
weights (DeepSeek's indexer, four bits as for Marlin), and computes nothing. The order in a tile of Marlin is the tests'.
"""


def _summary(rows: list[Row], engine: str) -> str:
    """How many families had each outcome; a family counts once, with the worst outcome of its layouts."""
    outcomes: dict[str, str] = {}
    for row in rows:
        if row["engine"] == engine:
            outcomes[row["family"]] = max(outcomes.get(row["family"], "right"), row["outcome"], key=SEVERITY.index)
    counts = Counter(outcomes.values())
    told = ", ".join(f"{counts[outcome]} {plural}" for outcome, plural in TOLD.items() if counts[outcome])
    mute = {row["family"] for row in rows if row["engine"] == engine and WITHOUT_ANSWERS in row["words"]}
    by_state = f" Of {len(mute)}, only what the modules reach was compared." if mute else ""
    return f"- {ENGINES[engine]}: {len(outcomes)} families: {told or 'none tried yet'}.{by_state}"


TOLD = {
    "right": "right",
    "refused": "refused",
    "failed": "failed",
    "WRONG": "WRONG",
    "cannot be told": "of which it cannot be told",
    "does not start": "that the engine does not start",
}
"""Outcomes in a sentence."""


def _section(rows: list[Row], engine: str) -> str:
    mine = sorted((row for row in rows if row["engine"] == engine), key=_key)
    versions = sorted({f"{row['engine_version']}, {row['date']}" for row in mine})
    lines = [
        f"## {ENGINES[engine]}\n",
        f"Version and date: {'; '.join(versions)}.\n" if versions else "",
        "| family | layout | outcome | mechanism | policy | verified | words |",
        "|---|---|---|---|---|---|---|",
    ]
    for layouts, row in _joined(mine):
        if engine == "sglang" and (family := FAMILIES.get(row["family"])):
            layouts += ", as on a GPU" if family.sglang_for_gpus else ", stand-ins" if family.stand_ins else ""
        cells = [row["family"], layouts, row["outcome"], row["mechanism"], row["install"]]
        cells += [_short(row["verified"]), _short(row["words"] or row["why"])]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _joined(rows: list[Row]) -> list[tuple[str, Row]]:
    """Rows with their layouts; rows of one family that say the same in the page are one."""
    shown: dict[tuple[str, ...], tuple[list[str], Row]] = {}
    for row in rows:
        same = tuple(row[name] for name in ("family", "outcome", "mechanism", "install", "verified", "words", "why"))
        shown.setdefault(same, ([], row))[0].append(row["layout"])
    return [(", ".join(layouts), row) for layouts, row in shown.values()]


def _short(text: str) -> str:
    """A text as a cell of a table: one line, of readable length, and nothing in it is Markdown."""
    line = re.sub(r"\s+", " ", text).strip()
    if len(line) > WORDS_LENGTH:
        line = line[:WORDS_LENGTH].rsplit(" ", 1)[0] + " ..."
    return re.sub(r"([|<>*`\[\]])", r"\\\1", line)


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Update a tiny model of each family in real engines; write docs/models.md."
    )
    parser.add_argument("--engine", choices=list(ENGINES), action="append", help="try this engine only")
    parser.add_argument("--only", metavar="NAME", nargs="+", choices=list(FAMILIES), help="try these families only")
    parser.add_argument(
        "--install", choices=["auto", "copy", "standby"], default="standby", help="install policy to ask for"
    )
    parser.add_argument("--page", action="store_true", help="write the page again, and try nothing")
    options = parser.parse_args()
    if options.page:
        PAGE.write_text(page(read_results()))
        return 0
    poison.spread()
    for engine in options.engine or ENGINES:
        names = options.only or FAMILIES
        survey(engine, [FAMILIES[name] for name in names if engine in FAMILIES[name].engines], options.install)
    wrong = [row for row in read_results() if row["outcome"] == "WRONG"]
    for row in wrong:
        say(f"WRONG: {row['engine']} {row['family']} {row['layout']}: {row['words']}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
