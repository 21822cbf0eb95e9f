"""DeepSpeed's ZeRO-3: each rank sends its partitions. After each optimizer step the weights go into every running engine.

torchrun --nproc-per-node 2 examples/trainers/zero3.py MODEL [--steps 2] [--export DIR]
"""

from __future__ import annotations

import deepspeed
import torch
from common import BATCH, LENGTH, begin, device, leave, tell, write_checkpoint
from transformers import AutoModelForCausalLM

from weightwire import DeepSpeedAdapter, SyncManager


def main() -> None:
    arguments = begin(__doc__)
    model = AutoModelForCausalLM.from_pretrained(arguments.model)
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "bf16": {"enabled": model.dtype == torch.bfloat16},
        "zero_optimization": {"stage": 3},
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]

    source = DeepSpeedAdapter(engine)
    with SyncManager() as manager:
        for step in range(arguments.steps):
            torch.manual_seed(step)
            tokens = torch.randint(0, model.config.vocab_size, (BATCH, LENGTH), device=device())
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
            engine.step()
            tell(manager.update(source))
    if arguments.export:
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            tied = set(getattr(model, "all_tied_weights_keys", None) or ())
            tensors = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
            write_checkpoint(tensors, arguments.model, arguments.export)


if __name__ == "__main__":
    main()
    leave()
