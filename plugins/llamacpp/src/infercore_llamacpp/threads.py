"""How many threads to use when nobody says, and the end of those that a caller leaves behind."""

from __future__ import annotations

import ctypes
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

MAX_THREADS = 512
_STACK = 8 * 2**20  # bytes, where no limit says so
_SOFT = 1  # omp_pause_soft
_GOMP = "libgomp.so.1"
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
    limit = _quota()
    return min(_physical_cores(cpus), limit), min(len(cpus), limit)


def stack_bytes(chosen: Mapping[str, Any]) -> int:
    """Return the addresses that the stacks of a context's threads take, but the caller's own."""
    try:
        import resource  # noqa: PLC0415  (of Unix alone)
    except ImportError:
        return 0
    each, _ = resource.getrlimit(resource.RLIMIT_STACK)
    n_threads = max(chosen["n_threads"], chosen["n_threads_batch"])
    return int(n_threads - 1) * (_STACK if each == resource.RLIM_INFINITY else int(each))


def ender(library: Any) -> Callable[[], object]:
    """Return what ends the worker threads that GNU's OpenMP keeps for the calling thread.

    Each thread that ever computed keeps such a team. Once all teams together have more threads
    than there are processors, libgomp lets them sleep at every barrier in place of spinning a
    moment (``gomp_throttled_spin_count_var``), and each step takes half as long again. The next
    call starts a team anew, in some 50 us. With another OpenMP, or none, there is nothing to end.

    ``library`` is llama.cpp's, through whose dependencies the functions are found. Source:
    https://gcc.gnu.org/onlinedocs/libgomp/omp_005fpause_005fresource_005fall.html
    """
    try:
        is_linked = hasattr(library, "GOMP_parallel")
        loaded = library if is_linked else ctypes.CDLL(_GOMP, os.RTLD_NOLOAD)
        pause = loaded.omp_pause_resource_all
    except (OSError, AttributeError):  # Windows has no such flag
        return int
    pause.argtypes, pause.restype = [ctypes.c_int], ctypes.c_int
    return lambda: pause(_SOFT)


def _allowed_cpus() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
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
    """Return how many CPUs' time the control group grants, rounded up, at most `MAX_THREADS`."""
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
    if found <= 0:  # -1: no limit
        return MAX_THREADS
    return min(found, MAX_THREADS)
