"""What comes from the hub: read up to a bound, and put into its cache once it is whole.

`huggingface_hub` reads an answer to its end, however long it is, and gives each download a
temporary file with a random name, so that it starts again after a crash. Here the bytes go to
``blobs/CHECKSUM.incomplete``, the name that its older versions use; the finished file becomes the
blob, and the file of a snapshot, that the library then finds in its cache.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import stat
import sys
from typing import TYPE_CHECKING, Any, BinaryIO, cast

if TYPE_CHECKING:
    from infercore.locating.listing import Sibling

_MOST_CUTS = 20


def get(library: Any, url: str, file: BinaryIO, most_bytes: int) -> None:
    """Append to ``file`` what ``url`` answers. Raises OSError beyond ``most_bytes``."""
    _get(library, url, file, most_bytes, _bar(library, shown=False), _nb_retries=0)


def download(library: Any, repo: str, sibling: Sibling, revision: str) -> str | None:
    """Return the path of a file in the cache, fetched if it was not there.

    What an earlier run left of it is continued. None, and nothing is kept, where what came does not
    have the hub's checksum. Raises OSError, and what the library raises.
    """
    if sibling.size > library.constants.MAX_HTTP_DOWNLOAD_SIZE:
        return _by_the_library(library, repo, sibling, revision)
    path = os.path.join(_folder(library, repo), "snapshots", revision, *sibling.name.split("/"))
    if os.path.exists(path):
        return path
    blob = os.path.join(_folder(library, repo), "blobs", sibling.checksum)
    lock = os.path.join(*os.path.split(_folder(library, repo, ".locks")), sibling.checksum)
    for each in (path, blob, lock):
        os.makedirs(os.path.dirname(each), exist_ok=True)
    url = library.hf_hub_url(repo, sibling.name, revision=revision)
    with library.utils.WeakFileLock(lock + ".lock"):
        if os.path.exists(path):  # another program fetched it, and may be about to open it
            return path
        is_here = os.path.exists(blob) and sibling.is_whole(blob)
        if not is_here and not _fetched(library, url, blob, sibling):
            return None
        _point(path, blob)
    return path


def mark_as_main(library: Any, repo: str, revision: str) -> None:
    """Let the cache know what the branch ``main`` is, or tools that prune drop its files.

    Whatever the disk says: the model is here.
    """
    folder = os.path.join(_folder(library, repo), "refs")
    with contextlib.suppress(OSError):
        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(folder, "main"), "w", encoding="ascii") as file:
            file.write(revision)


def _folder(library: Any, repo: str, within: str = "") -> str:
    """Return the folder of ``repo`` in the library's cache."""
    name = "models--" + repo.replace("/", "--")
    return os.path.join(library.constants.HF_HUB_CACHE, within, name)


def _by_the_library(library: Any, repo: str, sibling: Sibling, revision: str) -> str | None:
    """Download what plain requests are not answered with."""
    path: str = library.hf_hub_download(repo, sibling.name, revision=revision)
    if sibling.is_whole(path):
        return path
    blob = os.path.realpath(path)
    is_of_the_cache = os.path.dirname(blob) == os.path.realpath(
        os.path.join(_folder(library, repo), "blobs")
    )
    for wrong in (path, *[blob] * is_of_the_cache):
        with contextlib.suppress(OSError):
            os.unlink(wrong)
    return None


def _fetched(library: Any, url: str, blob: str, sibling: Sibling) -> bool:
    """Put the file's bytes into ``blob``; return whether they are those of the hub's checksum."""
    partial = blob + ".incomplete"
    for _ in range(2):  # what an earlier run left may be wrong, or of no use
        resumed = _complete(library, url, partial, sibling)
        if sibling.is_whole(partial):
            os.replace(partial, blob)
            return True
        os.unlink(partial)
        if not resumed:
            break
    return False


def _complete(library: Any, url: str, path: str, sibling: Sibling) -> bool:
    """Append what is missing to ``path``; return whether something was there."""
    with open(path, "ab", opener=_without_waiting) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(f"{path} is not a regular file; delete it")
        if file.tell() > sibling.size:
            file.truncate(0)
        start = file.tell()
        if start < sibling.size:
            bar = _bar(library, shown=True)
            fields = {"resume_size": start, "displayed_filename": sibling.name}
            try:
                _get_in_pieces(library, url, file, sibling.size, bar, **fields)
            except _TooMuchError:
                if start == 0:
                    raise
                file.truncate(0)  # the whole came behind the part: some servers know no ranges
    return start > 0


def _get_in_pieces(
    library: Any, url: str, file: BinaryIO, most_bytes: int, bar: Any, **fields: Any
) -> None:
    """Get it, and go on where a connection was cut: versions of the library before 2 do not."""
    for _ in range(_MOST_CUTS):
        start = file.tell()
        try:
            return _get(library, url, file, most_bytes, bar, **{**fields, "resume_size": start})
        except Exception as error:
            if file.tell() == start or not _is_cut(error):
                raise
    return _get(library, url, file, most_bytes, bar, **{**fields, "resume_size": file.tell()})


def _is_cut(error: Exception) -> bool:
    """Return whether a connection ended while it brought bytes, and no answer refused them."""
    library = type(error).__module__.partition(".")[0]
    is_of_network = library in ("httpx", "httpcore", "urllib3", "requests")
    return isinstance(error, ConnectionError) or (
        is_of_network and getattr(error, "response", None) is None
    )


def _get(library: Any, url: str, file: BinaryIO, most_bytes: int, bar: Any, **fields: Any) -> None:
    """Let the library get it, with what this version of it takes of ``fields``."""
    http_get = library.file_download.http_get
    # Any ``proxies``, also none, keep older versions from ``hf_transfer``, which has no bounds.
    given = {
        **fields,
        "tqdm_class": bar,
        "headers": library.utils.build_hf_headers(),
        "proxies": {},
    }
    known = inspect.signature(http_get).parameters
    bounded = cast("BinaryIO", _UpTo(file, most_bytes))
    http_get(url, bounded, **{name: value for name, value in given.items() if name in known})


class _TooMuchError(OSError):
    """More came than a file may hold."""


class _UpTo:
    """A file that takes no more than ``most_bytes``: what comes may have no end.

    It has no ``name`` or number by which something could be written past the bound.
    """

    def __init__(self, file: BinaryIO, most_bytes: int) -> None:
        self._file = file
        self._most_bytes = most_bytes
        self.flush, self.seek, self.tell = file.flush, file.seek, file.tell
        self.truncate = file.truncate

    def write(self, data: bytes) -> int:
        if self._file.tell() + len(data) > self._most_bytes:
            raise _TooMuchError(f"more came than {self._most_bytes:,} bytes")
        return self._file.write(data)


def _without_waiting(path: str, flags: int) -> int:
    """Open for writing what is no pipe that nobody reads, nor a link to somewhere else."""
    never = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0)
    return os.open(path, flags | never, 0o666)


def _point(path: str, blob: str) -> None:
    """Make ``path`` a link to ``blob``, or the file itself where there are no links."""
    if os.path.lexists(path):  # to a blob that is gone
        os.unlink(path)
    try:
        os.symlink(os.path.relpath(blob, os.path.dirname(path)), path)
    except (NotImplementedError, OSError):  # on Windows a right, on some mounts impossible
        os.replace(blob, path)


def _bar(library: Any, *, shown: bool) -> Any:
    """Return what makes the library show its bars on a terminal alone."""

    class Bar(library.utils.tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **fields: Any) -> None:
            if not shown or sys.stderr is None or not sys.stderr.isatty():
                fields["disable"] = True
            super().__init__(*args, **fields)

    return Bar
