"""Saved sequences: their tables, and the blocks they use.

``int64 header length | header (JSON) | positions (int64) of each sequence | arrays``: each array
holds the used blocks, in the order of their first use, with unused slots as zeros. Numbers are
little-endian. Blocks that sequences share are kept once and shared again when restored.

What is checked here is what could spoil memory, or what comes later. Whatever else goes wrong in
a restore, the core refuses the state and empties what was to hold it.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from infercore import SnapshotError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

    from infercore_openvino.blocks import Positions
    from infercore_openvino.cache import KvCache

_LENGTH_BYTES = 8
_UNUSED = 0  # what is saved of slots that no token holds

BY_NAME = {"states": "by name"}
"""Of headers whose tables name the engine's variables; older ones do not."""


def save(cache: KvCache, seq_ids: Sequence[int], identity: dict[str, Any]) -> memoryview:
    """Return the sequences ``seq_ids`` of ``cache``; their blocks are copied once."""
    tables = [cache.tables.tables[seq_id] for seq_id in seq_ids]
    used = cache.tables.extent(tables)
    number = {block: i for i, block in enumerate(used)}
    header = {
        **identity,
        "block_size": cache.tables.block_size,
        "n_blocks": len(used),
        "sequences": [
            {"n": t.n, "blocks": [number[b] for b in t.blocks], "seq_id": s}
            for s, t in zip(seq_ids, tables, strict=True)
        ],
    }
    start = pack(header, [table.positions.astype("<i8").data for table in tables])
    sizes = [len(used) * array.data[:1].nbytes for array in cache.arrays]
    buffer = np.empty(len(start) + sum(sizes), dtype=np.uint8)
    buffer[: len(start)] = np.frombuffer(start, dtype=np.uint8)
    at = len(start)
    for array, size in zip(cache.arrays, sizes, strict=True):
        _copy_used(array.data, used, buffer[at : at + size])
        at += size
    return buffer.data


def pack(header: dict[str, Any], parts: Sequence[bytes | memoryview]) -> bytes:
    """Return ``parts`` behind ``header``, which ends in blanks so that they are aligned."""
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    return b"".join([len(text).to_bytes(_LENGTH_BYTES, "little"), text, *parts])


def _copy_used(data: Any, used: dict[int, int], into: npt.NDArray[np.uint8]) -> None:
    blocks = into.view(data.dtype).reshape(len(used), *data.shape[1:])
    for target, (block, n_slots) in zip(blocks, used.items(), strict=True):
        target[...] = data[block]
        target[:, n_slots:] = _UNUSED


def load(
    cache: KvCache, data: bytes | memoryview, identity: dict[str, Any], *, seq_id: int | None = None
) -> None:
    """Put the saved sequences back: each into its own, or the only one into ``seq_id``.

    The sequences must be empty. Raises `SnapshotError`, then what is there is not to be trusted.
    """
    header, view = unpack(data, {**identity, "block_size": cache.tables.block_size})
    saved = header["sequences"]
    if any(not 0 <= s["n"] <= cache.tables.block_size * len(s["blocks"]) for s in saved):
        raise refused("has more tokens than its blocks hold")
    positions, view = read_positions(view, [s["n"] for s in saved])
    shapes = [(header["n_blocks"], *array.data.shape[1:]) for array in cache.arrays]
    stored = read_arrays(view, shapes, cache.arrays[0].data.dtype)
    blocks = _take(cache, header["n_blocks"])
    try:
        for array, saved_blocks in zip(cache.arrays, stored, strict=True):
            array.data[blocks] = saved_blocks
        for entry, at in zip(saved, positions, strict=True):
            target = entry["seq_id"] if seq_id is None else seq_id
            cache.tables.restore(target, [blocks[i] for i in entry["blocks"]], at)
    finally:
        for block in blocks:
            cache.tables.pool.release(block)


def unpack(data: bytes | memoryview, expected: dict[str, Any]) -> tuple[dict[str, Any], memoryview]:
    """Return the header, which must agree with ``expected``, and what stands behind it."""
    view = memoryview(data)
    start = _LENGTH_BYTES + int.from_bytes(view[:_LENGTH_BYTES], "little")
    header: dict[str, Any] = json.loads(bytes(view[_LENGTH_BYTES:start]))
    for name, value in expected.items():
        if header.get(name) != value:
            raise refused(f"has {name} {header.get(name)!r}, this context {value!r}")
    return header, view[start:]


def read_positions(view: memoryview, lengths: Sequence[int]) -> tuple[list[Positions], memoryview]:
    """Return the positions of sequences of these ``lengths``, and what stands behind them."""
    found: list[Positions] = []
    for n in lengths:
        positions = np.frombuffer(view[: 8 * n], dtype="<i8").astype(np.int64)
        if np.any(positions < 0):  # which no removal reaches; the core sees those beyond the end
            raise refused("has positions that no sequence can have")
        found.append(positions)
        view = view[8 * n :]
    return found, view


def read_arrays(view: memoryview, shapes: Iterable[Sequence[int]], dtype: Any) -> list[Any]:
    """Return arrays of these ``shapes`` that follow each other and fill ``view``."""
    shapes = list(shapes)
    sizes = [math.prod(shape) * np.dtype(dtype).itemsize for shape in shapes]
    if len(view) != sum(sizes):
        raise refused("has another number of bytes than its tables need")
    found = []
    for shape, size in zip(shapes, sizes, strict=True):
        found.append(np.frombuffer(view[:size], dtype=dtype).reshape(shape))
        view = view[size:]
    return found


def _take(cache: KvCache, n_blocks: int) -> list[int]:
    holder: list[int] = []

    def take() -> tuple[()]:
        cache.tables.pool.need(n_blocks)
        holder.extend(cache.tables.pool.take() for _ in range(n_blocks))
        return ()

    cache.change(take)
    return holder


def refused(what: str) -> SnapshotError:
    """Return the error for a state that cannot have been saved here."""
    return SnapshotError(f"the saved state {what}", reason="engine")
