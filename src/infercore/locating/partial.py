"""Large files of the hub, so that a download goes on where a killed program left it.

`huggingface_hub` gives each download a temporary file with a random name, and starts again after
a crash. Here the bytes go to ``blobs/SHA256.incomplete``, the name that its older versions use, and
the finished file becomes the blob that `huggingface_hub.hf_hub_download` then finds in its cache.
"""

from __future__ import annotations

import inspect
import os
import re
import stat
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_SHA256 = re.compile("[0-9a-f]{64}")  # it becomes a part of a path


def download(
    library: Any, repo: str, sibling: Any, revision: str, *,
    is_whole: Callable[[str], bool], bars: Mapping[str, Any],
) -> bool:  # fmt: skip
    """Put the file's bytes into the cache, continuing what an earlier run left there.

    Returns False, and keeps nothing, where they do not have the hub's checksum. Files that the hub
    keeps in git, which are small, and those too large for a plain download are left to the library.
    """
    lfs = getattr(sibling, "lfs", None)
    most = getattr(library.constants, "MAX_HTTP_DOWNLOAD_SIZE", 50 * 10**9)
    if lfs is None or lfs.size > most or not _SHA256.fullmatch(str(lfs.sha256)):
        return True
    url = library.hf_hub_url(repo, sibling.rfilename, revision=revision)
    http_get = getattr(getattr(library, "file_download", None), "http_get", None)
    if http_get is None:  # it is no public name
        return True
    cache, folder = library.constants.HF_HUB_CACHE, "models--" + repo.replace("/", "--")
    blob = os.path.join(cache, folder, "blobs", lfs.sha256)
    lock = os.path.join(cache, ".locks", folder, f"{lfs.sha256}.lock")
    for path in (blob, lock):
        os.makedirs(os.path.dirname(path), exist_ok=True)
    fields = {
        **bars,
        "displayed_filename": sibling.rfilename,
        "headers": library.utils.build_hf_headers(),
    }
    with library.utils.WeakFileLock(lock):
        if os.path.exists(blob):
            return True
        partial = blob + ".incomplete"
        resumed = _complete(http_get, url, partial, lfs.size, fields)
        if not is_whole(partial):
            os.unlink(partial)
            if not resumed:
                return False
            _complete(
                http_get, url, partial, lfs.size, fields
            )  # what was there may have been wrong
            if not is_whole(partial):
                os.unlink(partial)
                return False
        os.replace(partial, blob)
    return True


def _complete(
    http_get: Callable[..., Any], url: str, path: str, size: int, fields: Mapping[str, Any]
) -> bool:
    """Append what is missing to ``path``; return whether something was there."""
    with open(path, "ab", opener=_without_waiting) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(f"{path} is not a regular file; delete it")
        if file.tell() > size:
            file.truncate(0)
        start = file.tell()
        if start < size:
            bounded = _UpTo(file, size)
            http_get(url, bounded, resume_size=start, **_accepted(http_get, fields))
    return start > 0


class _UpTo:
    """A file that takes no more than ``size`` bytes: what comes may have no end."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = file
        self._size = size

    def write(self, data: bytes) -> int:
        if self._file.tell() + len(data) > self._size:
            raise OSError(f"more came than the {self._size:,} bytes that the hub stated")
        return self._file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def _without_waiting(path: str, flags: int) -> int:
    """Open for writing what is no pipe that nobody reads, nor a link to somewhere else."""
    never = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0)
    return os.open(path, flags | never, 0o666)


def _accepted(call: Callable[..., Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that ``call`` takes; it differs between versions of the library."""
    return {key: each for key, each in fields.items() if key in inspect.signature(call).parameters}
