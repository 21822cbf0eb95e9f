"""A trainer that is written against vLLM's own weight transfer, with Weightwire as the backend.

VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config '{"backend": "weightwire"}'
python examples/integrations/vllm_backend.py MODEL http://127.0.0.1:8000
"""

from __future__ import annotations

import sys

import torch
from transformers import AutoModelForCausalLM
from vllm.distributed.weight_transfer.base import ModuleSource
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from trainer_adapters.integrations.vllm import WeightwireInitInfo


def main(path: str, url: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    trainer = WeightTransferTrainerFactory.trainer_init(
        WeightwireInitInfo(rank=0, dtype="engine"), client=HTTPVLLMWeightSyncClient(url), source=ModuleSource(model)
    )
    try:
        for _ in range(3):
            with torch.no_grad():  # where your optimizer's step is
                for parameter in model.parameters():
                    parameter.mul_(1.001)
            print(trainer.send_weights())
    finally:
        trainer.shutdown()


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
