"""A replica of a model: one pool in a process of Ray's, asked by frames."""

from __future__ import annotations

import asyncio
import io
import os
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import ray
from ray import serve

import infercore
from infercore.isolated import wire
from infercore.isolated.worker import AT_ONCE, N_THREADS, Worker
from infercore_ray.blocks import blocks_held

if TYPE_CHECKING:
    from collections.abc import Mapping

    from infercore.session.pool import SessionPool
    from infercore_ray.router import Route

IDLE_S = 600.0
"""Seconds after which a session that nobody asks about is closed; its owner can bring it again."""
_LOOK_S = 30.0
GONE = b""
"""Answers a call of a session that this replica does not have."""


class Replica:
    """Answers the calls of sessions that live here; each comes as a frame."""

    def __init__(
        self,
        path: str,
        fields: Mapping[str, Any],
        *,
        name: str | None = None,
        idle_s: float = IDLE_S,
    ) -> None:
        self._pool: SessionPool = infercore.open_pool(path, **fields)
        self._worker = Worker()
        self._facts = self._worker.hold(self._pool)
        self._threads = ThreadPoolExecutor(N_THREADS, thread_name_prefix="infercore-call")
        self._name = name or serve.get_replica_context().replica_id.unique_id
        self._idle_s = idle_s
        self._lock = threading.Lock()
        self._used: dict[int, list[float]] = {}  # of sessions: [calls that run, last use]
        self._loads: Counter[str] = Counter()  # calls that are work now, by who asked
        self._n_reports = 0
        self._ended = threading.Event()
        threading.Thread(target=self._look_after, name="infercore-idle", daemon=True).start()

    # -- calls ---------------------------------------------------------------------------------

    async def call(self, route: Route | None, frame: bytes) -> tuple[str, bytes]:
        """Return this replica's name, and the answer to a frame; `GONE` where it is not here."""
        if route is None or not route.works:
            return await self._call(frame)
        self._loads[route.origin] += 1  # in the loop's thread, as all of this method
        try:
            return await self._call(frame)
        finally:
            self._loads[route.origin] -= 1
            if not self._loads[route.origin]:
                del self._loads[route.origin]

    async def _call(self, frame: bytes) -> tuple[str, bytes]:
        target, name, args, fields = wire.read(io.BytesIO(frame).read)
        if name in AT_ONCE:
            return self._name, self._answer(target, name, args, fields)
        loop = asyncio.get_running_loop()
        answer = await loop.run_in_executor(self._threads, self._answer, target, name, args, fields)
        return self._name, answer

    async def ask(self, frame: bytes) -> tuple[str, bytes]:
        """Answer a frame that each replica is asked."""
        return await self.call(None, frame)

    def _answer(self, target: int, name: str, args: list[Any], fields: dict[str, Any]) -> bytes:
        if name == "facts":
            return wire.pack((True, self._facts, None), loose=True)
        concerns = {target, args[0]} if name in {"open_session", "fork"} else {target}
        self._count(concerns, 1)  # before it is looked for: it is not closed as idle meanwhile
        try:
            if target and not self._worker.holds(target):
                return GONE
            if name == "tokens_of":
                found = _tokens_of(self._pool.tokenizer, *args)
                return wire.pack((True, found, None), loose=True)
            answer = self._worker.answer(target, name, args, fields)
            is_gone = self._ended.is_set() or (target and not self._worker.holds(target))
            if not answer[0] and is_gone:  # its session goes on elsewhere
                return GONE
            return wire.pack(answer, loose=True)
        finally:
            self._count(concerns, -1)

    # -- sessions that were left ---------------------------------------------------------------

    def _count(self, targets: set[int], change: int) -> None:
        now = time.monotonic()
        with self._lock:
            for target in targets - {0}:
                used = self._used.setdefault(target, [0, now])
                used[0] += change
                used[1] = now

    def _look_after(self) -> None:
        """Look from time to time."""
        while not self._ended.wait(min(_LOOK_S, self._idle_s)):
            self.close_idle()

    def close_idle(self) -> None:
        """Close what nobody has asked about for long: its program may be gone."""
        now = time.monotonic()
        with self._lock:
            old = [
                target
                for target, (n_calls, last) in self._used.items()
                if not n_calls and now - last > self._idle_s
            ]
            for target in old:
                del self._used[target]
        for target in old:
            if self._worker.holds(target):
                self._worker.answer(target, "close", [], {})

    # -- what Serve asks -----------------------------------------------------------------------

    def record_routing_stats(self) -> dict[str, Any]:
        """Return what the router goes by: the blocks that are held, and what runs for whom."""
        self._n_reports += 1
        held = blocks_held(self._pool.held())
        return {"number": self._n_reports, "held": tuple(held), "load": dict(self._loads)}

    def where(self) -> tuple[str, int, str]:
        """Return this replica's name, its process and its node."""
        return self._name, os.getpid(), ray.get_runtime_context().get_node_id()

    def check_health(self) -> None:
        """Raise where the pool has ended: Serve starts another replica."""
        if self._pool.failure is not None:
            raise self._pool.failure

    def __del__(self) -> None:
        self._ended.set()
        self._pool.close()


def _tokens_of(tokenizer: Any, name: str, args: list[Any], fields: dict[str, Any]) -> list[int]:
    """Return the tokens that a call will begin with, as far as that is known before it."""
    given = args[0] if args else ""
    if name == "chat":
        given = tokenizer.apply_chat_template(given, tools=fields.get("tools"))
        tokens = list(tokenizer.encode(given, add_special=False))
        begins = tokenizer.add_bos and tokenizer.bos is not None and tokens[:1] != [tokenizer.bos]
        return [tokenizer.bos, *tokens] if begins else tokens
    given = getattr(given, "text", given)
    if isinstance(given, str):
        return list(tokenizer.encode(given, add_special=tokenizer.add_bos))
    return list(given)
