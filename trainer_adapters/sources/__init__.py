"""Weight sources: which checkpoint tensors a trainer's model has, and which slices of them this rank holds.

One file per kind of trainer, and the packages `megatron` and `lora`. Shared: `base` (the contract), `scan` and `plan` (from a
model to the manifest and this rank's slices), `placements` (boxes of DTensors), `inventory` and `exchange` (models that no
rank knows whole), `gather` (whole tensors). A new kind of trainer is a new file; no transport, no engine, no update logic here.
"""
