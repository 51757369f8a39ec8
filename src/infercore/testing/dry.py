"""DRY ("don't repeat yourself") for the reference's sampler, by comparing everything.

Source: p-e-w, text-generation-webui pull request 5677.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from infercore.errors import UnsupportedFeatureError

if TYPE_CHECKING:
    from infercore.protocols.spi import EngineTokenizer
    from infercore.values.config import SamplingConfig


def check_breakers(config: SamplingConfig) -> None:
    """Raise `UnsupportedFeatureError` for a breaker of several bytes, which tokens may split."""
    for text in config.dry_sequence_breakers:
        if len(text.encode()) > 1:
            raise UnsupportedFeatureError(
                feature=f"dry_sequence_breakers with {text!r}",
                backend="reference",
                hint="its own sampler takes single bytes; use implementation='portable'",
            )


def latest(history: list[int], n: int) -> list[int]:
    """Return the last ``n`` tokens, or all for -1, the latest first."""
    return history[::-1][: n if n >= 0 else None]


def penalties(
    config: SamplingConfig, history: list[int], tokenizer: EngineTokenizer
) -> dict[int, float]:
    """Return what each token loses that would prolong a repetition of the latest tokens.

    A token that followed an earlier copy of the last n >= dry_allowed_length tokens loses
    multiplier * base ** (n - allowed), for the longest such n. No repetition reaches over a token
    with a breaker in its text, and such a token loses nothing.
    """
    allowed, base = config.dry_allowed_length, config.dry_base
    if base < 1 or not config.dry_multiplier:
        return {}
    window = latest(history, config.dry_penalty_last_n)
    texts = [text.encode() for text in config.dry_sequence_breakers if text]
    ends = {
        token
        for token in dict.fromkeys(window)
        if any(text in tokenizer.token_bytes(token) for text in texts)
    }
    lengths = [(_n_common(window, back, ends), window[back - 1]) for back in range(1, len(window))]
    return {  # of several lengths the longest is the last
        token: config.dry_multiplier * base ** (n - allowed)
        for n, token in sorted(lengths)
        if n >= allowed and token not in ends
    }


def _n_common(window: list[int], back: int, ends: set[int]) -> int:
    """Return how many tokens from ``back`` on are those from 0 on, up to a breaker."""
    n = 0
    while back + n < len(window) and window[back + n] == window[n] and window[n] not in ends:
        n += 1
    return n
