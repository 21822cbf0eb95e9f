"""Kernels that SGLang's Qwen3.5 looks for while it is imported, without which SGLang has no Qwen that reads images.

Importing this module declares them; none is called.
"""

from __future__ import annotations

import torch

KERNELS = (
    "fused_input_proj_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
    "fused_sigmoid_mul_cpu",
)

library = torch.library.Library("sgl_kernel", "FRAGMENT")
for name in KERNELS:
    if not hasattr(torch.ops.sgl_kernel, name):
        library.define(f"{name}(Tensor one, Tensor other) -> Tensor")
