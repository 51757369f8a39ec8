"""What the scripts about pools share: sessions that generate at once, and their by-hand rivals."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import TYPE_CHECKING, Any

from infercore.measuring import parts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import infercore as ic

N_BEFORE = 64
"""Tokens of a prompt before what is timed."""


def prompts(tokenizer: ic.Tokenizer, n: int, n_tokens: int = N_BEFORE) -> list[str]:
    """Return ``n`` texts of about ``n_tokens`` tokens that differ from their first word on."""
    return [f"{i} {parts.text_of(tokenizer, n_tokens - 4, 31 * i + i // 29)}" for i in range(n)]


def generate(session: Any, n: int, **options: Any) -> None:
    """Read ``n`` greedy tokens of a session."""
    for _ in session.decode(max_tokens=n, temperature=0, ignore_eos=True, **options):
        pass


def in_own_thread(run: Callable[[], float]) -> Callable[[], float]:
    """Return ``run`` done in a thread that ends with it.

    Worker threads that OpenMP keeps for the caller then end too, and slow nobody who comes next.
    """

    def done() -> float:
        with ThreadPoolExecutor(1) as threads:
            return threads.submit(run).result()

    return done


class Crowd:
    """Sessions of a pool, each with a prompt, that generate in threads at the same time."""

    def __init__(self, pool: ic.SessionPool, n: int) -> None:
        self.sessions = [pool.open_session() for _ in range(n)]
        self.texts = prompts(pool.tokenizer, n)
        self._pool = pool
        self._threads = ThreadPoolExecutor(n)

    def run(self, n_tokens: int) -> None:
        """Let each generate ``n_tokens`` greedily behind its prompt, at the same time."""
        self._hold()
        list(self._threads.map(lambda session: generate(session, n_tokens), self.sessions))

    def rate(self, n_tokens: int) -> float:
        """Return tokens a second while all generate: from the last first one to the first end."""
        self._hold()
        begun: list[tuple[float, int]] = []
        ended: list[tuple[float, int]] = []
        there: list[Any] = []

        def work(session: Any) -> None:
            n = 0
            with session.decode(max_tokens=None, temperature=0, ignore_eos=True) as stream:
                for chunk in stream:
                    if n == 0:
                        there.append(session)
                        if len(there) == len(self.sessions):
                            begun.append(self._mark())
                    n += len(chunk.tokens) if begun else 1
                    if n >= n_tokens and begun and not ended:
                        ended.append(self._mark())
                    if ended:
                        return

        list(self._threads.map(work, self.sessions))
        return (ended[0][1] - begun[0][1]) / (ended[0][0] - begun[0][0])

    def _hold(self) -> None:
        for session, text in zip(self.sessions, self.texts, strict=True):
            session.ensure_prefix(text)

    def _mark(self) -> tuple[float, int]:
        return perf_counter(), self._pool.stats().generated_tokens

    def close(self) -> None:
        """Close the sessions."""
        self._threads.shutdown()
        for session in self.sessions:
            session.close()


def alone(session: Any, text: str, n_tokens: int) -> float:
    """Return the tokens a second of one session, its prompt evaluated before."""
    session.ensure_prefix(text)
    begun = perf_counter()
    generate(session, n_tokens)
    return n_tokens / (perf_counter() - begun)


def batched(context: ic.Context, ids: Sequence[list[int]], n: int) -> float:
    """Return tokens a second, by hand: one call a step for all sequences of ``context``."""
    context.clear()
    for seq_id, tokens in enumerate(ids):
        context.decode(tokens[:-1], seq_id=seq_id, logits="none")
    last = [tokens[-1] for tokens in ids]
    begun = perf_counter()
    for _ in range(n):
        context.decode_batch([(token, [i], True) for i, token in enumerate(last)])
        last = [int(context.logits(i).argmax()) for i in range(len(ids))]
    return len(ids) * n / (perf_counter() - begun)


def in_turns(context: ic.Context, ids: Sequence[list[int]], n: int) -> float:
    """Return tokens a second, by hand: a call for each sequence of ``context`` in turn."""
    context.clear()
    for seq_id, tokens in enumerate(ids):
        context.decode(tokens[:-1], seq_id=seq_id, logits="none")
    last = [tokens[-1] for tokens in ids]
    begun = perf_counter()
    for _ in range(n):
        for seq_id, token in enumerate(last):
            context.decode_one(token, seq_id=seq_id)
            last[seq_id] = int(context.logits(-1).argmax())
    return len(ids) * n / (perf_counter() - begun)


class Background:
    """Sessions of a pool that generate until they are told to stop; their gaps are kept."""

    def __init__(self, pool: ic.SessionPool, n: int, bias: dict[int, float]) -> None:
        self._sessions = [pool.open_session() for _ in range(n)]
        self._bias = bias
        self._stop = False
        self.times: list[list[float]] = [[] for _ in range(n)]
        for session, text in zip(self._sessions, prompts(pool.tokenizer, n), strict=True):
            session.ensure_prefix(text)
        self._threads = [
            threading.Thread(target=self._run, args=(i, session))
            for i, session in enumerate(self._sessions)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, i: int, session: Any) -> None:
        with session.decode(
            max_tokens=None, temperature=0, ignore_eos=True, logit_bias=self._bias
        ) as stream:
            for _ in stream:
                self.times[i].append(perf_counter())
                if self._stop:
                    return

    def gaps(self, work: Callable[[], object]) -> list[float]:
        """Return the seconds between two tokens of each session while ``work`` is done."""
        first = [len(times) for times in self.times]
        work()
        last = [len(times) for times in self.times]
        return [
            b - a
            for times, start, end in zip(self.times, first, last, strict=True)
            for a, b in zip(times[max(0, start - 1) : end], times[start : end + 1], strict=False)
        ]

    def stop(self) -> None:
        """Let all end."""
        self._stop = True
        for thread in self._threads:
            thread.join()
        for session in self._sessions:
            session.close()
