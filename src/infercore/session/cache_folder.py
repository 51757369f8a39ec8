"""Files of sequences that were moved out: a folder that several processes may share.

``magic (8) | tokens (4) | payload bytes (8) | namespace (32) | identity (32) | ids (4 each)
| digest (16) | payload | digest (16)``, little-endian; namespace and identity as SHA-256, so that
neither can be read from the file. The first digest covers all before it, the second that digest
and the payload. A file is never trusted: digests, namespace, identity and ids are compared, and
whatever does not fit is a file that is not there.

Files are written aside and renamed, so a process that is killed leaves nothing that is taken. Names
follow from what is held: two processes that store the same write the same file.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import logging
import os
import re
import secrets
import stat
import struct
import sys
import time
from array import array
from typing import TYPE_CHECKING, NamedTuple

from infercore.errors import InvalidInputError
from infercore.session.prefix_index import Match, PrefixIndex

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_logger = logging.getLogger("infercore.session")

MAGIC = b"icseq\x00\x01\n"
_FIXED = struct.Struct("<8sIQ32s32s")
_DIGEST_BYTES = 16
_TOKEN_BYTES = 4
_NAME = re.compile(r"[0-9a-f]{64}\.seq")
_PASSING = re.compile(r"\.[0-9a-f]{64}\.[0-9a-f]{12}")
_ABANDONED_S = 600.0  # a file that was being written so long ago has no writer any more
_SETTLED_NS = 50_000_000  # a folder's time is too coarse to tell changes that follow so closely
_RETRY_S = 30.0  # after a failed write


class Key(NamedTuple):
    """Whose tokens they are: SHA-256 of the namespace, and of the identity."""

    namespace: bytes
    identity: bytes

    @classmethod
    def of(cls, namespace: str, identity: str) -> Key:
        """Return the key of a namespace and an identity's digest."""
        return cls(_sha256(namespace.encode()), _sha256(identity.encode()))


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _digest(*parts: bytes | memoryview) -> bytes:
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        digest.update(part)
    return digest.digest()


def _as_bytes(tokens: Sequence[int]) -> bytes:
    ids = array("I", tokens)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


def file_name(key: Key, tokens: Sequence[int]) -> str:
    """Return the name of the file that holds ``tokens`` of ``key``."""
    parts = (key.namespace, key.identity, _as_bytes(tokens))
    return hashlib.sha256(b"".join(parts)).hexdigest() + ".seq"


def pack(key: Key, tokens: Sequence[int], payload: bytes) -> list[bytes]:
    """Return the parts of a file, in order."""
    start = _FIXED.pack(MAGIC, len(tokens), len(payload), *key) + _as_bytes(tokens)
    first = _digest(start)
    return [start, first, payload, _digest(first, payload)]


class Header(NamedTuple):
    """What the start of a file says: whose it is, which tokens, where the payload lies."""

    key: Key
    tokens: list[int]
    start: int
    size: int
    """Bytes of the whole file."""


def read_header(data: bytes | memoryview, n_bytes: int) -> Header | None:
    """Return the header at the start of a file of ``n_bytes``, None where it is damaged."""
    if len(data) < _FIXED.size:
        return None
    magic, n_tokens, n_payload, namespace, identity = _FIXED.unpack_from(data)
    end = _FIXED.size + n_tokens * _TOKEN_BYTES
    start = end + _DIGEST_BYTES
    if magic != MAGIC or start + n_payload + _DIGEST_BYTES != n_bytes or len(data) < start:
        return None
    view = memoryview(data)
    if _digest(view[:end]) != view[end:start]:
        return None
    ids = array("I", bytes(view[_FIXED.size : end]))
    if sys.byteorder == "big":
        ids.byteswap()
    return Header(Key(namespace, identity), ids.tolist(), start, n_bytes)


def unpack(data: bytes, key: Key, tokens: Sequence[int]) -> memoryview | None:
    """Return the payload of a file if it is whole and holds ``tokens`` of ``key``, else None."""
    header = read_header(data, len(data))
    if header is None or header.key != key or header.tokens != list(tokens):
        return None
    view = memoryview(data)
    payload, last = view[header.start : -_DIGEST_BYTES], view[-_DIGEST_BYTES:]
    first = view[header.start - _DIGEST_BYTES : header.start]
    return payload if hmac.compare_digest(_digest(first, payload), last) else None


class CacheFolder:
    """At most ``n_bytes`` bytes of files in ``path``; the least recently used files go.

    A folder that is made here is open to its owner alone (0700), its files too (0600). What fails
    (no room, no right to write, a damaged file) is logged once and is a file that is not
    there. Not safe for threads by itself.

    Raises `InvalidInputError` for a folder that others may read or write and that holds files
    which are not the cache's: its permissions are not for us to change.
    """

    def __init__(self, path: str, n_bytes: int, *, can_cut: bool = True) -> None:
        self._path = path
        self._can_cut = can_cut
        self._n_bytes = n_bytes
        self._index: PrefixIndex[str] = PrefixIndex()
        self._scanned_ns = -1
        self._has_warned = False
        self._retry_at = 0.0
        self._usable = self._prepare()

    def _prepare(self) -> bool:
        try:
            with contextlib.suppress(FileExistsError):
                os.makedirs(self._path, mode=0o700)
            there = os.stat(self._path)
            if not stat.S_ISDIR(there.st_mode):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), self._path)
            if os.name == "posix":
                self._close_to_others(there)
        except OSError as error:
            self._warn("cannot be used", error)
            return False
        return True

    def _close_to_others(self, there: os.stat_result) -> None:
        if there.st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, "the folder belongs to another user", self._path)
        if not stat.S_IMODE(there.st_mode) & 0o077:
            return
        foreign = [name for name in os.listdir(self._path) if not _is_ours(name)]
        if foreign:
            raise InvalidInputError(
                f"cache_dir={self._path!r} is open to other users and holds other files "
                f"({foreign[0]!r}); give a folder of its own, or one with mode 0700",
                field="cache_dir",
                value=self._path,
                allowed="a folder that does not exist, is empty, or is its owner's alone",
            )
        os.chmod(self._path, 0o700)

    def _warn(self, what: str, error: BaseException | str) -> None:
        """Tell once that the cache does less than it was asked to."""
        if not self._has_warned:
            self._has_warned = True
            _logger.warning(
                "cache_dir %s %s (%s); what is not there is evaluated again",
                self._path,
                what,
                error,
            )

    def find(self, key: Key, tokens: Sequence[int], *, whole: bool) -> Match[str] | None:
        """Return the file with the longest beginning of ``tokens``, and how much of them it has.

        ``whole``: only files of which all tokens begin ``tokens``.
        """
        if not self._usable:
            return None
        self._look()
        if whole:
            return next(reversed(self._index.inside(key, tokens)), None)
        return self._index.find(key, tokens)

    def tokens(self, name: str) -> list[int]:
        """Return the tokens that the file ``name`` holds."""
        return self._index.tokens(name)

    def load(self, key: Key, name: str) -> bytes | None:
        """Return what the file ``name`` holds, None where it is gone or damaged."""
        tokens = self._index.tokens(name)
        path = os.path.join(self._path, name)
        try:
            data = _read(path)
        except FileNotFoundError:
            self._forget(name)
            return None
        except OSError as error:
            self._warn("cannot be read", error)
            return None
        payload = unpack(data, key, tokens)
        if payload is None:
            self._warn("had a damaged file", name)
            self._remove(name)
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return bytes(payload)

    def put(self, key: Key, tokens: Sequence[int], payload: bytes) -> bool:
        """Store ``payload``; return whether it is there now. Failures are logged once."""
        if not self._usable or time.monotonic() < self._retry_at:
            return False
        if self._is_there(key, tokens):
            return True
        name = file_name(key, tokens)
        parts = pack(key, tokens, payload)
        size = sum(map(len, parts))
        if size > self._n_bytes:
            return False
        shorter = self._index.inside(key, tokens) if self._can_cut else []
        try:
            self._make_room(size)
            _write_aside(self._path, name, parts)
        except OSError as error:
            self._warn("cannot be written", error)
            self._retry_at = time.monotonic() + _RETRY_S
            return False
        for other in shorter:
            self._remove(other.holder)
        self._make_room(0)  # another process may have written as well
        return os.path.exists(os.path.join(self._path, name))

    def _is_there(self, key: Key, tokens: Sequence[int]) -> bool:
        """Whether a file has ``tokens``; it counts as used now then."""
        found = self.find(key, tokens, whole=not self._can_cut)
        if found is None or found.n_tokens < len(tokens):
            return False
        try:
            os.utime(os.path.join(self._path, found.holder))
        except OSError:
            return False
        return True

    def _make_room(self, n_bytes: int) -> None:
        """Remove the least recently used files until ``n_bytes`` more fit."""
        files = sorted(self._files(), key=lambda file: file[2])
        total = sum(size for _, size, _ in files)
        for name, size, _ in files:
            if total + n_bytes <= self._n_bytes:
                break
            self._remove(name)
            total -= size

    def _files(self) -> Iterator[tuple[str, int, int]]:
        """Yield name, size and time of the files; those that a dead writer left are removed."""
        with contextlib.suppress(OSError), os.scandir(self._path) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    there = entry.stat(follow_symlinks=False)
                    if _NAME.fullmatch(entry.name) and stat.S_ISREG(there.st_mode):
                        yield entry.name, there.st_size, there.st_mtime_ns
                    elif _is_abandoned(entry.name, there):
                        os.unlink(entry.path)

    def _look(self) -> None:
        """Read the headers of files that are new, and forget those that are gone."""
        try:
            changed_ns = os.stat(self._path).st_mtime_ns
        except OSError:
            changed_ns = -1
        if changed_ns == self._scanned_ns:
            return
        there = {name: size for name, size, _ in self._files()}
        for name in self._index.holders() - there.keys():
            self._forget(name)
        for name in there.keys() - self._index.holders():
            self._take_in(name, there[name])
        self._scanned_ns = changed_ns if time.time_ns() - changed_ns > _SETTLED_NS else -1

    def _take_in(self, name: str, size: int) -> None:
        try:
            header = read_header(_read(os.path.join(self._path, name), header_only=True), size)
        except OSError:
            return  # gone again, or not for us to read
        if header is None or file_name(header.key, header.tokens) != name:
            self._warn("had a damaged file", name)
            self._remove(name)
            return
        self._index.put(name, header.key, header.tokens)

    def _forget(self, name: str) -> None:
        self._index.drop(name)

    def _remove(self, name: str) -> None:
        self._forget(name)
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(self._path, name))

    def flush(self, namespace: bytes | None) -> None:
        """Remove all files, or those of one namespace."""
        if not self._usable:
            return
        self._look()
        for name, _, _ in list(self._files()):
            if namespace is None or self._namespace_of(name) in {None, namespace}:
                self._remove(name)

    def _namespace_of(self, name: str) -> bytes | None:
        key = self._index.key(name)
        return key.namespace if isinstance(key, Key) else None


def _is_abandoned(name: str, there: os.stat_result) -> bool:
    return bool(_PASSING.fullmatch(name)) and time.time() - there.st_mtime > _ABANDONED_S


def _is_ours(name: str) -> bool:
    return bool(_NAME.fullmatch(name) or _PASSING.fullmatch(name))


def _read(path: str, *, header_only: bool = False) -> bytes:
    """Return the bytes of a regular file that is no link, or those of its header."""
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    with open(os.open(path, flags), "rb") as file:
        if not header_only:
            return file.read()
        fixed = file.read(_FIXED.size)
        if len(fixed) < _FIXED.size:
            return fixed
        size = os.fstat(file.fileno()).st_size
        n_more = _FIXED.unpack(fixed)[1] * _TOKEN_BYTES + _DIGEST_BYTES
        return fixed + file.read(min(n_more, size))


def _write_aside(folder: str, name: str, parts: list[bytes]) -> None:
    """Write a file beside its name and rename it; where that fails nothing of it stays."""
    passing = os.path.join(folder, f".{name.removesuffix('.seq')}.{secrets.token_hex(6)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    try:
        with open(os.open(passing, flags, 0o600), "wb") as file:
            file.writelines(parts)
        os.replace(passing, os.path.join(folder, name))
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(passing)
        raise
