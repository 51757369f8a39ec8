"""DRY ("don't repeat yourself"): the longer a repetition would grow, the harder it is punished."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import attrs
import numpy as np

from infercore.sampling.per_tokenizer import PerTokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from infercore.protocols.public import Tokenizer
    from infercore.sampling.candidates import BoolArray, FloatArray

    TokenArray = npt.NDArray[np.int32]

MAX_BREAKER_BYTES = 40
MAX_TAIL_TOKENS = 20
_LOG_FLOAT_MAX = 88.7228391
_SMALLEST_GROWING_BASE = 1.000001


@attrs.frozen
class Breakers:
    """Token sequences that end a repetition: head token -> the tails that may follow it.

    ``single`` [n_vocab] marks the tokens that are a breaker by themselves (an empty tail),
    ``heads`` [n_vocab] those and the keys of ``tails``.
    """

    single: BoolArray
    heads: BoolArray
    tails: dict[int, tuple[tuple[int, ...], ...]]

    def limit(self, window: TokenArray) -> int:
        """Return how many tokens at the end of ``window`` no breaker interrupts."""
        for place in np.flatnonzero(self.heads[window])[::-1]:
            longest = self._longest(window, int(place))
            if longest is not None:
                return int(window.size - 1 - place - longest)
        return int(window.size)

    def _longest(self, window: TokenArray, place: int) -> int | None:
        token = int(window[place])
        lengths = [0] if self.single[token] else []
        rest = tuple(window[place + 1 : place + 1 + MAX_TAIL_TOKENS].tolist())
        tails = self.tails.get(token, ())
        lengths += [len(tail) for tail in tails if rest[: len(tail)] == tail]
        return max(lengths, default=None)


def apply_dry(
    logits: FloatArray,
    window: TokenArray,
    breakers: Breakers,
    *,
    multiplier: float,
    base: float,
    allowed_length: int,
) -> None:
    """Lower the logits [n_vocab] of tokens that would prolong a repetition, in place.

    ``window`` [m] holds the latest tokens, oldest first. A token that followed an earlier copy
    of the window's last L >= ``allowed_length`` tokens loses
    ``multiplier * base ** (L - allowed_length)``, for the longest such L; L never reaches over a
    breaker, and a token that is a breaker itself loses nothing. ``base < 1`` is off.

    Source: p-e-w, text-generation-webui pull request 5677; ``llama_sampler_init_dry``.
    """
    if multiplier == 0 or base < 1 or window.size <= allowed_length:
        return
    limit = breakers.limit(window)
    if limit < allowed_length:
        return
    most_steps = int(_LOG_FLOAT_MAX / math.log(base)) if base > _SMALLEST_GROWING_BASE else 0
    reach = min(limit, allowed_length + most_steps) if most_steps else limit
    lengths = repeat_lengths(window, reach)
    places = np.flatnonzero(lengths >= allowed_length)
    places = places[~breakers.single[window[places + 1]]]
    tokens, which = np.unique(window[places + 1], return_inverse=True)
    longest = np.zeros(tokens.size, dtype=np.intp)
    np.maximum.at(longest, which, lengths[places])
    logits[tokens] -= multiplier * np.power(float(base), longest - allowed_length)


def repeat_lengths(window: TokenArray, limit: int) -> npt.NDArray[np.intp]:
    """Return for each place but the last how many tokens ending there also end ``window`` [m].

    No length exceeds ``limit``. All places are compared at once, one token further back a turn.

    >>> repeat_lengths(np.array([1, 2, 3, 3, 2, 3, 9, 1, 2, 3], dtype=np.int32), 10).tolist()
    [0, 0, 3, 1, 0, 2, 0, 0, 0]
    """
    lengths = np.zeros(window.size - 1, dtype=np.intp)
    places = np.arange(window.size - 1)
    for back in range(min(limit, window.size - 1)):
        places = places[places >= back]
        places = places[window[places - back] == window[-1 - back]]
        if places.size == 0:
            break
        lengths[places] = back + 1
    return lengths


def _compile(tokenizer: Tokenizer, texts: tuple[str, ...], n_vocab: int) -> Breakers:
    single = np.zeros(n_vocab, dtype=np.bool_)
    tails: dict[int, set[tuple[int, ...]]] = {}
    breakers = [text.encode()[:MAX_BREAKER_BYTES] for text in texts if text]
    for token in range(min(n_vocab, tokenizer.n_vocab)):
        word = tokenizer.token_bytes(token)
        for breaker in breakers:
            if breaker in word:
                single[token] = True
            elif breaker[0] in word:
                tails.setdefault(token, set()).update(_tails(tokenizer, word, breaker))
    heads = single.copy()
    for head, found in tails.items():
        heads[head] |= bool(found)
    return Breakers(single, heads, {head: tuple(found) for head, found in tails.items()})


def _tails(tokenizer: Tokenizer, word: bytes, breaker: bytes) -> Sequence[tuple[int, ...]]:
    """Return how ``breaker`` may go on after a token ``word`` that ends with its beginning.

    A rest that cuts a character in two is no text and cannot be tokenized: left out.
    """
    rests = [breaker[n:] for n in range(1, len(breaker)) if word.endswith(breaker[:n])]
    texts = [rest.decode(errors="ignore") for rest in rests]
    whole = [text for text, rest in zip(texts, rests, strict=True) if text.encode() == rest]
    return [
        tuple(tokenizer.encode(text, add_special=False, parse_special=False)[:MAX_TAIL_TOKENS])
        for text in whole
    ]


compile_breakers = PerTokenizer(_compile)
"""Return the `Breakers` of (tokenizer, texts, n_vocab), made once a tokenizer.

As in llama.cpp, a breaker is cut to 40 bytes and its rest after the head token to 20 tokens.
"""
