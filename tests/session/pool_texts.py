"""Texts that sessions of a pool evaluate at the same time."""

from __future__ import annotations

from typing import Any

TEXTS = (
    "Once upon a time",
    "The baker had a dog",
    "Once upon a time there was",
    "A little girl",
    "Once upon a",
    "tick tock tick tock",
)


def tokens_of(session: Any, text: str, n: int = 10, **fields: Any) -> list[int]:
    session.ensure_prefix(text)
    return [t for chunk in session.decode(max_tokens=n, **fields) for t in chunk.tokens]
