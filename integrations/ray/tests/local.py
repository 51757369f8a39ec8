"""Replicas in this process, behind what has the face of a Serve handle: the same code, no Ray.

Requests are routed by `PrefixRouting` as the router does it. A replica that is killed answers
nothing that was asked of it, as one that Ray lost.
"""

from __future__ import annotations

import asyncio
import random
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from ray.exceptions import ActorDiedError

from infercore_ray.replica import Replica
from infercore_ray.routing import PrefixRouting

if TYPE_CHECKING:
    from infercore_ray.routing import Route


class LocalReplicas:
    """A handle of several replicas that live here."""

    def __init__(self, path: str, n: int, **fields: Any) -> None:
        self._path, self._fields = path, fields
        self._loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self._routing = PrefixRouting()
        self._waiting: dict[str, set[Future[Any]]] = {}
        self._numbers = iter(range(1_000_000))
        self.replicas: dict[str, Replica] = {}
        self.routed: list[tuple[str, Route]] = []
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        with ThreadPoolExecutor(n) as threads:
            list(threads.map(lambda _: self.start(), range(n)))

    def start(self) -> str:
        """Start a replica."""
        with self._lock:
            name = f"r{next(self._numbers)}"
        replica = Replica(self._path, self._fields, name=name)
        with self._lock:
            self.replicas[name] = replica
            self._waiting[name] = set()
        return name

    def kill(self, name: str) -> None:
        """End a replica: who waits for it gets Ray's error."""
        with self._lock:
            replica = self.replicas.pop(name)
            waiting = self._waiting.pop(name)
        for future in waiting:
            if not future.done():
                future.set_exception(ActorDiedError())
        threading.Thread(target=replica.__del__, daemon=True).start()

    def report(self) -> None:
        """Let the router know what the replicas hold."""
        for name, replica in list(self.replicas.items()):
            report = asyncio.run_coroutine_threadsafe(replica.record_routing_stats(), self._loop)
            self._routing.report(name, report.result()["held"], 0, lambda _: True)

    def close(self) -> None:
        """End all."""
        for name in list(self.replicas):
            self.replicas.pop(name).__del__()
        self._loop.call_soon_threadsafe(self._loop.stop)

    # -- as a handle ---------------------------------------------------------------------------

    def options(self, **_: Any) -> LocalReplicas:
        return self

    def remote(self, route: Route, frame: bytes) -> Any:
        with self._lock:
            self._routing.keep(self.replicas)
            if route.at in self.replicas and not route.begins:
                name = route.at
            else:
                ranked = self._routing.choose(route.blocks, at=route.at)
                name = ranked[0] if ranked else random.choice(list(self.replicas))
            replica = self.replicas[name]
            answer: Future[Any] = Future()
            self._waiting[name].add(answer)
            self.routed.append((name, route))
            if route.works:
                self._routing.sent(name, route.blocks)
            else:
                self._routing.holds(name, route.blocks)
        work = asyncio.run_coroutine_threadsafe(replica.call(route, frame), self._loop)

        def done(work: Any) -> None:
            with self._lock:
                self._waiting.get(name, set()).discard(answer)
                if route.works:
                    self._routing.ended(name)
            if answer.done():
                return
            if work.exception() is not None:
                answer.set_exception(work.exception())
            else:
                answer.set_result(work.result())

        work.add_done_callback(done)
        return Response(answer)

    def broadcast(self, name: str, given: Any) -> Any:
        every = [
            asyncio.run_coroutine_threadsafe(getattr(replica, name)(given), self._loop)
            for replica in self.replicas.values()
        ]
        return _Responses(every)


class Response:
    def __init__(self, answer: Future[Any]) -> None:
        self._answer = answer

    def result(self, timeout_s: float | None = None) -> Any:
        return self._answer.result(timeout_s)


class _Responses:
    def __init__(self, answers: list[Any]) -> None:
        self._answers = answers

    def results(self, *, timeout_s: float | None, return_exceptions: bool) -> list[Any]:
        del timeout_s, return_exceptions
        return [answer.result() for answer in self._answers]
