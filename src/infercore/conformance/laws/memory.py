"""What is taken, given back, and planned."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import os
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from infercore.conformance.expect import LawError, equal, that
from infercore.conformance.law import law
from infercore.engine import blob
from infercore.errors import (
    InvalidInputError,
    ModelNotFoundError,
    OutOfMemoryError,
    SnapshotError,
    UnsupportedFeatureError,
)
from infercore.testing import engine_of
from infercore.values.config import AdapterSpec
from infercore.values.memory import free_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from infercore import Capabilities, Context
    from infercore.conformance.rig import Rig

STATM = Path("/proc/self/statm")
MIB = 2**20
LEAK_MIB = 24
ROUNDS = 12


def own_mib() -> float:
    """Memory in use by this process alone, not shared, nor of files: those pages come and go.

    What was freed is given back first, where the C library can: it keeps it, so that what is
    taken next would not show, and gives it back in the midst of a law.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc
    if trim is not None:
        trim(0)
    _, resident, of_files, *_ = STATM.read_text(encoding="ascii").split()
    return (int(resident) - int(of_files)) * os.sysconf("SC_PAGE_SIZE") / MIB


def _taken_mib(work: Callable[[], object], times: int) -> list[float]:
    """What each of ``times`` rounds of ``work`` took more than it gave back, from low to high.

    What the process did before may be given back in the midst of it, so that one round alone
    tells little.
    """
    seen = [own_mib()]
    for _ in range(times):
        work()
        seen.append(own_mib())
    return sorted(after - before for before, after in pairwise(seen))


def _left_mib(work: Callable[[], object]) -> float:
    """What `ROUNDS` rounds leave behind, told from all but the two that stand out.

    Three go before them.
    """
    for _ in range(3):
        work()
    usual = _taken_mib(work, ROUNDS)[1:-1]
    return ROUNDS * sum(usual) / len(usual)


def need_proc(rig: Rig) -> None:
    if not STATM.exists():
        rig.leave("this platform does not tell resident memory through /proc")


def _use(rig: Rig, **fields: Any) -> Context:
    context: Context = rig.model.new_context(**rig.fields(**fields))
    context.decode(rig.tokens(8))
    return context


@law("MEM-1", tier="process")
def check_closed_contexts_give_memory_back(rig: Rig) -> None:
    """Opening, filling and closing contexts again and again takes no more memory in the end.

    Though they are still referenced, and rows of them were read, and though each computes
    something else, where it can.
    """
    need_proc(rig)
    closed = []
    bases = (10_000.5 + i for i in itertools.count())

    def use() -> None:
        with _use(rig, n_ctx=1024) as context:
            if context.n_outputs:
                context.logits()
            closed.append((context, engine_of(context)))

    def use_another() -> None:
        with contextlib.suppress(UnsupportedFeatureError):
            _use(rig, n_ctx=64, rope_freq_base=next(bases)).close()

    for each in (use, use_another):
        left = _left_mib(each)
        that(left < LEAK_MIB, f"{ROUNDS} contexts that were closed left {left:.0f} MiB")


N_USES, USED_MIB = 100, 3
_N_FORGED = 400
_N_OPENED = 25


def _check_contexts_with_adapters(rig: Rig, kinds: Any) -> None:
    """Contexts with adapters leave nothing, whether they were opened or refused."""
    missing = (AdapterSpec(path="/no/such/adapter"),)

    def refuse() -> None:
        with contextlib.suppress(ModelNotFoundError, UnsupportedFeatureError):
            rig.model.new_context(**rig.fields(n_ctx=2048, adapters=missing)).close()

    _check_uses(refuse, _N_OPENED, "contexts that were refused")
    if kinds.lora and rig.adapter is not None:
        fields = rig.fields(adapters=rig.adapters_at(1.0))
        opened = lambda: rig.model.new_context(**fields).close()  # noqa: E731
        _check_uses(opened, 3 * _N_OPENED, "contexts with adapters")


def _check_refusals(rig: Rig) -> None:
    """Saved state that is refused takes no memory, wherever its number is wrong."""
    context = rig.context()
    context.decode(rig.tokens(100))
    header, payload, row = blob.unpack(context.save_sequence(0))
    refused: list[bytes] = []

    for at in range(min(_N_FORGED, len(payload))):
        forged = b"".join((payload[:at], b"9", payload[at + 1 :]))
        refused.append(blob.pack(dict(header), forged, bytes(row)))
        with contextlib.suppress(SnapshotError):
            context.load_sequence(0, refused[-1])
            refused.pop()
        context.clear()
    kinds = refused[:: max(1, len(refused) // 10)]

    def refuse() -> None:
        for data in kinds:
            with contextlib.suppress(SnapshotError):
                context.load_sequence(0, data)

    _check_uses(refuse, N_USES, "refusals of saved state")


@law("MEM-10", tier="process", since="1.2")
def check_use_leaves_nothing(rig: Rig) -> None:
    """What one context does again and again, and samplers, take no more memory in the end."""
    need_proc(rig)
    context, tokens = rig.context(), rig.tokens(40)
    kinds = context.capabilities

    def use() -> None:
        context.decode(tokens, logits="all" if kinds.logits_all else "last")
        for kind in ("portable", *(("native",) if kinds.native_sampler else ())):
            sampler = rig.model.new_sampler(implementation=kind, top_k=5)
            sampler.sample(context)
            sampler.close()
        _save_and_cut(context, kinds)
        context.decode_one(tokens[0])
        context.clear()

    def change() -> None:
        for scale in (1.0, 0.0):
            context.set_adapters(rig.adapters_at(scale))

    texts = (f"{i} {rig.story}" * 12 for i in itertools.count())
    _check_uses(use, N_USES, "calls")
    if kinds.embeddings:
        rows, many = rig.context(embeddings=True, pooling_type="none"), rig.tokens(120)
        _check_uses(lambda: (rows.eval(many, 0), rows.embeddings()), N_USES, "rows")
    if kinds.multi_sequence and kinds.kv_copy != "none":
        _check_copies(rig.two(), tokens, kinds)
    _check_uses(lambda: rig.tokenizer.encode(next(texts)), 60, "texts of thousands of tokens")
    if kinds.lora and rig.adapter is not None:
        _check_uses(change, N_USES, "changes of adapters")
    if kinds.sequence_state:
        _check_refusals(rig)
    _check_contexts_with_adapters(rig, kinds)


@law("MEM-11", tier="process", model="any", since="1.2")
def check_closed_models_give_memory_back(rig: Rig) -> None:
    """Models opened, used and closed again and again take no more memory in the end.

    Nor is their file mapped any more, though they are still referenced.
    """
    need_proc(rig)
    _ = rig.model
    closed = []

    def use() -> None:
        with rig.open_model() as model, model.new_context(n_ctx=32) as context:
            context.synchronize()
        closed.append(model)

    for _ in range(3):
        use()
    mapped = _mapped(rig.path)
    before, n = own_mib(), 6
    for _ in range(n):
        use()
    left, size = own_mib() - before, rig.model.info.size_bytes / MIB
    most = max(16.0, n * size / 2)  # what stays of a closed object does not grow with its weights
    that(left <= most, f"{n} closed models of {size:.1f} MiB left {left:.1f} MiB")
    now = _mapped(rig.path)
    that(now <= mapped, f"the closed models' file is mapped {now} times, {mapped} times before")


def _mapped(path: str | None) -> int:
    text = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    return text.count(os.path.realpath(path)) if path is not None else 0


def _save_and_cut(context: Context, kinds: Capabilities) -> None:
    if kinds.sequence_state:
        context.load_sequence(0, context.save_sequence(0))
    if kinds.state:
        context.load_state(context.save_state())
    if kinds.kv_remove == "any":
        context.seq_remove(0, 3, 20)
    if kinds.kv_shift:
        context.seq_shift(0, 30, -1, 2)


def _check_copies(two: Context, tokens: list[int], kinds: Capabilities) -> None:
    def use() -> None:
        two.decode(tokens, logits="none")
        two.seq_copy(0, 1)
        two.decode_one(tokens[0], seq_id=1)
        if kinds.kv_remove == "any":
            two.seq_remove(0, 3, 20)
        two.clear()

    _check_uses(use, N_USES * 3 // 5, "copies of a sequence")


def _check_uses(use: Callable[[], object], n: int, what: str) -> None:
    for _ in range(n // 4):
        use()
    before = own_mib()
    for _ in range(n):
        use()
    left = own_mib() - before
    that(left < USED_MIB, f"{n} rounds of {what} left {left:.1f} MiB")


@law("MEM-2", needs="plan_memory")
def check_plan_adds_up(rig: Rig) -> None:
    """A memory plan has positive sizes that add up, and its peak is at least their sum.

    A pool that opens has a plan too, of as many cells.
    """
    plan = rig.model.plan_memory(**rig.fields())
    that(plan.weights_bytes >= 0 and plan.kv_bytes > 0, f"sizes of {plan}")
    total = plan.weights_bytes + plan.kv_bytes + plan.compute_bytes
    equal(plan.total_bytes, total, "total_bytes")
    that(plan.peak_bytes >= total, f"a peak of {plan.peak_bytes} below the total of {total}")
    equal(plan.n_ctx, rig.n_ctx, "n_ctx")
    if plan.kv_bytes_by_kind:
        equal(sum(plan.kv_bytes_by_kind.values()), plan.kv_bytes, "kv_bytes by kind of layer")
        kinds, info = set(plan.kv_bytes_by_kind), rig.model.info
        alone = kinds == {"recurrent"}
        states = (alone, "recurrent" in kinds and not alone)
        if plan.kv_bytes_by_kind.get("recurrent") != 0:  # so little that an engine rounds it away
            told = (info.is_recurrent, info.is_hybrid)
            equal(told, states, f"recurrent, hybrid, of {sorted(kinds)}")
        if alone:  # beside keys and values a saved sequence holds more
            _check_states_in_plans(rig, plan.kv_bytes_by_kind["recurrent"])
        _check_windows_in_plans(rig)
    if rig.model.capabilities.logits != "none":  # then there are pools
        with contextlib.suppress(UnsupportedFeatureError):
            pool = rig.pool(n_parallel=_PLANNED_PLACES)
            told = pool.effective
            pool.close()
            if told["n_parallel"] == _PLANNED_PLACES:
                planned = _planned_pool(rig)
                equal(planned.n_ctx, told["n_cells"], "the cells of a planned pool")


_PLANNED_PLACES = 4


def _planned_pool(rig: Rig) -> Any:
    try:
        return rig.model.plan_memory(n_parallel=_PLANNED_PLACES, **rig.fields())
    except UnsupportedFeatureError as error:
        raise LawError(f"a pool opens, and its plan is refused: {error}") from error


@law("MEM-3", needs="plan_memory")
def check_plan_grows_with_the_window(rig: Rig) -> None:
    """Twice the window plans about twice the cache and the same weights.

    The state of recurrent layers has one size for all windows. Of each type of keys and values as
    much is planned as a full window's takes when it is saved.
    """
    small = rig.model.plan_memory(**rig.fields(n_ctx=512))
    large = rig.model.plan_memory(**rig.fields(n_ctx=1024))
    equal(large.weights_bytes, small.weights_bytes, "weights_bytes")
    sizes = [p.kv_bytes - p.kv_bytes_by_kind.get("recurrent", 0) for p in (small, large)]
    if not any(sizes):
        equal(large.kv_bytes, small.kv_bytes, "the size of a recurrent state")
        return
    ratio = sizes[1] / sizes[0]
    that(1.5 <= ratio <= 2.5, f"twice the window takes {ratio:.2f} times the cache")  # noqa: PLR2004
    with contextlib.suppress(UnsupportedFeatureError, InvalidInputError):  # too long a window
        steps = [rig.model.plan_memory(**rig.fields(n_ctx=n)).compute_bytes for n in (2048, 8192)]
        fits = steps[1] <= 6 * steps[0] + 64 * MIB
        that(fits, f"four times the window takes {steps[1]} bytes a step, not {steps[0]}")
    _check_huge_windows(rig)
    _check_saved_windows(rig, small.kv_bytes_by_kind)


def _check_saved_windows(rig: Rig, kinds: Mapping[str, int]) -> None:
    can = rig.context().capabilities
    if not can.sequence_state or rig.model.info.sliding_window or "recurrent" in kinds:
        return
    for kind in can.kv_types:
        fields = rig.fields(n_ctx=512, type_k=kind, type_v=kind)
        with contextlib.suppress(UnsupportedFeatureError, InvalidInputError):
            planned = rig.model.plan_memory(**fields).kv_bytes
            with rig.model.new_context(**fields) as context:
                n = context.n_ctx - 8
                context.decode(rig.story_at(0, n), logits="none")
                saved = len(blob.unpack(context.save_sequence(0))[1]) * context.n_ctx // n
            fits = 0.9 * saved < planned < 1.5 * saved  # some plan whole blocks
            that(fits, f"a window of {kind} takes {saved} bytes as it is saved, {planned} planned")


def _check_huge_windows(rig: Rig) -> None:
    """What huge windows take is planned at once, too; one beyond all memory is not opened."""
    try:
        small, plan = (rig.model.plan_memory(**rig.fields(n_ctx=n)) for n in (2**14, 2**16))
    except (UnsupportedFeatureError, InvalidInputError):
        return
    grown, before = _growing(plan) - _growing(small), plan
    n_more = plan.n_ctx - small.n_ctx
    for n in (3 * 2**18, 2**20 + 300):
        try:
            huge = rig.model.plan_memory(**rig.fields(n_ctx=n))
        except (UnsupportedFeatureError, InvalidInputError):
            return
        equal((huge.n_ctx, huge.weights_bytes), (n, plan.weights_bytes), "window and weights")
        equal(sum(huge.kv_bytes_by_kind.values()) or huge.kv_bytes, huge.kv_bytes, "kv_bytes")
        that(huge.peak_bytes >= huge.total_bytes, f"a peak of {huge.peak_bytes} below the total")
        more = _growing(huge) - _growing(plan)
        ratio = more * n_more / (grown * (n - plan.n_ctx)) if grown else 1.0
        that(0.98 < ratio < 1.02, f"{n} tokens take {ratio:.3f} times the cache of their share")  # noqa: PLR2004
        steps = huge.compute_bytes / before.compute_bytes if before is not plan else 1.0
        that(0.99 < steps < 1.5, f"{n} tokens take {steps:.2f} times the step of fewer")  # noqa: PLR2004
        before = huge
    _check_step(rig, small, plan)
    n_ctx = min(2**30, 4 * free_bytes() * n_more // max(1, grown))
    if _growing(before) * n_ctx / before.n_ctx > 3 * free_bytes():
        refused = (UnsupportedFeatureError, InvalidInputError, OutOfMemoryError)
        with contextlib.suppress(*refused):
            rig.context(n_ctx=n_ctx).close()


def _check_step(rig: Rig, small: Any, plan: Any) -> None:
    """Where a step grows with the window in three plans, it goes on to grow in longer ones."""
    try:
        large, huge = (rig.model.plan_memory(**rig.fields(n_ctx=n)) for n in (2**18, 2**21))
    except (UnsupportedFeatureError, InvalidInputError):
        return
    if large.compute_bytes >= _half_grown(small, plan, large.n_ctx):
        least, found = _half_grown(plan, large, huge.n_ctx), huge.compute_bytes
        that(
            found >= least, f"a step in {huge.n_ctx} tokens of {found} bytes, at least {least:.0f}"
        )


def _half_grown(small: Any, large: Any, n_ctx: int) -> float:
    """Return the bytes of a step in ``n_ctx`` tokens if it grows half as fast as in two plans."""
    slope = (large.compute_bytes - small.compute_bytes) / (large.n_ctx - small.n_ctx)
    return float(large.compute_bytes + slope * (n_ctx - large.n_ctx) / 2)


def _growing(plan: Any) -> int:
    kinds = plan.kv_bytes_by_kind
    return int(plan.kv_bytes - kinds.get("recurrent", 0) - kinds.get("sliding", 0))


_MANY, _TOKEN_BYTES = 32, 16
_ROUNDED = 8192
"""Bytes by which a plan may be less: what describes a state, and what an engine's log rounds."""


def _check_states_in_plans(rig: Rig, planned: int) -> None:
    """The state of each sequence is planned as large as it is when it is saved, of any length."""
    context = rig.context()
    if context.capabilities.sequence_state:
        context.decode(rig.tokens(3))
        size = len(blob.unpack(context.save_sequence(0))[1])  # and what describes it
        that(size - _ROUNDED <= planned <= 2 * size, f"{planned} bytes planned, {size} are saved")
        n = min(100, rig.n_ctx - 4)
        context.decode(rig.tokens(n))
        longer = len(blob.unpack(context.save_sequence(0))[1])
        grown = abs(longer - size) < n * _TOKEN_BYTES  # a token of keys and values takes more
        that(grown, f"a state that sums up a text takes {size} bytes, and {longer} of {n} more")
    if context.capabilities.multi_sequence:
        one, many = (rig.model.plan_memory(**rig.fields(n_seq_max=n)).kv_bytes for n in (1, _MANY))
        what = f"{many} bytes planned for the states of {_MANY} sequences, {one} for that of one"
        that(_MANY / 4 * one <= many <= 2 * _MANY * (one + _ROUNDED), what)


def _check_windows_in_plans(rig: Rig) -> None:
    """Layers with a window take less where they keep no more than that, and the others the same."""
    window, n_ctx = rig.model.info.sliding_window, rig.model.info.n_ctx_train
    if not window or window >= n_ctx:
        return
    fields = {"n_ctx": n_ctx, "n_batch": 64, "n_ubatch": 32}
    with contextlib.suppress(UnsupportedFeatureError):
        whole, narrow = (
            rig.model.plan_memory(**rig.fields(**fields, swa_full=whole)).kv_bytes_by_kind
            for whole in (True, False)
        )
        equal(narrow.get("full"), whole.get("full"), "bytes of layers without a window")
        less = narrow.get("sliding", 0) < whole.get("sliding", 0)
        that(less, f"bytes of layers with a window: {dict(narrow)}, whole {dict(whole)}")


@law("MEM-4")
def check_no_attempt_beyond_the_first(rig: Rig) -> None:
    """A context that fits at once gives nothing up: its window is the one requested."""
    context = rig.context(n_ctx=64, on_oom="shrink")
    that(len(context.attempts) <= 1, f"{len(context.attempts)} attempts")
    equal(context.n_ctx, 64, "n_ctx")


@law("MEM-5", tier="process")
def check_dropped_contexts_are_freed(rig: Rig) -> None:
    """Contexts that are dropped without close are freed with their last reference."""
    need_proc(rig)

    def use_and_drop() -> None:
        _use(rig, n_ctx=1024)

    left = _left_mib(use_and_drop)
    that(left < LEAK_MIB, f"{ROUNDS} contexts that were dropped left {left:.0f} MiB")


@law("MEM-6", tier="process", needs="plan_memory", since="1.1")
def check_no_more_than_planned(rig: Rig) -> None:
    """A context takes no more memory than was planned for its cache and its computation.

    While it is opened with a long window, and at most while large steps fill one.
    """
    need_proc(rig)
    fields = {"n_ctx": _longest(rig, _large(rig)), "n_batch": 32, "n_ubatch": 32}
    plan = rig.model.plan_memory(**rig.fields(**fields))
    _use(rig, n_ctx=64).close()
    # All stay open: a backend may keep what a closed one had for the next.
    taken = median(_taken_mib(lambda: rig.opened(_use(rig, **fields)), 3))
    planned = (plan.kv_bytes + plan.compute_bytes) / MIB
    that(taken <= 1.25 * planned + LEAK_MIB, f"{taken:.0f} MiB taken, {planned:.0f} planned")
    rig.tidy()
    _check_peak(rig)


def _check_peak(rig: Rig) -> None:
    n_ctx = _longest(rig, min(2048, rig.model.info.n_ctx_train or rig.n_ctx))
    n_step = min(1024, n_ctx)
    tokens = rig.story_at(0, n_ctx)
    settings = {"off", "on"} & set(rig.context().capabilities.flash_attention)
    for flash in sorted(settings) or [""]:
        asked: dict[str, Any] = {"n_ctx": n_ctx, "n_batch": n_step, "n_ubatch": n_step}
        asked |= {"flash_attn": flash} if flash else {}
        fields = rig.fields(**asked)

        def fill(n: int, fields: dict[str, Any] = fields) -> None:
            with rig.model.new_context(**fields) as context:
                context.decode(tokens[:n])

        fill(8)
        plan, taken = rig.model.plan_memory(**fields), _peak_mib(partial(fill, n_ctx))
        planned = (plan.kv_bytes + plan.compute_bytes) / MIB
        allowed = 1.25 * planned + LEAK_MIB
        that(taken <= allowed, f"{asked}: {taken:.0f} MiB at most, {planned:.0f} planned")


def _peak_mib(work: Callable[[], object]) -> float:
    """How much more than before is in use at most during ``work``; 0 where none tells."""
    own_mib()
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak begins anew
    except OSError:
        return 0.0
    before = _status_mib("VmRSS")
    work()
    return _status_mib("VmHWM") - before


def _status_mib(name: str) -> float:
    lines = Path("/proc/self/status").read_text(encoding="utf-8", errors="replace").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:"))


def _longest(rig: Rig, n_ctx: int) -> int:
    """Return the longest window up to ``n_ctx`` that is not refused: some engines have a bound."""
    while n_ctx > rig.n_ctx:
        try:
            rig.context(n_ctx=n_ctx).close()
        except (UnsupportedFeatureError, InvalidInputError):  # noqa: PERF203  (each on its own)
            n_ctx //= 2
        else:
            return n_ctx
    return rig.n_ctx


def _large(rig: Rig) -> int:
    """Return a window whose cache takes a good deal more than what cannot be measured."""
    small = rig.model.plan_memory(**rig.fields(n_ctx=256))
    return int(min(2**16, 256 * max(1, 64 * MIB // max(1, small.kv_bytes))))
