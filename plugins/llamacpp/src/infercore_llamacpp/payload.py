"""Looks into the engine's own bytes of saved state.

What would spoil a context for good is refused: a NaN that is loaded stays in its cell when that is
given free, and 0 times NaN is NaN: attention multiplies masked cells too, so one would spoil every
later sequence of the context. And a cell at a position below zero, or at the largest integer, is
never removed again. A saved sequence tells how many streams its context had, and the engine takes
no other number than that of the context it comes to: so that is rewritten.
Source of the layout: ``llama_kv_cache::state_write`` in llama.cpp.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import numpy as np

from infercore_llamacpp.traits import HEAD_BYTES, KV_TYPES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from infercore_llamacpp.traits import Traits

# The bits of the exponent, and from which on they are refused: of f16 all bits set, which is an
# infinity or a NaN; of the others 2 to the power of 64, as products of larger ones overflow.
_EXPONENTS: dict[str, tuple[Any, int, int]] = {
    "f32": (np.uint32, 0x7F80_0000, (127 + 64) << 23),
    "f16": (np.uint16, 0x7C00, 0x7C00),
    "bf16": (np.uint16, 0x7F80, (127 + 64) << 7),
}
_BLOCK_BYTES = {"q8_0": 34, "q5_1": 24, "q5_0": 22, "q4_1": 20, "q4_0": 18, "iq4_nl": 18}
_N_SCALES = {"q5_1": 2, "q4_1": 2}  # a factor, and in these the least value behind it
_NAMES = {int(number): name for name, number in KV_TYPES.items()}
_SLICE_BYTES = 1 << 20
_FEW, _MANY = 2**16, 2**31
_MAX_POSITION = 2**31 - 1


class UnknownLayoutError(ValueError):
    """These are not the bytes of keys and values alone; the engine says whether it takes them."""


def is_of(data: bytes | memoryview, architecture: str) -> bool:
    """Return whether a whole state begins with this name, as the engine allocates what it says."""
    name = architecture.encode()
    return bytes(data[: 4 + len(name)]) == struct.pack("<I", len(name)) + name


def complaint(data: bytes | memoryview, traits: Traits, *, of_sequence: bool) -> str | None:
    """Return what in ``data`` would spoil a context, None where nothing would.

    Raises `UnknownLayoutError`.
    """
    if traits.info.is_hybrid and not traits.n_caches:
        raise UnknownLayoutError
    reader = _Reader(memoryview(data).cast("B"))
    try:
        reader.skip(HEAD_BYTES if of_sequence else reader.number("I"))
        n_caches = 0
        while n_caches < traits.n_caches if traits.is_recurrent else not reader.at_end:
            for kind, numbers in _cache(reader, traits):
                if not _are_finite(kind, numbers):
                    return "a key or value that is not a number"
            n_caches += 1
        if traits.is_recurrent:  # small integers and float32, each in four bytes
            whole = reader.rest[: len(reader.rest) & ~3]
            return None if _are_finite("f32", whole) else "a state that is not a number"
    except _PositionError:
        return "a position that no token has"
    except (struct.error, KeyError) as error:
        raise UnknownLayoutError from error
    return None


def in_streams(data: bytes | memoryview, n_streams: int, traits: Traits) -> bytes | memoryview:
    """Return a sequence as a context of ``n_streams`` would have written it.

    A layout that is not known is returned as it is; the engine says whether it takes that.
    """
    view = memoryview(data).cast("B")
    number = struct.pack("<I", n_streams)
    if view[HEAD_BYTES : HEAD_BYTES + 4] == number:
        return data
    reader = _Reader(view)
    pieces: list[bytes | memoryview] = []
    try:
        pieces.append(reader.skip(HEAD_BYTES))
        for _ in range(traits.n_caches):
            streams = [_whole_stream(reader, traits) for _ in range(reader.count(_FEW))]
            held = [stream for stream in streams if len(stream) > len(number)]
            if len(held) > 1:
                return data
            pieces += [number, *held, bytes(len(number) * (n_streams - len(held)))]
    except (_PositionError, UnknownLayoutError, struct.error, KeyError):
        return data
    return b"".join([*pieces, reader.rest])


class _PositionError(ValueError):
    """A cell is where it could not be removed."""


class _Reader:
    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._at = 0

    @property
    def at_end(self) -> bool:
        return self._at == len(self._data)

    def number(self, layout: str) -> int:
        value: int = struct.unpack_from("<" + layout, self._data, self._at)[0]
        self._at += struct.calcsize("<" + layout)
        return value

    def count(self, most: int) -> int:
        value = self.number("I")
        if value > most:
            raise UnknownLayoutError
        return value

    @property
    def rest(self) -> memoryview:
        return self._data[self._at :]

    def skip(self, n_bytes: int) -> memoryview:
        start, self._at = self._at, self._at + n_bytes
        if self._at > len(self._data):
            raise UnknownLayoutError
        return self._data[start : self._at]


def _cache(reader: _Reader, traits: Traits) -> Iterator[tuple[str, memoryview]]:
    """Yield type and bytes of each tensor of one cache."""
    for _ in range(reader.count(_FEW)):
        yield from _stream(reader, traits)


def _whole_stream(reader: _Reader, traits: Traits) -> memoryview:
    """Return the bytes of one stream of a cache."""
    rest = reader.rest
    for _ in _stream(reader, traits):
        pass
    return rest[: len(rest) - len(reader.rest)]


def _stream(reader: _Reader, traits: Traits) -> Iterator[tuple[str, memoryview]]:
    """Yield type and bytes of each tensor of one stream."""
    n_cells = reader.count(_MANY)
    if not n_cells:
        return
    _pass_cells(reader, n_cells, 3 if traits.has_cell_extras else 0)
    is_transposed, n_layers = reader.number("I"), reader.count(_FEW)
    for _ in range(n_layers):
        kind = _NAMES[reader.number("i")]
        yield kind, reader.skip(n_cells * reader.number("Q"))
    for _ in range(0 if traits.shares_kv_types else n_layers):
        kind = _NAMES[reader.number("i")]
        row = reader.number("I") * reader.number("I") if is_transposed else reader.number("Q")
        yield kind, reader.skip(n_cells * row)


def _pass_cells(reader: _Reader, n_cells: int, n_extras: int) -> None:
    """Look at the position of each cell, which its number of sequences and these follow."""
    rest = reader.rest
    n_ids = int.from_bytes(rest[4:8], "little")
    width = 2 + n_extras + n_ids
    if len(rest) >= 4 * width * n_cells:
        cells = np.frombuffer(rest, "<i4", width * n_cells).reshape(n_cells, width)
        if (cells[:, 1] == n_ids).all():  # all are as wide as the first
            if not 0 <= cells[:, 0].min() <= cells[:, 0].max() < _MAX_POSITION:
                raise _PositionError
            reader.skip(4 * width * n_cells)
            return
    for _ in range(n_cells):
        if not 0 <= reader.number("i") < _MAX_POSITION:
            raise _PositionError
        reader.skip(4 * (n_extras + reader.count(_FEW)))


def _are_finite(kind: str, data: memoryview) -> bool:
    return all(
        _are_finite_numbers(kind, data[start : start + _slice_bytes(kind)])
        for start in range(0, len(data), _slice_bytes(kind))
    )


def _slice_bytes(kind: str) -> int:
    return _BLOCK_BYTES.get(kind, 4) * (_SLICE_BYTES // 32)


def _are_finite_numbers(kind: str, data: memoryview) -> bool:
    if kind in _EXPONENTS:
        dtype, mask, limit = _EXPONENTS[kind]
        numbers: Any = np.frombuffer(data, dtype)
    else:
        dtype, mask, limit = _EXPONENTS["f16"]
        blocks = np.frombuffer(data, np.uint8).reshape(-1, _BLOCK_BYTES[kind])
        numbers = blocks[:, : 2 * _N_SCALES.get(kind, 1)].view(dtype)
    return int((numbers & dtype(mask)).max()) < limit
