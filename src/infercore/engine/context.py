"""The guarded context: the `Context` that users get, over any plugin's."""

from __future__ import annotations

import time
import weakref
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from infercore.engine import arguments, calls, live, plugin_checks
from infercore.engine.abort import Abort
from infercore.engine.appending import Appending
from infercore.engine.cells import CellMap
from infercore.engine.counters import Counters
from infercore.engine.embeddings import Embeddings
from infercore.engine.gate import Gate, fork_count
from infercore.engine.native import Native
from infercore.engine.outputs import Outputs, all_of, read_only, rows_of
from infercore.engine.results import Results
from infercore.engine.room import Room
from infercore.engine.saving import Saving
from infercore.engine.sequences import Sequences
from infercore.engine.spans import check_entries, check_spans
from infercore.errors import UnsupportedFeatureError
from infercore.values import checks
from infercore.values.config import MAX_THREADS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from typing_extensions import Buffer, Self

    from infercore.engine.saving import Handed
    from infercore.engine.window import Window
    from infercore.protocols.guarded import SessionContext
    from infercore.protocols.spi import EngineContext, FloatArray
    from infercore.values.config import AdapterSpec, ContextConfig, ControlVector
    from infercore.values.info import Capabilities, PerfCounters

_clock = time.perf_counter
_INTS = {int}


class GuardedContext:
    """A `Context` over a plugin's `EngineContext`; it keeps its model alive until closed.

    Each call takes the lock, checks its arguments and asks the part that does it.
    """

    def __init__(  # noqa: PLR0913  (a model makes it, in one place)
        self,
        inner: EngineContext,
        *,
        release: Callable[[], None],
        config: ContextConfig,
        window: Window,
        n_vocab: int,
        backend: str,
        identity: Callable[[], Mapping[str, Any]],
        try_adapters: Callable[[Sequence[AdapterSpec]], object] = tuple,
        attempts: Sequence[Any] = (),
        load_ms: float = 0.0,
        layers: tuple[int, int] = (0, 0),
    ) -> None:
        # What a single token needs lies together: it is read behind an engine that has emptied the
        # processor's caches.
        self._gate = Gate("context")
        self._n_vocab = n_vocab
        self._cells = CellMap(window.n_seq_max)
        self._gate.backend = backend
        self._outputs = Outputs(rows_of(inner, n_vocab, backend), n_vocab, backend, all_of(inner))
        self._native = native = Native(inner, self._gate, backend)
        self._shares_window = window.shared
        self.n_ctx_seq = window.n_ctx_seq
        pooling = str(inner.effective.get("pooling_type") or "none")
        on = bool(inner.effective.get("embeddings", False))
        self._embeddings = Embeddings(native, on=on, pooling=pooling)
        self._results = Results(self._outputs, self._embeddings)
        self._abort = Abort(native)
        self._counters = Counters(timed=config.no_perf is not True, load_ms=load_ms)
        self._room = Room(window, self._cells)
        self._sequences = Sequences(native, self._cells, self._results)
        self._appending = Appending(
            native,
            self._cells,
            self._results,
            self._abort,
            self._counters,
            n_ctx=window.n_ctx,
            causal=inner.effective.get("attention_type", "causal") != "non-causal",
        )
        self._saving = Saving(
            native,
            self._cells,
            self._results,
            self._sequences,
            self._room,
            abort=self._abort,
            identity=identity,
        )
        self._inner = inner
        self._try_adapters = try_adapters
        self._layers = layers  # how many, and how wide
        self.set_live: dict[str, Any] = {}
        self._config = config
        self.attempts = tuple(attempts)
        self.capabilities: Capabilities = inner.capabilities
        self._choose_step()
        self.tolerance = inner.tolerance
        self.n_ctx = window.n_ctx
        self.n_seq_max = window.n_seq_max
        self.n_batch = inner.n_batch
        self.n_ubatch = inner.n_ubatch
        self._finalizer = weakref.finalize(self, _close, inner, release, fork_count(), self._gate)
        self.release_threads()  # others may compute from now on

    # -- facts ---------------------------------------------------------------------------------

    def __repr__(self) -> str:
        if self.closed:
            return "<Context closed>"
        n_held = sum(map(self._cells.length, range(self.n_seq_max)))
        shape = f"{n_held}/{self.n_ctx} tokens, n_seq_max {self.n_seq_max}"
        return f"<Context on {self._native.backend}, {shape}>"

    @property
    def effective(self) -> Mapping[str, Any]:
        """The value in force of each `ContextConfig` field; ``n_ctx`` as the engine padded it."""
        return MappingProxyType(self._inner.effective)

    @property
    def config(self) -> ContextConfig:
        """The requested config, less what was given up to fit into memory."""
        return self._config

    @property
    def shares_cells(self) -> bool:
        """Whether copies share the cells of one cache that all sequences use."""
        return self._native.optional.shares_cells

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
        return self._embeddings.pooling

    @property
    def native_handle(self) -> Any:
        """What the engine's own API takes; calls past this object are the caller's to answer for.

        Raises `SessionClosedError` after close, `UnsupportedFeatureError` without one.
        """
        with self._gate:
            own = self._native.optional.native_handle
            if own is None:
                raise UnsupportedFeatureError(feature="native_handle", backend=self._native.backend)
            return self._native.judged(own)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._gate.closed

    def _sequence(self, seq_id: Any, field: str = "seq_id") -> int:
        return arguments.check_sequence(seq_id, self.n_seq_max, field)

    # -- tokens in -----------------------------------------------------------------------------

    def decode(self, tokens: Sequence[int], *, seq_id: int = 0, logits: str = "last") -> None:
        """Append ``tokens`` at the sequence's end; see `Context.decode`."""
        with self._gate:
            ids = arguments.check_tokens(tokens, self._n_vocab)
            seq_id = self._sequence(seq_id)
            arguments.check_logits_mode(logits)
            inner_rows = logits == "all" and len(ids) > 1
            self._appending.check_call(len(ids), inner_rows=inner_rows)
            self._room.check(seq_id, len(ids))
            if len(ids):
                self._appending.append(ids, seq_id, logits)

    def decode_one(self, token: int, *, seq_id: int = 0) -> None:
        """Append one token and make its logits; see `Context.decode_one`."""
        # This runs once a token, behind an engine that has emptied the processor's caches: each
        # function more takes 2 to 3 us then. So it is one function.
        with self._gate:
            if type(token) is not int or not 0 <= token < self._n_vocab:
                token = arguments.check_token(token, self._n_vocab)
            if type(seq_id) is not int or seq_id != 0:
                seq_id = self._sequence(seq_id)
            cells = self._cells
            held = cells.n_cells
            if held >= self.n_ctx_seq:  # no sequence holds more cells than all of them do
                self._room.check(seq_id, 1)
            if self._decode_one_inner is None:
                self._appending.append(np.array([token], dtype=np.int32), seq_id, "last")
            else:
                abort, outputs, counters = self._abort, self._outputs, self._counters
                if abort.asked or self._prepares:
                    self._before_step(seq_id)
                abort.running = True
                started = _clock()
                try:
                    self._decode_one_inner(token, seq_id=seq_id)
                    cells.append_one(seq_id, token)
                    outputs.serial += 1
                    if outputs.single != seq_id:
                        outputs.set_single(seq_id)
                except BaseException as error:  # noqa: BLE001  (raised anew, typed)
                    self._appending.settle_one(token, seq_id, held, error)
                finally:  # no lock: an abort in between is forgotten before the next step
                    abort.running = False
                    if abort.asked:
                        abort.end()
                if counters.timed:
                    counters.decode_s += _clock() - started
                    counters.decode_tokens += 1

    def _choose_step(self) -> None:
        """Decide whether a single token is evaluated by the engine's own call, and what before."""
        plain = not (self._appending.only_encodes or self._embeddings.on)
        self._decode_one_inner = self._native.optional.decode_one if plain else None
        self._prepares = self._abort.asks_before_step or self.capabilities.encoder

    def _before_step(self, seq_id: int) -> None:
        """What a single token seldom needs before it."""
        self._abort.forget_late()
        if self._embeddings.n_tokens:  # what an encoder made in the call before
            self._results.forget()
        if self._abort.asks_before_step:  # the engine cannot ask the callback within a step
            self._appending.check_abort(seq_id)

    def eval(self, tokens: Sequence[int], n_past: int, *, seq_id: int = 0) -> None:
        """Drop what lies at ``n_past`` and beyond, then append; see `Context.eval`."""
        with self._gate:
            ids = arguments.check_tokens(tokens, self._n_vocab)
            seq_id = self._sequence(seq_id)
            at = arguments.check_position(n_past, "n_past")
            end = self._native.position(seq_id)
            if at > end:
                raise arguments.gap_error(at, end)
            if len(ids) and (kept := self._cells.next_position(seq_id, at)) != at:
                raise arguments.gap_error(at, kept)
            self._appending.check_call(len(ids), inner_rows=False)
            self._room.check(seq_id, len(ids) - self._room.given_back(seq_id, at))
            if at < end and not self._sequences.remove(seq_id, at, arguments.MAX_POSITION):
                self._native.need(
                    "kv_remove",
                    declared=False,
                    hint=f"this context cannot go back to position {at}; clear() and decode again",
                )
            if len(ids):
                self._appending.append(ids, seq_id, "last")

    def decode_batch(self, entries: Sequence[tuple[int, Sequence[int], bool]]) -> None:
        """Append entries of several sequences in one engine call; see `Context.decode_batch`."""
        with self._gate:
            self._native.need("multi_sequence", declared=self.capabilities.multi_sequence)
            tokens, seq_ids, wanted = check_entries(entries, self._n_vocab, self.n_seq_max)
            self._appending.check_entries(len(tokens))
            if tokens:
                self._appending.append_entries(tokens, seq_ids, wanted, self._room)

    def decode_spans(self, spans: Sequence[tuple[int, Sequence[Any], str]]) -> None:
        """Append spans of several sequences in one call; see `Context.decode_spans`."""
        with self._gate:
            checked = check_spans(spans, self._n_vocab, self.n_seq_max, self._layers[1])
            if checked.vectors is not None:
                self._need_vectors()
            if len(checked.seq_ids) > 1:
                self._native.need("multi_sequence", declared=self.capabilities.multi_sequence)
            self._appending.check_call(len(checked), inner_rows=checked.wants_inner_rows)
            lengths = dict(zip(checked.seq_ids, checked.lengths, strict=True))
            self._room.check_each(lengths, len(checked))
            # One alone is split as `decode` would split it, so it has the same bits.
            if len(lengths) == 1 and checked.vectors is None:
                self._appending.append(checked.tokens, checked.seq_ids[0], checked.logits[0])
            elif lengths:
                self._appending.append_spans(checked)

    def _need_vectors(self) -> None:
        own = self._native.optional.decode_vectors
        there = own is not None and not self._appending.only_encodes
        hint = "the engine looks up the rows of tokens by itself"
        self._native.need("rows of numbers in place of tokens", declared=there, hint=hint)

    def decode_each(
        self, tokens: Sequence[int], seq_ids: Sequence[int]
    ) -> FloatArray | Sequence[FloatArray]:
        """Append a token to each of several sequences, in one call; return the engine's rows.

        As one array where the engine has them so. A row is a view that the next call overwrites,
        and is not to be written to.
        Raises as `decode_spans`.
        """
        with self._gate:
            ids, sequences = list(tokens), list(seq_ids)
            if (
                _are_in(ids, self._n_vocab)
                and (self._appending.is_each(sequences) or self._are_apart(sequences))
                and len(sequences) == len(ids)
            ):
                if not self._shares_window or self._cells.n_cells + len(ids) > self.n_ctx:
                    self._room.check_each(dict.fromkeys(sequences, 1), len(ids))
                rows = self._appending.append_each(ids, sequences)
                if rows is not None:
                    return rows
        self.decode_spans([(s, [token], "last") for s, token in zip(sequences, ids, strict=True)])
        return [self.logits(i) for i in range(len(ids))]

    def _are_apart(self, sequences: list[Any]) -> bool:
        return _are_in(sequences, self.n_seq_max) and len(set(sequences)) == len(sequences)

    def encode(self, tokens: Sequence[int]) -> None:
        """Run an encoder over ``tokens``; see `Context.encode`."""
        with self._gate:
            self._native.need("encoder", declared=self.capabilities.encoder)
            ids = arguments.check_tokens(tokens, self._n_vocab)
            if len(ids) > self.n_ubatch:
                raise arguments.too_many(
                    "tokens", len(ids), self.n_ubatch, "an encoder works on one n_ubatch at once"
                )
            if len(ids):
                self._appending.encode(ids)

    # -- what the last call made ---------------------------------------------------------------

    def logits(self, i: int = -1) -> FloatArray:
        """Return output row ``i`` of the last call; see `Context.logits`."""
        with self._gate:
            try:
                row = self._outputs.row(i)
            except Exception as error:
                self._native.judge(error)
                raise
            return read_only(row) if row.flags.writeable else row

    def largest(self, i: int = -1) -> tuple[int, float, int]:
        """Return the token with the largest logit of output row ``i``, that logit, and ``n_vocab``.

        Of equal ones it is the first, and NaN is larger than any number. Raises as `logits`.
        """
        with self._gate:
            try:
                row = self._outputs.row(i)
            except Exception as error:
                self._native.judge(error)
                raise
            token = int(row.argmax())  # which copies a row that is read-only; so not of `logits`
            return token, row.item(token), self._n_vocab

    @property
    def rows_of(self) -> tuple[str, int]:
        """The backend that makes its rows, and their length."""
        return self._native.backend, self._n_vocab

    def sample_native(self, sample: Callable[[Any, int], int], i: int) -> int:
        """Let an engine's sampler choose from output row ``i``, once it is known to exist."""
        with self._gate:
            token = self._native.judged(sample, self._inner, self._outputs.engine_row(i))
            return plugin_checks.check_sampled(token, self._n_vocab, self._native.backend)

    def logits_all(self) -> FloatArray:
        """Return all rows of the last call made with ``logits="all"``."""
        with self._gate:
            self._native.need("logits_all", declared=self.capabilities.logits_all)
            return self._native.judged(self._outputs.rows)

    def row_of(self, seq_id: int = 0) -> int | None:
        """Return the output row behind the sequence's last token, None where there is none."""
        with self._gate:
            return self._outputs.of(self._sequence(seq_id))

    @property
    def n_outputs(self) -> int:
        """How many output rows can be read now."""
        return self._outputs.count

    @property
    def n_engine_outputs(self) -> int:
        """How many of them an engine's own sampler can read: none once they were restored."""
        return self._outputs.n_in_engine

    @property
    def output_serial(self) -> int:
        """A number that changes whenever the output rows do."""
        return self._outputs.serial

    def embedding(self, seq_id: int = 0) -> FloatArray:
        """Return the pooled embedding of the last call; see `Context.embedding`."""
        with self._gate:
            self._native.need("embeddings", declared=self.capabilities.embeddings)
            return self._embeddings.of_sequence(self._sequence(seq_id))

    def embeddings(self) -> FloatArray:
        """Return the embedding of each token of the last call; see `Context.embeddings`."""
        with self._gate:
            self._native.need("embeddings", declared=self.capabilities.embeddings)
            return self._embeddings.of_tokens()

    # -- what is held --------------------------------------------------------------------------

    def n_past(self, seq_id: int = 0) -> int:
        """Return the sequence's next position, as the engine counts it."""
        with self._gate:
            return self._native.position(self._sequence(seq_id))

    def n_resident(self, seq_id: int = 0) -> int:
        """Return how many tokens the sequence holds."""
        with self._gate:
            return self._cells.length(self._sequence(seq_id))

    def n_free(self, seq_id: int = 0, *, keep: int | None = None) -> int:
        """Return how many more tokens fit: into the shared window, or the sequence's own.

        ``keep``: as it would be once the sequence's tokens from that position on were removed.
        """
        with self._gate:
            kept = None if keep is None else arguments.check_position(keep, "keep")
            return self._room.free(self._sequence(seq_id), kept)

    def look_free(self, seq_id: int, keep: int | None = None) -> int:
        """Return `n_free` without waiting for a call that runs: for reports."""
        return self._room.free(seq_id, keep)

    def look_taken(self) -> tuple[int, int]:
        """Return how many cells are used, and how many by several sequences; never waits."""
        return self._room.taken()

    def tokens(self, seq_id: int = 0) -> list[int]:
        """Return the ids of the tokens that the sequence holds, by position."""
        with self._gate:
            return self._cells.tokens(self._sequence(seq_id))

    def seq_pos_min(self, seq_id: int = 0) -> int:
        """Return the first position held, -1 when empty."""
        with self._gate:
            return self._sequences.first_position(self._sequence(seq_id))

    def seq_pos_max(self, seq_id: int = 0) -> int:
        """Return the last position held, -1 when empty."""
        with self._gate:
            return self._native.position(self._sequence(seq_id)) - 1

    def seq_remove(self, seq_id: int, p0: int = -1, p1: int = -1) -> bool:
        """Remove positions [p0, p1); see `Context.seq_remove`."""
        with self._gate:
            everywhere = checks.is_integer(seq_id) and seq_id == -1
            ids = range(self.n_seq_max) if everywhere else (self._sequence(seq_id),)
            return self._sequences.remove_from(ids, *arguments.check_range(p0, p1))

    def seq_keep(self, seq_id: int) -> None:
        """Remove all other sequences."""
        with self._gate:
            self._sequences.keep(self._sequence(seq_id))

    def clear(self) -> None:
        """Remove everything."""
        with self._gate:
            self._sequences.clear()

    def seq_copy(self, src: int, dst: int, p0: int = -1, p1: int = -1) -> None:
        """Make ``dst`` hold what ``src`` holds in [p0, p1); see `Context.seq_copy`.

        What ``dst`` held in that range before is removed; of a whole copy, all it held. The
        copy of a whole sequence has its last output row too.
        """
        with self._gate:
            self._native.need("kv_copy", declared=self.capabilities.kv_copy != "none")
            source, target = self._sequence(src, "src"), self._sequence(dst, "dst")
            start, end = arguments.check_range(p0, p1)
            if source != target:
                self._sequences.copy(source, target, start, end)

    def seq_shift(self, seq_id: int, p0: int, p1: int, delta: int) -> None:
        """Add ``delta`` to the positions in [p0, p1); see `Context.seq_shift`.

        Raises `InvalidPositionError` where a position would fall below 0 or onto another one.
        """
        with self._gate:
            self._native.need("kv_shift", declared=self.capabilities.kv_shift)
            seq_id = self._sequence(seq_id)
            start, end = arguments.check_range(p0, p1)
            if not checks.is_integer(delta):
                raise checks.refuse("delta", delta, "an integer")
            self._sequences.shift(seq_id, start, end, int(delta))

    def seq_divide(self, seq_id: int, p0: int, p1: int, d: int) -> None:
        """Divide the positions in [p0, p1) by ``d``; see `Context.seq_divide`."""
        with self._gate:
            self._native.need("kv_divide", declared=self.capabilities.kv_divide)
            seq_id = self._sequence(seq_id)
            start, end = arguments.check_range(p0, p1)
            if not checks.is_integer(d) or not 1 <= d <= arguments.MAX_POSITION:
                raise checks.refuse("d", d, f"an integer from 1 to {arguments.MAX_POSITION}")
            self._sequences.divide(seq_id, start, end, int(d))

    # -- saved state ---------------------------------------------------------------------------

    def save_state(self) -> bytes:
        """Return all sequences and the last logits as bytes; see `Context.save_state`."""
        with self._gate:
            self._native.need("state", declared=self.capabilities.state)
            return self._saving.save_state()

    def load_state(self, data: Buffer) -> None:
        """Restore what `save_state` returned; see `Context.load_state`.

        Raises `SnapshotError`: refused by the header, the state is *unchanged*; refused by the
        engine, it is *cleared*.
        """
        with self._gate:
            self._native.need("state", declared=self.capabilities.state)
            self._saving.load_state(data)

    def save_sequence(
        self, seq_id: int = 0, *, note: Mapping[str, Any] | None = None, row: bool = True
    ) -> bytes:
        """Return one sequence and its last logits as bytes; see `Context.save_sequence`.

        ``note`` is for the caller: it stands in the header (`blob.read_header`) as "note", and
        must be what JSON can say. Without its ``row`` a sequence takes less; who restores it has
        to evaluate its last token anew.
        """
        with self._gate:
            self._native.need("sequence_state", declared=self.capabilities.sequence_state)
            arguments.check_note(note)
            arguments.check_bool("row", row)
            return self._saving.save_sequence(self._sequence(seq_id), note, row=row)

    def seq_state_size(self, seq_id: int = 0) -> int:
        """Return how many bytes the engine's state of a sequence takes; see `Context`."""
        with self._gate:
            self._native.need("sequence_state", declared=self.capabilities.sequence_state)
            native, seq_id = self._native, self._sequence(seq_id)
            own = native.optional.sequence_size
            if own is not None:
                return int(native.judged(own, seq_id))
            return len(memoryview(native.judged(native.inner.save_sequence, seq_id)).cast("B"))

    def load_sequence(self, seq_id: int, data: Buffer) -> None:
        """Restore what `save_sequence` returned, into ``seq_id``.

        Errors as in `load_state`; what the engine refuses leaves that sequence empty, and the
        others as they were.
        """
        with self._gate:
            self._native.need("sequence_state", declared=self.capabilities.sequence_state)
            self._saving.load_sequence(self._sequence(seq_id), data)

    def hand_over(self, seq_id: int, *, row: bool = True) -> Handed:
        """Return one sequence for `take_over` of a like context: saved, but not packed."""
        with self._gate:
            self._native.need("sequence_state", declared=self.capabilities.sequence_state)
            return self._saving.hand_over(self._sequence(seq_id), has_row=row)

    def take_over(self, seq_id: int, handed: Handed) -> None:
        """Restore what `hand_over` returned; see `load_sequence`."""
        with self._gate:
            self._native.need("sequence_state", declared=self.capabilities.sequence_state)
            self._saving.take_over(self._sequence(seq_id), handed)

    # -- live controls -------------------------------------------------------------------------

    def set_threads(self, n: int, n_batch: int | None = None) -> None:
        """Set the thread counts from now on; ``n_batch`` defaults to ``n``."""
        with self._gate:
            for field, value in (("n", n), ("n_batch", n if n_batch is None else n_batch)):
                if not checks.is_integer(value) or not 1 <= value <= MAX_THREADS:
                    raise checks.refuse(field, value, f"an integer from 1 to {MAX_THREADS}")
            hint = "give n_threads when opening the context"
            self._native.need("live_threads", declared=self.capabilities.live_threads, hint=hint)
            both = int(n), int(n if n_batch is None else n_batch)
            before = self.n_threads, self.n_threads_batch
            live.change(self._native, self._native.inner.set_threads, both, before)

    def set_embeddings(self, on: bool) -> None:  # noqa: FBT001  (the contract's signature)
        """Switch the output of embeddings on or off."""
        with self._gate:
            arguments.check_bool("on", on)
            self._native.need("embeddings", declared=self.capabilities.embeddings)
            own = self._native.inner.set_embeddings
            live.change(self._native, own, (on,), (self._embeddings.on,))
            self._decode_one_inner = None  # until it is known, which an interruption may prevent
            self._embeddings.on = on
            self._results.forget()
            self._choose_step()

    def set_causal_attention(self, on: bool) -> None:  # noqa: FBT001
        """Switch between causal and bidirectional attention."""
        with self._gate:
            arguments.check_bool("on", on)
            own = self._native.optional.set_causal_attention
            if own is None:
                if on == self._appending.causal:
                    return
                raise UnsupportedFeatureError(
                    feature="set_causal_attention", backend=self._native.backend
                )
            live.change(self._native, own, (on,), (self._appending.causal,))
            self._appending.causal = self.set_live["set_causal_attention"] = on
            self._results.forget()

    def set_adapters(self, adapters: Sequence[AdapterSpec]) -> None:
        """Replace the whole list of LoRA adapters. Resident tokens were made with the old one."""
        with self._gate:
            self._native.need("lora", declared=self.capabilities.lora)
            chosen = arguments.check_adapters(adapters)
            self._try_adapters(chosen)
            before = tuple(self.effective.get("adapters") or ())
            live.change(self._native, self._native.inner.set_adapters, (chosen,), (before,))
            self.set_live["set_adapters"] = chosen
            self._results.forget()

    def set_control_vector(self, directions: ControlVector | None) -> None:
        """Add ``directions`` to what layers put out; see `Context.set_control_vector`."""
        with self._gate:
            own = self._native.optional.set_control_vector
            given = arguments.check_directions(directions, *self._layers)
            if own is None:
                hint = "the engine adds nothing between its layers"
                self._native.need("set_control_vector", declared=given is None, hint=hint)
                return
            held = self.set_live.get("set_control_vector")
            before = None if held is None else np.stack(list(held.values()))
            live.change(self._native, own, (given,), (before,))
            self.set_live["set_control_vector"] = None if given is None else dict(enumerate(given))
            self._results.forget()

    def compute_like(self, other: SessionContext) -> None:
        """Set what was set on ``other`` while it was open, so that both compute the same."""
        for name, value in other.set_live.items():
            getattr(self, name)(value)

    def set_abort_callback(self, callback: Callable[[], bool] | None) -> None:
        """Call ``callback`` while working; if it returns True, the call aborts. None removes it.

        What it raises aborts the call that it was asked in and is raised by that. Where the
        engine cannot ask within a call, it is asked between calls of ``n_batch``.
        """
        with self._gate:
            if callback is not None and not callable(callback):
                raise checks.refuse("callback", callback, "a callable or None")
            self._prepares = True  # until it is known, which an interruption may prevent
            self._abort.set_callback(callback)
            self._choose_step()

    def abort(self) -> None:
        """Make the call that runs stop; without one running it does nothing."""
        self._abort.ask()

    def warmup(self) -> None:
        """Touch weights and buffers once; what is resident stays, or it is refused."""
        with self._gate:
            own = self._native.optional.warmup
            if own is None:
                raise UnsupportedFeatureError(feature="warmup", backend=self._native.backend)
            self._results.forget()
            self._abort.forget_late()
            self._native.judged(own)

    def synchronize(self) -> None:
        """Wait until the engine has finished all queued work."""
        with self._gate:
            own = self._native.optional.synchronize
            if own is not None:
                self._native.judged(own)

    def release_threads(self) -> None:
        """Let the engine end the threads that it keeps for the calling thread, if it keeps any.

        The next call starts them anew.
        """
        release = self._native.optional.release_threads
        if release is not None:
            release()

    def perf(self) -> PerfCounters:
        """Return times and counts since the start or `reset_perf`."""
        with self._gate:
            hint = "open the context without no_perf=True"
            self._native.need("perf", declared=self._counters.timed, hint=hint)
            return self._counters.report()

    def reset_perf(self) -> None:
        """Set all counters to zero."""
        with self._gate:
            self._counters.reset()

    def count_reused(self, n_tokens: int) -> None:
        """Add tokens that a session asked for and found resident to the counters."""
        self._counters.reused_tokens += n_tokens

    def count_time(self, kind: str, seconds: float) -> None:
        """Add what a session took to "tokenize", "sample", or for its "grammar", to the times."""
        self._counters.beside_s[kind] += seconds

    # -- the end -------------------------------------------------------------------------------

    def close(self) -> None:
        """Free the memory; idempotent. A call that runs in another thread is aborted."""
        if not self._gate.entered_here():
            self.abort()
        if self._gate.shut():
            self._abort.wait()
            self._finalizer()  # once, whoever asks
            self._saving.identity, self._try_adapters = dict, tuple  # they keep the model alive

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _are_in(values: list[Any], limit: int) -> bool:
    """Whether all of ``values``, of which there are some, are plain integers below ``limit``."""
    return set(map(type, values)) == _INTS and min(values) >= 0 and max(values) < limit


def _close(inner: EngineContext, release: Callable[[], None], born: int, gate: Gate) -> None:
    if born != fork_count():  # the parent's engine: closing it here may hang
        return
    if not gate.shut_at_end(getattr(inner, "abort", None)):
        return
    try:
        with calls.typed(gate.backend, "closing a context"):
            inner.close()
            getattr(inner, "release_threads", int)()
    finally:
        release()
