"""The reference's own sampler: the documented order, written down a second time.

It shares nothing with `infercore.sampling`, so that comparing the two says something. Candidates
are pairs of a token and its logit, the likeliest first; each step takes such a list and returns
one. Order: bias, penalties, dry, top_n_sigma, top_k, typical, top_p, min_p, xtc, temperature,
selection.
"""

from __future__ import annotations

import copy
import math
import random
import secrets
from collections import Counter
from typing import TYPE_CHECKING, Any

from infercore.errors import InvalidStateError
from infercore.testing import dry
from infercore.testing.mirostat import Mirostat
from infercore.testing.truncation import entropy, probabilities, relative, truncated
from infercore.values.config import MAX_SEED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from infercore.protocols.spi import EngineTokenizer
    from infercore.values.config import SamplingConfig

    Candidates = list[tuple[int, float]]


class ReferenceSampler:
    """Chooses tokens from a context's rows, and remembers them for its penalties."""

    def __init__(self, config: SamplingConfig, tokenizer: EngineTokenizer) -> None:
        dry.check_breakers(config)
        self.config = config
        self.seed = secrets.randbelow(MAX_SEED) if config.seed is None else config.seed
        self._tokenizer = tokenizer
        self.reset()

    def reset(self) -> None:
        """Go back to the state after construction."""
        self._random = random.Random(self.seed)
        self._history: list[int] = []
        self._mirostat = Mirostat(self.config)

    def sample(self, context: Any, row: int) -> int:
        """Return a token from output row ``row``, accepted exactly once."""
        token = self._choose(context.logits(row).tolist())
        self._history.append(token)
        return token

    def candidates(self, logits: Sequence[float]) -> Candidates:
        """Return what all steps before the selection leave of the row ``logits`` [n_vocab]."""
        config = self.config
        row = [*logits]
        for token, bias in config.logit_bias.items():
            row[token] += bias
        if config.ignore_eos:
            is_end = self._tokenizer.is_eog
            row = [-math.inf if is_end(token) else logit for token, logit in enumerate(row)]
        self._penalise(row)
        for token, amount in dry.penalties(config, self._history, self._tokenizer).items():
            row[token] -= amount
        left = [(token, logit) for token, logit in enumerate(row) if math.isfinite(logit)]
        if not left:
            raise InvalidStateError(
                "logit_bias and ignore_eos forbid every token; forbid less",
                operation="sample",
                state="no token left",
            )
        left.sort(key=lambda candidate: -candidate[1])  # stable: of equal ones the lowest id
        left = relative(left)
        if config.temperature == 0:
            return left[:1]
        return self._tempered(truncated(left, config, self._random))

    def _choose(self, logits: Sequence[float]) -> int:
        left = self.candidates(logits)
        if self.config.mirostat:
            return self._mirostat.choose(left, self._random, n_vocab=len(logits))
        weights = probabilities(left)
        return self._random.choices([token for token, _ in left], weights)[0]

    def _penalise(self, row: list[float]) -> None:
        """Lower what was chosen lately: positive logits are divided, others multiplied."""
        config = self.config
        window = dry.latest(self._history, config.penalty_last_n)
        for token, count in Counter(window).items():
            logit = row[token] / config.repeat_penalty ** math.copysign(1, row[token])
            row[token] = logit - count * config.frequency_penalty - config.presence_penalty

    def _tempered(self, left: Candidates) -> Candidates:
        """Divide by the temperature, which with a range follows how unsure the model is."""
        config, degree = self.config, self.config.temperature
        if config.dynatemp_range and len(left) > 1:
            low = max(0.0, degree - config.dynatemp_range)
            high = degree + config.dynatemp_range
            unsure = entropy(probabilities(left)) / math.log(len(left))
            degree = low + (high - low) * unsure**config.dynatemp_exponent
        if degree <= 0:
            return left[:1]
        return [(token, logit / degree) for token, logit in relative(left)]

    def observe(self, tokens: Sequence[int]) -> None:
        """Take ``tokens`` as chosen before."""
        self._history += tokens

    def clone(self) -> ReferenceSampler:
        """Return an independent sampler in the same state."""
        twin = copy.copy(self)
        twin._random, twin._mirostat = copy.deepcopy(self._random), copy.copy(self._mirostat)  # noqa: SLF001
        twin._history = list(self._history)  # noqa: SLF001
        return twin

    def close(self) -> None:
        """There is nothing to free."""
