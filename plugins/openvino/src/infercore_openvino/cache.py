"""The KV cache: blocks in arrays of our own, which the engine reads and writes in place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import openvino as ov

from infercore import OutOfMemoryError
from infercore_openvino import rope
from infercore_openvino.blocks import BlockTables
from infercore_openvino.pool import PoolFullError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import numpy.typing as npt

    from infercore_openvino.blocks import Copy, Mask, Positions
    from infercore_openvino.rope import Floats

SCRATCH_BLOCK = 0  # never part of a sequence: warm-up and probes write there
_ALIGNMENT_BYTES = 64
_TOKEN_AXIS = 2
# bfloat16 has no NumPy type: its bits are kept as they are
_STORED_AS: dict[str, Any] = {
    "f32": np.float32,
    "f16": np.float16,
    "bf16": np.uint16,
    "u8": np.uint8,
}


class KvArray:
    """Keys or values of one layer: [n_blocks, n_head_kv, block_size, head_size].

    In 8 bits ("u8") each token's part of a head is followed by its scale and zero point, 8 bytes.
    """

    def __init__(self, port: Any, n_blocks: int) -> None:
        self.name: str = port.get_any_name()
        self.is_key = self.name.startswith("key")
        self._type = port.get_element_type()
        self.type_name: str = self._type.to_string()
        self._stored_as = _STORED_AS[self.type_name]
        self._tail = tuple(d.get_length() for d in list(port.get_partial_shape())[1:])
        self.data = self._allocate(n_blocks)

    def tensor(self) -> Any:
        """Return the engine's view of the array."""
        return ov.Tensor(self.data, ov.Shape(self.data.shape), self._type)

    def grown(self, n_blocks: int) -> npt.NDArray[Any]:
        """Return the data with ``n_blocks`` blocks more at the end."""
        data = self._allocate(len(self.data) + n_blocks)
        data[: len(self.data)] = self.data
        return data

    def _allocate(self, n_blocks: int) -> npt.NDArray[Any]:
        """Return zeros, aligned; memory that is not written to is not taken from the system."""
        shape = (n_blocks, *self._tail)
        n_bytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(self._stored_as).itemsize
        buffer = np.zeros(n_bytes + _ALIGNMENT_BYTES, dtype=np.uint8)
        start = -buffer.ctypes.data % _ALIGNMENT_BYTES
        array: npt.NDArray[Any] = buffer[start : start + n_bytes].view(self._stored_as)
        return array.reshape(shape)

    def to_float(self, stored: npt.NDArray[Any]) -> Floats:
        """Return stored numbers as float32."""
        return _of_bf16(stored) if self.type_name == "bf16" else stored.astype(np.float32)

    def from_float(self, values: Floats) -> npt.NDArray[Any]:
        """Return float32 numbers as they are stored, rounded to the nearest."""
        return _to_bf16(values) if self.type_name == "bf16" else values.astype(self._stored_as)


def _of_bf16(stored: npt.NDArray[Any]) -> Floats:
    return np.asarray((stored.astype(np.uint32) << 16).view(np.float32))


def _to_bf16(values: Floats) -> npt.NDArray[Any]:
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


class KvCache:
    """The arrays of all layers and the tables that say who holds what."""

    def __init__(self, ports: Sequence[Any], *, n_cells: int, n_extra: int, n_seq: int) -> None:
        block_size = ports[0].get_partial_shape()[_TOKEN_AXIS].get_length()
        n_blocks = -(-n_cells // block_size) + n_extra
        self.arrays = [KvArray(port, n_blocks + 1) for port in ports]
        self.tables = BlockTables(n_blocks, block_size, n_seq, SCRATCH_BLOCK + 1)
        self.on_grown: Callable[[], None] = lambda: None

    @property
    def n_bytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.data.nbytes for array in self.arrays)

    def change(self, work: Callable[[], Sequence[Copy]]) -> None:
        """Do ``work`` on the tables and perform its copies; where blocks lack, add some.

        Sequences that shared cells and go apart may need more than the window; the window that
        users see is enforced elsewhere.
        """
        try:
            copies = work()
        except PoolFullError as error:
            self._grow(error.missing)
            copies = work()
        if copies:
            self._perform(copies)

    def _grow(self, n_missing: int) -> None:
        n_more = max(n_missing, len(self.arrays[0].data) // 8)
        try:
            grown = [array.grown(n_more) for array in self.arrays]
        except MemoryError as error:  # untyped, a copy that failed would end the context
            raise OutOfMemoryError("no memory for a larger KV cache") from error
        for array, data in zip(self.arrays, grown, strict=True):
            array.data = data
        self.on_grown()
        self.tables.pool.grow(n_more)

    def _perform(self, copies: Iterable[Copy]) -> None:
        for src, src_offset, dst, dst_offset, n in copies:
            source, target = slice(src_offset, src_offset + n), slice(dst_offset, dst_offset + n)
            for array in self.arrays:
                array.data[dst, :, target] = array.data[src, :, source]

    def move(self, seq_id: int, mask: Mask, positions: Positions, inv_freq: Floats) -> None:
        """Give the tokens of ``mask`` new ``positions`` and turn their keys accordingly."""
        deltas = np.zeros(len(mask), dtype=np.int64)
        deltas[mask] = positions - self.tables.positions(seq_id)[mask]
        self.change(lambda: self.tables.move(seq_id, mask, positions))
        self._rotate(seq_id, deltas, inv_freq)

    def _rotate(self, seq_id: int, deltas: npt.NDArray[np.int64], inv_freq: Floats) -> None:
        size = self.tables.block_size
        blocks = self.tables.tables[seq_id].blocks
        for index in np.unique(np.flatnonzero(deltas) // size):
            here = deltas[index * size : (index + 1) * size]
            for array in self.arrays:
                if array.is_key:
                    keys = array.data[blocks[index], :, : len(here)]
                    turned = rope.rotate(array.to_float(keys), here[None, :], inv_freq)
                    still = (here == 0)[None, :, None]
                    keys[...] = np.where(still, keys, array.from_float(turned))

    def drop(self) -> None:
        """Let go of the arrays."""
        self.arrays = []
