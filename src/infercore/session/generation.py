"""What a decode makes of rows of logits: tokens, text and counts. It evaluates nothing.

Who drives a generation evaluates the tokens that `Generation.ahead` names and hands it the rows:
a stream in its caller's thread, or the scheduler of a pool for many at once.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections import deque
from contextlib import suppress
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

import attrs

from infercore.errors import SessionFatalError
from infercore.session.text import TextAssembler
from infercore.values.config import sampling_of
from infercore.values.session import StreamChunk, Usage, text_chunk

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from infercore.protocols.guarded import WhichRows
    from infercore.session.drafting import Drafter
    from infercore.session.pieces import Pieces
    from infercore.values.config import DecodeConfig
    from infercore.values.session import TokenLogprob


_logger = logging.getLogger("infercore.session")
_logger.addHandler(logging.NullHandler())


_new = tuple.__new__  # half the time that a named tuple's own takes


class Chosen(NamedTuple):
    """A token, and whether the engine holds it already (beyond the logical context)."""

    token: int
    held: bool = False
    logprob: TokenLogprob | None = None


class Ahead(NamedTuple):
    """Tokens to evaluate in one call: one that was chosen, then forced ones or guesses."""

    tokens: list[int]
    logits: WhichRows = "last"
    n_guessed: int = 0


class Shown(NamedTuple):
    """Text that may be shown, and the tokens that end in it: what a `StreamChunk` is made of.

    So that whoever reads makes it: a pool's thread has other things to do.
    """

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    shifted_out: tuple[int, ...] = ()

    def chunk(self, **ending: Any) -> StreamChunk:
        """Return the chunk."""
        text, tokens, logprobs, prompt_logprobs, shifted_out = self
        if logprobs is prompt_logprobs is None and not (shifted_out or ending):
            return text_chunk(text, tokens)
        return StreamChunk(
            text=text,
            tokens=tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            shifted_out=shifted_out,
            **ending,
        )


class Generation:
    """Chooses tokens one by one, makes text of them, and knows when it is at its end.

    ``pending`` is the token that was chosen last, until it is part of the context. ``reason`` is
    the finish reason once the end is known, ``ended_by`` the token that ended it, if one did.
    """

    # Attributes beyond 30 lie in a dictionary, which a token would look through some fifty times.
    __slots__ = (
        "_drafter", "_first_at", "_given", "_is_constrained", "_last_at", "_logprobs", "_may_stop",
        "_min_tokens", "_n_logprobs", "_n_shown", "_pieces", "_previous", "_queue", "_rest",
        "_sample_s", "_sampler", "_sampling", "_shown", "_special_text", "_stops", "_text",
        "config", "ended_by", "is_native", "looks_ahead", "most", "n_accepted", "n_completion",
        "n_drafted", "not_best", "pending", "prompt_logprobs", "reason", "shifted", "shows_later",
    )  # fmt: skip

    def __init__(
        self, sampler: Any, config: DecodeConfig, *, drafter: Drafter | None, pieces: Pieces
    ) -> None:
        # What a pool reads once a token stands first, side by side.
        self._pieces = pieces
        self._stops = frozenset(config.stop_tokens)
        self.n_completion = 0
        self.most = sys.maxsize if config.max_tokens is None else config.max_tokens
        self.pending: Chosen | None = None
        self.reason: str | None = None
        self._first_at: float | None = None
        self._last_at = 0.0
        self._sampler = sampler
        self._is_constrained = getattr(sampler, "constraint", None) is not None
        self.looks_ahead = drafter is not None or self._is_constrained
        self.is_native = bool(getattr(sampler, "is_native", False))
        simple = config.logprobs is None and not self.looks_ahead
        self.not_best: frozenset[int] | None = (
            getattr(sampler, "not_best", None) if simple else None
        )
        """All but these tokens may be chosen for being the largest of a row; None: not just so."""
        self.shows_later = simple and not config.stop
        """Whether its end never depends on its text, which somebody else may make: `show`."""
        self._queue: deque[Chosen] = deque()
        self._given: deque[int] = deque()  # forced, and each is to be told of by its own row
        self._n_logprobs = config.logprobs
        self._sample_s = 0.0
        self.ended_by: int | None = None
        self.config = config
        self._drafter = drafter
        self._sampling = sampling_of(config)
        self.n_drafted = 0
        self.n_accepted = 0
        # What shows.
        self._text = TextAssembler(config.stop, include=config.include_stop)
        self._special_text = config.special_text
        self._may_stop = bool(config.stop)
        self._min_tokens = config.min_tokens
        self._n_shown = 0
        self._previous: int | None = None
        self._rest = ""
        self._shown: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self.shifted: list[int] = []
        self.prompt_logprobs: tuple[TokenLogprob, ...] | None = None

    def __repr__(self) -> str:
        most = "" if self.config.max_tokens is None else f"/{self.config.max_tokens}"
        return f"<Generation {self.n_completion}{most} tokens>"

    # -- choosing ------------------------------------------------------------------------------

    def prime(self, tokens: Sequence[int]) -> None:
        """Show the sampler the prompt; a constraint does not see it."""
        self._sampler.observe(tokens, constrained=False)

    @property
    def is_ahead(self) -> bool:
        """Whether the next token is known already, so that no row is needed for it."""
        return bool(self._queue)

    @property
    def is_held_ahead(self) -> bool:
        """Whether the next token is known and evaluated, so that it needs no more room."""
        return bool(self._queue) and self._queue[0].held

    def ends(self, token: int) -> bool:
        """Return whether ``token`` ends the decode: it is then not part of the context."""
        return token in self._stops or self._pieces[token].is_eog

    def choose(
        self, context: Any, row: int, best: int | None = None, now: float = 0.0
    ) -> int | None:
        """Choose the next token, to be given to `show`; None where it ends the decode.

        From output row ``row`` of ``context``, unless the token is known. Where this was the end,
        ``reason`` is set, and ``finish`` makes the last chunk. With a `not_best`, ``best`` may be
        the token with the largest logit of the row, which was found at ``now``.
        """
        # This runs once a token, behind an engine that has emptied the processor's caches: so what
        # few decodes need is asked first, and in one place.
        if best is not None and best not in self.not_best:  # type: ignore[operator]
            chosen, self._last_at = _new(Chosen, (best, False, None)), now
        elif self._queue:
            chosen = self._queue.popleft()
            self._last_at = time.perf_counter()
        elif self.not_best is None:
            chosen = self._sample(context, row)
        else:
            started = time.perf_counter()
            token, peak, _ = context.largest(row)
            if token in self.not_best or not math.isfinite(peak):  # NaN counts as the largest
                token = self._sampler.sample(context, row)
            chosen, self._last_at = _new(Chosen, (token, False, None)), time.perf_counter()
            self._sample_s += self._last_at - started
        token = chosen[0]
        if self._first_at is None:
            self._first_at = self._last_at
        is_eog = self._pieces[token][2]
        if is_eog or token in self._stops:
            self.ended_by = token
            self.reason = "eos" if is_eog else "stop"
            return None
        self.pending = chosen
        self.n_completion += 1
        if self._n_logprobs is not None and chosen[2] is not None:
            self._logprobs.append(chosen[2])
        return token

    def show(self, token: int) -> Shown | None:
        """Return the text that ``token``, which was chosen, completes; None where that is none.

        Where it completes a stop string, ``reason`` is set.
        """
        pieces = self._pieces
        data, is_control, _ = pieces[token]
        self._n_shown += 1
        self._shown.append(token)
        if is_control and not self._special_text:
            data = b""
        elif data[:1] == b" " and pieces.strips is not False:
            data = pieces.shown(token, self._previous)
        self._previous = token
        text = self._text.push(data, looks=self._n_shown > self._min_tokens)
        if self._may_stop and self._text.stopped:  # the text before it is for the last chunk
            self.reason, self._rest = "stop", text
            return None
        return self._take_shown(text) if text else None

    def _sample(self, context: Any, row: int) -> Chosen:
        started = time.perf_counter()
        if self._given:
            token = self._sampler.take(context, row, self._given.popleft())
        else:
            token = self._sampler.sample(context, row)
        self._last_at = now = time.perf_counter()
        self._sample_s += now - started
        if self._n_logprobs is None:
            return _new(Chosen, (token, False, None))
        return Chosen(token, False, self._sampler.last_logprobs(self._n_logprobs))

    def times(self) -> tuple[float, float]:
        """Return the seconds of choosing tokens, and of the masks that a grammar made for that."""
        constraint = getattr(self._sampler, "constraint", None)
        masks_s = 0.0 if constraint is None else constraint.masks_s
        return self._sample_s - masks_s, masks_s

    @property
    def at_limit(self) -> bool:
        """Whether as many tokens as were asked for are chosen."""
        return self.n_completion >= self.most

    # -- evaluating ----------------------------------------------------------------------------

    def rests(self) -> bool:
        """Whether the pending token is to be evaluated alone; asked once a token."""
        if not self.looks_ahead:
            return True
        if self._is_constrained or self._drafter is None:
            return False
        return self._drafter.rests()

    def ahead(self, context_tokens: Callable[[], list[int]], room: int) -> Ahead:
        """Return what to evaluate for the pending token, which is taken: itself, and maybe more.

        At most ``room`` tokens more. ``context_tokens`` gives the tokens before it.
        """
        chosen, self.pending = self.pending, None
        if chosen is None or chosen.held:
            return Ahead([])
        if not self.looks_ahead:
            return Ahead([chosen.token])
        forced = [] if self._given else self._forced(room)
        if self._n_logprobs is not None:
            self._given.extend(forced)
        elif forced:
            self._sampler.observe(forced)
            self._queue.extend(Chosen(token, held=True) for token in forced)
            return Ahead([chosen.token, *forced])
        drafts = [] if self._given else self._drafts(context_tokens, chosen.token, room)
        if not drafts:
            return Ahead([chosen.token])
        return Ahead([chosen.token, *drafts], "all", len(drafts))

    def verify(self, context: Any, guesses: Sequence[int], first_row: int = 0) -> int:
        """Choose from the rows behind the pending token and each guess; return how many are right.

        The rows are those of ``context`` from ``first_row`` on. Where tokens are forced, guesses
        end: a seed then gives what it gives without them. What fails behind the first row is
        tried again when its token is asked for, if it ever is.
        """
        chosen: list[Chosen] = []
        try:
            for i, guess in enumerate([*guesses, None]):
                chosen.append(self._sample(context, first_row + i))
                token = chosen[-1].token
                if token != guess or self.ends(token) or self._forced(1):
                    break
        except SessionFatalError:
            raise
        except Exception:
            if not chosen:  # else the last one is evaluated alone, and its row is asked again
                raise
        n_accepted = len(chosen) - 1
        self.n_drafted += len(guesses)
        self.n_accepted += n_accepted
        self._queue.extend(c._replace(held=True) for c in chosen[:-1])
        self._queue.append(chosen[-1])
        return n_accepted

    def _forced(self, room: int) -> list[int]:
        """Tokens that the constraint leaves no choice about.

        Up to the first one that would end the decode, or that the bias forbids: of these the
        sampler decides (with an error where nothing is left). Processors and repeated n-grams see
        every token, so with them nothing is skipped.
        """
        constraint = getattr(self._sampler, "constraint", None)
        config = self.config
        sees_all = config.processors or self._sampling.no_repeat_ngram_size
        if constraint is None or room < 1 or sees_all:
            return []
        return list(takewhile(self._may_be_forced, constraint.forced_tokens()[:room]))

    def _may_be_forced(self, token: int) -> bool:
        bias = self._sampling.logit_bias.get(token, 0.0)
        return bias > -math.inf and not self.ends(token)

    def _drafts(self, context_tokens: Callable[[], list[int]], token: int, room: int) -> list[int]:
        if self._drafter is None or self._drafter.rests():
            return []
        n = min(self._drafter.n_draft, room, self.most - self.n_completion - 1)
        if n < 1:
            return []
        try:
            return self._drafter.propose([*context_tokens(), token], n)
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

    # -- showing -------------------------------------------------------------------------------

    def _take_shown(self, text: str) -> Shown:
        tokens = tuple(self._shown)
        self._shown.clear()
        if self._n_logprobs is None and self.prompt_logprobs is None and not self.shifted:
            return _new(Shown, (text, tokens, None, None, ()))
        logprobs = None if self._n_logprobs is None else tuple(self._logprobs)
        self._logprobs = []
        shifted, self.shifted = tuple(self.shifted), []
        of_prompt, self.prompt_logprobs = self.prompt_logprobs, None
        return Shown(text, tokens, logprobs, of_prompt, shifted)

    def finish(self, reason: str, **usage: Any) -> StreamChunk:
        """Return the last chunk, with the text that was held back and the usage."""
        text = self._rest + self._text.flush()
        by: str | int | None = None
        if reason in ("eos", "stop"):
            by = self._text.stopped_by if self.ended_by is None else self.ended_by
        usage_ = self._usage(**usage)
        return self._take_shown(text).chunk(finish_reason=reason, stopped_by=by, usage=usage_)

    def _usage(self, *, started: float, **counts: Any) -> Usage:
        first = self._first_at
        return Usage(
            completion_tokens=self.n_completion,
            time_to_first_token_ms=None if first is None else (first - started) * 1e3,
            tokens_per_second=self._rate(),
            seed=self._sampler.seed,
            sampling=attrs.evolve(self._sampling, seed=self._sampler.seed),
            drafted_tokens=self.n_drafted,
            accepted_tokens=self.n_accepted,
            **counts,
        )

    def _rate(self) -> float | None:
        if self._first_at is None or self.n_completion < 2:  # noqa: PLR2004
            return None
        elapsed = self._last_at - self._first_at
        return (self.n_completion - 1) / elapsed if elapsed > 0 else None

    def close(self) -> None:
        """Release sampler and drafter; idempotent."""
        self._queue.clear()
        self._sampler.close()
        if self._drafter is not None:
            self._drafter.close()
