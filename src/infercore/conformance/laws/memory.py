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
    """Twice the window is planned with about twice the cache, and the same weights."""
    small = rig.model.plan_memory(**rig.fields(n_ctx=512))
    large = rig.model.plan_memory(**rig.fields(n_ctx=1024))
    equal(large.weights_bytes, small.weights_bytes, "weights_bytes")
    ratio = large.kv_bytes / small.kv_bytes
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
