"""Wrong lives: opening, closing, loading, planning, and what is said of oneself."""

from __future__ import annotations

import secrets
import threading
import time
from pathlib import Path
from typing import Any

import attrs

from conformance.full_toy import DECLARED, FullContext, FullModel
from conformance.mutants import around, breaks, instead, nothing, told
from infercore.api import CoreBackend
from infercore.engine.context import GuardedContext
from infercore.engine.model import GuardedModel
from infercore.engine.native import Native
from infercore.errors import (
    InvalidInputError,
    ModelNotFoundError,
    SessionClosedError,
    UnsupportedFeatureError,
)
from infercore.sampling.portable import PortableSampler
from infercore.session.session import CoreSession
from infercore.testing.reference_base import Base
from infercore.values.info import MemoryPlan


def second_close_crashes(m: Any, cls: Any) -> None:
    def close(old: Any, self: Any) -> None:
        if self.closed:
            raise RuntimeError("double free")
        old(self)

    around(m, cls, "close", close)


@breaks("LIFE-1")
def a_second_close_of_a_model_crashes(m: Any) -> None:
    second_close_crashes(m, GuardedModel)


@breaks("LIFE-2")
def a_second_close_of_a_context_crashes(m: Any) -> None:
    second_close_crashes(m, GuardedContext)


@breaks("LIFE-3")
def a_second_close_of_a_session_crashes(m: Any) -> None:
    second_close_crashes(m, CoreSession)


@breaks("LIFE-4")
def a_closed_context_answers(m: Any) -> None:
    instead(m, GuardedContext, "n_past", SessionClosedError, lambda _: 0)


@breaks("LIFE-5")
def a_closed_session_cannot_be_explained(m: Any) -> None:
    def explain(old: Any, self: Any) -> Any:
        if self.closed:
            raise SessionClosedError("closed")
        return old(self)

    around(m, CoreSession, "explain_context", explain)


@breaks("LIFE-6")
def closing_a_model_frees_the_weights_in_use(m: Any) -> None:
    freed: list[int] = []

    def decode(old: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        if freed:
            raise OSError("the weights are gone")
        old(self, *args, **kwargs)

    around(m, GuardedModel, "close", lambda old, self: (freed.append(1), old(self))[1])
    around(m, FullContext, "decode", decode)


@breaks("LIFE-7")
def a_closed_model_still_opens(m: Any) -> None:
    nothing(m, GuardedModel, "_check_open")


@breaks("LIFE-8")
def a_closed_sampler_samples(m: Any) -> None:
    nothing(m, PortableSampler, "_check_open")


@breaks("LIFE-9")
def a_with_block_leaves_the_context_open(m: Any) -> None:
    nothing(m, GuardedContext, "__exit__")


@breaks("LIFE-10")
def contexts_share_their_cells(m: Any) -> None:
    shared: list[Any] = [[], []]

    def init(old: Any, self: Any, config: Any) -> None:
        old(self, config)
        self.cells = shared

    around(m, FullContext, "__init__", init)


@breaks("LIFE-11")
def the_digest_changes_with_each_load(m: Any) -> None:
    def init(old: Any, self: Any, path: str) -> None:
        old(self, path)
        self.digest = secrets.token_hex(32)

    around(m, FullModel, "__init__", init)


@breaks("LIFE-12")
def a_state_is_skipped(m: Any) -> None:
    old = CoreSession.state
    hidden = {"READY": "PREFIXED"}
    state = property(lambda self: hidden.get(old.fget(self), old.fget(self)))
    m.setattr(CoreSession, "state", state)


@breaks("LIFE-13")
def an_error_of_order_is_of_another_type(m: Any) -> None:
    def suffix(old: Any, self: Any, given: Any) -> Any:
        if self.state == "EMPTY":
            raise ValueError("no prefix")
        return old(self, given)

    around(m, CoreSession, "prefill_suffix", suffix)


@breaks("LIFE-15")
def a_fresh_session_has_less_room(m: Any) -> None:
    told(m, CoreSession, "explain_context", available_tokens=lambda r: r.available_tokens - 1)


# -- memory ----------------------------------------------------------------------------------------


@breaks("MEM-1", "MEM-5")
def closing_keeps_the_memory(m: Any) -> None:
    leaked: list[bytearray] = []
    around(
        m, FullContext, "close", lambda old, self: (leaked.append(bytearray(2**23)), old(self))[1]
    )


@breaks("MEM-1")
def closed_contexts_keep_what_they_had(m: Any) -> None:
    def close(old: Any, self: Any) -> None:
        self.kept = bytearray(2**23)
        old(self)

    around(m, FullContext, "close", close)


@breaks("MEM-2")
def a_plan_whose_peak_is_too_low(m: Any) -> None:
    told(m, FullModel, "plan_memory", peak_bytes=lambda plan: plan.kv_bytes - 1)


@breaks("MEM-3")
def a_plan_of_one_size_for_all(m: Any) -> None:
    plan = MemoryPlan(weights_bytes=1, kv_bytes=9, compute_bytes=1, peak_bytes=11, n_ctx=512)
    nothing(m, FullModel, "plan_memory", plan)


@breaks("MEM-3")
def values_are_not_planned(m: Any) -> None:
    told(m, FullModel, "plan_memory", kv_bytes=lambda plan: plan.kv_bytes // 2)


@breaks("MEM-6")
def more_is_taken_than_planned(m: Any) -> None:
    def init(old: Any, self: Any, config: Any) -> None:
        old(self, config)
        self.waste = bytearray(b"x") * 2**27

    around(m, FullContext, "__init__", init)
    told(m, FullModel, "plan_memory", kv_bytes=lambda _: 2**20, kv_bytes_by_kind=lambda _: {})


@breaks("MEM-4")
def a_context_that_gave_up_half_its_window(m: Any) -> None:
    def init(old: Any, self: Any, inner: Any, **facts: Any) -> None:
        old(self, inner, **{**facts, "attempts": ("n_ctx=64", "n_ctx=32")})

    around(m, GuardedContext, "__init__", init)


# -- threads ---------------------------------------------------------------------------------------


@breaks("THREAD-1")
def rows_lie_in_a_buffer_of_the_model(m: Any) -> None:
    shared: list[Any] = [None]

    def decode_batch(old: Any, self: Any, *args: Any) -> None:
        old(self, *args)
        if self.rows:
            shared[0] = self.rows[-1]
            time.sleep(0.001)

    around(m, FullContext, "decode_batch", decode_batch)
    m.setattr(FullContext, "logits", lambda *_: shared[0])


@breaks("THREAD-5")
def two_contexts_cannot_be_opened_at_once(m: Any) -> None:
    opening = threading.Lock()

    def init(old: Any, self: Any, config: Any) -> None:
        if not opening.acquire(blocking=False):
            raise OSError("the allocator is in use")
        try:
            time.sleep(0.01)
            old(self, config)
        finally:
            opening.release()

    around(m, FullContext, "__init__", init)


@breaks("THREAD-2", "THREAD-3")
def a_second_thread_walks_in(m: Any) -> None:
    from infercore.engine.gate import Gate

    def enter(_: Any, self: Any) -> None:
        if self.closed:
            raise SessionClosedError("closed")

    around(m, Gate, "__enter__", enter)
    nothing(m, Gate, "__exit__")


@breaks("THREAD-3")
def a_report_waits_its_turn(m: Any) -> None:
    def explain(old: Any, self: Any) -> Any:
        with self.gate:
            return old(self)

    around(m, CoreSession, "explain_context", explain)


@breaks("THREAD-8")
def threads_are_told_and_not_set(m: Any) -> None:
    def set_threads(_: Any, self: Any, n: int, n_batch: int) -> None:
        self.effective.update(n_threads=n, n_threads_batch=n_batch)

    around(m, FullContext, "set_threads", set_threads)


@breaks("THREAD-8", base="reference")
def one_thread_computes_whatever_is_set(m: Any) -> None:
    from infercore.testing.products import Workers

    around(m, Workers, "__init__", lambda old, self, _: old(self, 1))


@breaks("THREAD-4")
def set_threads_is_ignored(m: Any) -> None:
    def init(old: Any, self: Any, config: Any) -> None:
        old(self, config)
        self.effective["n_threads"] = 4

    around(m, FullContext, "__init__", init)
    nothing(m, FullContext, "set_threads")


# -- what is said of oneself -----------------------------------------------------------------------


def declare(m: Any, **changes: Any) -> None:
    m.setattr(FullContext, "capabilities", attrs.evolve(DECLARED, **changes))


@breaks("CAP-1")
def a_model_that_promises_less_than_its_contexts(m: Any) -> None:
    less = attrs.evolve(DECLARED, lora=False)
    m.setattr(FullModel, "capabilities", property(lambda _: less))


@breaks("CAP-2")
def a_model_without_shape(m: Any) -> None:
    def init(old: Any, self: Any, path: str) -> None:
        old(self, path)
        self.info = attrs.evolve(self.info, n_embd=-1)

    around(m, FullModel, "__init__", init)


@breaks("CAP-3")
def a_digest_that_is_none(m: Any) -> None:
    def init(old: Any, self: Any, path: str) -> None:
        old(self, path)
        self.digest = "toy"

    around(m, FullModel, "__init__", init)


@breaks("CAP-4")
def a_backend_under_a_false_name(m: Any) -> None:
    def init(old: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        old(self, *args, **kwargs)
        self.backend = "someone else"

    around(m, GuardedModel, "__init__", init)


def effective(m: Any, **values: Any) -> None:
    def init(old: Any, self: Any, config: Any) -> None:
        old(self, config)
        self.effective.update(values)

    around(m, FullContext, "__init__", init)


@breaks("CAP-5", "BAD-8")
def a_batch_size_of_its_own(m: Any) -> None:
    effective(m, n_batch=512)


@breaks("CAP-5")
def the_cache_is_on_a_gpu_that_is_not_there(m: Any) -> None:
    effective(m, offload_kqv=True)


@breaks("CAP-6")
def a_setting_that_nobody_knows(m: Any) -> None:
    effective(m, flash_attn="perhaps")


@breaks("CAP-7")
def a_tolerance_that_forgives_everything(m: Any) -> None:
    m.setattr(FullContext, "tolerance", 0.5)


@breaks("CAP-8")
def a_cache_type_that_is_only_declared(m: Any) -> None:
    declare(m, kv_types=("f32", "f16", "bf16"))


@breaks("CAP-20")
def a_cache_type_is_told_and_not_used(m: Any) -> None:
    m.setattr(FullContext, "kept", lambda _, row: row)


@breaks("CAP-9")
def flash_attention_that_is_only_declared(m: Any) -> None:
    declare(m, flash_attention=("off", "on"))


@breaks("CAP-19", base="reference")
def flash_attention_computes_something_else(m: Any) -> None:
    from infercore.testing.attention import OnlineSoftmax

    def add(old: Any, self: Any, scores: Any, values: Any) -> None:
        self._total[:] *= 0.5  # what came before is not scaled as it should be
        old(self, scores, values)

    around(m, OnlineSoftmax, "add", add)


@breaks("CAP-21", base="reference")
def a_default_arithmetic_of_another_model(m: Any) -> None:
    from infercore.testing import reference_model

    def resolve(old: Any, config: Any, shape: Any) -> Any:
        found = old(config, shape)
        factor = 1.1 if config.precision is None else 1.0
        return {**found, "rope_freq_base": factor * found["rope_freq_base"]}

    around(m, reference_model.reference_settings, "resolve", resolve)


@breaks("CAP-10")
def a_pooling_that_is_only_declared(m: Any) -> None:
    declare(m, pooling=("none", "mean", "cls", "last", "rank"))


@breaks("CAP-18")
def what_is_declared_is_refused(m: Any) -> None:
    def refuse(_: Any, *__: Any) -> None:
        raise UnsupportedFeatureError(feature="seq_divide")

    around(m, GuardedContext, "seq_divide", refuse)


@breaks("CAP-18", "KV-14", "KV-16", "THREAD-4", "STATE-1", "DEC-4", "DEC-11")
def what_is_not_declared_is_done(m: Any) -> None:
    declare(m, kv_shift=False, kv_divide=False, live_threads=False, sequence_state=False,
            logits_all=False, multi_sequence=False)  # fmt: skip
    nothing(m, Native, "need")


@breaks("KV-7", "KV-14", "KV-16", "STATE-7", "STATE-1", "CAP-18")
def a_refusal_of_the_wrong_type(m: Any) -> None:
    declare(m, kv_shift=False, kv_divide=False, kv_copy="none", state=False, sequence_state=False)

    def need(_: Any, self: Any, feature: str, *, declared: bool, hint: str = "") -> None:
        if not declared:
            raise ValueError(f"no {feature}")

    around(m, Native, "need", need)


@breaks("KV-14", "STATE-1")
def a_refusal_that_clears(m: Any) -> None:
    declare(m, kv_shift=False, sequence_state=False)

    def refuse(old: Any, self: Any, *args: Any) -> Any:
        try:
            return old(self, *args)
        except UnsupportedFeatureError:
            self.clear()
            raise

    around(m, GuardedContext, "seq_shift", refuse)
    around(m, GuardedContext, "save_sequence", refuse)


# -- what is refused -------------------------------------------------------------------------------


@breaks("BAD-6")
def unknown_fields_are_ignored(m: Any) -> None:
    from infercore.values.config import ContextConfig

    names = {field.name for field in attrs.fields(ContextConfig)}

    def new_context(old: Any, self: Any, config: Any = None, **fields: Any) -> Any:
        return old(self, config, **{k: v for k, v in fields.items() if k in names})

    around(m, GuardedModel, "new_context", new_context)


@breaks("BAD-7", "BAD-9")
def bad_options_become_defaults(m: Any) -> None:
    old = GuardedModel.new_context
    instead(m, GuardedModel, "new_context", InvalidInputError, old)


@breaks("BAD-8")
def an_option_is_dropped(m: Any) -> None:
    def new_context(old: Any, self: Any, config: Any) -> Any:
        return old(self, attrs.evolve(config, rope_freq_base=None, swa_full=None))

    around(m, FullModel, "new_context", new_context)


@breaks("BAD-14")
def an_unknown_cache_type_becomes_a_known_one(m: Any) -> None:
    def new_context(old: Any, self: Any, config: Any) -> Any:
        return old(self, attrs.evolve(config, type_k=None))

    around(m, FullModel, "new_context", new_context)


@breaks("BAD-15")
def a_config_is_not_looked_at(m: Any) -> None:
    around(m, GuardedModel, "new_context", lambda old, self, config=None, **f: old(self, **f))


@breaks("BAD-10")
def a_missing_file_is_an_error_of_python(m: Any) -> None:
    def load(old: Any, self: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return old(self, path, *args, **kwargs)
        except ModelNotFoundError as error:
            raise FileNotFoundError(path) from error

    around(m, CoreBackend, "load_model", load)


@breaks("BAD-11")
def a_damaged_model_is_loaded(m: Any) -> None:
    def init(old: Any, self: Any, path: str) -> None:
        try:
            old(self, path)
        except ValueError:
            Path(path).write_text("{}")
            old(self, path)

    around(m, FullModel, "__init__", init)


@breaks("LIFE-18", base="reference")
def contexts_of_as_many_threads_share_them(m: Any) -> None:
    """Whoever closes ends the threads that others compute with."""
    shared: dict[tuple[int, ...], Any] = {}

    def threads(old: Any, self: Any, *numbers: int) -> None:
        old(self, *numbers)
        self.workers = shared.setdefault(numbers, self.workers)

    around(m, Base, "set_threads", threads)
