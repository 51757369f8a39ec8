"""How much memory this process may still take."""

from __future__ import annotations

import re
from pathlib import Path

from infercore.values import checks

UNKNOWN = 2**62
_RESERVE = 48 * 2**20
_CGROUP = Path("/sys/fs/cgroup")


def free_bytes(*, address_space: bool = True) -> int:
    """Return the memory that this process may still take, a very large number if unknown.

    With ``address_space=False`` the limits of what it maps (``RLIMIT_AS``, ``RLIMIT_DATA``) do not
    count: for what an engine takes from memory that it has already reserved.
    """
    if not isinstance(address_space, bool):
        raise checks.refuse("address_space", address_space, "True or False")
    free = min(_system_free(), _group_free())
    return min(free, _limits_free()) if address_space else free


def _limits_free() -> int:
    """Return what ``ulimit -v`` and ``-d`` leave, less what the engine takes beside its buffers.

    It ends the process where one of its small allocations fails, so these must not.
    """
    try:
        import resource  # noqa: PLC0415  (not on every system)

        found = Path("/proc/self/statm").read_text(encoding="ascii").split()
    except (ImportError, OSError):
        return UNKNOWN
    free, page = UNKNOWN, resource.getpagesize()
    for kind, n_pages in ((resource.RLIMIT_AS, found[0]), (resource.RLIMIT_DATA, found[5])):
        limit, _ = resource.getrlimit(kind)
        if limit != resource.RLIM_INFINITY:
            free = min(free, max(0, limit - int(n_pages) * page - _RESERVE))
    return free


def _system_free() -> int:
    try:
        found = re.search(r"MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text())
    except OSError:
        found = None
    return int(found[1]) * 1024 if found else UNKNOWN


def _group_free() -> int:
    try:
        limit = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text()) - _reclaimable_bytes()
    except (OSError, ValueError):  # no control groups, or "max": no limit
        return UNKNOWN
    return max(0, limit - used)


def _reclaimable_bytes() -> int:
    """Pages of files that nobody used of late: the system drops them when memory is wanted."""
    for line in (_CGROUP / "memory.stat").read_text().splitlines():
        name, _, value = line.partition(" ")
        if name == "inactive_file":
            return int(value)
    return 0
