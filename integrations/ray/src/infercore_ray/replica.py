"""A replica of a model: one pool in a process of Ray's, asked by frames."""

from __future__ import annotations

import asyncio
import io
import os
import threading
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import attrs
import ray
from ray import serve

import infercore
from infercore.isolated import wire
from infercore.isolated.worker import AT_ONCE, N_THREADS, Worker
from infercore_ray.blocks import BLOCK_TOKENS, blocks_held
from infercore_ray.scaling import WAITING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from infercore.session.pool import SessionPool
    from infercore_ray.routing import Route

IDLE_S = 600.0
"""Seconds after which a session that nobody asks about is closed; its owner can bring it again."""
_LOOK_S = 30.0
GONE = b""
"""Answers a call of a session that this replica does not have."""
_MOST_PROGRAMS = 256


@attrs.define
class _Asked:
    """What one program has asked of this replica: its calls are numbered by itself."""

    n_working: int = 0
    last: int = 0
    running: dict[int, tuple[bytes, ...]] = attrs.field(factory=dict)  # and the blocks they need


@attrs.define
class _Used:
    """Who has a session, how many calls of it run, and when the last one began or ended."""

    origin: str
    n_calls: int = 0
    last: float = 0.0


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
        self._facts = {**self._worker.hold(self._pool), "config": self._pool.config}
        self._threads = ThreadPoolExecutor(N_THREADS, thread_name_prefix="infercore-call")
        self._name = name or serve.get_replica_context().replica_id.unique_id
        self._idle_s = idle_s
        self._lock = threading.Lock()
        self._used: dict[int, _Used] = {}
        self._asked: OrderedDict[str, _Asked] = OrderedDict()
        self._held: frozenset[bytes] = frozenset()
        self._n_reports = 0
        self._ended = threading.Event()
        threading.Thread(target=self._look_after, name="infercore-idle", daemon=True).start()

    # -- calls ---------------------------------------------------------------------------------

    async def call(self, route: Route, frame: bytes) -> tuple[str, bytes]:
        """Return this replica's name, and the answer to a frame; `GONE` where it is not here."""
        asked = self._asked_by(route.origin)  # in the loop's thread, as all of this method
        asked.last = max(asked.last, route.number)
        asked.running[route.number] = route.blocks if route.works else ()
        asked.n_working += route.works
        try:
            return await self._call(frame, route.origin)
        finally:
            del asked.running[route.number]
            asked.n_working -= route.works

    def _asked_by(self, origin: str) -> _Asked:
        asked = self._asked.setdefault(origin, _Asked())
        self._asked.move_to_end(origin)
        if len(self._asked) > _MOST_PROGRAMS:
            idle = next((name for name, each in self._asked.items() if not each.running), origin)
            if idle != origin:
                del self._asked[idle]
        return asked

    async def _call(self, frame: bytes, origin: str = "") -> tuple[str, bytes]:
        request = wire.read(io.BytesIO(frame).read)
        if request[1] in AT_ONCE:
            return self._name, self._answer(origin, *request)
        loop = asyncio.get_running_loop()
        return self._name, await loop.run_in_executor(self._threads, self._answer, origin, *request)

    async def ask(self, frame: bytes) -> tuple[str, bytes]:
        """Answer a frame that each replica is asked."""
        return await self._call(frame)

    def _answer(
        self, origin: str, target: int, name: str, args: list[Any], fields: dict[str, Any]
    ) -> bytes:
        if name == "facts":
            return wire.pack((True, self._facts, None), loose=True)
        concerns = {target, args[0]} if name in {"open_session", "fork"} else {target}
        self._count(
            origin, concerns, 1
        )  # before it is looked for: it is not closed as idle meanwhile
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
            self._count(origin, concerns, -1)

    # -- sessions that were left ---------------------------------------------------------------

    def _count(self, origin: str, targets: set[int], change: int) -> None:
        """Count calls of sessions; close those whose program left while a call of theirs ran."""
        now, left = time.monotonic(), []
        with self._lock:
            for target in targets - {0}:
                if change < 0 and target not in self._used:
                    left.append(target)
                    continue
                used = self._used.setdefault(target, _Used(origin))
                used.n_calls = max(0, used.n_calls + change)
                used.last = now
        self._close(left)

    def _look_after(self) -> None:
        """Look from time to time."""
        while not self._ended.wait(min(_LOOK_S, self._idle_s)):
            self.close_idle()

    def close_idle(self) -> None:
        """Close what nobody has asked about for long: its program may be gone."""
        now = time.monotonic()
        self._close_those(lambda used: not used.n_calls and now - used.last > self._idle_s)

    async def leave(self, origin: str) -> None:
        """Close what a program has here, and end what runs for it."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(
            self._threads, self._close_those, lambda used: used.origin == origin
        )

    def _close_those(self, is_left: Callable[[_Used], bool]) -> None:
        with self._lock:
            left = [target for target, used in self._used.items() if is_left(used)]
            for target in left:
                del self._used[target]
        self._close(left)

    def _close(self, targets: list[int]) -> None:
        for target in targets:
            if self._worker.holds(target):
                self._worker.answer(target, "close", [], {})

    # -- what Serve asks -----------------------------------------------------------------------

    async def record_routing_stats(self) -> dict[str, Any]:
        """Return what the router goes by: the blocks that are held, and what runs for whom.

        ``asked`` is of each program the calls that are work, the number of the last call, and the
        numbers of those that run: what has ended by then is in ``held``.
        """
        self._n_reports += 1
        asked = {
            origin: (each.n_working, each.last, tuple(each.running))
            for origin, each in list(self._asked.items())
        }
        loop = asyncio.get_running_loop()
        held = await loop.run_in_executor(self._threads, self._look)  # it waits for a step
        self._held = frozenset(held)
        return {"number": self._n_reports, "held": tuple(held), "asked": asked}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return what Serve scales by beside calls: prompt tokens that wait, in whole blocks."""
        wanted = (blocks for asked in self._asked.values() for blocks in asked.running.values())
        return {WAITING: BLOCK_TOKENS * sum(len(set(blocks) - self._held) for blocks in wanted)}

    def _look(self) -> list[bytes]:
        return blocks_held(self._pool.held())

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
