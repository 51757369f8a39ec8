"""How the engine chooses tokens: its own settings for those of infercore, the rest refused."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

import attrs
import openvino_genai as genai

from infercore import SamplingConfig, UnsupportedFeatureError

if TYPE_CHECKING:
    from collections.abc import Sequence

BACKEND = "openvino-genai"
HONOURED = frozenset(
    {"temperature", "top_k", "top_p", "min_p", "seed", "ignore_eos", "implementation", "min_keep"}
)
_OF_PENALTIES = frozenset({"penalty_last_n", "dry_base", "dry_allowed_length", "dry_penalty_last_n",
                           "dry_sequence_breakers"})  # fmt: skip
_N_SEEDS = 2**32 - 1


class Sampler:
    """A seed and the engine's settings; the numbers are drawn in the engine."""

    def __init__(self, config: SamplingConfig, ends: Sequence[int]) -> None:
        usual = SamplingConfig()
        for field in attrs.fields(SamplingConfig):
            name = field.name
            known = name in HONOURED or name in _OF_PENALTIES  # these mean nothing by themselves
            if not known and getattr(config, name) != getattr(usual, name):
                hint = "the engine has no such setting, or means something else by it"
                raise UnsupportedFeatureError(feature=name, backend=BACKEND, hint=hint)
        self._config = config
        self._ends = list(ends)
        self.seed = secrets.randbelow(_N_SEEDS) if config.seed is None else config.seed
        self._n_drawn = 0

    def sample(self, session: Any, i: int) -> int:
        """Return the next token behind what ``session`` holds."""
        del i
        token: int = session.next_token(self)
        self._n_drawn += 1
        return token

    def config_of(self, n_tokens: int) -> Any:
        """Return the engine's settings for a request of up to ``n_tokens``.

        Ends of a text end no request: they are the session's business. A request that is begun
        anew in the midst of a text draws other numbers than the first did.
        """
        chosen, found = self._config, genai.GenerationConfig()
        found.max_new_tokens = n_tokens
        found.ignore_eos = True
        if chosen.ignore_eos:
            found.stop_token_ids = set(self._ends)
            found.min_new_tokens = n_tokens
        if chosen.temperature > 0:
            found.do_sample = True
            found.temperature = chosen.temperature
            found.top_p = chosen.top_p
            found.min_p = chosen.min_p
            if chosen.top_k:
                found.top_k = chosen.top_k
            found.rng_seed = (self.seed + self._n_drawn) % _N_SEEDS
        return found

    def observe(self, tokens: Sequence[int]) -> None:
        """Take in nothing: penalties are refused."""

    def reset(self) -> None:
        """Begin with the first number again."""
        self._n_drawn = 0

    def clone(self) -> Sampler:
        """Return an independent sampler in the same state."""
        twin = Sampler(attrs.evolve(self._config, seed=self.seed), self._ends)
        twin._n_drawn = self._n_drawn
        return twin

    def close(self) -> None:
        """There is nothing to free."""
