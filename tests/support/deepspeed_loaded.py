"""Imports DeepSpeed, for processes that others are forked from."""

from __future__ import annotations

import os

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # or it is compiled first, for minutes
