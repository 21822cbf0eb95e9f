"""What updates of groups that are closed by now have left in the served model."""

from __future__ import annotations

__all__ = ["ClosedGroups"]


class ClosedGroups:
    """What is known of parameters whose last writer, among groups, is closed: outputs are stamped with their version until
    somebody else writes them."""

    def __init__(self) -> None:
        self._left: dict[str, tuple[frozenset[str], str]] = {}
        """By group: its parameters, and who has written them since; "" where nobody has."""

    @property
    def unknown(self) -> dict[str, str]:
        """The groups whose version is unknown, and why."""
        return {group: why for group, (_, why) in self._left.items() if why}

    def add(self, group: str, parameters: frozenset[str], unknown: str) -> None:
        """`group` is closed. `unknown`: why the version of these parameters is unknown already; "" where it is known."""
        before, why = self._left.get(group, (frozenset(), ""))
        self._left[group] = before | parameters, why or unknown

    def forget(self, reason: str) -> None:
        """Somebody else wrote the served model. The first who did so is named."""
        self._left = {group: (parameters, why or reason) for group, (parameters, why) in self._left.items()}

    def replace(self, parameters: frozenset[str], *, whole: bool) -> tuple[str, ...]:
        """An update has written these parameters; with `whole`, every parameter of the served model that a checkpoint fills.
        Returns the closed groups that have lost some."""
        replaced = tuple(group for group, (old, _) in self._left.items() if whole or old & parameters)
        left = {} if whole else {group: (old - parameters, why) for group, (old, why) in self._left.items()}
        self._left = {group: (old, why) for group, (old, why) in left.items() if old}
        return replaced
