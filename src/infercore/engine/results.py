"""What the last call made: rows of logits and embeddings, which go when their sequence changes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from infercore.engine.embeddings import Embeddings
    from infercore.engine.outputs import Outputs


class Results:
    """The ``outputs`` and the ``embeddings`` of the last call."""

    def __init__(self, outputs: Outputs, embeddings: Embeddings) -> None:
        self.outputs = outputs
        self.embeddings = embeddings

    def forget(self) -> None:
        """There are none now."""
        self.outputs.invalidate()
        self.embeddings.forget()

    def drop(self, seq_id: int) -> None:
        """Forget those of a sequence: it changed."""
        self.outputs.drop(seq_id)
        self.embeddings.drop(seq_id)
