"""Whether an allocation may have failed inside the engine, which does not always say so.

oneDNN writes code for new shapes at run time. Where there is no address space for its pages
(256 KiB each), a step ends without an error and its values are wrong (OpenVINO 2026.4.1). Only a
limit of address space (``RLIMIT_AS``, ``RLIMIT_DATA``) makes so small a mapping fail; a container
that has no memory left is killed. So under a limit values count only if the most that this process
ever mapped was well below it. Where it mapped more before there was a limit, nobody knows the most
since then: after each step a larger rest must be left.
"""

from __future__ import annotations

import re
from pathlib import Path

from infercore import SessionFatalError

try:
    import resource
except ImportError:  # no such limits on this system
    resource = None  # type: ignore[assignment]

_ROOM = 4 * 2**20
_REST = 16 * 2**20
_STATUS = Path("/proc/self/status")
_FIELD = re.compile(r"Vm(Peak|Size|Data):\s+(\d+) kB")
_lost: list[str] = []
"""Why no value that is computed in this process counts any more: what failed may be kept."""


def check_values() -> None:
    """Raise `SessionFatalError` if what was just computed may be wrong, and ever after."""
    if resource is None:
        return
    limits = [resource.getrlimit(each)[0] for each in (resource.RLIMIT_AS, resource.RLIMIT_DATA)]
    if not _lost and limits != [resource.RLIM_INFINITY] * 2:
        _look(*limits)
    if _lost:
        raise SessionFatalError(_lost[0], cause=MemoryError(_lost[0]))


def _look(all_pages: int, data: int) -> None:
    try:
        found = {name: int(n) * 1024 for name, n in _FIELD.findall(_STATUS.read_text())}
        peak, now, now_data = found["Peak"], found["Size"], found["Data"]
    except (OSError, KeyError):  # another system: nobody can tell
        return
    others = now - now_data  # files, mostly, which stay mapped
    for limit, most, mapped in ((all_pages, peak, now), (data, peak - others, now_data)):
        needed = most + _ROOM if most <= limit else mapped + _REST
        if limit != resource.RLIM_INFINITY and needed > limit:
            _lost.append(
                f"this process has mapped {mapped} bytes of {limit} (ulimit -v or -d): "
                "OpenVINO may have computed wrong values without an error, so none is given any "
                "more; raise the limit and start the program again"
            )
            return
