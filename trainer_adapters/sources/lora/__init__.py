"""PEFT's LoRA models: adapters are merged into the base weights as these are sent, or sent by themselves."""
