"""The reference context: every call in the plainest exact way."""

from __future__ import annotations

import threading
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from infercore.errors import DecodeAbortedError
from infercore.testing import cells
from infercore.testing.attention import Rope, attend, groups_of
from infercore.testing.cells import Cells
from infercore.testing.reference_settings import KV_DTYPES, POOLING, TOLERANCES
from infercore.values.info import Capabilities

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy.typing as npt

    from infercore.protocols.spi import FloatArray, TokenArray
    from infercore.testing.attention import Group
    from infercore.testing.llama import Llama

CAPABILITIES = Capabilities(
    kv_remove="any",
    kv_copy="any",
    kv_shift=True,
    kv_divide=True,
    multi_sequence=True,
    state=True,
    sequence_state=True,
    logits_all=True,
    embeddings=True,
    pooling=POOLING,
    abort=True,
    kv_types=tuple(KV_DTYPES),
    flash_attention=("auto", "off"),
    perf=True,
)


class ReferenceContext:
    """An `EngineContext`: a list of cells for each sequence, and the outputs of the last call.

    ``sequences`` may be looked at by tests, past the API.
    """

    capabilities = CAPABILITIES

    def __init__(self, llama: Llama, effective: dict[str, Any]) -> None:
        shape = llama.shape
        self._llama = llama
        self._effective = effective
        self.effective: Mapping[str, Any] = MappingProxyType(effective)
        types = [effective["type_k"], effective["type_v"]]
        self.tolerance = max(TOLERANCES[kind] for kind in types)
        self.n_batch: int = effective["n_batch"]
        self.n_ubatch: int = effective["n_ubatch"]
        self._rope = Rope(effective["rope_freq_base"], effective["rope_freq_scale"])
        dtypes = [KV_DTYPES[kind] for kind in types]
        self._empty = Cells.empty(shape.n_layer, shape.n_head_kv, shape.head_dim, dtypes)
        self.sequences = [self._empty] * effective["n_seq_max"]
        self._rows: FloatArray = np.empty((0, shape.n_vocab), np.float32)
        self._hidden: FloatArray = np.empty((0, shape.n_embd), np.float32)
        self._hidden_ids: Sequence[tuple[int, ...]] = ()
        self._aborted = threading.Event()
        self._ask: Callable[[], bool] | None = None

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
        tokens: TokenArray,
        positions: npt.NDArray[Any],
        seq_ids: Sequence[tuple[int, ...]],
        wanted: npt.NDArray[np.bool_],
    ) -> None:
        """Append tokens to their sequences; a row for each that is wanted, in order."""
        self._rows, self._hidden = self._rows[:0], self._hidden[:0]
        steps = []
        for start in range(0, len(tokens), self.n_ubatch):
            part = slice(start, start + self.n_ubatch)
            steps.append(self._step(tokens[part], positions[part], seq_ids[part]))
        hidden = np.concatenate(steps)
        self._rows = self._llama.logits(hidden[wanted])
        self._hidden, self._hidden_ids = hidden, seq_ids

    def _step(
        self, tokens: TokenArray, positions: npt.NDArray[Any], seq_ids: Sequence[tuple[int, ...]]
    ) -> FloatArray:
        """Compute one micro-batch. Its cells are kept once all layers are done, or not at all."""
        step = Cells(
            tokens,
            positions.astype(np.int64),
            *(np.empty((x.shape[0], len(tokens), *x.shape[2:]), x.dtype) for x in self._kinds),
        )
        groups = groups_of(seq_ids, self.sequences)

        def attend_layer(i: int, q: FloatArray, k: FloatArray, v: FloatArray) -> FloatArray:
            self._check_abort()
            step.k[i], step.v[i] = k, v
            read = np.empty_like(q)
            for group in groups:
                read[group.queries] = self._attend(i, q, group, step)
            return read

        hidden = self._llama.forward(tokens, attend_layer)
        for seq_id in {s for ids in seq_ids for s in ids}:
            own = np.array([seq_id in ids for ids in seq_ids])
            self.sequences[seq_id] = self.sequences[seq_id].joined(step.where(own))
        return hidden

    @property
    def _kinds(self) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        return self._empty.k, self._empty.v

    def _attend(self, i: int, q: FloatArray, group: Group, step: Cells) -> FloatArray:
        past, members, queries = group.past, group.members, group.queries
        at = step.positions[queries]
        positions = np.concatenate([past.positions, step.positions[members]])
        k = np.concatenate([past.k[i], step.k[i][members]]).astype(np.float32)
        v = np.concatenate([past.v[i], step.v[i][members]]).astype(np.float32)
        visible = positions <= at[:, None]
        if self._effective["attention_type"] == "non-causal":
            visible = np.ones_like(visible)
        rotate = self._rope.rotate
        return attend(rotate(q[queries], at), rotate(k, positions), v, visible)

    # -- outputs -------------------------------------------------------------------------------

    def logits(self, i: int) -> FloatArray:
        """Return output row ``i``."""
        row: FloatArray = self._rows[i]
        return row

    def embeddings(self) -> FloatArray:
        """Return the hidden state of each token of the last call, [n_tokens, n_embd]."""
        return self._hidden

    def embedding(self, seq_id: int) -> FloatArray:
        """Return the hidden states of a sequence's tokens in the last call, pooled."""
        own = self._hidden[np.array([seq_id in ids for ids in self._hidden_ids])]
        kind = self._effective["pooling_type"]
        if kind == "mean":
            return np.asarray(own.mean(axis=0, dtype=np.float32))
        return np.asarray(own[0] if kind == "cls" else own[-1])

    def set_embeddings(self, on: bool) -> None:  # noqa: FBT001  (the contract's signature)
        """Note it; hidden states are there anyway."""
        self._effective["embeddings"] = on

    # -- sequences -----------------------------------------------------------------------------

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
        found = cells.load(data, self._empty)
        self.sequences = [found[seq_id] for seq_id in range(len(self.sequences))]

    def save_sequence(self, seq_id: int) -> bytes:
        """Return one sequence as bytes."""
        return cells.dump({0: self.sequences[seq_id]})

    def load_sequence(self, seq_id: int, data: bytes) -> None:
        """Replace one sequence."""
        self.sequences[seq_id] = cells.load(data, self._empty)[0]

    # -- live controls -------------------------------------------------------------------------

    def set_causal_attention(self, on: bool) -> None:  # noqa: FBT001
        """Switch between causal and bidirectional attention."""
        self._effective["attention_type"] = "causal" if on else "non-causal"

    def abort(self) -> None:
        """Stop the call that runs, before its next layer; from any thread."""
        self._aborted.set()

    def clear_abort(self) -> None:
        """Let later calls run."""
        self._aborted.clear()

    def set_abort_callback(self, callback: Callable[[], bool] | None) -> None:
        """Ask ``callback`` before each layer."""
        self._ask = callback

    def _check_abort(self) -> None:
        if self._aborted.is_set() or (self._ask is not None and self._ask()):
            resident = sum(len(held.tokens) for held in self.sequences)
            raise DecodeAbortedError(
                f"aborted with {resident} tokens resident", resident_tokens=resident
            )

    def warmup(self) -> None:
        """Touch the weights; nothing is kept."""
        self._llama.forward(np.zeros(1, np.int32), lambda _i, q, _k, _v: q)

    def close(self) -> None:
        """Let the cells go."""
        self.sequences = []
