"""Digests of model files, remembered between runs."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infercore.errors import ModelNotFoundError
from infercore.values.files import open_regular, scarcity_typed

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from infercore.values.config import AdapterSpec

_FILE = "digests.json"
_CHUNK_BYTES = 1 << 22
_REMEMBER_FROM_BYTES = 1 << 26
_memory: dict[str, str] = {}


def of_files(files: Sequence[str]) -> str:
    """Return the SHA-256 hex digest over the contents of ``files``, in the order of their names.

    Of one file it is the file's own digest. A file of 64 MiB and more is hashed once: the digest
    is kept in the user's cache folder, keyed by path, size, inode and time of change.
    ``INFERCORE_CACHE_DIR`` names another folder, or "none".
    """
    paths = sorted(Path(file) for file in files)
    with scarcity_typed():
        if len(paths) == 1:
            return _of_file(paths[0])
        joined = "".join(f"{path.name}\0{_of_file(path)}\n" for path in paths)
    return hashlib.sha256(joined.encode()).hexdigest()


def of_path(path: str) -> str:
    """Return the digest of the file at ``path``, or of all files of a folder."""
    return of_files(files_at(path))


def adapter_identities(adapters: Iterable[AdapterSpec]) -> list[str]:
    """Return the digest of each adapter's file, or folder, and its scale, in their order.

    Raises `ModelNotFoundError` where a file cannot be read any more.
    """
    return [f"{_of_adapter(adapter.path)}@{float(adapter.scale)!r}" for adapter in adapters]


def _of_adapter(path: str) -> str:
    try:
        return of_path(path)
    except OSError as error:
        raise ModelNotFoundError(
            f"the adapter {path!r} is in use and its file cannot be read: {error}", path=path
        ) from error


def files_at(path: str) -> list[str]:
    """Return the file itself, or all files of a folder (PEFT keeps settings beside the numbers)."""
    if not os.path.isdir(path):
        return [path]
    return [entry.path for entry in os.scandir(path) if entry.is_file()]


def stamps(files: Iterable[str]) -> list[list[Any]]:
    """Return what changes where another file takes the place of one, or one is written to.

    The digest of a small file; of one of 64 MiB and more, which takes long to hash, its size,
    inode and time: it has changed as well where the same bytes were laid down again.
    """
    made: list[list[Any]] = []
    for file in sorted(files):
        stat = os.stat(file)
        is_large = stat.st_size >= _REMEMBER_FROM_BYTES
        facts = stat.st_size, stat.st_ino, stat.st_mtime_ns
        made.append([file, *(facts if is_large else [_of_file(Path(file))])])
    return made


def _of_file(path: Path) -> str:
    stat = path.stat()
    key = f"{path.resolve()}|{stat.st_size}|{stat.st_ino}|{stat.st_mtime_ns}"
    key += f"|{stat.st_ctime_ns}"  # who writes into a file can set its time, but not this one
    if key in _memory:
        return _memory[key]
    remember = stat.st_size >= _REMEMBER_FROM_BYTES
    value = (recall(_FILE, key) if remember else None) or _hash(path)
    _memory[key] = value
    if remember:
        store(_FILE, key, value)
    return value


def _hash(path: Path) -> str:
    digest = hashlib.sha256()
    with open_regular(path) as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def cache_file(name: str) -> Path | None:
    """Return where a file of this name is kept in the user's cache folder, None where it is not."""
    folder = os.environ.get("INFERCORE_CACHE_DIR")
    if folder:
        return None if folder == "none" else Path(folder) / name
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(root) / "infercore" / name if os.path.isabs(root) else None


def _read_cache(path: Path) -> dict[str, str]:
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def recall(name: str, key: str) -> str | None:
    """Return what the file ``name`` of the cache folder has under ``key``, None if nothing."""
    path = cache_file(name)
    return None if path is None else _read_cache(path).get(key)


def store(name: str, key: str, value: str) -> None:
    """Keep ``value``; where the cache cannot be written it is only worked out again."""
    path = cache_file(name)
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "w") as file:
            json.dump({**_read_cache(path), key: value}, file)
        Path(name).replace(path)
    except OSError:
        return
