"""The reference context: every call in the plainest exact way."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np

from infercore.testing.attention import FLASH_BLOCK, Rope, attend, groups_of
from infercore.testing.cells import Cells
from infercore.testing.kv_formats import KV_FORMATS
from infercore.testing.reference_base import SHARED
from infercore.testing.reference_sequences import Sequences
from infercore.testing.reference_settings import FLASH_ATTENTION
from infercore.values.info import Capabilities

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from infercore.protocols.spi import FloatArray, TokenArray
    from infercore.testing.attention import Group
    from infercore.testing.llama import Llama

CAPABILITIES = Capabilities(
    kv_remove="any",
    kv_copy="any",
    kv_shift=True,
    kv_divide=True,
    state=True,
    sequence_state=True,
    logits_all=True,
    kv_types=(*KV_FORMATS,),
    flash_attention=FLASH_ATTENTION,
    native_sampler=True,
    lora=True,
    **SHARED,
)
"""All there is but what needs other hardware (gpu_offload) or another model (encoder)."""


class ReferenceContext(Sequences):
    """An `EngineContext`: tokens in, and the outputs of the last call."""

    capabilities = CAPABILITIES

    def __init__(self, llama: Llama, effective: dict[str, Any]) -> None:
        super().__init__(llama, effective)
        self._llama = llama
        self._rope = Rope(effective["rope_freq_base"], effective["rope_freq_scale"])
        self._block = FLASH_BLOCK if effective["flash_attn"] == "on" else None
        self._added: FloatArray | None = None

    # -- tokens in -----------------------------------------------------------------------------

    def decode(self, tokens: TokenArray, *, seq_id: int, logits: str) -> None:
        """Append tokens to one sequence; rows of the "last", of "all" or of "none"."""
        n = len(tokens)
        positions = self.n_past(seq_id) + np.arange(n)
        wanted = np.full(n, logits == "all")
        wanted[-1] = logits != "none"
        self.decode_batch(tokens, positions, [(seq_id,)] * n, wanted)

    def decode_one(self, token: int, *, seq_id: int) -> None:
        """Append one token and make its row."""
        self.decode(np.array([token], np.int32), seq_id=seq_id, logits="last")

    def decode_batch(
        self,
        tokens: TokenArray | FloatArray,
        positions: npt.NDArray[Any],
        seq_ids: Sequence[tuple[int, ...]],
        wanted: npt.NDArray[np.bool_],
    ) -> None:
        """Append tokens to their sequences; a row for each that is wanted, in order."""
        steps = []
        for start in range(0, len(tokens), self.n_ubatch):
            part = slice(start, start + self.n_ubatch)
            steps.append(self._step(tokens[part], positions[part], seq_ids[part]))
        hidden = np.concatenate(steps)
        self._rows = self._llama.logits(hidden[wanted], self._product(len(tokens)))
        self._hidden, self._hidden_ids = hidden, seq_ids

    def decode_vectors(
        self,
        rows: FloatArray,
        positions: npt.NDArray[Any],
        seq_ids: npt.NDArray[np.int32],
        wanted: npt.NDArray[np.bool_],
    ) -> None:
        """Append rows [n, n_embd] in place of tokens that are looked up."""
        self.decode_batch(rows, positions, [(seq_id,) for seq_id in seq_ids.tolist()], wanted)

    def _step(
        self,
        tokens: TokenArray | FloatArray,
        positions: npt.NDArray[Any],
        seq_ids: Sequence[tuple[int, ...]],
    ) -> FloatArray:
        """Compute one micro-batch. Its cells are kept once all layers are done, or not at all."""
        step = Cells(
            np.zeros(len(tokens), np.int64) if tokens.ndim > 1 else tokens,
            positions.astype(np.int64),
            *(
                np.empty((x.shape[0], len(tokens), *x.shape[2:]), x.dtype)
                for x in (self._empty.k, self._empty.v)
            ),
        )
        groups = groups_of(seq_ids, self.sequences)
        of_k, of_v = self._kinds

        def attend_layer(i: int, q: FloatArray, k: FloatArray, v: FloatArray) -> FloatArray:
            self._check_abort(sum(len(held.tokens) for held in self.sequences))
            step.k[i], step.v[i] = of_k.pack(k), of_v.pack(v)
            read = np.empty_like(q)
            for group in groups:
                read[group.queries] = self._attend(i, q, group, step)
            return read

        product = self._product(len(tokens))
        hidden = self._llama.forward(tokens, attend_layer, product, self._added)
        for seq_id in {s for ids in seq_ids for s in ids}:
            own = np.array([seq_id in ids for ids in seq_ids])
            self.sequences[seq_id] = self.sequences[seq_id].joined(step.where(own))
        return hidden

    def _attend(self, i: int, q: FloatArray, group: Group, step: Cells) -> FloatArray:
        past, members, queries = group.past, group.members, group.queries
        at = step.positions[queries]
        positions = np.concatenate([past.positions, step.positions[members]])
        of_k, of_v = self._kinds
        k = of_k.unpack(np.concatenate([past.k[i], step.k[i][members]]))
        v = of_v.unpack(np.concatenate([past.v[i], step.v[i][members]]))
        visible = positions <= at[:, None]
        if self._effective["attention_type"] == "non-causal":
            visible = np.ones_like(visible)
        rotate = self._rope.rotate
        q, k = rotate(q[queries], at), rotate(k, positions)
        return attend(q, k, v, visible, block=self._block)

    def logits(self, i: int) -> FloatArray:
        """Return output row ``i``."""
        row: FloatArray = self._rows[i]
        return row

    # -- live controls -------------------------------------------------------------------------

    def set_embeddings(self, on: bool) -> None:  # noqa: FBT001  (the contract's signature)
        """Note it; hidden states are there anyway."""
        self._effective["embeddings"] = on

    def set_causal_attention(self, on: bool) -> None:  # noqa: FBT001
        """Switch between causal and bidirectional attention."""
        self._effective["attention_type"] = "causal" if on else "non-causal"

    def set_control_vector(self, directions: FloatArray | None) -> None:
        """Add ``directions`` [n_layer, n_embd] to what the layers put out; None adds nothing."""
        self._added = directions
        self._effective.pop("control_vector", None)
        if directions is not None:
            self._effective["control_vector"] = hashlib.sha256(directions.data).hexdigest()

    def warmup(self) -> None:
        """There is nothing to warm: the weights are in memory."""
