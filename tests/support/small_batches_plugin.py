"""A Weightwire plug-in for tests: proofs load a few tensors at a time.

`WEIGHTWIRE_PLUGINS=tests.support.small_batches_plugin:plugin`.
"""

from __future__ import annotations

from inference_plugin.install import proof
from inference_plugin.plugins import hookimpl

BATCH_BYTES = 4096
"""Less than one matrix of a small model takes: each of them is loaded alone."""


class SmallBatchesPlugin:
    def __init__(self) -> None:
        proof.BUDGET_BYTES = BATCH_BYTES

    @hookimpl
    def weightwire_state_changed(self) -> None:
        """Nothing: being loaded is enough."""


def __getattr__(name: str) -> SmallBatchesPlugin:
    if name == "plugin":  # made where it is asked for: in the engine's processes
        return SmallBatchesPlugin()
    raise AttributeError(name)
