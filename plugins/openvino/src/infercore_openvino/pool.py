"""Blocks and how many hold each of them."""

from __future__ import annotations


class PoolFullError(Exception):
    """There are not enough free blocks; nothing was changed. ``missing`` says how many."""

    def __init__(self, missing: int) -> None:
        self.missing = missing


class Pool:
    """Blocks ``first`` to ``first + n_blocks - 1``, each with the number of its holders."""

    def __init__(self, n_blocks: int, first: int) -> None:
        self._first = first
        self._holders = [0] * n_blocks
        self._free = list(range(first + n_blocks - 1, first - 1, -1))

    @property
    def n_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    def grow(self, n_blocks: int) -> None:
        """Add ``n_blocks`` free blocks after the last one."""
        end = self._first + len(self._holders)
        self._holders.extend([0] * n_blocks)
        self._free[:0] = range(end + n_blocks - 1, end - 1, -1)

    def need(self, n_blocks: int) -> None:
        """Raise `PoolFullError` unless ``n_blocks`` can be taken."""
        if n_blocks > len(self._free):
            raise PoolFullError(n_blocks - len(self._free))

    def take(self) -> int:
        """Return a free block, held once now."""
        block = self._free.pop()
        self._holders[block - self._first] = 1
        return block

    def share(self, block: int) -> None:
        """Add a holder."""
        self._holders[block - self._first] += 1

    def release(self, block: int) -> None:
        """Take a holder away; the block is free with the last one."""
        self._holders[block - self._first] -= 1
        if not self._holders[block - self._first]:
            self._free.append(block)

    def holders(self, block: int) -> int:
        """Return how many hold the block."""
        return self._holders[block - self._first]
