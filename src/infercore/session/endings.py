"""How the jobs of a pool end: each once, whatever comes."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from infercore.errors import DecodeAbortedError, SessionClosedError, SessionFatalError
from infercore.session.jobs import Generating, Item

if TYPE_CHECKING:
    from infercore.errors import InferCoreError
    from infercore.session.admission import Admission
    from infercore.session.jobs import Job
    from infercore.session.outbox import Outbox
    from infercore.session.roster import Roster
    from infercore.session.tally import Tally


class Endings:
    """Ends jobs, and knows what ended all of them: ``closed``, or ``fatal``."""

    def __init__(self, roster: Roster, admission: Admission, outbox: Outbox, tally: Tally) -> None:
        self._roster = roster
        self._admission = admission
        self._outbox = outbox
        self._tally = tally
        self.closed = False
        self.fatal: SessionFatalError | None = None

    @property
    def refuses(self) -> bool:
        """Whether no job may begin any more."""
        return self.closed or self.fatal is not None

    def refusal(self) -> InferCoreError:
        """Return why none may."""
        if self.fatal is not None:
            return SessionFatalError(str(self.fatal), cause=self.fatal.cause)
        return SessionClosedError("this pool is closed; open a new one")

    def check(self) -> None:
        """Raise where none may."""
        if self.refuses:
            raise self.refusal()

    # -- of one --------------------------------------------------------------------------------

    def end(self, job: Job, error: BaseException | None = None) -> None:
        """End ``job``, once: with its result, or with ``error``."""
        if job.done.is_open:
            return
        self._roster.leave(job)
        sequence = job.sequence
        if sequence.job is job:
            sequence.job = None
        sequence.used = self._tally.n_steps
        if isinstance(job, Generating):
            sequence.truncate(max(job.n_sure, 0))
            job.generation.pending = None
            job.generation.close()
            if error is not None:
                self._outbox.give(job, Item(error=error, final=True))
        elif error is not None:
            sequence.truncate(max(job.n_before, sequence.n_held))
        job.error = error
        if isinstance(job, Generating):
            self._admission.count(job, counts=False)
        if error is None and not job.cancelled:
            self._roster.expect(job)
        job.done.open()

    def finish(self, job: Generating, reason: str) -> None:
        """Give the last chunk; the token that was chosen last is wanted, and not evaluated."""
        generation = job.generation
        pending, generation.pending = generation.pending, None
        sequence = job.sequence
        sequence.truncate(job.n_sure)
        if pending is not None and not pending.held:
            sequence.extend([pending.token])
            job.n_sure += 1
        make = partial(
            generation.finish,
            reason,
            waited_ms=job.waited_s * 1e3,
            mean_batch=job.n_batched / job.n_steps if job.n_steps else 1.0,
            reevaluated_tokens=sequence.n_again,
            **job.usage,
        )
        sequence.n_again = 0
        self._outbox.give(job, Item(make=make, final=True))
        self.end(job)

    def cancel(self, job: Job) -> None:
        """End ``job`` because its caller wants that."""
        if isinstance(job, Generating):
            self.finish(job, "cancelled")
            return
        n = job.sequence.n_held
        message = f"cancelled with {n} tokens resident; call again to continue"
        self.end(job, DecodeAbortedError(message, resident_tokens=n))

    def expire(self, job: Job, now: float) -> None:
        """End ``job`` because its time is over."""
        if isinstance(job, Generating) and job.generation.n_completion:
            self.finish(job, "timeout")
        else:
            self.end(job, job.late(now))

    def drop(self, job: Job) -> None:
        """End ``job``, whose caller went away."""
        self.end(job, SessionClosedError("this session is closed; open a new one"))

    # -- of all --------------------------------------------------------------------------------

    def fail(self, error: SessionFatalError) -> None:
        """End every job with ``error``, now and from now on."""
        self.fatal = self.fatal or error
        self.end_all()

    def end_all(self) -> None:
        """End every job: as of a closed pool, or with the first cause."""
        for job in self._roster.every():
            self.end(job, self.refusal())

    def cancel_all(self) -> None:
        """Cancel every job."""
        for job in self._roster.every():
            self.cancel(job)
