"""One engine call a step: who takes part, with how much, and what they make of it."""

from __future__ import annotations

import time
from threading import RLock
from typing import TYPE_CHECKING

from infercore.errors import ContextOverflowError
from infercore.session.compose import Budget, compose
from infercore.session.jobs import Generating, Looking
from infercore.session.observer import Step, is_observed, tell
from infercore.session.steady import Steady, place

if TYPE_CHECKING:
    from collections.abc import Callable

    from infercore.protocols.guarded import WhichRows
    from infercore.session.choosing import Choosing
    from infercore.session.cost_model import CostModel
    from infercore.session.endings import Endings
    from infercore.session.jobs import Job
    from infercore.session.places import Places
    from infercore.session.recovery import Recovery
    from infercore.session.roster import Roster
    from infercore.session.sequence import Sequence as TokenSequence
    from infercore.session.shared_engine import SharedEngine
    from infercore.session.tally import Tally

Parts = list[tuple["Job", int]]
_TRIES, _TRY_AGAIN_S = 4, 5e-4


class Stepping:
    """Composes engine calls of the jobs that have places, and runs them.

    ``lone`` are sequences that share no call until they have caught up once. ``on_call`` is called
    with the sequences of each engine call before it, and with none after it.
    """

    def __init__(  # noqa: PLR0913  (each is a part of its own)
        self,
        *,
        engine: SharedEngine,
        roster: Roster,
        places: Places,
        choosing: Choosing,
        endings: Endings,
        recovery: Recovery,
        tally: Tally,
        costs: CostModel,
        n_step_tokens: int | None = None,
    ) -> None:
        self._engine = engine
        self._roster = roster
        self._places = places
        self._choosing = choosing
        self._endings = endings
        self._recovery = recovery
        self._tally = tally
        self._costs = costs
        self._n_step_tokens = n_step_tokens
        self._steady = Steady(
            engine=engine,
            roster=roster,
            choosing=choosing,
            recovery=recovery,
            per_call=costs.per_call,
            on_step=self._took_one_each,
        )
        self.lone: set[TokenSequence] = set()
        self._calls_for: Job | None = None
        self._lock = RLock()  # a signal handler may cancel
        self.on_call: Callable[[list[TokenSequence]], object] | None = None

    def evaluate(self) -> bool:
        """Make one engine call; False where there is nothing to evaluate.

        Where there is no room, the youngest lose their places.
        """
        if self._steady.find(self._n_tokens()):
            self._tally.n_steps += 1
            self._steady.take(self._tally.n_steps, self.on_call)
            return True
        self._steady.forget()
        parts = self._compose()
        while parts and not self._places.have_room(parts):
            youngest = self._roster.youngest()
            if len(self._roster.running) == 1:
                self._too_large(youngest)
                return True
            self._places.preempt(youngest)
            parts = self._compose()
        if not parts:
            return False
        self._run(parts)
        return True

    def look_anew(self) -> None:
        """Take nothing for granted in the next step: something was done beside the steps."""
        self._steady.forget()

    def stop(self, job: Job) -> None:
        """Stop the engine call that runs, if it is for ``job`` alone and its caller left it.

        From any thread. A call for several goes on to its end.
        """
        for _ in range(_TRIES):
            with self._lock:  # so that no other call begins before the engine has heard it
                if self._calls_for is not job or not job.is_over(time.perf_counter()):
                    return
                self._engine.context.abort()
            time.sleep(_TRY_AGAIN_S)  # the engine hears it once it has begun, not just before

    def _compose(self) -> Parts:
        engine, running = self._engine, self._roster.running
        for job in self._roster.alone:
            if job in running:
                n = min(len(job.sequence.tokens) - job.sequence.n_held, self._n_tokens())
                return [(job, n if job.n_looked is None else min(n, Looking.MOST_ROWS))]
        for job in running:
            sequence = job.sequence
            job.n_held = sequence.n_held
            job.n_missing = len(sequence.tokens) - sequence.n_held
            if engine.multiple is not None:
                end = sequence.next_end()
                job.n_limit = None if end is None else end - sequence.n_held
            if job.n_looked is not None:
                job.n_limit = min(job.n_limit or Looking.MOST_ROWS, Looking.MOST_ROWS)
            if job.primed:
                n_ahead = len(job.ahead.tokens) if job.ahead is not None else 1
                job.is_prompt = job.n_missing > n_ahead
        budget = Budget(self._n_tokens(), engine.n_sequences, engine.multiple)
        return list(compose(running, budget, self._costs).parts)

    def _n_tokens(self) -> int:
        n_batch = int(self._engine.context.n_batch)
        return n_batch if self._n_step_tokens is None else min(n_batch, self._n_step_tokens)

    def _too_large(self, job: Job) -> None:
        """End ``job``, for which there is no room though it is alone."""
        sequence = job.sequence
        if isinstance(job, Generating) and job.primed:
            self._endings.finish(job, "context")
            return
        error = ContextOverflowError(
            stage="engine",
            resident_tokens=sequence.n_held,
            additional_tokens=len(sequence.tokens) - sequence.n_held,
            n_ctx=int(self._engine.context.n_ctx_seq),
        )
        self._endings.end(job, error)

    # -- the call ------------------------------------------------------------------------------

    def _run(self, parts: Parts) -> None:
        """Make one engine call of ``parts``, and let those that have caught up choose."""
        parts.sort(key=lambda part: place(part[0]))
        self._tally.n_steps += 1
        started = time.perf_counter()
        for job, n in parts:
            if job.sequence.n_cells > job.sequence.n_held:
                self._engine.trim(job.sequence)
            if job.ahead is not None:
                _leave_out_guesses(job, n)
        try:
            if self.on_call is not None:
                self.on_call([job.sequence for job, _ in parts])
            if len(parts) == 1 and self._is_left(parts[0][0]):
                return
            firsts = self._call(parts)
        except BaseException as error:  # noqa: BLE001  (each job is told)
            self._recovery.after(error, [job for job, _ in parts])
            return
        finally:
            if self._calls_for is not None:
                with self._lock:
                    self._calls_for = None
            if self.on_call is not None:
                self.on_call([])
        self._account(parts, (time.perf_counter() - started) * 1e3)
        self._take(parts, firsts)

    def _is_left(self, job: Job) -> bool:
        """Whether the caller of ``job`` has left it; from now on `stop` stops the engine."""
        with self._lock:
            self._calls_for = job
        return job.is_over(time.perf_counter())

    def _call(self, parts: Parts) -> list[int | None]:
        """Evaluate tokens of each; return the first row that each needs, None = no row.

        Those that it chooses from, or of all its tokens for who looks at them.
        """
        spans: list[tuple[int, list[int], WhichRows]] = []
        rows: list[int | None] = []
        n_rows = 0
        for job, n in parts:
            sequence, start = job.sequence, job.sequence.n_held
            whole = start + n == len(sequence.tokens)
            n_guessed = job.ahead.n_guessed if whole and job.ahead is not None else 0
            looks = job.n_looked is not None
            mode: WhichRows = "all" if n_guessed or looks else "last" if whole else "none"
            spans.append((sequence.own_id, sequence.tokens[start : start + n], mode))
            first = n_rows + (n - n_guessed - 1 if n_guessed else 0)
            rows.append(first if whole or looks else None)
            n_rows += n if mode == "all" else whole
        context = self._engine.context
        seq_id, tokens, mode = spans[0]
        if len(spans) > 1:
            context.decode_spans(spans)
        elif len(tokens) == 1 and mode == "last":
            context.decode_one(tokens[0], seq_id=seq_id)
        else:
            context.decode(tokens, seq_id=seq_id, logits=mode)
        return rows

    def _account(self, parts: Parts, elapsed_ms: float) -> None:
        tally, n_parts = self._tally, len(parts)
        n_steps = tally.n_steps
        n_running = n_prompt = n_before = 0
        for job, n in parts:
            sequence = job.sequence
            n_before += n * sequence.n_held if job.is_prompt else 0
            again = sequence.hold(sequence.n_held + n)
            sequence.used = job.served = n_steps
            job.failures = 0
            if job.is_prompt:
                n_prompt += n
            else:
                n_running += 1
            if isinstance(job, Generating):
                job.n_steps += 1
                job.n_batched += n_parts
            else:
                tally.evaluated_tokens += n - again
        if all(job.n_looked is None for job, _ in parts):  # a row of each token costs more
            depth = n_before / n_prompt if n_prompt else 0.0
            self._costs.record(n_running, n_prompt, elapsed_ms, depth)
        self._count(n_running, n_prompt, n_parts, elapsed_ms)

    def _took_one_each(self, n: int, elapsed_ms: float) -> None:
        self._costs.record(n, 0, elapsed_ms)
        self._count(n, 0, n, elapsed_ms)

    def _count(self, n_running: int, n_prompt: int, n_sequences: int, elapsed_ms: float) -> None:
        self._tally.count_step(n_sequences, elapsed_ms)
        self._recovery.forget_suspects()
        if is_observed():
            step = Step(
                n_sequences=n_sequences,
                n_running=n_running,
                n_prompt=n_prompt,
                elapsed_ms=elapsed_ms,
            )
            tell("on_step", step)

    def _take(self, parts: Parts, firsts: list[int | None]) -> None:
        """Let each that has caught up choose from its row."""
        alone = self._roster.alone
        for (job, n), row in zip(parts, firsts, strict=True):
            first = row
            if isinstance(job, Looking) and row is not None:
                job.look(self._engine.context.logits, row, n)
                whole = job.sequence.n_held == len(job.sequence.tokens)
                first = row + n - 1 if whole else None
            if alone and job in alone and (first is not None or job.sequence not in self.lone):
                alone.remove(job)
                self.lone.discard(job.sequence)
            if first is not None:
                self._choosing.caught_up(job, first)


def _leave_out_guesses(job: Job, n: int) -> None:
    """Want no guesses beyond the next ``n`` tokens: of those evaluated all rows are needed."""
    ahead, sequence = job.ahead, job.sequence
    if ahead is None or not isinstance(job, Generating):
        return
    n_kept = max(0, n - (job.n_sure - sequence.n_held))
    if n_kept < ahead.n_guessed:
        sequence.truncate(job.n_sure + n_kept)
        kept = ahead._replace(tokens=ahead.tokens[: 1 + n_kept], n_guessed=n_kept)
        job.ahead = kept if n_kept else None
