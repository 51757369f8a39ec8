"""Measure what a process of its own costs a token: python benchmarks/isolated.py MODEL.

Reads greedy texts from a pool in this process and from an isolated one, in short blocks that take
turns, so that what slows the machine for a while slows both. Prints the milliseconds of a step of
each (a token of every session), the median of the differences of the pairs with the interval that
holds it in 95 of 100 draws, the processor time that the reading thread takes a token, and the cost
of a question that does nothing. With ``--sessions N`` so many streams are read, in threads.
"""

from __future__ import annotations

import argparse
import random
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import infercore as ic

PROMPT = "Once upon a time there was a baker named Mira."
N_CTX = 1024
N_AHEAD = 4
"""Tokens of a block that do not count: a pool is at most so far ahead of its readers."""


class Readers:
    """Threads that read a stream each, of one pool."""

    def __init__(self, pool: Any, n: int, n_tokens: int) -> None:
        self._pool = pool
        self._n_tokens = n_tokens
        self._streams: list[Any] = []
        self._n_left = 0
        self._sessions: list[Any] = []
        self._threads = ThreadPoolExecutor(n)
        self._together = threading.Barrier(n)
        self._n = n

    def _begin(self) -> None:
        for session in self._sessions:
            session.close()
        self._sessions = [self._pool.open_session() for _ in range(self._n)]
        for session in self._sessions:
            session.ensure_prefix(PROMPT)
        fields: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "max_tokens": N_CTX // 2}
        self._streams = [session.decode(**fields) for session in self._sessions]
        self._n_left = N_CTX // 2 - 1

    def _read(self, stream: Any) -> tuple[float, float, float]:
        for _ in range(N_AHEAD):
            next(stream)
        self._together.wait()
        of_thread, begun = time.thread_time(), time.perf_counter()
        for _ in range(self._n_tokens):
            next(stream)
        return begun, time.perf_counter(), time.thread_time() - of_thread

    def block(self) -> tuple[float, float]:
        """Return the milliseconds a step, and of a reading thread a token."""
        if self._n_left < N_AHEAD + self._n_tokens:
            self._begin()
        self._n_left -= N_AHEAD + self._n_tokens
        found = list(self._threads.map(self._read, self._streams))
        elapsed = max(end for _, end, _ in found) - min(begun for begun, _, _ in found)
        of_threads = statistics.mean(seconds for *_, seconds in found)
        return elapsed / self._n_tokens * 1e3, of_threads / self._n_tokens * 1e3

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown()


def question_ms(pool: Any, n: int = 200) -> float:
    """Return the milliseconds of a question that the process answers at once."""
    token = pool.tokenizer.encode("a")[-1]
    started = time.perf_counter()
    for _ in range(n):
        pool.tokenizer.is_eog(token)
    return (time.perf_counter() - started) / n * 1e3


def interval(values: list[float], n: int = 2000) -> tuple[float, float]:
    """Return what holds the median in 95 of 100 draws of as many of ``values``."""
    draw = random.Random(0)
    found = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(n))
    return found[n // 40], found[-n // 40]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=8, help="of a block")
    parser.add_argument("--pairs", type=int, default=200, help="of blocks")
    parser.add_argument("--seconds", type=float, default=100, help="after which no pair begins")
    parser.add_argument("--sessions", type=int, default=1)
    parser.add_argument("--threads", type=int, default=None)
    options = parser.parse_args()
    n = options.sessions
    fields: dict[str, Any] = {"n_ctx": N_CTX, "n_parallel": n, "batching": "always"}
    if options.threads is not None:
        fields |= {"n_threads": options.threads, "n_threads_batch": options.threads}
    with (
        ic.open_pool(options.model, **fields) as plain,
        ic.open_pool(options.model, isolate=True, **fields) as isolated,
    ):
        both = [Readers(pool, n, options.tokens) for pool in (plain, isolated)]
        found: list[list[tuple[float, float]]] = [[], []]
        for readers in both:
            readers.block()
        until = time.monotonic() + options.seconds
        while len(found[0]) < options.pairs and time.monotonic() < until:
            for which in (0, 1) if len(found[0]) % 2 else (1, 0):
                found[which].append(both[which].block())
        asked = question_ms(isolated)
        for readers in both:
            readers.close()
    here, there = ([statistics.median(x) for x in zip(*each, strict=True)] for each in found)
    added = [b[0] - a[0] for a, b in zip(*found, strict=True)]
    low, high = interval(added)
    print(f"a step in this process: {here[0]:.3f} ms; isolated: {there[0]:.3f} ms")
    print(
        f"added a step: {statistics.median(added):.3f} ms ({low:.3f} to {high:.3f}, median of "
        f"{len(added)} pairs), a token {statistics.median(added) / n:.3f} ms"
    )
    print(
        f"a reading thread, a token: {here[1]:.3f} and {there[1]:.3f} ms of processor time; "
        f"a question: {asked:.3f} ms"
    )


if __name__ == "__main__":
    main()
