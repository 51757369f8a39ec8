"""Sequences that lost their cells: in host memory first, then in files, and found again.

What is stored is found by its tokens, namespace and identity, never by a hash alone. Nothing here
knows an engine: payloads are bytes, or become bytes when they are written to a file.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple, Protocol

import attrs

from infercore.session.cache_folder import CacheFolder, Key, file_name
from infercore.session.prefix_index import PrefixIndex

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TypeAlias


class Unpacked(Protocol):
    """Saved state as it lies in memory, which `pack` makes bytes of `Context.save_sequence` of."""

    @property
    def n_bytes(self) -> int:
        """Bytes that it takes in memory, about."""

    def pack(self) -> bytes:
        """Return it as bytes."""


Saved: TypeAlias = "bytes | Unpacked"


def n_bytes_of(data: Saved) -> int:
    """Return how many bytes ``data`` takes in memory, about."""
    return len(data) if isinstance(data, bytes) else data.n_bytes


class Found(NamedTuple):
    """The first ``n_tokens`` of what was asked for are stored, in an entry of ``n_stored``.

    ``load()`` gives its data, or None where it is gone or damaged by now: a cold start.
    """

    n_tokens: int
    n_stored: int
    load: Callable[[], Saved | None]


@attrs.frozen
class _Entry:
    key: Key
    tokens: tuple[int, ...]
    data: Saved = attrs.field(repr=False)

    @property
    def size(self) -> int:
        """Bytes that it takes in memory, about."""
        return n_bytes_of(self.data) + 8 * len(self.tokens)


class Store:
    """Up to ``n_bytes`` of host memory, then up to ``folder_bytes`` of files in ``folder``.

    The least recently used go: from memory to the folder, from the folder for good. With
    ``can_cut`` (an engine that can drop the end of a sequence) an entry serves all its beginnings,
    so that shorter ones go as longer ones come. Safe for threads; files for processes.

    Raises `InvalidInputError` for a folder of others' files that others may read.
    """

    def __init__(
        self,
        *,
        n_bytes: int = 0,
        folder: str | None = None,
        folder_bytes: int = 10 * 2**30,
        can_cut: bool = True,
    ) -> None:
        self._lock = threading.Lock()
        self._most_bytes = n_bytes
        self._can_cut = can_cut
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._index: PrefixIndex[str] = PrefixIndex()
        self._folder = (
            None if folder is None else CacheFolder(folder, folder_bytes, can_cut=can_cut)
        )
        self.n_bytes = 0
        """Bytes of host memory that are used."""

    @property
    def has_memory(self) -> bool:
        """Whether host memory may be used, and not the folder alone."""
        return self._most_bytes > 0

    def put(self, namespace: str, identity: str, tokens: Sequence[int], data: Saved) -> bool:
        """Store ``data``, which holds ``tokens``; return whether it is stored now."""
        entry = _Entry(Key.of(namespace, identity), tuple(tokens), data)
        with self._lock:
            return self._put(entry)

    def use(self, namespace: str, identity: str, tokens: Sequence[int]) -> bool:
        """Note that ``tokens`` were used; False where memory does not hold them all.

        Nor where an entry serves no beginnings of itself: it is another one with each row.
        """
        with self._lock:
            return self._use(Key.of(namespace, identity), list(tokens))

    def _use(self, key: Key, tokens: list[int]) -> bool:
        longer = self._index.find(key, tokens) if self._can_cut else None
        if longer is None or longer.n_tokens < len(tokens):
            return False
        self._entries.move_to_end(longer.holder)
        return True

    def _put(self, entry: _Entry) -> bool:
        name = file_name(entry.key, entry.tokens)
        tokens = list(entry.tokens)
        if self._use(entry.key, tokens):
            return True
        if entry.size > self._most_bytes:
            return self._to_folder(entry)
        if self._can_cut:
            for shorter in self._index.inside(entry.key, tokens):
                self._forget(shorter.holder)
        self._forget(name)
        self._entries[name] = entry
        self._index.put(name, entry.key, tokens)
        self.n_bytes += entry.size
        while self.n_bytes > self._most_bytes:
            self._to_folder(self._forget(next(iter(self._entries))))
        return True

    def _forget(self, name: str) -> _Entry | None:
        entry = self._entries.pop(name, None)
        if entry is not None:
            self._index.drop(name)
            self.n_bytes -= entry.size
        return entry

    def _to_folder(self, entry: _Entry | None) -> bool:
        if self._folder is None or entry is None:
            return False
        data = entry.data if isinstance(entry.data, bytes) else entry.data.pack()
        return self._folder.put(entry.key, entry.tokens, data)

    def find(
        self, namespace: str, identity: str, tokens: Sequence[int], *, whole: bool | None = None
    ) -> Found | None:
        """Return the entry with the longest beginning of ``tokens``; None where nothing fits.

        ``whole`` (None = where the end of a sequence cannot be dropped): only entries of which all
        tokens begin ``tokens``.
        """
        key, wanted = Key.of(namespace, identity), list(tokens)
        only_whole = not self._can_cut if whole is None else whole
        with self._lock:
            kept = self._find_in_memory(key, wanted, only_whole)
            if self._folder is None or (kept is not None and kept.n_tokens == len(wanted)):
                return kept
            file = self._folder.find(key, wanted, whole=only_whole)
            if file is None or (kept is not None and kept.n_tokens >= file.n_tokens):
                return kept
            n_stored = len(self._folder.tokens(file.holder))
        return Found(file.n_tokens, n_stored, lambda: self._load_file(key, file.holder))

    def _find_in_memory(self, key: Key, tokens: list[int], whole: bool) -> Found | None:  # noqa: FBT001
        if whole:
            found = next(reversed(self._index.inside(key, tokens)), None)
        else:
            found = self._index.find(key, tokens)
        if found is None:
            return None
        entry = self._entries[found.holder]
        return Found(found.n_tokens, len(entry.tokens), lambda: self._used(found.holder, entry))

    def _used(self, name: str, entry: _Entry) -> Saved:
        with self._lock:
            if name in self._entries:
                self._entries.move_to_end(name)
        return entry.data

    def _load_file(self, key: Key, name: str) -> bytes | None:
        with self._lock:
            return None if self._folder is None else self._folder.load(key, name)

    def held(self) -> list[tuple[bytes, tuple[int, ...]]]:
        """Return what memory holds: SHA-256 of the namespace, and tokens."""
        with self._lock:
            return [(entry.key.namespace, entry.tokens) for entry in self._entries.values()]

    def flush(self, namespace: str | None = None) -> None:
        """Forget everything, or what one namespace has, in memory and in the folder."""
        of = None if namespace is None else Key.of(namespace, "").namespace
        with self._lock:
            for name, entry in list(self._entries.items()):
                if of is None or entry.key.namespace == of:
                    self._forget(name)
            if self._folder is not None:
                self._folder.flush(of)

    def close(self) -> None:
        """Move what memory holds to the folder, for the next program; then memory holds nothing."""
        with self._lock:
            while self._entries:
                self._to_folder(self._forget(next(iter(self._entries))))
