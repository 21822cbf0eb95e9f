"""Writes the dtypes that an engine takes as the argument that a user gives to the trainer's adapter."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from fnmatch import fnmatchcase

from inference_plugin.wire.errors import ManifestMismatch, first_few

__all__ = ["check_quantises_nothing", "dtype_line", "dtype_rules"]

MOST_RULES = 12
WIDE = ("float64", "float32", "float16", "bfloat16")
VALUES = ("float8_e4m3", "float8_e5m2")
"""What dtypes of quantised values begin with. Not float8_e8m0fnu, the dtype of scales: a cast of it to float32 is exact."""


def check_quantises_nothing(own: Mapping[str, str], wanted: Mapping[str, str]) -> None:
    """Raises `ManifestMismatch` where a cast would make a quantised tensor, or undo one: a cast knows no scales. Both by name."""
    if cast := [name for name, dtype in wanted.items() if dtype.startswith(("float8", "int8")) and own[name] in WIDE]:
        raise ManifestMismatch(
            f"the engine holds quantised weights, and a cast would leave its scales as they are: {first_few(cast)}",
            hint="QuantizedAdapter(source, checkpoint) sends them quantised as the engine's checkpoint is; or start the engine "
            "from weights in the trainer's dtype, which it quantises itself as it loads them",
            phase="open",
        )
    if cast := [name for name, dtype in wanted.items() if dtype in WIDE and own[name].startswith(VALUES)]:
        raise ManifestMismatch(
            f"the trainer's weights are quantised, the engine's are not, and a cast would lose their scales: {first_few(cast)}",
            hint="multiply them with their scales in the trainer; if they have none, give the trainer's adapter, or update, "
            + dtype_line(dict(wanted)),
            phase="open",
        )


def dtype_line(wanted: Mapping[str, str]) -> str:
    """`dtype_rules={...}`, or `dtype=...` if all tensors have one dtype. `wanted`: as for `dtype_rules`."""
    rules = dtype_rules(wanted)
    *others, (_, common) = rules.items()
    if not others:
        return f'dtype="{common}"'
    shown = dict(others[:MOST_RULES]) | ({"...": "..."} if len(others) > MOST_RULES else {}) | {"*": common}
    return "dtype_rules={" + ", ".join(f'"{pattern}": "{dtype}"' for pattern, dtype in shown.items()) + "}"


def dtype_rules(wanted: Mapping[str, str]) -> dict[str, str]:
    """Dtypes by name pattern; the first match wins. `wanted`: the dtype of each tensor, by its name in the checkpoint. The most
    common floating dtype is the last rule, or the most common one if none is floating; numbers in names become `*`."""
    floating = [dtype for dtype in wanted.values() if "float" in dtype]
    common = Counter(floating or wanted.values()).most_common(1)[0][0]
    others = {name: dtype for name, dtype in wanted.items() if dtype != common}
    rules: dict[str, str] = {}
    alike: dict[str, bool] = {}
    for name, dtype in others.items():
        if any(fnmatchcase(name, earlier) for earlier, holds in alike.items() if holds):
            continue  # an adapter refuses a rule that never applies
        pattern = re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
        if pattern not in alike:
            alike[pattern] = all(dtype == of for other, of in wanted.items() if fnmatchcase(other, pattern))
        rules[pattern if alike[pattern] else name] = dtype
    return {**rules, "*": common}
