"""One owner of a context, one engine call a step.

There are no phases: each sequence has tokens that it wants and tokens that are held, and a step
lets held catch up. A sequence that is cancelled, loses its cells to others, or is in a step that
fails, just holds less than it wants. All but `submit`, `cancel`, `enter_call` and `post` is for
the one thread that owns the context.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import suppress
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from infercore.engine import blob
from infercore.errors import (
    ContextOverflowError,
    DecodeAbortedError,
    InferCoreError,
    InvalidStateError,
    PoolFullError,
    SessionClosedError,
    SessionFatalError,
    SnapshotError,
    UnsupportedFeatureError,
)
from infercore.session.compose import Budget, compose
from infercore.session.jobs import Generating, Item, Job
from infercore.session.observer import Step, is_observed, tell
from infercore.session.prefixes import Prefixes
from infercore.session.tape import common_prefix
from infercore.session.waiting import Waiting

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from infercore.protocols.guarded import SessionContext
    from infercore.protocols.spi import FloatArray
    from infercore.session.cost_model import CostModel
    from infercore.session.sequence import Sequence
    from infercore.session.store import Found, Store

_WORTH_KEEPING = 32
"""Fewer tokens than these are evaluated sooner than they are moved out and back."""
_MOST_ABORTS = 3
"""So often a call that nobody cancelled is tried again where the engine says that it was."""


class _Row:
    """Stands for a context that has just this row."""

    def __init__(self, row: FloatArray) -> None:
        self._row = row

    def logits(self, _: int) -> FloatArray:
        return self._row


@attrs.define
class Counters:
    """What was done since the beginning."""

    cached_tokens: int = 0
    restored_tokens: int = 0
    evaluated_tokens: int = 0
    generated_tokens: int = 0
    n_steps: int = 0
    n_batched: int = 0
    n_preempted: int = 0
    n_moved_out: int = 0
    n_restarts: int = 0
    step_ms: float | None = None


class Scheduler:
    """Owns a context and lets the sequences of many sessions share its engine calls."""

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
        self._open_context = open_context
        self.context = open_context() if context is None else context
        kinds = self.context.capabilities
        self.can_truncate = kinds.kv_remove in ("any", "suffix")
        batches = kinds.multi_sequence and self.context.n_seq_max > 1
        self.n_places: int = min(n_parallel, self.context.n_seq_max)
        self._n_sequences = 1 if one_a_call or not batches else self.n_places
        self._max_waiting = max_waiting
        self._n_step_tokens = n_step_tokens
        self.multiple = multiple
        self._costs = costs
        self._max_restarts = max_restarts
        self._restart_window = restart_window
        self._restarts: deque[float] = deque()
        self._store = store
        self._own_bytes = own_bytes
        self._keeps_at_end = keeps_at_end
        self.identity = ""
        """What stored sequences belong to: model, engine, and options that change cells."""
        self._shared = self.context.n_seq_max == 1 or self.context.n_ctx_seq == self.context.n_ctx
        self.inbox: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self.sequences: set[Sequence] = set()
        self.waiting = Waiting()
        self.running: list[Job] = []
        self._prefixes = Prefixes(
            self.sequences,
            copies=kinds.kv_copy,
            cuts=self.can_truncate,
            multiple=multiple,
        )
        self._resting: set[Generating] = set()
        self._free_ids = list(range(self.context.n_seq_max - 1, -1, -1))
        self._alone: deque[Job] = deque()
        self._suspects: set[Sequence] = set()
        self.lone: set[Sequence] = set()
        """Sequences that share no call until they have caught up once."""
        self.on_call: Callable[[list[Sequence]], object] | None = None
        """Called with the sequences of each engine call before it, and with none after it."""
        self._given: list[tuple[Generating, Item]] = []
        self._notices: dict[asyncio.AbstractEventLoop, list[Callable[[], object]]] = {}
        self._age = 0
        self._lock = threading.Lock()
        self._n_calls = 0
        self.fatal: SessionFatalError | None = None
        self.closed = False
        self.stopping = False
        self.ended = False
        self.count = Counters()

    # -- from any thread -----------------------------------------------------------------------

    def enter_call(self, *, force: bool = False) -> None:
        """Count a call that evaluates. Raises `PoolFullError` where as many wait as may."""
        with self._lock:
            n_waiting = self._n_calls - self.n_places
            if not force and n_waiting >= self._max_waiting:
                ms = self.count.step_ms
                raise PoolFullError(
                    n_waiting=max(0, n_waiting), retry_after=None if ms is None else ms / 1e3
                )
            self._n_calls += 1

    def leave_call(self) -> None:
        """Count a call no more."""
        with self._lock:
            self._n_calls -= 1

    @property
    def n_calls(self) -> int:
        """Calls that evaluate, with a place or waiting for one."""
        return self._n_calls

    @property
    def n_unfinished(self) -> int:
        """Calls that have begun and not ended: of streams too that rest."""
        return self._n_calls + len(self._resting)

    @property
    def n_waiting(self) -> int:
        """Calls that wait for a place."""
        return max(0, self._n_calls - int(self.n_places))

    def submit(self, job: Job) -> None:
        """Let ``job`` be worked on. It ends once, whatever comes."""
        job.on_change = self.wake
        self.post(lambda: self._accept(job))

    def post(self, work: Callable[[], object]) -> None:
        """Let the owner do ``work`` between two steps; safe in a finalizer."""
        self.inbox.put(work)

    def wake(self) -> None:
        """Let the owner look at its jobs; safe in a finalizer."""
        self.inbox.put(None)

    def notify(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> None:
        """Let ``loop`` call ``callback`` at the end of the step: one call of a loop a step."""
        self._notices.setdefault(loop, []).append(callback)

    def _give(self, job: Generating, item: Item) -> None:
        job.note(item)
        self._given.append((job, item))

    def hand_out(self) -> None:
        """Let the readers have what was made for them.

        All at once: a reader that wakes while others are still being served takes the interpreter.
        """
        if self._given:
            given, self._given = self._given, []
            for job, item in given:
                job.give(item)
        self._send_notices()

    def _send_notices(self) -> None:
        """Let the loops know; a loop that is closed meanwhile has nobody left to tell."""
        if self._notices:
            notices, self._notices = self._notices, {}
            for loop, callbacks in notices.items():
                with suppress(RuntimeError):
                    loop.call_soon_threadsafe(_call_all, callbacks)

    def do(self, work: Callable[[], object] | None) -> None:
        """Do what was posted; for the owner."""
        if work is None:
            return
        try:
            work()
        except SessionFatalError as error:
            self._restart(error, [job.sequence for job in self.running])

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
        """Forget ``sequence`` and free its cells; for the owner."""
        if sequence.job is not None:
            self._drop(sequence.job)
        self.sequences.discard(sequence)
        self.lone.discard(sequence)
        if not self.closed and self.fatal is None:
            self._let_go(sequence, keep=True)

    def _accept(self, job: Job) -> None:
        sequence = job.sequence
        if self.closed or self.fatal is not None:
            self._end(job, self._refusal())
            return
        self.sequences.add(sequence)
        sequence.job = job
        self._age += 1
        job.age = self._age
        self._leave_behind(sequence, job.n_keep)
        sequence.keep(job.n_keep)
        if self.multiple is not None:
            sequence.hold_whole_calls()
        if sequence in self.lone:
            self._alone.append(job)
        job.n_before = len(sequence.tokens)
        if job.tokens:
            sequence.extend(job.tokens)
        if isinstance(job, Generating):
            job.n_sure = len(sequence.tokens)
        self.waiting.append(job)

    def _leave_behind(self, sequence: Sequence, n_keep: int) -> None:
        """Move out what ``sequence`` holds if most of it is given up: it may be asked for again."""
        n_lost = sequence.n_held - n_keep
        worthless = sequence.is_cut or n_lost < max(_WORTH_KEEPING, n_keep)
        if self._store is None or not self.can_truncate or worthless:
            return
        try:
            self._move_out(sequence)
        except SessionFatalError as error:
            self._restart(error, [job.sequence for job in self.running])

    def _refusal(self) -> InferCoreError:
        if self.fatal is not None:
            return SessionFatalError(str(self.fatal), cause=self.fatal.cause)
        return SessionClosedError("this pool is closed; open a new one")

    # -- the step ------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether a step could do something."""
        return bool(self.running or self.waiting)

    def next_deadline(self) -> float | None:
        """Return when (`time.perf_counter`) something is to be done though nobody calls."""
        times = [j.deadline for j in (*self.running, *self.waiting) if j.deadline is not None]
        for job in self._resting:
            if job.deadline is not None:
                times.append(job.deadline)
            if job.reader_timeout is not None:
                times.append(job.rested_since + job.reader_timeout)
        return min(times, default=None)

    def step(self) -> bool:
        """Take one step; False where there was nothing to do. Never raises for a job's fault."""
        try:
            return self._step()
        finally:
            self.hand_out()

    def _step(self) -> bool:
        try:
            self._look_after()
            self._admit()
            done = self._evaluate()
        except SessionFatalError as error:
            self._restart(error, [job.sequence for job in self.running])
            return True
        if not done and self.waiting and not self.running:
            self._end(next(iter(self.waiting)), _stuck())
            return True
        return done

    def _look_after(self) -> None:
        """End what was cancelled or is late, rest what is ahead of its reader, and go on."""
        now = time.perf_counter()
        for job in [*self.running, *self.waiting]:
            if job.cancelled:
                self._cancel(job)
            elif job.deadline is not None and now > job.deadline:
                self._expire(job, now)
            elif isinstance(job, Generating) and job.is_ahead and job.primed:
                self._rest(job, now)
        for rested in [*self._resting]:
            if rested.cancelled:
                self._cancel(rested)
            elif rested.deadline is not None and now > rested.deadline:
                self._expire(rested, now)
            elif not rested.is_ahead:
                self._go_on(rested)
            elif rested.reader_timeout and now > rested.rested_since + rested.reader_timeout:
                self._cancel(rested)

    def _rest(self, job: Generating, now: float) -> None:
        job.rests = True
        if not job.is_ahead:  # the reader asked just before it could see that it must wake us
            job.rests = False
            return
        self._unlist(job)
        job.rested_since = now
        self._resting.add(job)
        self._count_call(job, counts=False)

    def _go_on(self, job: Generating) -> None:
        job.rests = False
        self._resting.discard(job)
        self._count_call(job, counts=True)
        job.waiting_since = time.perf_counter()
        self._age += 1
        job.age = self._age
        self.waiting.append(job)

    def _count_call(self, job: Job, *, counts: bool) -> None:
        if job.counts_as_call != counts:
            job.counts_as_call = counts
            if counts:
                self.enter_call(force=True)
            else:
                self.leave_call()

    def _unlist(self, job: Job) -> None:
        if job in self.running:
            self.running.remove(job)
        elif job in self.waiting:
            self.waiting.remove(job)
        if isinstance(job, Generating):
            self._resting.discard(job)
        if job in self._alone:
            self._alone.remove(job)

    # -- ends ----------------------------------------------------------------------------------

    def _end(self, job: Job, error: BaseException | None = None) -> None:
        """End ``job``, once: with its result, or with ``error``."""
        if job.done.is_open:
            return
        self._unlist(job)
        sequence = job.sequence
        if sequence.job is job:
            sequence.job = None
        sequence.used = self.count.n_steps
        if isinstance(job, Generating):
            sequence.truncate(max(job.n_sure, 0))
            job.generation.pending = None
            job.generation.close()
            if error is not None:
                self._give(job, Item(error=error, final=True))
        elif error is not None:
            sequence.truncate(max(job.n_before, sequence.n_held))
        job.error = error
        if isinstance(job, Generating):
            self._count_call(job, counts=False)
        job.done.open()

    def _cancel(self, job: Job) -> None:
        if isinstance(job, Generating):
            self._finish(job, "cancelled")
            return
        n = job.sequence.n_held
        message = f"cancelled with {n} tokens resident; call again to continue"
        self._end(job, DecodeAbortedError(message, resident_tokens=n))

    def _expire(self, job: Job, now: float) -> None:
        if isinstance(job, Generating) and job.generation.n_completion:
            self._finish(job, "timeout")
        else:
            self._end(job, job.late(now))

    def _drop(self, job: Job) -> None:
        """End a job whose caller went away."""
        self._end(job, SessionClosedError("this session is closed; open a new one"))

    def _finish(self, job: Generating, reason: str) -> None:
        """Give the last chunk; the token that was chosen last is wanted, and not evaluated."""
        generation = job.generation
        pending, generation.pending = generation.pending, None
        sequence = job.sequence
        sequence.truncate(job.n_sure)
        if pending is not None and not pending.held:
            sequence.extend([pending.token])
            job.n_sure += 1
        try:
            chunk = generation.finish(
                reason,
                waited_ms=job.waited_s * 1e3,
                mean_batch=job.n_batched / job.n_steps if job.n_steps else 1.0,
                reevaluated_tokens=sequence.n_again,
                **job.usage,
            )
        except BaseException as error:  # noqa: BLE001  (it is the caller's to see)
            self._end(job, error)
            return
        sequence.n_again = 0
        self._give(job, Item(chunk, final=True))
        self._end(job)

    def adopt(self, sequence: Sequence, seq_id: int, *, is_cut: bool) -> None:
        """Know ``sequence``, which holds all its tokens in ``seq_id``; before the first step."""
        self._free_ids.remove(seq_id)
        sequence.seq_id = seq_id
        sequence.n_held = sequence.n_cells = sequence.n_high = len(sequence.tokens)
        sequence.is_cut = is_cut
        self.sequences.add(sequence)

    # -- between steps, for a session ----------------------------------------------------------

    def trim(self, sequence: Sequence) -> None:
        """Remove from the engine what is not wanted any more."""
        self._trim(sequence)

    def restore(self, sequence: Sequence, data: bytes, n_ctx: int) -> None:
        """Let ``sequence`` be what `Context.save_sequence` returned as ``data``.

        Raises `ContextOverflowError` (stage "restore") for a window of ``n_ctx`` and what
        `Context.load_sequence` raises.
        """
        self._check_open()
        n = n_tokens_of(data)
        if n > n_ctx:
            raise ContextOverflowError(
                stage="restore", resident_tokens=0, additional_tokens=n, n_ctx=n_ctx
            )
        while not (self._take_id(sequence, None) and self._make_free(sequence, n)):
            if not self.running:
                break
            self._preempt(max(self.running, key=lambda job: job.age))
        try:
            self.context.load_sequence(sequence.own_id, data)
        except InferCoreError as error:
            self._look_at_engine()
            if error.state_after == "cleared":
                sequence.truncate(0)
            raise
        sequence.tokens = self.context.tokens(sequence.own_id)
        sequence.n_held = sequence.n_cells = sequence.n_high = len(sequence.tokens)
        sequence.save(None)
        sequence.is_cut = False
        sequence.used = self.count.n_steps
        self._take_row(sequence)

    def copy_cells(self, source: Sequence, target: Sequence) -> None:
        """Let ``target`` hold what ``source`` holds, where that costs no other its cells.

        Else what it holds is copied, or evaluated, when it is needed.
        """
        self._check_open()
        kinds = self.context.capabilities
        if source.seq_id is not None and kinds.kv_copy != "none" and self._free_ids:
            self._trim(source)
            target.seq_id = self._free_ids.pop()
            self.context.seq_copy(source.seq_id, target.seq_id)
            target.n_held = target.n_cells = source.n_held
        elif source.is_cut and source.seq_id is not None and kinds.sequence_state:
            self._trim(source)
            target.n_held = source.n_held
            target.save(self.context.save_sequence(source.seq_id))
            target.n_held = 0
        else:
            target.saved, target.n_saved = source.saved, source.n_saved
        target.used = self.count.n_steps

    def _check_open(self) -> None:
        if self.closed or self.fatal is not None:
            raise self._refusal()

    # -- places --------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Give places to those that wait, in their order; who follows another lets it go ahead."""
        passed: list[Job] = []
        while self.waiting and len(self.running) < self.n_places:
            job = self.waiting.take()
            try:
                placed = self._place(job)
            except SessionFatalError:
                self.waiting.put_back(job)
                raise
            except BaseException as error:  # noqa: BLE001  (it is the caller's to see)
                self._end(job, error)
                continue
            if placed is None:
                passed.append(job)
            elif not placed:
                self.waiting.put_back(job)
                break
            else:
                self._begin(job)
        for job in reversed(passed):
            self.waiting.put_back(job)

    def _begin(self, job: Job) -> None:
        self.running.append(job)
        now = time.perf_counter()
        if job.waiting_since is not None:
            job.waited_s += now - job.waiting_since
            job.waiting_since = None
        sequence = job.sequence
        self._leave_rows(job)
        if not job.placed_once:
            job.placed_once, job.n_base = True, sequence.n_held
        if sequence.n_held == len(sequence.tokens):
            self._caught_up(job, None)

    def _most_held(self, job: Job) -> int:
        """Return how many tokens of ``job`` may be held when it begins.

        The rows that it chooses from are made by evaluating the token before each of them.
        """
        sequence = job.sequence
        if isinstance(job, Generating):
            if job.primed:  # the token that was chosen last is sure, guesses are not
                return job.n_sure - 1
            has_row = sequence.row is not None and not job.generation.is_native
        else:
            has_row = sequence.row is not None or not job.need_row
        return len(sequence.tokens) - (not has_row)

    def _leave_rows(self, job: Job) -> None:
        """Hold less where what is held came without the rows that ``job`` chooses from."""
        n_most = self._most_held(job)
        if job.sequence.n_held > n_most:
            self._hold_less(job.sequence, n_most)

    def _hold_less(self, sequence: Sequence, n: int) -> None:
        """Hold ``n`` tokens, so that the others are evaluated; none where that cannot be."""
        if not sequence.tokens:
            raise ContextOverflowError(
                stage="decode", resident_tokens=0, additional_tokens=1, n_ctx=self.context.n_ctx
            )
        if self.can_truncate:
            sequence.n_held = n
            if self.multiple is not None:
                sequence.hold_whole_calls()
        else:
            self._let_go(sequence, keep=False)
            self._take_id(sequence, None)

    def _place(self, job: Job) -> bool | None:
        """Make ``job`` ready to be evaluated; None where it had better wait for another's tokens.

        False where there is no room before others end.
        """
        sequence = job.sequence
        n_most = self._most_held(job)
        source, n_shared = self._prefixes.source(sequence, n_most)
        n_found = max(sequence.n_held, n_shared)
        if self._prefixes.is_coming(sequence, n_found, self.running):
            return None
        if not self._take_id(sequence, source):
            source, n_shared = None, 0
            if not self._take_id(sequence, None):
                return False
        n_found = max(sequence.n_held, n_shared)
        self._trim(sequence)
        n_needed = max(1, len(sequence.tokens) - n_found)
        stored = None
        if self._store is not None and sequence.saved is None:
            whole = not self.can_truncate and not (isinstance(job, Generating) and job.primed)
            n_stored_most = len(sequence.tokens) if whole else n_most  # its row is saved with it
            stored = self._store.find(
                sequence.namespace, self.identity, sequence.tokens[: max(0, n_stored_most)]
            )
            if stored is not None and stored.n_tokens > max(sequence.n_held, n_shared):
                source, n_needed = None, max(n_needed, stored.n_stored)
        if not self._make_free(sequence, n_needed, spare=source) and self.running:
            return False
        if sequence.saved is not None and not sequence.n_held:
            self._restore_own(job)
        elif source is not None and n_shared > sequence.n_held:
            self._copy(job, source, n_shared)
        elif stored is not None:
            self._restore(job, stored)
        return True

    def _copy(self, job: Job, source: Sequence, n: int) -> None:
        sequence, n_kept = job.sequence, job.sequence.n_held
        if source.n_cells > source.n_held and self.can_truncate:
            self._trim(source)
        if sequence.n_cells:
            self.context.seq_remove(sequence.own_id)
            sequence.n_held = sequence.n_cells = 0
        if self.context.capabilities.kv_copy == "any":
            self.context.seq_copy(source.own_id, sequence.own_id, 0, n)
            sequence.n_cells = n
        else:
            self.context.seq_copy(source.own_id, sequence.own_id)
            sequence.n_cells = source.n_cells
        sequence.n_held = n
        sequence.n_high = max(sequence.n_high, n)
        sequence.ends = [end for end in source.ends if end <= n] + [
            end for end in sequence.ends if end > n
        ]
        if not job.placed_once:
            job.n_shared = n - n_kept
        source.used = self.count.n_steps
        self._trim(sequence)

    def _restore_own(self, job: Job) -> None:
        sequence = job.sequence
        data = sequence.saved
        sequence.save(None)
        if data is not None and self._load(sequence, data) and not job.placed_once:
            job.n_restored = sequence.n_held

    def _restore(self, job: Job, stored: Found) -> None:
        sequence = job.sequence
        if stored.n_tokens <= sequence.n_held or self._free(sequence) < stored.n_stored:
            return
        data, n_kept = stored.load(), sequence.n_held
        if data is None:
            return
        if sequence.n_cells:
            self.context.seq_remove(sequence.own_id)
            sequence.n_held = sequence.n_cells = 0
        if self._load(sequence, data):
            if not job.placed_once:
                job.n_restored = max(0, sequence.n_held - n_kept)
            self.count.restored_tokens += max(0, sequence.n_held - n_kept)

    def _load(self, sequence: Sequence, data: bytes) -> bool:
        """Put saved state into the engine; False where it was refused."""
        try:
            self.context.load_sequence(sequence.own_id, data)
        except SnapshotError:
            self._look_at_engine()
            return False
        held = self.context.tokens(sequence.own_id)
        n = common_prefix(held, sequence.tokens)
        sequence.n_cells, sequence.n_held = len(held), n
        if n < len(held) and not self.can_truncate:
            self._let_go(sequence, keep=False)
            self._take_id(sequence, None)
            return False
        sequence.n_high = max(sequence.n_high, n)
        if not self.can_truncate and n == len(sequence.tokens):
            self._take_row(sequence)
        self._trim(sequence)
        return True

    def _take_row(self, sequence: Sequence) -> None:
        """Take the logits that came back with a sequence, if it had any."""
        index = self.context.row_of(sequence.own_id)  # the rows of others stay beside it
        row = None if index is None else np.array(self.context.logits(index), dtype=np.float32)
        sequence.set_row(row)

    # -- room ----------------------------------------------------------------------------------

    def _take_id(self, sequence: Sequence, source: Sequence | None) -> bool:
        """Let ``sequence`` have a sequence of the context; False where all are in use."""
        if sequence.seq_id is not None:
            return True
        if not self._free_ids:
            idle = self._idle(sequence, source)
            if not idle:
                return False
            self._let_go(idle[0], keep=True)
        sequence.seq_id = self._free_ids.pop()
        sequence.n_held = sequence.n_cells = 0
        return True

    def _idle(self, *spared: Sequence | None) -> list[Sequence]:
        """Return who has cells and no place, least recently used first."""
        running = {job.sequence for job in self.running}
        idle = [
            s
            for s in self.sequences
            if s.seq_id is not None and s not in running and s not in spared
        ]
        return sorted(idle, key=lambda s: s.used)

    def _free(self, sequence: Sequence) -> int:
        return int(self.context.look_free(sequence.own_id))

    def _make_free(self, sequence: Sequence, n: int, spare: Sequence | None = None) -> bool:
        """Free cells until ``n`` more fit behind ``sequence``, taking them from those idle."""
        if self._free(sequence) >= n:
            return True
        if not self._shared:
            return False
        for idle in self._idle(sequence, spare):
            if idle.n_cells > idle.n_held:
                self._trim(idle)
                if self._free(sequence) >= n:
                    return True
        for idle in self._idle(sequence, spare):
            self._let_go(idle, keep=True)
            if self._free(sequence) >= n:
                return True
        return False

    def _trim(self, sequence: Sequence) -> None:
        """Remove from the engine what is not wanted any more."""
        if sequence.seq_id is None or sequence.n_cells <= sequence.n_held:
            return
        if self.context.seq_remove(sequence.seq_id, sequence.n_held, -1):
            sequence.n_cells = sequence.n_held
        else:
            self.context.seq_remove(sequence.seq_id)
            sequence.n_held = sequence.n_cells = 0

    def _let_go(self, sequence: Sequence, *, keep: bool) -> None:
        """Free the cells of ``sequence``; ``keep`` what they hold where there is a place for it."""
        if sequence.seq_id is None:
            return
        if self.closed:  # with its context: there is nothing left to free
            sequence.lose()
            return
        if keep and sequence.n_held:
            self._move_out(sequence)
        self.context.seq_remove(sequence.seq_id)
        self._free_ids.append(sequence.seq_id)
        sequence.lose()

    def _move_out(self, sequence: Sequence) -> None:
        if not self.context.capabilities.sequence_state:
            return
        own = sequence.is_cut or self._own_bytes > 0
        if self._store is None and not own:
            return
        self._trim(sequence)
        if not sequence.n_held:
            return
        try:
            data = self.context.save_sequence(sequence.own_id)
        except SessionFatalError:
            raise
        except Exception:  # noqa: BLE001  (what cannot be kept is evaluated anew)
            return
        if own:
            kept = sum(len(s.saved) for s in self.sequences if s.saved is not None)
            if not sequence.is_cut and kept + len(data) > self._own_bytes:
                return
            sequence.save(data)
        elif self._store is not None:
            held = sequence.tokens[: sequence.n_held]
            self._store.put(sequence.namespace, self.identity, held, data)
        self.count.n_moved_out += 1

    def share_state(self, sequence: Sequence, data: bytes) -> None:
        """Let others find ``data``, the state of ``sequence`` as it is.

        Where the engine cannot go back a sequence is of use to others only as it was at such a
        point, not at its end.
        """
        if self._store is not None and not self.can_truncate and not sequence.is_cut:
            self._store.put(sequence.namespace, self.identity, sequence.tokens, data)

    def _preempt(self, job: Job) -> None:
        """Take place and cells away from ``job``; it goes on from its tokens when there is room."""
        self._unlist(job)
        self._let_go(job.sequence, keep=True)
        job.waiting_since = time.perf_counter()
        self.waiting.put_back(job)
        self.count.n_preempted += 1

    # -- evaluating ----------------------------------------------------------------------------

    def _evaluate(self) -> bool:
        parts = self._compose()
        while parts and not self._has_room(parts):
            youngest = max(self.running, key=lambda job: job.age)
            if len(self.running) == 1:
                self._too_large(youngest)
                return True
            self._preempt(youngest)
            parts = self._compose()
        if not parts:
            return False
        self._run(parts)
        return True

    def _compose(self) -> list[tuple[Job, int]]:
        for job in self._alone:
            if job in self.running:
                n = len(job.sequence.tokens) - job.sequence.n_held
                return [(job, min(n, self._n_tokens()))]
        for job in self.running:
            sequence = job.sequence
            job.n_held = sequence.n_held
            job.n_missing = len(sequence.tokens) - sequence.n_held
            if self.multiple is not None:
                end = sequence.next_end()
                job.n_limit = None if end is None else end - sequence.n_held
            if isinstance(job, Generating):
                n_ahead = len(job.ahead.tokens) if job.ahead is not None else 0
                job.is_prompt = not job.primed or job.n_missing > max(1, n_ahead)
        budget = Budget(self._n_tokens(), self._n_sequences, self.multiple)
        return list(compose(self.running, budget, self._costs).parts)

    def _n_tokens(self) -> int:
        n_batch = int(self.context.n_batch)
        return n_batch if self._n_step_tokens is None else min(n_batch, self._n_step_tokens)

    def _has_room(self, parts: list[tuple[Job, int]]) -> bool:
        """Make room for the step, taking it from who has no place; False where it is not enough."""
        if self._shared:
            for job, _ in parts:
                self._trim(job.sequence)
            return self._make_free(parts[0][0].sequence, sum(n for _, n in parts))
        return all(self._make_free(job.sequence, n) for job, n in parts)

    def _too_large(self, job: Job) -> None:
        sequence = job.sequence
        if isinstance(job, Generating) and job.primed:
            self._finish(job, "context")
            return
        n_ctx = int(self.context.n_ctx_seq)
        self._end(
            job,
            ContextOverflowError(
                stage="engine",
                resident_tokens=sequence.n_held,
                additional_tokens=len(sequence.tokens) - sequence.n_held,
                n_ctx=n_ctx,
            ),
        )

    def _run(self, parts: list[tuple[Job, int]]) -> None:
        self.count.n_steps += 1
        started = time.perf_counter()
        spans, rows = [], []
        n_rows = n_prompt = 0
        for job, n in parts:
            sequence = job.sequence
            self._trim(sequence)
            start = sequence.n_held
            if isinstance(job, Generating) and job.ahead is not None:
                self._leave_out_guesses(job, n)
            whole = start + n == len(sequence.tokens)
            n_guessed = guesses_of(job) if whole else 0
            mode = "all" if n_guessed else "last" if whole else "none"
            spans.append((sequence.seq_id, sequence.tokens[start : start + n], mode))
            rows.append(n_rows + (n - n_guessed - 1 if n_guessed else 0))
            n_rows += n if n_guessed else whole
            n_prompt += n if job.is_prompt else 0
        try:
            if self.on_call is not None:
                self.on_call([job.sequence for job, _ in parts])
            self._call(spans)
        except BaseException as error:  # noqa: BLE001  (each job is told)
            self._failed(parts, error)
            return
        finally:
            if self.on_call is not None:
                self.on_call([])
        elapsed = (time.perf_counter() - started) * 1e3
        self._account(parts, n_prompt, elapsed)
        self._take(parts, spans, rows)

    def _call(self, spans: list[tuple[Any, list[int], str]]) -> None:
        if len(spans) > 1:
            self.context.decode_spans(spans)
            return
        seq_id, tokens, mode = spans[0]
        if len(tokens) == 1 and mode == "last":
            self.context.decode_one(tokens[0], seq_id=seq_id)
        else:
            self.context.decode(tokens, seq_id=seq_id, logits=mode)

    def _account(self, parts: list[tuple[Job, int]], n_prompt: int, elapsed_ms: float) -> None:
        count, n_parts = self.count, len(parts)
        n_running = sum(1 for job, _ in parts if not job.is_prompt)
        self._costs.record(n_running, n_prompt, elapsed_ms)
        if is_observed():
            tell(
                "on_step",
                Step(
                    n_sequences=n_parts,
                    n_running=n_running,
                    n_prompt=n_prompt,
                    elapsed_ms=elapsed_ms,
                ),
            )
        count.n_batched += n_parts
        old = count.step_ms
        count.step_ms = elapsed_ms if old is None else old + 0.1 * (elapsed_ms - old)
        for job, n in parts:
            again = job.sequence.hold(job.sequence.n_held + n)
            job.sequence.used = job.served = count.n_steps
            job.n_evaluated += n
            job.failures = 0
            if isinstance(job, Generating):
                job.n_steps += 1
                job.n_batched += n_parts
            else:
                count.evaluated_tokens += n - again
        self._suspects.clear()

    def _take(
        self, parts: list[tuple[Job, int]], spans: list[tuple[Any, list[int], str]], rows: list[int]
    ) -> None:
        """Let each that has caught up choose from its row."""
        for (job, _), (_, _, mode), row in zip(parts, spans, rows, strict=True):
            if job in self._alone and (mode != "none" or job.sequence not in self.lone):
                self._alone.remove(job)
                self.lone.discard(job.sequence)
            if mode != "none":
                self._caught_up(job, row)

    def _caught_up(self, job: Job, row: int | None) -> None:
        """All that ``job`` wants is held; ``row`` is its first output row, None = made before."""
        try:
            if isinstance(job, Generating):
                self._generate(job, row)
                return
            sequence = job.sequence
            if row is not None:
                sequence.set_row(np.array(self.context.logits(row), dtype=np.float32))
            if job.then is not None:
                job.result = job.then(sequence)
            self._end(job)
        except SessionFatalError:
            raise
        except BaseException as error:  # noqa: BLE001  (it is the caller's to see)
            self._end(job, error)

    def _generate(self, job: Generating, row: int | None) -> None:
        """Choose tokens until some must be evaluated, the reader is behind, or an end is there."""
        generation, sequence = job.generation, job.sequence
        source: Any = self.context
        if not job.primed:
            job.primed = True
            generation.prime(sequence.tokens)
            job.n_sure = len(sequence.tokens)
            if row is None and sequence.row is not None:
                source, row = _Row(sequence.row), 0
        elif row is not None and job.ahead is not None:
            self._settle_ahead(job, row)
            row = None
        while not job.done.is_open:
            if generation.pending is not None and self._want_pending(job):
                return
            if generation.is_ahead:
                self._step_generation(job, source, -1)
            elif row is not None:
                self._step_generation(job, source, row)
                row = None
            else:
                return

    def _settle_ahead(self, job: Generating, row: int) -> None:
        """Keep those of the guesses that are right, now that they are evaluated."""
        ahead, job.ahead = job.ahead, None
        if ahead is None:
            return
        n_right = job.generation.verify(self.context, ahead.tokens[1:], row)
        job.sequence.truncate(len(job.sequence.tokens) - (ahead.n_guessed - n_right))
        job.n_sure = len(job.sequence.tokens)

    def _leave_out_guesses(self, job: Generating, n: int) -> None:
        """Want no guesses beyond the next ``n`` tokens: of those evaluated all rows are needed."""
        ahead, sequence = job.ahead, job.sequence
        if ahead is None:
            return
        n_kept = max(0, n - (job.n_sure - sequence.n_held))
        if n_kept < ahead.n_guessed:
            sequence.truncate(job.n_sure + n_kept)
            kept = ahead._replace(tokens=ahead.tokens[: 1 + n_kept], n_guessed=n_kept)
            job.ahead = kept if n_kept else None

    def _want_pending(self, job: Generating) -> bool:
        """Want the token that was chosen last; True where something has to be evaluated for it."""
        generation, sequence = job.generation, job.sequence
        n_after = len(sequence.tokens) + 1
        held = generation.pending is not None and generation.pending.held
        if generation.at_limit:
            self._finish(job, "length")
            return True
        if not held and not generation.is_ahead and n_after >= job.window:
            if job.shift_from is None or not self._shift(job):
                self._finish(job, "context")
                return True
            n_after = len(sequence.tokens) + 1
        ahead = generation.ahead(lambda: list(sequence.tokens), job.window - n_after - 1)
        if not ahead.tokens:
            return False
        sequence.extend(ahead.tokens)
        job.n_sure = len(sequence.tokens) - ahead.n_guessed
        job.ahead = ahead if ahead.n_guessed else None
        return True

    def _step_generation(self, job: Generating, source: Any, row: int) -> None:
        generation = job.generation
        chunk = generation.step(source, row)
        if generation.reason is None:
            self.count.generated_tokens += 1
            if chunk is not None:
                self._give(job, Item(chunk))
            return
        if generation.pending is not None:
            self.count.generated_tokens += 1
        self._finish(job, generation.reason)

    def _shift(self, job: Generating) -> bool:
        """Drop the older half of what follows the prefix, where that was asked for."""
        sequence, start = job.sequence, job.shift_from or 0
        end = start + (len(sequence.tokens) - start) // 2
        if end <= start:
            return False
        gone = sequence.tokens[start:end]
        rest = sequence.tokens[end:]
        n_held = sequence.n_held
        moved = 0
        if sequence.seq_id is not None and n_held > end:
            self._trim(sequence)
            self.context.seq_remove(sequence.seq_id, start, end)
            try:
                self.context.seq_shift(sequence.seq_id, end, -1, start - end)
                moved = n_held - end
            except UnsupportedFeatureError:  # shared with another: evaluated anew
                self.context.seq_remove(sequence.seq_id, end, -1)
        sequence.tokens[start:] = rest
        sequence.n_held = sequence.n_cells = min(start, n_held) + moved
        sequence.n_high = sequence.n_held
        sequence.is_cut = True
        sequence.set_row(None)
        job.n_sure = len(sequence.tokens)
        job.generation.shifted += gone
        job.cut = (start, end)
        return True

    # -- failures ------------------------------------------------------------------------------

    def _failed(self, parts: list[tuple[Job, int]], error: BaseException) -> None:
        """After a failed call: each sequence is tried once more alone; who fails then ends."""
        if isinstance(error, SessionFatalError):
            self._restart(error, [job.sequence for job, _ in parts])
            return
        self._look_at_engine()
        if isinstance(error, DecodeAbortedError):
            for job, _ in parts:
                job.failures += 1
                if job.cancelled or self.closed:
                    self._cancel(job)
                elif job.failures > _MOST_ABORTS:
                    self._end(job, error)
            return
        if len(parts) == 1:
            self._end(parts[0][0], error)
            return
        for job, _ in parts:
            if job not in self._alone:
                self._alone.append(job)

    def _look_at_engine(self) -> None:
        """Take what the engine holds for what is held."""
        for sequence in self.sequences:
            if sequence.seq_id is None:
                continue
            held = self.context.tokens(sequence.seq_id)
            past, n = self.context.n_past(sequence.seq_id), self.context.n_resident(sequence.seq_id)
            if not len(held) == past == n:
                self.context.seq_remove(sequence.seq_id)
                held = []
            sequence.n_cells = len(held)
            sequence.n_held = common_prefix(held, sequence.tokens)
        for job in self.running:
            if job.sequence.tokens:  # the engine did it before it failed: its rows are gone
                self._leave_rows(job)

    def _restart(self, error: SessionFatalError, suspects: list[Sequence]) -> None:
        """Open the context anew, or let all end where that was done too often."""
        now = time.perf_counter()
        while self._restarts and now - self._restarts[0] > self._restart_window:
            self._restarts.popleft()
        for sequence in suspects:
            if sequence in self._suspects and sequence.job is not None and len(suspects) > 0:
                self._end(sequence.job, SessionFatalError(str(error), cause=error.cause))
        self._suspects = set(suspects)
        for sequence in self.sequences:
            sequence.lose()
        if len(self._restarts) >= self._max_restarts:
            self.fail(error)
            return
        self._restarts.append(now)
        try:
            self.context.close()
            self.context = self._open_context()
        except Exception:  # noqa: BLE001  (each job is told the first cause)
            self.fail(error)
            return
        self.count.n_restarts += 1
        self._free_ids = list(range(self.context.n_seq_max - 1, -1, -1))
        for job in sorted(self.running, key=lambda job: -job.age):
            self.running.remove(job)
            job.waiting_since = now
            self.waiting.put_back(job)
        self._alone = deque(s.job for s in suspects if s.job is not None)

    def fail(self, error: SessionFatalError) -> None:
        """End every job with ``error``, now and from now on."""
        self.fatal = self.fatal or error
        self.end_all()

    def end_all(self) -> None:
        """End every job: cancelled where the pool is closed, else with the first cause."""
        for job in [*self.running, *self.waiting, *self._resting]:
            self._end(job, self._refusal())

    def cancel_all(self) -> None:
        """Cancel every job."""
        for job in [*self.running, *self.waiting, *self._resting]:
            self._cancel(job)

    def abort(self) -> None:
        """Stop the engine call that runs, whatever it is for; from any thread."""
        self.context.abort()

    def close(self) -> None:
        """End all jobs and close the context."""
        if self.closed:
            return
        self.closed = True
        self.end_all()
        if self._store is not None:
            self._keep_all()
            self._store.close()
        self.context.close()

    def _keep_all(self) -> None:
        """Move out what is held, for the next program that uses the folder."""
        if self.fatal is None and self._store is not None and self._keeps_at_end:
            with suppress(InferCoreError):
                for sequence in self._idle():
                    self._let_go(sequence, keep=True)


def _call_all(callbacks: list[Callable[[], object]]) -> None:
    for callback in callbacks:
        callback()


def _stuck() -> InvalidStateError:
    return InvalidStateError(
        "there is no room for this call; close sessions, or open the pool with more n_cells",
        operation="step",
        state="no room",
    )


def n_tokens_of(data: bytes) -> int:
    """Return how many tokens a saved sequence holds, as its header says; 0 where it is damaged."""
    try:
        return len(blob.read_header(data)["sequences"][0]["tokens"])
    except (LookupError, TypeError):
        return 0


def guesses_of(job: Job) -> int:
    """Return how many of the tokens that ``job`` wants are guesses."""
    ahead = job.ahead if isinstance(job, Generating) else None
    return 0 if ahead is None else ahead.n_guessed
