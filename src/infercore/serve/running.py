"""The server of the command line: uvicorn, told to end by us so that what runs may end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from typing import TYPE_CHECKING, Any

import uvicorn

from infercore.serve.app import App
from infercore.serve.config import ServeConfig
from infercore.serve.models import Models

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["App", "Models", "ServeConfig", "run"]
GRACE_S = 30
"""Seconds that answers have to end once the server was told to."""


class Server(uvicorn.Server):
    """A server that leaves signals to its caller, and tells where it listens."""

    def __init__(self, config: uvicorn.Config, say: Callable[[str], None]) -> None:
        super().__init__(config)
        self._say = say

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none: `run` does, and the process then ends with exit status 0."""
        yield

    async def startup(self, sockets: Any = None) -> None:
        """Listen, and say where."""
        await super().startup(sockets=sockets)
        for server in self.servers:
            for socket in server.sockets:
                host, port = socket.getsockname()[:2]
                where = f"[{host}]" if ":" in host else host
                self._say(f"serving at http://{where}:{port}")


async def run(app: App, *, host: str, port: int, lazy: bool, say: Callable[[str], None]) -> None:
    """Load, listen, and serve until Ctrl-C or SIGTERM; then let what runs end.

    Raises what opening a pool raises, and `OSError` where the address is taken.
    """
    try:
        if not lazy:
            for served in app.models.by_name.values():
                say(f"loading {served.name}")
                async with served.used():
                    pass
        config = uvicorn.Config(
            app,
            host=host,
            port=port,
            log_config=None,
            access_log=False,
            lifespan="on",
            timeout_graceful_shutdown=GRACE_S,
            server_header=False,
        )
        server = Server(config, say)
        with _told_to_end(lambda: _end(server, app)):
            await server.serve()
    finally:
        for served in app.models.by_name.values():
            await served.close()


def _end(server: Server, app: App) -> None:
    if app.draining:  # told twice: at once
        server.force_exit = True
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
