"""What a session needs of the core's own contexts and models, beyond their public protocols."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from infercore.protocols.public import Context, Model, Tokenizer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Literal, TypeAlias

    from infercore.protocols.spi import FloatArray
    from infercore.values.config import ContextConfig
    from infercore.values.info import Capabilities

    WhichRows: TypeAlias = Literal["last", "all", "none"]
    """Of which tokens a call computes the logits."""


class SessionTokenizer(Tokenizer, Protocol):
    """**Protocol:** a tokenizer that says whether it puts a BOS token in front of a text."""

    @property
    def add_bos(self) -> bool:
        """Whether `encode` puts the beginning-of-sequence token first."""


class SessionContext(Context, Protocol):
    """**Protocol:** a context with closer access to its free room, rows and saved sequences."""

    @property
    def config(self) -> ContextConfig:
        """The requested config, less what was given up to fit into memory."""

    @property
    def shares_cells(self) -> bool:
        """Whether copies share the cells of one cache that all sequences use."""

    @property
    def n_engine_outputs(self) -> int:
        """How many output rows the engine's own sampler can read: none if they were restored."""

    def row_of(self, seq_id: int = 0) -> int | None:
        """Return the output row behind the sequence's last token, None where there is none."""

    def largest(self, i: int = -1) -> tuple[int, float, int]:
        """Return the token with the largest logit of row ``i``, that logit, and ``n_vocab``."""

    def decode_each(
        self, tokens: Sequence[int], seq_ids: Sequence[int]
    ) -> FloatArray | Sequence[FloatArray]:
        """Append a token to each of several sequences, in one call; return the engine's rows."""

    def look_free(self, seq_id: int, keep: int | None = None) -> int:
        """Return `n_free` without waiting for a running call."""

    def look_taken(self) -> tuple[int, int]:
        """Return how many cells are used, and how many by several sequences; never waits."""

    def n_free(self, seq_id: int = 0, *, keep: int | None = None) -> int:
        """Return how many more tokens fit.

        ``keep``: as it would be once the sequence's tokens from that position on were removed.
        """

    def save_sequence(
        self, seq_id: int = 0, *, note: Mapping[str, Any] | None = None, row: bool = True
    ) -> bytes:
        """Return one sequence and its last ``row``; ``note`` (JSON) stands in the header."""

    @property
    def set_live(self) -> Mapping[str, Any]:
        """What was set while it was open and changes what is computed, by the setter's name."""

    def compute_like(self, other: SessionContext) -> None:
        """Set what was set on ``other`` while it was open, so that both compute the same."""

    def hand_over(self, seq_id: int, *, row: bool = True) -> Any:
        """Return one sequence, unpacked, for `take_over` of a similar context."""

    def take_over(self, seq_id: int, handed: Any) -> None:
        """Restore what `hand_over` returned. Raises as `load_sequence`."""

    def count_reused(self, n_tokens: int) -> None:
        """Add tokens that were asked for and found resident to the counters."""

    def count_time(self, kind: str, seconds: float) -> None:
        """Add to the time that sessions spent on "tokenize", "sample" or "grammar"."""

    def release_threads(self) -> None:
        """Let the engine end the worker threads it keeps for the calling thread."""


class SequenceContext(Protocol):
    """**Protocol:** what a session needs from the place where its one sequence lives.

    That is its own context, one that it shares with its forks, or a page of a pool's context.
    """

    @property
    def n_ctx_seq(self) -> int:
        """The window of the sequence."""

    @property
    def n_batch(self) -> int:
        """Maximum number of tokens in one engine call."""

    @property
    def n_seq_max(self) -> int:
        """How many sequences the context has."""

    @property
    def config(self) -> ContextConfig:
        """The requested config."""

    @property
    def capabilities(self) -> Capabilities:
        """What can be done with the sequence."""

    @property
    def effective(self) -> Mapping[str, Any]:
        """The values in force."""

    @property
    def closed(self) -> bool:
        """Whether it was closed."""

    @property
    def n_outputs(self) -> int:
        """How many rows of logits can be read."""

    @property
    def n_engine_outputs(self) -> int:
        """How many of them an engine's own sampler can read."""

    @property
    def output_serial(self) -> int:
        """A number that changes whenever the rows do."""

    def n_past(self, seq_id: int = 0) -> int:
        """Return the sequence's next position."""

    def n_resident(self, seq_id: int = 0) -> int:
        """Return how many tokens are available without evaluating them."""

    def tokens(self, seq_id: int = 0) -> list[int]:
        """Return these tokens."""

    def n_free(self, seq_id: int = 0, *, keep: int | None = None) -> int:
        """Return how many more tokens fit, once those from ``keep`` on are removed."""

    def look_free(self, seq_id: int, keep: int | None = None) -> int:
        """Return `n_free` without waiting for a running call."""

    def decode(
        self, tokens: Sequence[int], *, seq_id: int = 0, logits: WhichRows = "last"
    ) -> int | None:
        """Append ``tokens``; a page returns how many it evaluated to do so."""

    def seq_remove(self, seq_id: int, p0: int = -1, p1: int = -1) -> bool:
        """Remove tokens; False where the engine cannot go back there."""

    def clear(self) -> None:
        """Remove everything."""

    def save_sequence(self, seq_id: int = 0, *, note: Mapping[str, Any] | None = None) -> bytes:
        """Return the sequence and its logits as bytes."""

    def load_sequence(self, seq_id: int, data: bytes) -> None:
        """Restore what `save_sequence` returned."""

    def logits(self, i: int = -1) -> FloatArray:
        """Return a row of logits."""

    def count_reused(self, n_tokens: int) -> None:
        """Count tokens of a prompt that were not evaluated."""

    def count_time(self, kind: str, seconds: float) -> None:
        """Count time spent on other work than evaluating."""

    def abort(self) -> None:
        """End the running call; may be called from any thread."""


class SequencePage(SequenceContext, Protocol):
    """**Protocol:** a page of a pool's context: its sequence is a value, held in cells or not.

    A call made at ``called_at`` may take until ``deadline`` (`time.perf_counter`). ``found`` counts
    the tokens that the last `decode` copied from other sequences, and those it brought back.
    What other sequences hold is of use only with the same ``identity``, and not while it
    ``is_cold``.
    """

    identity: str
    is_cold: bool

    called_at: float | None
    deadline: float | None
    found: tuple[int, int]

    @property
    def held_tokens(self) -> int:
        """Number of tokens in cells now."""

    @property
    def cut(self) -> int | None:
        """Where tokens were removed that later ones were computed with, None where none were."""

    def cut_out(self, start: int, end: int) -> bool:
        """Take out the tokens in [start, end); False where what follows is to be evaluated anew."""

    def load_sequence(self, seq_id: int, data: bytes, *, cut: int | None = None) -> None:
        """Restore saved tokens, some of which were removed at ``cut`` before they were saved."""

    def wanted(self, seq_id: int = 0) -> list[int]:
        """Return the tokens that are wanted, held or not."""


class SessionModel(Model, Protocol):
    """**Protocol:** a model that reports its identity and opens contexts for sessions."""

    @property
    def backend_version(self) -> str:
        """Version of the engine."""

    @property
    def runtime(self) -> Mapping[str, Any]:
        """The properties of the engine's runtime that affect KV values."""

    @property
    def tokenizer(self) -> SessionTokenizer:
        """The model's tokenizer."""

    def context_of(self, config: ContextConfig) -> SessionContext:
        """Return a new context, even of a closed model that another context keeps alive."""
