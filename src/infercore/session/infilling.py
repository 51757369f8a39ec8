"""Filling in the middle: what stands before and after it, as models learn to read that."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from infercore.errors import UnsupportedFeatureError
from infercore.values import checks

if TYPE_CHECKING:
    from infercore.values.info import FimTokens


def parts_of(
    tokenizer: Any, prefix: str, suffix: str, *, add_bos: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ids of the text before the gap, and those of the text behind it with all marks.

    The order is prefix, suffix, middle. Source: Bavarian et al. 2022, "Efficient Training of
    Language Models to Fill in the Middle", section 3 (PSM); ``/infill`` of llama.cpp's server.
    """
    marks: FimTokens | None = tokenizer.fim
    if marks is None:
        raise UnsupportedFeatureError(
            feature="infill", hint="the model's vocabulary has no marks for a gap"
        )

    def ids(text: str, field: str) -> list[int]:
        checks.check_text(field, text)
        found: list[int] = tokenizer.encode(text, add_special=False, parse_special=False)
        return found

    bos = tokenizer.bos if add_bos else None
    first = [] if bos is None else [bos]
    before = (*first, marks.prefix, *ids(prefix, "prefix"))
    return before, (marks.suffix, *ids(suffix, "suffix"), marks.middle)
