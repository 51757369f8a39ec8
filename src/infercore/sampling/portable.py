"""The sampler in NumPy: the specification that native samplers are compared with."""

# ruff: noqa: SLF001  (a clone is filled in by its own class)

from __future__ import annotations

import copy
import secrets
from math import isfinite
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np
from numpy.random import PCG64, Generator

from infercore.errors import (
    InvalidStateError,
    InvalidTokenError,
    SessionClosedError,
)
from infercore.sampling import chain, logprobs
from infercore.sampling.candidates import Candidates, softmax
from infercore.sampling.history import TokenHistory
from infercore.sampling.rules import LogitRules
from infercore.sampling.selection import Selected
from infercore.values import checks
from infercore.values.config import MAX_SEED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from infercore.protocols.public import Context, Tokenizer
    from infercore.sampling.candidates import FloatArray, IdArray, RealArray
    from infercore.sampling.constraints import Constraint
    from infercore.values.config import SamplingConfig
    from infercore.values.session import TokenLogprob


class _Step(NamedTuple):
    """What `PortableSampler.last_logprobs` tells of."""

    token: int
    raw: FloatArray | None
    out_of: Candidates


class _OneRow:
    """Stands for a context that has just this row."""

    __slots__ = ("_row",)

    def __init__(self, row: FloatArray) -> None:
        self._row = row

    def logits(self, _: int) -> FloatArray:
        return self._row


class PortableSampler:
    """Chooses tokens as ``config`` says, the same ones for the same seed on every backend.

    ``constraint`` limits the tokens (see `compile_constraint`) and belongs to this sampler from
    now on; ``processors`` are objects with ``apply(logits) -> logits``, called first with a
    copy of the row (float32 [n_vocab], writable); clones share them. With ``logprobs`` each step
    keeps its row, so that `last_logprobs` can answer. ``held_back`` is a number and ids: so many
    tokens are chosen before one of these may be. With ``are_logprobs`` rows are log-probabilities
    as they are, and need not sum to 1.

    Random numbers come from ``numpy.random.Generator(PCG64(seed))``, as ``random()``: a step
    takes one for the selection, and one before it where xtc is on; temperature 0 takes none.

    Errors leave the sampler unchanged. `InvalidTokenError` for a bias outside the vocabulary.
    """

    def __init__(
        self,
        config: SamplingConfig,
        *,
        tokenizer: Tokenizer,
        n_vocab: int,
        constraint: Constraint | None = None,
        processors: Sequence[Any] = (),
        logprobs: bool = False,
        held_back: tuple[int, Sequence[int]] | None = None,
        are_logprobs: bool = False,
    ) -> None:
        self._config = config
        self._n_vocab = n_vocab
        self._constraint = constraint
        self._keeps_rows = logprobs
        self._are_logprobs = are_logprobs
        self._rules = LogitRules(config, tokenizer, n_vocab, tuple(processors))
        # Most greedy decodes take the largest logit of the row as it came, but for these tokens.
        self._n_held_back, self._held_back = _held_back(held_back, n_vocab)
        greedy = config.temperature == 0 and constraint is None and not self._n_held_back
        self.not_best = self._rules.only_lowered if greedy else None
        # The row is only needed where its best is one of these; None: always.
        self._needs_row_for = None if logprobs else self.not_best
        self._seed = secrets.randbelow(MAX_SEED + 1) if config.seed is None else int(config.seed)
        self._closed = False
        self._rewind()

    def _rewind(self) -> None:
        self._random = Generator(PCG64(self._seed))
        self._history = TokenHistory(self._n_vocab, self._rules.counted_window)
        self._mu = chain.first_mu(self._config)
        self._last: _Step | None = None
        self._best: tuple[int, float] | None = None  # the latest step, where it was just that
        self._best_row: FloatArray | None = None
        self._n_chosen = 0

    def __repr__(self) -> str:
        if self._closed:
            return "<Sampler closed>"
        return f"<Sampler portable, temperature {self._config.temperature:g}, seed {self._seed}>"

    @property
    def seed(self) -> int:
        """The seed in use, 0 to 2**32 - 2; drawn at construction where the config had None."""
        return self._seed

    @property
    def config(self) -> SamplingConfig:
        """The requested config."""
        return self._config

    @property
    def n_vocab(self) -> int:
        """Length of the rows it samples from."""
        return self._n_vocab

    @property
    def constraint(self) -> Constraint | None:
        """The constraint in its present state; advance it through this sampler only."""
        return self._constraint

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def position(self) -> tuple[int, float]:
        """Where it stands in its random numbers, and mirostat's mu: for `move_to` of another."""
        return int(self._random.bit_generator.state["state"]["state"]), self._mu

    def move_to(self, position: tuple[int, float]) -> None:
        """Go on as a sampler of the same seed whose `position` this was."""
        generator = self._random.bit_generator
        state = generator.state
        state["state"]["state"], self._mu = position
        generator.state = state

    def sample(self, context: Context, i: int = -1) -> int:
        """Return a token from output row ``i`` of ``context``, accepted exactly once.

        Raises what ``context.logits`` raises, `InvalidInputError` for a row of another shape,
        `InvalidStateError` where a logit is NaN or infinite or where no token is left, and
        whatever a processor raises: state unchanged.
        """
        # This runs once a token: mostly the largest logit is all that is needed of a row.
        needs_row_for = self._needs_row_for
        if needs_row_for is None:
            return self._sample_row(context, i)
        try:
            found: tuple[int, float, int] = context.largest(i)  # type: ignore[attr-defined]
        except AttributeError:  # only the core's own contexts have it
            return self._sample_row(context, i)
        token, peak, n_vocab = found
        fits = n_vocab == self._n_vocab and isfinite(peak)  # NaN counts as the largest
        if not fits or token in needs_row_for:
            return self._sample_row(context, i)
        self._best = token, peak
        return token

    def _sample_row(self, context: Context, i: int) -> int:
        self._check_open()
        logits = _row_of(context, i)
        if self.not_best is None:
            return self._draw(logits)
        self._rules.check_row(logits)
        token = int(logits.argmax())
        peak = logits.item(token)
        if not isfinite(peak):
            self._rules.check_values(logits)
        if token in self.not_best:
            return self._draw(logits)
        self._best_row = logits.copy() if self._keeps_rows else None
        self._best = token, peak
        return token

    def sample_logits(self, logits: FloatArray) -> int:
        """Return a token for the row ``logits`` (float32 [n_vocab]), accepted exactly once.

        Raises what `sample` raises for a row.
        """
        context: Any = _OneRow(logits)
        return self.sample(context)

    def take(self, context: Context, i: int, token: int) -> int:
        """Return ``token``, which is to follow output row ``i``, accepted; nothing is drawn.

        Raises what `sample` raises for a row, and what `observe` does.
        """
        self._check_open()
        logits = _row_of(context, i)
        self._rules.check_row(logits)
        self.observe([token])
        alone = Candidates(np.array([token]), np.zeros(1))
        self._last, self._best = _Step(token, logits.copy(), alone), None
        return token

    def _draw(self, logits: FloatArray) -> int:
        ready = self._rules.apply(logits, self._history, self._constraint, self._now_held_back())
        kept = chain.candidates_of(ready, self._config, self._random.random)
        chosen = self._choose(kept)
        self._accept((chosen.token,))
        self._mu = chosen.mu
        row = logits.copy() if self._keeps_rows else None
        self._last, self._best = _Step(chosen.token, row, chosen.out_of), None
        return chosen.token

    def _now_held_back(self) -> IdArray | None:
        return self._held_back if self._n_chosen < self._n_held_back else None

    def _latest(self) -> _Step | None:
        if self._best is not None:
            token, peak = self._best
            out_of = Candidates(np.array([token]), np.array([peak]))
            self._last, self._best = _Step(token, self._best_row, out_of), None
        return self._last

    def _choose(self, kept: Candidates) -> Selected:
        if self._config.temperature == 0:
            return Selected(int(kept.ids[0]), kept, self._mu)
        uniform = self._random.random()
        return chain.select(kept, self._config, uniform, mu=self._mu, n_vocab=self._n_vocab)

    def distribution(self, logits: FloatArray) -> tuple[IdArray, RealArray]:
        """Return ids [n] and probabilities float64 [n] that the next draw from ``logits`` has.

        What mirostat or adaptive-p make of it is not part of it. Nothing is accepted and no random
        number is used up; raises as `sample_logits`.
        """
        self._check_open()
        ready = self._rules.apply(logits, self._history, self._constraint, self._now_held_back())
        kept = chain.candidates_of(ready, self._config, copy.deepcopy(self._random).random)
        return kept.ids, softmax(kept.logits)

    def observe(self, tokens: Sequence[int], *, constrained: bool = True) -> None:
        """Take in tokens that are there already: penalties, dry and the constraint see them.

        ``constrained=False`` keeps them from the constraint: right for a prompt, which is no
        part of the constrained text. Raises `InvalidTokenError` for an id outside the
        vocabulary and `InvalidInputError` where the constraint refuses one; state unchanged.
        """
        self._check_open()
        if not isinstance(constrained, bool):
            raise checks.refuse("constrained", constrained, "True or False")
        given = checks.items("tokens", tokens, "token ids")
        for token in given:
            if not (checks.is_integer(token) and 0 <= token < self._n_vocab):
                self._refuse_token(token)
        self._accept(given, constrained=constrained)

    def _accept(self, tokens: Sequence[int], *, constrained: bool = True) -> None:
        if self._constraint is not None and constrained:
            self._constraint.accept_all(tokens)
        self._history.extend(tokens)
        if constrained:
            self._n_chosen += len(tokens)

    def last_logprobs(self, top_n: int = 0, *, processed: bool = False) -> TokenLogprob:
        """Return natural-log probabilities of the latest step: the chosen and ``top_n`` tokens.

        Of the row as the model gave it, or with ``processed`` of what was drawn from (all steps
        done). Raises `InvalidStateError` before the first step, and for a row that was not kept.
        """
        self._check_open()
        last = self._latest()
        if last is None:
            raise InvalidStateError(
                "nothing was sampled yet; call sample first",
                operation="last_logprobs",
                state="no step",
            )
        if processed:
            return logprobs.candidate_logprobs(last.out_of, last.token, top_n)
        if last.raw is None:
            raise InvalidStateError(
                "the row was not kept; make the sampler with logprobs=True",
                operation="last_logprobs",
                state="rows not kept",
            )
        total = 0.0 if self._are_logprobs else None
        return logprobs.raw_logprobs(last.raw, last.token, top_n, total)

    def reset(self) -> None:
        """Go back to the state after construction: seed, penalties, selection and constraint."""
        self._check_open()
        self._rewind()
        if self._constraint is not None:
            self._constraint.reset()

    def clone(self) -> PortableSampler:
        """Return an independent sampler in the same state: it continues with the same tokens."""
        self._check_open()
        twin = PortableSampler.__new__(PortableSampler)
        vars(twin).update(vars(self))
        twin._random = copy.deepcopy(self._random)
        twin._history = self._history.copy()
        twin._rules = self._rules.clone()
        twin._constraint = self._constraint.clone() if self._constraint is not None else None
        return twin

    def close(self) -> None:
        """Let go of constraint and buffers; idempotent. Any later use is `SessionClosedError`."""
        self._closed, self._needs_row_for = True, None
        self._constraint = None
        self._last = self._best = self._best_row = None

    def _check_open(self) -> None:
        if self._closed:
            raise SessionClosedError("the sampler is closed; make a new one")

    def _refuse_token(self, token: object) -> NoReturn:
        raise InvalidTokenError(
            f"token {checks.shown(token)} is outside the vocabulary of {self._n_vocab}",
            field="tokens",
            value=token,
            allowed=f"0 to {self._n_vocab - 1}",
        )


def _row_of(context: Context, i: int) -> FloatArray:
    try:
        return context.logits(i)
    except AttributeError as error:
        if hasattr(context, "logits"):
            raise
        raise checks.refuse("context", context, "a context") from error


def _held_back(given: tuple[int, Sequence[int]] | None, n_vocab: int) -> tuple[int, IdArray | None]:
    if given is None or given[0] == 0:
        return 0, None
    return given[0], np.array([token for token in given[1] if token < n_vocab], dtype=np.intp)
