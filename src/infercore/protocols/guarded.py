"""What a session needs of the core's own contexts and models, beyond their public protocols."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from infercore.protocols.public import Context, Model, Tokenizer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from infercore.values.config import ContextConfig


class SessionTokenizer(Tokenizer, Protocol):
    """**Protocol:** a tokenizer that says whether its texts begin with a token of their own."""

    @property
    def add_bos(self) -> bool:
        """Whether `encode` puts the beginning-of-sequence token first."""


class SessionContext(Context, Protocol):
    """**Protocol:** a context whose room, rows and saved sequences can be asked for closely."""

    @property
    def config(self) -> ContextConfig:
        """What was asked for, after what the memory ladder gave up."""

    @property
    def shares_cells(self) -> bool:
        """Whether copies are the same cells of one cache that all sequences look at."""

    @property
    def n_engine_outputs(self) -> int:
        """How many output rows an engine's own sampler can read: none once they were restored."""

    def row_of(self, seq_id: int = 0) -> int | None:
        """Return the output row behind the sequence's last token, None where there is none."""

    def look_free(self, seq_id: int, keep: int | None = None) -> int:
        """Return `n_free` without waiting for a call that runs."""

    def n_free(self, seq_id: int = 0, *, keep: int | None = None) -> int:
        """Return how many more tokens fit.

        ``keep``: as it would be once the sequence's tokens from that position on were removed.
        """

    def save_sequence(self, seq_id: int = 0, *, note: Mapping[str, Any] | None = None) -> bytes:
        """Return one sequence and its last logits; ``note`` (JSON) stands in the header."""

    def count_reused(self, n_tokens: int) -> None:
        """Add tokens that were asked for and found resident to the counters."""


class SessionModel(Model, Protocol):
    """**Protocol:** a model that tells its identity and opens contexts for sessions."""

    @property
    def backend_version(self) -> str:
        """Version of the engine."""

    @property
    def runtime(self) -> Mapping[str, Any]:
        """What of the engine's runtime changes KV values."""

    @property
    def tokenizer(self) -> SessionTokenizer:
        """The model's tokenizer."""

    def context_of(self, config: ContextConfig) -> SessionContext:
        """Return a new context, also of a closed model that another context keeps alive."""
