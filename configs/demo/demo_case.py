"""What a case of the grammar is, its side of the split, and the small parts that tasks share."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from demo_words import CITIES, NAMES, SYLLABLES

Message = dict[str, Any]
HELD_OUT_SHARE = 26  # of 256: about one key in ten


@dataclass(frozen=True)
class Case:
    """A prompt with its one right answer; `key` decides the side of the split."""

    task: str
    key: str
    messages: list[Message]
    answer: str
    tools: list[dict[str, Any]] = field(default_factory=list)


def held_out(key: str) -> bool:
    """Whether cases with this key are for judging only."""
    return hashlib.sha256(key.encode()).digest()[0] < HELD_OUT_SHARE


def ask(task: str, key: str, prompt: str, answer: str) -> Case:
    return Case(task, f"{task}:{key}", [{"role": "user", "content": prompt}], answer)


def nonce(rng: random.Random) -> str:
    """A made-up name: what is copied must not always be a known word."""
    return "".join(rng.choice(SYLLABLES) for _ in range(rng.choice((2, 2, 3)))).capitalize()


def person(rng: random.Random) -> str:
    return nonce(rng) if rng.random() < 0.15 else rng.choice(NAMES)


def city_name(rng: random.Random) -> str:
    return nonce(rng) if rng.random() < 0.15 else rng.choice(CITIES)


def listed(items: list[str]) -> str:
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1]


def in_order(items: Iterable[str]) -> str:
    return f"In order: {', '.join(items)}."
