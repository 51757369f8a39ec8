"""What this CPU cannot do with the engine, though the engine tries."""

from __future__ import annotations

import functools
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

from infercore import UnsupportedFeatureError
from infercore_openvino.engine import BACKEND

if TYPE_CHECKING:
    from infercore_openvino.settings import Settings

_CPU = Path("/proc/cpuinfo")
_UNIT = "amx_bf16"
_SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_OLD_QUOTA, _OLD_PERIOD = (
    Path("/sys/fs/cgroup/cpu") / name for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")
)


def check(settings: Settings) -> None:
    """Raise `UnsupportedFeatureError` for settings over which the engine ends the process.

    With a matrix unit (AMX) and one thread a stream, compiling for bfloat16 divides by zero.
    """
    n_threads = settings.properties.get("INFERENCE_NUM_THREADS")
    n_streams = settings.properties.get("NUM_STREAMS")
    if not divides_by_zero(settings.inference, n_threads, n_streams):
        return
    hint = "on this CPU the engine needs two threads a stream for it; give more, or f32"
    raise UnsupportedFeatureError(
        f"inference_precision='bf16' is not supported with one thread a stream; {hint}",
        feature="inference_precision",
        backend=BACKEND,
        hint=hint,
    )


def divides_by_zero(inference: str, n_threads: int | None, n_streams: int | None) -> bool:
    """Return whether compiling for such numbers would end the process.

    More threads than there are cores for the process are not made, whatever was asked.
    """
    if not _has_unit():
        return False
    n_made = min(n_threads or _n_cores(), _n_cores())
    per_stream = n_made // (n_streams or 1)
    return inference == "bf16" and per_stream <= 1


def granted_threads() -> int | None:
    """Return the threads that a container's quota of CPU time leaves, None where it limits nothing.

    The engine looks at the CPUs that the process may run on, one thread a core, and not at the
    quota: with more threads than that the system stops all of them for part of each period.
    """
    quota = _quota()
    return quota if quota is not None and quota < _n_cores() else None


def usable_cores() -> int:
    """Return the cores of this process, or the threads that a container's quota leaves."""
    return granted_threads() or _n_cores()


def _quota() -> int | None:
    try:
        allowed, period = _QUOTA.read_text().split()
    except (OSError, ValueError):
        try:
            allowed, period = _OLD_QUOTA.read_text(), _OLD_PERIOD.read_text()
        except OSError:
            return None
    try:
        found = math.ceil(int(allowed) / int(period))
    except (ValueError, ZeroDivisionError):  # "max"
        return None
    return found if found > 0 else None  # -1: no limit


def _n_cores() -> int:
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    return len({_siblings(cpu) for cpu in os.sched_getaffinity(0)})


def _siblings(cpu: int) -> str:
    try:
        return Path(_SIBLINGS.format(cpu)).read_text()
    except OSError:
        return str(cpu)


@functools.cache
def _has_unit() -> bool:
    try:
        return _UNIT in _CPU.read_text()
    except OSError:
        return False
