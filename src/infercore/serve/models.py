"""The models that a server answers for, by name: their pools, and the conversations kept warm."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import infercore
from infercore.errors import InvalidInputError, OutOfMemoryError, UnsupportedFeatureError
from infercore.serve.errors import ApiError, timed_out

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

    from infercore.session.asynchronous import AsyncSession
    from infercore.session.pool import SessionPool
    from infercore.values.session import TokenLogprob

log = logging.getLogger("infercore.serve")
History = tuple[str, ...]


class Warm:
    """Sessions whose answer has been given, for their next turn; the oldest go first."""

    def __init__(self, n_most: int) -> None:
        self._n_most = n_most
        self._idle: deque[tuple[tuple[str, str], History, AsyncSession]] = deque()

    def take(self, owner: tuple[str, str], history: History) -> AsyncSession | None:
        """Return the session of ``owner`` with the longest part of ``history``, and forget it."""
        best, n_best = None, 0
        for place in self._idle:
            of, held, _ = place
            if of == owner and len(held) > n_best and history[: len(held)] == held:
                best, n_best = place, len(held)
        if best is None:
            return None
        self._idle.remove(best)
        return best[2]

    async def put(self, owner: tuple[str, str], history: History, session: AsyncSession) -> None:
        """Keep ``session``, which holds ``history``, and close those beyond the limit."""
        self._idle.append((owner, history, session))
        while len(self._idle) > self._n_most:
            await self._idle.popleft()[2].close()

    async def close(self) -> None:
        """Close all."""
        while self._idle:
            await self._idle.popleft()[2].close()


class Opening:
    """Opens the pool of the model at ``path``, in a process of its own where ``isolate`` asks.

    Where that cannot be, the pool is opened in this process: the log says why, and so does
    ``in_process``, which is None for a pool in a process of its own.
    """

    def __init__(self, path: str, fields: Mapping[str, Any], *, isolate: bool) -> None:
        self._path = path
        self._fields = fields
        self._isolate = isolate
        self.in_process: str | None = None

    def __call__(self) -> SessionPool:
        """Return an open pool. Raises what `infercore.open_pool` raises."""
        self.in_process = None
        if self._isolate:
            try:
                return infercore.open_pool(self._path, **self._fields, isolate=True)
            except UnsupportedFeatureError as error:
                pool = infercore.open_pool(self._path, **self._fields)
                self.in_process = str(error)
                log.warning("%s is opened in the server's own process: %s", self._path, error)
                return pool
        self.in_process = "the operator asked for it"
        return infercore.open_pool(self._path, **self._fields)


class Served:
    """One model of a server: a pool that is there, or is opened by the first request for it."""

    def __init__(
        self,
        name: str,
        *,
        pool: SessionPool | None,
        opens: Callable[[], SessionPool] | None,
        make_room: Callable[[Served], Awaitable[bool]],
    ) -> None:
        self.name = name
        self.pool = pool
        self.n_active = 0
        self.created = int(time.time())
        self._opens = opens
        self._make_room = make_room
        self._last_use = time.monotonic()
        self._opening = asyncio.Lock()
        self._loading: asyncio.Task[None] | None = None
        self.warm = Warm(0)
        self.token_bytes: dict[int, bytes] = {}
        """Bytes of the tokens in reported probabilities, each looked up once."""
        self.control: set[int] = set()
        """Those of them that are control tokens, which write no text."""

    @property
    def works(self) -> bool:
        """Whether there is a pool that answers; one that is not loaded yet is none."""
        return self.pool is not None and not self.pool.closed and self.pool.failure is None

    @property
    def failed(self) -> bool:
        """Whether the pool ended and no request opens it again."""
        return self._opens is None and not self.works

    @property
    def facts(self) -> dict[str, Any]:
        """What a list of models says about this one."""
        pool = self.pool
        facts: dict[str, Any] = {"loaded": pool is not None}
        if pool is None:
            return facts
        facts["n_ctx"] = pool.effective.get("n_ctx")
        is_isolated = pool.config.isolate or getattr(self._opens, "isolated", False)
        facts["isolated"] = is_isolated
        if not is_isolated:
            opened_by_a_program = "the program that serves opened it"
            facts["in_process"] = getattr(self._opens, "in_process", None) or opened_by_a_program
        return facts

    @asynccontextmanager
    async def used(self, timeout: float | None = None) -> AsyncIterator[SessionPool]:
        """Give the pool, opened if need be, and keep it from being unloaded meanwhile.

        Raises an `ApiError` of status 408 where opening takes more than ``timeout`` seconds.
        """
        self.n_active += 1
        try:
            while self.pool is None or not self.works:
                if self._loading is None or self._loading.done():
                    self._loading = asyncio.create_task(self._load())
                try:  # it goes on where this caller leaves
                    await asyncio.wait_for(asyncio.shield(self._loading), timeout)
                except asyncio.TimeoutError as error:
                    if self._loading.done():  # its own
                        raise
                    raise timed_out(f"model {self.name!r} was still loading", timeout) from error
            yield self.pool
        finally:
            self.n_active -= 1
            self._last_use = time.monotonic()

    async def learn(self, found: Sequence[TokenLogprob]) -> None:
        """Have bytes and kind of all tokens in ``found``; another process may have to answer."""
        tokens = {each.token for each in found}
        tokens.update(token for each in found for token, _ in each.top)
        missing = tokens - self.token_bytes.keys()
        if missing and self.pool is not None:
            tokenizer = self.pool.tokenizer
            self.control |= await asyncio.to_thread(
                lambda: {token for token in missing if tokenizer.is_control(token)}
            )
            self.token_bytes |= await asyncio.to_thread(
                lambda: {token: tokenizer.token_bytes(token) for token in missing}
            )

    async def _load(self) -> None:
        async with self._opening:
            if self.works:
                return
            if self._opens is None:
                told = f"model {self.name!r} has ended"
                raise ApiError(503, told, "server_error", code="closed")
            if self.pool is not None:
                log.error("model %s failed and is opened anew", self.name)
                await self._close_pool()
            self.pool = await self._open_anew(self._opens)

    async def _open_anew(self, opens: Callable[[], SessionPool]) -> SessionPool:
        try:
            while True:
                try:
                    return await asyncio.to_thread(opens)
                except OutOfMemoryError:  # noqa: PERF203  (each turn is another try)
                    if not await self._make_room(self):
                        raise
        except Exception as error:  # the operator's fault, never the caller's
            log.exception("model %s cannot be opened", self.name)
            raise ApiError(
                503,
                f"model {self.name!r} cannot be opened; the log says why",
                "server_error",
                code="not_loaded",
                headers={"Retry-After": "5"},
            ) from error

    async def unload_when_idle(self, seconds: float) -> None:
        """Close a pool that nobody has used for ``seconds`` and that can be opened again."""
        async with self._opening:
            idle = time.monotonic() - self._last_use
            if not self.can_unload or idle < seconds:
                return
            await self._close_pool()

    @property
    def can_unload(self) -> bool:
        """Whether nobody uses the pool and it can be opened again."""
        return self._opens is not None and self.pool is not None and not self.n_active

    @property
    def last_use(self) -> float:
        """When the pool was last used, on the monotonic clock."""
        return self._last_use

    async def _close_pool(self) -> None:
        pool, self.pool = self.pool, None  # first: who asks meanwhile opens another one
        self.token_bytes, self.control = {}, set()
        await self.warm.close()
        if pool is not None:
            await pool.aclose()

    async def close(self) -> None:
        """Close the sessions, and the pool where this server opened it."""
        if self._loading is not None:
            await asyncio.gather(self._loading, return_exceptions=True)
        await self.warm.close()
        if self._opens is not None:
            await self._close_pool()


class Models:
    """All models of a server, by the names that requests use.

    ``pools`` maps names to pools, which stay the caller's, or to callables that open one when it
    is first asked for. Raises `InvalidInputError` for anything else.
    """

    def __init__(self, pools: Any, *, n_warm: int) -> None:
        named: Mapping[str, Any] = pools if hasattr(pools, "items") else {_name_of(pools): pools}
        if not named:
            raise InvalidInputError(
                "a server needs at least one pool", field="pools", value=pools, allowed="pools"
            )
        self.by_name: dict[str, Served] = {}
        for name, pool in named.items():
            served = _served(name, pool, self._make_room)
            served.warm = Warm(n_warm)
            self.by_name[name] = served

    async def _make_room(self, wanted: Served) -> bool:
        """Unload the model that was idle longest; False where all others are in use."""
        idle = [each for each in self.by_name.values() if each is not wanted and each.can_unload]
        if not idle:
            return False
        oldest = min(idle, key=lambda each: each.last_use)
        log.warning("memory is short: model %s is unloaded for %s", oldest.name, wanted.name)
        await oldest.unload_when_idle(0)
        return True

    def kill(self) -> None:
        """End the processes of engines that still run, without waiting for what they do."""
        for served in self.by_name.values():
            process = getattr(served.pool, "process", None)
            if process is not None:  # in a thread, as it may be in the midst of a start
                close = partial(process.close, wait=False)
                threading.Thread(target=close, name="infercore-kill", daemon=True).start()

    def get(self, name: str) -> Served:
        """Return the model that a request names. Raises an `ApiError` of status 404."""
        if name not in self.by_name:
            known = ", ".join(self.by_name)
            raise ApiError(
                404,
                f"model {name!r} does not exist here; there is {known}",
                param="model",
                code="model_not_found",
            )
        return self.by_name[name]


def _served(name: object, pool: Any, make_room: Callable[[Served], Awaitable[bool]]) -> Served:
    if not isinstance(name, str) or not name:
        raise InvalidInputError(
            "names of models are strings that are not empty",
            field="pools",
            value=name,
            allowed="a str",
        )
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise InvalidInputError(
            f"the model name {name!r} cannot be written as UTF-8; give it another name",
            field="pools",
            value=name,
            allowed="a str that UTF-8 can hold",
        ) from error
    if hasattr(pool, "aopen_session"):
        return Served(name, pool=pool, opens=None, make_room=make_room)
    if callable(pool):
        return Served(name, pool=None, opens=pool, make_room=make_room)
    raise InvalidInputError(
        f"{name!r} is neither a SessionPool nor a callable that opens one",
        field="pools",
        value=pool,
        allowed="a SessionPool",
    )


def _name_of(pool: Any) -> str:
    """Return the name of a pool that comes without one: what its files call the model."""
    info = getattr(pool, "info", None)
    metadata = getattr(info, "metadata", None) or {}
    name = metadata.get("general.name") or getattr(info, "architecture", None)
    return str(name) if name else "model"
