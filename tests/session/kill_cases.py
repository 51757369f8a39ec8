"""Lives of sessions whose engine is killed again and again, with single sessions as oracle.

``tools/random_kills.py`` runs many of them on any engine; `pool_cases` says what a life is.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from contextlib import suppress
from typing import Any

import attrs
import pool_cases

import infercore as ic

POOL = {"n_parallel": 4, "n_ctx": 160, "n_cells": 480, "cache_bytes": 2**20}
LIMITS = {"step_timeout": 2.0, "load_timeout": 60.0, "max_restarts": 10**6}
WAYS = {"SIGKILL": 40, "SIGSEGV": 25, "SIGABRT": 15, "SIGBUS": 17, "SIGSTOP": 3}
"""How a process ends, and how often; by "memory" it gets none beyond what it has before."""
MOMENTS = {"prefill": 30, "step": 35, "save": 20, "load": 5, "any": 10}
"""What it does then, and how often; "any" is a moment by the clock."""
_PREFILLS = {"ensure_prefix", "prefill_suffix"}
_SAVES = {"snapshot", "restore", "fork"}
_PATIENCE_S, _PAUSE_S, _LIMITED_S = 1.0, 0.0005, 0.3


def case_of(seed: int) -> pool_cases.Case:
    """Return the lives that ``seed`` stands for, in a pool of the size that all cases share."""
    case = pool_cases.case_of(seed)
    rng = random.Random(-1 - seed)
    lives = [[_saving(call, rng) for call in calls] for calls in case.lives]
    return attrs.evolve(case, pool=dict(POOL), lives=lives, faults=[])


def _saving(call: pool_cases.Call, rng: random.Random) -> pool_cases.Call:
    if call.then or call.cancel_after is not None or rng.random() < 0.5:
        return call
    return attrs.evolve(call, then="snapshot")


class Killer:
    """Ends the engine's process up to ``n_most`` times, each at a moment of ``rng``'s choice.

    It waits until all whom the last death concerned have got further: who dies twice in a row
    would end for good, as is right.
    """

    def __init__(self, pool: Any, rng: random.Random, n_most: int) -> None:
        self._process = pool.process
        self._rng = rng
        self._left = n_most
        self._done = threading.Event()
        self.counts: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> Killer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _work(self) -> None:
        while self._left and not self._done.is_set():
            way = self._rng.choices(list(WAYS), list(WAYS.values()))[0]
            moment = self._rng.choices(list(MOMENTS), list(MOMENTS.values()))[0]
            pid = self._process.pid
            if not self._waited(lambda: not self._process._suspects, 4 * _PATIENCE_S):
                continue
            if moment == "any":
                self._done.wait(self._rng.random() * 0.3)
            elif not self._waited(lambda m=moment: self._is(m), _PATIENCE_S):
                moment = "any"
            if moment != "load":
                self._done.wait(self._rng.random() * 0.003)
            pid = self._process.pid
            if pid is None or self._done.is_set():
                continue
            with suppress(ProcessLookupError):
                self._end(pid, way)
                self.counts[f"{way} in {moment}"] += 1
                self.counts["kills"] += 1
                self._left -= 1

    def _end(self, pid: int, way: str) -> None:
        """End a process and wait until it is known whom that concerns."""
        last = self._noted
        if way == "memory":
            import resource

            import psutil

            n_bytes = psutil.Process(pid).memory_info().vms
            resource.prlimit(pid, resource.RLIMIT_AS, (n_bytes, n_bytes))
            self._waited(lambda: self._process.pid != pid, _LIMITED_S)
            way = "SIGKILL"  # of a worker that lives with it, and refuses
        if self._process.pid == pid:
            os.kill(pid, getattr(signal, way))
        self._waited(lambda: self._noted != last, 10 * _PATIENCE_S)

    @property
    def _noted(self) -> float | None:
        """When the last death was judged, which is a moment after the process has gone."""
        return max(list(self._process._deaths), default=None)

    def _waited(self, holds: Any, seconds: float) -> bool:
        until = time.monotonic() + seconds
        while not holds():
            if self._done.is_set() or time.monotonic() > until:
                return False
            time.sleep(_PAUSE_S)
        return True

    def _is(self, moment: str) -> bool:
        child = self._process._child
        if child is None or child.death is not None:
            return False
        if moment == "load":
            return not child.is_loaded
        names = {call.name for call in list(child.calls.values())}
        if moment == "save":
            return bool(names & _SAVES)
        wanted = _PREFILLS if moment == "prefill" else {"next"}
        return bool(names & wanted) and bool(child.board.in_call)


def check(pool: Any, model: Any, seed: int, *, n_kills: int = 6, **fields: Any) -> Counter[str]:
    """Raise AssertionError where a life differs from the same life alone and undisturbed.

    ``pool`` is isolated, with the fields `POOL` and `LIMITS`; ``model`` is the same in this
    process, opened with ``fields``. A session that is told that there is no memory ends there.
    """
    case, rng = case_of(seed), random.Random(seed)
    expected = [pool_cases._alone(model, case, calls, fields) for calls in case.lives]
    with Killer(pool, rng, n_kills) as killer:
        found = pool_cases.together(pool, case)
    counts = Counter(cases=1) + killer.counts
    for i, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        if isinstance(ours, ic.OutOfMemoryError) and any("memory" in how for how in counts):
            counts["told of no memory"] += 1
            continue
        if isinstance(ours, BaseException):
            what = f"seed {seed}, {dict(killer.counts)}: session {i} raised {ours!r}"
            raise AssertionError(what) from ours  # noqa: TRY004  (it is no argument)
        counts["texts"] += len(ours)
        at = pool_cases._first_difference(case.lives[i], ours, theirs)
        if at is None:
            continue
        if pool_cases._is_near_tie(model, case, i, at, ours, theirs, fields):
            counts["near_ties"] += 1
            continue
        raise AssertionError(
            f"seed {seed}, {dict(killer.counts)}: session {i} gave {ours}, alone {theirs}"
        )
    stats = pool.stats()
    assert stats.n_open == stats.n_running == 0, f"seed {seed}: {stats}"
    return counts
