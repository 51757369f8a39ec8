"""Looks at a GGUF file before the engine does: is it one, and will the engine survive it.

Source of the layout: ``docs/gguf.md`` in the ggml repository.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

from infercore import ModelFormatError, ModelNotFoundError, open_regular
from infercore.weight_files import gguf as headers
from infercore_llamacpp import soundness

if TYPE_CHECKING:
    from infercore.weight_files.gguf import Tensor

MAGIC = b"GGUF"
SURE, BY_NAME, NO = 100, 10, 0

_OTHER_FORMATS = (
    (b"version https://git-lfs", "a Git LFS pointer; run 'git lfs pull' to get the file itself"),
    (b"PK\x03\x04", "a PyTorch or zip file; convert the model to GGUF"),
    (b"ggjt", "an old GGML file; convert the model to GGUF"),
    (b"<", "a web page, perhaps of a failed download"),
)
_START_BYTES = max(len(start) for start, _ in _OTHER_FORMATS)
_PART = re.compile(r"^(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")


def match(path: str | os.PathLike[str]) -> int:
    """Score ``path``: high for a GGUF file, low for one only named so, 0 for anything else.

    The low score lets `check_file` say what is wrong with a file that is meant to be one.
    """
    file = Path(path)
    try:
        if file.is_file():
            with open_regular(path) as stream:
                if stream.read(len(MAGIC)) == MAGIC:
                    return SURE
        elif file.exists():
            return NO
    except OSError:
        pass
    return BY_NAME if file.suffix.lower() == ".gguf" else NO


def check_file(path: str) -> None:
    """Raise `ModelNotFoundError` or `ModelFormatError` where ``path`` cannot be a GGUF model.

    What passed last is not read again while the system says that it lies there unchanged.
    """
    stamp = _stamp(path)
    if stamp is None or stamp != _passed.get("stamp"):
        _check(path)
        _passed["stamp"] = stamp


_passed: dict[str, object] = {}
_TICK_S = 2.0  # of the coarsest clock of a file system: within it a change leaves no trace


def _stamp(path: str) -> list[tuple[object, ...]] | None:
    """Return what any change of the files changes, None where one may leave it as it is."""
    try:
        found = [(os.path.realpath(part), os.stat(part)) for part in parts(path)]
    except OSError:
        return None
    if any(time.time() - max(each.st_mtime, each.st_ctime) < _TICK_S for _, each in found):
        return None
    return [
        (name, each.st_dev, each.st_ino, each.st_size, each.st_mtime_ns, each.st_ctime_ns)
        for name, each in found
    ]


def _check(path: str) -> None:
    try:
        with open_regular(path) as stream:
            start = stream.read(_START_BYTES)
        wrong = _of_start(start) or next(filter(None, map(soundness.complaint, parts(path))), None)
    except OSError as error:
        kind = ModelNotFoundError if isinstance(error, FileNotFoundError) else ModelFormatError
        raise kind(f"{path} cannot be read: {error}", path=error.filename or path) from error
    if wrong is not None:
        raise ModelFormatError(f"{path} is not a usable GGUF file: {wrong}", path=path)


def parts(path: str) -> tuple[str, ...]:
    """Return the files of the model at ``path``: itself, or all parts of a split one."""
    found = _PART.match(os.path.basename(path))
    if found is None:
        return (path,)
    folder, count = os.path.dirname(path), int(found["count"])
    names = (f"{found['stem']}-{i:05d}-of-{count:05d}.gguf" for i in range(1, count + 1))
    return tuple(os.path.join(folder, name) for name in names)


def tensors(path: str) -> list[Tensor]:
    """Return what the headers of the model at ``path`` say of its tensors, of all its parts."""
    return [each for part in parts(path) for each in headers.read(part).tensors.values()]


def _of_start(start: bytes) -> str | None:
    """Return what is wrong with a file that starts so, None where that is right."""
    if start.startswith(MAGIC):
        return None
    other = next((what for sign, what in _OTHER_FORMATS if start.startswith(sign)), None)
    return f"it looks like {other}" if other else f"it starts with {start[:8]!r}, not {MAGIC!r}"
