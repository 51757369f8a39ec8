"""Computing under a limit of address space, where the engine does not say each failure.

oneDNN writes machine code for new shapes at run time, in mappings of 256 KiB. Where one of them is
refused the step ends without an error, and its values are wrong (OpenVINO 2026.4.1). Only a limit
of the process (``ulimit -v``, ``ulimit -d``) makes so small a mapping fail. So under a limit a
call begins only where there is room for much machine code. Afterwards there must be room for some,
now and when the call had mapped the most; else what failed may be kept for other shapes, too.
"""

from __future__ import annotations

import contextlib
import mmap
import re
from pathlib import Path
from typing import TYPE_CHECKING

from infercore import OutOfMemoryError, SessionFatalError
from infercore_openvino.engine import memory_errors

try:
    import resource
except ImportError:  # no such limits on this system
    resource = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from collections.abc import Iterator

_BEFORE = 32 * 2**20
_AFTER = 2**20
_LIMIT = "the limit of address space (ulimit -v or -d)"
_STATUS = Path("/proc/self/status")
_PEAK = re.compile(r"VmPeak:\s+(\d+) kB")
_lost: list[str] = []
"""Why no value that is computed in this process counts any more: what failed may be kept."""


@contextlib.contextmanager
def computing(work: str) -> Iterator[None]:
    """Let the engine compute: a failed allocation is an `OutOfMemoryError`.

    Raises `SessionFatalError` where an allocation may have failed without an error.
    """
    most = before(work)
    try:
        with memory_errors(work):
            yield
    finally:
        after(most)


@contextlib.contextmanager
def compiling(work: str) -> Iterator[None]:
    """Let the engine compile: too little room is an `OutOfMemoryError`, and nothing is kept."""
    most = before(work)
    with memory_errors(work):
        yield
    if _was_short(most):
        raise OutOfMemoryError(f"no memory for {work}: {_LIMIT} left OpenVINO no room")


def before(work: str) -> int:
    """Look for room for ``work``; return the most that was ever mapped, 0 where nothing limits it.

    Raises `OutOfMemoryError` where there is too little: nothing was done then.
    """
    if resource is None:
        return 0
    if _lost:
        raise _fatal()
    if _limit() == resource.RLIM_INFINITY == resource.getrlimit(resource.RLIMIT_DATA)[0]:
        return 0
    if not _has_room(_BEFORE):
        raise OutOfMemoryError(
            f"no memory for {work}: less than {_BEFORE >> 20} MiB of {_LIMIT} are left, and "
            "OpenVINO computes wrong values where it lacks any"
        )
    return _most_mapped() or 1


def after(most: int) -> None:
    """Raise `SessionFatalError` where an allocation may have failed since `before`."""
    if _was_short(most):
        _lost.append(
            f"{_LIMIT} left OpenVINO no room in a compute step: it may have computed wrong values "
            "without an error, so none is given any more; raise the limit and start the program "
            "again"
        )
        raise _fatal()


def _was_short(most: int) -> bool:
    """Whether an allocation may have failed since `before`, which returned ``most``."""
    if not most:
        return False
    now = _most_mapped()
    was_near = now > most and now + _AFTER > _limit() != resource.RLIM_INFINITY
    return was_near or not _has_room(_AFTER)


def _limit() -> int:
    return resource.getrlimit(resource.RLIMIT_AS)[0]


def _has_room(n_bytes: int) -> bool:
    try:
        mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except OSError:
        return False
    return True


def _most_mapped() -> int:
    """Return the most bytes that this process ever mapped; 0 where nobody can tell."""
    try:
        found = _PEAK.search(_STATUS.read_text())
    except OSError:
        return 0
    return 0 if found is None else int(found[1]) * 1024


def _fatal() -> SessionFatalError:
    return SessionFatalError(_lost[0], cause=MemoryError(_lost[0]))
