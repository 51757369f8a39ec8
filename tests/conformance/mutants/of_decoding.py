"""Wrong logits, embeddings and cancels."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np

from conformance import full_toy
from conformance.full_toy import FullContext
from conformance.mutants import around, breaks, instead, nothing, result, told
from infercore.engine.appending import Appending
from infercore.engine.context import GuardedContext
from infercore.engine.room import Room
from infercore.errors import (
    ContextOverflowError,
    DecodeAbortedError,
    InferCoreError,
    InvalidInputError,
    InvalidTokenError,
    OutputNotAvailableError,
    UnsupportedFeatureError,
)
from infercore.testing.reference_context import ReferenceContext
from infercore.testing.toy import toy_logits
from infercore.values.info import PerfCounters


@breaks("DEC-1", "DEC-3", "CAP-14", "THREAD-2")
def only_the_last_call_counts(m: Any) -> None:
    def decode_batch(old: Any, self: Any, tokens: Any, *rest: Any) -> None:
        old(self, tokens, *rest)
        held = np.asarray(tokens).tolist()
        self.rows = [toy_logits(held) for _ in self.rows]

    around(m, FullContext, "decode_batch", decode_batch)


@breaks("DEC-2")
def no_tokens_clear_the_context(m: Any) -> None:
    def decode(old: Any, self: Any, tokens: Any, **kwargs: Any) -> None:
        if len(tokens) == 0:
            self.clear()
        old(self, tokens, **kwargs)

    around(m, GuardedContext, "decode", decode)


@breaks("DEC-3")
def one_token_is_appended_twice(m: Any) -> None:
    def decode_one(old: Any, self: Any, token: int, **kwargs: Any) -> None:
        old(self, token, **kwargs)
        old(self, token, **kwargs)

    around(m, GuardedContext, "decode_one", decode_one)


@breaks("DEC-4", "DEC-17")
def rows_come_in_reverse(m: Any) -> None:
    def decode_batch(old: Any, self: Any, *args: Any) -> None:
        old(self, *args)
        self.rows.reverse()

    around(m, FullContext, "decode_batch", decode_batch)


@breaks("KV-4", "SAMP-13")
def old_logits_are_kept(m: Any) -> None:
    def logits(old: Any, self: Any, i: int = -1) -> Any:
        try:
            self.kept = old(self, i).copy()
        except OutputNotAvailableError:
            if not hasattr(self, "kept"):
                self.kept = toy_logits([1])
        return self.kept

    around(m, GuardedContext, "logits", logits)


@breaks("DEC-5", "DEC-15", "KV-12", "CANCEL-2")
def logits_of_nothing_are_zeros(m: Any) -> None:
    zeros = np.zeros(full_toy.N_VOCAB, np.float32)
    instead(m, GuardedContext, "logits", OutputNotAvailableError, lambda _: zeros)


@breaks("DEC-6", "DEC-12", "DEC-16")
def a_missing_row_is_the_last_one(m: Any) -> None:
    old = GuardedContext.logits
    instead(m, GuardedContext, "logits", OutputNotAvailableError, old)


@breaks("DEC-7")
def logits_are_of_another_type(m: Any) -> None:
    result(m, GuardedContext, "logits", lambda row: row.astype(np.float64))


@breaks("DEC-8", "KV-3", "LIFE-11")
def every_row_is_a_little_off(m: Any) -> None:
    noise = np.random.default_rng(1)

    def noisy(*args: Any) -> Any:
        return toy_logits(*args) + noise.random(dtype=np.float32) * 1e-3

    m.setattr(full_toy, "toy_logits", noisy)


@breaks("DEC-9", "DEC-10", "BAD-3")
def eval_only_appends(m: Any) -> None:
    def evaluate(_: Any, self: Any, tokens: Any, n_past: Any, *, seq_id: int = 0) -> None:
        del n_past
        self.decode(tokens, seq_id=seq_id)

    around(m, GuardedContext, "eval", evaluate)


@breaks("DEC-12")
def all_rows_are_made(m: Any) -> None:
    def decode_batch(old: Any, self: Any, tokens: Any, positions: Any, ids: Any, _: Any) -> None:
        old(self, tokens, positions, ids, [True] * len(tokens))

    around(m, FullContext, "decode_batch", decode_batch)


@breaks("DEC-11", "DEC-14", "KV-7", "KV-20")
def sequences_are_one(m: Any) -> None:
    def append(old: Any, self: Any, token: int, position: int, ids: Any, *, want: bool) -> None:
        del ids
        old(self, token, position, tuple(range(len(self.cells))), want=want)

    around(m, FullContext, "append", append)


@breaks("DEC-13")
def a_token_goes_to_one_sequence_only(m: Any) -> None:
    def append(old: Any, self: Any, token: int, position: int, ids: Any, *, want: bool) -> None:
        old(self, token, position, ids[:1], want=want)

    around(m, FullContext, "append", append)


@breaks("DEC-16")
def negative_rows_count_from_the_start(m: Any) -> None:
    def logits(old: Any, self: Any, i: int = -1) -> Any:
        return old(self, -i - 1 if i < 0 else i)

    around(m, GuardedContext, "logits", logits)


@breaks("DEC-17")
def only_the_last_chunk_has_rows(m: Any) -> None:
    around(m, GuardedContext, "logits_all", lambda old, self: old(self)[-self.n_batch :])


@breaks("DEC-18")
def the_first_row_stays(m: Any) -> None:
    def logits(old: Any, self: Any, i: int = -1) -> Any:
        self.__dict__.setdefault("first", old(self, i).copy())
        return self.first

    around(m, GuardedContext, "logits", logits)


@breaks("DEC-19")
def the_serial_never_changes(m: Any) -> None:
    m.setattr(GuardedContext, "output_serial", property(lambda _: 1))


@breaks("DEC-20", base="reference")
def logits_are_of_another_model(m: Any) -> None:
    result(m, ReferenceContext, "logits", lambda row: row[::-1])


@breaks("DEC-21")
def only_the_last_token_counts(m: Any) -> None:
    def last(tokens: Any, positions: Any = None) -> Any:
        return toy_logits(tokens[-1:], None if positions is None else positions[-1:])

    m.setattr(full_toy, "toy_logits", last)


# -- embeddings ------------------------------------------------------------------------------------


@breaks("EMB-1")
def the_last_vector_is_lost(m: Any) -> None:
    result(m, FullContext, "embeddings", lambda rows: rows[:-1])


@breaks("EMB-2")
def the_mean_is_a_sum(m: Any) -> None:
    def embedding(old: Any, self: Any, seq_id: int) -> Any:
        return old(self, seq_id) * len(self.vectors)

    around(m, FullContext, "embedding", embedding)


@breaks("EMB-3")
def the_last_vector_is_the_first(m: Any) -> None:
    around(m, FullContext, "embedding", lambda _, self, __: self.vectors[0])


@breaks("EMB-4")
def pooling_over_several_steps(m: Any) -> None:
    nothing(m, Appending, "_whole_calls", value=False)


@breaks("EMB-5", "EMB-6", "EMB-8")
def vectors_that_were_not_made(m: Any) -> None:
    wrong = (InvalidInputError, OutputNotAvailableError)
    for method in ("embedding", "embeddings"):
        instead(m, GuardedContext, method, wrong, lambda _: np.zeros(8, np.float32))


@breaks("EMB-7")
def only_the_last_chunk_has_vectors(m: Any) -> None:
    around(m, GuardedContext, "embeddings", lambda old, self: old(self)[-self.n_batch :])


@breaks("EMB-8")
def embeddings_are_never_switched(m: Any) -> None:
    nothing(m, GuardedContext, "set_embeddings")


@breaks("EMB-1", "EMB-9")
def every_text_has_one_vector(m: Any) -> None:
    m.setattr(full_toy, "hidden", lambda *_: np.ones(8, np.float32))


@breaks("EMB-10")
def vectors_keep_their_length(m: Any) -> None:
    m.setattr("infercore.embedding._unit", lambda vectors: vectors)


@breaks("EMB-10")
def vectors_come_in_another_order(m: Any) -> None:
    m.setattr("infercore.embedding._unit", lambda vectors: -np.sort(-vectors / 3**0.5, axis=0))


# -- cancelling ------------------------------------------------------------------------------------


@breaks("CANCEL-1", "CANCEL-2", "CANCEL-3", "CANCEL-4")
def the_callback_is_never_asked(m: Any) -> None:
    nothing(m, GuardedContext, "set_abort_callback")


@breaks("CANCEL-1")
def an_abort_tells_a_false_count(m: Any) -> None:
    def decode(old: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            old(self, *args, **kwargs)
        except DecodeAbortedError as error:
            error.resident_tokens += 1
            raise

    around(m, GuardedContext, "decode", decode)


@breaks("CANCEL-1")
def an_abort_loses_what_was_evaluated(m: Any) -> None:
    def decode(old: Any, self: Any, tokens: Any, *, seq_id: int, logits: str) -> None:
        try:
            old(self, tokens, seq_id=seq_id, logits=logits)
        except DecodeAbortedError:
            self.cells[seq_id] = []
            raise

    around(m, FullContext, "decode", decode)


@breaks("CANCEL-3")
def a_callback_is_asked_for_ever(m: Any) -> None:
    def keep(old: Any, self: Any, callback: Any) -> None:
        if callback is not None:
            old(self, callback)

    around(m, GuardedContext, "set_abort_callback", keep)


@breaks("CANCEL-4")
def what_a_callback_raises_is_swallowed(m: Any) -> None:
    def quiet(callback: Any) -> Any:
        def ask() -> bool:
            try:
                return bool(callback())
            except ZeroDivisionError:
                return True

        return None if callback is None else ask

    around(m, GuardedContext, "set_abort_callback", lambda old, self, f: old(self, quiet(f)))


@breaks("CANCEL-4")
def a_callback_that_raised_is_asked_again(m: Any) -> None:
    def patient(callback: Any) -> Any:
        raised: list[Exception] = []

        def ask() -> bool:
            try:
                return bool(callback())
            except ZeroDivisionError as error:
                raised.append(error)
                if len(raised) > 1:
                    raise
                return False

        return None if callback is None else ask

    around(m, GuardedContext, "set_abort_callback", lambda old, self, f: old(self, patient(f)))


@breaks("CANCEL-5")
def an_abort_waits_for_the_next_call(m: Any) -> None:
    around(m, GuardedContext, "abort", lambda old, self: (old(self), self._inner.abort())[0])


@breaks("CANCEL-6")
def an_abort_is_not_heard(m: Any) -> None:
    nothing(m, GuardedContext, "abort")


@breaks("CANCEL-10")
def what_is_no_callback_is_ignored(m: Any) -> None:
    instead(m, GuardedContext, "set_abort_callback", InvalidInputError, lambda _: None)


# -- input and window ------------------------------------------------------------------------------


@breaks("BAD-1")
def an_unknown_token_becomes_another(m: Any) -> None:
    def decode_one(old: Any, self: Any, token: Any, **kwargs: Any) -> None:
        try:
            old(self, token, **kwargs)
        except InvalidTokenError:
            old(self, 0, **kwargs)

    around(m, GuardedContext, "decode_one", decode_one)


@breaks("BAD-1", "BAD-13")
def an_error_of_no_type(m: Any) -> None:
    def decode(old: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            old(self, *args, **kwargs)
        except InvalidInputError as error:
            raise KeyError(str(error)) from error

    around(m, GuardedContext, "decode", decode)


@breaks("BAD-13")
def an_error_that_says_nothing(m: Any) -> None:
    def decode(old: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            old(self, *args, **kwargs)
        except InferCoreError as error:
            error.args = ("bad",)
            raise

    around(m, GuardedContext, "decode", decode)


@breaks("BAD-4")
def an_unknown_mode_is_the_usual_one(m: Any) -> None:
    def decode(old: Any, self: Any, tokens: Any, *, seq_id: int = 0, logits: Any = "last") -> None:
        old(self, tokens, seq_id=seq_id, logits=logits if logits in ("all", "none") else "last")

    around(m, GuardedContext, "decode", decode)


@breaks("BAD-5")
def what_is_no_list_is_empty(m: Any) -> None:
    def decode(old: Any, self: Any, tokens: Any, **kwargs: Any) -> None:
        old(self, tokens if isinstance(tokens, list) else [], **kwargs)

    around(m, GuardedContext, "decode", decode)


@breaks("OVER-1", "OVER-3", "OVER-12")
def an_overflow_leaves_a_part(m: Any) -> None:
    def decode(old: Any, self: Any, tokens: Any, *, seq_id: int = 0, **kwargs: Any) -> None:
        try:
            old(self, tokens, seq_id=seq_id, **kwargs)
        except ContextOverflowError:
            old(self, tokens[: self.n_free(seq_id)], seq_id=seq_id, **kwargs)
            raise

    around(m, GuardedContext, "decode", decode)


@breaks("OVER-2")
def the_last_place_stays_empty(m: Any) -> None:
    def decode_one(old: Any, self: Any, token: int, *, seq_id: int = 0) -> None:
        if self.n_free(seq_id) <= 1:
            raise ContextOverflowError(
                stage="decode", resident_tokens=1, additional_tokens=1, n_ctx=1
            )
        old(self, token, seq_id=seq_id)

    around(m, GuardedContext, "decode_one", decode_one)


@breaks("OVER-3")
def the_window_is_padded(m: Any) -> None:
    from infercore.engine import window

    old = window.window_of
    m.setattr(window, "window_of", lambda n_ctx, effective: old(-(-n_ctx // 32) * 32, effective))


@breaks("OVER-4")
def eval_drops_before_it_looks(m: Any) -> None:
    def evaluate(old: Any, self: Any, tokens: Any, n_past: Any, *, seq_id: int = 0) -> None:
        self.seq_remove(seq_id, n_past, -1)
        old(self, tokens, n_past, seq_id=seq_id)

    around(m, GuardedContext, "eval", evaluate)


@breaks("OVER-5")
def a_batch_runs_over_the_window(m: Any) -> None:
    nothing(m, Room, "check_each")


# -- counters and controls -------------------------------------------------------------------------


@breaks("CAP-11", "CAP-12")
def counters_count_too_much(m: Any) -> None:
    told(m, GuardedContext, "perf", prefill_tokens=lambda c: c.prefill_tokens + 1)


@breaks("CAP-13")
def counters_are_made_up(m: Any) -> None:
    instead(m, GuardedContext, "perf", UnsupportedFeatureError, lambda _: PerfCounters())


@breaks("CAP-14")
def a_warm_up_clears(m: Any) -> None:
    around(m, FullContext, "warmup", lambda _, self: self.clear())


@breaks("STATE-26", base="reference")
def a_state_is_said_to_be_small(m: Any) -> None:
    m.setattr(ReferenceContext, "sequence_size", lambda *_: 8, raising=False)


@breaks("CAP-15")
def causal_attention_cannot_be_set(m: Any) -> None:
    def refuse(_: Any, *__: Any) -> None:
        raise UnsupportedFeatureError(feature="causal attention")

    around(m, GuardedContext, "set_causal_attention", refuse)


@breaks("CAP-17")
def waiting_clears(m: Any) -> None:
    around(m, GuardedContext, "synchronize", lambda _, self: self.clear())


@breaks("REUSE-7")
def evaluation_is_not_counted_by_sessions(m: Any) -> None:
    from infercore.session.session import CoreSession

    def more(status: Any) -> Any:
        return attrs.evolve(status, prefilled_tokens=0, reused_tokens=status.prefix_tokens)

    result(m, CoreSession, "ensure_prefix", more)
