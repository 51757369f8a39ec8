"""Where sessions live: on a context of their own, with their forks, or in a pool."""

from __future__ import annotations

import threading
import weakref
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np

from infercore.errors import SessionClosedError
from infercore.session.cost_model import CostModel
from infercore.session.paged import PagedContext
from infercore.session.pool_stream import PoolStream
from infercore.session.runner import Owner
from infercore.session.scheduler import Scheduler
from infercore.session.stream import DecodeStream

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

    from infercore.protocols.guarded import SessionContext, SessionModel
    from infercore.session.base import Home
    from infercore.session.generation import Generation
    from infercore.session.resident import Resident
    from infercore.session.session import CoreSession

_GENERATES = frozenset({"generate", "completion", "chat", "infill"})
_EVALUATES = _GENERATES | {"ensure_prefix", "prefill_suffix", "beam_search", "sample_many"}


class Group(Protocol):
    """**Protocol:** who sessions share an engine with: a pool, or a session's own forks."""

    window: int

    @property
    def owner(self) -> Owner:
        """Who owns the engine's context."""

    @property
    def reader_timeout(self) -> float | None:
        """Seconds after which a stream that nobody reads is cancelled."""

    def check_open(self) -> None:
        """Raise where no call may begin any more."""

    def count_open(self, change: int) -> None:
        """Count sessions that are opened and closed."""

    def share_for_fork(self, namespace: str) -> Home:
        """Return where a fork lives."""


class Share:
    """What a session has of an engine that it shares: a paged context, and how its calls count."""

    def __init__(
        self, group: Group, namespace: str = "", context: PagedContext | None = None
    ) -> None:
        self.group = group
        self.namespace = namespace
        if context is None:
            context = PagedContext(group.owner, n_ctx=group.window, namespace=namespace)
        self.context = context
        group.count_open(1)  # first: what is not counted must not be counted down
        self._release = weakref.finalize(self, _give_back, group, group.owner, context.sequence)

    @contextmanager
    def call(self, operation: str) -> Iterator[None]:
        """Count a call that evaluates. Raises `PoolFullError` before it changes anything."""
        self.group.check_open()
        self.context.begin_call(generates=operation in _GENERATES)
        if operation not in _EVALUATES:
            yield
            return
        admission = self.group.owner.scheduler.admission
        admission.enter(self.namespace)
        try:
            yield
        finally:
            admission.leave(self.namespace)

    def for_twin(self, session: CoreSession) -> tuple[Home, int]:
        """Return where a fork lives."""
        del session
        return self.group.share_for_fork(self.namespace), 0

    def sharing(self, session: CoreSession) -> Share:
        """Return what continuations of ``session`` share with it."""
        del session
        return self

    @property
    def n_places(self) -> int:
        """How many are evaluated in one call at most."""
        return self.group.owner.scheduler.n_places

    def sibling(self) -> Share:
        """Return where a short-lived session beside this one lives, in the same engine."""
        share = Share(self.group, self.namespace)
        share.context.join_call(self.context)
        return share

    def new_context(self) -> PagedContext:
        """Return a sequence beside this one; whoever asked releases it."""
        group, identity = self.group, self.context.sequence.identity
        context = PagedContext(
            group.owner, n_ctx=group.window, namespace=self.namespace, identity=identity
        )
        context.join_call(self.context)
        return context

    @staticmethod
    def copy(source: Resident, target: Resident) -> bool:
        """Give ``target`` the tokens of ``source``; True where it evaluated them anew."""
        here, there = source.context, target.context
        if (
            isinstance(here, PagedContext)
            and isinstance(there, PagedContext)
            and here.owner is there.owner
        ):
            here.copy_to(there)
            return False
        if source.context.capabilities.sequence_state:
            target.context.load_sequence(target.seq_id, source.context.save_sequence())
            return False
        target.context.decode(source.tape.tokens(), seq_id=target.seq_id)
        return True

    def new_stream(
        self,
        session: CoreSession,
        generation: Generation,
        dropped: Sequence[int],
        started: float | None,
    ) -> PoolStream:
        """Return the iterator over what ``generation`` makes."""
        stream = PoolStream(
            session,
            generation,
            dropped,
            started=started,
            admitted=started is not None,
            check_open=self.group.check_open,
            reader_timeout=self.group.reader_timeout,
        )
        if started is not None:
            self.group.owner.scheduler.unread[id(stream)] = stream
        return stream

    def give_back(self, seq_id: int) -> None:
        """Free what the session holds."""
        del seq_id
        if self._release.detach() is None:
            return
        owner, sequence = self.group.owner, self.context.sequence
        if owner.scheduler.ended or owner.scheduler.stopping or owner.is_here:
            owner.scheduler.release(sequence)
        else:
            owner.let_go(sequence)
        self.group.count_open(-1)


def _give_back(group: Group, owner: Owner, sequence: Any) -> None:
    """What becomes of a session that was dropped; it takes no lock."""
    owner.scheduler.release(sequence)
    # Where no call was made, nobody does what is posted, and it must keep nothing alive.
    owner.scheduler.post(partial(_count_out, weakref.ref(group)))


def _count_out(group: weakref.ref[Group]) -> None:
    found = group()
    if found is not None:
        found.count_open(-1)


class Forks:
    """The sessions that a fork made of one: they share its context, which ends with the last.

    From the first fork on a thread owns the context, so that each of them may be used in a thread
    or task of its own.
    """

    reader_timeout = None

    def __init__(self, model: SessionModel, context: SessionContext) -> None:
        self._model = model
        scheduler = Scheduler(
            lambda: model.context_of(context.config),
            costs=CostModel(batching="auto"),
            n_parallel=context.n_seq_max,
            max_restarts=0,
            context=context,
        )
        self._owner = Owner(scheduler)
        self.window = int(context.n_ctx_seq)
        self._lock = threading.Lock()
        self._n_open = 0
        self._finalizer: weakref.finalize[..., Forks] | None = None  # the context is a session's

    @property
    def owner(self) -> Owner:
        """Who owns the context."""
        return self._owner

    def check_open(self) -> None:
        """Raise `SessionClosedError` where the context is closed."""
        if self.owner.scheduler.closed:
            raise SessionClosedError("this session's context is closed; open a new one")
        self.owner.check()

    def count_open(self, change: int) -> None:
        """Count the sessions; with the last one the context is closed."""
        with self._lock:
            self._n_open += change
            last = self._n_open == 0 and self._finalizer is not None
        if last:
            self.owner.stop()

    def share_for_fork(self, namespace: str) -> Home:
        """Return where a fork lives: here while there is a sequence for it, else alone."""
        context = self.owner.scheduler.context
        if self._n_open < context.n_seq_max:
            return Share(self, namespace)
        return OwnContext(self._model, self._model.context_of(context.config))

    def take_in(self, session: CoreSession) -> Share:
        """Let ``session``, whose context this is, share it from now on."""
        resident = session.resident
        digest = session.identity.digest
        paged = PagedContext(self.owner, n_ctx=self.window, namespace="", identity=digest)
        scheduler, sequence = self.owner.scheduler, paged.sequence
        sequence.tokens = resident.tape.tokens()
        has_row = bool(sequence.tokens) and resident.has_logits() and not resident.tape.warm_tail
        row = np.array(resident.context.logits(-1), dtype=np.float32) if has_row else None
        scheduler.adopt(sequence, resident.seq_id, cut=resident.tape.cut)
        sequence.set_row(row)
        paged.adopt()
        share = Share(self, "", paged)
        try:
            self._move(session, share, has_logits=has_row)
        except BaseException:  # half moved, its context would end with the one or the other
            self._move(session, share, has_logits=has_row)
            raise
        return share

    def _move(self, session: CoreSession, share: Share, *, has_logits: bool) -> None:
        """Make the context ours and the session one of those that share it."""
        if self._finalizer is None:
            self._finalizer = weakref.finalize(self, self._owner.stop, wait=False)
        session.resident.move_to(share.context, has_logits=has_logits)
        session.shared = share


class OwnContext:
    """A context with one session on it, which is closed with the session.

    A fork goes into the same context where that has a free sequence: then both share it (`Forks`).
    """

    def __init__(self, model: SessionModel, context: SessionContext) -> None:
        self._model = model
        self.context = context

    def for_twin(self, session: CoreSession) -> tuple[Home, int]:
        """Return where a fork lives: in a free sequence here, else in a new context."""
        share = self.sharing(session)
        if share is not None:
            return share.for_twin(session)
        context = self._model.context_of(self.context.config)
        try:
            context.compute_like(self.context)
        except BaseException:
            context.close()
            raise
        return OwnContext(self._model, context), 0

    def sharing(self, session: CoreSession) -> Share | None:
        """Let ``session`` share its context from now on; None where it has one sequence."""
        context = self.context
        if context.n_seq_max == 1 or context.capabilities.kv_copy == "none":
            return None
        return Forks(self._model, context).take_in(session)

    @staticmethod
    def copy(source: Resident, target: Resident) -> bool:
        """Give ``target`` the tokens of ``source``; True where it had to evaluate them anew."""
        if source.context.capabilities.sequence_state:
            own, other = (cast("SessionContext", each.context) for each in (target, source))
            own.take_over(target.seq_id, other.hand_over(source.seq_id))
            return False
        target.context.decode(source.tape.tokens(), seq_id=target.seq_id)
        return True

    @staticmethod
    def new_stream(
        session: CoreSession, generation: Generation, dropped: Sequence[int], started: float | None
    ) -> DecodeStream:
        """Return the iterator over what ``generation`` makes."""
        return DecodeStream(session, generation, dropped, started=started)

    @staticmethod
    def call(operation: str) -> AbstractContextManager[Any]:
        """Return what a call of a session runs within."""
        del operation
        return nullcontext()

    def give_back(self, seq_id: int) -> None:
        """Close the context."""
        del seq_id
        self.context.close()
