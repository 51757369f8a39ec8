"""How many threads to use when nobody says."""

from __future__ import annotations

import math
import os
from pathlib import Path

MAX_THREADS = 512
_CPUS = Path("/sys/devices/system/cpu")
_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_OLD_QUOTA, _OLD_PERIOD = (
    Path("/sys/fs/cgroup/cpu") / name for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")
)


def default_threads() -> tuple[int, int]:
    """Return the thread counts for single tokens and for batches.

    Single tokens wait for memory, so a second thread on a core only gets in the way: one a
    physical core. Batches compute, and use every CPU that this process may run on.
    """
    cpus = _allowed_cpus()
    limit = min(_quota(), MAX_THREADS)
    return max(1, min(_physical_cores(cpus), limit)), max(1, min(len(cpus), limit))


def _allowed_cpus() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def _physical_cores(cpus: set[int]) -> int:
    """Count the cores behind ``cpus``: CPUs with the same list of siblings share one."""
    return len({_siblings(cpu) for cpu in cpus})


def _siblings(cpu: int) -> str:
    try:
        return (_CPUS / f"cpu{cpu}/topology/thread_siblings_list").read_text()
    except OSError:
        return str(cpu)


def _quota() -> int:
    """Return how many CPUs' time the control group grants, rounded up."""
    try:
        allowed, period = _QUOTA.read_text().split()
    except (OSError, ValueError):
        try:
            allowed, period = _OLD_QUOTA.read_text(), _OLD_PERIOD.read_text()
        except OSError:  # no control groups
            return MAX_THREADS
    try:
        found = math.ceil(int(allowed) / int(period))
    except (ValueError, ZeroDivisionError):  # "max"
        return MAX_THREADS
    return found if found > 0 else MAX_THREADS  # -1: no limit
