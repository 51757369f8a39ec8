"""What becomes of the rows of a step: tokens, and what is wanted behind them."""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING, Any

import numpy as np

from infercore.errors import SessionFatalError
from infercore.session.jobs import Generating

if TYPE_CHECKING:
    from collections.abc import Sequence

    from infercore.protocols.spi import FloatArray
    from infercore.session.endings import Endings
    from infercore.session.jobs import Job
    from infercore.session.outbox import Outbox
    from infercore.session.shared_engine import SharedEngine
    from infercore.session.tally import Tally


class Choosing:
    """Lets each job that has caught up go on: it chooses from its row, or ends.

    What fails for one is its own: a grammar, a processor or a stop of one changes no other.
    """

    def __init__(
        self, engine: SharedEngine, endings: Endings, outbox: Outbox, tally: Tally
    ) -> None:
        self._engine = engine
        self._endings = endings
        self._outbox = outbox
        self._tally = tally

    def caught_up(self, job: Job, row: int | None, rows: Rows | None = None) -> None:
        """All that ``job`` wants is held; ``row`` is its first output row, None = made before.

        That of the last call, or the one of ``rows``.
        """
        try:
            if isinstance(job, Generating):
                if job.generation.is_native:
                    rows = None
                self._generate(job, row, rows or self._engine.context)
                return
            sequence = job.sequence
            if row is not None:
                sequence.set_row(np.array(self._engine.context.logits(row), dtype=np.float32))
            if job.then is not None:
                job.result = job.then(sequence)
            self._endings.end(job)
        except SessionFatalError:
            raise
        except BaseException as error:  # noqa: BLE001  (it is the caller's to see)
            self._endings.end(job, error)

    def choose_each(
        self,
        jobs: Sequence[Generating],
        rows: FloatArray | Sequence[FloatArray],
        now: float,
        *,
        is_greedy: bool,
    ) -> list[int] | None:
        """Let each of ``jobs``, which want a token each, choose from its row of ``rows``.

        ``is_greedy``: all have a `Generation.not_best`. Returns the token that each wants next;
        None where one wants anything else.
        """
        # What most steps of a pool are: in one function, as each more costs behind an engine that
        # has emptied the processor's caches.
        best = _largest(rows) if is_greedy else None
        source, goes_on = Rows(rows), True
        n_chosen, show, tokens = 0, self._outbox.show, list[int]()
        for i, job in enumerate(jobs):
            generation = job.generation
            is_full = job.shift_from is not None and len(job.sequence.tokens) >= job.window
            if generation.looks_ahead or generation.is_native or is_full:
                goes_on = False
                self.caught_up(job, i, source)
                continue
            try:
                token = generation.choose(source, i, None if best is None else best[i], now)
                if token is not None:
                    n_chosen += 1
                    show(job, token)
                if generation.reason is not None:
                    goes_on = False
                    self._endings.finish(job, generation.reason)
                    continue
                sequence = job.sequence
                n_after = len(sequence.tokens) + 1
                n_left = generation.most - generation.n_completion
                if token is None or n_left < 1 or n_after >= job.window:
                    goes_on = False
                    self._want_pending(job)
                else:
                    generation.pending = None
                    if sequence.ghost:
                        sequence.push(token)
                    else:  # what `push` does, in place
                        sequence.tokens.append(token)
                        sequence.row = None
                        sequence.serial += 1
                    tokens.append(token)
                    job.n_sure = n_after
            except SessionFatalError:
                raise
            except BaseException as error:  # noqa: BLE001  (it is the caller's to see)
                goes_on = False
                self._endings.end(job, error)
        self._tally.generated_tokens += n_chosen
        return tokens if goes_on else None

    def _generate(self, job: Generating, row: int | None, source: Any) -> None:
        """Choose tokens until some must be evaluated, the reader is behind, or an end is there."""
        generation, sequence = job.generation, job.sequence
        if not job.primed:
            job.primed = True
            generation.prime(sequence.tokens)
            job.n_sure = len(sequence.tokens)
            if row is None and sequence.row is not None:
                source, row = Rows([sequence.row]), 0
        elif row is not None and job.ahead is not None:
            self._settle_ahead(job, row)
            row = None
        while not job.done.is_open:
            if generation.pending is not None and self._want_pending(job):
                return
            if generation.is_ahead:
                self._choose(job, source, -1)
            elif row is None or not self._have_room(job):
                return
            else:
                self._choose(job, source, row)
                row = None

    def _choose(self, job: Generating, source: Any, row: int) -> None:
        generation = job.generation
        token = generation.choose(source, row)
        if token is not None:
            self._tally.generated_tokens += 1
            self._outbox.show(job, token)
        if generation.reason is not None:
            self._endings.finish(job, generation.reason)

    # -- guesses -------------------------------------------------------------------------------

    def _settle_ahead(self, job: Generating, row: int) -> None:
        """Keep those of the guesses that are right, now that they are evaluated."""
        ahead, job.ahead = job.ahead, None
        if ahead is None:
            return
        try:
            n_right = job.generation.verify(self._engine.context, ahead.tokens[1:], row)
        except BaseException:
            job.sequence.truncate(job.n_sure)
            raise
        job.sequence.truncate(len(job.sequence.tokens) - (ahead.n_guessed - n_right))
        job.n_sure = len(job.sequence.tokens)

    # -- what is wanted next -------------------------------------------------------------------

    def _want_pending(self, job: Generating) -> bool:
        """Want the token that was chosen last; True where something has to be evaluated for it."""
        generation, sequence = job.generation, job.sequence
        n_after = len(sequence.tokens) + 1
        held = generation.pending is not None and generation.pending.held
        if generation.at_limit:
            self._endings.finish(job, "length")
            return True
        # The last token of a full window has to be evaluated where others follow it.
        if not held and n_after >= job.window and job.shift_from is None:
            self._endings.finish(job, "context")
            return True
        ahead = generation.ahead(lambda: list(sequence.tokens), job.window - n_after - 1)
        if not ahead.tokens:
            return False
        sequence.extend(ahead.tokens)
        job.n_sure = len(sequence.tokens) - ahead.n_guessed
        job.ahead = ahead if ahead.n_guessed else None
        return True

    def _have_room(self, job: Generating) -> bool:
        """Make room for another token in a full window; False where ``job`` waits, or has ended.

        Where the older half of what follows the prefix goes, the last token is evaluated anew.
        """
        sequence, start = job.sequence, job.shift_from
        if start is None or len(sequence.tokens) < job.window:
            return True
        end = start + (len(sequence.tokens) - start) // 2
        if end > start:
            self._shift(job, start, end)
        else:
            self._endings.finish(job, "context")
        return False

    def _shift(self, job: Generating, start: int, end: int) -> None:
        """Drop the tokens from ``start`` to ``end``."""
        sequence = job.sequence
        gone = sequence.tokens[start:end]
        self._engine.cut_out(sequence, start, end)
        sequence.n_held = sequence.n_high = min(sequence.n_held, len(sequence.tokens) - 1)
        job.n_sure = len(sequence.tokens)
        job.generation.shifted += gone
        job.cuts.append((start, end))


class Rows:
    """Stands for a context that has just these rows."""

    __slots__ = ("logits",)

    def __init__(self, rows: FloatArray | Sequence[FloatArray]) -> None:
        self.logits = rows.__getitem__

    def largest(self, i: int) -> tuple[int, float, int]:
        """Return the token with the largest logit of row ``i``, that logit, and ``n_vocab``."""
        row = self.logits(i)
        token = int(row.argmax())
        return token, row.item(token), len(row)


def _largest(rows: FloatArray | Sequence[FloatArray]) -> list[int] | None:
    """Return the token of the largest logit of each row; None unless all are known at once."""
    if not isinstance(rows, np.ndarray):
        return None
    best: list[int] = rows.argmax(axis=1).tolist()
    peaks = map(rows.item, range(len(best)), best)
    return best if all(map(isfinite, peaks)) else None  # NaN counts as the largest
