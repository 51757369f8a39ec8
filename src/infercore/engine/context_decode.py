"""Tokens in: appending with checks, chunks and a true count after any failure."""

from __future__ import annotations

import time
from functools import cache
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from infercore.engine import arguments
from infercore.engine.context_abort import aborted_with
from infercore.engine.context_outputs import Reading
from infercore.engine.outputs import ending_at_last_row
from infercore.engine.spans import check_spans
from infercore.errors import (
    ContextOverflowError,
    DecodeAbortedError,
    InvalidPositionError,
    UnsupportedFeatureError,
)
from infercore.values import checks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from infercore.engine.spans import Columns, Spans
    from infercore.protocols.spi import FloatArray, TokenArray

_clock = time.perf_counter


class Decoding(Reading):
    """decode, decode_one, eval, decode_batch, decode_spans, encode."""

    def decode(self, tokens: Sequence[int], *, seq_id: int = 0, logits: str = "last") -> None:
        """Append ``tokens`` at the sequence's end; see `Context.decode`."""
        with self._gate:
            ids = arguments.check_tokens(tokens, self._n_vocab)
            seq_id = self._sequence(seq_id)
            arguments.check_logits_mode(logits)
            self._check_call(len(ids), logits)
            self._check_room(seq_id, len(ids))
            if len(ids):
                self._append(ids, seq_id, logits)

    def decode_one(self, token: int, *, seq_id: int = 0) -> None:
        """Append one token and make its logits; see `Context.decode_one`."""
        # This runs once a token, behind an engine that has emptied the processor's caches: each
        # function more takes 2 to 3 us then. So it is one function.
        with self._gate:
            if type(token) is not int or not 0 <= token < self._n_vocab:
                token = arguments.check_token(token, self._n_vocab)
            if type(seq_id) is not int or seq_id != 0:
                seq_id = self._sequence(seq_id)
            cells, outputs = self._cells, self._outputs
            held = cells.n_cells
            if (held if self._shares_window else cells.length(seq_id)) >= self.n_ctx_seq:
                self._check_room(seq_id, 1)
            if self._decode_one_inner is None or self._embeddings:
                self._append(np.array([token], dtype=np.int32), seq_id, "last")
            else:
                if self._ask_before_step or self._n_embedded_tokens or self._aborted:
                    self._before_step(seq_id)
                self._abortable = self._stops_in_step
                started = _clock()
                try:
                    self._decode_one_inner(token, seq_id=seq_id)
                    cells.append_one(seq_id, token)
                    self._row_of = (seq_id,)
                    outputs.serial += 1
                    if outputs.count != 1 or outputs.all_rows or outputs.gathered is not None:
                        outputs.set_engine_rows(1)
                except BaseException as error:  # noqa: BLE001  (raised anew, typed)
                    self._settle_step(token, seq_id, held, error)
                finally:  # no lock: an abort in between is forgotten before the next step
                    self._abortable = False
                    if self._aborted:
                        self._end_abortable()
                if self._timed:
                    self._decode_s += _clock() - started
                    self._decode_tokens += 1

    def _before_step(self, seq_id: int) -> None:
        """What a single token seldom needs before it."""
        self._forget_late_abort()
        if self._n_embedded_tokens:  # what an encoder made in the call before
            self._forget_outputs()
        if self._ask_before_step:  # the engine cannot ask the callback within a step
            try:
                self._check_abort(seq_id)
            except BaseException:
                self._forget_outputs()
                raise

    def _settle_step(self, token: int, seq_id: int, held: int, error: BaseException) -> NoReturn:
        cells = self._cells
        cells.recount()
        before = cells.next_position(seq_id) - (cells.n_cells - held)
        self._settle(seq_id, [token], before, error)
        self._raise_typed(error, cells.length(seq_id))

    def eval(self, tokens: Sequence[int], n_past: int, *, seq_id: int = 0) -> None:
        """Drop what lies at ``n_past`` and beyond, then append; see `Context.eval`."""
        with self._gate:
            ids = arguments.check_tokens(tokens, self._n_vocab)
            seq_id = self._sequence(seq_id)
            at = arguments.check_position(n_past, "n_past")
            end = self._position(seq_id)
            if at > end:
                raise arguments.gap_error(at, end)
            if len(ids) and (kept := self._cells.next_position(seq_id, at)) != at:
                raise arguments.gap_error(at, kept)
            self._check_call(len(ids), "last")
            dropped = self._given_back(seq_id, at)
            self._check_room(seq_id, len(ids) - dropped)
            if at < end:
                self._drop_tail(seq_id, at)
            if len(ids):
                self._append(ids, seq_id, "last")

    def _drop_tail(self, seq_id: int, at: int) -> None:
        if not self._remove(seq_id, at, arguments.MAX_POSITION):
            raise UnsupportedFeatureError(
                feature="kv_remove",
                backend=self._backend,
                hint=f"this context cannot go back to position {at}; clear() and decode anew",
            )

    def decode_batch(self, entries: Sequence[tuple[int, Sequence[int], bool]]) -> None:
        """Append entries of several sequences in one engine call; see `Context.decode_batch`."""
        with self._gate:
            self._need("multi_sequence", declared=self.capabilities.multi_sequence)
            tokens, seq_ids, wanted = self._check_entries(entries)
            if not tokens:
                return
            positions = self._positions(seq_ids)
            self._check_coupled(tokens, seq_ids)
            self._check_batch_room(seq_ids)
            self._run_batch(tokens, positions, seq_ids, wanted)

    def _check_entries(
        self, entries: Sequence[tuple[int, Sequence[int], bool]]
    ) -> tuple[list[int], list[tuple[int, ...]], list[bool]]:
        tokens: list[int] = []
        seq_ids: list[tuple[int, ...]] = []
        wanted: list[bool] = []
        for entry in checks.items("entries", entries, "(token, seq_ids, want_logits) entries"):
            try:
                token, ids, want = entry
                ids = tuple(ids)
            except (TypeError, ValueError) as error:
                raise checks.refuse("entries", entry, "(token, seq_ids, want_logits)") from error
            tokens.append(arguments.check_token(token, self._n_vocab))
            checked = tuple(self._sequence(seq_id, "seq_ids") for seq_id in ids)
            if not checked or len(set(checked)) != len(checked):
                raise checks.refuse("seq_ids", ids, "at least one sequence id, each once")
            seq_ids.append(checked)
            wanted.append(arguments.check_bool("want_logits", want))
        limit = self.n_ubatch if self._whole_calls() else self.n_batch
        if len(tokens) > limit:
            raise arguments.too_many("entries", len(tokens), limit, f"one call takes {limit}")
        return tokens, seq_ids, wanted

    def _positions(self, seq_ids: Sequence[tuple[int, ...]]) -> list[int]:
        """The position of each entry: its sequences' next one, which must agree."""
        ends = {s: self._position(s) for ids in seq_ids for s in ids}
        positions = []
        for ids in seq_ids:
            at = {ends[s] for s in ids}
            if len(at) != 1:
                raise InvalidPositionError(
                    f"sequences {ids} are at different positions ({sorted(at)}); a token goes to "
                    "several sequences only at the same position",
                    field="seq_ids",
                    value=ids,
                    allowed="sequences of equal length",
                )
            positions.append(at.pop())
            for s in ids:
                ends[s] += 1
        return positions

    def _check_coupled(self, tokens: Sequence[int], seq_ids: Sequence[tuple[int, ...]]) -> None:
        """Refuse a token for several sequences that hold different tokens before it.

        An engine works it out once, behind the first of them, and gives all of them the result.
        """
        if all(len(ids) == 1 for ids in seq_ids):
            return
        added: dict[int, list[int]] = {s: [] for ids in seq_ids for s in ids}
        same = cache(self._cells.same)
        for token, (first, *others) in zip(tokens, seq_ids, strict=True):
            for other in others:
                if added[first] != added[other] or not same(first, other):
                    raise arguments.not_alike(first, other)
            for s in (first, *others):
                added[s].append(token)

    def _check_batch_room(self, seq_ids: Sequence[tuple[int, ...]]) -> None:
        if self._window.shared:
            self._check_room(0, len(seq_ids))
            return
        for seq_id in {s for ids in seq_ids for s in ids}:
            self._check_room(seq_id, sum(seq_id in ids for ids in seq_ids))

    def _run_batch(
        self,
        tokens: list[int],
        positions: list[int],
        seq_ids: list[tuple[int, ...]],
        wanted: list[bool],
    ) -> None:
        self._forget_outputs()
        started = time.perf_counter()
        self._begin_abortable()
        try:
            if self._shall_stop():
                raise aborted_with(self._cells.n_cells)
            self._inner.decode_batch(
                np.array(tokens, dtype=np.int32),
                np.array(positions, dtype=np.int32),
                seq_ids,
                np.array(wanted, dtype=np.bool_),
            )
            for token, pos, ids in zip(tokens, positions, seq_ids, strict=True):
                if not self._only_encodes:  # of whole texts nothing stays
                    self._cells.append(ids, (token,), pos)
        except BaseException as error:  # noqa: BLE001  (raised anew, typed)
            self._settle_batch(tokens, positions, seq_ids, error)
            self._raise_typed(error, self._cells.n_cells)
        finally:
            self._end_abortable()
        self._count(started, len(tokens), single=False)
        self._row_of = ending_at_last_row(seq_ids, wanted)
        self._outputs.set_engine_rows(sum(wanted), all_rows=all(wanted))
        self._note_embedded({s for ids in seq_ids for s in ids}, len(tokens))

    def _settle_batch(
        self,
        tokens: list[int],
        positions: list[int],
        seq_ids: list[tuple[int, ...]],
        error: BaseException,
    ) -> None:
        cells = self._cells
        cells.recount()
        for token, pos, ids in zip(tokens, positions, seq_ids, strict=True):
            kept = [s for s in ids if cells.next_position(s) <= pos < self._reached(s, error)]
            if kept:
                cells.append(kept, (token,), pos)
        self._judge(error)

    def decode_spans(self, spans: Sequence[tuple[int, Sequence[int], str]]) -> None:
        """Append spans of several sequences in one call; see `Context.decode_spans`."""
        with self._gate:
            checked = check_spans(spans, self._n_vocab, self.n_seq_max)
            if len(checked.seq_ids) > 1:
                self._need("multi_sequence", declared=self.capabilities.multi_sequence)
            self._check_call(len(checked), "all" if checked.wants_inner_rows else "last")
            if self._window.shared:
                self._check_room(0, len(checked))
            else:
                for seq_id, n_tokens in zip(checked.seq_ids, checked.lengths, strict=True):
                    self._check_room(seq_id, n_tokens)
            if len(checked.seq_ids) == 1:  # as `decode` would split it, so with the same bits
                self._append(checked.tokens, checked.seq_ids[0], checked.logits[0])
            elif len(checked):
                self._run_spans(checked)

    def _run_spans(self, spans: Spans) -> None:
        starts = [self._position(seq_id) for seq_id in spans.seq_ids]
        columns = spans.columns(starts)
        n_tokens, n_rows = len(spans), int(np.count_nonzero(columns.wanted))
        gathered = self._judged(self._outputs.allocate, n_rows) if n_tokens > self.n_batch else None
        vectors: list[FloatArray] = []
        n_made = 0
        self._forget_outputs()
        started = time.perf_counter()
        self._begin_abortable()
        try:
            for start in range(0, n_tokens, self.n_batch):
                stop = min(start + self.n_batch, n_tokens)
                if self._shall_stop():
                    raise aborted_with(self._cells.n_cells)
                part = columns.part(start, stop)
                self._decode_columns(part)
                self._enter_spans(spans, starts, start, stop)
                if gathered is not None:
                    n_rows_of_part = int(np.count_nonzero(part.wanted))
                    into = gathered[n_made : n_made + n_rows_of_part]
                    self._judged(self._outputs.copy_engine_rows, n_rows_of_part, into)
                    n_made += n_rows_of_part
                    if self._embeddings and self.pooling_type == "none":
                        vectors.append(self._judged(self._copy_embeddings))
        except BaseException as error:  # noqa: BLE001  (raised anew, typed)
            self._settle_spans(spans, starts, error)
            self._raise_typed(error, self._cells.n_cells)
        finally:
            self._end_abortable()
        self._count(started, n_tokens, single=False)
        self._row_of = next(
            ((s,) for s, mode in zip(spans.seq_ids[::-1], spans.logits[::-1], strict=True)
             if mode != "none"), ()
        )  # fmt: skip
        if gathered is not None:
            self._outputs.set_gathered(gathered, all_rows=n_rows == n_tokens)
        else:
            self._outputs.set_engine_rows(n_rows, all_rows=n_rows == n_tokens)
        self._note_embedded(set(spans.seq_ids), n_tokens)
        self._vectors = np.concatenate(vectors) if vectors else None

    def _decode_columns(self, part: Columns) -> None:
        own = self._decode_spans_inner
        if own is not None:
            own(part.tokens, part.positions, part.seq_ids, part.wanted)
        else:
            ids = [(seq_id,) for seq_id in part.seq_ids.tolist()]
            self._inner.decode_batch(part.tokens, part.positions, ids, part.wanted)

    def _enter_spans(self, spans: Spans, starts: list[int], start: int, stop: int) -> None:
        if self._only_encodes:  # of whole texts nothing stays
            return
        for i, before, low, high in spans.within(start, stop):
            tokens = spans.tokens[low:high].tolist()
            self._cells.append((spans.seq_ids[i],), tokens, starts[i] + before)

    def _settle_spans(self, spans: Spans, starts: list[int], error: BaseException) -> None:
        """After a failed call: enter what the engine kept of each span."""
        self._forget_outputs()
        cells = self._cells
        cells.recount()
        for i, _, low, high in spans.within(0, len(spans)):
            seq_id, entered = spans.seq_ids[i], cells.next_position(spans.seq_ids[i]) - starts[i]
            kept = self._reached(seq_id, error) - starts[i]
            if not self._only_encodes and not 0 <= kept <= high - low:
                raise self._gate.fail(error) from error
            if kept > entered:
                tokens = spans.tokens[low + entered : low + kept].tolist()
                cells.append((seq_id,), tokens, starts[i] + entered)
        self._judge(error)

    def _reached(self, seq_id: int, error: BaseException) -> int:
        """Return the sequence's next position after ``error``, or stop trusting the engine."""
        try:
            return int(self._n_past_inner(seq_id))
        except Exception as broken:
            raise self._gate.fail(error) from broken

    def encode(self, tokens: Sequence[int]) -> None:
        """Run an encoder over ``tokens``; see `Context.encode`."""
        with self._gate:
            self._need("encoder", declared=self.capabilities.encoder)
            ids = arguments.check_tokens(tokens, self._n_vocab)
            if len(ids) > self.n_ubatch:
                raise arguments.too_many(
                    "tokens", len(ids), self.n_ubatch, "an encoder works on one n_ubatch at once"
                )
            if not len(ids):
                return
            self._forget_outputs()
            self._run_encoder(ids)
            self._note_embedded({0}, len(ids))

    def _run_encoder(self, ids: TokenArray) -> None:
        started = time.perf_counter()
        self._begin_abortable()
        try:
            self._check_abort(0)
            self._judged(self._inner.encode, ids)
        except (DecodeAbortedError, ContextOverflowError) as error:
            self._raise_typed(error, self._cells.length(0))
        finally:
            self._end_abortable()
        self._count(started, len(ids), single=False)

    # -- the append loop -----------------------------------------------------------------------

    def _whole_calls(self) -> bool:
        """Whether a call must fit one compute step: texts that are pooled, or not kept."""
        pools = self._embeddings and self.pooling_type != "none"
        return pools or not self._causal or self._keeps_nothing

    def _check_call(self, n_tokens: int, logits: str) -> None:
        if logits == "all" and n_tokens > 1:
            self._need("logits_all", declared=self.capabilities.logits_all)
        if n_tokens > self.n_ubatch and self._whole_calls():
            raise arguments.too_many(
                "tokens",
                n_tokens,
                self.n_ubatch,
                "with pooling or non-causal attention all of them must fit one n_ubatch",
            )

    def _need_logits(self, feature: str) -> None:
        """Refuse on an encoder what only models that generate can do."""
        self._need(
            feature,
            declared=not self._only_encodes,
            hint="this model encodes texts: use encode(), or infercore.embed",
        )

    def _append(self, ids: TokenArray, seq_id: int, logits: str) -> None:
        self._need_logits("decode")
        self._forget_outputs()
        n_tokens = len(ids)
        rows = None
        if logits == "all" and n_tokens > self.n_batch:
            rows = self._judged(self._outputs.allocate, n_tokens)
        vectors: list[FloatArray] = []
        before = self._cells.length(seq_id)
        started = time.perf_counter()
        self._begin_abortable()
        try:
            for start in range(0, n_tokens, self.n_batch):
                chunk = ids[start : start + self.n_batch]
                self._check_abort(seq_id)
                self._append_chunk(chunk, seq_id, _mode(logits, start + len(chunk) == n_tokens))
                if rows is not None:
                    into = rows[start : start + len(chunk)]
                    self._judged(self._outputs.copy_engine_rows, len(chunk), into)
                if self._embeddings and self.pooling_type == "none" and n_tokens > self.n_batch:
                    vectors.append(self._judged(self._copy_embeddings))
        except BaseException:
            self._forget_outputs()
            raise
        finally:
            self._end_abortable()
            self._count(started, self._cells.length(seq_id) - before, single=n_tokens == 1)
        self._publish(n_tokens, seq_id, logits, rows)
        self._vectors = np.concatenate(vectors) if vectors else None

    def _copy_embeddings(self) -> FloatArray:
        return np.array(self._inner.embeddings(), dtype=np.float32)

    def _publish(self, n_tokens: int, seq_id: int, logits: str, rows: FloatArray | None) -> None:
        self._row_of = (seq_id,)
        if rows is not None:
            self._outputs.set_gathered(rows, all_rows=True)
        elif logits == "all":
            self._outputs.set_engine_rows(n_tokens, all_rows=True)
        elif logits == "last":
            self._outputs.set_engine_rows(1)
        self._note_embedded({seq_id}, n_tokens)

    def _append_chunk(self, chunk: TokenArray, seq_id: int, logits: str) -> None:
        before = self._position(seq_id)
        try:
            self._inner.decode(chunk, seq_id=seq_id, logits=logits)
            self._cells.append((seq_id,), chunk.tolist(), before)
        except BaseException as error:  # noqa: BLE001  (raised anew, typed)
            self._settle(seq_id, chunk.tolist(), before, error)
            self._raise_typed(error, self._cells.length(seq_id))

    def _raise_typed(self, error: BaseException, resident: int) -> NoReturn:
        typed = self._typed(error, resident)
        raise typed from (error.__cause__ if typed is error else error)

    def _typed(self, error: BaseException, resident: int) -> BaseException:
        """Return ``error`` with the true count of resident tokens, or what a callback raised."""
        if isinstance(error, DecodeAbortedError):
            return self._take_callback_error() or aborted_with(resident)
        if isinstance(error, ContextOverflowError):
            return ContextOverflowError(
                stage="engine",
                resident_tokens=resident,
                additional_tokens=error.additional_tokens,
                n_ctx=self.n_ctx,
            )
        return error


def _mode(logits: str, is_last: bool) -> str:  # noqa: FBT001
    if logits == "all":
        return "all"
    return "last" if logits == "last" and is_last else "none"
