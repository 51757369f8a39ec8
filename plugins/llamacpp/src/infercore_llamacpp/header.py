"""Reads the header of a GGUF file: its metadata and the list of its tensors, never their data.

Source of the layout: ``docs/gguf.md`` in the ggml repository.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_STRING, _ARRAY = 8, 9
_START = 8  # behind the magic number and the version
MAX_DIMENSIONS = 4


class MalformedError(ValueError):
    """The header cannot be read to its end."""


@dataclass(frozen=True)
class Tensor:
    """A tensor's name and its dimensions, the fastest one first."""

    name: str
    dims: tuple[int, ...]


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
    """Return the header of the file at ``path``. Raises `MalformedError` and OSError."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            return _Reader(data).header()
        except (struct.error, OverflowError, MemoryError, KeyError) as error:
            raise MalformedError(f"its header cannot be read ({error!r})") from error


class _Reader:
    """A place in the file, and what can be read from there."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = _START
        self._readers: dict[int, Callable[[], Any]] = {
            **{kind: self._scalar(layout) for kind, layout in _SCALARS.items()},
            _STRING: self._text,
            _ARRAY: self._array,
        }

    def header(self) -> Header:
        n_tensors, n_entries = self._take("<QQ")
        header = Header()
        for _ in range(n_entries):
            key = self._text()
            if key in header.metadata:
                header.doubled.append(key)
            header.metadata[key] = self._readers[self._one("<I")]()
        for _ in range(n_tensors):
            tensor = self._tensor()
            header.tensors[tensor.name] = tensor
        return header

    def _take(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from(layout, self._data, self._at)
        self._at += struct.calcsize(layout)
        return values

    def _one(self, layout: str) -> Any:
        return self._take(layout)[0]

    def _scalar(self, layout: str) -> Callable[[], Any]:
        return lambda: self._one("<" + layout)

    def _text(self) -> str:
        return self._bytes().decode("utf-8", "replace")

    def _bytes(self) -> bytes:
        (length,) = struct.unpack_from("<Q", self._data, self._at)
        start = self._at + 8
        self._at = start + length
        if self._at > len(self._data):
            raise struct.error("a text goes beyond the end of the file")
        return self._data[start : self._at]

    def _array(self) -> tuple[Any, ...]:
        kind, count = self._take("<IQ")
        if kind == _STRING:
            return tuple(self._bytes() for _ in range(count))
        layout = f"<{count}{_SCALARS[kind]}"
        if count > len(self._data):
            raise struct.error("an array goes beyond the end of the file")
        return self._take(layout)

    def _tensor(self) -> Tensor:
        name = self._text()
        n_dims = self._one("<I")
        if n_dims > MAX_DIMENSIONS:
            raise MalformedError(f"its tensor {name!r} has {n_dims} dimensions")
        dims = self._take(f"<{n_dims}Q")
        self._take("<IQ")  # type and offset
        return Tensor(name, dims)
