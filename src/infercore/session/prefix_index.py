"""Who holds which tokens: a radix tree over the tokens of all sequences of a pool.

A key (namespace, adapters, identity) has a tree of its own, so nothing is ever found across keys.
Each holder is a path from the root; equal beginnings are one path. A node's label is a stretch of
a shared buffer, so that cutting a label in two and joining two again copies nothing, and a holder
that grows token by token appends in place. Pure: it knows no engine and no lock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

import attrs

from infercore.session.tape import common_prefix

if TYPE_CHECKING:
    from collections.abc import Hashable, KeysView, Sequence

H = TypeVar("H", bound="Hashable")


@attrs.frozen
class Match(Generic[H]):
    """The first ``n_tokens`` of what was asked for are held, by ``holder`` among others."""

    holder: H
    n_tokens: int


class _Node(Generic[H]):
    """The tokens ``buffer[low:high]``, behind ``start`` others; ``holders`` have them all."""

    __slots__ = ("buffer", "children", "high", "holders", "low", "n_ends", "parent", "start")

    def __init__(
        self, parent: _Node[H] | None, start: int, buffer: list[int], low: int, high: int
    ) -> None:
        self.parent, self.start = parent, start
        self.buffer, self.low, self.high = buffer, low, high
        self.children: dict[int, _Node[H]] = {}
        self.holders: dict[H, None] = {}
        self.n_ends = 0  # holders that end here

    def __len__(self) -> int:
        return self.high - self.low

    @property
    def end(self) -> int:
        return self.start + self.high - self.low

    def common(self, tokens: list[int], start: int) -> int:
        """Return how many tokens of the label continue ``tokens`` from ``start``."""
        n = min(self.high - self.low, len(tokens) - start)
        return common_prefix(self.buffer[self.low : self.low + n], tokens[start : start + n])


class PrefixIndex(Generic[H]):
    """The longest prefix that any sequence holds, by key.

    ``find``, ``put``, ``extend`` and ``cut`` take time in proportion to the tokens concerned,
    whoever else holds what. Holders are what callers take for sequences: anything hashable.
    """

    def __init__(self) -> None:
        self._roots: dict[Hashable, _Node[H]] = {}
        self._ends: dict[H, _Node[H]] = {}
        self._keys: dict[H, Hashable] = {}

    def __contains__(self, holder: H) -> bool:
        return holder in self._ends

    def __len__(self) -> int:
        return len(self._ends)

    def n_held(self, holder: H) -> int:
        """Return how many tokens ``holder`` holds; 0 where it is not known."""
        node = self._ends.get(holder)
        return 0 if node is None else node.end

    def holders(self) -> KeysView[H]:
        """Return all holders."""
        return self._ends.keys()

    def key(self, holder: H) -> Hashable | None:
        """Return the key of ``holder``, None where it is not known."""
        return self._keys.get(holder)

    def tokens(self, holder: H) -> list[int]:
        """Return the tokens that ``holder`` holds."""
        tokens: list[int] = []
        for node in reversed(self._path(holder)):
            tokens += node.buffer[node.low : node.high]
        return tokens

    def _path(self, holder: H) -> list[_Node[H]]:
        """Return the nodes of ``holder`` from its end to below the root."""
        path, node = [], self._ends.get(holder)
        while node is not None and node.parent is not None:
            path.append(node)
            node = node.parent
        return path

    def find(
        self, key: Hashable, tokens: Sequence[int], *, but: H | None = None
    ) -> Match[H] | None:
        """Return who holds the longest beginning of ``tokens`` under ``key``; None = nobody any.

        ``but`` is left out: who asks for itself has no use for its own.
        """
        node = self._roots.get(key)
        wanted = tokens if isinstance(tokens, list) else list(tokens)
        found, n = None, 0
        while node is not None and n < len(wanted):
            child = node.children.get(wanted[n])
            if child is None:
                break
            other = next((holder for holder in child.holders if holder != but), None)
            if other is None:
                break
            more = child.common(wanted, n)
            n += more
            found = Match(other, n)
            node = child if more == len(child) else None
        return found

    def inside(self, key: Hashable, tokens: Sequence[int]) -> list[Match[H]]:
        """Return those whose tokens, all of them, begin ``tokens``; the shortest first."""
        node = self._roots.get(key)
        wanted = tokens if isinstance(tokens, list) else list(tokens)
        found: list[Match[H]] = []
        while node is not None:
            if node.n_ends:
                ends = (holder for holder in node.holders if self._ends[holder] is node)
                found += (Match(holder, node.end) for holder in ends)
            child = node.children.get(wanted[node.end]) if node.end < len(wanted) else None
            whole = child is not None and child.common(wanted, node.end) == len(child)
            node = child if whole else None
        return found

    def put(self, holder: H, key: Hashable, tokens: Sequence[int]) -> None:
        """Say that ``holder`` holds exactly ``tokens`` under ``key``, whatever it held before."""
        wanted = list(tokens)
        if self._keys.get(holder, key) != key:
            self.drop(holder)
        self._enter(holder, key)
        n = 0
        for node in reversed(self._path(holder)):
            more = node.common(wanted, n)
            n += more
            if more < len(node):
                break
        self.cut(holder, n)
        self.extend(holder, wanted[n:])

    def _enter(self, holder: H, key: Hashable) -> None:
        if holder in self._ends:
            return
        root = self._roots.setdefault(key, _Node(None, 0, [], 0, 0))
        root.holders[holder] = None
        root.n_ends += 1
        self._ends[holder], self._keys[holder] = root, key

    def extend(self, holder: H, tokens: Sequence[int]) -> None:
        """Say that ``holder``, which is known, holds ``tokens`` behind what it held."""
        more = tokens if isinstance(tokens, list) else list(tokens)
        node, n = self._ends[holder], 0
        while n < len(more):
            child = node.children.get(more[n])
            if child is None:
                self._append(node, holder, more[n:])
                return
            common = child.common(more, n)
            if common < len(child):
                child = self._split(child, common)
            child.holders[holder] = None
            self._move_end(holder, node, child)
            node, n = child, n + common

    def _append(self, node: _Node[H], holder: H, tokens: list[int]) -> None:
        """Add ``tokens``, which nobody holds there, behind ``node``, where ``holder`` ends."""
        if node.parent is not None and len(node.holders) == 1:  # its own leaf: it grows in place
            if node.high != len(node.buffer):
                node.buffer = node.buffer[node.low : node.high]
                node.low, node.high = 0, len(node.buffer)
            node.buffer += tokens
            node.high += len(tokens)
            return
        buffer, low = (node.buffer, node.high) if node.high == len(node.buffer) else ([], 0)
        if node.parent is None:
            buffer, low = [], 0
        buffer += tokens
        child = _Node(node, node.end, buffer, low, low + len(tokens))
        child.holders[holder] = None
        node.children[tokens[0]] = child
        self._move_end(holder, node, child)

    def _move_end(self, holder: H, old: _Node[H], new: _Node[H]) -> None:
        old.n_ends -= 1
        new.n_ends += 1
        self._ends[holder] = new
        self._join(old)

    def _split(self, node: _Node[H], n: int) -> _Node[H]:
        """Cut the first ``n`` tokens off ``node`` and return the new node that has them."""
        parent = node.parent
        assert parent is not None  # noqa: S101  (a root has no tokens)
        top = _Node(parent, node.start, node.buffer, node.low, node.low + n)
        top.holders = dict(node.holders)
        parent.children[node.buffer[node.low]] = top
        top.children[node.buffer[node.low + n]] = node
        node.parent, node.start, node.low = top, node.start + n, node.low + n
        return top

    def _join(self, node: _Node[H]) -> None:
        """Make ``node`` one with its only child, where nobody ends between the two."""
        parent = node.parent
        if parent is None or node.n_ends or len(node.children) != 1:
            return
        (child,) = node.children.values()
        if child.buffer is not node.buffer or child.low != node.high:
            return
        child.parent, child.start, child.low = parent, node.start, node.low
        parent.children[child.buffer[child.low]] = child

    def cut(self, holder: H, n_tokens: int) -> None:
        """Say that ``holder``, which is known, holds only its first ``n_tokens`` now."""
        node = self._ends[holder]
        if node.end <= n_tokens:
            return
        node.n_ends -= 1
        while node.parent is not None and node.start >= n_tokens:
            node = self._leave(node, holder)
        keep = n_tokens - node.start
        if keep < len(node):
            if len(node.holders) == 1:
                node.high = node.low + keep
            else:
                below, node = node, self._split(node, keep)
                del below.holders[holder]
        node.n_ends += 1
        self._ends[holder] = node

    def _leave(self, node: _Node[H], holder: H) -> _Node[H]:
        """Take ``holder`` out of ``node`` and return the node above."""
        parent = node.parent
        assert parent is not None  # noqa: S101  (asked for nodes below a root only)
        del node.holders[holder]
        if not node.holders:
            del parent.children[node.buffer[node.low]]
        else:
            self._join(node)
        return parent

    def drop(self, holder: H) -> None:
        """Forget ``holder``; nothing happens where it is not known."""
        if holder not in self._ends:
            return
        self.cut(holder, 0)
        root, key = self._ends.pop(holder), self._keys.pop(holder)
        root.n_ends -= 1
        del root.holders[holder]
        if not root.holders:
            del self._roots[key]
