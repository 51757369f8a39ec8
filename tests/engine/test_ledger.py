"""The books against the simplest model: a list of (cell, token, position) for each sequence."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infercore.engine import ledger as module
from infercore.engine.ledger import Ledger

N_SEQ = 3
seq = st.integers(0, N_SEQ - 1)
pos = st.integers(0, 12)
tokens = st.lists(st.integers(0, 99), min_size=1, max_size=5)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.sets(seq, min_size=1), tokens),
        st.tuples(st.just("append_one"), seq, st.integers(0, 99)),
        st.tuples(st.just("remove"), seq, pos, pos),
        st.tuples(st.just("copy"), seq, seq, pos, pos),
        st.tuples(st.just("shift"), seq, pos, pos, st.integers(1, 4)),
        st.tuples(st.just("divide"), seq, pos, pos, st.integers(2, 3)),
        st.tuples(st.just("compact")),
        st.tuples(st.just("restore")),
        st.tuples(st.just("clear")),
    ),
    max_size=25,
)


class Naive:
    """Cells are objects of their own; a sequence is a list of (cell, position)."""

    def __init__(self) -> None:
        self.sequences = [[] for _ in range(N_SEQ)]

    def next_position(self, seq_id):
        return max((p for _, p in self.sequences[seq_id]), default=-1) + 1

    def append(self, seq_ids, ids, start):
        for i, token in enumerate(ids):
            cell = [token]
            for seq_id in seq_ids:
                self.sequences[seq_id].append((cell, start + i))

    def remove(self, seq_id, p0, p1):
        self.sequences[seq_id] = [c for c in self.sequences[seq_id] if not p0 <= c[1] < p1]

    def copy(self, src, dst, p0, p1):
        self.sequences[dst] += [c for c in self.sequences[src] if p0 <= c[1] < p1]

    def move(self, seq_id, p0, p1, change):
        self.sequences[seq_id] = [
            (cell, change(p) if p0 <= p < p1 else p) for cell, p in self.sequences[seq_id]
        ]

    def n_cells(self):
        return len({id(cell) for cells in self.sequences for cell, _ in cells})

    def unshared(self, seq_id, p0, p1):
        others = {id(c) for s, cells in enumerate(self.sequences) if s != seq_id for c, _ in cells}
        own = {id(c) for c, p in self.sequences[seq_id] if p0 <= p < p1}
        return len(own - others)


def apply(ledger, naive, step):
    kind, *args = step
    if kind == "append":
        ids, new = sorted(args[0]), args[1]
        start = max(naive.next_position(s) for s in ids)
        ledger.append(ids, new, start)
        naive.append(ids, new, start)
    elif kind == "append_one":
        start = naive.next_position(args[0])
        ledger.append_one(args[0], args[1])
        naive.append([args[0]], [args[1]], start)
    elif kind == "remove":
        s, p0, p1 = args[0], *sorted(args[1:])
        ledger.remove(s, p0, p1)
        naive.remove(s, p0, p1)
    elif kind == "copy":
        src, dst, p0, p1 = *args[:2], *sorted(args[2:])
        if src != dst:
            ledger.remove(dst, p0, p1)
            naive.remove(dst, p0, p1)
            ledger.copy(src, dst, p0, p1)
            naive.copy(src, dst, p0, p1)
    elif kind in {"shift", "divide"}:
        s, p0, p1, by = args[0], *sorted(args[1:3]), args[3]
        getattr(ledger, kind)(s, p0, p1, by)
        naive.move(s, p0, p1, (lambda p: p + by) if kind == "shift" else (lambda p: p // by))
    elif kind == "compact":
        ledger._compact()
    elif kind == "restore":
        ledger.restore([described(ledger, s) for s in range(N_SEQ)])
    else:
        ledger.clear()
        naive.__init__()


def described(ledger, seq_id):
    runs = ledger.runs(seq_id)
    return {
        "seq_id": seq_id,
        "runs": [[run.pos, run.n] for run in runs],
        "cells": [run.cell for run in runs],
        "tokens": ledger.tokens(seq_id),
    }


def check(ledger, naive):
    assert ledger.n_cells == naive.n_cells()
    for s, cells in enumerate(naive.sequences):
        assert ledger.tokens(s) == [cell[0] for cell, _ in cells]
        assert list(ledger.positions(s)) == [p for _, p in cells]
        assert ledger.length(s) == len(cells)
        assert ledger.next_position(s) == naive.next_position(s)
        assert ledger.holds(s, 2, 7) == sum(2 <= p < 7 for _, p in cells)
        assert ledger.unshared(s, 2, 7) == naive.unshared(s, 2, 7)
        whole = sum(2 <= p < 7 for _, p in cells)
        if len({id(c) for c, _ in cells}) == len(cells):
            assert ledger.shared(s, 2, 7) == (naive.unshared(s, 2, 7) < whole)


@settings(max_examples=150, deadline=None)
@given(steps)
def test_it_holds_what_the_naive_model_holds(plan):
    ledger, naive = Ledger(N_SEQ), Naive()
    for step in plan:
        apply(ledger, naive, step)
        check(ledger, naive)


def test_the_store_does_not_grow_with_what_was_removed(monkeypatch):
    monkeypatch.setattr(module, "_COMPACT_AT", 100)
    ledger = Ledger(2)
    ledger.append((0, 1), range(50), 0)
    for _ in range(100):
        ledger.append((0,), range(20), 50)
        ledger.remove(0, 50, 70)
    assert len(ledger._store) <= 2 * ledger.n_cells + 120
    assert ledger.tokens(0) == ledger.tokens(1) == list(range(50))


@pytest.mark.parametrize("many", [False, True])
def test_appends_of_one_sequence_are_one_run(many):
    ledger = Ledger(1)
    for i in range(30):
        if many:
            ledger.append((0,), (i,), i)
        else:
            ledger.append_one(0, i)
    assert len(ledger.runs(0)) == 1
    assert ledger.n_cells == ledger.length(0) == 30


def test_a_set_sequence_replaces_what_was_there():
    ledger = Ledger(2)
    ledger.append((0, 1), [1, 2, 3], 0)
    ledger.set_sequence(0, [(4, 2), (9, 1)], [7, 8, 9])
    assert ledger.tokens(0) == [7, 8, 9]
    assert list(ledger.positions(0)) == [4, 5, 9]
    assert ledger.tokens(1) == [1, 2, 3]
    assert ledger.n_cells == 6
