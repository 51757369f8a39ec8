"""Looks at a GGUF file before the engine does: is it one, and will the engine survive it.

Source of the layout: ``docs/gguf.md`` in the ggml repository.
"""

from __future__ import annotations

import os
import re
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from infercore import ModelFormatError, ModelNotFoundError

if TYPE_CHECKING:
    from collections.abc import Iterator

MAGIC = b"GGUF"
HEADER_BYTES = 24
MAX_LAYERS = 512  # LLAMA_MAX_LAYERS
SURE, BY_NAME, NO = 100, 10, 0

_OTHER_FORMATS = (
    (b"version https://git-lfs", "a Git LFS pointer; run 'git lfs pull' to get the file itself"),
    (b"PK\x03\x04", "a PyTorch or zip file; convert the model to GGUF"),
    (b"ggjt", "an old GGML file; convert the model to GGUF"),
    (b"<", "a web page, perhaps of a failed download"),
)
_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_STRING, _ARRAY = 8, 9
_PART = re.compile(r"^(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")


def match(path: str | os.PathLike[str]) -> int:
    """Score ``path``: high for a GGUF file, low for one only named so, 0 for anything else.

    The low score lets `check_file` say what is wrong with a file that is meant to be one.
    """
    file = Path(path)
    try:
        if file.is_file():
            with file.open("rb") as stream:
                if stream.read(len(MAGIC)) == MAGIC:
                    return SURE
        elif file.exists():
            return NO
    except OSError:
        pass
    return BY_NAME if file.suffix.lower() == ".gguf" else NO


def check_file(path: str) -> None:
    """Raise `ModelNotFoundError` or `ModelFormatError` where ``path`` cannot be a GGUF model."""
    file = Path(path)
    if not file.exists():
        raise ModelNotFoundError(f"there is no file at {path}", path=path)
    if file.is_dir():
        raise _wrong(path, "it is a directory; give the path of the .gguf file in it")
    try:
        with file.open("rb") as stream:
            head = stream.read(HEADER_BYTES)
            _check_head(path, head)
            _check_layers(path, stream)
    except OSError as error:
        if isinstance(error, ModelFormatError):
            raise
        raise _wrong(path, f"it cannot be read ({error})") from error


def parts(path: str) -> tuple[str, ...]:
    """Return the files of the model at ``path``: itself, or all parts of a split one."""
    found = _PART.match(os.path.basename(path))
    if found is None:
        return (path,)
    folder, count = os.path.dirname(path), int(found["count"])
    names = (f"{found['stem']}-{i:05d}-of-{count:05d}.gguf" for i in range(1, count + 1))
    return tuple(os.path.join(folder, name) for name in names)


def _wrong(path: str, why: str) -> ModelFormatError:
    return ModelFormatError(f"{path} is not a usable GGUF file: {why}", path=path)


def _check_head(path: str, head: bytes) -> None:
    if not head:
        raise _wrong(path, "it is empty")
    if not head.startswith(MAGIC):
        for start, what in _OTHER_FORMATS:
            if head.startswith(start):
                raise _wrong(path, f"it looks like {what}")
        raise _wrong(path, f"it starts with {head[:8]!r} instead of {MAGIC!r}")
    if len(head) < HEADER_BYTES:
        raise _wrong(path, f"it is cut off after {len(head)} bytes")


def _check_layers(path: str, stream: BinaryIO) -> None:
    """Refuse a model of no layers, or too many: the engine ends the process over it."""
    for key, value in _scalars(stream):
        if key.endswith(".block_count") and not (
            isinstance(value, int) and 1 <= value <= MAX_LAYERS
        ):
            raise _wrong(path, f"its {key} is {value!r}; a model has 1 to {MAX_LAYERS} layers")


def _scalars(stream: BinaryIO) -> Iterator[tuple[str, Any]]:
    """Yield the metadata up to the first array; what is malformed is left to the engine."""
    stream.seek(16)
    try:
        (n_entries,) = struct.unpack("<Q", stream.read(8))
        for _ in range(min(n_entries, 4096)):
            key = _read_string(stream).decode("utf-8", "replace")
            (kind,) = struct.unpack("<I", stream.read(4))
            if kind == _STRING:
                yield key, _read_string(stream)
            elif kind in _SCALARS:
                layout = "<" + _SCALARS[kind]
                yield key, struct.unpack(layout, stream.read(struct.calcsize(layout)))[0]
            elif not _skip_array(stream, kind):
                return
    except (struct.error, MemoryError, OverflowError):
        return


def _read_string(stream: BinaryIO) -> bytes:
    (length,) = struct.unpack("<Q", stream.read(8))
    return stream.read(min(length, 1 << 24))


def _skip_array(stream: BinaryIO, kind: int) -> bool:
    """Step over an array of numbers; an array of strings (the vocabulary) ends the look."""
    if kind != _ARRAY:
        return False
    item, count = struct.unpack("<IQ", stream.read(12))
    if item not in _SCALARS:
        return False
    stream.seek(struct.calcsize("<" + _SCALARS[item]) * count, os.SEEK_CUR)
    return True
