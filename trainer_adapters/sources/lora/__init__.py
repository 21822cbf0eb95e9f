"""LoRA models of PEFT: adapters merged into the base weights while these are sent, or sent by themselves."""
