"""Asynchronous GRPO by TRL, of a model that a stock vLLM serves: the weights go there through Weightwire.

    python -m vllm.entrypoints.openai.api_server --model MODEL
    python examples/trl/train_async.py --model MODEL --server http://127.0.0.1:8000 [--lora] [--save DIR]

The one line is that with `WeightTransfer`. TRL's asynchronous trainer needs FlashAttention 3, that is a GPU.
"""

from __future__ import annotations

import argparse

import torch
from datasets import Dataset
from peft import LoraConfig
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

from trainer_adapters.integrations.trl_async import WeightTransfer

PROMPTS = [[{"role": "user", "content": f"{number} and {number + 1} make"}] for number in range(8)]


def variety(completions: list[list[dict[str, str]]], **_: object) -> list[float]:
    """The reward: how many different characters an answer has."""
    return [float(len(set(messages[-1]["content"]))) for messages in completions]


def main() -> AsyncGRPOTrainer:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--server", required=True, help="the server's URL")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--lora", action="store_true", help="train a PEFT adapter; the engine gets the merged model")
    parser.add_argument("--dtype", default="bfloat16", help="the trainer's; the engine's must be the same")
    parser.add_argument("--save", help="where the trained model is written, merged")
    arguments = parser.parse_args()

    trainer = AsyncGRPOTrainer(
        arguments.model,
        variety,
        args=AsyncGRPOConfig(
            output_dir=arguments.save or "trained",
            max_steps=arguments.steps,
            learning_rate=arguments.lr,
            dtype=arguments.dtype,
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=12,
            bf16=False,
            use_cpu=not torch.cuda.is_available(),
            gradient_checkpointing=False,
            save_strategy="no",
            report_to="none",
            vllm_server_base_url=arguments.server,
        ),
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear") if arguments.lora else None,
        weight_transfer=WeightTransfer(arguments.server),
    )
    trainer.train()
    if arguments.save:
        model = trainer.accelerator.unwrap_model(trainer.model)
        (model.merge_and_unload() if arguments.lora else model).save_pretrained(arguments.save)
        trainer.processing_class.save_pretrained(arguments.save)
    return trainer


if __name__ == "__main__":
    main()
