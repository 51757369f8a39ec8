"""Where the next token of a decode comes from: sampled, forced, or guessed right."""

from __future__ import annotations

import logging
import math
from collections import deque
from contextlib import suppress
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from infercore.session.drafting import Drafter
    from infercore.session.resident import Resident
    from infercore.values.config import DecodeConfig
    from infercore.values.session import TokenLogprob


_logger = logging.getLogger("infercore.session")
_logger.addHandler(logging.NullHandler())


class Chosen(NamedTuple):
    """A token, and whether the engine holds it already (beyond the logical context)."""

    token: int
    held: bool = False
    logprob: TokenLogprob | None = None


class TokenSource:
    """Chooses tokens one by one; may evaluate several in one call of the engine.

    What is evaluated ahead lies behind the logical context, as a warm tail, until it is shown.
    ``ends(token)`` tells whether a token ends the decode: it is then not made resident.
    """

    def __init__(
        self,
        resident: Resident,
        sampler: Any,
        config: DecodeConfig,
        *,
        drafter: Drafter | None,
        ends: Callable[[int], bool],
    ) -> None:
        self._resident = resident
        self._sampler = sampler
        self._config = config
        self._drafter = drafter
        self.ends = ends
        self._queue: deque[Chosen] = deque()
        self._looks_ahead = drafter is not None or getattr(sampler, "constraint", None) is not None
        self.n_drafted = 0
        self.n_accepted = 0

    @property
    def is_ahead(self) -> bool:
        """Whether the next token is known already."""
        return bool(self._queue)

    @property
    def seed(self) -> int | None:
        """The sampler's seed."""
        seed: int | None = self._sampler.seed
        return seed

    def prime(self, tokens: Sequence[int]) -> None:
        """Tell the sampler of the prompt; a constraint does not see it."""
        self._sampler.observe(tokens, constrained=False)

    def next(self) -> Chosen:
        """Return the next token."""
        return self._queue.popleft() if self._queue else self._sample(-1)

    def _sample(self, row: int) -> Chosen:
        token = self._sampler.sample(self._resident.context, row)
        wanted = self._config.logprobs
        logprob = None if wanted is None else self._sampler.last_logprobs(wanted)
        return Chosen(token, logprob=logprob)

    def settle(self, chosen: Chosen) -> None:
        """Make a token that was shown part of the logical context."""
        if chosen.held:
            self._resident.take_ahead(chosen.token)
            return
        if not self._looks_ahead:
            self._resident.append_one(chosen.token)
            return
        room = self._resident.free - 1
        forced = self._take_forced(room)
        if forced:
            self._resident.append_ahead([chosen.token, *forced], logits="last")
            self._queue.extend(Chosen(token, held=True) for token in forced)
            return
        drafts = self._drafts(chosen.token, room)
        if drafts:
            self._verify(chosen.token, drafts)
        else:
            self._resident.append_one(chosen.token)

    def _take_forced(self, room: int) -> list[int]:
        forced = self._forced(room)
        if forced:
            self._sampler.observe(forced)
        return forced

    def _forced(self, room: int) -> list[int]:
        """Tokens that the constraint leaves no choice about.

        Up to the first one that would end the decode, or that the bias forbids: of these the
        sampler decides (with an error where nothing is left). Processors and logprobs see every
        token, so with them nothing is skipped.
        """
        constraint = getattr(self._sampler, "constraint", None)
        config = self._config
        if constraint is None or room < 1 or config.processors or config.logprobs is not None:
            return []
        return list(takewhile(self._may_be_forced, constraint.forced_tokens()[:room]))

    def _may_be_forced(self, token: int) -> bool:
        bias = self._config.sampling.logit_bias.get(token, 0.0)
        return bias > -math.inf and not self.ends(token)

    def _drafts(self, token: int, room: int) -> list[int]:
        if self._drafter is None or self._config.speculative is None or room < 1:
            return []
        tape = self._resident.tape
        n = min(self._config.speculative.n_draft, room)
        try:
            return self._drafter.propose([*tape.tokens(0, tape.logical), token], n)
        except Exception as error:  # noqa: BLE001  (whatever it is, the tokens are the same)
            self._stop_guessing(error)
            return []

    def _stop_guessing(self, error: Exception) -> None:
        """Go on without a drafter that fails: guesses only make a decode faster."""
        _logger.warning("guessing ahead failed, the decode goes on without: %r", error)
        drafter, self._drafter = self._drafter, None
        if drafter is not None:
            with suppress(Exception):
                drafter.close()

    def _verify(self, token: int, drafts: list[int]) -> None:
        """Evaluate the guesses in one call and keep those that the sampler chooses too.

        Where tokens are forced, guesses end: a seed then gives what it gives without them.
        """
        resident = self._resident
        resident.append_ahead([token, *drafts], logits="all")
        chosen: list[Chosen] = []
        for row, guess in enumerate([*drafts, None]):
            chosen.append(self._sample(row))
            token = chosen[-1].token
            if token != guess or self.ends(token) or self._forced(1):
                break
        n_accepted = len(chosen) - 1
        self.n_drafted += len(drafts)
        self.n_accepted += n_accepted
        resident.drop_ahead(n_accepted)
        self._queue.extend(c._replace(held=True) for c in chosen[:-1])
        self._queue.append(chosen[-1])

    def close(self) -> None:
        """Release sampler and drafter; idempotent."""
        self._queue.clear()
        self._sampler.close()
        if self._drafter is not None:
            self._drafter.close()
