"""Guesses of the next tokens, to be verified by the model in one call.

Sources: prompt lookup decoding (Saxena, 2023) for n-grams, speculative decoding with a draft
model (Leviathan et al., 2023, arXiv:2211.17192). Each token is still chosen by the sampler from
the model's own logits, so that what is generated does not depend on the guesses.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from infercore.errors import InvalidInputError, UnsupportedFeatureError
from infercore.session.guess_cost import guess_cost
from infercore.session.resident import Resident
from infercore.values.config import sampling_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from infercore.values.config import DecodeConfig, SpeculativeConfig


_FIRST_RATE = 0.5  # how often guesses are taken to be right before any was seen
_RATE_STEP = 0.15
_SUREST = 0.97
_MARGIN = 1.2
_FIRST_CREDIT = 1.0
_MOST_CREDIT = 8.0
_CREDIT_A_TOKEN = 0.01
_LEAST_CHANCE = 0.3  # of all guesses of a step: a draft stops before the one that is unlikelier
_REST, _MOST_REST = 3, 15  # tokens without a look, after one that found nothing worth guessing


class Drafter(Protocol):
    """**Protocol:** guesses what follows a list of tokens, at most ``n_draft`` at once."""

    n_draft: int

    def rests(self) -> bool:
        """Whether to go on by one token without asking for guesses.

        Once a token; where not, it may be asked again before `propose`.
        """

    def propose(self, tokens: Sequence[int], n: int) -> list[int]:
        """Return up to ``n`` tokens that may follow ``tokens``; none is a fine answer."""

    def close(self) -> None:
        """Release what the drafter holds; idempotent."""


class PromptLookup:
    """Guesses that what followed the last few tokens before will follow them again."""

    def __init__(self, n_gram: int, n_draft: int) -> None:
        self.n_draft = n_draft
        self._n_gram = n_gram
        self._seen: dict[tuple[int, ...], int] = {}
        self._n_indexed = 0

    def rests(self) -> bool:
        """Never: each token is looked up."""
        return False

    def propose(self, tokens: Sequence[int], n: int) -> list[int]:
        """Return what followed the longest n-gram at the end of ``tokens``, where it stood last."""
        self._index(tokens)
        for size in range(min(self._n_gram, len(tokens)), 0, -1):
            at = self._seen.get(tuple(tokens[-size:]))
            if at is not None:
                return list(tokens[at : at + n])
        return []

    def _index(self, tokens: Sequence[int]) -> None:
        """Note where each n-gram ends, but for those at the very end: nothing followed them."""
        for end in range(max(1, self._n_indexed + 1), len(tokens)):
            for size in range(1, min(self._n_gram, end) + 1):
                self._seen[tuple(tokens[end - size : end])] = end
            self._n_indexed = end

    def close(self) -> None:
        """Nothing is held."""


class AutoLookup:
    """Prompt lookup that guesses only where guesses have been right, and only on credit.

    It decides from tokens and from ``cost``, the steps that a guess costs, alone. How often the
    lookup is right is watched on all tokens, guessed or not; where nothing was worth a guess, it
    looks at the next four at once, and the longer that lasts, the more, up to sixteen: this costs a
    tiny model less. A guess is paid from a credit: a hundredth of a step for each token, and what
    right guesses have gained. So a text on which all guesses are wrong takes a fiftieth longer at
    most.
    """

    n_draft = 16

    def __init__(self, cost: float) -> None:
        self._after: dict[tuple[int, ...], int] = {}
        self._n_indexed = 2
        self._cost = cost
        self._rate = _FIRST_RATE
        self._credit = _FIRST_CREDIT
        self._n_seen = 0
        self._expected: list[int] = []
        self._n_guessed = 0
        self._rest = _REST
        self._n_rests = 0

    def rests(self) -> bool:
        """Return whether the last look was a moment ago, and found nothing worth a guess."""
        self._n_rests -= 1
        return self._n_rests >= 0

    def propose(self, tokens: Sequence[int], n: int) -> list[int]:
        """Return guesses that are likely enough to pay; mostly none."""
        self._settle(tokens)
        found = self._look_up(tokens, min(n, self.n_draft))
        self._expected = found
        self._n_guessed = min(len(found), self._worth())
        self._n_seen = len(tokens)
        self._n_rests = 0 if self._n_guessed else self._rest
        self._rest = _REST if self._n_guessed else min(_MOST_REST, 2 * self._rest + 1)
        return found[: self._n_guessed]

    def _look_up(self, tokens: Sequence[int], n: int) -> list[int]:
        """Return what followed the last three tokens before, or the last two."""
        after = self._after
        for end in range(self._n_indexed, len(tokens) - 1):
            b, c = tokens[end - 1], tokens[end]
            after[b, c] = end + 1
            after[tokens[end - 2], b, c] = end + 1
        self._n_indexed = max(self._n_indexed, len(tokens) - 1)
        at = after.get(tuple(tokens[-3:])) or after.get(tuple(tokens[-2:]))
        return [] if at is None else list(tokens[at : at + n])

    def _settle(self, tokens: Sequence[int]) -> None:
        """Compare what was expected with what came, and settle the credit."""
        came = tokens[self._n_seen :]
        self._credit = min(_MOST_CREDIT, self._credit + _CREDIT_A_TOKEN * len(came))
        if not self._expected or not came:
            return
        n_right = 0
        for expected, token in zip(self._expected, came, strict=False):
            hit = expected == token
            n_right += hit
            self._rate += _RATE_STEP * (hit - self._rate)
            if not hit:
                break
        gained = min(n_right, self._n_guessed) - self._cost * self._n_guessed
        self._credit = min(_MOST_CREDIT, self._credit + gained)

    def _worth(self) -> int:
        """How many guesses pay: the last must be right more often than it costs."""
        rate, cost = self._rate, self._cost
        if rate <= cost * _MARGIN or cost >= 1:
            return 0
        n = int(math.log(cost * _MARGIN) / math.log(min(rate, _SUREST)))
        return min(n, int(self._credit / cost))

    def close(self) -> None:
        """Nothing is held."""


class DraftModel:
    """Guesses with a smaller model of the same vocabulary, greedily, in a context of its own.

    It stops where it is not sure enough of all its guesses together: a guess costs a step of the
    draft model, and of the model a row.
    """

    def __init__(self, model: Any, n_ctx: int, n_draft: int, **threads: int | None) -> None:
        self.n_draft = n_draft
        self._context = model.new_context(n_ctx=n_ctx, **threads)
        self._resident = Resident(self._context)

    def rests(self) -> bool:
        """Never: it guesses after each token."""
        return False

    def propose(self, tokens: Sequence[int], n: int) -> list[int]:
        """Return up to ``n`` tokens that the draft model finds likeliest, one after the other."""
        room = self._context.n_ctx_seq - len(tokens)
        self._resident.hold(tokens, need_logits=True)
        guesses: list[int] = []
        chance = 1.0
        for _ in range(min(n, room)):
            if guesses:
                self._resident.append_one(guesses[-1])
            logits = self._context.logits(-1)
            best = int(logits.argmax())
            chance /= float(np.exp(logits - logits[best]).sum())
            if chance < _LEAST_CHANCE:
                break
            guesses.append(best)
        return guesses

    def close(self) -> None:
        """Give the draft context's memory back."""
        self._context.close()


def drafter_of(config: DecodeConfig, session: Any) -> Drafter | None:
    """Return the drafter of a decode, None where nothing is guessed. Raises as `new_drafter`.

    "auto" guesses nothing where a seed is given, or where the context cannot verify.
    """
    speculative = config.speculative
    if not isinstance(speculative, str):
        return None if speculative is None else new_drafter(speculative, session)
    if getattr(session.context, "is_invariant", False):  # a guess would change the calls
        return None
    if sampling_of(config).seed is not None or not _verifies(session.context, AutoLookup.n_draft):
        return None
    cost = guess_cost(session.model, session.context)
    return AutoLookup(cost) if cost < 1 else None


def _verifies(context: Any, n_draft: int) -> bool:
    kinds = context.capabilities
    removes = kinds.kv_remove in {"any", "suffix"} or kinds.max_rollback > n_draft
    return removes and bool(kinds.logits_all)


def new_drafter(config: SpeculativeConfig, session: Any) -> Drafter:
    """Return the drafter that ``config`` asks for.

    Raises `UnsupportedFeatureError` where the session's context cannot verify guesses, and
    `InvalidInputError` for a draft model with another vocabulary.
    """
    if getattr(session.context, "is_invariant", False):
        raise UnsupportedFeatureError(
            feature="speculative with batch_invariant",
            backend=session.model.backend,
            hint="guessing changes which calls evaluate a token, and so its bits; use one or the "
            "other",
        )
    if not _verifies(session.context, config.n_draft):
        raise UnsupportedFeatureError(
            feature="speculative",
            backend=session.model.backend,
            hint="guesses are verified with logits of every token and taken back; this context "
            "cannot do both",
        )
    if config.kind == "prompt_lookup":
        return PromptLookup(config.n_gram, config.n_draft)
    draft = config.draft_model
    if draft.tokenizer.digest != session.model.tokenizer.digest:
        raise InvalidInputError(
            "the draft model has another vocabulary; draft and model must share their tokens",
            field="draft_model",
            value=draft.tokenizer.digest,
            allowed=session.model.tokenizer.digest,
        )
    asked = session.context.config
    threads: dict[str, int | None] = {}
    if draft.backend == session.model.backend:
        threads = {name: getattr(asked, name) for name in ("n_threads", "n_threads_batch")}
    return DraftModel(draft, session.context.n_ctx_seq, config.n_draft, **threads)
