"""Block tables: which slots of a pool of KV blocks each sequence holds, and at which positions.

A block has room for ``block_size`` tokens. A sequence is a list of blocks, all full but the last,
and the position of each of its tokens. Blocks are counted: a fork shares them, and whoever
writes into a shared one gets a copy first. Nothing here knows of tensors: calls that move
tokens return the `Copy` steps that the caller must perform, in that order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from infercore_openvino.pool import Pool

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

    Positions = npt.NDArray[np.int64]
    Mask = npt.NDArray[np.bool_]

_EMPTY_CAPACITY = 64


class Copy(NamedTuple):
    """Copy ``n`` slots of one block into another (or the same one, which may overlap)."""

    src: int
    src_offset: int
    dst: int
    dst_offset: int
    n: int


class Table:
    """One sequence: its ``blocks``, the number of tokens ``n`` and the position of each.

    ``next`` is the position after the highest one. ``version`` changes with the ``blocks`` of a
    table that holds tokens, and where it is emptied.
    """

    __slots__ = ("_positions", "blocks", "n", "next", "version")

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.n = 0
        self.next = 0
        self.version = 0
        self._positions: Positions = np.empty(_EMPTY_CAPACITY, dtype=np.int64)

    @property
    def positions(self) -> Positions:
        """The position of each token, in the order of the slots; a view."""
        return self._positions[: self.n]

    def set_positions(self, positions: Positions) -> None:
        """Hold ``positions``, one a token."""
        n = len(positions)
        after = int(positions.max()) + 1 if n else 0
        self._reserve(n)
        self._positions[:n] = positions  # from here on no call, behind which a Ctrl-C might come
        self.n, self.next = n, after

    def extend(self, first: int, n_tokens: int) -> None:
        """Add ``n_tokens`` at the positions from ``first`` on."""
        end, after = self.n + n_tokens, max(self.next, first + n_tokens)
        self._reserve(end)
        self._positions[self.n : end] = np.arange(first, first + n_tokens)
        self.n, self.next = end, after

    def _reserve(self, n_tokens: int) -> None:
        if n_tokens > len(self._positions):
            self._positions = np.resize(self._positions, max(n_tokens, 2 * len(self._positions)))


class BlockTables:
    """The tables of ``n_sequences`` over one pool."""

    def __init__(self, n_blocks: int, block_size: int, n_sequences: int, first_block: int) -> None:
        self.block_size = block_size
        self.pool = Pool(n_blocks, first_block)
        self.tables = [Table() for _ in range(n_sequences)]

    # -- queries -------------------------------------------------------------------------------

    @property
    def n_free(self) -> int:
        """Free blocks."""
        return self.pool.n_free

    def n_resident(self, seq_id: int) -> int:
        """Return how many tokens the sequence holds."""
        return self.tables[seq_id].n

    def n_past(self, seq_id: int) -> int:
        """Return the position after its highest one."""
        return self.tables[seq_id].next

    def positions(self, seq_id: int) -> Positions:
        """Return the position of each of its tokens, in the order of the slots; a view."""
        return self.tables[seq_id].positions

    def select(self, seq_id: int, p0: int, p1: int) -> Mask:
        """Return which of its tokens are in [p0, p1); p1 -1 = to the end."""
        positions = self.positions(seq_id)
        mask: Mask = positions >= p0
        return mask if p1 < 0 else mask & (positions < p1)

    def extent(self, tables: Iterable[Table]) -> dict[int, int]:
        """Return how many slots of each block the ``tables`` use, in order of first use."""
        used: dict[int, int] = {}
        for table in tables:
            for index, block in enumerate(table.blocks):
                slots = min(self.block_size, table.n - index * self.block_size)
                used[block] = max(used.get(block, 0), slots)
        return used

    def _blocks_for(self, n_tokens: int) -> int:
        return -(-n_tokens // self.block_size)

    # -- appending -----------------------------------------------------------------------------

    def append(self, seq_id: int, n_tokens: int, first: int | None = None) -> Sequence[Copy]:
        """Add ``n_tokens`` at positions from ``first`` on (None = the next one).

        Raises `PoolFullError` with nothing changed.
        """
        table = self.tables[seq_id]
        at = table.next if first is None else first
        copies = self._reserve(table, table.n + n_tokens)
        table.extend(at, n_tokens)
        return copies

    def _reserve(self, table: Table, n_tokens: int) -> Sequence[Copy]:
        """Give the table blocks for ``n_tokens``, of which those behind ``table.n`` are its own."""
        used = table.n % self.block_size
        split = bool(used) and self.pool.holders(table.blocks[-1]) > 1
        more = self._blocks_for(n_tokens) - len(table.blocks)
        if not split and not more:
            return ()
        self.pool.need(more + split)
        copies = [self._own(table, len(table.blocks) - 1, used)] if split else []
        table.blocks.extend(self.pool.take() for _ in range(more))
        table.version += 1
        return copies

    def _own(self, table: Table, index: int, used: int) -> Copy:
        """Replace a shared block by a copy of its first ``used`` slots."""
        shared = table.blocks[index]
        table.blocks[index] = self.pool.take()
        self.pool.release(shared)
        table.version += 1
        return Copy(shared, 0, table.blocks[index], 0, used)

    # -- removing ------------------------------------------------------------------------------

    def trim(self, seq_id: int, n_tokens: int) -> None:
        """Keep the first ``n_tokens`` slots."""
        self._keep_blocks(self.tables[seq_id], n_tokens)
        self.tables[seq_id].set_positions(self.positions(seq_id)[:n_tokens])

    def _keep_blocks(self, table: Table, n_tokens: int) -> None:
        keep = self._blocks_for(n_tokens)
        for block in table.blocks[keep:]:
            self.pool.release(block)
        del table.blocks[keep:]
        table.version += 1

    def remove(self, seq_id: int, p0: int, p1: int) -> Sequence[Copy]:
        """Remove the positions [p0, p1); what lies behind moves up.

        Raises `PoolFullError` with nothing changed, where shared blocks must be copied.
        """
        mask = self.select(seq_id, p0, p1)
        if not mask.any():
            return ()
        first = int(mask.argmax())
        kept = np.flatnonzero(~mask)
        if len(kept) == first:
            self.trim(seq_id, first)
            return ()
        return self._compact(seq_id, first, kept)

    def _compact(self, seq_id: int, first: int, kept: npt.NDArray[np.intp]) -> Sequence[Copy]:
        """Move the slots ``kept`` to the front, where those before ``first`` are already."""
        table = self.tables[seq_id]
        source = list(table.blocks)
        start = first // self.block_size
        touched = range(start, self._blocks_for(len(kept)))
        shared = [i for i in touched if self.pool.holders(source[i]) > 1]
        self.pool.need(len(shared))
        for i in shared:
            table.blocks[i] = self.pool.take()
        begin = start * self.block_size if start in shared else first
        copies = self._moves(source, table.blocks, kept, begin)
        for i in shared:
            self.pool.release(source[i])
        self._keep_blocks(table, len(kept))
        table.set_positions(table.positions[kept])
        return copies

    def _moves(
        self, source: list[int], target: list[int], kept: npt.NDArray[np.intp], begin: int
    ) -> list[Copy]:
        """Return the copies of slots ``kept[i]`` to ``i``, for all i from ``begin`` on."""
        size, copies, i = self.block_size, [], begin
        while i < len(kept):
            slot = int(kept[i])
            most = min(size - slot % size, size - i % size, len(kept) - i)
            broken = kept[i : i + most] != np.arange(slot, slot + most)
            n = int(broken.argmax()) if broken.any() else most
            copies.append(Copy(source[slot // size], slot % size, target[i // size], i % size, n))
            i += n
        return copies

    def clear(self) -> None:
        """Remove everything."""
        for seq_id in range(len(self.tables)):
            self.trim(seq_id, 0)

    # -- copying and moving --------------------------------------------------------------------

    def copy(self, src: int, dst: int, p0: int, p1: int) -> Sequence[Copy]:
        """Add to ``dst`` what ``src`` holds in [p0, p1); blocks are shared where that is possible.

        Raises `PoolFullError` with nothing changed.
        """
        slots = np.flatnonzero(self.select(src, p0, p1))
        source, target = self.tables[src], self.tables[dst]
        if not len(slots):
            return ()
        if target.n == 0 and slots[-1] == len(slots) - 1:
            self._fork(source, target, len(slots))
            return ()
        return self._copy_slots(source, target, slots)

    def _fork(self, source: Table, target: Table, n_tokens: int) -> None:
        target.blocks = source.blocks[: self._blocks_for(n_tokens)]
        for block in target.blocks:
            self.pool.share(block)
        target.set_positions(source.positions[:n_tokens])

    def _copy_slots(
        self, source: Table, target: Table, slots: npt.NDArray[np.intp]
    ) -> Sequence[Copy]:
        n_before = target.n
        copies = [*self._reserve(target, n_before + len(slots))]
        target.set_positions(np.concatenate([target.positions, source.positions[slots]]))
        where = np.pad(slots, (n_before, 0))
        return copies + self._moves(source.blocks, target.blocks, where, n_before)

    def move(self, seq_id: int, mask: Mask, positions: Positions) -> Sequence[Copy]:
        """Give the tokens of ``mask`` new ``positions``; their blocks become the sequence's own.

        Raises `PoolFullError` with nothing changed.
        """
        table = self.tables[seq_id]
        touched = np.unique(np.flatnonzero(mask) // self.block_size)
        shared = [int(i) for i in touched if self.pool.holders(table.blocks[i]) > 1]
        self.pool.need(len(shared))
        size = self.block_size
        copies = [self._own(table, i, min(size, table.n - i * size)) for i in shared]
        moved = table.positions.copy()
        moved[mask] = positions
        table.set_positions(moved)
        return copies

    def restore(self, seq_id: int, blocks: Sequence[int], positions: Positions) -> None:
        """Let an empty sequence hold ``blocks``, which it shares, with ``positions``."""
        table = self.tables[seq_id]
        table.blocks = list(blocks)
        for block in blocks:
            self.pool.share(block)
        table.set_positions(positions)
