"""The default dtype of post-processing is the engine's, on the thread that post-processes and on no other."""

from __future__ import annotations

import threading

import torch

from inference_plugin.engines.default_dtype import default_dtype_here


def test_one_thread_has_a_default_dtype_of_its_own_and_torch_is_as_before_when_it_ends() -> None:
    asked = torch.get_default_dtype
    seen: dict[str, torch.dtype] = {}
    inside, over = threading.Event(), threading.Event()

    def post_process() -> None:
        with default_dtype_here(torch.bfloat16):
            with default_dtype_here(torch.float16):
                seen["nested"] = torch.get_default_dtype()
            seen["inside"] = torch.get_default_dtype()
            inside.set()
            over.wait(600)
        seen["after"] = torch.get_default_dtype()

    thread = threading.Thread(target=post_process)
    thread.start()
    assert inside.wait(600)
    with default_dtype_here(torch.float64):
        seen["other, its own"] = torch.get_default_dtype()
    seen["other"] = torch.get_default_dtype()
    assert torch.zeros(1).dtype == torch.float32
    over.set()
    thread.join(600)
    assert seen == {
        "nested": torch.float16, "inside": torch.bfloat16, "after": torch.float32, "other, its own": torch.float64,
        "other": torch.float32,
    }  # fmt: skip
    assert torch.get_default_dtype is asked
