"""What one sequence holds: its tokens, their positions, and K and V of each layer."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from infercore.errors import SnapshotError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from infercore.testing.kv_formats import KvFormat

_FIELDS = ("tokens", "positions", "k", "v")


@attrs.frozen(eq=False)
class Cells:
    """An immutable list of cells; every change makes a new one, so a copy costs nothing.

    ``tokens`` and ``positions`` are [n_cells], ``k`` and ``v`` [n_layer, n_cells, n_head_kv,
    head_dim], packed as `kv_formats` says. K is kept before rope: moving a cell only writes
    another position.
    """

    tokens: npt.NDArray[Any]
    positions: npt.NDArray[np.int64]
    k: npt.NDArray[Any]
    v: npt.NDArray[Any]

    @classmethod
    def empty(cls, n_layer: int, n_head_kv: int, head_dim: int, kinds: Sequence[KvFormat]) -> Cells:
        """Return no cells of this shape; ``kinds`` are the number formats of K and V."""
        k, v = (
            np.empty((n_layer, 0, n_head_kv, head_dim // kind.block), dtype=kind.dtype)
            for kind in kinds
        )
        nothing = np.empty(0, np.int64)
        return cls(nothing, nothing, k, v)

    @property
    def next_position(self) -> int:
        """One more than the highest position, 0 when empty."""
        highest: int = self.positions.max(initial=-1).item()
        return highest + 1

    def inside(self, p0: int, p1: int) -> npt.NDArray[np.bool_]:
        """Tell which cells are in [p0, p1); p1 = -1 is the end."""
        inside: npt.NDArray[np.bool_] = self.positions >= p0
        return inside if p1 == -1 else inside & (self.positions < p1)

    def where(self, kept: npt.NDArray[Any]) -> Cells:
        """Return the cells that ``kept`` chooses, by truth or by place."""
        return Cells(self.tokens[kept], self.positions[kept], self.k[:, kept], self.v[:, kept])

    def joined(self, other: Cells) -> Cells:
        """Return these cells and then ``other``."""
        return Cells(
            np.concatenate([self.tokens, other.tokens]),
            np.concatenate([self.positions, other.positions]),
            np.concatenate([self.k, other.k], axis=1),
            np.concatenate([self.v, other.v], axis=1),
        )

    def moved(self, positions: npt.NDArray[np.int64]) -> Cells:
        """Return these cells at other positions."""
        return attrs.evolve(self, positions=positions)


_END, _END_BYTES = b"PK\x05\x06", 22
"""The record that ends a ZIP archive (APPNOTE.TXT of PKWARE, 4.3.16)."""


def dump(sequences: dict[int, Cells]) -> bytes:
    """Return sequences as bytes (NumPy's npz, without pickles)."""
    arrays = {
        f"{seq_id}.{field}": getattr(cells, field)
        for seq_id, cells in sequences.items()
        for field in _FIELDS
    }
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def load(data: bytes) -> dict[int, Cells]:
    """Return what `dump` wrote: the core has compared its checksum, and what it is of.

    Raises `SnapshotError` where something stands behind the end of the archive.
    """
    if data[-_END_BYTES:][: len(_END)] != _END:
        raise SnapshotError("it does not end where its archive does", reason="engine")
    with np.load(io.BytesIO(data)) as arrays:
        seq_ids = {int(name.split(".")[0]) for name in arrays.files}
        return {s: Cells(*(arrays[f"{s}.{field}"] for field in _FIELDS)) for s in seq_ids}
