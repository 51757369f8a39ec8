"""The server of the command line: uvicorn, stopped by us so that running answers can finish."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from infercore.serve.app import App
from infercore.serve.config import ServeConfig
from infercore.serve.models import Models, Opening
from infercore.serve.tracing import observe

try:
    from uvloop import run as run_loop
except ImportError:  # Windows, PyPy
    from asyncio import run as run_loop  # type: ignore[assignment]

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["App", "Models", "Opening", "ServeConfig", "observe", "run"]
GRACE_S = 30
"""Seconds that running answers get to finish once the server stops."""
_AT_ONCE_S = 1.0
"""Seconds that engines get after a second signal."""
HEAD_S = 30.0
"""Seconds in which the head of a request has to come."""
_N_THREADS = 64
"""Callers whose texts one engine call may embed, and what else waits in a thread."""


class Protocol(H11Protocol):
    """HTTP/1.1 that waits for the head of a request for `HEAD_S` seconds, and closes then."""

    _waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait."""
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        """Take bytes; wait on while they are no whole head."""
        super().data_received(data)
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            self._wait_no_more()
        elif self._waiting is None:
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing any more."""
        self._wait_no_more()
        super().connection_lost(exc)

    def _wait(self) -> None:
        self._waiting = self.loop.call_later(HEAD_S, self.transport.close)

    def _wait_no_more(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None


class Server(uvicorn.Server):
    """A server that leaves signals to its caller, and says when it listens."""

    def __init__(self, config: uvicorn.Config, listening: Callable[[], None]) -> None:
        super().__init__(config)
        self._listening = listening

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none: `run` does, and the process then ends with exit status 0."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say so."""
        await super().startup(sockets=sockets)
        self._listening()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let requests end, and then the rest: they are told so before their engines are closed."""
        await super().shutdown(sockets=sockets)
        left = list(self.server_state.tasks)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        if self.force_exit:  # which is no reason to end the application without a word
            await self.lifespan.shutdown()


def _bound(host: str, port: int, reader_timeout: float) -> socket.socket:
    """Return a socket that listens at an address. Raises `OSError`.

    Where the system can, a connection breaks whose other end takes nothing for so many seconds.
    """
    kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    bound = socket.create_server(address, family=kind, backlog=2048)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # what is accepted inherits it
        most_ms = min(round(1000 * reader_timeout), 2**31 - 1)
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, most_ms)
    # Named as TCP: asyncio sends at once on such sockets alone, and a first token waits for no
    # acknowledgement.
    return socket.socket(kind, bound.type, socket.IPPROTO_TCP, fileno=bound.detach())


def _url(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run(app: App, *, host: str, port: int, lazy: bool, say: Callable[[str], None]) -> None:
    """Load, listen, and serve until Ctrl-C or SIGTERM; then let what runs end.

    Raises what opening a pool raises, and `OSError` where the address is taken.
    """
    run_loop(_serve(app, host=host, port=port, lazy=lazy, say=say))


async def _serve(app: App, *, host: str, port: int, lazy: bool, say: Callable[[str], None]) -> None:
    bound = _bound(host, port, app.config.reader_timeout)
    config = uvicorn.Config(
        app,
        http=Protocol,
        log_config=None,
        access_log=False,
        lifespan="on",
        timeout_graceful_shutdown=GRACE_S,
        server_header=False,
    )
    asyncio.get_running_loop().set_default_executor(
        ThreadPoolExecutor(_N_THREADS, thread_name_prefix="infercore-serve")
    )
    server = Server(config, lambda: say(f"serving at {_url(bound)}"))
    try:
        with _told_to_end(lambda: _end(server, app)):
            for served in () if lazy else app.models.by_name.values():
                say(f"loading {served.name}")
                async with served.used():
                    pass
                if server.should_exit:  # stopped while it loaded
                    return
            _leave_alone_what_stays()
            await server.serve(sockets=[bound])
    finally:
        bound.close()
        for served in app.models.by_name.values():
            await served.close()


def _leave_alone_what_stays() -> None:
    """Let full garbage collections scan no models and modules: that would stall all answers."""
    gc.collect()
    if hasattr(gc, "freeze"):  # not on PyPy
        gc.freeze()


def _end(server: Server, app: App) -> None:
    if app.draining:  # a second signal: at once, also where an engine does not answer
        server.force_exit = True
        asyncio.get_running_loop().call_later(_AT_ONCE_S, app.models.kill)
    app.draining = server.should_exit = True


@contextlib.contextmanager
def _told_to_end(end: Callable[[], None]) -> Iterator[None]:
    """Call ``end`` on Ctrl-C, and on what service managers send."""
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM)
    try:
        for number in numbers:
            loop.add_signal_handler(number, end)
    except NotImplementedError:  # Windows: KeyboardInterrupt ends the loop instead
        yield
        return
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
