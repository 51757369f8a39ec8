"""The embeddings of the last call: of which sequences, and of how many tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from infercore.engine.outputs import read_only
from infercore.engine.plugin_checks import check_vector, check_vectors
from infercore.errors import InvalidInputError, OutputNotAvailableError

if TYPE_CHECKING:
    from collections.abc import Collection

    from infercore.engine.native import Native
    from infercore.protocols.spi import FloatArray


class Embeddings:
    """Whether embeddings are made (``on``), and which can be read."""

    def __init__(self, native: Native, *, on: bool, pooling: str) -> None:
        self._native = native
        self.on = on
        self.pooling = pooling
        self.forget()

    def forget(self) -> None:
        """There are none now."""
        self.n_tokens = 0
        self._seq_ids: frozenset[int] = frozenset()
        self._gathered: FloatArray | None = None

    def drop(self, seq_id: int) -> None:
        """A sequence changed: its own are gone, and with them the list of all tokens."""
        if seq_id in self._seq_ids:
            others = self._seq_ids - {seq_id}
            self.forget()
            self._seq_ids = others

    def note(
        self, seq_ids: Collection[int], n_tokens: int, gathered: list[FloatArray] | None = None
    ) -> None:
        """Say what the last call made, if anything; ``gathered`` over several engine calls."""
        if self.on or self._native.capabilities.encoder:
            self._seq_ids = frozenset(seq_ids)
            self.n_tokens = n_tokens
            self._gathered = np.concatenate(gathered) if gathered else None

    @property
    def are_of_tokens(self) -> bool:
        """Whether each token has one, as nothing is pooled."""
        return self.on and self.pooling == "none"

    def copy(self) -> FloatArray:
        """Return a copy of those of the last engine call."""
        return np.array(self._made(n_tokens=None))

    def of_sequence(self, seq_id: int) -> FloatArray:
        """Return the pooled embedding of a sequence; see `Context.embedding`."""
        if self.pooling == "none":
            raise InvalidInputError(
                "a pooled embedding needs pooling; open the context with pooling_type='mean', "
                "'cls' or 'last', or read embeddings()",
                field="pooling_type",
                value="none",
                allowed=self._native.capabilities.pooling,
            )
        if seq_id not in self._seq_ids:
            raise _none_made("embedding()")
        found = self._native.judged(self._native.inner.embedding, seq_id)
        return read_only(check_vector(found, seq_id, self._native.backend))

    def of_tokens(self) -> FloatArray:
        """Return the embedding of each token; see `Context.embeddings`."""
        if self.pooling != "none":
            raise InvalidInputError(
                f"token embeddings are not made with pooling_type={self.pooling!r}; "
                "open the context with pooling_type='none'",
                field="pooling_type",
                value=self.pooling,
                allowed="none",
            )
        if not self.n_tokens:
            raise _none_made("embeddings()")
        if self._gathered is not None:
            return read_only(check_vectors(self._gathered, self.n_tokens, self._native.backend))
        return read_only(self._made(self.n_tokens))

    def _made(self, n_tokens: int | None) -> FloatArray:
        """Return what the engine made of each of ``n_tokens``; None for however many."""
        found = self._native.judged(self._native.inner.embeddings)
        return check_vectors(found, n_tokens, self._native.backend)


def _none_made(operation: str) -> OutputNotAvailableError:
    return OutputNotAvailableError(
        f"{operation}: the last call made none; open with embeddings=True (or "
        "set_embeddings(True)) and decode first",
        operation=operation,
        state="no embeddings",
    )
