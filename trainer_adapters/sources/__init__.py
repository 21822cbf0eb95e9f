"""Weight sources: a trainer's model as checkpoint tensors, and the slices of them that this rank holds.

One file per kind of trainer, and the packages `megatron` and `lora`. Shared: `base` (the contract), `selection` (which tensors
are sent, and in which dtypes), `sharing` (which rank sends a copy), `streams`, `scan` and `plan` (from a model to the manifest
and this rank's slices), `placements` (boxes of DTensors), `inventory` and `exchange` (models that no rank knows as a whole),
`gather` (whole tensors). A new kind of trainer is a new file. No transport, engine or update logic here.
"""
