"""One owner of a context, one engine call a step.

There are no phases: each sequence has tokens that it wants and tokens that are held, and a step
lets held catch up. A sequence that is cancelled, loses its cells to others, or is in a step that
fails, just holds less than it wants. All but `submit`, `post`, `wake` and what `admission` counts
is for the one thread that owns the context.
"""

from __future__ import annotations

import time
from contextlib import suppress
from queue import SimpleQueue
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from infercore.errors import (
    ContextOverflowError,
    InferCoreError,
    InvalidStateError,
    SessionFatalError,
)
from infercore.session.admission import Admission
from infercore.session.choosing import Choosing
from infercore.session.endings import Endings
from infercore.session.jobs import Generating
from infercore.session.keeping import Keeping, n_tokens_of
from infercore.session.outbox import Outbox
from infercore.session.places import Places
from infercore.session.placing import Placing
from infercore.session.prefixes import Prefixes
from infercore.session.recovery import Recovery
from infercore.session.roster import Roster
from infercore.session.shared_engine import SharedEngine
from infercore.session.stepping import Stepping
from infercore.session.tally import Tally

if TYPE_CHECKING:
    from collections.abc import Callable

    from infercore.protocols.guarded import SessionContext
    from infercore.session.cost_model import CostModel
    from infercore.session.jobs import Job
    from infercore.session.pool_stream import PoolStream
    from infercore.session.sequence import Sequence
    from infercore.session.store import Store

_GATHERING_S, _GATHERING_MOST_S = 0.02, 0.1
"""How long to wait for calls that may come: after the last one that came, and in all;"""
_GATHERING_S_EACH = 0.004
_GATHERING_STEPS = 1 / 3
"""at most so long for each that is expected, and so much of a step of all of them."""
_FOLLOWING_S = 0.02
"""How long to wait, at most, for answers whose prompts were just evaluated."""
_FOLLOWING_STEPS, _FOLLOWING_SHARE = 1 / 8, 1 / 2
"""How much of a step that is: the larger of the first, and the second times their share in it."""
_FIRST_S, _LOOK_S = 0.004, 0.0005
"""A first token has so long to be read; how often that is looked at."""


class Scheduler:
    """Lets the sequences of many sessions share the engine calls of one context.

    It takes jobs in, gives them places, and lets each of its parts do what a step needs.
    """

    def __init__(  # noqa: PLR0913  (each is a field of a pool)
        self,
        open_context: Callable[[], SessionContext],
        *,
        costs: CostModel,
        n_parallel: int,
        max_waiting: int = 1024,
        n_step_tokens: int | None = None,
        multiple: int | None = None,
        one_a_call: bool = False,
        max_restarts: int = 3,
        restart_window: float = 600.0,
        store: Store | None = None,
        own_bytes: int = 0,
        keeps_at_end: bool = False,
        context: SessionContext | None = None,
    ) -> None:
        self._engine = engine = SharedEngine(
            open_context,
            n_parallel=n_parallel,
            multiple=multiple,
            one_a_call=one_a_call,
            context=context,
        )
        self._keeps_at_end = keeps_at_end
        self._costs = costs
        costs.has_own_cells = not engine.is_shared
        self.inbox: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self.sequences: set[Sequence] = set()
        # Of calls that have begun, by their id: a dictionary is read whole while others add to it.
        self.unread: WeakValueDictionary[int, PoolStream] = WeakValueDictionary()
        self.on_work: Callable[..., object] | None = None  # as the owner begins work and ends it
        self.stopping = False
        self.ended = False
        self._was_woken = False
        self.count = tally = Tally()
        self.admission = Admission(n_places=engine.n_places, max_waiting=max_waiting, tally=tally)
        self.outbox = Outbox()
        self.roster = roster = Roster()
        self.endings = Endings(roster, self.admission, self.outbox, tally)
        self.keeping = Keeping(engine, self.sequences, tally, store=store, own_bytes=own_bytes)
        self.places = Places(engine, roster, self.sequences, self.keeping, tally)
        prefixes = Prefixes(
            self.sequences,
            copies=engine.context.capabilities.kv_copy,
            cuts=engine.can_truncate,
            multiple=multiple,
            n_least=engine.n_least_copied,
        )
        self.placing = Placing(
            engine=engine,
            places=self.places,
            roster=roster,
            sequences=self.sequences,
            prefixes=prefixes,
            keeping=self.keeping,
            tally=tally,
        )
        self.recovery = Recovery(
            engine=engine,
            roster=roster,
            sequences=self.sequences,
            places=self.places,
            placing=self.placing,
            endings=self.endings,
            tally=tally,
            max_restarts=max_restarts,
            restart_window=restart_window,
        )
        self._choosing = Choosing(engine, self.endings, self.outbox, tally)
        self.stepping = Stepping(
            engine=engine,
            roster=roster,
            places=self.places,
            choosing=self._choosing,
            endings=self.endings,
            recovery=self.recovery,
            tally=tally,
            costs=costs,
            n_step_tokens=n_step_tokens,
        )

    # -- facts ---------------------------------------------------------------------------------

    @property
    def context(self) -> SessionContext:
        """The one that is shared: another one after a restart."""
        return self._engine.context

    @property
    def can_truncate(self) -> bool:
        """Whether the engine can remove the end of a sequence."""
        return self._engine.can_truncate

    @property
    def n_places(self) -> int:
        """How many sequences are evaluated at the same time at most."""
        return self._engine.n_places

    @property
    def multiple(self) -> int | None:
        """What the calls of a prompt end at, where each session has the bits it has alone."""
        return self._engine.multiple

    @property
    def takes_turns(self) -> bool:
        """Whether each engine call has one sequence, as far as was chosen."""
        return self._engine.n_sequences == 1 or self._costs.takes_turns

    @property
    def n_running(self) -> int:
        """Calls that have a place."""
        return len(self.roster.running)

    @property
    def n_unfinished(self) -> int:
        """Calls that have begun and not ended: of streams too that rest, or were not read yet."""
        return self.admission.n_calls + len(self.roster.resting) + len(self.unread)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self.endings.closed

    @property
    def fatal(self) -> SessionFatalError | None:
        """What ended all jobs for good, None while there is no such thing."""
        return self.endings.fatal

    # -- from any thread -----------------------------------------------------------------------

    def submit(self, job: Job) -> None:
        """Let ``job`` be worked on. It ends once, whatever comes."""
        job.on_change = self._look_at
        self.post(lambda: self._accept(job))

    def post(self, work: Callable[[], object]) -> None:
        """Let the owner do ``work`` between two steps; safe in a finalizer."""
        self.inbox.put(work)

    def wake(self) -> None:
        """Let the owner look at its jobs; safe in a finalizer."""
        self.inbox.put(None)

    def _look_at(self, job: Job) -> None:
        """Let the owner look at ``job``; a call that runs for it alone is stopped for that."""
        self.stepping.stop(job)
        self.wake()

    def do(self, work: Callable[[], object] | None) -> None:
        """Do what was posted; for the owner."""
        if work is None:
            self._was_woken = True
            return
        self.stepping.look_anew()
        if self.on_work is not None:
            self.on_work(begins=True)
        try:
            work()
        except Exception as error:  # noqa: BLE001  (the others go on)
            if not self.endings.refuses:
                self._restart(error)
        finally:
            if self.on_work is not None:
                self.on_work(begins=False)

    def _restart(self, error: Exception) -> None:
        """Open the engine anew: after what failed between calls it cannot be trusted."""
        if not isinstance(error, SessionFatalError):
            error = SessionFatalError(f"the engine failed between two calls: {error}", cause=error)
        self.recovery.restart_with_all(error)

    def abort(self) -> None:
        """Stop the engine call that runs, whatever it is for; from any thread."""
        self._engine.context.abort()

    # -- coming and going ----------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Know ``sequence`` from now on."""
        self.post(lambda: self.sequences.add(sequence))

    def release(self, sequence: Sequence) -> None:
        """Forget ``sequence`` and free its cells; a job of it is dropped."""
        job = sequence.job
        if job is not None:
            job.cancelled = True
        self.post(lambda: self.forget(sequence))

    def forget(self, sequence: Sequence) -> None:
        """Forget ``sequence`` and free its cells, or leave them to others; for the owner."""
        if sequence.job is not None:
            self.endings.drop(sequence.job)
        self.stepping.lone.discard(sequence)
        self.roster.expect_no_more(sequence)
        if self.endings.refuses:
            self.sequences.discard(sequence)
            return
        try:
            self.places.leave(sequence)
        except Exception as error:  # noqa: BLE001  (who closes a session is not concerned)
            self._restart(error)

    def flush(self, namespace: str | None) -> None:
        """Forget what closed sessions left, of all namespaces or of one."""
        self.post(lambda: self._flush(namespace))

    def _flush(self, namespace: str | None) -> None:
        if not self.endings.refuses:
            self.places.flush(namespace)
        self.keeping.flush(namespace)  # what was moved there since it was asked for, too

    def adopt(self, sequence: Sequence, seq_id: int, *, cut: int | None) -> None:
        """Know ``sequence``, which holds all its tokens in ``seq_id``; before the first step."""
        self.places.adopt(sequence, seq_id)
        sequence.cut = cut
        self.sequences.add(sequence)

    def _accept(self, job: Job) -> None:
        sequence = job.sequence
        if self.endings.refuses:
            self.endings.end(job, self.endings.refusal())
            return
        self.sequences.add(sequence)
        sequence.job = job
        try:
            self.keeping.before_cut(sequence, job.n_keep)
        except Exception as error:  # noqa: BLE001  (the call goes on from its tokens)
            self._restart(error)
        sequence.keep(job.n_keep)
        if self.multiple is not None:
            if job.n_looked is not None:
                sequence.ends = []  # all of it is evaluated anew, in other calls
            sequence.hold_whole_calls()
        if sequence in self.stepping.lone:
            self.roster.alone.append(job)
        job.n_before = len(sequence.tokens)
        if job.tokens:
            sequence.extend(job.tokens)
        if isinstance(job, Generating):
            job.n_sure = len(sequence.tokens)
        self.roster.enter(job)

    # -- the step ------------------------------------------------------------------------------

    def gathers_until(self) -> float | None:
        """Return until when to wait for calls that may begin in one engine call with those here.

        Apart, each of their prompts has an engine call of its own, and so have the ends of their
        answers. None where the step is to be taken now: nobody is expected, there are places for
        no more, calls take turns, or somebody was woken. Sessions that
        run wait for nobody but the answer of a prompt that was evaluated in the last step.
        """
        roster, waiting = self.roster, self.roster.waiting
        if roster.running:
            return self._follows_until()
        if not waiting or self._was_woken or self.takes_turns:
            return None
        n_expected, ended = roster.expected()
        n = min(len(waiting) + n_expected, self.n_places)
        if n <= len(waiting):
            return None
        step_s = (self._costs.step_ms(n) or 0.0) / 1e3
        most_s = min(_GATHERING_S, _GATHERING_S_EACH * (n - 1), _GATHERING_STEPS * step_s)
        times = [job.waiting_since or 0.0 for job in waiting]
        until = min(max(ended, *times) + most_s, max(ended, min(times)) + _GATHERING_MOST_S)
        deadline = roster.next_deadline()
        return until if deadline is None else min(until, deadline)

    def _follows_until(self) -> float | None:
        """Return until when to wait for answers whose prompts were evaluated in the last step.

        They have places, which would have nothing to do in the next engine call.
        """
        roster = self.roster
        n, ended = roster.following()
        if not n or self._was_woken or self.takes_turns:
            return None
        n_here = len(roster.running) + len(roster.waiting)
        step_s = (self._costs.step_ms(len(roster.running) + n) or 0.0) / 1e3
        steps = max(_FOLLOWING_STEPS, _FOLLOWING_SHARE * n / (n_here + n))
        until = ended + min(_FOLLOWING_S, steps * step_s)
        return until if until > time.perf_counter() else None

    def step(self) -> bool:
        """Take one step; False where there was nothing to do. Never raises for a job's fault.

        Where more calls came while others were given places, it makes no engine call yet.
        """
        self._was_woken = False
        if self.on_work is not None:
            self.on_work(begins=True)
        try:
            return self._step()
        finally:
            if self.on_work is not None:
                self.on_work(begins=False)
            self.outbox.send()

    def _step(self) -> bool:
        waiting = self.roster.waiting
        try:
            self._look_after()
            if waiting and self._admit() and self._comes_along():
                return True
            self.outbox.send()  # who begins with its row there has a token now, before the call
            self._let_first_be_read()
            self.places.close_gap()
            done = self.stepping.evaluate()
        except Exception as error:  # noqa: BLE001  (each call is tried again)
            self._restart(error)
            return True
        if not done and waiting and not self.roster.running:
            self.endings.end(next(iter(waiting)), _stuck())
            return True
        return done

    def _let_first_be_read(self) -> None:
        """Let the first token of who is alone reach its reader before the engine goes on.

        Each thread and process on its way would wait for a processor while the engine has all.
        """
        running = self.roster.running
        if len(running) != 1 or not isinstance(running[0], Generating) or running[0].n_given != 1:
            return
        job, until = running[0], time.perf_counter() + _FIRST_S
        while job.n_asked <= 1 and self.inbox.empty() and time.perf_counter() < until:
            time.sleep(_LOOK_S)

    def _look_after(self) -> None:
        """End what was cancelled or is late, rest what is ahead of its reader, and go on."""
        endings, roster = self.endings, self.roster
        found = [
            job
            for job in roster.running
            if job.cancelled
            or job.deadline is not None
            or job.n_given - job.n_unshown - job.n_asked >= job.n_ahead
        ]
        if not (found or roster.waiting or roster.resting):
            return
        now = time.perf_counter()
        for job in [*found, *roster.waiting]:
            if job.cancelled:
                endings.cancel(job)
            elif job.deadline is not None and now > job.deadline:
                endings.expire(job, now)
            elif isinstance(job, Generating) and job.is_ahead and job.primed:
                self._rest(job, now)
        if roster.resting:
            self._look_at_resting(now)

    def _look_at_resting(self, now: float) -> None:
        endings = self.endings
        for rested in [*self.roster.resting]:
            if rested.cancelled:
                endings.cancel(rested)
            elif rested.deadline is not None and now > rested.deadline:
                endings.expire(rested, now)
            elif not rested.is_ahead:
                self.admission.count(rested, counts=True)
                self.roster.wake(rested)
            elif rested.reader_timeout and now > rested.rested_since + rested.reader_timeout:
                rested.cancelled = True
                endings.cancel(rested)

    def _rest(self, job: Generating, now: float) -> None:
        job.rests = True
        if not job.is_ahead:  # the reader asked just before it could see that it must wake us
            job.rests = False
            return
        self.roster.rest(job, now)
        self.admission.count(job, counts=False)

    def _comes_along(self) -> bool:
        """Whether something was posted while calls were placed: one more may begin in this step."""
        has_place = len(self.roster.running) < self.n_places
        return has_place and not self.takes_turns and not self.inbox.empty()

    def _admit(self) -> bool:
        """Give places to those that wait, in their order; who follows another lets it go ahead.

        Returns whether more run than before.
        """
        passed: list[Job] = []
        n_before = len(self.roster.running)
        try:
            self._place_waiting(passed)
        finally:
            for job in reversed(passed):
                self.roster.waiting.put_back(job)
        return len(self.roster.running) > n_before

    def _place_waiting(self, passed: list[Job]) -> None:
        waiting = self.roster.waiting
        while waiting and len(self.roster.running) < self.n_places:
            job = waiting.take()
            try:
                placed = self.placing.place(job)
            except SessionFatalError:
                waiting.put_back(job)
                raise
            except BaseException as error:  # noqa: BLE001  (it is the caller's to see)
                self.endings.end(job, error)
                continue
            if placed is None:
                passed.append(job)
            elif not placed:
                waiting.put_back(job)
                break
            else:
                self._begin(job)

    def _begin(self, job: Job) -> None:
        self.roster.give_place(job)
        sequence = job.sequence
        self.placing.leave_rows(job)
        if not job.placed_once:
            job.placed_once, job.n_base = True, sequence.n_held
        if sequence.n_held == len(sequence.tokens):
            self._choosing.caught_up(job, None)

    # -- between steps, for a session ----------------------------------------------------------

    def cut_out(self, sequence: Sequence, start: int, end: int) -> bool:
        """Take tokens out of the middle; see `SharedEngine.cut_out`."""
        return self._engine.cut_out(sequence, start, end)

    def trim(self, sequence: Sequence) -> None:
        """Remove from the engine what is not wanted any more."""
        self._engine.trim(sequence)

    def restore(self, sequence: Sequence, data: bytes, n_ctx: int, cut: int | None) -> None:
        """Let ``sequence`` be what `Context.save_sequence` returned as ``data``, with its ``cut``.

        Raises `ContextOverflowError` (stage "restore") for a window of ``n_ctx`` and what
        `Context.load_sequence` raises.
        """
        self.endings.check()
        n = n_tokens_of(data)
        if n > n_ctx:
            raise ContextOverflowError(
                stage="restore", resident_tokens=0, additional_tokens=n, n_ctx=n_ctx
            )
        while not (self.places.take_id(sequence) and self.places.make_free(sequence, n)):
            if not self.roster.running:
                break
            self.places.preempt(self.roster.youngest())
        self.placing.load_whole(sequence, data, cut)

    def copy_cells(self, source: Sequence, target: Sequence) -> None:
        """Let ``target`` hold what ``source`` holds, where that costs no other its cells."""
        self.endings.check()
        self.placing.copy_cells(source, target)

    # -- the end -------------------------------------------------------------------------------

    def close(self) -> None:
        """End all jobs and close the context."""
        if self.closed:
            return
        self.endings.closed = True
        self.endings.end_all()
        if self._keeps_at_end and self.fatal is None:  # for the next program
            with suppress(InferCoreError):
                self.places.let_go_all()
        for sequence in self.sequences:
            sequence.lose()
        self.keeping.close()
        self._engine.context.close()


def _stuck() -> InvalidStateError:
    return InvalidStateError(
        "there is no room for this call; close sessions, or open the pool with more n_cells",
        operation="step",
        state="no room",
    )
