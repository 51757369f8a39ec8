"""Block tables, alone: against lists of tokens, under any order of operations."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.interrupts import interrupt
from infercore_openvino import blocks
from infercore_openvino.blocks import BlockTables, Copy
from infercore_openvino.pool import Pool, PoolFullError

SIZE = 4


class Store:
    """What the caller of the tables has: slots that hold things, and the copies performed."""

    def __init__(self, tables: BlockTables, n_blocks: int) -> None:
        self.tables = tables
        self.slots = np.full((n_blocks + 1, tables.block_size), -1)

    def perform(self, copies) -> None:
        for src, at, dst, to, n in copies:
            assert n > 0
            self.slots[dst, to : to + n] = self.slots[src, at : at + n]

    def append(self, seq_id: int, values: list[int]) -> None:
        past = self.tables.n_resident(seq_id)
        self.perform(self.tables.append(seq_id, len(values)))
        for i, value in enumerate(values, start=past):
            block = self.tables.tables[seq_id].blocks[i // SIZE]
            assert self.tables.pool.holders(block) == 1
            self.slots[block, i % SIZE] = value

    def held(self, seq_id: int) -> list[tuple[int, int]]:
        table = self.tables.tables[seq_id]
        places = [(table.blocks[i // SIZE], i % SIZE) for i in range(table.n)]
        values = [int(self.slots[place]) for place in places]
        return list(zip(table.positions.tolist(), values, strict=True))


def make(n_blocks: int = 8, n_sequences: int = 2) -> tuple[BlockTables, Store]:
    tables = BlockTables(n_blocks, SIZE, n_sequences, 1)
    return tables, Store(tables, n_blocks)


def state_of(tables: BlockTables) -> list[object]:
    held = [(list(t.blocks), t.positions.tolist(), t.next) for t in tables.tables]
    return [held, tables.n_free]


# -- the pool ----------------------------------------------------------------------------------


def test_a_block_is_free_when_its_last_holder_lets_go() -> None:
    pool = Pool(2, first=5)
    block = pool.take()
    assert block == 5
    pool.share(block)
    pool.release(block)
    assert pool.n_free == 1
    pool.release(block)
    assert pool.n_free == 2


def test_a_pool_that_grows_hands_out_the_new_blocks_last() -> None:
    pool = Pool(1, first=1)
    pool.grow(2)
    assert [pool.take() for _ in range(3)] == [1, 2, 3]
    with pytest.raises(PoolFullError) as caught:
        pool.need(2)
    assert caught.value.missing == 2


# -- appending and trimming --------------------------------------------------------------------


def test_blocks_are_taken_as_tokens_come() -> None:
    tables, store = make()
    store.append(0, [1, 2, 3])
    store.append(0, [4])
    assert (tables.n_free, tables.n_past(0), tables.n_resident(0)) == (7, 4, 4)
    store.append(0, [5])
    assert tables.n_free == 6
    assert store.held(0) == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]


def test_trimming_moves_nothing_and_frees_what_is_empty() -> None:
    tables, store = make()
    store.append(0, list(range(10)))
    tables.trim(0, 5)
    assert (tables.n_free, tables.n_past(0)) == (6, 5)
    tables.trim(0, 0)
    assert (tables.n_free, tables.n_past(0), tables.n_resident(0)) == (8, 0, 0)


def test_without_room_nothing_changes() -> None:
    tables, store = make(n_blocks=2)
    store.append(0, list(range(7)))
    before = state_of(tables)
    with pytest.raises(PoolFullError) as caught:
        tables.append(0, 2)
    assert caught.value.missing == 1
    assert state_of(tables) == before


def test_clear_frees_all() -> None:
    tables, store = make()
    store.append(0, list(range(10)))
    tables.copy(0, 1, 0, -1)
    tables.clear()
    assert (tables.n_free, tables.n_past(0), tables.n_past(1)) == (8, 0, 0)


def test_an_append_needs_room_for_the_copy_too() -> None:
    tables, store = make(n_blocks=2)
    store.append(0, list(range(3)))
    tables.copy(0, 1, 0, -1)
    before = state_of(tables)
    with pytest.raises(PoolFullError) as caught:
        tables.append(1, 2)
    assert caught.value.missing == 1
    assert state_of(tables) == before


# -- removing ----------------------------------------------------------------------------------


def test_removing_the_end_copies_nothing() -> None:
    tables, store = make()
    store.append(0, list(range(9)))
    assert not tables.remove(0, 3, -1)
    assert [v for _, v in store.held(0)] == [0, 1, 2]


def test_removing_in_the_middle_keeps_positions() -> None:
    tables, store = make()
    store.append(0, list(range(10)))
    store.perform(tables.remove(0, 2, 7))
    assert store.held(0) == [(0, 0), (1, 1), (7, 7), (8, 8), (9, 9)]
    assert (tables.n_past(0), tables.n_resident(0), tables.n_free) == (10, 5, 6)


def test_removing_from_a_shared_sequence_leaves_the_other() -> None:
    tables, store = make()
    store.append(0, list(range(10)))
    tables.copy(0, 1, 0, -1)
    store.perform(tables.remove(1, 1, 3))
    assert [v for _, v in store.held(0)] == list(range(10))
    assert [v for _, v in store.held(1)] == [0, *range(3, 10)]


def test_removing_without_room_for_copies_changes_nothing() -> None:
    tables, store = make(n_blocks=3)
    store.append(0, list(range(12)))
    tables.copy(0, 1, 0, -1)
    before = state_of(tables)
    with pytest.raises(PoolFullError):
        tables.remove(1, 0, 1)
    assert state_of(tables) == before


def test_removing_what_is_not_there_changes_nothing() -> None:
    tables, store = make()
    store.append(0, list(range(5)))
    before = state_of(tables)
    assert not tables.remove(0, 5, -1)
    assert state_of(tables) == before


# -- copying -----------------------------------------------------------------------------------


def test_a_fork_shares_all_blocks() -> None:
    tables, store = make()
    store.append(0, list(range(6)))
    assert not tables.copy(0, 1, 0, -1)
    assert tables.n_free == 6
    assert store.held(1) == store.held(0)


def test_whoever_writes_first_gets_the_copy() -> None:
    tables, store = make()
    store.append(0, list(range(6)))
    tables.copy(0, 1, 0, -1)
    store.append(1, [60])
    store.append(0, [61])
    assert [v for _, v in store.held(0)] == [*range(6), 61]
    assert [v for _, v in store.held(1)] == [*range(6), 60]
    assert tables.n_free == 5


def test_a_fork_at_a_full_block_copies_nothing_ever() -> None:
    tables, store = make()
    store.append(0, list(range(8)))
    tables.copy(0, 1, 0, -1)
    assert not tables.append(1, 1)


def test_a_part_from_the_middle_is_copied() -> None:
    tables, store = make()
    store.append(0, list(range(10)))
    store.perform(tables.copy(0, 1, 3, 8))
    assert store.held(1) == [(i, i) for i in range(3, 8)]
    assert tables.n_past(1) == 8


def test_a_copy_goes_behind_what_is_there() -> None:
    tables, store = make()
    store.append(0, list(range(10)))
    store.append(1, [100, 101])
    store.perform(tables.copy(0, 1, 4, -1))
    assert store.held(1) == [(0, 100), (1, 101), *((i, i) for i in range(4, 10))]


# -- moving and restoring ----------------------------------------------------------------------


def test_moved_positions_and_the_next_one() -> None:
    tables, store = make()
    store.append(0, list(range(6)))
    mask = tables.select(0, 4, -1)
    assert not tables.move(0, mask, np.array([2, 3]))
    assert tables.positions(0).tolist() == [0, 1, 2, 3, 2, 3]
    assert tables.n_past(0) == 4


def test_moving_in_shared_blocks_copies_only_those() -> None:
    tables, store = make()
    store.append(0, list(range(10)))
    tables.copy(0, 1, 0, -1)
    copies = tables.move(1, tables.select(1, 4, 6), np.array([40, 50]))
    assert [(c.dst_offset, c.n) for c in copies] == [(0, 4)]
    store.perform(copies)
    assert store.held(1)[4:6] == [(40, 4), (50, 5)]
    assert store.held(0)[4:6] == [(4, 4), (5, 5)]


def test_restored_sequences_share_blocks() -> None:
    tables, _ = make()
    block = tables.pool.take()
    for seq_id in (0, 1):
        tables.restore(seq_id, [block], np.array([3, 9]))
    tables.pool.release(block)
    assert (tables.n_past(0), tables.n_free) == (10, 7)
    tables.trim(0, 0)
    tables.trim(1, 0)
    assert tables.n_free == 8


def test_extent_counts_slots_of_each_block_once() -> None:
    tables, store = make()
    store.append(0, list(range(6)))
    tables.copy(0, 1, 0, -1)
    tables.trim(1, 2)
    first, second = tables.tables[0].blocks
    assert tables.extent(tables.tables) == {first: 4, second: 2}


def test_many_tokens_need_no_many_steps() -> None:
    tables = BlockTables(4000, 32, 1, 0)
    tables.append(0, 100_000)
    copies = tables.remove(0, 10, 20)
    assert len(copies) < 7000
    assert all(isinstance(copy, Copy) for copy in copies)


# -- any order of operations -------------------------------------------------------------------

N_SEQUENCES = 3
SEQUENCES = st.integers(0, N_SEQUENCES - 1)
PLACES = st.integers(0, 30)


class AnyOrder(RuleBasedStateMachine):
    """The tables against plain lists of (position, value), one for each sequence."""

    @initialize(n_blocks=st.integers(6, 16), n=st.integers(5, 20))
    def open(self, n_blocks: int, n: int) -> None:
        self.tables, self.store = make(n_blocks, N_SEQUENCES)
        self.n_blocks = n_blocks
        self.expected: list[list[tuple[int, int]]] = [[] for _ in range(N_SEQUENCES)]
        self.value = 0
        self.append(0, n)

    def at(self, seq_id: int, place: int) -> int:
        """Turn a number into a position that the sequence may hold."""
        return place % (self.tables.n_past(seq_id) + 1)

    def attempt(self, work) -> bool:
        before = state_of(self.tables)
        try:
            self.store.perform(work())
        except PoolFullError:
            assert state_of(self.tables) == before
            return False
        return True

    @rule(seq_id=SEQUENCES, n=st.integers(1, 9))
    def append(self, seq_id: int, n: int) -> None:
        values = list(range(self.value, self.value + n))
        self.value += n
        at = self.tables.n_past(seq_id)
        before = state_of(self.tables)
        try:
            self.store.append(seq_id, values)
        except PoolFullError:
            assert state_of(self.tables) == before
            return
        self.expected[seq_id] += [(at + i, value) for i, value in enumerate(values)]

    @rule(seq_id=SEQUENCES, dropped=st.integers(0, 6))
    def trim(self, seq_id: int, dropped: int) -> None:
        keep = max(0, len(self.expected[seq_id]) - dropped)
        self.tables.trim(seq_id, keep)
        del self.expected[seq_id][keep:]

    @rule(seq_id=SEQUENCES, place=PLACES, n=st.integers(1, 7))
    def remove(self, seq_id: int, place: int, n: int) -> None:
        p0 = self.at(seq_id, place)
        if self.attempt(lambda: self.tables.remove(seq_id, p0, p0 + n)):
            held = self.expected[seq_id]
            self.expected[seq_id] = [c for c in held if not p0 <= c[0] < p0 + n]

    @rule(src=SEQUENCES, by=st.integers(1, N_SEQUENCES - 1), place=PLACES, n=PLACES)
    def copy_part(self, src: int, by: int, place: int, n: int) -> None:
        p0 = self.at(src, place)
        self.copy(src, (src + by) % N_SEQUENCES, p0, p0 + n)

    @rule(src=SEQUENCES, by=st.integers(1, N_SEQUENCES - 1))
    def fork(self, src: int, by: int) -> None:
        dst = (src + by) % N_SEQUENCES
        self.tables.trim(dst, 0)
        self.expected[dst] = []
        self.copy(src, dst, 0, -1)

    def copy(self, src: int, dst: int, p0: int, p1: int) -> None:
        if self.attempt(lambda: self.tables.copy(src, dst, p0, p1)):
            held = self.expected[src]
            self.expected[dst] += [c for c in held if p1 < 0 or p0 <= c[0] < p1]

    @rule(seq_id=SEQUENCES, place=PLACES, delta=st.integers(0, 5))
    def move(self, seq_id: int, place: int, delta: int) -> None:
        p0 = self.at(seq_id, place)
        mask = self.tables.select(seq_id, p0, -1)
        moved = self.tables.positions(seq_id)[mask] + delta
        if self.attempt(lambda: self.tables.move(seq_id, mask, moved)):
            held = self.expected[seq_id]
            self.expected[seq_id] = [(p + delta if p >= p0 else p, v) for p, v in held]

    @precondition(lambda self: self.n_blocks < 40)
    @rule(n=st.integers(1, 3))
    def grow(self, n: int) -> None:
        self.tables.pool.grow(n)
        self.n_blocks += n
        self.store.slots = np.vstack([self.store.slots, np.full((n, SIZE), -1)])

    @invariant()
    def each_sequence_holds_what_it_should(self) -> None:
        for seq_id, expected in enumerate(self.expected):
            assert self.store.held(seq_id) == expected
            assert self.tables.n_past(seq_id) == max((p + 1 for p, _ in expected), default=0)
            assert self.tables.n_resident(seq_id) == len(expected)

    @invariant()
    def each_block_is_counted(self) -> None:
        held = [block for table in self.tables.tables for block in table.blocks]
        for block in set(held):
            assert self.tables.pool.holders(block) == held.count(block)
        assert self.tables.n_free == self.n_blocks - len(set(held))
        for table in self.tables.tables:
            assert len(table.blocks) == -(-table.n // SIZE)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("call", ["trim", "remove", "append"])
def test_a_ctrl_c_leaves_positions_that_agree(call: str) -> None:
    """Wherever it comes, the end is that of the positions held: before the call, or after it."""
    calls = {
        "trim": lambda tables: tables.trim(0, 3),
        "remove": lambda tables: tables.remove(0, 1, 3),
        "append": lambda tables: tables.append(0, 4),
    }
    for n in range(1, 200):
        tables = BlockTables(8, SIZE, 2, 0)
        tables.append(0, 6)
        came = interrupt(n, lambda tables=tables: calls[call](tables), blocks.__file__)
        table = tables.tables[0]
        assert table.next == max(table.positions.tolist()) + 1
        assert len(set(table.positions.tolist())) == table.n
        if not came:
            return
    pytest.fail("it never ended")
