"""Sessions of a pool: tokens a second of all together over one alone, A B A B.

``python benchmarks/pool.py MODEL...`` prints for each model: the ratio with a batch, "auto" for a
few sessions over taking turns, the first token of a second session on a resident prefix over a
cold one, and moved out and back over evaluating. Each is the median of ratios of neighbouring
measurements, in one process.
"""

from __future__ import annotations

import argparse
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import infercore as ic

if TYPE_CHECKING:
    from collections.abc import Callable

WORDS = "the baker near the stone bridge sells bread to everyone who walks by in the morning "


def texts(n: int) -> list[str]:
    """Return ``n`` prompts that begin differently."""
    return [f"{i} {WORDS}" for i in range(n)]


def rate(pool: ic.SessionPool, n_sessions: int, n_tokens: int) -> float:
    """Return tokens a second of ``n_sessions`` that generate at once, prompts evaluated before."""
    sessions = [pool.open_session() for _ in range(n_sessions)]
    for session, text in zip(sessions, texts(n_sessions), strict=True):
        session.ensure_prefix(text)

    def work(session: Any) -> None:
        for _ in session.decode(max_tokens=n_tokens, temperature=0, ignore_eos=True):
            pass

    with ThreadPoolExecutor(n_sessions) as threads:
        begun = time.perf_counter()
        list(threads.map(work, sessions))
        elapsed = time.perf_counter() - begun
    for session in sessions:
        session.close()
    return n_sessions * n_tokens / elapsed


def ratio(n_pairs: int, a: Callable[[], float], b: Callable[[], float]) -> tuple[float, str]:
    """Return the median of ``a() / b()`` over neighbouring calls, and the span of the ratios."""
    a(), b()
    found = [a() / b() for _ in range(n_pairs)]
    return statistics.median(found), f"{min(found):.2f} to {max(found):.2f}"


def first_token(pool: ic.SessionPool, text: str, namespace: str) -> float:
    """Return the seconds to a session's first token after ``text``."""
    with pool.open_session(namespace=namespace) as session:
        begun = time.perf_counter()
        session.ensure_prefix(text)
        next(session.decode(max_tokens=1, temperature=0, ignore_eos=True))
        return time.perf_counter() - begun


def warm(model: ic.Model, n_prefix: int, n_pairs: int) -> tuple[float, str]:
    """Return first token on a resident prefix over a cold one."""
    text = WORDS * (n_prefix // 16)
    with model.new_pool(n_ctx=n_prefix + 256, n_cells=2 * n_prefix + 512, n_parallel=2) as pool:
        holder = pool.open_session(namespace="shared")
        holder.ensure_prefix(text)
        colds = iter(range(10**6))
        return ratio(
            n_pairs,
            lambda: first_token(pool, text, "shared"),
            lambda: first_token(pool, text, f"cold {next(colds)}"),
        )


def moved(model: ic.Model, n_prefix: int, n_pairs: int) -> tuple[float, str]:
    """Return moved out to memory and back over evaluating."""
    text = WORDS * (n_prefix // 16)
    fields = {"n_ctx": n_prefix + 256, "n_cells": n_prefix + 320, "n_parallel": 2}
    with model.new_pool(cache_bytes=2**31, **fields) as pool:
        sessions = [pool.open_session(namespace=str(i)) for i in range(2)]
        for session in sessions:
            session.ensure_prefix(text)
        turn = iter(range(10**6))

        def back() -> float:
            session = sessions[next(turn) % 2]  # the other one has the cells
            begun = time.perf_counter()
            session.prefill_suffix(" now")
            return time.perf_counter() - begun

        colds = iter(range(10**6))
        with model.new_pool(**fields) as plain:
            return ratio(n_pairs, back, lambda: first_token(plain, text, f"cold {next(colds)}"))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--few", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--prefix", type=int, default=512)
    parser.add_argument("--threads", type=int, default=2)
    asked = parser.parse_args()
    for path in asked.models:
        with ic.load_model(path) as model:
            print(path)
            fields = {"n_ctx": 512, "n_parallel": asked.sessions, "n_threads": asked.threads}
            with model.new_pool(batching="always", **fields) as pool:
                found = ratio(
                    asked.pairs,
                    lambda p=pool: rate(p, asked.sessions, asked.tokens),
                    lambda p=pool: rate(p, 1, asked.tokens),
                )
                print(f"  {asked.sessions} sessions over one: {found[0]:.2f} ({found[1]})")
            with (
                model.new_pool(batching="auto", **fields) as auto,
                model.new_pool(batching="never", **fields) as turns,
            ):
                found = ratio(
                    asked.pairs,
                    lambda p=auto: rate(p, asked.few, asked.tokens),
                    lambda p=turns: rate(p, asked.few, asked.tokens),
                )
                print(f"  {asked.few} sessions, auto over turns: {found[0]:.2f} ({found[1]})")
            n_pairs = max(2, asked.pairs // 2)
            found = warm(model, asked.prefix, n_pairs)
            print(f"  a prefix of {asked.prefix} resident over cold: {found[0]:.3f} ({found[1]})")
            found = moved(model, asked.prefix, n_pairs)
            print(f"  moved out and back over evaluating: {found[0]:.3f} ({found[1]})", flush=True)


if __name__ == "__main__":
    main()
