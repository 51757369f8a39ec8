"""The context of its own that a session of a pool sees.

A session works on it as on any context with one sequence. What it holds is a value: the pool's
scheduler pages it in and out of the cells of the one real context, and evaluates for many at once.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from infercore.errors import UnsupportedFeatureError
from infercore.protocols.public import Context
from infercore.session.jobs import Job, Looking
from infercore.session.sequence import Sequence

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from collections.abc import Sequence as Tokens
    from typing import TypeVar

    from infercore.protocols.guarded import WhichRows
    from infercore.protocols.spi import FloatArray
    from infercore.session.runner import Owner
    from infercore.values.config import ContextConfig
    from infercore.values.info import Capabilities, PerfCounters

    T = TypeVar("T")


class PagedContext:
    """One sequence of a pool, with the calls of a context that a session makes.

    ``n_ctx`` is the session's window. Calls wait until the pool has done what they ask for.
    """

    is_paged = True
    n_seq_max = 1
    n_batch = 2**31 - 1  # the scheduler splits, not the session

    def __init__(self, owner: Owner, *, n_ctx: int, namespace: str, identity: str = "") -> None:
        self.owner = owner
        self.scheduler = owner.scheduler
        self.sequence = Sequence(namespace)
        self.sequence.identity = identity
        self.n_ctx = self.n_ctx_seq = n_ctx
        self.deadline: float | None = None
        self.called_at: float | None = None
        self._had_place = self._leads_on = False
        self.found = (0, 0)
        """Tokens that the last `decode` copied from other sequences, and brought back."""
        # Only the owner changes the sequence: what is removed here is removed with the next job.
        self._n = 0
        self._job: Job | None = None
        self.scheduler.add(self.sequence)

    # -- facts ---------------------------------------------------------------------------------

    if not TYPE_CHECKING:  # for users: what is called here is known

        def __getattr__(self, name: str) -> Any:
            """Return a fact of the pool's context, or what refuses a call that a page has not."""
            kind = None if name.startswith("_") else getattr(Context, name, None)
            if isinstance(kind, property):
                return getattr(self.scheduler.context, name)
            if kind is None:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            return partial(_refuse, name)

    @property
    def native_handle(self) -> Any:
        """Refused: the thread that owns the pool's context alone calls the engine."""
        _refuse("native_handle")

    @property
    def capabilities(self) -> Capabilities:
        """Those of the pool's context."""
        kinds: Capabilities = self.scheduler.context.capabilities
        return kinds

    @property
    def effective(self) -> Mapping[str, Any]:
        """Those of the pool's context."""
        effective: Mapping[str, Any] = self.scheduler.context.effective
        return effective

    @property
    def config(self) -> ContextConfig:
        """What the pool's context was opened with."""
        config: ContextConfig = self.scheduler.context.config
        return config

    @property
    def tolerance(self) -> float:
        """That of the pool's context."""
        return float(self.scheduler.context.tolerance)

    @property
    def is_invariant(self) -> bool:
        """Whether each sequence has the bits that it has alone (``batch_invariant``)."""
        return self.scheduler.multiple is not None

    @property
    def closed(self) -> bool:
        """Whether the pool is closed; not where its engine failed for good before."""
        scheduler = self.scheduler
        return (scheduler.closed or scheduler.stopping) and scheduler.fatal is None

    @property
    def identity(self) -> str:
        """Digest of what others must agree in, so that one may have what the other holds."""
        return self.sequence.identity

    @identity.setter
    def identity(self, digest: str) -> None:
        sequence = self._settled()
        if sequence.tokens and digest != sequence.identity:
            self.owner.ask(lambda: _begin_as(sequence, digest))
            self._n = 0
        sequence.identity = digest

    @property
    def is_cold(self) -> bool:
        """Whether nothing that others hold or left is of use to it now."""
        return self.sequence.is_cold

    @is_cold.setter
    def is_cold(self, is_cold: bool) -> None:
        self.sequence.is_cold = is_cold

    @property
    def held_tokens(self) -> int:
        """Tokens that lie in cells now; it waits for nothing."""
        n_held = self.sequence.n_held
        return n_held if self._job is not None else min(n_held, self._n)

    @property
    def cut(self) -> int | None:
        """Where tokens were removed that later ones were computed with, None where none were."""
        return self.sequence.cut

    @property
    def n_outputs(self) -> int:
        """Whether the logits behind the last token are known: 1 or 0."""
        return int(self.sequence.row is not None and self._n == len(self.sequence.tokens))

    @property
    def n_engine_outputs(self) -> int:
        """None: what other sequences evaluate takes the engine's own rows away."""
        return 0

    @property
    def output_serial(self) -> int:
        """A number that changes whenever the logits do."""
        sequence = self.sequence
        return sequence.serial if self._n == len(sequence.tokens) else -1 - self._n

    @property
    def n_tokens(self) -> int:
        """Tokens that are wanted, held or not."""
        self._settled()
        return self._n

    def logits(self, i: int = -1) -> Any:
        """Return the logits behind the last token."""
        del i
        return self.sequence.row

    # -- what is held --------------------------------------------------------------------------

    def _settled(self) -> Sequence:
        """Return the sequence once nobody works on it any more."""
        job = self._job
        if job is not None:
            job.wait()
            self._job = None
            self._n = len(self.sequence.tokens)
        return self.sequence

    def n_resident(self, seq_id: int = 0) -> int:
        """Return how many tokens can be had without evaluating them; the others are forgotten."""
        del seq_id
        known = self._settled().n_known  # before `_n` is read: what was generated is in it by then
        self._n = min(self._n, known)
        return self._n

    n_past = n_resident

    def tokens(self, seq_id: int = 0) -> list[int]:
        """Return the tokens that can be had without evaluating them; the others are forgotten."""
        del seq_id
        return self.sequence.tokens[: self.n_resident()]

    def wanted(self, seq_id: int = 0) -> list[int]:
        """Return all tokens that are wanted, held or not."""
        del seq_id
        return self._settled().tokens[: self._n]

    def n_free(self, seq_id: int = 0, *, keep: int | None = None) -> int:
        """Return how many tokens more fit, once those from ``keep`` on are removed."""
        return self.look_free(seq_id, keep)

    def look_free(self, seq_id: int = 0, keep: int | None = None) -> int:
        """Return how many tokens more fit into the session's window."""
        del seq_id
        n = self._n
        return self.n_ctx - (n if keep is None else min(keep, n))

    # -- changes -------------------------------------------------------------------------------

    def begin_call(self, *, generates: bool = False) -> None:
        """Say that the jobs from here on are one call's, which waits for a place but once.

        One that ``generates`` comes back with another job behind each that it waits for.
        """
        self._had_place, self._leads_on = False, generates

    def join_call(self, other: PagedContext) -> None:
        """Say that the jobs from here on belong to the call of ``other``, with its place."""
        self._had_place = other._had_place

    def run(self, job: Job) -> None:
        """Let the pool work on ``job`` and wait. Raises its error."""
        self._settled()
        job.goes_on, job.leads_on = self._had_place, self._leads_on
        self._job = job
        try:
            self.owner.run(job)
        finally:
            self._had_place = self._had_place or job.placed_once
            if job.done.is_open:
                self._settled()
            else:  # it was refused before it began
                self._job = None

    def submit(self, job: Job) -> None:
        """Let the pool work on ``job``; the next call of this context waits for its end."""
        self._settled()
        job.goes_on = self._had_place
        self.owner.submit(job)
        self._job = job

    def decode(self, tokens: Tokens[int], *, seq_id: int = 0, logits: WhichRows = "last") -> int:
        """Append ``tokens``; return how many tokens were evaluated for that.

        Some may have come from elsewhere, and some may have been evaluated that were lost.
        """
        del seq_id
        job = Job(
            self.sequence,
            list(tokens),
            n_keep=self._n,
            need_row=logits != "none",
            deadline=self.deadline,
            called_at=self.called_at,
        )
        self.run(job)
        self.found = job.n_shared, job.n_restored
        return len(tokens) + job.n_before - job.n_base

    def seq_remove(self, seq_id: int = 0, p0: int = -1, p1: int = -1) -> bool:
        """Remove the tokens from ``p0`` on; False where the engine cannot go back there."""
        del seq_id, p1  # what lies in the middle is cut out by the generation alone
        sequence = self._settled()
        start = max(0, p0)
        if start >= self._n:
            return True
        if start and start < sequence.n_held and not self.scheduler.can_truncate:
            if not self.owner.ask(lambda: self._roll_back(start)):
                return False
            self._n = len(sequence.tokens)
        self._n = min(self._n, start)
        return True

    def _roll_back(self, n: int) -> bool:
        """Remove the last tokens where the engine can only go back a little."""
        sequence = self.sequence
        sequence.truncate(self._n)
        if sequence.seq_id is None or sequence.n_cells <= n:
            sequence.truncate(n)
            return True
        if not self.scheduler.context.seq_remove(sequence.seq_id, n, -1):
            return False
        sequence.truncate(n)
        sequence.n_cells = n
        return True

    def cut_out(self, start: int, end: int) -> bool:
        """Take the tokens in [start, end) out; see `SharedEngine.cut_out`."""
        cut_out = self.scheduler.cut_out
        return self._held_whole(lambda sequence: cut_out(sequence, start, end))

    def clear(self) -> None:
        """Remove everything."""
        self.seq_remove()

    def _held_whole(self, work: Callable[[Sequence], T]) -> T:
        """Let the owner do ``work`` while all tokens are held."""
        self._settled()
        job = Job(self.sequence, n_keep=self._n, need_row=bool(self.n_outputs), then=work)
        self.run(job)
        result: T = job.result
        return result

    def evaluate_anew(self, each: Callable[[int, FloatArray], object]) -> None:
        """Let all tokens be evaluated again; ``each`` gets a place and its row of logits."""
        self._settled()
        job = Looking(
            self.sequence, each, n_keep=self._n, deadline=self.deadline, called_at=self.called_at
        )
        self.run(job)

    def save_sequence(self, seq_id: int = 0, *, note: Mapping[str, Any] | None = None) -> bytes:
        """Return the sequence and its logits as bytes; see `Context.save_sequence`."""
        del seq_id

        def save(sequence: Sequence) -> bytes:
            context = self.scheduler.context
            self.scheduler.trim(sequence)
            data: bytes = context.save_sequence(sequence.own_id, note=note)
            if note is None:  # a state to go back to: others may begin there too
                self.scheduler.keeping.share_state(sequence, data)
            return data

        return self._held_whole(save)

    def load_sequence(self, seq_id: int, data: bytes, *, cut: int | None = None) -> None:
        """Restore what `save_sequence` returned; see `Context.load_sequence`.

        At ``cut`` tokens were taken out of it: what stands behind is of use to nobody else.
        """
        del seq_id
        self._settled()
        try:
            self.owner.ask(lambda: self.scheduler.restore(self.sequence, data, self.n_ctx, cut))
        except BaseException:
            self._n = min(self._n, len(self.sequence.tokens))
            raise
        self._n = len(self.sequence.tokens)

    def copy_to(self, other: PagedContext) -> None:
        """Let ``other`` want what is wanted here; its cells are copied when it needs them."""
        source, target = self._settled(), other._settled()
        n = self._n

        def copy() -> None:
            source.keep(n)
            target.tokens = list(source.tokens)
            target.n_high = source.n_high
            target.ends = list(source.ends)
            target.cut = source.cut
            self.scheduler.copy_cells(source, target)
            target.set_row(None if source.row is None else np.array(source.row))

        self.owner.ask(copy)
        other.adopt()

    def adopt(self) -> None:
        """Want what the sequence has, which was given to it from outside."""
        self._n = len(self.sequence.tokens)

    # -- the rest ------------------------------------------------------------------------------

    def abort(self) -> None:
        """End what runs for this session; from any thread.

        At once where the engine works for it alone, else after the step.
        """
        job = self._job
        if job is not None and not job.done.is_open:
            job.cancelled = True
            job.on_change(job)

    def perf(self) -> PerfCounters:
        """Return the engine's times and counts, of all who share the context."""
        return self.owner.ask(self.scheduler.context.perf)

    def count_reused(self, n_tokens: int) -> None:
        """Count tokens of a prompt that were not evaluated."""
        self.scheduler.count.cached_tokens += n_tokens

    def count_time(self, kind: str, seconds: float) -> None:
        """Count nothing: a pool has statistics of its own."""

    def release(self) -> None:
        """Give the cells back; what runs is cancelled."""
        self.scheduler.release(self.sequence)


def _refuse(name: str, *_: object, **__: object) -> NoReturn:
    raise UnsupportedFeatureError(
        feature=f"Context.{name}",
        hint="several sessions share this context: set it in the config that opens it, or use a "
        "context of your own (Model.new_context)",
    )


def _begin_as(sequence: Sequence, digest: str) -> None:
    """Hold nothing that was computed under another identity, before others may look for it."""
    sequence.truncate(0)
    sequence.cut = None
    sequence.identity = digest


def until(timeout: float | None) -> float | None:
    """Return when (`time.perf_counter`) a call with ``timeout`` seconds is late."""
    return None if timeout is None else time.perf_counter() + float(timeout)
