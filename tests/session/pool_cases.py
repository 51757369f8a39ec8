"""Random pools under load, with single sessions as oracle.

One case is a seed: a window, a number of cells, sequences, step sizes, texts, cancels, streams that
are dropped, failing steps, and calls in threads. ``tools/random_pools.py`` runs many.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from typing import Any

import attrs

import infercore as ic

WORDS = [
    *("once", "upon", "a", "time", "there", "was", "little", "girl", "who", "had", "the", "dog"),
    *("and", "baker", "cat", "tick", "tock", "said", "so", "very", "big", "house", "went", "to"),
    *("see", "it", "then", "they", "all", "played", "in", "garden", "happy", "sad"),
]
SECONDS = 120.0


@attrs.frozen
class Call:
    """One step of a session's life: its text, how it decodes, and what disturbs it."""

    kind: str
    text: str
    n_tokens: int
    fields: dict[str, Any]
    stop_after: int | None


@attrs.frozen
class Case:
    """A pool, and what its sessions do at the same time."""

    pool: dict[str, Any]
    lives: list[list[Call]]
    n_faults: int


def text_of(rng: random.Random, n_words: int, shared: str) -> str:
    words = " ".join(rng.choice(WORDS) for _ in range(n_words))
    return f"{shared} {words}" if rng.random() < 0.5 else words


def case_of(seed: int) -> Case:
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
    lives = [
        [call_of(rng, n_ctx, shared) for _ in range(rng.randint(1, 4))] for _ in range(n_sessions)
    ]
    return Case(pool, lives, rng.choice([0, 0, 1, 2]))


def call_of(rng: random.Random, n_ctx: int, shared: str) -> Call:
    n_tokens = rng.randint(1, 24)
    text = text_of(rng, rng.randint(1, max(2, (n_ctx - n_tokens) // 4)), shared)
    fields: dict[str, Any] = (
        {"temperature": 0} if rng.random() < 0.5 else {"seed": rng.randint(0, 99)}
    )
    kind = rng.choice(["prefix", "suffix", "append", "prefix"])
    stop_after = rng.randint(1, n_tokens) if rng.random() < 0.2 else None
    return Call(kind, text, n_tokens, fields, stop_after)


def live(session: Any, calls: list[Call]) -> list[Any]:
    """Return what ``calls`` give: tokens, or the type of the error and its stage."""
    found: list[Any] = []
    for call in calls:
        try:
            found.append(_one(session, call))
        except ic.ContextOverflowError as error:  # noqa: PERF203  (each call has its own end)
            found.append(("ContextOverflowError", error.stage))
    return found


def _one(session: Any, call: Call) -> list[int]:
    if call.kind == "prefix" or session.state == "EMPTY":
        session.ensure_prefix(call.text)
    else:
        mode = "replace" if call.kind == "suffix" else "append"
        session.prefill_suffix(ic.SuffixInput(text=f" {call.text}", mode=mode))
    tokens: list[int] = []
    stream = session.decode(max_tokens=call.n_tokens, **call.fields)
    for chunk in stream:
        tokens += chunk.tokens
        if call.stop_after is not None and len(tokens) >= call.stop_after:
            stream.close()
            break
    return tokens


class StuckError(AssertionError):
    """A call did not end."""


def together(pool: Any, case: Case) -> list[Any]:
    """Return what each life gives when all are lived at once."""
    found: list[Any] = [None] * len(case.lives)

    def work(i: int) -> None:
        try:
            with pool.open_session() as session:
                found[i] = live(session, case.lives[i])
        except BaseException as error:  # noqa: BLE001
            found[i] = error

    threads = [
        threading.Thread(target=work, args=(i,), daemon=True) for i in range(len(case.lives))
    ]
    for thread in threads:
        thread.start()
    until = time.monotonic() + SECONDS
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
        if thread.is_alive():
            scheduler = pool.owner.scheduler
            raise StuckError(
                f"running {scheduler.running}, waiting {scheduler.waiting}, "
                f"{[(s.n_held, len(s.tokens), s.seq_id) for s in scheduler.sequences]}"
            )
    return found


def check(model: Any, seed: int, faults: Any = None, **fields: Any) -> Counter[str]:
    """Raise AssertionError where a life in the pool differs from the same life alone."""
    case = case_of(seed)
    expected = []
    for calls in case.lives:
        with model.new_session(n_ctx=case.pool["n_ctx"], **fields) as session:
            expected.append(live(session, calls))
    counts: Counter[str] = Counter(cases=1)
    with model.new_pool(**case.pool, **fields) as pool:
        rng = random.Random(seed)
        for _ in range(case.n_faults if faults is not None else 0):
            name = rng.choice(["decode", "decode_batch", "seq_remove", "seq_copy"])
            if name.startswith("decode"):
                work = rng.choice(["nothing", "half", "all"])
                error = MemoryError("no memory")
                faults.plan("decode_batch", error, at=rng.randint(1, 9), work=work)
        found = together(pool, case)
        if faults is not None:
            faults.reset()
        stats = pool.stats()
        assert stats.n_cells_used == stats.n_open == stats.n_running == 0, stats
        counts["preempted"] += stats.n_preempted
        counts["moved_out"] += stats.n_moved_out
        counts["cached"] += stats.cached_tokens
    for i, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        if isinstance(ours, BaseException):
            if faults is not None and isinstance(ours, ic.OutOfMemoryError):
                counts["failed"] += 1
                continue
            raise AssertionError(f"seed {seed}: session {i} raised {ours!r}") from ours
        if ours != theirs:
            if differs_by_a_near_tie(model, case, i, ours, theirs, fields):
                counts["near_ties"] += 1
                continue
            raise AssertionError(f"seed {seed}: session {i} gave {ours}, alone {theirs}")
    return counts


def differs_by_a_near_tie(
    model: Any, case: Case, i: int, ours: list[Any], theirs: list[Any], fields: dict[str, Any]
) -> bool:
    """Whether the first token that differs is one of two whose logits lie within 2t."""
    at = next(n for n, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
    if not (isinstance(ours[at], list) and isinstance(theirs[at], list)):
        return False
    call = case.lives[i][at]
    if call.fields.get("temperature") != 0:
        return bool(model.capabilities.kv_types) and _tolerance(model, fields) > 0.05
    with model.new_session(n_ctx=case.pool["n_ctx"], **fields) as session:
        live(session, case.lives[i][:at])
        n = next(k for k, (a, b) in enumerate(zip(ours[at], theirs[at], strict=False)) if a != b)
        _one(session, attrs.evolve(call, n_tokens=n, stop_after=None)) if n else None
        if not n:
            return False
        session.decode(max_tokens=1)
        row = session.context.logits(-1)
        return abs(float(row[ours[at][n]] - row[theirs[at][n]])) < 2 * session.context.tolerance


def _tolerance(model: Any, fields: dict[str, Any]) -> float:
    with model.new_context(n_ctx=8, **fields) as context:
        return float(context.tolerance)
