"""Many texts, and pairs of texts, to token ids: what stands around them, and what is cut off."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from infercore.errors import InvalidInputError
from infercore.values import checks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

TRUNCATIONS = ("error", "right", "left")
_PROBE = "a"
_SHAPE = "texts, or (text, text) pairs"


@attrs.frozen
class Frame:
    """The ids that a tokenizer puts before a text, between those of a pair, and at the end."""

    begin: Sequence[int]
    middle: Sequence[int]
    end: Sequence[int]

    def around(self, texts: Sequence[Sequence[int]]) -> list[int]:
        """Return the ids of one text, or of a pair, with what stands around them."""
        first, *more = texts
        middle = [i for text in more for i in (*self.middle, *text)]
        return [*self.begin, *first, *middle, *self.end]

    def n_added(self, n_texts: int) -> int:
        """Return how many ids are not of the texts."""
        return len(self.around([()] * n_texts))


def frame_of(
    encode: Callable[..., list[int]], pair_middle: Sequence[int] | None, bos: int | None
) -> Frame:
    """Return the frame of the tokenizer of ``encode``; between a pair stands what ends a text.

    Never ``bos``: a pair is one sequence, which begins once.
    """
    bare = encode(_PROBE, add_special=False)
    framed = encode(_PROBE, add_special=True)
    at = next((i for i in range(len(framed)) if framed[i : i + len(bare)] == bare), 0)
    end = framed[at + len(bare) :]
    middle = end if pair_middle is None else pair_middle
    return Frame(framed[:at], [token for token in middle if token != bos], end)


def check_texts(texts: Any) -> list[tuple[str, ...]]:
    """Return each text as a tuple of one, each pair as one of two. Raises `InvalidInputError`."""
    found = []
    for text in checks.items("texts", texts, _SHAPE):
        parts = (text,) if isinstance(text, str) else text
        if not isinstance(parts, (tuple, list)) or len(parts) > 2 or not parts:  # noqa: PLR2004
            raise checks.refuse("texts", text, _SHAPE)
        found.append(tuple(checks.check_text("texts", part) for part in parts))
    return found


def fitted(
    texts: Sequence[list[int]], n_tokens: int | None, truncation: str, number: int
) -> Sequence[list[int]]:
    """Return ``texts`` with at most ``n_tokens`` ids together, cut at the end that is named.

    Of a pair the longer one gives way. Raises `InvalidInputError` where nothing may be cut.
    """
    surplus = 0 if n_tokens is None else sum(map(len, texts)) - n_tokens
    if surplus <= 0:
        return texts
    if n_tokens is not None and n_tokens < 0:
        raise InvalidInputError(
            "max_tokens has no room for the special tokens around a text or pair; raise it, or "
            "pass add_special=False",
            field="max_tokens",
            value=number,
            allowed="room for the special tokens",
        )
    if truncation == "error" or n_tokens is None:
        raise InvalidInputError(
            f"text {number} has {surplus} tokens too many; raise max_tokens, or say which end is "
            "to be cut with truncation='right' or 'left'",
            field="max_tokens",
            value=number,
            allowed="room for each text",
        )
    kept = [len(text) for text in texts]
    for _ in range(surplus):
        kept[kept.index(max(kept))] -= 1
    if truncation == "right":
        return [text[:n] for text, n in zip(texts, kept, strict=True)]
    return [text[len(text) - n :] for text, n in zip(texts, kept, strict=True)]
