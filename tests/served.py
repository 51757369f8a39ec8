"""A server on a free port, for tests."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SECONDS = 60.0


@attrs.frozen
class Served:
    """A server that runs: its address, application and pools."""

    url: str
    app: Any
    pools: dict[str, Any]
    clients: list[Any] = attrs.field(factory=list)

    def client(self, **fields: Any) -> Any:
        """Return the public client of the protocol."""
        import openai

        opened = openai.OpenAI(
            **{"base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 0, **fields}
        )
        self.clients.append(opened)
        return opened


def eventually(holds: Callable[[], bool], seconds: float = SECONDS) -> None:
    """Wait until something holds; fail where it does not."""
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, "it did not come about"
        time.sleep(0.01)


@contextmanager
def serving(pools: dict[str, Any], **config: Any) -> Iterator[Served]:
    """Give a server over ``pools`` in a thread of its own."""
    import uvicorn

    from infercore.serve import ServeConfig, create_app
    from infercore.serve.running import Protocol

    app = create_app(pools, ServeConfig(**config))
    bound = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, http=Protocol, log_config=None, lifespan="on"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    try:
        eventually(lambda: bool(server.started))
        host, port = bound.getsockname()[:2]
        served = Served(f"http://{host}:{port}", app, pools)
        yield served
        for client in served.clients:
            client.close()
    finally:
        server.should_exit = True
        thread.join(SECONDS)
        bound.close()
        assert not thread.is_alive(), "the server does not end"
