"""What a plugin implements: the required part of each object, and the parts it may add.

The core wraps each object in a guard of the same shape (``Model``, ``Tokenizer``, ``Context``).
The guard checks every argument before a call gets here, calls from one thread at a time per
context, and does the bookkeeping (ownership, windows, chunks, validity of outputs). So a plugin
contains only what is specific to its engine: it reports the facts and raises what went wrong.

Optional methods are looked up by name; whether they are called is decided by
``Capabilities``. A capability that is declared without its method is a `PluginLoadError`.

=====================  ==========================================================================
capability             methods of `EngineContext` that it needs
=====================  ==========================================================================
``kv_remove``          ``seq_remove`` (always there; "none" removes whole sequences only)
``kv_copy``            ``seq_copy(src, dst, p0, p1)``
``kv_shift``           ``seq_shift(seq_id, p0, p1, delta)``
``kv_divide``          ``seq_divide(seq_id, p0, p1, d)``
``multi_sequence``     ``decode_batch(tokens, positions, seq_ids, wanted)``
``state``              ``save_state() -> buffer``, ``load_state(data)``
``sequence_state``     ``save_sequence(seq_id) -> buffer``, ``load_sequence(seq_id, data)``
``logits_all``         ``decode(..., logits="all")`` makes a row for each token
``embeddings``         ``embedding(seq_id)``, ``embeddings()``, ``set_embeddings(on)``
``encoder``            ``encode(tokens)``
``abort``              ``abort()``, ``clear_abort()``
``live_threads``       ``set_threads(n, n_batch)``
``lora``               ``set_adapters(adapters)``
``native_sampler``     ``new_sampler(config)`` of the model: see below
``logits`` "top"       ``logits(i)`` with log-probabilities of ``n_top`` tokens, -inf for others
``logits`` "none"      ``new_session(config)`` of the model, in place of ``new_context``
=====================  ==========================================================================

**An engine that generates by itself**, and shows no logits, declares ``logits="none"`` and
``native_sampler``, and provides its own sessions: its model has ``new_session(config)``, which
returns an `EngineContext` without ``logits``, in place of ``new_context``. ``decode`` evaluates, or
notes, the tokens of a prompt; the ``sample(session, i)`` of what ``new_sampler(config)`` returns
takes the next token from the engine, and ``decode`` of that same token continues from it. The
core's ``Session`` works on it as on any context, under the same laws; what needs logits is refused.

Further optional methods, each with a default in the guard: ``decode_one``, ``decode_spans``,
``decode_vectors(rows, positions, seq_ids, wanted)`` (``decode_spans`` of float32 [n, n_embd] in
place of tokens; without it they are refused), ``seq_pos_min``, ``seq_pos_max``, ``clear``,
``synchronize``, ``warmup``, ``set_causal_attention``, ``set_abort_callback(f)`` (``f()`` is True
where the call is to stop, and never raises; None removes it),
``set_control_vector(directions)`` (float32 [n_layer, n_embd] or None; a digest of what is in force
stands in ``effective["control_vector"]``), ``sequence_size(seq_id)`` (bytes that ``save_sequence``
gives), ``native_handle`` (also of a model: ``native_handle() -> int or object``, for those who want
the engine's own API), ``release_threads`` (the calling thread will compute nothing for a while, so
worker threads that the engine keeps for it may end; called from any thread, alongside calls of
others). Times and counts (``perf``) are kept by the guard.
``decode_spans(tokens, positions, seq_ids, wanted)`` is ``decode_batch`` in columns (int32, int32,
int32 and bool, each [n_tokens], at most ``n_batch``): each entry belongs to one sequence, and those
of a sequence follow each other at its next positions. ``logits_rows(n)`` gives the first ``n`` rows
of the last call as one float32 [n, n_vocab], where they lie so: the same as ``logits(0)`` to
``logits(n - 1)``. Saved state may be bytes or any other
contiguous buffer; it comes back as bytes, or as a memoryview where the context has
``takes_views = True``, which saves a copy: then a buffer that was returned must never change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    import numpy.typing as npt
    from typing_extensions import Buffer

    from infercore.values.config import AdapterSpec, ContextConfig
    from infercore.values.info import Capabilities, ModelInfo

    TokenArray = npt.NDArray[np.int32]
    FloatArray = npt.NDArray[np.float32]


class EngineTokenizer(Protocol):
    """**Protocol:** text to token ids and back, in the model's own vocabulary.

    ``bos`` begins a text, ``eos`` ends it, ``eot`` ends a turn of a chat; None where the model has
    none. ``add_bos``: whether ``encode(text, add_special=True)`` begins with ``bos``.

    Optional: ``decode(tokens, *, skip_special)``, if the text is not simply the joined bytes of all
    tokens; ``digest`` (a property; otherwise the core computes it); ``sep`` and ``pad``, ids or
    None; ``pair_middle``, the ids between a pair of texts, where they are not those that end a
    text; ``token_kind(token)`` and ``token_score(token)``.
    """

    n_vocab: int
    bos: int | None
    eos: int | None
    eot: int | None
    add_bos: bool
    chat_template: str | None

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> Sequence[int]:
        """Return the ids of ``text`` (valid UTF-8; may be empty or hold NUL)."""

    def token_bytes(self, token: int) -> bytes:
        """Return the exact bytes of one token; for a control token, those of its text."""

    def is_eog(self, token: int) -> bool:
        """Return whether ``token`` ends a generation, as ``eos``, ``eot`` and others may."""

    def is_control(self, token: int) -> bool:
        """Return whether ``token`` is a control token, which stands for no text."""


class EngineContext(Protocol):
    """**Protocol:** one KV cache, its positions and the outputs of its last call.

    ``n_batch`` is the maximum number of tokens in one `decode` here, ``n_ubatch`` in one compute
    step. ``effective`` has the value in force of every `ContextConfig` field that the engine knows
    (``n_threads`` and ``n_threads_batch`` always) and of its own options; its ``n_ctx`` may be
    padded. ``tolerance`` bounds how much logits may change when the same tokens are split
    differently over calls.
    """

    capabilities: Capabilities
    effective: Mapping[str, Any]
    tolerance: float
    n_batch: int
    n_ubatch: int

    def decode(self, tokens: TokenArray, *, seq_id: int, logits: str) -> None:
        """Append 1 to ``n_batch`` tokens at the sequence's end; ``logits`` last, all or none.

        Raises `DecodeAbortedError` when cancelled, `ContextOverflowError` (stage "engine") when the
        engine has no room; afterwards ``n_past`` counts what stays resident.
        """

    def logits(self, i: int) -> FloatArray:
        """Return output row ``i`` (0-based, counted over the last call) as float32 [n_vocab].

        Rows stay until the next call that computes: removing, copying or restoring a sequence
        removes none, since the guard keeps track of whose they are. Users get read-only views, and
        may keep them: one of the engine's own memory keeps that memory, also after ``close``;
        a row that is writable itself is searched for its largest logit without a copy.
        """

    def seq_remove(self, seq_id: int, p0: int, p1: int) -> bool:
        """Remove positions p0 <= p < p1 (p1 -1 = to the end) of one sequence, and return True.

        Return False, and change nothing, where that part cannot be removed. A whole sequence always
        can.
        """

    def n_past(self, seq_id: int) -> int:
        """Return the sequence's next position, as the engine has it."""

    def close(self) -> None:
        """Free the memory. Called once."""


class CapableContext(EngineContext, Protocol):
    """**Protocol:** an `EngineContext` with the calls of all capabilities; see the table above.

    The guard calls only those of capabilities that are declared.
    """

    def decode_batch(
        self,
        tokens: TokenArray,
        positions: npt.NDArray[np.int32],
        seq_ids: Sequence[tuple[int, ...]],
        wanted: npt.NDArray[np.bool_],
    ) -> None:
        """Append tokens, each to one or more sequences; make rows for those wanted, in order."""

    def encode(self, tokens: TokenArray) -> None:
        """Run the encoder over at most ``n_ubatch`` tokens."""

    def embedding(self, seq_id: int) -> FloatArray:
        """Return the pooled embedding of all tokens of a sequence in the last call.

        No later call changes what was returned.
        """

    def embeddings(self) -> FloatArray:
        """Return the embedding of each token of the last call, float32 [n_tokens, n_embd]."""

    def set_embeddings(self, on: bool) -> None:  # noqa: FBT001
        """Switch embeddings on or off."""

    def seq_copy(self, src: int, dst: int, p0: int, p1: int) -> None:
        """Make ``dst`` also hold what ``src`` holds in [p0, p1) (p1 -1 = to the end).

        Raise `UnsupportedFeatureError` for a part that would not go on as its source did there.
        """

    def seq_shift(self, seq_id: int, p0: int, p1: int, delta: int) -> None:
        """Add ``delta`` to the positions in [p0, p1)."""

    def seq_divide(self, seq_id: int, p0: int, p1: int, d: int) -> None:
        """Divide the positions in [p0, p1) by ``d``."""

    def save_state(self) -> Buffer:
        """Return all sequences as bytes."""

    def load_state(self, data: Buffer) -> None:
        """Restore what `save_state` returned; raise anything where it makes no sense."""

    def save_sequence(self, seq_id: int) -> Buffer:
        """Return one sequence as bytes."""

    def load_sequence(self, seq_id: int, data: Buffer) -> None:
        """Restore what `save_sequence` returned, replacing what the sequence holds, or raise."""

    def set_threads(self, n: int, n_batch: int) -> None:
        """Set the threads for single tokens and for batches."""

    def set_adapters(self, adapters: Sequence[AdapterSpec]) -> None:
        """Replace the list of LoRA adapters."""


class EngineModel(Protocol):
    """**Protocol:** loaded weights.

    Optional: ``digest`` (a property; otherwise the core hashes ``files``), ``plan_memory(config)``
    (which refuses what ``new_context`` refuses), ``new_sampler(config)`` where the capability
    ``native_sampler`` is declared.
    """

    info: ModelInfo
    tokenizer: EngineTokenizer
    capabilities: Capabilities
    files: Sequence[str]
    runtime: Mapping[str, Any]

    def new_context(self, config: ContextConfig) -> EngineContext:
        """Return a new context. Every field of ``config`` is honoured or refused.

        The guard has resolved ``n_ctx`` (at least 1). Raises `UnsupportedFeatureError` for what
        the engine lacks and `OutOfMemoryError` where an allocation fails.
        """

    def close(self) -> None:
        """Free the weights. Called once, after all contexts are closed."""
