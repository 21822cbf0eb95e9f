"""A reward of verl's `custom_reward_function`: how many different characters an answer has."""

from __future__ import annotations

from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> float:
    return float(len(set(solution_str)))
