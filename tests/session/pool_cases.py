"""Random pools under load, with single sessions as oracle.

One case is a seed: a window, a number of cells, sequences, step sizes, texts, cancels, streams that
are dropped, forks, snapshots, failing steps, and calls in threads. ``tools/random_pools.py`` runs
many of them on any engine.
"""

from __future__ import annotations

import random
import threading
from collections import Counter, deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
from pool_waits import wait_for

import infercore as ic
from infercore.testing import engine_of

if TYPE_CHECKING:
    from collections.abc import Iterator

WORDS = [
    *("once", "upon", "a", "time", "there", "was", "little", "girl", "who", "had", "the", "dog"),
    *("and", "baker", "cat", "tick", "tock", "said", "so", "very", "big", "house", "went", "to"),
    *("see", "it", "then", "they", "all", "played", "in", "garden", "happy", "sad"),
]
SECONDS, TICK = 120.0, 0.1
_DECODES = ("decode", "decode_one", "decode_batch", "decode_spans")
_N_MOVES = 64


@attrs.frozen
class Call:
    """One step of a session's life: its text, how it decodes, and what disturbs it."""

    kind: str
    text: str
    n_tokens: int
    fields: dict[str, Any]
    stop_after: int | None = None
    cancel_after: float | None = None
    then: str = ""


@attrs.frozen
class Case:
    """A pool, and what its sessions do at the same time; ``faults`` name the calls that fail."""

    pool: dict[str, Any]
    lives: list[list[Call]]
    faults: list[tuple[int, str]]


@attrs.frozen
class Ended:
    """What a call gave: its tokens and their finish reason, or the type and stage of its error."""

    tokens: list[int]
    reason: str | None


def text_of(rng: random.Random, n_words: int, shared: str) -> str:
    words = " ".join(rng.choice(WORDS) for _ in range(n_words))
    return f"{shared} {words}" if rng.random() < 0.5 else words


def case_of(seed: int, *, invariant: bool = False, apart: bool = False) -> Case:
    rng = random.Random(seed)
    n_sessions = rng.randint(2, 8)
    n_ctx = rng.randint(60, 160)
    n_cells = max(n_ctx, rng.randint(80, 330))
    shared = " ".join(rng.choice(WORDS) for _ in range(rng.randint(2, 20)))
    pool: dict[str, Any] = {
        "n_parallel": rng.randint(1, 8),
        "n_ctx": n_ctx,
        "n_cells": n_cells,
        "n_step_tokens": rng.choice([None, 3, 7, 16, 64, 256]),
        "batching": rng.choice(["auto", "always", "never"]),
        "cache_bytes": rng.choice([0, 0, 2**20, 2**26]),
    }
    if invariant:
        pool.update(batch_invariant=True, batching="auto", n_cells=None)
    if apart:
        pool.update(kv_unified=False, n_cells=None)
    lives = [
        [call_of(rng, n_ctx, shared) for _ in range(rng.randint(1, 4))] for _ in range(n_sessions)
    ]
    if apart:
        lives = [_reopened(random.Random(f"{seed} {i}"), calls) for i, calls in enumerate(lives)]
    faults = [
        (rng.randint(1, 12), rng.choice(["before", "after", "aborted"]))
        for _ in range(rng.choice([0, 0, 1, 2]))
    ]
    return Case(pool, [_prefixed(calls) for calls in lives], faults)


def call_of(rng: random.Random, n_ctx: int, shared: str) -> Call:
    n_tokens = rng.randint(1, 24)
    text = text_of(rng, rng.randint(1, max(2, (n_ctx - n_tokens) // 4)), shared)
    fields: dict[str, Any] = (
        {"temperature": 0} if rng.random() < 0.5 else {"seed": rng.randint(0, 99)}
    )
    if rng.random() < 0.2:
        fields |= rng.choice(
            [
                {"frequency_penalty": 0.5, "presence_penalty": 0.3},
                {"stop": [" the"]},
                {"logprobs": 2},
                {"ignore_eos": True, "min_p": 0.2},
            ]
        )
    kind = rng.choice(["prefix", "suffix", "append", "prefix"])
    stop_after = rng.randint(1, n_tokens) if rng.random() < 0.2 else None
    cancel_after = rng.random() * 0.02 if rng.random() < 0.15 else None
    then = rng.choice(["fork", "snapshot"]) if cancel_after is None and rng.random() < 0.2 else ""
    return Call(kind, text, n_tokens, fields, stop_after, cancel_after, then)


def _reopened(rng: random.Random, calls: list[Call]) -> list[Call]:
    """Let some calls be another session's, which goes on from the text of the one before.

    Where its text does not fit, a new session holds nothing, and an old one what it held: so it is
    not forked, and the call behind it begins anew.
    """
    found = calls[:1]
    for i, own in enumerate(calls[1:], 1):
        behind = i > 1 and found[i - 2].then == "reopen"
        call = attrs.evolve(own, kind="prefix") if behind else own
        before = found[-1]
        if before.then or before.cancel_after is not None or rng.random() < 0.5:
            found.append(call)
            continue
        found[-1] = attrs.evolve(before, then="reopen")
        text = f"{before.text} {call.text}"
        found.append(attrs.evolve(call, kind="prefix", text=text, then=""))
    return found


def _prefixed(calls: list[Call]) -> list[Call]:
    """Begin anew behind a call that is cancelled: how far it came is chance."""
    after = [False, *(call.cancel_after is not None for call in calls)]
    return [
        attrs.evolve(call, kind="prefix") if anew else call
        for call, anew in zip(calls, after, strict=False)
    ]


def live(session: Any, calls: list[Call]) -> list[Ended]:
    """Return what ``calls`` give one after the other, undisturbed."""
    found: list[Ended] = []
    for call in calls:
        _lived(session, call, found, disturbed=False)
    return found


def live_in(pool: Any, calls: list[Call]) -> list[Ended]:
    """Return what ``calls`` give in sessions of ``pool``; those are cancelled that are to be."""
    found: list[Ended] = []
    session = pool.open_session()
    try:
        for call in calls:
            _lived(session, call, found, disturbed=True)
            if call.then == "reopen":
                session.close()
                session = pool.open_session()
    finally:
        session.close()
    return found


def _lived(session: Any, call: Call, found: list[Ended], *, disturbed: bool) -> None:
    try:
        found.append(_one(session, call, disturbed=disturbed))
    except ic.ContextOverflowError as error:
        found.append(Ended([], f"ContextOverflowError {error.stage}"))
    except ic.DecodeAbortedError:
        if call.cancel_after is None:
            raise
        found.append(Ended([], "cancelled"))
    if call.then == "snapshot":
        session.restore(session.snapshot())
    elif call.then == "fork" and session.state != "EMPTY":
        with session.fork() as twin:
            found.append(_decoded(twin, attrs.evolve(call, n_tokens=4, stop_after=None)))


def _one(session: Any, call: Call, *, disturbed: bool) -> Ended:
    timer = None
    if disturbed and call.cancel_after is not None:
        timer = threading.Timer(call.cancel_after, session.cancel)
        timer.start()
    try:
        if call.kind == "prefix" or session.state == "EMPTY":
            session.ensure_prefix(call.text)
        else:
            mode = "replace" if call.kind == "suffix" else "append"
            session.prefill_suffix(ic.SuffixInput(text=f" {call.text}", mode=mode))
        return _decoded(session, call)
    finally:
        if timer is not None:
            timer.cancel()
            timer.join()


_left: deque[Any] = deque(maxlen=64)
"""Streams that were cancelled and not read to their end: the next call ends them."""


def _decoded(session: Any, call: Call, **fields: Any) -> Ended:
    tokens: list[int] = []
    try:
        stream = session.decode(max_tokens=call.n_tokens, **call.fields, **fields)
    except ic.ContextOverflowError as error:
        return Ended([], f"ContextOverflowError {error.stage}")
    for chunk in stream:
        tokens += chunk.tokens
        if call.stop_after is not None and len(tokens) >= call.stop_after:
            if call.n_tokens % 2:
                stream.close()
            else:
                session.cancel()
                _left.append(stream)
            return Ended(tokens, None)
    return Ended(tokens, chunk.finish_reason)


class StuckError(AssertionError):
    """A call did not end."""


def together(pool: Any, case: Case) -> list[Any]:
    """Return what each life gives when all are lived at once."""
    found: list[Any] = [None] * len(case.lives)

    def work(i: int) -> None:
        try:
            found[i] = live_in(pool, case.lives[i])
        except BaseException as error:  # noqa: BLE001
            found[i] = error

    threads = [
        threading.Thread(target=work, args=(i,), daemon=True) for i in range(len(case.lives))
    ]
    for thread in threads:
        thread.start()
    ticks = 0  # not a clock: a process that is stopped for a while is not stuck
    while any(thread.is_alive() for thread in threads) and ticks < SECONDS / TICK:
        next(thread for thread in threads if thread.is_alive()).join(TICK)
        ticks += 1
    if any(thread.is_alive() for thread in threads):
        if pool.model is None:
            raise StuckError(f"a call of an isolated pool did not end: {pool.stats()}")
        scheduler = pool.owner.scheduler
        raise StuckError(
            f"running {scheduler.roster.running}, waiting {scheduler.roster.waiting}, "
            f"{[(s.n_held, len(s.tokens), s.seq_id) for s in scheduler.sequences]}"
        )
    return found


class Failing:
    """Lets the engine calls that ``faults`` name fail, on whatever engine, and counts those."""

    def __init__(self, context: Any, faults: list[tuple[int, str]]) -> None:
        self._cls: Any = type(engine_of(context))
        self._left = dict(faults)
        self._inside = False  # one thread owns a pool's context
        self.n_calls = 0
        self.failed: Counter[str] = Counter()

    def __enter__(self) -> Counter[str]:
        names = [name for name in _DECODES if hasattr(self._cls, name)]
        self._old = {name: vars(self._cls).get(name) for name in names}
        for name in names:
            setattr(self._cls, name, self._wrapped(getattr(self._cls, name)))
        return self.failed

    def __exit__(self, *_: object) -> None:
        for name, own in self._old.items():
            if own is None:
                delattr(self._cls, name)
            else:
                setattr(self._cls, name, own)

    def _wrapped(self, original: Any) -> Any:
        def call(inner: Any, *args: Any, **kwargs: Any) -> Any:
            if self._inside:  # one call made of another
                return original(inner, *args, **kwargs)
            self.n_calls += 1
            how = self._left.pop(self.n_calls, None)
            if how is not None:
                self.failed[how] += 1
            if how == "before":
                raise MemoryError("no memory")
            if how == "aborted":
                raise ic.DecodeAbortedError("the engine was told to stop", resident_tokens=0)
            self._inside = True
            try:
                result = original(inner, *args, **kwargs)
            finally:
                self._inside = False
            if how == "after":
                raise MemoryError("no memory, behind the work")
            return result

        return call


def check(
    model: Any, seed: int, *, invariant: bool = False, apart: bool = False, **fields: Any
) -> Counter[str]:
    """Raise AssertionError where a life in the pool differs from the same life alone.

    With ``invariant`` alone means alone in such a pool, and there are no near ties. With ``apart``
    each that runs has cells of its own.
    """
    case = case_of(seed, invariant=invariant, apart=apart)
    expected = [_alone(model, case, calls, fields) for calls in case.lives]
    counts: Counter[str] = Counter(cases=1)
    with model.new_pool(**case.pool, **fields) as pool:
        with Failing(pool.owner.scheduler.context, case.faults) as failed:
            found = together(pool, case)
        wait_for(lambda: pool.stats().n_cells_used == 0)  # what was cancelled ends with its step
        stats = pool.stats()
        assert stats.n_cells_used == stats.n_open == stats.n_running == 0, stats
        assert stats.n_cells_shared == 0, stats
        counts["failing_steps"] += failed["before"] + failed["after"] + failed["aborted"]
        counts["preempted"] += stats.n_preempted
        counts["moved_out"] += stats.n_moved_out
        counts["cached"] += stats.cached_tokens
    for i, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        if isinstance(ours, BaseException):
            if isinstance(ours, ic.OutOfMemoryError) and failed["before"] + failed["after"]:
                counts["failed"] += 1
                continue
            raise AssertionError(f"seed {seed}: session {i} raised {ours!r}") from ours
        counts["texts"] += len(ours)
        at = _first_difference(case.lives[i], ours, theirs)
        if at is None:
            continue
        if not invariant and _is_near_tie(model, case, i, at, ours, theirs, fields):
            counts["near_ties"] += 1
            continue
        raise AssertionError(f"seed {seed}: session {i} gave {ours}, alone {theirs}")
    return counts


def _alone(model: Any, case: Case, calls: list[Call], fields: dict[str, Any]) -> list[Ended]:
    with _single(model, case, fields) as session:
        return live(session, calls)


@contextmanager
def _single(model: Any, case: Case, fields: dict[str, Any]) -> Iterator[Any]:
    if case.pool.get("batch_invariant"):
        with model.new_pool(**case.pool, **fields) as pool, pool.open_session() as session:
            yield session
        return
    with model.new_session(n_ctx=case.pool["n_ctx"], **fields) as session:
        yield session


def _calls_of(calls: list[Call], found: list[Ended]) -> list[tuple[Call, bool]]:
    """Return the call that each of ``found`` is of, and whether it is that of a fork."""
    named: list[tuple[Call, bool]] = []
    for call in calls:
        named.append((call, False))
        if call.then == "fork" and len(named) < len(found):
            named.append((call, True))
    return named


def _first_difference(calls: list[Call], ours: list[Ended], theirs: list[Ended]) -> int | None:
    """Return the place of the first call that ended otherwise; cancelled ones may be shorter."""
    named = _calls_of(calls, theirs)
    for i, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        cancelled = named[i][0].cancel_after is not None
        if a == b or (cancelled and (named[i][1] or a.tokens == b.tokens[: len(a.tokens)])):
            continue
        return i
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))


class _Moved:
    """A processor that moves the logits of one token by ``moves``, and remembers them."""

    def __init__(self, at: int, moves: Any = None) -> None:
        self._at, self._moves, self._n = at, moves, -1
        self.row: Any = None

    def apply(self, logits: Any) -> Any:
        self._n += 1
        if self._n != self._at:
            return logits
        self.row = np.array(logits)
        return logits if self._moves is None else (logits + self._moves).astype(np.float32)


def _is_near_tie(  # noqa: PLR0917  (what was run, and what came)
    model: Any,
    case: Case,
    i: int,
    at: int,
    ours: list[Ended],
    theirs: list[Ended],
    fields: dict[str, Any],
) -> bool:
    """Whether moves of the logits by the tolerance alone give the first token that differs."""
    calls, forked = _life_until(case.lives[i], theirs, at)
    a, b = ours[at].tokens, theirs[at].tokens
    n = next((k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    wanted = a[n] if n < len(a) else None

    def chosen(moves: Any) -> tuple[int | None, Any, float]:
        with _single(model, case, fields) as session:
            live(session, calls[:-1])
            processor = _Moved(n, moves)
            again = _again(session, calls[-1], n + 1, processor, forked=forked)
            token = again.tokens[n] if n < len(again.tokens) else None
            return token, processor.row, float(session.context.tolerance)

    _, row, tolerance = chosen(None)
    if row is None:
        return False
    rng = np.random.default_rng(0)
    designed = np.full(row.shape, -tolerance)
    if wanted is not None:
        designed[wanted] = tolerance
    tries = [designed, *(tolerance * rng.choice([-1.0, 1.0], row.shape) for _ in range(_N_MOVES))]
    return any(chosen(moves)[0] == wanted for moves in tries)


def _again(session: Any, call: Call, n: int, processor: _Moved, *, forked: bool) -> Ended:
    """Return the first ``n`` tokens of a call, or of a fork behind it, with ``processor``."""
    fields = {**call.fields, "processors": [processor]}
    moved = attrs.evolve(call, n_tokens=n, stop_after=None, fields=fields)
    if not forked:
        return _one(session, moved, disturbed=False)
    _one(session, call, disturbed=False)
    with session.fork() as twin:
        return _decoded(twin, moved)


def _life_until(calls: list[Call], found: list[Ended], at: int) -> tuple[list[Call], bool]:
    """Return the calls up to the one that gave the ``at``-th end, and whether a fork gave it."""
    named = _calls_of(calls, found)[: at + 1]
    return [call for call, forked in named if not forked], named[-1][1]
