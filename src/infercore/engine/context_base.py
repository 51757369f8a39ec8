"""What all parts of the guarded context share: the engine, the books and the gate."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, TypeVar

from infercore.engine import arguments, calls
from infercore.engine.cells import CellMap
from infercore.engine.gate import Gate
from infercore.engine.outputs import Outputs
from infercore.errors import (
    ContextOverflowError,
    UnsupportedFeatureError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from infercore.engine.window import Window
    from infercore.protocols.spi import EngineContext, FloatArray
    from infercore.values.config import ContextConfig
    from infercore.values.info import Capabilities


T = TypeVar("T")


class ContextBase:
    """The engine's context with its cells, outputs, gate and counters."""

    def __init__(
        self,
        inner: EngineContext,
        *,
        config: ContextConfig,
        window: Window,
        n_vocab: int,
        backend: str,
        identity: Callable[[], Mapping[str, Any]],
        attempts: Sequence[Any] = (),
        load_ms: float = 0.0,
    ) -> None:
        # What a single token needs lies together: it is read behind an engine that has emptied the
        # processor's caches.
        self._gate = Gate("context")
        self._n_vocab = n_vocab
        self._cells = CellMap(window.n_seq_max)
        self._outputs = Outputs(inner, n_vocab)
        self._shares_window = window.shared
        self.n_ctx_seq = window.n_ctx_seq
        # Without logits there is nothing to append to: an encoder takes whole texts.
        self._only_encodes = inner.capabilities.encoder and not inner.capabilities.logits_all
        self._decode_one_inner: Any = (
            None if self._only_encodes else getattr(inner, "decode_one", None)
        )
        self._decode_spans_inner: Any = getattr(inner, "decode_spans", None)
        self._embeddings = bool(inner.effective.get("embeddings", False))
        self._ask_before_step = False
        self._n_embedded_tokens = 0
        self._aborted = False
        self._abortable = False
        self._stops_in_step = inner.capabilities.abort and hasattr(inner, "abort")
        self._timed = config.no_perf is not True
        self._zero_counters()
        self._row_of: tuple[int, ...] = ()  # sequences whose end the last output row is of

        self._inner: Any = inner
        self._n_past_inner = inner.n_past
        self._window = window
        self._backend = self._gate.backend = backend
        self._identity_source = identity
        self._config = config
        self._load_ms = load_ms
        self.attempts = tuple(attempts)
        self.capabilities: Capabilities = inner.capabilities
        self.tolerance = inner.tolerance
        self.n_ctx = window.n_ctx
        self.n_seq_max = window.n_seq_max
        self.n_batch = inner.n_batch
        self.n_ubatch = inner.n_ubatch
        self._causal = self.effective.get("attention_type", "causal") != "non-causal"
        kinds = self.capabilities
        self._keeps_nothing = kinds.encoder and not (kinds.logits_all or kinds.state)
        self._embedded: frozenset[int] = frozenset()
        self._vectors: FloatArray | None = None
        self._abort_lock = threading.RLock()  # a signal handler may abort
        self._abort_callback: Callable[[], bool] | None = None
        self._callback_error: BaseException | None = None

    # -- facts ---------------------------------------------------------------------------------

    @property
    def effective(self) -> Mapping[str, Any]:
        """The value in force of each `ContextConfig` field; ``n_ctx`` as the engine padded it."""
        effective: Mapping[str, Any] = self._inner.effective
        return effective

    @property
    def config(self) -> ContextConfig:
        """What was asked for, after what the memory ladder gave up."""
        return self._config

    @property
    def shares_cells(self) -> bool:
        """Whether copies are the same cells of one cache that all sequences look at."""
        return bool(getattr(self._inner, "shares_cells", False))

    @property
    def n_threads(self) -> int:
        """Threads for single tokens."""
        return int(self.effective["n_threads"])

    @property
    def n_threads_batch(self) -> int:
        """Threads for batches."""
        return int(self.effective["n_threads_batch"])

    @property
    def pooling_type(self) -> str:
        """Pooling in force."""
        return str(self.effective.get("pooling_type") or "none")

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._gate.closed

    @property
    def _identity(self) -> Mapping[str, Any]:
        """What saved state must agree in; asked for only when saving, as digests take time."""
        return self._identity_source()

    def _zero_counters(self) -> None:
        self._decode_s = self._prefill_s = 0.0
        self._decode_tokens = self._prefill_tokens = self._reused_tokens = 0

    # -- shared checks -------------------------------------------------------------------------

    def _need(self, feature: str, *, declared: bool, hint: str = "") -> None:
        if not declared:
            raise UnsupportedFeatureError(feature=feature, backend=self._backend, hint=hint)

    def _sequence(self, seq_id: Any, field: str = "seq_id") -> int:
        return arguments.check_sequence(seq_id, self.n_seq_max, field)

    def _room(self, seq_id: int) -> int:
        """Tokens that still fit: of the shared window, or of the sequence's own."""
        if self._window.shared:
            return self._window.n_ctx - self._cells.n_cells
        return self._window.n_ctx_seq - self._cells.length(seq_id)

    def _check_room(self, seq_id: int, n_tokens: int) -> None:
        room = self._room(seq_id)
        if n_tokens > room:
            n_ctx = self._window.n_ctx if self._window.shared else self._window.n_ctx_seq
            raise ContextOverflowError(
                stage="decode",
                resident_tokens=n_ctx - room,
                additional_tokens=n_tokens,
                n_ctx=n_ctx,
            )

    def _given_back(self, seq_id: int, p0: int) -> int:
        """Room that removing the sequence's tokens from ``p0`` on would give back."""
        end = arguments.MAX_POSITION
        if self._window.shared:
            return self._cells.unshared(seq_id, p0, end)
        return self._cells.holds(seq_id, p0, end)

    def _forget_outputs(self) -> None:
        self._outputs.invalidate()
        self._embedded = frozenset()
        self._n_embedded_tokens = 0
        self._vectors = None

    # -- running the engine --------------------------------------------------------------------

    def _count(self, started: float, n_tokens: int, *, single: bool) -> None:
        if not self._timed:
            return
        elapsed = time.perf_counter() - started
        if single:
            self._decode_s += elapsed
            self._decode_tokens += n_tokens
        else:
            self._prefill_s += elapsed
            self._prefill_tokens += n_tokens

    def _settle(
        self, seq_id: int, tokens: Sequence[int], before: int, error: BaseException
    ) -> None:
        """After a failed append: enter what the engine kept, or stop trusting it.

        What the books have already is not entered again, so that an interruption may come at any
        point of the append. Typed errors and interruptions leave the context usable; anything
        else that an engine raises ends it.
        """
        self._forget_outputs()
        self._cells.recount()
        try:
            entered = self._cells.next_position(seq_id) - before
            kept = self._n_past_inner(seq_id) - before
        except Exception as broken:
            raise self._gate.fail(error) from broken
        if not 0 <= kept <= len(tokens):
            raise self._gate.fail(error) from error
        if kept > entered:
            self._cells.append((seq_id,), tokens[entered:kept], before + entered)
        self._judge(error)

    def _position(self, seq_id: int) -> int:
        """Return the sequence's next position; an engine that cannot tell it is not trusted."""
        return int(self._judged(self._n_past_inner, seq_id))

    def _judged(self, work: Callable[..., T], *args: Any) -> T:
        """Run an engine call; what it raises untyped is judged."""
        return calls.judged(self._gate, work, *args)

    def _judge(self, error: BaseException) -> None:
        """Stop trusting an engine that raised what nobody expects; lack of memory is typed."""
        calls.judge(self._gate, error)
