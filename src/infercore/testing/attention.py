"""Who reads whom in one compute step, and the attention itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import attrs
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from infercore.protocols.spi import FloatArray
    from infercore.testing.cells import Cells

    IntArray = npt.NDArray[np.int64]
    BoolArray = npt.NDArray[np.bool_]


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
    members: list[int]


def groups_of(seq_ids: Sequence[tuple[int, ...]], sequences: Sequence[Cells]) -> list[Group]:
    """Return a group for each sequence that some token reads."""
    first = np.array([ids[0] for ids in seq_ids])
    groups = []
    for seq_id in dict.fromkeys(first.tolist()):
        members = [i for i, ids in enumerate(seq_ids) if seq_id in ids]
        groups.append(Group(sequences[seq_id], np.flatnonzero(first == seq_id), members))
    return groups


FLASH_BLOCK = 64


def attend(
    q: FloatArray, k: FloatArray, v: FloatArray, mask: BoolArray, *, block: int | None
) -> FloatArray:
    """Return what each query reads, [n_queries, n_head, head_dim].

    ``k`` and ``v`` are [n_cells, n_head_kv, head_dim], heads shared by groups of query heads;
    ``mask`` [n_queries, n_cells] is true where a query may look. Unless ``block`` is None,
    cells are read in blocks of so many and no more scores are held at once: flash attention.
    """
    n, n_head, head_dim = q.shape
    n_kv, n_cells = k.shape[1], len(k)
    scaled = q * np.float32(head_dim**-0.5)
    per_kv = scaled.reshape(n, n_kv, n_head // n_kv, head_dim).transpose(1, 2, 0, 3)
    softmax = OnlineSoftmax(per_kv.shape)
    size = block or n_cells
    for start in range(0, n_cells, size):
        part = slice(start, start + size)
        scores = cast("FloatArray", per_kv @ k[part].transpose(1, 2, 0)[:, None])
        scores[..., ~mask[:, part]] = -np.inf
        softmax.add(scores, v[part].transpose(1, 0, 2)[:, None])
    return softmax.read().transpose(2, 0, 1, 3).reshape(n, n_head, head_dim)


class OnlineSoftmax:
    """The mean of values under the softmax of their scores, where both come in blocks.

    What was added is scaled down as larger scores come. Source: Milakov and Gimelshein 2018,
    "Online normalizer calculation for softmax"; Dao et al. 2022, "FlashAttention", algorithm 1.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        lowest = np.finfo(np.float32).min  # finite: a block of which nothing is seen adds 0
        self._best: FloatArray = np.full((*shape[:-1], 1), lowest, np.float32)
        self._total: FloatArray = np.zeros_like(self._best)
        self._sum: FloatArray = np.zeros(shape, np.float32)

    def add(self, scores: FloatArray, values: FloatArray) -> None:
        """Add ``values`` [..., n, head_dim] with ``scores`` [..., n_queries, n]."""
        best: FloatArray = np.maximum(self._best, scores.max(axis=-1, keepdims=True))
        kept, weights = np.exp(self._best - best), np.exp(scores - best)
        self._total = self._total * kept + weights.sum(axis=-1, keepdims=True)
        self._sum = self._sum * kept + weights @ values
        self._best = best

    def read(self) -> FloatArray:
        """Return the means."""
        return self._sum / self._total
