"""Tokens in: in pieces that the engine takes, with a true count after any failure."""

from __future__ import annotations

import time
from collections import Counter
from functools import cache
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from infercore.engine import arguments, calls, plugin_checks
from infercore.engine.abort import aborted_with
from infercore.errors import (
    ContextOverflowError,
    DecodeAbortedError,
    InvalidPositionError,
    InvalidStateError,
    OutOfMemoryError,
    SessionFatalError,
    TransientEngineError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy.typing as npt

    from infercore.engine.abort import Abort
    from infercore.engine.cells import CellMap
    from infercore.engine.counters import Counters
    from infercore.engine.embeddings import Embeddings
    from infercore.engine.native import Native
    from infercore.engine.outputs import Outputs
    from infercore.engine.results import Results
    from infercore.engine.room import Room
    from infercore.engine.spans import Spans
    from infercore.protocols.spi import FloatArray, TokenArray


class Appending:
    """Runs what was checked: spans of one sequence or of several, batches of entries, encoders.

    What each of them does when the engine fails is one rule: read the engine's positions, enter
    what it kept, and go on where the failure was a typed one or an interruption.
    """

    def __init__(
        self,
        native: Native,
        cells: CellMap,
        results: Results,
        abort: Abort,
        counters: Counters,
        *,
        n_ctx: int,
        causal: bool,
    ) -> None:
        self._native = native
        self._inner = native.inner
        self._cells = cells
        self._results = results
        self._outputs = results.outputs
        self._embeddings = results.embeddings
        self._abort = abort
        self._counters = counters
        self._n_ctx = n_ctx
        self.n_batch = native.inner.n_batch
        self.n_ubatch = native.inner.n_ubatch
        self.causal = causal
        kinds = native.capabilities
        # Without logits there is nothing to append to: an encoder takes whole texts.
        self.only_encodes = kinds.encoder and not kinds.logits_all
        self._decode_columns = None if kinds.encoder else native.optional.decode_spans
        # Columns of the last `append_each`, whose they are, and what the outputs were behind it.
        self._each = np.zeros((3, 0), dtype=np.int32)
        self._each_ids: list[int] = []
        self._each_serial = -1
        self._keeps_nothing = kinds.encoder and not (kinds.logits_all or kinds.state)

    # -- checks --------------------------------------------------------------------------------

    def check_call(self, n_tokens: int, *, inner_rows: bool) -> None:
        """Raise where a call of so many tokens, or rows of tokens within it, cannot be."""
        if inner_rows:
            self._native.need("logits_all", declared=self._native.capabilities.logits_all)
        if n_tokens > self.n_ubatch and self._whole_calls():
            raise arguments.too_many(
                "tokens",
                n_tokens,
                self.n_ubatch,
                "with pooling or non-causal attention all of them must fit one n_ubatch",
            )

    def check_entries(self, n_entries: int) -> None:
        """Raise `InvalidInputError` for more entries than one call takes."""
        limit = self.n_ubatch if self._whole_calls() else self.n_batch
        if n_entries > limit:
            raise arguments.too_many("entries", n_entries, limit, f"one call takes {limit}")

    def _whole_calls(self) -> bool:
        """Whether a call must fit one compute step: texts that are pooled, or not kept."""
        pools = self._embeddings.on and self._embeddings.pooling != "none"
        return pools or not self.causal or self._keeps_nothing

    def _need_logits(self) -> None:
        """Refuse on an encoder what only models that generate can do."""
        self._native.need(
            "decode",
            declared=not self.only_encodes,
            hint="this model encodes texts: use encode(), or infercore.embed",
        )

    # -- one sequence --------------------------------------------------------------------------

    def append(self, ids: TokenArray, seq_id: int, logits: str) -> None:
        """Append at a sequence's end, in pieces of ``n_batch``."""
        self._need_logits()
        n_tokens = len(ids)
        n_rows = {"all": n_tokens, "last": 1}.get(logits, 0)
        pieces = _Pieces(self._outputs, self._embeddings, n_rows if logits == "all" else 0)
        if n_tokens > self.n_batch:
            self._native.judged(pieces.gather)
        before = self._cells.length(seq_id)
        self._results.forget()
        started = time.perf_counter()
        self._abort.begin()
        try:
            for start, stop in self._ranges(n_tokens):
                self.check_abort(seq_id)
                made = n_rows and (stop - start if logits == "all" else int(stop == n_tokens))
                mode = logits if made else "none"
                self._append_piece(ids[start:stop], seq_id, mode)
                self._native.judged(pieces.take, made)
        except BaseException as error:
            self._results.forget()
            _note_kept(error, kept=self._cells.length(seq_id) != before)
            raise
        finally:
            self._abort.end()
            n_kept = self._cells.length(seq_id) - before
            self._counters.count(started, n_kept, single=n_tokens == 1)
        if logits == "last":
            self._outputs.set_single(seq_id)
        elif logits == "all":
            owners = [(seq_id,)] * n_tokens
            ends = {seq_id: n_tokens - 1}
            self._outputs.set_rows(owners, ends, all_rows=True, gathered=pieces.rows)
        self._embeddings.note({seq_id}, n_tokens, pieces.vectors)

    def _ranges(self, n_tokens: int) -> Iterator[tuple[int, int]]:
        for start in range(0, n_tokens, self.n_batch):
            yield start, min(start + self.n_batch, n_tokens)

    def _append_piece(self, piece: TokenArray, seq_id: int, logits: str) -> None:
        before = self._start(seq_id)
        try:
            self._inner.decode(piece, seq_id=seq_id, logits=logits)
            self._check_end(seq_id, before + len(piece))
            self._cells.append((seq_id,), piece.tolist(), before)
        except BaseException as error:  # noqa: BLE001  (raised anew, typed)
            self._cells.recount()
            self._enter_kept(seq_id, piece.tolist(), before, error)
            self._native.judge(error)
            self._fail(error, lambda: self._cells.length(seq_id))

    def _check_end(self, seq_id: int, expected: int) -> None:
        """Stop trusting an engine that took tokens and does not count them."""
        found = self._native.position(seq_id)
        if found != expected:
            told = f"returned {found} after a decode that ends at {expected}"
            raise self._miscounted(seq_id, told)

    def _start(self, seq_id: int) -> int:
        """Return the sequence's next position; stop trusting an engine that counts another."""
        found, held = self._native.position(seq_id), self._cells.next_position(seq_id)
        if found != held:
            raise self._miscounted(seq_id, f"returned {found} where the sequence ends at {held}")
        return found

    def _miscounted(self, seq_id: int, told: str) -> SessionFatalError:
        call, backend = f"n_past({seq_id})", self._native.backend
        return self._native.lock.fail(plugin_checks.wrong(backend, call, told))

    def settle_one(self, token: int, seq_id: int, held: int, error: BaseException) -> NoReturn:
        """Raise what a step of one token failed with, as ``held`` cells were taken before it."""
        self._results.forget()
        self._cells.recount()
        before = self._cells.next_position(seq_id) - (self._cells.n_cells - held)
        self._enter_kept(seq_id, [token], before, error)
        self._native.judge(error)
        self._fail(error, lambda: self._cells.length(seq_id))

    # -- several sequences ---------------------------------------------------------------------

    def append_spans(self, spans: Spans) -> None:
        """Append spans of several sequences, in pieces of ``n_batch``."""
        starts = [*map(self._start, spans.seq_ids)]
        columns = spans.columns(starts)
        n_tokens = len(spans)
        owners, ends = spans.rows()
        if owners:
            self._need_logits()
        pieces = _Pieces(self._outputs, self._embeddings, len(owners))
        if n_tokens > self.n_batch:
            self._native.judged(pieces.gather)

        def run(start: int, stop: int) -> None:
            part = columns if stop - start == n_tokens else columns.part(start, stop)
            own = self._native.optional.decode_spans
            if part.vectors is not None:
                vectors = self._native.optional.decode_vectors
                assert vectors is not None  # noqa: S101  (asked before)
                vectors(part.vectors, part.positions, part.seq_ids, part.wanted)
            elif own is not None:
                own(part.tokens, part.positions, part.seq_ids, part.wanted)
            else:
                ids = [(seq_id,) for seq_id in part.seq_ids.tolist()]
                self._inner.decode_batch(part.tokens, part.positions, ids, part.wanted)
            if not self.only_encodes:  # of whole texts nothing stays
                for i, before, low, high in spans.within(start, stop):
                    self._check_end(spans.seq_ids[i], starts[i] + before + high - low)
                self._enter_spans(spans, starts, start, stop)
            self._native.judged(pieces.take, int(np.count_nonzero(part.wanted)))

        def settle(error: BaseException) -> None:
            for i, _, low, high in spans.within(0, n_tokens):
                tokens = spans.tokens[low:high].tolist()
                self._enter_kept(spans.seq_ids[i], tokens, starts[i], error)
            self._native.judge(error)

        self._run_several(n_tokens, run, settle)
        all_rows = len(owners) == n_tokens
        self._outputs.set_rows(owners, ends, all_rows=all_rows, gathered=pieces.rows)
        self._embeddings.note(spans.seq_ids, n_tokens, pieces.vectors)

    def append_each(
        self, tokens: list[int], seq_ids: list[int]
    ) -> FloatArray | list[FloatArray] | None:
        """Append a token to each of several sequences, in one engine call; return their rows.

        None, and nothing is done, where that takes more than one call of columns.
        """
        # What most steps of a pool are: in one function, as `GuardedContext.decode_one` is.
        own, n, abort = self._decode_columns, len(tokens), self._abort
        if own is None or n > self.n_batch or self._embeddings.on or abort.asks_before_step:
            return None
        cells, outputs, columns = self._cells, self._outputs, self._each
        if self._embeddings.n_tokens:
            self._embeddings.forget()
        started = time.perf_counter()
        if abort.asked or abort.running:
            abort.forget_late()
        abort.running = True
        try:
            if outputs.serial == self._each_serial and seq_ids == self._each_ids:
                columns = columns.copy()  # nothing changed since: each is one position further
                columns[0] = tokens
                columns[1] += 1
            else:
                starts = [*map(self._inner.n_past, seq_ids)]
                columns = np.array((tokens, starts, seq_ids), dtype=np.int32)
                self._each_ids = seq_ids
            own(columns[0], columns[1], columns[2], _all_wanted(n))
            cells.append_each(seq_ids, tokens)
        except BaseException as error:  # noqa: BLE001  (raised anew, typed)
            self._results.forget()
            cells.recount()
            if columns is not self._each:  # else the engine was not called yet
                for seq_id, token, start in zip(seq_ids, tokens, columns[1].tolist(), strict=True):
                    self._enter_kept(seq_id, [token], start, error)
            self._native.judge(error)
            self._fail(error, lambda: cells.n_cells)
        finally:  # no lock: an abort in between is forgotten before the next step
            abort.running = False
            if abort.asked:
                abort.end()
        self._counters.count(started, n)
        try:
            rows = outputs.set_each(seq_ids)
        except Exception as error:
            self._native.judge(error)
            raise
        self._each, self._each_serial = columns, outputs.serial
        return rows

    def is_each(self, seq_ids: list[int]) -> bool:
        """Whether these were the sequences of the last `append_each`."""
        return seq_ids == self._each_ids

    def _enter_spans(self, spans: Spans, starts: list[int], start: int, stop: int) -> None:
        if len(spans) == len(spans.seq_ids) == stop - start:  # a token each, as in most steps
            for seq_id, token in zip(spans.seq_ids, spans.tokens.tolist(), strict=True):
                self._cells.append_one(seq_id, token)
            return
        for i, before, low, high in spans.within(start, stop):
            tokens = spans.tokens[low:high].tolist()
            if len(tokens) == 1 and not before:  # at its end, as most are
                self._cells.append_one(spans.seq_ids[i], tokens[0])
            else:
                self._cells.append((spans.seq_ids[i],), tokens, starts[i] + before)

    def append_entries(
        self,
        tokens: list[int],
        seq_ids: list[tuple[int, ...]],
        wanted: list[bool],
        room: Room,
    ) -> None:
        """Append entries of one sequence or more each, in one engine call."""
        if any(wanted):
            self._need_logits()
        positions = self._positions(seq_ids)
        self._check_coupled(tokens, seq_ids)
        room.check_each(Counter(s for ids in seq_ids for s in ids), len(tokens))

        def run(_start: int, _stop: int) -> None:
            self._inner.decode_batch(
                np.array(tokens, dtype=np.int32),
                np.array(positions, dtype=np.int32),
                seq_ids,
                np.array(wanted, dtype=np.bool_),
            )
            for token, pos, ids in zip(tokens, positions, seq_ids, strict=True):
                if not self.only_encodes:
                    self._cells.append(ids, (token,), pos)

        def settle(error: BaseException) -> None:
            reached = self._reached({s for ids in seq_ids for s in ids}, error)
            for token, pos, ids in zip(tokens, positions, seq_ids, strict=True):
                kept = [s for s in ids if self._cells.next_position(s) <= pos < reached[s]]
                if kept:
                    self._cells.append(kept, (token,), pos)
            self._native.judge(error)

        self._run_several(len(tokens), run, settle)
        rows = [ids for ids, want in zip(seq_ids, wanted, strict=True) if want]
        ends, n_rows = {}, 0
        for ids, want in zip(seq_ids, wanted, strict=True):
            for s in ids:
                ends[s] = n_rows if want else -1
            n_rows += want
        ends = {s: row for s, row in ends.items() if row >= 0}
        self._outputs.set_rows(rows, ends, all_rows=all(wanted))
        self._embeddings.note({s for ids in seq_ids for s in ids}, len(tokens))

    def _reached(self, seq_ids: set[int], error: BaseException) -> dict[int, int]:
        """Return the next positions after a failed append; none may be before what was there."""
        reached = {s: self._native.position_after(s, error) for s in seq_ids}
        if any(end < self._cells.next_position(s) for s, end in reached.items()):
            self._distrust(error)
        return reached

    def _run_several(
        self,
        n_tokens: int,
        run: Callable[[int, int], None],
        settle: Callable[[BaseException], None],
    ) -> None:
        """Run the pieces of a call of several sequences; all lose their rows where it fails."""
        self._results.forget()
        before = self._cells.n_cells
        started = time.perf_counter()
        self._abort.begin()
        try:
            for start, stop in self._ranges(n_tokens):
                if self._abort.shall_stop():
                    raise aborted_with(self._cells.n_cells)
                run(start, stop)
        except BaseException as error:  # noqa: BLE001  (raised anew, typed)
            self._cells.recount()
            try:
                settle(error)
                self._fail(error, lambda: self._cells.n_cells)
            except _UNCHANGING as typed:
                _note_kept(typed, kept=self._cells.n_cells != before)
                raise
        finally:
            self._abort.end()
        self._counters.count(started, n_tokens)

    def _positions(self, seq_ids: Sequence[tuple[int, ...]]) -> list[int]:
        """The position of each entry: its sequences' next one, which must agree."""
        ends = {s: self._native.position(s) for ids in seq_ids for s in ids}
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

    # -- encoders ------------------------------------------------------------------------------

    def encode(self, ids: TokenArray) -> None:
        """Run an encoder over ``ids``."""
        if n := self._cells.n_cells:
            raise InvalidStateError(
                "the context still holds tokens that were decoded after an earlier text; call "
                "clear() before encoding another",
                operation="encode",
                state=f"{n} tokens are resident",
            )
        self._results.forget()
        started = time.perf_counter()
        self._abort.begin()
        try:
            self.check_abort(0)
            self._native.judged(self._inner.encode, ids)
        except (DecodeAbortedError, ContextOverflowError) as error:
            self._fail(error, lambda: self._cells.length(0))
        finally:
            self._abort.end()
        self._counters.count(started, len(ids))
        self._embeddings.note({0}, len(ids))

    # -- after a failure -----------------------------------------------------------------------

    def check_abort(self, seq_id: int) -> None:
        """Raise what a stopped call raises, if it shall stop; its rows are gone then."""
        if self._abort.shall_stop():
            self._results.forget()
            raise self._abort.stopped(self._cells.length(seq_id))

    def _enter_kept(
        self, seq_id: int, tokens: Sequence[int], before: int, error: BaseException
    ) -> None:
        """After a failed append: enter what the engine kept, or stop trusting it."""
        entered = self._cells.next_position(seq_id) - before
        kept = self._native.position_after(seq_id, error) - before
        if not 0 <= kept <= len(tokens):
            self._distrust(error)
        elif kept > entered:
            self._cells.append((seq_id,), tokens[entered:kept], before + entered)

    def _distrust(self, error: BaseException) -> None:
        """Stop trusting an engine that has lost what it held, or has more than it was given."""
        failure = self._native.lock.fail(error)
        if calls.is_of_the_engine(error):
            raise failure from error

    def _fail(self, error: BaseException, resident: Callable[[], int]) -> NoReturn:
        """Raise ``error`` with the true count of resident tokens, or what a callback raised."""
        typed = error
        if isinstance(error, DecodeAbortedError):
            typed = self._abort.stopped(resident())
        elif isinstance(error, ContextOverflowError):
            typed = ContextOverflowError(
                stage="engine",
                resident_tokens=resident(),
                additional_tokens=error.additional_tokens,
                n_ctx=self._n_ctx,
            )
        raise typed from (error.__cause__ if typed is error else error)


_UNCHANGING = (TransientEngineError, OutOfMemoryError)
"""Errors that leave all as it was, unless pieces of a call were kept before them."""


def _note_kept(error: BaseException, *, kept: bool) -> None:
    if kept and isinstance(error, _UNCHANGING):
        error.state_after = "partial"


@cache
def _all_wanted(n: int) -> npt.NDArray[np.bool_]:
    """Return that each of ``n`` tokens gets a row."""
    wanted = np.ones(n, dtype=np.bool_)
    wanted.flags.writeable = False
    return wanted


class _Pieces:
    """The rows and embeddings of several engine calls, put together."""

    def __init__(self, outputs: Outputs, embeddings: Embeddings, n_rows: int) -> None:
        self._outputs = outputs
        self._embeddings = embeddings
        self._n_rows = n_rows
        self._n_made = 0
        self._several = False
        self.rows: FloatArray | None = None
        self.vectors: list[FloatArray] = []

    def gather(self) -> None:
        """There will be several calls: copy what each of them makes."""
        self._several = True
        if self._n_rows:
            self.rows = self._outputs.allocate(self._n_rows)

    def take(self, n_rows: int) -> None:
        """Copy what a call made, if it is one of several."""
        if not self._several:
            return
        if self.rows is not None:
            self._outputs.copy_engine_rows(self.rows[self._n_made : self._n_made + n_rows])
            self._n_made += n_rows
        if self._embeddings.are_of_tokens:
            self.vectors.append(self._embeddings.copy())
