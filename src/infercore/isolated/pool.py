"""A pool of sessions whose engine lives in another process."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs

from infercore.errors import SessionClosedError, SessionFatalError
from infercore.isolated.session import IsolatedSession
from infercore.isolated.tokenizer import IsolatedTokenizer
from infercore.session.admission import n_admitted
from infercore.session.asynchronous import AsyncSession, Opening, shared_threads
from infercore.session.base import SessionOptions
from infercore.values import checks
from infercore.values.pool import PoolStats

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from typing_extensions import Self

    from infercore.isolated.places import Engines
    from infercore.protocols.spi import FloatArray
    from infercore.values.info import Capabilities, ModelInfo
    from infercore.values.pool import PoolConfig

_LOOK_SECONDS = 0.005
_NOW = ("n_open", "n_running", "n_waiting", "n_cells_used", "n_cells_shared")
"""What a pool is doing, among its statistics."""


class IsolatedPool:
    """The face of a `SessionPool` whose model and sessions live in other processes.

    ``model`` is None. A process that dies or hangs is started anew, and every session goes on from
    its tokens, at most ``config.max_restarts`` times in ``config.restart_window`` seconds; then
    every call raises `SessionFatalError` with the first cause.
    """

    model = None

    def __init__(self, process: Engines, config: PoolConfig) -> None:
        self.config = config
        self.process = process
        facts = self.process.facts
        self.info: ModelInfo = facts["info"]
        self.capabilities: Capabilities = facts["capabilities"]
        self.effective: Mapping[str, Any] = facts["effective"]
        self.tokenizer = IsolatedTokenizer(facts["tokenizer"], self.process.ask)
        self._targets = itertools.count(1)
        self._lock = threading.Lock()
        self._n_users = 0
        self._sessions: weakref.WeakSet[IsolatedSession] = weakref.WeakSet()
        self._draining = False
        self._waiters: ThreadPoolExecutor | None = None
        self._stats = PoolStats()  # as the process told last

    def _of_pool(self, name: str, *args: Any, **fields: Any) -> Any:
        self.check_open()
        return self.process.ask("of_pool", name, list(args), fields)

    # -- for its sessions ----------------------------------------------------------------------

    @property
    def owner(self) -> IsolatedPool:
        """Who has the threads in which calls of tasks wait."""
        return self

    def waiters(self) -> ThreadPoolExecutor:
        """Return the threads in which the calls of tasks wait."""
        if self.closed:  # a stream may still be closed
            return shared_threads()
        with self._lock:
            if self._waiters is None:
                n_parallel = int(self.effective.get("n_parallel", 1))
                n = n_admitted(n_parallel, self.config.max_waiting) + 2  # as in a pool
                self._waiters = ThreadPoolExecutor(n, thread_name_prefix="infercore-waiter")
            return self._waiters

    def new_target(self) -> int:
        """Return a number for a session."""
        return next(self._targets)

    def take_in(self, session: IsolatedSession) -> None:
        """Count a session that was opened, and know it."""
        with self._lock:
            self._n_users += 1
            self._sessions.add(session)

    def _is_interrupted(self) -> bool:
        with self._lock:
            sessions = list(self._sessions)
        return any(session.is_interrupted for session in sessions)

    def leave(self) -> bool:
        """Count a session that was closed; True where none is open any more."""
        with self._lock:
            self._n_users -= 1
            return self._n_users == 0

    def check_open(self) -> None:
        """Raise where no call may begin any more."""
        if self._draining or self.closed:
            raise SessionClosedError("this pool is closed; open a new one")
        self.process.check()

    # -- the face of a pool --------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self.process.closed

    @property
    def failure(self) -> SessionFatalError | None:
        """What ended the pool for good; None while it works. Close a pool that failed."""
        return self.process.fatal

    def stats(self) -> PoolStats:
        """Return what the pool does, and did in all its processes; it never waits for a step.

        Where the process does not answer at once, what it does now is what it told last. A closed
        pool does nothing any more.
        """
        process = self.process
        self._stats = process.stats() or self._stats
        counts: dict[str, Any] = dict(process.counts)
        if counts:  # a process that was started anew knows only who came back
            counts["n_open"] = self._n_users
        n_batched = counts.pop("n_batched", 0)
        if counts.get("n_steps"):
            counts["mean_batch"] = n_batched / counts["n_steps"]
        n_restarts = counts.pop("n_restarts", 0) + process.n_restarts
        if self.closed:
            counts |= dict.fromkeys(_NOW, 0)
        return attrs.evolve(self._stats, **counts, n_restarts=n_restarts)

    def open_session(self, *, namespace: str = "", **options: Any) -> IsolatedSession:
        """Return a session of this pool; see `SessionPool.open_session`."""
        return self._open(namespace, options)

    def open_only_session(self, options: Mapping[str, Any]) -> IsolatedSession:
        """Return a session that ends the pool with itself and its forks."""
        return self._open("", options, owns_pool=True)

    def _open(
        self, namespace: str, options: Mapping[str, Any], *, owns_pool: bool = False
    ) -> IsolatedSession:
        checks.check_text("namespace", namespace)
        built = checks.build(SessionOptions, None, options)
        self.check_open()
        given = {"namespace": namespace, **attrs.asdict(built)}
        return IsolatedSession(self, self.new_target(), given, owns_pool=owns_pool)

    def aopen_session(self, *, namespace: str = "", **options: Any) -> Opening[AsyncSession]:
        """Return an `AsyncSession` of this pool; see `SessionPool.aopen_session`."""
        work = partial(self.open_session, namespace=namespace, **options)
        return Opening(work, AsyncSession)

    def embed(
        self, texts: Sequence[str], *, pooling: str | None = None, normalize: bool = True
    ) -> FloatArray:
        """Return one vector for each of ``texts``; see `SessionPool.embed`."""
        listed = list(checks.items("texts", texts, "a sequence of texts"))
        vectors: FloatArray = self._of_pool("embed", listed, pooling=pooling, normalize=normalize)
        return vectors

    async def aembed(
        self, texts: Sequence[str], *, pooling: str | None = None, normalize: bool = True
    ) -> FloatArray:
        """See `embed`."""
        return await asyncio.to_thread(self.embed, texts, pooling=pooling, normalize=normalize)

    def rerank(
        self, query: str, documents: Sequence[str], *, top_n: int | None = None
    ) -> list[tuple[int, float]]:
        """Return place and score of each of ``documents``; see `SessionPool.rerank`."""
        listed = list(checks.items("documents", documents, "a sequence of texts"))
        ranked: list[tuple[int, float]] = self._of_pool("rerank", query, listed, top_n=top_n)
        return ranked

    async def arerank(
        self, query: str, documents: Sequence[str], *, top_n: int | None = None
    ) -> list[tuple[int, float]]:
        """See `rerank`."""
        return await asyncio.to_thread(self.rerank, query, documents, top_n=top_n)

    def flush_cache(self, namespace: str | None = None) -> None:
        """Forget what is kept of sequences that lost their cells; see `SessionPool.flush_cache`."""
        if namespace is not None:
            checks.check_text("namespace", namespace)
        self.process.flush(namespace)

    # -- ends ----------------------------------------------------------------------------------

    def drain(self, timeout: float | None = None) -> bool:
        """Let the calls that have begun end, and no new one begin; see `SessionPool.drain`."""
        checks.check_wait("timeout", timeout)
        if self.closed:
            return True
        self._draining = True
        until = None if timeout is None else time.monotonic() + timeout
        ended: bool | None = None
        while ended is None:
            rest = None if until is None else max(0.0, until - time.monotonic())
            if rest != 0 and self._is_interrupted():
                time.sleep(_LOOK_SECONDS)  # a process that drains would not let them in
            else:
                try:
                    ended = self.process.drain(rest)
                except SessionFatalError:  # which has ended every call
                    ended = True
        return ended

    def close(self) -> None:
        """End everything; idempotent. Running calls are cancelled."""
        self._draining = True
        self.process.close()
        with self._lock:
            waiters, self._waiters = self._waiters, None
        if waiters is not None:
            waiters.shutdown(wait=False)

    async def adrain(self, timeout: float | None = None) -> bool:
        """See `drain`."""
        return await asyncio.to_thread(self.drain, timeout)

    async def aclose(self) -> None:
        """See `close`."""
        await asyncio.to_thread(self.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
