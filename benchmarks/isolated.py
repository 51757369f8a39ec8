"""Measure what a process of its own costs a token: python benchmarks/isolated.py MODEL.

Reads the same greedy text from a pool in this process and from an isolated one, in turn, and
prints the milliseconds a token of each (the best of its rounds), the difference, the median of
the rounds' differences, and the cost of a question that does nothing. With ``--sessions N`` so
many streams are read at once, in threads.
"""

from __future__ import annotations

import argparse
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import infercore as ic

PROMPT = "Once upon a time there was a baker named Mira."


def read(session: Any, n_tokens: int) -> int:
    """Return how many tokens a stream gave."""
    stream = session.decode(max_tokens=n_tokens, temperature=0, ignore_eos=True)
    return sum(len(chunk.tokens) for chunk in stream)


def token_ms(pool: Any, n_tokens: int, n_sessions: int) -> float:
    """Return the milliseconds a token, of all streams together."""
    sessions = [pool.open_session() for _ in range(n_sessions)]
    for session in sessions:
        session.ensure_prefix(PROMPT)
    with ThreadPoolExecutor(n_sessions) as threads:
        started = time.perf_counter()
        n_read = sum(threads.map(lambda session: read(session, n_tokens), sessions))
        elapsed = time.perf_counter() - started
    for session in sessions:
        session.close()
    return elapsed / n_read * 1e3


def question_ms(pool: Any, n: int = 1000) -> float:
    """Return the milliseconds of a question that the process answers at once."""
    token = pool.tokenizer.encode("a")[-1]
    started = time.perf_counter()
    for _ in range(n):
        pool.tokenizer.is_eog(token)
    return (time.perf_counter() - started) / n * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--sessions", type=int, default=1)
    parser.add_argument("--threads", type=int, default=None)
    options = parser.parse_args()
    fields: dict[str, Any] = {"n_ctx": options.tokens + 64, "n_parallel": options.sessions}
    if options.threads is not None:
        fields |= {"n_threads": options.threads, "n_threads_batch": options.threads}
    here, there = [], []
    with (
        ic.open_pool(options.model, **fields) as plain,
        ic.open_pool(options.model, isolate=True, **fields) as isolated,
    ):
        for _ in range(options.rounds):
            here.append(token_ms(plain, options.tokens, options.sessions))
            there.append(token_ms(isolated, options.tokens, options.sessions))
        asked = question_ms(isolated)
    print(f"in this process: {min(here):.3f} ms a token; isolated: {min(there):.3f} ms")
    middle = statistics.median(b - a for a, b in zip(here, there, strict=True))
    print(
        f"added: {min(there) - min(here):.3f} ms a token (median of rounds {middle:.3f}); "
        f"a question: {asked:.3f} ms"
    )


if __name__ == "__main__":
    main()
