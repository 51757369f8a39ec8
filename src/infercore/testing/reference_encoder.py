"""The reference's context on an encoder: whole texts in, hidden states out, nothing kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from infercore.errors import UnsupportedFeatureError
from infercore.testing.attention import attend
from infercore.testing.reference_base import SHARED, Base
from infercore.testing.reference_settings import BACKEND
from infercore.values.info import Capabilities

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from infercore.protocols.spi import FloatArray, TokenArray
    from infercore.testing.bert import Bert

CAPABILITIES = Capabilities(encoder=True, **SHARED)


class EncoderContext(Base):
    """An `EngineContext` of an encoder: a call has the whole text of each of its sequences."""

    capabilities = CAPABILITIES
    tolerance = 1e-4

    def __init__(self, bert: Bert, effective: dict[str, Any]) -> None:
        super().__init__({}, effective)  # of which no adapter can change any
        self._bert = bert

    def encode(self, tokens: TokenArray) -> None:
        """Compute the hidden states of a text, as sequence 0."""
        self.decode(tokens, seq_id=0, logits="none")

    def decode(self, tokens: TokenArray, *, seq_id: int, logits: str) -> None:
        """Do what `encode` does, for one sequence; there are no logits."""
        del logits
        self._hidden = self._text(tokens)
        self._hidden_ids = [(seq_id,)] * len(tokens)

    def decode_batch(
        self,
        tokens: TokenArray,
        positions: npt.NDArray[Any],
        seq_ids: Sequence[tuple[int, ...]],
        wanted: npt.NDArray[np.bool_],
    ) -> None:
        """Compute the hidden states of several texts, one after the other."""
        del positions, wanted  # each text is whole, and has no logits
        hidden = np.empty((len(tokens), self._bert.shape.n_embd), np.float32)
        for seq_id in {s for ids in seq_ids for s in ids}:
            own = np.array([seq_id in ids for ids in seq_ids])
            hidden[own] = self._text(tokens[own])
        self._hidden, self._hidden_ids = hidden, seq_ids

    def _text(self, tokens: TokenArray) -> FloatArray:
        every = np.ones((len(tokens), len(tokens)), np.bool_)

        def attend_layer(q: FloatArray, k: FloatArray, v: FloatArray) -> FloatArray:
            self._check_abort(self.n_past(0))
            return attend(q, k, v, every, block=len(k))

        return self._bert.forward(tokens, attend_layer, self._product(len(tokens)))

    def warmup(self) -> None:
        """There is nothing to warm: the weights are in memory."""

    def set_embeddings(self, on: bool) -> None:  # noqa: FBT001  (the contract's signature)
        """Refuse to switch them off: there is nothing else."""
        if not on:
            raise UnsupportedFeatureError(feature="set_embeddings(False)", backend=BACKEND)

    # -- what is not there ---------------------------------------------------------------------

    def n_past(self, seq_id: int) -> int:
        """Return 0: nothing is kept."""
        del seq_id
        return 0

    def seq_remove(self, seq_id: int, p0: int, p1: int) -> bool:
        """Do nothing: nothing is kept."""
        del seq_id, p0, p1
        return True

    def logits(self, i: int) -> NoReturn:
        """There are none, and so the core asks for none."""
        raise NotImplementedError
