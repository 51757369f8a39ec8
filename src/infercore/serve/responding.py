"""Answers that end when their client goes away: one JSON document, or a stream of events.

Format of the events: https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.responses import Response

from infercore.serve.errors import api_error, server_ended

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Coroutine, Mapping

    from starlette.types import Receive, Scope, Send

log = logging.getLogger("infercore.serve")
COMMENT = b": still at work\n\n"
DONE = b"data: [DONE]\n\n"
_LAST_WORD_S = 1.0
"""Seconds that a client has to take what a server says at its end."""


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return ``body`` as a JSON document."""
    return Response(
        msgspec.json.encode(body), status, headers=headers, media_type="application/json"
    )


def failure(error: BaseException, names: Mapping[str, str] | None = None) -> Response:
    """Return the answer that reports ``error``; ``names`` are those of `api_error`."""
    told = api_error(error, names)
    if told.status >= 500:  # noqa: PLR2004  (the server's own faults)
        log.error("request failed: %s", error, exc_info=error)
    return json_response(told.body, told.status, told.headers)


def event(data: Any, name: str | None = None) -> bytes:
    """Return one event; ``name`` is its type, where the protocol has one."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + msgspec.json.encode(data) + b"\n\n"


async def _gone(receive: Receive) -> None:
    """Return when the client has gone away."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _stop(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class Document:
    """A response of one JSON document, whose work is cancelled when the client goes away."""

    def __init__(self, work: Coroutine[Any, Any, Any]) -> None:
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Do the work and send what comes of it."""
        work = asyncio.ensure_future(self._work)
        gone = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                return
            error = work.exception()
            response = (
                json_response(work.result()) if error is None else failure(error, scope["names"])
            )
        finally:
            await _stop(work, gone)
        await response(scope, receive, send)


class Events:
    """A response that streams events, with a comment every ``keep_alive`` seconds between them.

    What fails before the first event has the status of its error; what fails later is an event.
    The work ends within one step of the client's going away, and where the client takes nothing
    for ``reader_timeout`` seconds.
    """

    def __init__(
        self, events: AsyncGenerator[bytes, None], *, keep_alive: float, reader_timeout: float
    ) -> None:
        self._events = events
        self._keep_alive = keep_alive
        self._reader_timeout = reader_timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until they end or nobody reads them."""
        client = _Client(receive, send, self._keep_alive, self._reader_timeout)
        try:
            try:
                async for data in self._events:
                    await client.take(data)
                await client.take(b"", more=False)
            except _LeftError:
                raise
            except Exception as error:  # noqa: BLE001  (it becomes an answer, or an event)
                if await client.begins():
                    await client.fail(error)
                else:
                    await failure(error, scope["names"])(scope, receive, send)
        except _LeftError:
            return
        except asyncio.CancelledError:
            if not client.has_left:  # the server ends, and waited long enough
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(client.cut_off(), _LAST_WORD_S)
                raise
            client.forget()
        finally:
            await client.close()
            await self._events.aclose()


class _LeftError(Exception):
    """The connection broke while something was sent."""


class _Client:
    """Who gets the events of a stream. The task is cancelled where they leave or take nothing.

    Between events a comment is sent every ``keep_alive`` seconds.
    """

    def __init__(self, receive: Receive, send: Send, keep_alive: float, timeout: float) -> None:
        self.has_left = False
        self._send = send
        self._keep_alive = keep_alive
        self._timeout = timeout
        self._loop = asyncio.get_running_loop()
        self._task: Any = asyncio.current_task()
        self._one_at_a_time = asyncio.Lock()
        self._has_begun = self._has_ended = False
        self._sends_since: float | None = None
        self._last = self._loop.time()
        self._comment: asyncio.Task[None] | None = None
        self._gone = asyncio.ensure_future(_gone(receive))
        self._gone.add_done_callback(self._leave)
        self._look_later()

    async def take(self, body: bytes, *, more: bool = True) -> None:
        """Send ``body``. Raises `_LeftError` where the connection is broken."""
        async with self._one_at_a_time:
            if self._has_ended:  # while a comment waited
                return
            self._sends_since = self._loop.time()
            self._has_ended = not more
            try:
                if not self._has_begun:
                    self._has_begun = True
                    await _start(self._send)
                await self._send({"type": "http.response.body", "body": body, "more_body": more})
            except OSError as error:
                raise _LeftError from error
            self._last, self._sends_since = self._sends_since, None

    async def fail(self, error: Exception) -> None:
        """Send an event that says what ended the stream."""
        told = api_error(error)
        if told.status >= 500:  # noqa: PLR2004  (the server's own faults)
            log.error("stream failed: %s", error, exc_info=error)
        await self.take(event(told.body))
        await self.take(b"", more=False)

    async def cut_off(self) -> None:
        """Send an event that says that the server ended, where a stream has begun."""
        if await self.begins():
            await self.take(event(server_ended().body))
            await self.take(b"", more=False)

    async def begins(self) -> bool:
        """Return whether anything was sent; where nothing was, no comment is from now on."""
        if self._comment is not None:
            await asyncio.wait([self._comment])
        if not self._has_begun:
            self._looking.cancel()
        return self._has_begun

    def forget(self) -> None:
        """Let the task go on as if it had not been cancelled."""
        if hasattr(self._task, "uncancel"):  # Python 3.11
            self._task.uncancel()

    async def close(self) -> None:
        """Look after nobody any more."""
        self._looking.cancel()
        self._gone.remove_done_callback(self._leave)
        if self._comment is not None:
            self._comment.remove_done_callback(self._leave)
            await _stop(self._comment)
        await _stop(self._gone)

    def _leave(self, ended: asyncio.Future[None]) -> None:
        """End the task with the connection; a comment that was sent ends nothing."""
        was_sent = ended is not self._gone and not (ended.cancelled() or ended.exception())
        if not was_sent:
            self.has_left = True
            self._task.cancel()

    def _look_later(self) -> None:
        """Look when the next comment is due, or a client may have taken nothing for too long."""
        due = self._last + self._keep_alive - self._loop.time()
        wait = self._keep_alive if due <= 0 else due
        self._looking = self._loop.call_later(min(wait, self._timeout / 4), self._look)

    def _look(self) -> None:
        now = self._loop.time()
        if self._sends_since is not None:
            if now - self._sends_since > self._timeout:
                log.warning("a stream was cancelled: its client takes nothing")
                self.has_left = True
                self._task.cancel()
                return
        elif now - self._last >= self._keep_alive:
            self._comment = self._loop.create_task(self.take(COMMENT))
            self._comment.add_done_callback(self._leave)
        self._look_later()


async def _start(send: Send) -> None:
    headers = [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),
    ]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
