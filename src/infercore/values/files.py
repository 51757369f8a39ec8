"""Files that others wrote: opened without waiting, read up to a bound."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from typing import TYPE_CHECKING

from infercore.errors import OutOfMemoryError
from infercore.values import checks

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import BinaryIO

_SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_NO_WAITING = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Return the file at ``path``, opened to read bytes.

    Raises OSError, also for a pipe, a socket or a device: they may block, or never end, and
    `InvalidInputError` for what is no path.
    """
    file = open(checks.check_path("path", path), "rb", opener=_without_waiting)  # noqa: SIM115  (it is returned)
    try:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(f"{os.fspath(path)!r} is not a regular file")
    except BaseException:
        file.close()  # never the bare number: a signal may come when the file has closed it
        raise
    return file


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | _NO_WAITING)


def read_regular(path: str | os.PathLike[str], most_bytes: int) -> bytes:
    """Return what the file at ``path`` holds. Raises OSError, also beyond ``most_bytes``."""
    if not checks.is_integer(most_bytes) or most_bytes < 0:
        raise checks.refuse("most_bytes", most_bytes, "an integer of at least 0")
    with open_regular(path) as file:
        # Room for all that is asked for is made at once: ask for what is there, and one byte more.
        size = os.fstat(file.fileno()).st_size
        data = file.read(min(most_bytes, size) + 1)
    if len(data) > most_bytes:
        raise OSError(f"{os.fspath(path)!r} is larger than {most_bytes:,} bytes")
    if len(data) > size:
        raise OSError(f"{os.fspath(path)!r} grew while it was read")
    return data


@contextlib.contextmanager
def scarcity_typed() -> Iterator[None]:
    """Raise what says that the system has no more files or memory as `OutOfMemoryError`."""
    try:
        yield
    except OSError as error:
        if error.errno not in _SCARCE:
            raise
        raise OutOfMemoryError(f"the system has no more to give: {error}") from error
