"""GRPO by TRL, of a model that a stock vLLM serves: the weights go there through Weightwire.

    python -m vllm.entrypoints.openai.api_server --model MODEL --logprobs-mode processed_logprobs
    python examples/trl/train.py --model MODEL --server http://127.0.0.1:8000 --engine-dtype bfloat16 [--lora] [--save DIR]

Without --server TRL starts its engine in this process (vllm_mode="colocate"). For several GPUs say `accelerate launch`, not
`python`. The one line is that with `through_weightwire`.
"""

from __future__ import annotations

import argparse

import torch
from datasets import Dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

from trainer_adapters.integrations.trl import through_weightwire

PROMPTS = [f"{number} and {number + 1} make" for number in range(8)]


def variety(completions: list[str], **_: object) -> list[float]:
    """The reward: how many different characters an answer has."""
    return [float(len(set(completion))) for completion in completions]


def main() -> GRPOTrainer:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--server", help="the server's URL; without it the engine is colocated")
    parser.add_argument("--sleep", action="store_true", help="a colocated engine sleeps while the trainer trains")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--lora", action="store_true", help="train a PEFT adapter; the engine gets the merged model")
    parser.add_argument("--trainer-dtype", default="float32")
    parser.add_argument("--engine-dtype", help="the dtype in which the engine computes, where it is not the trainer's")
    parser.add_argument("--save", help="where the trained model is written, merged")
    arguments = parser.parse_args()

    trainer = through_weightwire(GRPOTrainer, dtype=arguments.engine_dtype)(
        arguments.model,
        variety,
        args=GRPOConfig(
            output_dir=arguments.save or "trained",
            max_steps=arguments.steps,
            learning_rate=arguments.lr,
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=12,
            model_init_kwargs={"dtype": arguments.trainer_dtype},
            beta=0.01,
            bf16=False,
            use_cpu=not torch.cuda.is_available(),
            gradient_checkpointing=False,
            save_strategy="no",
            report_to="none",
            use_vllm=True,
            vllm_mode="server" if arguments.server else "colocate",
            vllm_server_base_url=arguments.server,
            vllm_enable_sleep_mode=arguments.sleep,
            vllm_max_model_length=256,
        ),
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear") if arguments.lora else None,
    )
    trainer.train()
    if arguments.save and arguments.lora:
        trainer.model.merge_and_unload().save_pretrained(arguments.save)
        trainer.processing_class.save_pretrained(arguments.save)
    elif arguments.save:
        trainer.save_model(arguments.save)
    return trainer


if __name__ == "__main__":
    main()
