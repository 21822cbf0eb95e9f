"""What the model is to learn: name a capital, and say nothing else.

SmolLM2-135M knows the capitals and, sampled at temperature 1, wanders off more often than not. The reward asks
for an answer that contains the right city, ends by itself, and is short: anybody can check it.
"""

from __future__ import annotations

from typing import Any

MAX_TOKENS = 24
CAPITALS = {
    "France": "Paris",
    "Italy": "Rome",
    "Japan": "Tokyo",
    "Germany": "Berlin",
    "Spain": "Madrid",
    "Egypt": "Cairo",
    "Russia": "Moscow",
    "Greece": "Athens",
}
OTHER_COUNTRIES = ("Portugal", "Austria", "Poland", "Norway", "China", "Cuba")
"""Asked while training goes on, and at the end; nothing is learned from the answers."""


def prompt_ids(tokenizer: Any, country: str) -> list[int]:
    """The question about ``country`` in the model's chat format, as token ids."""
    chat = [{"role": "user", "content": f"What is the capital of {country}?"}]
    return list(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"])


def is_right(country: str, text: str) -> bool:
    return CAPITALS[country] in text


def reward(country: str, text: str, tokens: int, finished: bool) -> float:
    """0 for a wrong or unfinished answer; for a right one 1 if it is one token, and less the longer it is."""
    if not finished or not is_right(country, text):
        return 0.0
    return max(0.0, 1.0 - (tokens - 1) / MAX_TOKENS)
