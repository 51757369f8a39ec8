"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat

_LONGEST_STEM = 64  # characters of the name that the passing file takes over


def write_whole(path: str | os.PathLike[str], data: bytes, *, private: bool = False) -> None:
    """Write ``data`` to ``path``: where that fails or is killed, the older file stays.

    A link is followed, and the permissions of an older file stay as they are; a new one is its
    owner's alone if it is ``private``, as what holds people's texts is. What is not a regular file
    (a pipe, a device) is written to in place. Raises OSError.
    """
    wanted = os.fsdecode(path)
    older = _stat(wanted)
    if older is not None and not stat.S_ISREG(older.st_mode):
        with open(wanted, "wb") as there:
            there.write(data)
        return
    target = os.path.realpath(wanted)
    name = _beside(target)
    try:
        with open(name, "xb", opener=_private if private else None) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if older is not None:
            os.chmod(name, stat.S_IMODE(older.st_mode))
        os.replace(name, target)
    except BaseException as error:
        if isinstance(error, OSError) and error.filename == name:  # nobody knows that name
            error.filename = wanted
        if not isinstance(error, FileExistsError):  # another's file
            with contextlib.suppress(OSError):
                os.unlink(name)
        raise


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _stat(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)
    except FileNotFoundError:
        return None


def _beside(target: str) -> str:
    folder, base = os.path.split(target)
    return os.path.join(folder, f".{base[:_LONGEST_STEM]}.{secrets.token_hex(6)}")
