"""The parameters of a worker whose content is unknown after a failed installation, and what heals them."""

from __future__ import annotations

from inference_plugin.wire.errors import TornReplica, first_few
from inference_plugin.wire.groups import is_apart

__all__ = ["MODEL", "TornParameters"]

MODEL = ""
"""Names the whole model where no group of the whole model is open."""


class TornParameters:
    """Torn parameters by the group whose installation failed; None stands for all parameters. They stay torn when the group
    is closed."""

    def __init__(self) -> None:
        self._by_group: dict[str, frozenset[str] | None] = {}

    @property
    def groups(self) -> tuple[str, ...]:
        return tuple(sorted(self._by_group))

    def add(self, group: str, parameters: frozenset[str] | None) -> None:
        """An installation of `group` may or may not have written to these."""
        before = self._by_group.get(group, frozenset())
        self._by_group[group] = None if parameters is None or before is None else before | parameters

    def check(self, group: str, parameters: frozenset[str], *, whole: bool) -> None:
        """Raises `TornReplica` if `group` is torn and an update of these parameters would not heal all of it."""
        if group not in self._by_group or whole:
            return
        torn = self._by_group[group]
        if torn is None or torn - parameters:
            left = "the whole model" if torn is None else first_few(sorted(torn - parameters))
            raise TornReplica(
                f"the group is torn, and an update of this part would not heal: {left}",
                hint="send at least what the failed update sent, or the whole model",
            )

    def heal(self, parameters: frozenset[str], *, whole: bool) -> None:
        """These parameters were written; with `whole`, every parameter of the served model that a checkpoint fills."""
        for group, torn in list(self._by_group.items()):
            healed = whole and not is_apart(group)
            left = frozenset[str]() if healed else None if torn is None else torn - parameters
            if left is not None and not left:
                del self._by_group[group]
            else:
                self._by_group[group] = left
