"""Copies of a GGUF file with other metadata, fewer tensors, or in several parts.

Source of the layout: ``docs/gguf.md`` in the ggml repository.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import attrs

from infercore.weight_files import gguf

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

_LENGTH = struct.Struct("<Q")
_KIND = struct.Struct("<I")
_LAYOUTS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_SIZES = {kind: struct.calcsize(layout) for kind, layout in _LAYOUTS.items()}
_STRING, _ARRAY = 8, 9
UINT16, UINT32, INT32, FLOAT32, BOOL = (2, "<H"), (4, "<I"), (5, "<i"), (6, "<f"), (7, "<?")


@attrs.frozen
class Gguf:
    """A file in pieces: its entries by key (kind and value, as bytes), its tensors, its numbers."""

    version: bytes
    entries: Mapping[str, bytes]
    tensors: Sequence[tuple[gguf.Tensor, bytes]]

    def other(self, **entries: bytes | None) -> Gguf:
        """Return it with other entries; None takes one out. Keys have "__" for each dot."""
        changed = {key.replace("__", "."): value for key, value in entries.items()}
        kept = {**self.entries, **changed}
        return attrs.evolve(self, entries={k: v for k, v in kept.items() if v is not None})

    def parts(self, n: int) -> list[Gguf]:
        """Return it in ``n`` parts, as ``llama-gguf-split`` writes them."""
        size = -(-len(self.tensors) // n)
        found = []
        for i in range(n):
            split = {
                "split.no": number(UINT16, i),
                "split.count": number(UINT16, n),
                "split.tensors.count": number(INT32, len(self.tensors)),
            }
            entries = {**(self.entries if not i else {}), **split}
            own = self.tensors[i * size : (i + 1) * size]
            found.append(attrs.evolve(self, entries=entries, tensors=own))
        return found

    def to_bytes(self) -> bytes:
        """Return the file."""
        head = [gguf.MAGIC, self.version]
        head += [_LENGTH.pack(len(self.tensors)), _LENGTH.pack(len(self.entries))]
        head += [_packed(key.encode()) + value for key, value in self.entries.items()]
        at = 0
        for tensor, data in self.tensors:
            dims = struct.pack(f"<I{len(tensor.dims)}Q", len(tensor.dims), *tensor.dims)
            head.append(_packed(tensor.name.encode()) + dims + struct.pack("<IQ", tensor.kind, at))
            at += _padded(len(data))
        start = b"".join(head)
        numbers = [data.ljust(_padded(len(data)), b"\0") for _, data in self.tensors]
        return b"".join([start.ljust(_padded(len(start)), b"\0"), *numbers])


def read(path: Path) -> Gguf:
    """Return the file at ``path``; of the usual alignment, as its parts are."""
    data, header = path.read_bytes(), gguf.read(str(path))
    entries, at = {}, 24
    for _ in range(_LENGTH.unpack_from(data, 16)[0]):
        n = _LENGTH.unpack_from(data, at)[0]
        key = data[at + 8 : at + 8 + n].decode()
        start = at + 8 + n
        at = _end(data, start + 4, _KIND.unpack_from(data, start)[0])
        entries[key] = data[start:at]
    tensors = sorted(header.tensors.values(), key=lambda tensor: tensor.offset)
    ends = [*(tensor.offset for tensor in tensors[1:]), len(data)]
    numbers = [data[t.offset : end] for t, end in zip(tensors, ends, strict=False)]
    return Gguf(data[4:8], entries, list(zip(tensors, numbers, strict=True)))


def _end(data: bytes, at: int, kind: int) -> int:
    """Return where the value at ``at`` ends."""
    if kind == _STRING:
        return at + 8 + int(_LENGTH.unpack_from(data, at)[0])
    if kind != _ARRAY:
        return at + _SIZES[kind]
    inner, n = struct.unpack_from("<IQ", data, at)
    at += 12
    if inner in _SIZES:
        return at + int(n) * _SIZES[inner]
    for _ in range(n):
        at = _end(data, at, inner)
    return at


def number(kind: tuple[int, str], value: Any) -> bytes:
    """Return an entry's kind and number."""
    return _KIND.pack(kind[0]) + struct.pack(kind[1], value)


def text(value: str) -> bytes:
    """Return an entry's kind and text."""
    return _KIND.pack(_STRING) + _packed(value.encode())


def texts(values: Sequence[bytes]) -> bytes:
    """Return an entry that is an array of texts."""
    return struct.pack("<IIQ", _ARRAY, _STRING, len(values)) + b"".join(map(_packed, values))


def numbers(layout: str, values: Sequence[Any]) -> bytes:
    """Return an entry that is an array of int32 "i", uint32 "I", float32 "f" or bool "?"."""
    inner = {"i": INT32, "I": UINT32, "f": FLOAT32, "?": BOOL}[layout][0]
    head = struct.pack("<IIQ", _ARRAY, inner, len(values))
    return head + struct.pack(f"<{len(values)}{layout}", *values)


def _packed(data: bytes) -> bytes:
    return _LENGTH.pack(len(data)) + data


def _padded(size: int) -> int:
    return -(-size // gguf.ALIGNMENT) * gguf.ALIGNMENT
