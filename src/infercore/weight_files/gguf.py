"""Reads the header of a GGUF file: its metadata and the list of its tensors, not their numbers.

Source of the layout: ``docs/gguf.md`` in the ggml repository.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from infercore.values.files import open_regular

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import BinaryIO

_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_STRING, _ARRAY = 8, 9
MAGIC = b"GGUF"
_LENGTH = struct.Struct("<Q")
_START = 8  # behind the magic number and the version
MAX_DIMENSIONS = 4
ALIGNMENT = 32
# Beyond what any model has, and within what is read in a moment: the counts come from the file.
MAX_ENTRIES, MAX_TENSORS, MAX_ITEMS, MAX_TEXT_BYTES = 2**14, 2**17, 2**23, 2**26
MAX_HEADER_BYTES = 2**29
_READ_BYTES = 2**20


class MalformedError(ValueError):
    """The header cannot be read to its end."""


class ImplausibleError(ValueError):
    """The header says that there is more than any model has."""


@dataclass(frozen=True)
class Tensor:
    """A tensor's name, its dimensions, the fastest one first, the number of its type, its place.

    ``offset`` counts bytes from the start of the file.
    """

    name: str
    dims: tuple[int, ...]
    kind: int
    offset: int


@dataclass
class Header:
    """Metadata by key (of arrays of numbers and of strings a tuple) and the tensors by name."""

    metadata: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    doubled: list[str] = field(default_factory=list)

    @property
    def architecture(self) -> str:
        """The name before the keys of the model's shape."""
        return str(self.metadata.get("general.architecture", ""))

    def own(self, key: str) -> Any:
        """Return the value of ``key`` under the architecture, None where it is absent."""
        return self.metadata.get(f"{self.architecture}.{key}")


def read(path: str) -> Header:
    """Return the header of the file at ``path``.

    Raises `MalformedError`, `ImplausibleError` and OSError.
    """
    with open_regular(path) as file:
        try:
            return _Reader(file).header()
        except (struct.error, OverflowError, MemoryError, KeyError) as error:
            raise MalformedError(f"its header cannot be read ({error!r})") from error


class _Reader:
    """A place in the file, and what can be read from there.

    The file is read, never mapped: one that is cut short meanwhile is an error and no signal.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._n_bytes = os.fstat(file.fileno()).st_size
        self._data = bytearray()
        self._at = _START
        self._readers: dict[int, Callable[[], Any]] = {
            **{kind: self._scalar(layout) for kind, layout in _SCALARS.items()},
            _STRING: self._text,
            _ARRAY: self._array,
        }

    def _need(self, end: int) -> None:
        """Have the file's first ``end`` bytes in memory."""
        if end > self._n_bytes:
            raise struct.error("it goes beyond the end of the file")
        if end > MAX_HEADER_BYTES:
            raise ImplausibleError(f"its header is longer than {MAX_HEADER_BYTES} bytes")
        while len(self._data) < end:
            piece = self._file.read(max(_READ_BYTES, end - len(self._data)))
            if not piece:
                raise struct.error("the file was cut short")
            self._data += piece

    def _count(self, layout: str, most: int, what: str) -> int:
        n: int = self._one(layout)
        if n > most:
            raise ImplausibleError(f"it says that it has {n} {what}")
        return n

    def header(self) -> Header:
        n_tensors = self._count("<Q", MAX_TENSORS, "tensors")
        n_entries = self._count("<Q", MAX_ENTRIES, "entries")
        header = Header()
        for _ in range(n_entries):
            key = self._text()
            if key in header.metadata:
                header.doubled.append(key)
            header.metadata[key] = self._readers[self._one("<I")]()
        tensors = [self._tensor() for _ in range(n_tensors)]
        step = header.metadata.get("general.alignment", ALIGNMENT)
        step = step if isinstance(step, int) and step > 0 else ALIGNMENT
        start = -(-self._at // step) * step
        header.tensors = {t.name: replace(t, offset=start + t.offset) for t in tensors}
        return header

    def _take(self, layout: str) -> tuple[Any, ...]:
        start, end = self._at, self._at + struct.calcsize(layout)
        if end > len(self._data):
            self._need(end)
        self._at = end
        return struct.unpack_from(layout, self._data, start)

    def _one(self, layout: str) -> Any:
        return self._take(layout)[0]

    def _scalar(self, layout: str) -> Callable[[], Any]:
        return lambda: self._one("<" + layout)

    def _text(self) -> str:
        return self._bytes().decode("utf-8", "replace")

    def _bytes(self) -> bytes:
        start = self._at + 8
        length = self._count("<Q", MAX_TEXT_BYTES, "bytes in a text")
        end = start + length
        if end > len(self._data):
            self._need(end)
        self._at = end
        return bytes(self._data[start:end])

    def _array(self) -> tuple[Any, ...]:
        kind = self._one("<I")
        count = self._count("<Q", MAX_ITEMS, "items in an array")
        if kind == _STRING:
            return self._texts(count)
        return self._take(f"<{count}{_SCALARS[kind]}")

    def _texts(self, count: int) -> tuple[bytes, ...]:
        """Return what `_bytes` would, ``count`` times, a good deal sooner."""
        texts, at, data = [], self._at, self._data
        unpack = _LENGTH.unpack_from
        for _ in range(count):
            start = at + _LENGTH.size
            if start > len(data):
                self._need(start)
            (length,) = unpack(data, at)
            if length > MAX_TEXT_BYTES:
                raise ImplausibleError(f"it says that it has {length} bytes in a text")
            at = start + length
            if at > len(data):
                self._need(at)
            texts.append(bytes(data[start:at]))
        self._at = at
        return tuple(texts)

    def _tensor(self) -> Tensor:
        name = self._text()
        n_dims = self._one("<I")
        if n_dims > MAX_DIMENSIONS:
            raise MalformedError(f"its tensor {name!r} has {n_dims} dimensions")
        dims = self._take(f"<{n_dims}Q")
        kind, offset = self._take("<IQ")
        return Tensor(name, dims, kind, offset)
