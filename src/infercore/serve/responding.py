"""Answers that end when their client goes away: one JSON document, or a stream of events.

Format of the events: https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.responses import Response

from infercore.serve.errors import api_error

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Coroutine, Mapping

    from starlette.types import Receive, Scope, Send

log = logging.getLogger("infercore.serve")
COMMENT = b": still at work\n\n"
DONE = b"data: [DONE]\n\n"


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
        gone = asyncio.ensure_future(_gone(receive))
        following = self._next()
        begun = False
        reader = _Reader(send, self._reader_timeout)
        try:
            while True:
                either: set[asyncio.Future[Any]] = {following, gone}
                await asyncio.wait(
                    either, timeout=self._keep_alive, return_when=asyncio.FIRST_COMPLETED
                )
                if gone.done():
                    return
                error = following.exception() if following.done() else None
                if error is not None and not begun and not isinstance(error, StopAsyncIteration):
                    await failure(error, scope["names"])(scope, receive, send)
                    return
                if not begun:
                    await _start(send)
                    begun = True
                if not following.done():
                    await reader.take(COMMENT)
                elif error is None:
                    await reader.take(following.result())
                    following = self._next()
                else:
                    await self._end(reader, error)
                    return
        except OSError:  # the connection broke while something was sent
            return
        except asyncio.CancelledError:
            if not reader.is_stuck:
                raise
            reader.forget()
            log.warning("a stream was cancelled: its client takes nothing")
        finally:
            reader.close()
            await _stop(following, gone)
            await self._events.aclose()

    def _next(self) -> asyncio.Future[bytes]:
        return asyncio.ensure_future(self._events.__anext__())

    async def _end(self, reader: _Reader, error: BaseException) -> None:
        if not isinstance(error, StopAsyncIteration):
            told = api_error(error)
            if told.status >= 500:  # noqa: PLR2004  (the server's own faults)
                log.error("stream failed: %s", error, exc_info=error)
            await reader.take(event(told.body))
        await reader.take(b"", more=False)


async def _start(send: Send) -> None:
    headers = [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),
    ]
    await send({"type": "http.response.start", "status": 200, "headers": headers})


class _Reader:
    """Who gets the events of a stream; its task is cancelled where they are not taken in time."""

    def __init__(self, send: Send, timeout: float) -> None:
        self.is_stuck = False
        self._send = send
        self._timeout = timeout
        self._loop = asyncio.get_running_loop()
        self._since: float | None = None
        self._task: Any = asyncio.current_task()
        self._look_later()

    async def take(self, body: bytes, *, more: bool = True) -> None:
        self._since = self._loop.time()
        await self._send({"type": "http.response.body", "body": body, "more_body": more})
        self._since = None

    def forget(self) -> None:
        """Let the task go on as if it had not been cancelled."""
        if hasattr(self._task, "uncancel"):  # Python 3.11
            self._task.uncancel()

    def close(self) -> None:
        self._looking.cancel()

    def _look_later(self) -> None:
        self._looking = self._loop.call_later(self._timeout / 4, self._look)

    def _look(self) -> None:
        if self._since is not None and self._loop.time() - self._since > self._timeout:
            self.is_stuck = True
            self._task.cancel()
        else:
            self._look_later()
