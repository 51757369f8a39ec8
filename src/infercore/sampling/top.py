"""What can be chosen exactly where only the likeliest tokens of each row are known.

`Capabilities.logits` "top": rows have the log-probabilities of the ``n_top`` likeliest tokens, and
-inf for the others. Whatever could let one of those win, or needs all of them, is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from infercore.errors import UnsupportedFeatureError
from infercore.values.config import DecodeConfig, SamplingConfig

if TYPE_CHECKING:
    from typing import NoReturn

_NEEDS_ALL = (
    "repeat_penalty", "frequency_penalty", "presence_penalty", "dry_multiplier", "logit_bias",
    "ignore_eos", "no_repeat_ngram_size", "mirostat", "adaptive_p_target", "top_n_sigma",
)  # fmt: skip
_OF_A_DECODE = ("response_format", "processors", "min_tokens", "prompt_logprobs")
_MOVES_THE_BEST = ("xtc_probability", "typical_p")


def check_sampling(config: SamplingConfig, n_top: int, backend: str) -> None:
    """Raise `UnsupportedFeatureError` for what ``n_top`` log-probabilities a row do not decide."""
    for name in _changed(SamplingConfig(), config, _NEEDS_ALL):
        _refuse(name, backend, n_top, "it needs the others too; leave it out")
    if 1 <= config.top_k <= n_top:
        return
    if config.temperature != 0:
        _refuse("top_k", backend, n_top, f"give top_k from 1 to {n_top}, or temperature=0")
    for name in _changed(SamplingConfig(), config, _MOVES_THE_BEST):
        _refuse(name, backend, n_top, f"give top_k from 1 to {n_top} beside it")


def check_decode(config: DecodeConfig, n_top: int, backend: str) -> None:
    """Raise `UnsupportedFeatureError` for what a decode cannot do with such rows."""
    for name in _changed(DecodeConfig(), config, _OF_A_DECODE):
        _refuse(name, backend, n_top, "it needs the others too; leave it out")
    if (config.logprobs or 0) > n_top:
        _refuse("logprobs", backend, n_top, f"give at most {n_top}")


def _changed(plain: Any, config: Any, names: tuple[str, ...]) -> list[str]:
    return [name for name in names if getattr(config, name) != getattr(plain, name)]


def _refuse(name: str, backend: str, n_top: int, what: str) -> NoReturn:
    hint = f"the engine tells the {n_top} likeliest tokens alone; {what}"
    raise UnsupportedFeatureError(feature=name, backend=backend, hint=hint)
