"""What reads the stream of a session in a pool: the pool generates, one token ahead of it."""

from __future__ import annotations

import asyncio
import sys
import time
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from infercore.errors import DecodeAbortedError, SessionBusyError
from infercore.session.handing import tell_loop
from infercore.session.jobs import Generating, Item
from infercore.session.observer import stream_begins, stream_ended
from infercore.session.stream import begin, look_at_prompt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from queue import SimpleQueue

    from typing_extensions import Self

    from infercore.session.generation import Generation, Shown
    from infercore.session.paged import PagedContext
    from infercore.values.session import StreamChunk


class PoolStream:
    """An iterator of `StreamChunk`; a context manager that closes itself.

    What was shown is the session's; what the pool generated beyond it is not, until it is read.
    One that is ``admitted`` belongs to a call that has begun; the first step of another begins one.
    """

    def __init__(
        self,
        session: Any,
        generation: Generation,
        dropped: Sequence[int] = (),
        *,
        started: float | None = None,
        admitted: bool,
        check_open: Callable[[], object],
        reader_timeout: float | None = None,
    ) -> None:
        self._session = session
        self._context: PagedContext = session.resident.context
        self._generation = generation
        generation.shifted = list(dropped)
        self._started = time.perf_counter() if started is None else started
        timeout = generation.config.timeout
        self._deadline = None if timeout is None else self._started + timeout
        self._reader_timeout = reader_timeout
        self._read_at = time.perf_counter()
        self._admitted = admitted
        self._check_open = check_open
        self._job: Generating | None = None
        self._abandoned = False
        self._cancelled = False
        self._reads = False
        self.finished = False

    def __repr__(self) -> str:
        return repr(self._generation).replace(">", " finished>" if self.finished else ">")

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> StreamChunk:
        if self.finished and not self._abandoned:
            raise StopIteration
        try:
            return self._next()
        except SessionBusyError:
            if self.is_cancelled:  # the call that is inside ends it
                raise StopIteration from None
            raise

    def _next(self) -> StreamChunk:
        job, session = self._job, self._session
        if job is None:
            with self._held():
                if self.finished:  # by a call that came first
                    raise StopIteration
                job = self._begin()
                self._ask(job)
                return self.take(job.items.get())
        with session.gate:  # not `_held`: this runs once a token
            if self.finished:
                raise StopIteration
            try:
                session.in_call = True
                self._ask(job)
                return self.take(job.items.get())
            except BaseException as error:
                self._failed(error)
                raise
            finally:
                session.in_call = False

    @contextmanager
    def _held(self) -> Iterator[None]:
        """Hold the session for a step; what fails ends the stream."""
        session = self._session
        with session.gate:
            try:
                session.in_call = True
                yield
            except BaseException as error:
                self._failed(error)
                raise
            finally:
                session.in_call = False

    def _failed(self, error: BaseException) -> None:
        if not self.finished:
            stream_ended(self._started, None, error)
        self._release()
        self._session.judge(error)

    def _ask(self, job: Generating) -> None:
        job.n_asked += 1
        if self._reader_timeout is not None:
            self._read_at = time.perf_counter()
        if job.rests:
            self._context.scheduler.wake()

    # -- for a task ----------------------------------------------------------------------------

    @property
    def is_abandoned(self) -> bool:
        """Whether the session was closed meanwhile: the next step says so."""
        return self._abandoned

    @property
    def counts(self) -> tuple[int, int]:
        """See `AwaitedStream.counts`."""
        usage = {} if self._job is None else self._job.usage
        return usage.get("prompt_tokens", 0), usage.get("cached_tokens", 0)

    def start(self) -> None:
        """Let the pool generate; this waits until what was wanted so far is held."""
        try:
            with self._held():
                if self._job is None and not self.finished:
                    self._begin()
        except SessionBusyError:
            if not self.is_cancelled:  # else the call that is inside ends it
                raise

    async def read(self, loop: asyncio.AbstractEventLoop) -> StreamChunk:
        """Return the next chunk; the pool calls the loop when it is there."""
        job = self._job
        if (self.finished or (job is None and self.is_cancelled)) and not self._abandoned:
            raise StopAsyncIteration
        if job is None or self._reads:
            raise SessionBusyError("another task reads this stream, which is one task's at a time")
        self._reads = True
        try:
            self._ask(job)
            while job.items.empty():
                there = loop.create_future()
                job.on_item = partial(tell_loop, loop, there)
                if job.items.empty():
                    await there
        finally:
            self._reads = False
        try:
            with self._held():
                if self.finished:  # by a call that came first
                    raise StopAsyncIteration
                return self.take(job.items.get())
        except SessionBusyError:
            if self.is_cancelled:  # the call that is inside ends it
                raise StopAsyncIteration from None
            raise

    # -- for who waits in no thread ------------------------------------------------------------

    def ask(self, given: Callable[[], object]) -> bool:
        """Ask for the next item; ``given`` is called when it is there, in any thread, maybe twice.

        False where the pool does not generate (yet, or any more): nothing was asked then.
        """
        job = self._job
        if job is None or self.finished:
            return False
        job.on_item = given
        self._ask(job)
        if not job.items.empty():
            given()
        return True

    @property
    def is_empty(self) -> bool:
        """Whether no item is there."""
        return self._job is None or self._job.items.empty()

    def listen(self, came: Callable[[], object]) -> bool:
        """Call ``came`` after each item, in the thread that brings it; False where none will come.

        It takes none that `claim` was not called for.
        """
        job = self._job
        if job is None or self.finished:
            return False
        job.on_item = came
        return True

    def claim(self) -> Shown | Item:
        """Ask for an item that is there, and return it."""
        job: Any = self._job
        self._ask(job)
        return self.given()

    def given(self) -> Shown | Item:
        """Return the item that was asked for and is there."""
        items: SimpleQueue[Shown | Item] = self._job.items  # type: ignore[union-attr]
        return items.get_nowait()

    def own(self, shown: Shown) -> None:
        """Make what was shown the session's; as `take_given`, without a chunk of it."""
        with self._held():
            self._own(shown.tokens)

    def take_given(self, item: Shown | Item) -> StreamChunk:
        """Make an item that was `given` the session's, and return its chunk; see `take`."""
        with self._held():
            return self.take(item)

    def _begin(self) -> Generating:
        """Hold what was wanted so far, and let the pool generate behind it."""
        session, context = self._session, self._context
        scheduler, namespace = context.scheduler, context.sequence.namespace
        stream_begins()
        if not self._admitted:
            self._check_open()
            context.begin_call()
        scheduler.admission.enter(namespace, force=self._admitted)
        scheduler.unread.pop(id(self), None)
        try:
            session.resident.cancelled = self._cancelled
            with session.resident.limited(self._generation.config.timeout, self._started):
                n_prompt, n_cached = self._hold_prompt()
            job = Generating(
                context.sequence,
                self._generation,
                n_keep=context.n_tokens,
                n_ahead=2 if scheduler.can_truncate else 1,
                window=context.n_ctx,
                shift_from=session.parts.n_prefix if session.overflow == "shift" else None,
                usage={
                    "started": self._started,
                    "prompt_tokens": n_prompt,
                    "cached_tokens": n_cached,
                },
                deadline=self._deadline,
                reader_timeout=self._reader_timeout,
            )
            job.counts_as_call = True
            job.cancelled = self._cancelled
            context.submit(job)
        except BaseException:
            scheduler.admission.leave(namespace)
            raise
        self._job = job
        if self._cancelled:  # meanwhile, by who saw no job yet
            self.cancel()
        return job

    def _hold_prompt(self) -> tuple[int, int]:
        """Hold what was wanted so far; return how much that is, and how much of it was held."""
        session, context = self._session, self._context
        try:
            session.resident.settle()
            n_prompt, n_cached = begin(session)
            if look_at_prompt(self._generation, context.wanted(), context.evaluate_anew):
                context.sequence.n_again, n_cached = n_cached, 0
        except DecodeAbortedError:
            if not (self._cancelled or session.resident.cancelled):
                raise
            self._cancelled = True  # the stream ends so, and what is not held is owed
            n_prompt, n_cached = session.resident.n_wanted, 0
        return n_prompt, n_cached

    def take(self, item: Shown | Item) -> StreamChunk:
        """Make what the pool generated the session's, and return it. Raises what ended it."""
        session = self._session
        resident, parts = session.resident, session.parts
        if not isinstance(item, Item):
            self._own(item.tokens)
            return item.chunk()
        chunk = item.chunk
        if chunk is None:
            raise item.error or StopIteration
        self._own(chunk.tokens)
        for start, end in item.cuts:  # of tokens before these
            resident.cut_wanted(start, end)
            parts.n_generated = min(parts.n_generated, resident.n_wanted - start)
            parts.plain = False
        if item.final:
            parts.ended_by = self._generation.ended_by
            self._release()
            stream_ended(self._started, chunk.usage)
        return chunk

    def _own(self, tokens: Sequence[int]) -> None:
        session = self._session
        for token in tokens:
            session.resident.owe(token)
        session.parts.n_generated += len(tokens)

    # -- ends from outside ---------------------------------------------------------------------

    def cancel(self) -> None:
        """End with ``finish_reason="cancelled"`` at the next step; from any thread."""
        if self.finished:
            return  # the next call may run
        self._cancelled = True
        job = self._job
        if job is None:  # its prompt may be on its way
            self._context.abort()
        else:
            job.cancelled = True
            job.on_change(job)

    @property
    def is_cancelled(self) -> bool:
        """Whether `cancel` was called, or nobody read it for too long."""
        job, timeout = self._job, self._reader_timeout
        if self._cancelled or (job is not None and job.cancelled):
            return True
        if timeout is None or not (job is None or job.done.is_open):
            return False  # else the pool looks
        return time.perf_counter() > self._read_at + timeout

    def end(self) -> None:
        """End the decode for a call that holds the session, and wait for nothing."""
        self._cancelled = True
        self._release()
        self._tell_end()

    def abandon(self) -> None:
        """End at once: the session is closed, and the next step says so."""
        self._abandoned = True
        if not self.finished:
            self._tell_end()
        self._release()

    def close(self) -> None:
        """End the decode; what was shown is the session's, which is free again. Idempotent.

        While another thread is taking a step, that step ends the decode as `cancel` does.
        """
        job = self.let_go()
        if job is not None and not self._context.owner.is_here:
            job.wait()

    async def aclose(self) -> None:
        """End the decode as `close` does, and let the loop go on until it has ended."""
        job = self.let_go()
        if job is None or job.done.is_open or self._context.owner.is_here:
            return
        loop = asyncio.get_running_loop()
        ended = loop.create_future()
        job.done.when_open(partial(tell_loop, loop, ended))
        await ended

    def let_go(self) -> Generating | None:
        """End the decode; return what the pool works on until its next step, if anything."""
        if self.finished:
            return None
        self.cancel()
        if self._session.in_call:
            return None
        self._release()
        self._tell_end()
        return self._job

    def _tell_end(self) -> None:
        if self._job is not None:
            stream_ended(self._started, None)

    def _release(self) -> None:
        """Let go; safe in a finalizer, so it takes no lock."""
        self.finished = True
        if self._job is None:
            self._context.scheduler.unread.pop(id(self), None)
            self._generation.close()
        elif not self._job.done.is_open:
            self._job.cancelled = True
            self._context.scheduler.wake()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "finished", True) or sys.is_finalizing():
            return
        self._release()
        self._tell_end()
