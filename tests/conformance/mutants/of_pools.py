"""Wrong pools: sessions that mix, lose, leak, starve or do not end."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np

from conformance.mutants import around, breaks, nothing
from infercore.conformance import pooling
from infercore.errors import (
    InferCoreError,
    PoolFullError,
    SessionBusyError,
    SessionClosedError,
    SessionFatalError,
    UnsupportedFeatureError,
)
from infercore.session import cache_folder, stepping
from infercore.session.admission import Admission
from infercore.session.cache_folder import CacheFolder
from infercore.session.choosing import Choosing
from infercore.session.cost_model import CostModel
from infercore.session.endings import Endings
from infercore.session.generation import Generation
from infercore.session.jobs import Generating
from infercore.session.paged import PagedContext
from infercore.session.places import Places
from infercore.session.pool import SessionPool
from infercore.session.pool_stream import PoolStream
from infercore.session.prefixes import Prefixes
from infercore.session.recovery import Recovery
from infercore.session.scheduler import Scheduler
from infercore.session.sequence import Sequence
from infercore.session.session import CoreSession
from infercore.session.shared_engine import SharedEngine
from infercore.session.steady import Steady
from infercore.session.stepping import Stepping
from infercore.session.store import Store
from infercore.testing.reference_context import ReferenceContext


def wrong(*kills: str) -> Any:
    return breaks(*kills, base="reference")


@wrong("POOL-1", "POOL-9")
def a_row_of_another_is_sampled(m: Any) -> None:
    def choose(old: Any, self: Any, source: Any, row: int, *_: Any) -> Any:
        return old(self, source, min(row, 0))

    around(m, Generation, "choose", choose)


@wrong("POOL-2", "POOL-14")
def neighbours_draw_from_ones_numbers(m: Any) -> None:
    def step(old: Any, self: Any, job: Any, source: Any, row: int) -> None:
        if len(self._endings._roster.running) > 1 and row >= 0:
            job.generation._sampler.sample(source, row)
        old(self, job, source, row)

    around(m, Choosing, "_choose", step)


@wrong("POOL-3")
def one_session_a_call(m: Any) -> None:
    def init(old: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        old(self, *args, **kwargs)
        self.n_sequences = 1

    around(m, SharedEngine, "__init__", init)


@wrong("POOL-4")
def rows_differ_from_call_to_call(m: Any) -> None:
    noise = np.random.default_rng(0)

    def logits(old: Any, self: Any, i: int) -> Any:
        return old(self, i) + np.float32(noise.normal() * 1e-5)

    around(m, ReferenceContext, "logits", logits)


@wrong("POOL-5")
def what_neighbours_say_shows(m: Any) -> None:
    def decode(old: Any, self: Any, tokens: Any, positions: Any, seq_ids: Any, wanted: Any) -> None:
        old(self, tokens, positions, seq_ids, wanted)
        self._rows = self._rows + np.float32(1e-6) * np.float32(sum(tokens))

    around(m, ReferenceContext, "decode_batch", decode)


@wrong("POOL-6")
def batch_invariance_is_not_heeded(m: Any) -> None:
    def init(old: Any, self: Any, model: Any, config: Any, **kwargs: Any) -> None:
        old(self, model, attrs.evolve(config, batch_invariant=False, batching="always"), **kwargs)

    around(m, SessionPool, "__init__", init)


@wrong("POOL-7")
def a_token_is_lost_with_the_cells(m: Any) -> None:
    def preempt(old: Any, self: Any, job: Any) -> None:
        tokens = job.sequence.tokens
        tokens[-1] = tokens[0]
        old(self, job)

    around(m, Places, "preempt", preempt)


@wrong("POOL-8")
def a_number_is_drawn_for_nothing(m: Any) -> None:
    class Row:
        def logits(self, _: int) -> Any:
            return np.zeros(1024, np.float32)

    def preempt(old: Any, self: Any, job: Any) -> None:
        old(self, job)
        if isinstance(job, Generating):
            job.generation._sampler.sample(Row(), 0)

    around(m, Places, "preempt", preempt)


@wrong("POOL-10")
def constraints_are_forgotten(m: Any) -> None:
    def init(old: Any, self: Any, *args: Any, new_sampler: Any, **kwargs: Any) -> None:
        def free(config: Any) -> Any:
            return new_sampler(attrs.evolve(config, response_format=None))

        old(self, *args, new_sampler=free, **kwargs)

    around(m, SessionPool, "__init__", init)


@wrong("POOL-11", "POOL-12")
def a_fork_is_of_another_text(m: Any) -> None:
    def fork(old: Any, self: Any) -> Any:
        twin = old(self)
        twin.ensure_prefix("the")
        return twin

    around(m, CoreSession, "fork", fork)


@wrong("POOL-13")
def restored_logits_are_those_of_other_tokens(m: Any) -> None:
    def load(old: Any, self: Any, seq_id: int, data: bytes, **fields: Any) -> None:
        old(self, seq_id, data, **fields)
        if self.sequence.row is not None:
            self.sequence.set_row(np.roll(self.sequence.row, 1))

    around(m, PagedContext, "load_sequence", load)


@wrong("POOL-15")
def nothing_is_shared(m: Any) -> None:
    nothing(m, Prefixes, "source", (None, 0))


@wrong("POOL-16")
def what_is_on_its_way_is_not_waited_for(m: Any) -> None:
    nothing(m, Prefixes, "is_coming", False)


@wrong("POOL-17")
def the_warmest_goes_first(m: Any) -> None:
    around(m, Places, "idle", lambda old, self, *spared: old(self, *spared)[::-1])


@wrong("POOL-18")
def all_share_one_namespace(m: Any) -> None:
    around(m, Sequence, "__init__", lambda old, self, namespace="": old(self, ""))


@wrong("POOL-19", "POOL-20")
def nothing_comes_back(m: Any) -> None:
    nothing(m, Store, "find")


@wrong("POOL-21")
def damaged_files_are_taken(m: Any) -> None:
    whole: dict[str, bytes] = {}

    def put(old: Any, self: Any, key: Any, tokens: Any, payload: bytes) -> bool:
        whole[cache_folder.file_name(key, tokens)] = payload
        return bool(old(self, key, tokens, payload))

    around(m, CacheFolder, "put", put)
    around(m, CacheFolder, "load", lambda _, self, key, name: whole[name])
    m.setattr(cache_folder, "read_header", _header_unchecked)


def _header_unchecked(data: bytes, n_bytes: int) -> Any:
    """Take the ids as they are: they lie behind 84 bytes."""
    n_tokens = int.from_bytes(data[8:12], "little")
    start = 84 + 4 * n_tokens
    ids = np.frombuffer(data[84:start], "<u4").tolist()
    return cache_folder.Header(cache_folder.Key(data[20:52], data[52:84]), ids, start, n_bytes)


@wrong("POOL-22")
def cells_of_closed_sessions_are_kept(m: Any) -> None:
    nothing(m, Scheduler, "forget")


@wrong("POOL-23", "POOL-32")
def a_cancelled_stream_tells_no_end(m: Any) -> None:
    def finish(old: Any, self: Any, reason: str, **usage: Any) -> Any:
        chunk = old(self, reason, **usage)
        return attrs.evolve(chunk, finish_reason=None) if reason == "cancelled" else chunk

    around(m, Generation, "finish", finish)


@wrong("POOL-24")
def the_step_budget_is_not_kept(m: Any) -> None:
    m.setattr(Stepping, "_n_tokens", lambda self: int(self._engine.context.n_batch))
    m.setattr(CostModel, "prompt_tokens", lambda *_: 64)


def composed(m: Any, keep: Any) -> None:
    """Let a step be composed of those that ``keep(job, sequences)`` names."""
    old = stepping.compose

    def compose(sequences: Any, budget: Any, costs: Any) -> Any:
        chosen = [job for job in sequences if keep(job, sequences)]
        return old(chosen or list(sequences), budget, costs)

    m.setattr(stepping, "compose", compose)


@wrong("POOL-25")
def a_prompt_keeps_others_out(m: Any) -> None:
    composed(m, lambda job, _: job.is_prompt)


@wrong("POOL-26")
def a_prompt_has_few_turns(m: Any) -> None:
    m.setattr("infercore.conformance.laws.pool_steps.PATIENCE_S", 2.0)
    turns = iter(range(10**9))
    old = stepping.compose

    def compose(sequences: Any, budget: Any, costs: Any) -> Any:
        running = [job for job in sequences if not job.is_prompt]
        late = len(running) < len(sequences) and next(turns) % 60
        return old(running if late else sequences, budget, costs)

    m.setattr(stepping, "compose", compose)


@wrong("POOL-27")
def waiting_is_not_told(m: Any) -> None:
    def finish(old: Any, self: Any, reason: str, **usage: Any) -> Any:
        return old(self, reason, **{**usage, "waited_ms": 0.0})

    around(m, Generation, "finish", finish)


@wrong("POOL-28")
def a_full_queue_is_told_as_busy(m: Any) -> None:
    def enter(old: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            old(self, *args, **kwargs)
        except PoolFullError as error:
            raise SessionBusyError("full") from error

    around(m, Admission, "enter", enter)


def _cancel_alone(self: Any) -> None:
    for job in [*self.roster.running, *self.roster.waiting]:
        if job.cancelled:
            self.endings.cancel(job)


@wrong("POOL-29", "POOL-30")
def who_is_not_read_keeps_his_place(m: Any) -> None:
    m.setattr(pooling, "PATIENCE_S", 2.0)
    nothing(m, Scheduler, "_rest")
    m.setattr(Steady, "find", lambda *_: False)
    m.setattr(Scheduler, "_look_after", _cancel_alone)

    def compose(sequences: Any, budget: Any, costs: Any) -> Any:
        able = [job for job in sequences if not (isinstance(job, Generating) and job.is_ahead)]
        return old(able, budget, costs)

    old = stepping.compose
    m.setattr(stepping, "compose", compose)


@wrong("POOL-31")
def stats_wait_for_the_step(m: Any) -> None:
    m.setattr("infercore.conformance.laws.pool_steps.PATIENCE_S", 1.5)

    def stats(old: Any, self: Any) -> Any:
        self.owner.ask(lambda: None)
        return old(self)

    around(m, SessionPool, "stats", stats)


@wrong("POOL-33")
def a_cancelled_prefill_loses_all(m: Any) -> None:
    def cancel(old: Any, self: Any, job: Any) -> None:
        old(self, job)
        if not isinstance(job, Generating):
            job.sequence.truncate(0)

    around(m, Endings, "cancel", cancel)


@wrong("POOL-32")
def a_pool_does_not_hear_a_cancel(m: Any) -> None:
    nothing(m, PoolStream, "cancel")


@wrong("POOL-34")
def the_window_is_not_kept(m: Any) -> None:
    def init(old: Any, self: Any, *args: Any, window: int, **kwargs: Any) -> None:
        old(self, *args, window=window + 40, **kwargs)

    around(m, Generating, "__init__", init)


@wrong("POOL-35")
def one_that_fails_ends_all(m: Any) -> None:
    def end(old: Any, self: Any, job: Any, error: Any = None) -> None:
        old(self, job, error)
        if error is not None and not isinstance(error, (SessionClosedError, SessionFatalError)):
            for other in list(self._roster.running):
                old(self, other, error)

    around(m, Endings, "end", end)


@wrong("POOL-36")
def a_failing_step_ends_all(m: Any) -> None:
    def after(_: Any, self: Any, error: Any, jobs: Any) -> None:
        for job in jobs:
            self._endings.end(job, error)

    around(m, Recovery, "after", after)


@wrong("POOL-37")
def the_engine_is_not_opened_anew(m: Any) -> None:
    around(m, Recovery, "restart", lambda _, self, error, suspects: self._endings.fail(error))


@wrong("POOL-38")
def the_first_cause_is_forgotten(m: Any) -> None:
    numbers = iter(range(10**9))

    def refusal(old: Any, self: Any) -> InferCoreError:
        error = old(self)
        if not isinstance(error, SessionFatalError):
            return error
        return SessionFatalError("gone", cause=RuntimeError(f"gone {next(numbers)}"))

    around(m, Endings, "refusal", refusal)


@wrong("POOL-39")
def a_closed_pool_says_it_is_open(m: Any) -> None:
    m.setattr(SessionPool, "closed", property(lambda _: False))


@wrong("POOL-40")
def drain_does_not_wait(m: Any) -> None:
    m.setattr("infercore.conformance.laws.pool_ends.PATIENCE_S", 1.0)
    nothing(m, SessionPool, "drain", value=True)


@wrong("POOL-6")
def batch_invariance_is_refused_with_another_error(m: Any) -> None:
    def init(old: Any, self: Any, model: Any, config: Any, **kwargs: Any) -> None:
        old(self, model, config, **kwargs)
        if config.batch_invariant:
            self.close()
            try:
                raise UnsupportedFeatureError(feature="batch_invariant", backend="reference")
            except UnsupportedFeatureError as error:
                raise SessionBusyError("no") from error

    around(m, SessionPool, "__init__", init)
