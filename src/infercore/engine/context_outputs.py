"""What the last call made: rows of logits, and embeddings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from infercore.engine.context_sequences import Sequences
from infercore.engine.outputs import read_only
from infercore.errors import InvalidInputError, OutputNotAvailableError

if TYPE_CHECKING:
    from collections.abc import Callable

    from infercore.protocols.spi import FloatArray


class Reading(Sequences):
    """logits, logits_all, embedding, embeddings, and what an engine's sampler reads."""

    def logits(self, i: int = -1) -> FloatArray:
        """Return output row ``i`` of the last call; see `Context.logits`."""
        with self._gate:
            try:
                outputs = self._outputs
                if (
                    type(i) is not int
                    or i != -1
                    or outputs.count != 1
                    or outputs.gathered is not None
                ):
                    return outputs.row(i)
                row = outputs.engine_logits(0)
                return read_only(row) if row.flags.writeable else row
            except Exception as error:
                self._judge(error)
                raise

    def sample_native(self, sample: Callable[[Any, int], int], i: int) -> int:
        """Let an engine's sampler choose from output row ``i``, once it is known to exist."""
        with self._gate:
            return int(self._judged(sample, self._inner, self._outputs.engine_row(i)))

    def logits_all(self) -> FloatArray:
        """Return all rows of the last call made with ``logits="all"``."""
        with self._gate:
            self._need("logits_all", declared=self.capabilities.logits_all)
            return self._judged(self._outputs.rows)

    def _note_embedded(self, seq_ids: set[int], n_tokens: int) -> None:
        if self._embeddings or self.capabilities.encoder:
            self._embedded = frozenset(seq_ids)
            self._n_embedded_tokens = n_tokens

    def embedding(self, seq_id: int = 0) -> FloatArray:
        """Return the pooled embedding of the last call; see `Context.embedding`."""
        with self._gate:
            self._need("embeddings", declared=self.capabilities.embeddings)
            seq_id = self._sequence(seq_id)
            if self.pooling_type == "none":
                raise InvalidInputError(
                    "a pooled embedding needs pooling; open the context with pooling_type='mean', "
                    "'cls' or 'last', or read embeddings()",
                    field="pooling_type",
                    value="none",
                    allowed=self.capabilities.pooling,
                )
            if seq_id not in self._embedded:
                raise self._no_embedding("embedding()")
            return read_only(self._judged(self._inner.embedding, seq_id))

    def embeddings(self) -> FloatArray:
        """Return the embedding of each token of the last call; see `Context.embeddings`."""
        with self._gate:
            self._need("embeddings", declared=self.capabilities.embeddings)
            if self.pooling_type != "none":
                raise InvalidInputError(
                    f"token embeddings are not made with pooling_type={self.pooling_type!r}; "
                    "open the context with pooling_type='none'",
                    field="pooling_type",
                    value=self.pooling_type,
                    allowed="none",
                )
            if not self._n_embedded_tokens:
                raise self._no_embedding("embeddings()")
            vectors = self._vectors
            if vectors is None:
                vectors = self._judged(self._inner.embeddings)
            return read_only(vectors)

    def _no_embedding(self, operation: str) -> OutputNotAvailableError:
        return OutputNotAvailableError(
            f"{operation}: the last call made none; open with embeddings=True (or "
            "set_embeddings(True)) and decode first",
            operation=operation,
            state="no embeddings",
        )
