"""Objects that a `with` block closes at its end."""

from __future__ import annotations

import abc
from typing import Self

__all__ = ["Closing"]


class Closing(abc.ABC):
    """Closed at the end of a `with` block."""

    @abc.abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
