"""What the examples beside this file share: their arguments, a training step, and a checkpoint to compare with."""

from __future__ import annotations

import argparse
import gc
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from inference_plugin.wire.reports import UpdateReport

BATCH, LENGTH = 2, 16


def begin(about: str | None, *checkpoints: str, **sizes: int) -> argparse.Namespace:
    """Reads the arguments and joins the other ranks of torchrun; `checkpoints` are more of them that this example takes, `sizes`
    its options, with defaults."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="the checkpoint that is trained; the engines were started with it")
    for name in checkpoints:
        parser.add_argument(name, type=Path)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--export", type=Path, help="write the trained model there")
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it by torchrun, as --help shows")
    if torch.cuda.is_available():  # first: what follows, NCCL among it, takes the current device for this rank's own
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return arguments


def leave() -> None:
    """Ends this rank's process groups, when nothing else holds one any more; call it after `main`.

    A gloo group has threads that let go of a collective's tensors after it, for which they need the interpreter. One that
    does so while the interpreter ends aborts the process ("terminate called without an active exception"). A group that is
    destroyed has joined its threads.
    """
    gc.collect()  # models in cycles of references hold groups
    dist.destroy_process_group()


def device() -> torch.device:
    """This rank's own, whose memory the process group moves."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def train_step(model: Any, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """One step on random tokens: weights change, and that is all this is for."""
    torch.manual_seed(seed)
    tokens = torch.randint(0, model.config.vocab_size, (BATCH, LENGTH))
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def tell(report: UpdateReport) -> None:
    if dist.get_rank() == 0:
        for replica in report.replicas:
            print(
                f"version {report.version}: {replica.replica} {replica.status}, stopped {replica.stopped_s * 1e3:.1f} ms"
            )


def export(model: torch.nn.Module, like: Path, directory: Path | None) -> None:
    """Gathers the model to rank 0 and writes a checkpoint with the configuration of `like`."""
    if directory is None:
        return
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    write_checkpoint({name: tensor for name, tensor in state.items() if name not in tied}, like, directory)


def write_checkpoint(tensors: dict[str, torch.Tensor], like: Path, directory: Path) -> None:
    """Rank 0 writes these tensors, with the configuration of `like`."""
    if dist.get_rank() == 0:
        tensors = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
        directory.mkdir(parents=True, exist_ok=True)
        for file in like.iterdir():
            if file.suffix in (".json", ".jinja", ".txt", ".model") and not file.name.endswith(".index.json"):
                shutil.copy(file, directory)
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
