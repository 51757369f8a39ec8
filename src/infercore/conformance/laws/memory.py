"""What is taken, given back, and planned."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infercore.conformance.expect import equal, that
from infercore.conformance.law import law

if TYPE_CHECKING:
    from infercore.conformance.rig import Rig

STATM = Path("/proc/self/statm")
MIB = 2**20
LEAK_MIB = 24
ROUNDS = 12


def _resident_bytes() -> int:
    gc.collect()
    return int(STATM.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _round(rig: Rig, **fields: Any) -> None:
    context = rig.model.new_context(**rig.fields(**fields))
    context.decode(rig.tokens(8))
    context.close()


@law("MEM-1", tier="process")
def check_closed_contexts_give_memory_back(rig: Rig) -> None:
    """Opening, filling and closing contexts again and again takes no more memory in the end."""
    if not STATM.exists():
        rig.leave("this platform does not tell resident memory through /proc")
    for _ in range(3):
        _round(rig, n_ctx=1024)
    before = _resident_bytes()
    for _ in range(ROUNDS):
        _round(rig, n_ctx=1024)
    grown = (_resident_bytes() - before) / MIB
    that(grown < LEAK_MIB, f"{ROUNDS} contexts that were closed left {grown:.0f} MiB")


@law("MEM-2", needs="plan_memory")
def check_plan_adds_up(rig: Rig) -> None:
    """A memory plan is of positive sizes that add up, and its peak is no less than their sum."""
    plan = rig.model.plan_memory(**rig.fields())
    that(plan.weights_bytes >= 0 and plan.kv_bytes > 0, f"sizes of {plan}")
    total = plan.weights_bytes + plan.kv_bytes + plan.compute_bytes
    equal(plan.total_bytes, total, "total_bytes")
    that(plan.peak_bytes >= total, f"a peak of {plan.peak_bytes} below the total of {total}")
    equal(plan.n_ctx, rig.n_ctx, "n_ctx")
    if plan.kv_bytes_by_kind:
        equal(sum(plan.kv_bytes_by_kind.values()), plan.kv_bytes, "kv_bytes by kind of layer")


@law("MEM-3", needs="plan_memory")
def check_plan_grows_with_the_window(rig: Rig) -> None:
    """Twice the window is planned with about twice the cache, and the same weights.

    The state of recurrent layers has one size for all windows.
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


@law("MEM-4")
def check_no_attempt_beyond_the_first(rig: Rig) -> None:
    """A context that fits at once gave nothing up: its window is what was asked for."""
    context = rig.context(n_ctx=64, on_oom="shrink")
    that(len(context.attempts) <= 1, f"{len(context.attempts)} attempts")
    equal(context.n_ctx, 64, "n_ctx")


@law("MEM-5", tier="process")
def check_dropped_contexts_are_freed(rig: Rig) -> None:
    """Contexts that are dropped without close are freed with their last reference."""
    if not STATM.exists():
        rig.leave("this platform does not tell resident memory through /proc")
    for _ in range(3):
        rig.model.new_context(**rig.fields(n_ctx=1024)).decode(rig.tokens(8))
    before = _resident_bytes()
    for _ in range(ROUNDS):
        rig.model.new_context(**rig.fields(n_ctx=1024)).decode(rig.tokens(8))
    grown = (_resident_bytes() - before) / MIB
    that(grown < LEAK_MIB, f"{ROUNDS} contexts that were dropped left {grown:.0f} MiB")


@law("MEM-6", tier="process", needs="plan_memory", since="1.1")
def check_no_more_than_planned(rig: Rig) -> None:
    """A context takes no more memory than was planned for its cache and its computation."""
    if not STATM.exists():
        rig.leave("this platform does not tell resident memory through /proc")
    fields = rig.fields(n_ctx=_large(rig), n_batch=32, n_ubatch=32)
    plan = rig.model.plan_memory(**fields)
    _round(rig, n_ctx=64)
    before = _resident_bytes()
    context = rig.opened(rig.model.new_context(**fields))
    context.decode(rig.tokens(8))
    taken = (_resident_bytes() - before) / MIB
    planned = (plan.kv_bytes + plan.compute_bytes) / MIB
    that(taken <= 1.25 * planned + LEAK_MIB, f"{taken:.0f} MiB taken, {planned:.0f} planned")


def _large(rig: Rig) -> int:
    """Return a window whose cache takes a good deal more than what cannot be measured."""
    small = rig.model.plan_memory(**rig.fields(n_ctx=256))
    return int(min(2**16, 256 * max(1, 64 * MIB // max(1, small.kv_bytes))))
