"""What a reference context holds: sequences of cells, to be cut, copied, moved and saved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from infercore.testing import cells
from infercore.testing.cells import Cells
from infercore.testing.kv_formats import KV_FORMATS
from infercore.testing.reference_base import Base

if TYPE_CHECKING:
    from infercore.testing.llama import Llama


class Sequences(Base):
    """A list of cells for each sequence, which tests may look at past the API."""

    def __init__(self, llama: Llama, effective: dict[str, Any]) -> None:
        shape = llama.shape
        super().__init__(llama.matrices, effective)
        self._kinds = [KV_FORMATS[effective[name]] for name in ("type_k", "type_v")]
        self.tolerance = max(kind.tolerance for kind in self._kinds)
        self._empty = Cells.empty(shape.n_layer, shape.n_head_kv, shape.head_dim, self._kinds)
        self.sequences = [self._empty] * effective["n_seq_max"]

    def n_past(self, seq_id: int) -> int:
        """Return the sequence's next position."""
        return self.sequences[seq_id].next_position

    def seq_remove(self, seq_id: int, p0: int, p1: int) -> bool:
        """Remove positions [p0, p1)."""
        own = self.sequences[seq_id]
        self.sequences[seq_id] = own.where(~own.inside(p0, p1))
        return True

    def seq_copy(self, src: int, dst: int, p0: int, p1: int) -> None:
        """Add to ``dst`` copies of what ``src`` holds in [p0, p1)."""
        source = self.sequences[src]
        copied = source.where(source.inside(p0, p1))
        self.sequences[dst] = self.sequences[dst].joined(copied)

    def seq_shift(self, seq_id: int, p0: int, p1: int, delta: int) -> None:
        """Add ``delta`` to the positions in [p0, p1)."""
        own = self.sequences[seq_id]
        moved = np.where(own.inside(p0, p1), own.positions + delta, own.positions)
        self.sequences[seq_id] = own.moved(moved)

    def seq_divide(self, seq_id: int, p0: int, p1: int, d: int) -> None:
        """Divide the positions in [p0, p1) by ``d``."""
        own = self.sequences[seq_id]
        moved = np.where(own.inside(p0, p1), own.positions // d, own.positions)
        self.sequences[seq_id] = own.moved(moved)

    def clear(self) -> None:
        """Remove everything."""
        self.sequences = [self._empty] * len(self.sequences)

    # -- saved state ---------------------------------------------------------------------------

    def save_state(self) -> bytes:
        """Return all sequences as bytes."""
        return cells.dump(dict(enumerate(self.sequences)))

    def load_state(self, data: bytes) -> None:
        """Replace all sequences."""
        found = cells.load(data)
        self.sequences = [found[seq_id] for seq_id in range(len(self.sequences))]

    def save_sequence(self, seq_id: int) -> bytes:
        """Return one sequence as bytes."""
        return cells.dump({0: self.sequences[seq_id]})

    def load_sequence(self, seq_id: int, data: bytes) -> None:
        """Replace one sequence."""
        self.sequences[seq_id] = cells.load(data)[0]

    def close(self) -> None:
        """Let the cells go."""
        super().close()
        self.sequences = []
