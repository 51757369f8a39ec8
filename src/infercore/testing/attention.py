"""Who reads whom in one compute step, and the attention itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from infercore.protocols.spi import FloatArray
    from infercore.testing.cells import Cells

    IntArray = npt.NDArray[np.int64]


@attrs.frozen
class Rope:
    """Rotary positions, halves rotated as in Hugging Face's llama; ``scale`` shrinks positions."""

    theta: float
    scale: float

    def rotate(self, x: FloatArray, positions: IntArray) -> FloatArray:
        """Return ``x`` [n_tokens, n_heads, head_dim] rotated to ``positions`` [n_tokens]."""
        half = x.shape[-1] // 2
        frequencies = self.theta ** (-np.arange(half) / half)
        angles = positions[:, None, None] * self.scale * frequencies
        cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        low, high = x[..., :half], x[..., half:]
        return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


@attrs.frozen(eq=False)
class Group:
    """Tokens of one step that read the same: one sequence's past and its part of the step.

    ``queries`` and ``members`` are places in the step. They differ where a token goes to several
    sequences: all of these hold it, and it reads the first one.
    """

    past: Cells
    queries: IntArray
    members: IntArray


def groups_of(seq_ids: Sequence[tuple[int, ...]], sequences: Sequence[Cells]) -> list[Group]:
    """Return a group for each sequence that some token reads."""
    first = np.array([ids[0] for ids in seq_ids])
    groups = []
    for seq_id in dict.fromkeys(first.tolist()):
        members = [i for i, ids in enumerate(seq_ids) if seq_id in ids]
        groups.append(Group(sequences[seq_id], np.flatnonzero(first == seq_id), np.array(members)))
    return groups


def attend(
    q: FloatArray,
    k: FloatArray,
    v: FloatArray,
    mask: npt.NDArray[np.bool_],
) -> FloatArray:
    """Return what each query reads, [n_queries, n_head, head_dim].

    ``k`` and ``v`` are [n_cells, n_head_kv, head_dim], heads shared by groups of query heads;
    ``mask`` [n_queries, n_cells] is true where a query may look.
    """
    n, n_head, head_dim = q.shape
    n_kv = k.shape[1]
    per_kv = q.reshape(n, n_kv, n_head // n_kv, head_dim).transpose(1, 2, 0, 3)
    scores = per_kv @ k.transpose(1, 2, 0)[:, None] / np.float32(np.sqrt(head_dim))
    scores = np.where(mask, scores, np.float32(-np.inf))
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    read = weights @ v.transpose(1, 0, 2)[:, None]
    return np.asarray(read.transpose(2, 0, 1, 3).reshape(n, n_head, head_dim), dtype=np.float32)
