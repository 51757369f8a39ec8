"""The stream of a session whose engine lives in another process, and what begins it anew."""

from __future__ import annotations

import asyncio
import io
import time
from concurrent.futures import wait
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs

from infercore.errors import SessionBusyError, SessionClosedError
from infercore.isolated import wire
from infercore.isolated.child import DeathError
from infercore.session.handing import in_turn, tell_loop
from infercore.session.observer import stream_begins, stream_ended
from infercore.values.config import DecodeConfig

if TYPE_CHECKING:
    import weakref
    from collections.abc import Mapping, Sequence
    from concurrent.futures import Future

    from typing_extensions import Self

    from infercore.isolated.session import IsolatedSession
    from infercore.values.session import StreamChunk, Usage


Asked = tuple["Sequence[Any]", "dict[str, Any]"]
"""The arguments and fields of a request."""


def less_time(value: Any, spent: float, name: str = "") -> Any:
    """Return ``value`` with ``spent`` seconds less to go, where it is or has a timeout."""
    if isinstance(value, DecodeConfig) and value.timeout is not None:
        return attrs.evolve(value, timeout=less_time(value.timeout, spent, "timeout"))
    return max(1e-3, value - spent) if name == "timeout" and value is not None else value


class Opened:
    """A stream that was begun: what it was asked, and what was made since."""

    def __init__(self, kind: str, args: Sequence[Any], fields: Mapping[str, Any]) -> None:
        self.kind = kind
        self.args = args
        self.fields = dict(fields)
        self._kept: bytes | None = None
        self._is_told = self._end_is_told = False
        self.started = time.perf_counter()
        self.first_at: float | None = None
        self.read_at = self.started
        self.seed: int | None = None
        self.epoch = 0
        self.tokens: list[int] = []
        self.position: Any = None
        self.n_shown = 0
        self.n_shown_tokens = 0  # of ``tokens``, which are ahead of them
        self.n_begun = 0
        self.counts = 0, 0
        self.stream: weakref.ref[IsolatedStream] | None = None

    @property
    def is_dropped(self) -> bool:
        """Whether nobody has the stream any more, or who has it lets the next call end it."""
        stream = None if self.stream is None else self.stream()
        return self.stream is not None and (stream is None or stream.finished)

    @property
    def is_awaited(self) -> bool:
        """Whether a task waits for its next chunk."""
        stream = None if self.stream is None else self.stream()
        return stream is not None and stream.is_awaited

    def keep(self) -> None:
        """Keep what it was asked as it is now: its caller may change the messages."""
        self._kept = wire.pack([list(self.args), self.fields])
        self.args, self.fields = (), {}

    def request(self) -> Asked:
        """Return what begins it."""
        return [self.kind, list(self.args), self.fields, None], {}

    def again(self) -> Asked:
        """Return what lets it go on behind its tokens, if any, in the time that is left."""
        replay, args, fields = None, self.args, self.fields
        if self._kept is not None:
            args, fields = wire.read(io.BytesIO(self._kept).read)
        if self.seed is not None:
            replay = [self.seed, self.tokens, self.position, self.n_shown]
        spent = time.perf_counter() - self.started
        args = [less_time(value, spent) for value in args]
        fields = {name: less_time(value, spent, name) for name, value in fields.items()}
        return [self.kind, args, fields, replay], {}

    def note(self, chunk: StreamChunk, tokens: Sequence[int], position: Any) -> None:
        """Note what came with a chunk: tokens that were chosen, and where the sampler stands."""
        self.tokens += tokens
        self.position = position
        self.n_shown += 1
        self.n_shown_tokens += len(chunk.tokens)
        self.read_at = time.perf_counter()
        if self.first_at is None:
            self.first_at = self.read_at

    def tell_begin(self) -> None:
        """Tell an observer once that it is read."""
        if not self._is_told:
            self._is_told = True
            stream_begins()

    def tell_end(self, usage: Usage | None = None, error: BaseException | None = None) -> None:
        """Tell an observer once that it ended, if it was read."""
        if self._is_told and not self._end_is_told:
            self._end_is_told = True
            stream_ended(self.started, usage, error)

    def ended(self, chunk: StreamChunk) -> StreamChunk:
        """Return the last chunk, with the true times where it was begun more than once."""
        usage = chunk.usage
        if not self.n_begun or usage is None or self.first_at is None:
            return chunk
        elapsed = time.perf_counter() - self.first_at
        n = usage.completion_tokens
        return attrs.evolve(
            chunk,
            usage=attrs.evolve(
                usage,
                time_to_first_token_ms=(self.first_at - self.started) * 1e3,
                tokens_per_second=(n - 1) / elapsed if n > 1 and elapsed > 0 else None,
            ),
        )


def on_its_way(asked: Any) -> StreamChunk | None:
    """Return the chunk that answers a request, if it was there before a call ended the stream.

    The session of the other process has its tokens.
    """
    if asked is None or not asked.done.is_open or asked.error is not None:
        return None
    chunk: StreamChunk | None = asked.result[0]
    return chunk


class IsolatedStream:
    """An iterator of `StreamChunk`; a context manager that closes itself."""

    def __init__(self, session: IsolatedSession, opened: Opened) -> None:
        self._session = session
        self._opened = opened
        self._asked: Any = None
        self._begun_anew: Future[StreamChunk | None] | None = None
        self.finished = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> StreamChunk:
        if self.finished:
            raise StopIteration
        self.start()
        chunk = self._take(None)
        if chunk is None:
            raise StopIteration
        return chunk

    def start(self) -> None:
        """Tell an observer once that it is read."""
        self._opened.tell_begin()

    def _take(self, asked: Any) -> StreamChunk | None:
        """Return the next chunk, which ``asked`` may have brought."""
        try:
            chunk = self._session.read(self._opened, asked)
        except SessionBusyError:
            if self.finished or self._session.was_cancelled:  # the call that is inside ends it
                return on_its_way(asked)
            raise
        except BaseException as error:
            self.finished = not self._session.closed
            self._opened.tell_end(error=error)
            raise
        if chunk is None or chunk.finish_reason is not None:
            self.finished = True
            self._opened.tell_end(None if chunk is None else chunk.usage)
        return chunk

    # -- for a task ----------------------------------------------------------------------------

    @property
    def is_awaited(self) -> bool:
        """Whether a task waits for its next chunk."""
        return self._asked is not None

    @property
    def is_abandoned(self) -> bool:
        """Whether the session was closed meanwhile: the next step says so."""
        return self._session.closed and not self.finished

    @property
    def counts(self) -> tuple[int, int]:
        """See `AwaitedStream.counts`; known once it was closed before its end."""
        return self._opened.counts

    async def read(self, loop: asyncio.AbstractEventLoop) -> StreamChunk:
        """Return the next chunk; the thread that hears the process calls the loop.

        Only where the process died meanwhile a thread waits until another goes on.
        """
        if self._asked is not None:
            raise SessionBusyError("another task reads this stream, which is one task's at a time")
        asked = self._asked = in_turn(loop, partial(self._session.ask_next, self._opened))
        if asked is not None:
            answered = loop.create_future()
            asked.done.when_open(partial(tell_loop, loop, answered))
            await answered  # a task that is cancelled here closes the stream, which waits for it
        self._asked = None
        if asked is None or isinstance(asked.error, DeathError):
            self._begun_anew = self._session.waiters().submit(self._take, None)
            chunk = await asyncio.wrap_future(self._begun_anew, loop=loop)
        else:
            chunk = self._take(asked)
        if chunk is None:
            raise StopAsyncIteration
        return chunk

    async def aclose(self) -> None:
        """End the decode as `close` does, and let the loop go on until it has ended."""
        if not self.finished:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._session.waiters(), self.close)

    def let_go(self) -> None:
        """End the decode; this waits for nothing, and the next call tells the process."""
        if not self.finished:
            self.finished = True
            self._session.cancel()
            self._opened.tell_end()

    # -- ends from outside ---------------------------------------------------------------------

    def cancel(self) -> None:
        """End with ``finish_reason="cancelled"`` at the next step; from any thread."""
        if not self.finished:
            self._session.cancel()

    def close(self) -> None:
        """End the decode; what was shown is the session's, which is free again. Idempotent."""
        asked, self._asked = self._asked, None
        if asked is not None:  # by a task that was cancelled
            self.cancel()
            asked.done.wait()
        begun_anew = self._begun_anew
        if begun_anew is not None and not begun_anew.done():  # it has the session
            self.cancel()
            wait([begun_anew])
        if not self.finished:
            with suppress(SessionClosedError):  # its pool was closed: there is nothing to end
                self._session.end_alone(self._opened)
            self.finished = True
            self._opened.tell_end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
