"""How the core makes its portable sampler."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from infercore.sampling.constraints import compile_constraint
from infercore.sampling.eog import eog_ids
from infercore.sampling.portable import PortableSampler

if TYPE_CHECKING:
    from collections.abc import Sequence

    from infercore.protocols.public import Tokenizer
    from infercore.values.config import SamplingConfig


def new_portable_sampler(  # noqa: PLR0913  (all but three belong to one decode)
    config: SamplingConfig,
    tokenizer: Tokenizer,
    n_vocab: int,
    *,
    response_format: Any = None,
    processors: Sequence[Any] = (),
    logprobs: bool = False,
    min_tokens: int = 0,
    stop_tokens: Sequence[int] = (),
    are_logprobs: bool = False,
) -> PortableSampler:
    """Return a `PortableSampler`, its constraint compiled from ``response_format``.

    Before ``min_tokens`` are chosen, none is that ends a generation or is one of ``stop_tokens``.
    With ``are_logprobs`` rows are log-probabilities, maybe of the likeliest tokens alone.
    ``config.implementation`` is the caller's business. Raises as `compile_constraint` and
    `PortableSampler` do, before anything is sampled.
    """
    return PortableSampler(
        config,
        tokenizer=tokenizer,
        n_vocab=n_vocab,
        constraint=compile_constraint(response_format, tokenizer, n_vocab=n_vocab),
        processors=processors,
        logprobs=logprobs,
        are_logprobs=are_logprobs,
        held_back=(min_tokens, [*eog_ids(tokenizer), *stop_tokens]) if min_tokens else None,
    )
