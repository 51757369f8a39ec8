"""The engine's own sampler: a chain in the fixed order that infercore documents.

Bias, penalties, dry, top_n_sigma, top_k, typical, top_p, min_p, xtc, temperature, selection. The
engine ends the process over a chain that selects nothing, so exactly one selector is last, and
over a row that does not exist, so rows are asked for first.
"""

from __future__ import annotations

import ctypes
import math
import secrets
from typing import TYPE_CHECKING, Any

from infercore import InvalidInputError
from infercore_llamacpp.library import api
from infercore_llamacpp.settings import refuse

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from infercore import SamplingConfig
    from infercore_llamacpp.context import LlamaContext
    from infercore_llamacpp.model import LlamaModel

N_SEEDS = 2**32 - 1  # the one above is llama.cpp's sign for "random"
_MIROSTAT_TOKENS = 100  # how many tokens estimate the distribution's shape, as in the paper
_MAX_WINDOW = 2**20  # the engine allocates and clears windows whole
_LEAST = 1.1754944e-38


class LlamaSampler:
    """Chooses tokens from a context's rows, and remembers them for its penalties.

    ``seed`` is the one in use. The model must outlive it.
    """

    def __init__(self, chain: Any, seed: int) -> None:
        self._chain = chain
        self.seed = seed

    @classmethod
    def build(cls, model: LlamaModel, config: SamplingConfig) -> LlamaSampler:
        """Return the sampler of ``config``; `InvalidInputError` for a bias that masks all."""
        seed = secrets.randbelow(N_SEEDS) if config.seed is None else config.seed
        sampler = cls(api.llama_sampler_chain_init(api.llama_sampler_chain_default_params()), seed)
        try:
            for stage in _stages(model, config, seed, _bias(model, config)):
                api.llama_sampler_chain_add(sampler._chain, stage)
        except BaseException:
            sampler.close()
            raise
        return sampler

    def sample(self, context: LlamaContext, row: int) -> int:
        """Return a token from output row ``row``, accepted exactly once."""
        index = context.batch_index(row)
        token: int = api.llama_sampler_sample(self._chain, context.handle, index)
        return token

    def observe(self, tokens: Sequence[int]) -> None:
        """Take ``tokens`` as chosen before."""
        for token in tokens:
            api.llama_sampler_accept(self._chain, token)

    def reset(self) -> None:
        """Go back to the state after construction, seed included."""
        api.llama_sampler_reset(self._chain)

    def clone(self) -> LlamaSampler:
        """Return an independent sampler in the same state."""
        return LlamaSampler(api.llama_sampler_clone(self._chain), self.seed)

    def close(self) -> None:
        """Release the chain; idempotent."""
        chain, self._chain = self._chain, None
        api.llama_sampler_free(chain)  # of none it frees nothing


def _bias(model: LlamaModel, config: SamplingConfig) -> dict[int, float]:
    n_vocab = model.info.n_vocab
    bias = dict(config.logit_bias)
    if config.ignore_eos:
        ends = (token for token in range(n_vocab) if model.tokenizer.is_eog(token))
        bias.update(dict.fromkeys(ends, -math.inf))
    if _n_left(model, bias) == 0:
        raise InvalidInputError(
            "logit_bias masks the whole vocabulary; leave at least one token",
            field="logit_bias",
            value=-math.inf,
            allowed="at least one token that is not -inf",
        )
    return bias


def _n_left(model: LlamaModel, bias: dict[int, float]) -> int:
    """Return how many tokens ``bias`` does not forbid."""
    return model.info.n_vocab - sum(n == -math.inf for n in bias.values())


def _stages(
    model: LlamaModel, config: SamplingConfig, seed: int, bias: dict[int, float]
) -> Iterator[Any]:
    if bias:
        entries = (api.llama_logit_bias * len(bias))(*bias.items())
        yield api.llama_sampler_init_logit_bias(model.info.n_vocab, len(bias), entries)
    yield from _penalties(model, config)
    if config.temperature == 0:
        yield api.llama_sampler_init_greedy()
        return
    yield from _filters(config, seed, model.info.n_vocab, _n_left(model, bias))
    yield api.llama_sampler_init_temp_ext(
        config.temperature, config.dynatemp_range, config.dynatemp_exponent
    )
    yield _selector(model, config, seed, _n_left(model, bias))


def _penalties(model: LlamaModel, config: SamplingConfig) -> Iterator[Any]:
    penalties = (config.repeat_penalty, config.frequency_penalty, config.presence_penalty)
    last_n = _window("penalty_last_n", config.penalty_last_n)
    yield api.llama_sampler_init_penalties(model.info.n_vocab, last_n, *penalties)
    last_n = _window("dry_penalty_last_n", config.dry_penalty_last_n)
    if config.dry_multiplier:
        breakers = _breakers(config.dry_sequence_breakers)
        yield api.llama_sampler_init_dry(
            model.vocab,
            config.dry_multiplier,
            config.dry_base,
            min(config.dry_allowed_length, _MAX_WINDOW),
            last_n,
            (ctypes.c_char_p * len(breakers))(*breakers),
            len(breakers),
        )


def _breakers(texts: Sequence[str]) -> list[bytes]:
    """Return ``texts`` as the engine takes them: to it a NUL ends one."""
    breakers = [text.encode() for text in texts]
    if any(b"\0" in breaker for breaker in breakers):
        raise refuse("dry_sequence_breakers with a NUL", "implementation='portable' takes any")
    return breakers


def _window(field: str, last_n: int) -> int:
    """Return ``last_n`` with -1 as the longest window; the engine would take -1 as off.

    Not the trained one: a context may be longer.
    """
    if last_n > _MAX_WINDOW:
        raise refuse(
            f"{field}={last_n}",
            f"the engine's window goes to {_MAX_WINDOW}; give -1 for the whole context, or "
            "implementation='portable'",
        )
    return _MAX_WINDOW if last_n < 0 else last_n


def _filters(config: SamplingConfig, seed: int, n_vocab: int, n_left: int) -> Iterator[Any]:
    """Yield the steps that drop tokens; ``n_left`` of ``n_vocab`` are not forbidden by the bias.

    The engine keeps dropped tokens of logit -inf in its list, where later steps count them or
    take the logarithm of their probability of 0: they are cut off before steps that do. What is
    set to drop nothing, it makes a step that does nothing.
    """
    keep = min(max(1, config.min_keep), n_vocab)
    yield api.llama_sampler_init_top_n_sigma(config.top_n_sigma)
    if config.top_k or (n_left < n_vocab and _counts(config)):  # it sorts the whole vocabulary
        yield api.llama_sampler_init_top_k(min(config.top_k or n_left, n_left))
    if _takes_logarithms(config) or (config.top_n_sigma > 0 and _counts(config)):
        yield api.llama_sampler_init_min_p(_LEAST, 1)
    yield api.llama_sampler_init_typical(config.typical_p, keep)
    yield api.llama_sampler_init_top_p(config.top_p, keep)
    yield api.llama_sampler_init_min_p(config.min_p, keep)
    yield api.llama_sampler_init_xtc(config.xtc_probability, config.xtc_threshold, keep, seed)


def _takes_logarithms(config: SamplingConfig) -> bool:
    return config.typical_p < 1 or config.mirostat == 1


def _counts(config: SamplingConfig) -> bool:
    """Whether a step after top_k depends on how many tokens there are."""
    return config.typical_p < 1 or config.xtc_probability > 0 or config.dynatemp_range > 0


def _selector(model: LlamaModel, config: SamplingConfig, seed: int, n_left: int) -> Any:
    """Return what chooses; ``n_left`` tokens are not forbidden by the bias.

    No choice among n surprises by more than log2(n) on average: with a target beyond that version 1
    keeps every token. The engine's count of them overflows then, on flat rows, and leaves one.
    """
    tau, eta = config.mirostat_tau, config.mirostat_eta
    n = min(config.top_k or n_left, n_left)
    if not config.mirostat or (config.mirostat == 1 and tau >= math.log2(n)):
        return api.llama_sampler_init_dist(seed)
    if config.mirostat == 1:
        return api.llama_sampler_init_mirostat(model.info.n_vocab, seed, tau, eta, _MIROSTAT_TOKENS)
    return api.llama_sampler_init_mirostat_v2(seed, tau, eta)
