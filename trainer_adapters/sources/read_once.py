"""Generators of checkpoint tensors that can be read once, as frameworks hand them over anew for each update."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from inference_plugin.wire.errors import ManifestMismatch

__all__ = ["ReadOnce"]


class ReadOnce:
    """Makes an export of generators that can be read once, one for each update.

    An `ExportAdapter` reads its first export twice: the sender, rank 0, keeps that one in host memory, the whole model, until it
    is sent; later ones it passes on. The other ranks run theirs for the sake of its collectives, and send nothing.
    """

    def __init__(self, *, is_sender: bool) -> None:
        self.given: Iterable[tuple[str, torch.Tensor]] | None = None
        self._is_sender = is_sender
        self._kept: list[tuple[str, torch.Tensor]] | None = None
        self._looked = False

    def __call__(self) -> Iterator[tuple[str, torch.Tensor]]:
        looked, self._looked = self._looked, True
        kept, self._kept = self._kept, None
        given, self.given = self.given, None
        if kept is not None:
            yield from kept
        elif given is None:
            if self._is_sender:
                raise ManifestMismatch("the generator that was given for this update has been read", side="trainer")
        elif not self._is_sender:
            for _ in given:
                pass
        elif looked:
            yield from given
        else:
            self._kept = [(name, tensor.detach().to("cpu", copy=True)) for name, tensor in given]
            yield from self._kept
