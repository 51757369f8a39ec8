"""How many threads to use when nobody says."""

from __future__ import annotations

import math
import os
from pathlib import Path

MAX_THREADS = 512
_CPUS = Path("/sys/devices/system/cpu")
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


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
        return math.ceil(int(allowed) / int(period))
    except (OSError, ValueError):  # no control groups, or "max": no limit
        return MAX_THREADS
