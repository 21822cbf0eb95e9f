"""Selects the tensors that are sent, and the dtypes in which they travel, by patterns on the names of the manifest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import torch

from inference_plugin.wire.errors import ArgumentError, ManifestMismatch, first_few
from inference_plugin.wire.tensors import dtype_name, torch_dtype

__all__ = ["DtypeRules", "NameFilter", "Rules"]

Rules: TypeAlias = (
    "DtypeRules | Mapping[str, torch.dtype | str] | Iterable[tuple[str, torch.dtype | str]] | torch.dtype | str | None"
)
"""What `DtypeRules` is made from."""


class NameFilter:
    """Selects the tensors to send by `fnmatch` patterns on the names of the manifest, case-sensitive.

    With `include`, only names that match one of its patterns are sent; names that match a pattern of `exclude` never are. Raises
    `ArgumentError` for what is no list of patterns.
    """

    def __init__(self, include: Iterable[str] = (), exclude: Iterable[str] = ()) -> None:
        self.include = _patterns("include", include)
        self.exclude = _patterns("exclude", exclude)

    def keep(self, names: Iterable[str]) -> set[str]:
        """The names that are sent. Raises `ManifestMismatch` for a pattern that matches none of them."""
        names = list(names)
        if idle := [p for p in self.include + self.exclude if not any(fnmatchcase(name, p) for name in names)]:
            raise ManifestMismatch(
                f"these include or exclude patterns match no name: {first_few(idle)}",
                hint="patterns are matched against the names of the manifest, after rename; correct or remove these",
                side="trainer",
            )
        return {
            name
            for name in names
            if (not self.include or any(fnmatchcase(name, p) for p in self.include))
            and not any(fnmatchcase(name, p) for p in self.exclude)
        }


class DtypeRules:
    """Selects the tensors that travel in another dtype than the trainer's: ordered `(pattern, dtype)`, the first match wins.

    Patterns are those of `fnmatch`, case-sensitive, on the names of the manifest: `{"*norm.weight": torch.float32, "*":
    torch.bfloat16}`. Tensors that match no rule keep their dtype. A dtype may be given by torch's name. A single dtype stands
    for `{"*": dtype}`. "engine" stands for the dtypes of the engine's own model: the first update asks for them, and until then
    nothing is cast (`adopt`). Raises `ArgumentError` for rules of another form.
    """

    def __init__(
        self,
        rules: Rules = None,
    ) -> None:
        self.follow_engine: bool = (
            rules.follow_engine if isinstance(rules, DtypeRules) else isinstance(rules, str) and rules == "engine"
        )
        if isinstance(rules, DtypeRules):
            pairs: Iterable[tuple[str, torch.dtype | str]] = rules.rules
        elif self.follow_engine or rules is None:
            pairs = ()
        elif isinstance(rules, str | torch.dtype):
            pairs = (("*", rules),)
        else:
            pairs = _pairs(rules)
        self._take(tuple((pattern, torch_dtype(str(dtype).removeprefix("torch."))) for pattern, dtype in pairs))

    def adopt(self, rules: Mapping[str, str]) -> bool:
        """Takes the engine's rules, if these rules were given as "engine". Returns whether that changes them."""
        taken = DtypeRules(rules).rules
        if not self.follow_engine or taken == self.rules:
            return False
        self._take(taken)
        return True

    def _take(self, rules: tuple[tuple[str, torch.dtype], ...]) -> None:
        self.rules = rules
        # An engine may have thousands of rules, and most of them are names: matching each name with each takes minutes.
        self._names: dict[str, int] = {}
        self._patterns: list[tuple[int, str]] = []
        for index, (pattern, _) in enumerate(rules):
            if any(sign in pattern for sign in "*?["):
                self._patterns.append((index, pattern))
            else:
                self._names.setdefault(pattern, index)

    @property
    def adopted(self) -> dict[str, str]:
        return {pattern: dtype_name(dtype) for pattern, dtype in self.rules} if self.follow_engine else {}

    def resolve(
        self, native: Mapping[str, torch.dtype], tied: Mapping[str, str] | None = None
    ) -> dict[str, torch.dtype]:
        """The dtype in which each tensor of `native` (names to the trainer's dtypes) is sent.

        Raises `ManifestMismatch` for a rule that never applies (because of a typo, or hidden by an earlier rule), except a last
        "*", and for a rule that would turn integers or booleans into floats or the reverse. `tied` maps names that don't travel
        to those that do, for the error's text.
        """
        decided_by = {name: self._first_match(name) for name in native}
        self._check_used(set(decided_by.values()), native, tied or {})
        dtypes = dict(native)
        crossing = []
        for name, index in decided_by.items():
            if index is None:
                continue
            pattern, dtype = self.rules[index]
            if _kind(dtype) != _kind(native[name]):
                crossing.append(f"{name} is {native[name]}, rule {pattern!r} says {dtype}")
            dtypes[name] = dtype
        if crossing:
            raise ManifestMismatch(
                f"dtype rules that would change the kind of numbers: {first_few(crossing)}",
                hint="put a rule of its own dtype for these names before the general one",
                side="trainer",
            )
        return dtypes

    def _first_match(self, name: str) -> int | None:
        named = self._names.get(name)
        earlier = (i for i, pattern in self._patterns if (named is None or i < named) and fnmatchcase(name, pattern))
        return next(earlier, named)

    def _check_used(self, used: set[int | None], names: Iterable[str], tied: Mapping[str, str]) -> None:
        idle = []
        for index, (pattern, _) in enumerate(self.rules):
            if index in used or (pattern == "*" and index == len(self.rules) - 1):
                continue
            hidden = next((name for name in names if fnmatchcase(name, pattern)), None)
            alias = next((name for name in tied if fnmatchcase(name, pattern)), None)
            if hidden is not None:
                winner = self.rules[self._first_match(hidden) or 0][0]
                idle.append(f"{pattern!r} (hidden by {winner!r}, which comes first)")
            elif alias is not None:
                idle.append(f"{pattern!r} ({alias} is tied and travels as {tied[alias]})")
            else:
                idle.append(f"{pattern!r} (matches no name)")
        if idle:
            raise ManifestMismatch(
                f"dtype rules that never apply: {first_few(idle)}",
                hint="rules are matched against the names of the manifest, in order; correct or remove these",
                side="trainer",
            )


def _patterns(name: str, given: object) -> tuple[str, ...]:
    patterns = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str | bytes) else (None,)
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise ArgumentError(f"{name}={given!r} is no list of patterns", hint=f'such as {name}=["*.bias"]')
    return patterns


def _pairs(rules: object) -> list[tuple[str, torch.dtype | str]]:
    if not isinstance(rules, Iterable):
        raise ArgumentError(
            f"{rules!r}, of type {type(rules).__name__}, is neither a dtype nor rules",
            hint='such as "bfloat16", or dtype_rules={"*norm.weight": torch.float32, "*": "bfloat16"}',
        )
    pairs: list[Any] = list(rules.items() if isinstance(rules, Mapping) else rules)
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[0], str):
            raise ArgumentError(
                f"dtype_rules have {pair!r}, which is no pair of a pattern and a dtype",
                hint='such as dtype_rules={"*norm.weight": torch.float32, "*": "bfloat16"}',
            )
    return pairs


def _kind(dtype: torch.dtype) -> str:
    if dtype.is_floating_point:
        return "floating point"
    if dtype.is_complex:
        return "complex"
    return "boolean" if dtype == torch.bool else "whole"
