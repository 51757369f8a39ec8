"""What the hub says of a repository: read up to a bound, and looked at before it names a path."""

from __future__ import annotations

import functools
import hashlib
import io
import json
import re
from typing import TYPE_CHECKING, Any

import attrs

from infercore.locating import transfer
from infercore.values import checks
from infercore.values.files import open_regular

if TYPE_CHECKING:
    from collections.abc import Iterable

_MAX_LISTING_BYTES = 16 << 20
_MAX_NAME, _MAX_FILE_BYTES = 1000, 1 << 50
_CHUNK_BYTES = 1 << 22
_REVISION = re.compile("[0-9a-f]{40}([0-9a-f]{24})?")  # it becomes a part of a path
_SHA256, _GIT_SHA1 = re.compile("[0-9a-f]{64}"), re.compile("[0-9a-f]{40}")


@attrs.frozen
class Sibling:
    """A file of a repository.

    ``checksum`` is the SHA-256 of a large file, git's SHA-1 of a small one: the name of its bytes
    in the cache.
    """

    name: str
    size: int
    checksum: str

    def is_whole(self, path: str) -> bool:
        """Return whether the file at ``path`` has that checksum. Raises OSError."""
        with open_regular(path) as file:
            if _SHA256.fullmatch(self.checksum):
                digest = hashlib.sha256()
            else:
                head = f"blob {self.size}\0".encode()
                digest = hashlib.sha1(head, usedforsecurity=False)
            for chunk in iter(functools.partial(file.read, _CHUNK_BYTES), b""):
                digest.update(chunk)
        return digest.hexdigest() == self.checksum


def listed(library: Any, repo: str) -> tuple[str, dict[str, Sibling]]:
    """Return the newest revision and its files; those with names that no model has are left out.

    Raises `ValueError`, or what Python raises over data of other types, for an answer that is none
    of a hub, and what the library raises over one that refuses.
    """
    library.utils.validate_repo_id(repo)
    answer = io.BytesIO()
    url = f"{library.constants.ENDPOINT}/api/models/{repo}?blobs=true"
    transfer.get(library, url, answer, _MAX_LISTING_BYTES)
    about = json.loads(answer.getvalue())
    revision, files = about["sha"], {}
    for each in about["siblings"]:
        if _is_a_name(name := each["rfilename"]):
            files[name] = _sibling(name, each)
    if not isinstance(revision, str) or not _REVISION.fullmatch(revision):
        raise ValueError("it names no revision")
    return revision, files


def alike(names: Iterable[str], wanted: Iterable[str]) -> list[str]:
    """Return those of ``names`` that some systems take for another one that is ``wanted``."""
    folded = {name.casefold(): name for name in wanted}
    return [name for name in names if folded.get(name.casefold(), name) != name]


def _is_a_name(file: Any) -> bool:
    """Return whether ``file`` is the name of a file within a folder, on any system."""
    return (
        isinstance(file, str)
        and file.isprintable()
        and len(file) <= _MAX_NAME
        and not set(file) & set('\\:*?"<>|')
        and not {"", ".", ".."} & set(file.split("/"))
    )


def _sibling(name: str, told: Any) -> Sibling:
    large = told.get("lfs")
    size, checksum = (told, told.get("blobId")) if large is None else (large, large["sha256"])
    size, form = size.get("size"), _GIT_SHA1 if large is None else _SHA256
    if not (isinstance(checksum, str) and form.fullmatch(checksum)):
        raise ValueError(f"the checksum of {name} is none")
    if not checks.is_integer(size) or not 0 <= size <= _MAX_FILE_BYTES:
        raise ValueError(f"the size of {name} is none")
    return Sibling(name, size, checksum)
