"""A server of many sessions over HTTP, with nothing but asyncio.

Shows: several `AsyncSession`s over one model answer several clients at once; a client beyond the
number of sessions waits for a free one. The system text is warm in each session. When a client
hangs up, its task is cancelled: the engine stops, and the session serves the next one.

    python examples/async_server.py [MODEL [PORT]]
    curl -N localhost:8080 -d '{"prompt": " Mira was very", "max_tokens": 32, "temperature": 0}'

Streams a line of JSON for each piece of text, the last with ``finish_reason`` and ``cached``.
Prints its address and a line for each request: "answered", "refused" or "hung up".
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from typing import Any

import infercore as ic
from default_model import default_model

N_SESSIONS, MAX_BYTES = 3, 2**20
SYSTEM = "Once upon a time there was a baker named Mira, who lived near the stone bridge."
OPTIONS = {"max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop"}
HEAD = "HTTP/1.1 {}\r\nContent-Type: application/x-ndjson\r\nConnection: close\r\n\r\n"
Pool = asyncio.Queue[ic.AsyncSession]


async def read_request(reader: asyncio.StreamReader) -> dict[str, Any]:
    """Return the JSON of a request's body. Raises ValueError or EOFError where it is none."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
    sizes = [int(line[15:]) for line in head.splitlines() if line.startswith("content-length:")]
    if sum(sizes) > MAX_BYTES:
        raise ValueError(f"send at most {MAX_BYTES} bytes")
    request = json.loads(await reader.readexactly(sum(sizes)))
    if not isinstance(request, dict) or set(request) - OPTIONS - {"prompt"}:
        raise ValueError(f"send an object with prompt and any of {', '.join(sorted(OPTIONS))}")
    return request


async def answer(pool: Pool, request: dict[str, Any], writer: asyncio.StreamWriter) -> str:
    """Stream the answer from a free session; return what is to be logged."""
    session = await pool.get()
    try:
        await session.ensure_prefix(SYSTEM)
        await session.prefill_suffix(request.pop("prompt", ""))
        async with session.decode(**{"max_tokens": 64, **request}) as stream:
            writer.write(HEAD.format("200 OK").encode())
            async for chunk in stream:
                line: dict[str, Any] = {"text": chunk.text}
                if (usage := chunk.usage) is not None:
                    line |= {"finish_reason": chunk.finish_reason, "cached": usage.cached_tokens}
                writer.write(json.dumps(line).encode() + b"\n")
                await writer.drain()
        return f"answered with {session.explain_context().generated_tokens} tokens"
    finally:
        pool.put_nowait(session)


async def cancel_when_gone(reader: asyncio.StreamReader, work: asyncio.Task[str]) -> None:
    """Cancel the work for a client when it hangs up."""
    with contextlib.suppress(OSError):
        await reader.read()
    work.cancel()


async def serve(pool: Pool, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer one client, until all is said or it hangs up."""
    watching = None
    try:
        work = asyncio.create_task(answer(pool, await read_request(reader), writer))
        watching = asyncio.create_task(cancel_when_gone(reader, work))
        print(await work, flush=True)
    except (ic.InferCoreError, ValueError, EOFError, asyncio.LimitOverrunError) as error:
        writer.write(HEAD.format("400 Bad Request").encode())
        writer.write(json.dumps({"error": str(error)}).encode() + b"\n")
        print(f"refused: {error}".splitlines()[0], flush=True)
    except (asyncio.CancelledError, OSError):
        print("hung up; its session is free", flush=True)
    finally:
        if watching is not None:
            watching.cancel()
        writer.close()


async def told_to_end() -> None:
    """Wait for Ctrl-C, or for what service managers send."""
    told = asyncio.Event()
    with contextlib.suppress(NotImplementedError):  # Windows raises KeyboardInterrupt instead
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, told.set)
    await told.wait()


async def main() -> None:
    """Open the sessions, and serve until interrupted."""
    path = sys.argv[1] if len(sys.argv) > 1 else default_model()
    port = int(sys.argv[2]) if len(sys.argv) > 2 else 8080  # noqa: PLR2004  (the second argument)
    pool: Pool = asyncio.Queue()
    async with contextlib.AsyncExitStack() as opened:
        model = opened.enter_context(ic.load_model(path))
        for _ in range(N_SESSIONS):
            session = await opened.enter_async_context(ic.aopen_session(model, n_ctx=512))
            await session.ensure_prefix(SYSTEM)
            pool.put_nowait(session)
        server = await asyncio.start_server(lambda r, w: serve(pool, r, w), "127.0.0.1", port)
        opened.callback(server.close)
        address = "http://{}:{}".format(*server.sockets[0].getsockname())
        print(f"{address} with {N_SESSIONS} sessions", flush=True)
        await told_to_end()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main())
