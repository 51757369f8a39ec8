"""Wrong backends over real attention, and wrong sessions: ends, beams, samples, further calls."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np

import infercore
from conformance.mutants import around, breaks, result
from infercore import FimTokens
from infercore.engine.model import GuardedModel
from infercore.engine.tokenizer import GuardedTokenizer
from infercore.errors import UnsupportedFeatureError
from infercore.session import branches, evicting
from infercore.session.async_context import AsyncContext
from infercore.session.beams import BeamSearch, Path
from infercore.session.session import CoreSession
from infercore.session.stream import DecodeStream
from infercore.testing.reference_context import ReferenceContext
from infercore.testing.reference_model import ReferenceModel
from infercore.values.session import Snapshot, StreamChunk

real = {"base": "reference"}


def otherwise(m: Any, **changes: Any) -> None:
    """Let decodes run as if these fields had been given where they are not the default."""

    def decode(old: Any, self: Any, config: Any = None, **fields: Any) -> Any:
        return old(self, config, **{**fields, **{k: v for k, v in changes.items() if k in fields}})

    around(m, CoreSession, "decode", decode)


# -- ends ------------------------------------------------------------------------------------------


def chunks_otherwise(m: Any, change: Any) -> None:
    result(m, DecodeStream, "__next__", change)


@breaks("STREAM-19", **real)
def what_ended_a_text_is_never_told(m: Any) -> None:
    chunks_otherwise(m, lambda chunk: attrs.evolve(chunk, stopped_by=None))


@breaks("STREAM-20", **real)
def the_stop_string_is_never_left(m: Any) -> None:
    otherwise(m, include_stop=False)


@breaks("STREAM-21", **real)
def ends_do_not_wait(m: Any) -> None:
    otherwise(m, min_tokens=0)


@breaks("SAMP-26", **real)
def runs_may_be_one_longer(m: Any) -> None:
    def decode(old: Any, self: Any, config: Any = None, **fields: Any) -> Any:
        n = fields.get("no_repeat_ngram_size")
        return old(self, config, **({**fields, "no_repeat_ngram_size": n + 1} if n else fields))

    around(m, CoreSession, "decode", decode)


@breaks("STREAM-22", **real)
def prompt_tokens_are_told_of_the_row_before(m: Any) -> None:
    def change(chunk: StreamChunk) -> StreamChunk:
        if not chunk.prompt_logprobs:
            return chunk
        first, *others = chunk.prompt_logprobs
        moved = [attrs.evolve(one, logprob=first.logprob) for one in others]
        return attrs.evolve(chunk, prompt_logprobs=(first, *moved))

    chunks_otherwise(m, change)


@breaks("CANCEL-13", **real)
def time_is_not_looked_at(m: Any) -> None:
    otherwise(m, timeout=None)


# -- many continuations ----------------------------------------------------------------------------


@breaks("STREAM-23", **real)
def beams_are_greedy_in_the_end(m: Any) -> None:
    def step(old: Any, self: Any, rows: Any) -> Any:
        return old(self, [np.where(row >= np.sort(row)[-2], row, -50.0) for row in rows])

    around(m, BeamSearch, "step", step)


@breaks("STREAM-24", **real)
def the_length_penalty_is_not_used(m: Any) -> None:
    around(m, Path, "score", lambda old, self, penalty: old(self, 1.0))


@breaks("STREAM-24", "STREAM-25", **real)
def what_was_tried_stays(m: Any) -> None:
    def put_back(old: Any, self: Any, tokens: Any) -> Any:
        return old(self, tokens[:-1])

    around(m, type_of_resident(), "put_back", put_back)


def type_of_resident() -> Any:
    from infercore.session.resident import Resident

    return Resident


@breaks("STREAM-25", **real)
def all_samples_have_one_seed(m: Any) -> None:
    def seeded(config: Any, n: int) -> Any:
        first = attrs.evolve(config.sampling, seed=config.sampling.seed or 0)
        return [attrs.evolve(config, sampling=first)] * n

    m.setattr("infercore.session.session.seeded", seeded, raising=False)
    m.setattr(branches, "seeded", seeded)


# -- what a session holds --------------------------------------------------------------------------


@breaks("REUSE-21", **real)
def one_more_is_evicted(m: Any) -> None:
    old = evicting._range
    m.setattr(evicting, "_range", lambda a, b, n: (old(a, b, n)[0], old(a, b, n)[1] + 1))


@breaks("REUSE-21", **real)
def what_stood_behind_is_not_turned(m: Any) -> None:
    def shift(old: Any, self: Any, seq_id: int, p0: int, p1: int, delta: int) -> Any:
        own = self.sequences[seq_id]
        old(self, seq_id, p0, p1, delta)
        turned = self.sequences[seq_id]
        kept = turned.tokens.copy()
        self.sequences[seq_id] = attrs.evolve(turned, k=own.k * np.float32(0.5), tokens=kept)

    around(m, ReferenceContext, "seq_shift", shift)


@breaks("STATE-27", **real)
def bytes_forget_what_is_told(m: Any) -> None:
    result(m, Snapshot, "to_bytes", lambda data: data)
    old = Snapshot.from_bytes
    m.setattr(
        Snapshot,
        "from_bytes",
        classmethod(lambda cls, data: attrs.evolve(old(data), resident_tokens=0)),
    )


@breaks("SEAM-12", **real)
def gaps_are_filled_without_marks(m: Any) -> None:
    def infill(old: Any, self: Any, prefix: str, suffix: str, **fields: Any) -> Any:
        try:
            return old(self, prefix, suffix, **fields)
        except UnsupportedFeatureError:
            self.ensure_prefix(prefix + suffix)
            return self.decode(**fields)

    around(m, CoreSession, "infill", infill)


@breaks("SEAM-12", **real)
def the_marks_around_a_gap_are_swapped(m: Any) -> None:
    marks = FimTokens(prefix=1000, suffix=1002, middle=1015)
    m.setattr(GuardedTokenizer, "fim", property(lambda self: marks))

    def infill(old: Any, self: Any, prefix: str, suffix: str, **fields: Any) -> Any:
        return old(self, suffix, prefix, **fields)

    around(m, CoreSession, "infill", infill)


# -- a context -------------------------------------------------------------------------------------


@breaks("CAP-31", **real)
def a_closed_model_gives_its_handle(m: Any) -> None:
    m.setattr(GuardedModel, "native_handle", property(lambda self: 1))


@breaks("CAP-32", **real)
def a_warm_up_takes_the_last_place(m: Any) -> None:
    def warmup(old: Any, self: Any) -> None:
        old(self)
        if self.n_past(0):
            self.decode(np.array([0], np.int32), seq_id=0, logits="last")

    around(m, ReferenceContext, "warmup", warmup)


@breaks("CAP-33", **real)
def a_fitted_window_is_any_window(m: Any) -> None:
    def new(old: Any, self: Any, config: Any = None, **fields: Any) -> Any:
        return old(
            self, config, **({**fields, "n_ctx": 64} if "fit" in fields.values() else fields)
        )

    around(m, GuardedModel, "new_context", new)


@breaks("CAP-34", **real)
def a_control_vector_is_a_layer_late(m: Any) -> None:
    def put(old: Any, self: Any, directions: Any) -> None:
        old(self, directions)
        if directions is not None:
            self._added = np.roll(directions, 1, axis=0)

    around(m, ReferenceContext, "set_control_vector", put)


@breaks("CAP-34", **real)
def single_tokens_go_without_the_control_vector(m: Any) -> None:
    def one(old: Any, self: Any, token: int, *, seq_id: int) -> None:
        kept, self._added = self._added, None
        old(self, token, seq_id=seq_id)
        self._added = kept

    around(m, ReferenceContext, "decode_one", one)


@breaks("CAP-44", **real)
def a_control_vector_stays_in_the_model(m: Any) -> None:
    def put(old: Any, self: Any, directions: Any) -> None:
        old(self, directions)
        self.owner.directions = self._added

    def new_context(old: Any, self: Any, config: Any) -> Any:
        context = old(self, config)
        context.owner, context._added = self, getattr(self, "directions", None)
        return context

    around(m, ReferenceContext, "set_control_vector", put)
    around(m, ReferenceModel, "new_context", new_context)


@breaks("CAP-44", **real)
def another_rope_stays_in_the_model(m: Any) -> None:
    def new_context(old: Any, self: Any, config: Any) -> Any:
        kept = getattr(self, "turned", None)
        if kept is not None and config.rope_freq_base is None:
            config = attrs.evolve(config, rope_freq_base=kept)
        self.turned = config.rope_freq_base
        return old(self, config)

    around(m, ReferenceModel, "new_context", new_context)


@breaks("CAP-34", **real)
def a_control_vector_is_never_taken_away(m: Any) -> None:
    def put(old: Any, self: Any, directions: Any) -> None:
        kept = self._added
        old(self, directions)
        if directions is None:
            self._added = kept

    around(m, ReferenceContext, "set_control_vector", put)


@breaks("THREAD-10", **real)
def awaited_rows_are_views(m: Any) -> None:
    async def logits(self: Any, i: int = -1) -> Any:
        return self._context.logits(i)

    m.setattr(AsyncContext, "logits", logits)

    def steady(old: Any, self: Any, *args: Any) -> None:  # rows that the engine writes over
        rows = self._rows
        old(self, *args)
        if rows.shape == self._rows.shape:
            rows[:] = self._rows
            self._rows = rows

    around(m, ReferenceContext, "decode_batch", steady)


@breaks("EMB-12", **real)
def any_model_ranks(m: Any) -> None:
    m.setattr(infercore, "rerank", lambda model, query, documents, **_: [(0, 1.0)])
