"""Token batches whose arrays are allocated once and seen by both NumPy and the engine."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np

from infercore_llamacpp.library import api

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    Floats = npt.NDArray[np.float32]
    Ints = npt.NDArray[np.int32]

_INT32 = ctypes.POINTER(ctypes.c_int32)
_INT8 = ctypes.POINTER(ctypes.c_int8)
_INT32S = ctypes.POINTER(_INT32)
_FLOATS = ctypes.POINTER(ctypes.c_float)
# A row has one position, or four where M-RoPE tells time, height and width: those of a text are
# the same, and the last is not used.
_AXES = (1, 1, 1, 0)


def _address(array: npt.NDArray[Any], kind: Any) -> Any:
    return ctypes.cast(array.ctypes.data, kind)


class Batch:
    """Up to ``n_max`` tokens of one sequence, or of several with `columns` and `mixed`."""

    def __init__(self, n_max: int) -> None:
        self._tokens = np.zeros(n_max, dtype=np.int32)
        self._positions = np.zeros(n_max, dtype=np.int32)
        self._wanted = np.zeros(n_max, dtype=np.int8)
        self._seq_id = np.zeros(1, dtype=np.int32)
        self._counts = np.ones(n_max, dtype=np.int32)
        # Every token points at the same sequence id.
        self._pointers = np.full(n_max, np.uintp(self._seq_id.ctypes.data))
        self.struct = self._new_struct(self._counts, self._pointers)
        # Every token points at a place of its own.
        self._seq_ids = np.zeros(n_max, dtype=np.int32)
        places = self._seq_ids.itemsize * np.arange(n_max, dtype=np.uintp)
        self._places = places + np.uintp(self._seq_ids.ctypes.data)
        self._of_columns = self._new_struct(self._counts, self._places)

    def _new_struct(self, counts: Ints, pointers: npt.NDArray[np.uintp]) -> Any:
        struct = api.llama_batch()
        struct.token = _address(self._tokens, _INT32)
        struct.pos = _address(self._positions, _INT32)
        struct.logits = _address(self._wanted, _INT8)
        struct.n_seq_id = _address(counts, _INT32)
        struct.seq_id = _address(pointers, _INT32S)
        return struct

    def fill(self, tokens: Ints, start: int, seq_id: int, *, every: bool, last: bool) -> Any:
        """Return a batch of ``tokens`` at ``start`` and on, with output rows as asked for."""
        n = len(tokens)
        self._tokens[:n] = tokens
        self._positions[:n] = np.arange(start, start + n)
        self._seq_id[0] = seq_id
        self._wanted[: n - 1] = every
        self._wanted[n - 1] = every or last
        self.struct.n_tokens = n
        return self.struct

    def columns(
        self, tokens: Ints, positions: Ints, seq_ids: Ints, wanted: npt.NDArray[np.bool_]
    ) -> Any:
        """Return a batch whose tokens each belong to one sequence."""
        n = len(tokens)
        self._tokens[:n], self._positions[:n], self._wanted[:n] = tokens, positions, wanted
        self._seq_ids[:n] = seq_ids
        self._of_columns.n_tokens = n
        return self._of_columns

    def vectors(
        self,
        rows: Floats,
        positions: Ints,
        seq_ids: Ints,
        wanted: npt.NDArray[np.bool_],
        n_pos: int,
    ) -> Any:
        """Return a batch of ``rows`` in place of tokens, each of one sequence.

        ``n_pos`` numbers say where a row is: those of a text, where there are four of them.
        """
        n = len(rows)
        columns = self.columns(np.zeros(n, np.int32), positions, seq_ids, wanted)
        at = np.outer(_AXES[:n_pos], positions).astype(np.int32)
        struct = api.llama_batch()
        for name in ("n_tokens", "logits", "n_seq_id", "seq_id"):
            setattr(struct, name, getattr(columns, name))
        struct.embd = _address(rows, _FLOATS)
        struct.pos = _address(at, _INT32)
        struct.keep_alive = (rows, at)
        return struct

    def mixed(
        self,
        tokens: Ints,
        positions: Ints,
        seq_ids: Sequence[tuple[int, ...]],
        wanted: npt.NDArray[np.bool_],
    ) -> Any:
        """Return a batch whose tokens each belong to one sequence or more."""
        n = len(tokens)
        self._tokens[:n], self._positions[:n], self._wanted[:n] = tokens, positions, wanted
        counts = np.array([len(ids) for ids in seq_ids], dtype=np.int32)
        flat = np.array([seq_id for ids in seq_ids for seq_id in ids], dtype=np.int32)
        offsets = np.cumsum(counts) - counts
        pointers = (flat.ctypes.data + flat.itemsize * offsets).astype(np.uintp)
        struct = self._new_struct(counts, pointers)
        struct.n_tokens = n
        struct.keep_alive = (counts, flat, pointers)
        return struct


class OneToken:
    """A batch of one token with its output row: what the hot path fills.

    It has no position: the engine takes the sequence's next one then.
    """

    __slots__ = ("_count", "_pointer", "_wanted", "seq_id", "struct", "token")

    def __init__(self) -> None:
        self.token, self.seq_id = ctypes.c_int32(), ctypes.c_int32()
        self._count, self._wanted = ctypes.c_int32(1), ctypes.c_int8(1)
        self._pointer = ctypes.pointer(self.seq_id)
        self.struct = api.llama_batch()
        self.struct.n_tokens = 1
        self.struct.token = ctypes.pointer(self.token)
        self.struct.n_seq_id = ctypes.pointer(self._count)
        self.struct.seq_id = ctypes.pointer(self._pointer)
        self.struct.logits = ctypes.pointer(self._wanted)
