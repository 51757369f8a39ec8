"""The objects that users hold. The core's guards and sessions satisfy these protocols."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from infercore.protocols.opening import opened_by
from infercore.values.field_texts import lists_fields

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType

    import numpy as np
    import numpy.typing as npt
    from typing_extensions import Self, Unpack

    from infercore.protocols.session import Session
    from infercore.session.pool import SessionPool
    from infercore.values.config import (
        AdapterSpec,
        ContextConfig,
        ControlVector,
        ModelConfig,
        SamplingConfig,
    )
    from infercore.values.fields import (
        ContextFields,
        ModelFields,
        PlanFields,
        PoolFields,
        SamplingFields,
        SessionFields,
    )
    from infercore.values.info import (
        BackendInfo,
        Capabilities,
        FimTokens,
        MemoryPlan,
        ModelInfo,
        PerfCounters,
    )
    from infercore.values.pool import PoolConfig
    from infercore.values.session import Message

    FloatArray = npt.NDArray[np.float32]


@opened_by("infercore.get_backend(name)")
@runtime_checkable
class Backend(Protocol):
    """**Protocol:** an engine that can load models; see `infercore.get_backend`."""

    @property
    def name(self) -> str:
        """The name that users type."""

    @property
    def info(self) -> BackendInfo:
        """What is known about it, including its devices."""

    def match(self, path: str | os.PathLike[str]) -> float:
        """Return how well it can read ``path``: 0 = not at all."""

    @lists_fields("ModelConfig")
    def load_model(
        self,
        path: str | os.PathLike[str],
        config: ModelConfig | None = None,
        **fields: Unpack[ModelFields],
    ) -> Model:
        """Return the model at ``path``. Raises `ModelLoadError`; nothing is held then."""


@opened_by("model.tokenizer")
@runtime_checkable
class Tokenizer(Protocol):
    """**Protocol:** text to token ids and back. May be used from many threads."""

    @property
    def n_vocab(self) -> int:
        """Number of tokens; ids go from 0 to ``n_vocab - 1``."""

    @property
    def bos(self) -> int | None:
        """Id of the beginning-of-sequence token, None where the model has none."""

    @property
    def eos(self) -> int | None:
        """Id of the end-of-sequence token, None where the model has none."""

    @property
    def eot(self) -> int | None:
        """Id of the end-of-turn token, None where the model has none."""

    @property
    def sep(self) -> int | None:
        """Id of the token that separates texts, None where the model names none."""

    @property
    def pad(self) -> int | None:
        """Id of the padding token, None where the model names none."""

    @property
    def digest(self) -> str:
        """SHA-256 hex over the vocabulary and its special ids."""

    @property
    def chat_template(self) -> str | None:
        """The model's Jinja chat template, None where it has none."""

    @property
    def fim(self) -> FimTokens | None:
        """The marks for filling in the middle, None where the vocabulary lacks them."""

    def encode(
        self, text: str, *, add_special: bool = True, parse_special: bool = True
    ) -> list[int]:
        """Return the token ids of ``text``.

        ``add_special`` adds the tokens that the model expects around a text (often BOS);
        ``parse_special`` turns the text of control tokens into those tokens. Raises
        `InvalidInputError` for a value that is not a str or holds lone surrogates.
        """

    def encode_many(
        self,
        texts: Sequence[str | tuple[str, str]],
        *,
        add_special: bool = True,
        parse_special: bool = True,
        max_tokens: int | None = None,
        truncation: str = "error",
    ) -> list[list[int]]:
        """Return the token ids of each text, or of each pair of texts as the model was trained.

        Each has at most ``max_tokens`` ids, including those around the texts. A longer text is cut
        at its end (``truncation="right"``) or its beginning ("left"), in a pair the longer text
        first, or raises `InvalidInputError` ("error").
        """

    def decode(self, tokens: Sequence[int], *, skip_special: bool = False) -> str:
        """Return the text of ``tokens``; bytes that are not UTF-8 become U+FFFD.

        Raises `InvalidTokenError` for an id outside the vocabulary.
        """

    def token_bytes(self, token: int) -> bytes:
        """Return the exact bytes of one token. Raises `InvalidTokenError`."""

    def is_eog(self, token: int) -> bool:
        """Return whether ``token`` ends a generation. Raises `InvalidTokenError`."""

    def is_control(self, token: int) -> bool:
        """Return whether ``token`` is a control token. Raises `InvalidTokenError`."""

    def token_kind(self, token: int) -> str:
        """Return "normal", "control", "user_defined", "unknown", "byte" or "unused".

        A backend that does not know returns "control" or "normal". Raises `InvalidTokenError`.
        """

    def token_score(self, token: int) -> float | None:
        """Return the score that the vocabulary gives a token, None where it gives none.

        In a Unigram vocabulary that is a log-probability. Raises `InvalidTokenError`.
        """

    def apply_chat_template(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> str:
        """Return the messages as the model's template renders them (sandboxed Jinja).

        ``chat_template`` replaces it. Raises `UnsupportedFeatureError` where there is none,
        `InvalidInputError` where the template refuses the messages.
        """


@opened_by("infercore.load_model(path)")
@runtime_checkable
class Model(Protocol):
    """**Protocol:** loaded weights, shared by all their contexts; usable from many threads."""

    @property
    def backend(self) -> str:
        """Name of the backend that loaded it."""

    @property
    def info(self) -> ModelInfo:
        """Shape and metadata."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""

    @property
    def capabilities(self) -> Capabilities:
        """Those of a context with the default config; a context's own are authoritative."""

    @property
    def digest(self) -> str:
        """SHA-256 hex over the model's files, cached."""

    if TYPE_CHECKING:  # it raises after close, and `isinstance` would read it

        @property
        def native_handle(self) -> Any:
            """What the engine's own API takes: an int (an address) or an object.

            Raises `SessionClosedError` after close, `UnsupportedFeatureError` without one.
            """

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""

    @lists_fields("ContextConfig")
    def new_context(
        self, config: ContextConfig | None = None, **fields: Unpack[ContextFields]
    ) -> Context:
        """Return a new context on these weights; it keeps the model alive.

        Raises `UnsupportedFeatureError`, `InvalidInputError` or `OutOfMemoryError`; the model is
        unchanged.
        """

    @lists_fields("SamplingConfig")
    def new_sampler(
        self, config: SamplingConfig | None = None, **fields: Unpack[SamplingFields]
    ) -> Sampler:
        """Return a sampler for this model's vocabulary."""

    @lists_fields("PoolConfig", "ContextConfig")
    def new_pool(
        self, config: PoolConfig | None = None, **fields: Unpack[PoolFields]
    ) -> SessionPool:
        """Return a pool of sessions that share one context; ``fields`` as in `open_pool`."""

    @lists_fields("SessionOptions", "ContextConfig")
    def new_session(
        self, config: ContextConfig | None = None, **fields: Unpack[SessionFields]
    ) -> Session:
        """Return a session on its own new context."""

    @lists_fields("ContextConfig", "PoolConfig")
    def plan_memory(
        self, config: ContextConfig | None = None, **fields: Unpack[PlanFields]
    ) -> MemoryPlan:
        """Return how much memory such a context will take, in bytes."""

    def close(self) -> None:
        """Release the weights once the last context is closed; idempotent."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


@opened_by("model.new_context()")
@runtime_checkable
class Context(Protocol):
    """**Protocol:** a KV cache driven by tokens and positions; one owner thread at a time.

    Ranges of positions are half-open, [p0, p1); -1 as p0 means from the start, as p1 to the end.
    Any call from a second thread raises `SessionBusyError`, any call after `close` raises
    `SessionClosedError`. Arguments are checked before the engine is called: state unchanged.
    """

    @property
    def n_ctx(self) -> int:
        """The enforced window in tokens, over all sequences."""

    @property
    def n_ctx_seq(self) -> int:
        """The window of one sequence, in tokens."""

    @property
    def n_batch(self) -> int:
        """Maximum number of tokens in one engine call; `decode` splits longer input."""

    @property
    def n_ubatch(self) -> int:
        """Maximum number of tokens in one compute step."""

    @property
    def n_seq_max(self) -> int:
        """Number of sequences."""

    @property
    def n_threads(self) -> int:
        """Threads for single tokens."""

    @property
    def n_threads_batch(self) -> int:
        """Threads for batches."""

    @property
    def pooling_type(self) -> str:
        """Pooling in force: "none", "mean", "cls", "last" or "rank"."""

    @property
    def capabilities(self) -> Capabilities:
        """What this context can do."""

    @property
    def effective(self) -> Mapping[str, Any]:
        """The value in force of each `ContextConfig` field; ``n_ctx`` as the engine padded it."""

    @property
    def tolerance(self) -> float:
        """How much a logit may change when the same tokens are split differently over calls."""

    @property
    def attempts(self) -> Sequence[Any]:
        """What was tried to fit into memory, one entry per attempt."""

    if TYPE_CHECKING:  # it raises after close, and `isinstance` would read it

        @property
        def native_handle(self) -> Any:
            """What the engine's own API takes: an int (an address) or an object.

            Raises `SessionClosedError` after close, `UnsupportedFeatureError` without one.
            """

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""

    def decode(
        self,
        tokens: Sequence[int],
        *,
        seq_id: int = 0,
        logits: Literal["last", "all", "none"] = "last",
    ) -> None:
        """Append ``tokens`` at the sequence's end, in chunks of ``n_batch``.

        ``logits`` is "last" (one row, for the last token), "all" (one row per token) or "none". An
        empty list of tokens is a no-op. Raises `InvalidTokenError`, `InvalidSequenceError` and
        `ContextOverflowError` before anything changes; `DecodeAbortedError` in state *partial*.
        """

    def decode_one(self, token: int, *, seq_id: int = 0) -> None:
        """Append one token and compute its logits: the hot path. Errors as in `decode`."""

    def eval(self, tokens: Sequence[int], n_past: int, *, seq_id: int = 0) -> None:
        """Drop everything from position ``n_past`` on, then `decode`.

        Raises `InvalidPositionError` for a gap, `UnsupportedFeatureError` where that part cannot
        be removed; both unchanged.
        """

    def decode_batch(self, entries: Sequence[tuple[int, Sequence[int], bool]]) -> None:
        """Append ``(token, seq_ids, want_logits)`` entries of several sequences in one call.

        Output rows are those requested, in order. A token may go to several sequences that hold the
        same tokens. Raises `InvalidInputError` for more entries than ``n_batch``,
        `InvalidSequenceError` for a token that goes to sequences with different content, and what
        `decode` raises.
        """

    def decode_spans(
        self, spans: Sequence[tuple[int, Sequence[Any], Literal["last", "all", "none"]]]
    ) -> None:
        """Append ``(seq_id, tokens, logits)`` spans of different sequences in one call.

        Each span is appended at its sequence's end; ``logits`` is "last", "all" or "none" as in
        `decode`. Output rows follow the order of the spans. Input longer than ``n_batch`` is split.
        A span without tokens is skipped. Raises `InvalidSequenceError` for two spans of one
        sequence, and what `decode` raises; if one sequence lacks room, all are refused. After
        `DecodeAbortedError`, and `ContextOverflowError` of stage "engine", `n_past` says what was
        kept of each.

        In place of token ids, all spans of a call may have float rows [n_rows, n_embd], which the
        first layer gets instead of token embeddings (those of an image, say). In `tokens`, each row
        appears as a negative number computed from its values. Raises `UnsupportedFeatureError`
        where the engine does not accept rows, `InvalidInputError` for another shape, for values
        that are not finite, and for ids and rows in one call; state unchanged in each case.
        """

    def encode(self, tokens: Sequence[int]) -> None:
        """Run an encoder over ``tokens``. Raises `UnsupportedFeatureError` without one."""

    def logits(self, i: int = -1) -> FloatArray:
        """Return output row ``i`` of the last call: read-only float32 [n_vocab].

        Negative ``i`` counts from the end. Valid until the next call; copy to keep. Raises
        `OutputNotAvailableError` if the last call made no such row, or after a remove, clear or
        restore.
        """

    def logits_all(self) -> FloatArray:
        """Return float32 [n_outputs, n_vocab] of the last call made with ``logits="all"``."""

    def embedding(self, seq_id: int = 0) -> FloatArray:
        """Return the pooled embedding float32 [n_embd] (rank pooling: one score per class).

        Later calls do not change it.
        """

    def embeddings(self) -> FloatArray:
        """Return the embeddings float32 [n_tokens, n_embd]; only with pooling "none"."""

    def n_past(self, seq_id: int = 0) -> int:
        """Return the sequence's next position, as the engine counts it."""

    def n_resident(self, seq_id: int = 0) -> int:
        """Return how many tokens the sequence holds."""

    def n_free(self, seq_id: int = 0) -> int:
        """Return how many more tokens fit."""

    def tokens(self, seq_id: int = 0) -> list[int]:
        """Return the ids that the sequence holds, in order."""

    @property
    def n_outputs(self) -> int:
        """How many output rows there are now."""

    @property
    def output_serial(self) -> int:
        """A number that changes whenever the output rows do."""

    def seq_pos_min(self, seq_id: int = 0) -> int:
        """Return the first position held, -1 when empty."""

    def seq_pos_max(self, seq_id: int = 0) -> int:
        """Return the last position held, -1 when empty."""

    def seq_remove(self, seq_id: int, p0: int = -1, p1: int = -1) -> bool:
        """Remove positions [p0, p1); ``seq_id`` -1 means all sequences.

        Returns False, with nothing changed, where the engine cannot remove that part.
        """

    def seq_copy(self, src: int, dst: int, p0: int = -1, p1: int = -1) -> None:
        """Make ``dst`` hold what ``src`` holds in [p0, p1).

        Raises `UnsupportedFeatureError` (feature "kv_copy") for a part where only whole sequences
        can be copied, or where a sliding window has passed what its end reads; ``dst`` then holds
        nothing in [p0, p1).
        """

    def seq_keep(self, seq_id: int) -> None:
        """Remove all other sequences."""

    def seq_shift(self, seq_id: int, p0: int, p1: int, delta: int) -> None:
        """Add ``delta`` to the positions in [p0, p1)."""

    def seq_divide(self, seq_id: int, p0: int, p1: int, d: int) -> None:
        """Divide the positions in [p0, p1) by ``d``; several tokens may then share one."""

    def clear(self) -> None:
        """Remove everything."""

    def save_state(self) -> bytes:
        """Return all sequences and the last logits as bytes, with header and checksum."""

    def load_state(self, data: bytes) -> None:
        """Restore what `save_state` returned. Raises `SnapshotError`; its state is stated there."""

    def save_sequence(self, seq_id: int = 0) -> bytes:
        """Return one sequence as bytes, with header and checksum."""

    def seq_state_size(self, seq_id: int = 0) -> int:
        """Return how many bytes of `save_sequence` are the engine's own, without header and row.

        Engines that do not know the size in advance save the state to measure it.
        """

    def load_sequence(self, seq_id: int, data: bytes) -> None:
        """Restore what `save_sequence` returned, into ``seq_id``. Raises `SnapshotError`."""

    def set_threads(self, n: int, n_batch: int | None = None) -> None:
        """Set the thread counts from now on."""

    def set_embeddings(self, on: bool) -> None:  # noqa: FBT001  (the contract's signature)
        """Switch the output of embeddings on or off."""

    def set_causal_attention(self, on: bool) -> None:  # noqa: FBT001
        """Switch between causal and bidirectional attention."""

    def abort(self) -> None:
        """Stop the call running in another thread; it raises `DecodeAbortedError`."""

    def set_abort_callback(self, callback: Callable[[], bool] | None) -> None:
        """Call ``callback`` while working; if it returns True, the call aborts. None removes it."""

    def set_adapters(self, adapters: Sequence[AdapterSpec]) -> None:
        """Replace the whole list of LoRA adapters."""

    def set_control_vector(self, directions: ControlVector | None) -> None:
        """Add a vector to the output of each of these layers from now on; None adds nothing.

        ``directions`` maps layers (from 0) to ``n_embd`` numbers, or names files as llama.cpp's
        ``cvector-generator`` writes them: a path, or `AdapterSpec` objects, whose scaled vectors
        add up. They are read once. The new vector replaces the earlier one, and belongs to the
        identity of sessions and saved states, as adapters do. Raises `UnsupportedFeatureError`
        where the engine cannot (llama.cpp: at layer 0), `InvalidInputError` for other layers or
        widths, `ModelNotFoundError` and `ModelFormatError` for files; unchanged.
        """

    def warmup(self) -> None:
        """Touch weights and buffers once, so that the first real call is not slower."""

    def synchronize(self) -> None:
        """Wait until the engine has finished all queued work."""

    def perf(self) -> PerfCounters:
        """Return times and counts since the start or `reset_perf`."""

    def reset_perf(self) -> None:
        """Set all counters to zero."""

    def close(self) -> None:
        """Free the memory; idempotent."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


@opened_by("model.new_sampler()")
@runtime_checkable
class Sampler(Protocol):
    """**Protocol:** chooses tokens from a context's logits and remembers them."""

    @property
    def seed(self) -> int | None:
        """The seed in use (drawn when the config had None)."""

    def sample(self, context: Context, i: int = -1) -> int:
        """Return a token from output row ``i``, accepted exactly once."""

    def observe(self, tokens: Sequence[int], *, constrained: bool = True) -> None:
        """Show the sampler tokens that are already in the context (for penalties and constraints).

        ``constrained=False`` hides them from the constraint, as is right for a prompt.
        """

    def reset(self) -> None:
        """Go back to the state after construction, seed included."""

    def clone(self) -> Sampler:
        """Return an independent sampler in the same state."""

    def close(self) -> None:
        """Release what the sampler holds; idempotent."""
