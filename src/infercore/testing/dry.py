"""DRY ("don't repeat yourself") for the reference's sampler, by comparing everything.

Source: p-e-w, text-generation-webui pull request 5677.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from infercore.errors import UnsupportedFeatureError

if TYPE_CHECKING:
    from infercore.protocols.spi import EngineTokenizer
    from infercore.values.config import SamplingConfig


def breakers(config: SamplingConfig, tokenizer: EngineTokenizer) -> frozenset[int]:
    """Return the tokens that no repetition reaches over: those with a breaker in their text.

    Raises `UnsupportedFeatureError` for a breaker of several bytes, which tokens may split.
    """
    if not config.dry_multiplier:
        return frozenset()
    texts = [text.encode() for text in config.dry_sequence_breakers if text]
    for text in texts:
        if len(text) > 1:
            raise UnsupportedFeatureError(
                feature=f"dry_sequence_breakers with {text!r}",
                backend="reference",
                hint="its own sampler takes single bytes; use implementation='portable'",
            )
    pieces = ((token, tokenizer.token_bytes(token)) for token in range(tokenizer.n_vocab))
    return frozenset(token for token, piece in pieces if any(text in piece for text in texts))


def penalties(config: SamplingConfig, history: list[int], ends: frozenset[int]) -> dict[int, float]:
    """Return what each token loses that would prolong a repetition of the latest tokens.

    A token that followed an earlier copy of the last n >= dry_allowed_length tokens loses
    multiplier * base ** (n - allowed), for the longest such n.
    """
    last_n = len(history) if config.dry_penalty_last_n < 0 else config.dry_penalty_last_n
    window = history[-last_n:] if last_n else []
    if not config.dry_multiplier or config.dry_base < 1:
        return {}
    longest: dict[int, int] = {}
    for place, token in enumerate(window):
        n = _n_common(window[:place], window, ends)
        if token not in ends and n >= config.dry_allowed_length and place:
            longest[token] = max(longest.get(token, 0), n)
    allowed, base = config.dry_allowed_length, config.dry_base
    return {t: config.dry_multiplier * base ** (n - allowed) for t, n in longest.items()}


def _n_common(earlier: list[int], window: list[int], ends: frozenset[int]) -> int:
    """Return how many tokens at the end of both are the same, up to the latest breaker."""
    n = 0
    for a, b in zip(reversed(earlier), reversed(window), strict=False):
        if a != b or b in ends:
            break
        n += 1
    return n
