"""Lives of sessions whose engine is killed at a random moment, with single sessions as oracle.

``tools/random_kills.py`` runs many of them on any engine; `pool_cases` says what a life is.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from typing import Any

import attrs
import pool_cases

POOL = {"n_parallel": 4, "n_ctx": 160, "n_cells": 480, "cache_bytes": 2**20}
LIMITS = {"step_timeout": 2.0, "max_restarts": 10**6}
SIGNALS = ("SIGKILL", "SIGSEGV", "SIGABRT", "SIGSTOP")
_WEIGHTS = (6, 3, 2, 1)


def case_of(seed: int) -> pool_cases.Case:
    """Return the lives that ``seed`` stands for, in a pool of the size that all cases share."""
    return attrs.evolve(pool_cases.case_of(seed), pool=dict(POOL), faults=[])


class Killer:
    """Sends a signal to the engine's process after some seconds, unless the case ends before."""

    def __init__(self, pool: Any, rng: random.Random, seconds: float) -> None:
        self._pool = pool
        self._seconds = rng.random() * seconds
        self.signal = rng.choices(SIGNALS, _WEIGHTS)[0]
        self._done = threading.Event()
        self.has_killed = False
        self._thread = threading.Thread(target=self._kill, daemon=True)

    def __enter__(self) -> Killer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _kill(self) -> None:
        if self._done.wait(self._seconds):
            return
        pid = self._pool.process.pid
        if pid is not None:
            os.kill(pid, getattr(signal, self.signal))
            self.has_killed = True


def check(pool: Any, model: Any, seed: int, **fields: Any) -> Counter[str]:
    """Raise AssertionError where a life differs from the same life alone and undisturbed.

    ``pool`` is isolated, with the fields `POOL` and `LIMITS`; ``model`` is the same in this
    process, opened with ``fields``.
    """
    case, rng = case_of(seed), random.Random(seed)
    expected = [pool_cases._alone(model, case, calls, fields) for calls in case.lives]
    started = time.perf_counter()
    pool_cases.together(pool, case)
    with Killer(pool, rng, 0.9 * (time.perf_counter() - started)) as killer:
        found = pool_cases.together(pool, case)
    counts: Counter[str] = Counter(cases=1)
    if killer.has_killed:
        counts[killer.signal] += 1
    for i, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        if isinstance(ours, BaseException):
            what = f"seed {seed}, {killer.signal}: session {i} raised {ours!r}"
            raise AssertionError(what) from ours  # noqa: TRY004  (it is no argument)
        counts["texts"] += len(ours)
        at = pool_cases._first_difference(case.lives[i], ours, theirs)
        if at is None:
            continue
        if pool_cases._is_near_tie(model, case, i, at, ours, theirs, fields):
            counts["near_ties"] += 1
            continue
        raise AssertionError(
            f"seed {seed}, {killer.signal}: session {i} gave {ours}, alone {theirs}"
        )
    stats = pool.stats()
    assert stats.n_open == stats.n_running == 0, f"seed {seed}: {stats}"
    return counts
