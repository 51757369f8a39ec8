"""A session's state as a value or a file, and branches of a session."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import attrs

from infercore.engine import atomic, blob
from infercore.errors import InvalidStateError, ModelNotFoundError, OutOfMemoryError, SnapshotError
from infercore.session.keeping import n_tokens_of
from infercore.session.parts import DECODED, EMPTY, PREFIXED, READY, Parts
from infercore.values import checks
from infercore.values.files import open_regular
from infercore.values.manifest import ContextManifest
from infercore.values.memory import free_bytes
from infercore.values.session import PrefixInput, Snapshot

if TYPE_CHECKING:
    from infercore.session.session import CoreSession


def take(session: CoreSession) -> Snapshot:
    """Return the snapshot of a session that is held and open."""
    started = time.perf_counter()
    if session.changed is not None:
        raise InvalidStateError(
            f"{session.changed} of the context changed since these tokens were evaluated; "
            "call ensure_prefix",
            operation="snapshot",
            state=session.state,
        )
    session.make_whole()
    resident = session.resident
    note = {
        "state": session.state,
        "manifest": session.identity.to_dict(),
        "logical": resident.tape.logical,
        "cut": resident.tape.cut,
        "parts": _plain(session.parts),
    }
    data = session.context.save_sequence(resident.seq_id, note=note)
    return Snapshot(
        manifest=session.identity,
        data=data,
        resident_tokens=resident.tape.logical,
        elapsed_ms=(time.perf_counter() - started) * 1e3,
    )


def _plain(parts: Parts) -> dict[str, Any]:
    plain = attrs.asdict(parts, recurse=False)
    prefix = parts.prefix
    if prefix is not None:
        plain["prefix"] = [prefix.text, prefix.parse_special, prefix.cache_class]
    return plain


def value_of(session: CoreSession) -> dict[str, Any]:
    """Return what a session is without its engine: its state, its parts and its tokens."""
    tokens, parts = session.resident.wanted(), session.parts.copy()
    parts.fit(len(tokens))
    return {"state": session.state, "parts": _plain(parts), "tokens": tokens}


def adopt(session: CoreSession, value: dict[str, Any]) -> None:
    """Let a new session be what `value_of` returned; its tokens are evaluated when needed."""
    session.resident.owed = list(value["tokens"])
    session.enter(value["state"], _parts(value["parts"], len(value["tokens"])))


def _opened(data: bytes) -> dict[str, Any]:
    """Return what a session noted in its saved sequence, as objects. Raises `SnapshotError`.

    All that is kept of it is checked; what the sequence holds the context checks when it restores.
    """
    note = blob.read_header(data).get("note")
    if note is None:
        raise SnapshotError(
            "these bytes are a context's, not a session's; give them to the context", reason="kind"
        )
    try:
        _need(isinstance(note, dict) and set(note) == _NOTE, "its fields are not those of a note")
        _need(note["state"] in (EMPTY, PREFIXED, READY, DECODED), "its state is none")
        _need(_is_count(note["logical"]), "it counts no tokens")
        _need(note["cut"] is None or _is_count(note["cut"]), "its cut is not a position")
        return {
            **note,
            "manifest": ContextManifest.from_dict(note["manifest"]),
            "parts": _parts(note["parts"], note["logical"]),
        }
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise _malformed(error) from error


_NOTE = {"state", "manifest", "logical", "cut", "parts"}
_PARTS = {field.name for field in attrs.fields(Parts)}
_LATER = {"suffix_class"}  # sessions saved before had none
_PAIR = 2


def _need(well: object, what: str) -> None:
    if not well:
        raise ValueError(what)


def _is_count(value: object) -> bool:
    return checks.is_integer(value) and 0 <= int(str(value)) < blob.MAX_COUNT


def _parts(plain: Any, logical: int) -> Parts:
    """Return the parts that `_plain` made plain. Raises ValueError for anything else."""
    known = isinstance(plain, dict) and _PARTS - _LATER <= set(plain) <= _PARTS
    _need(known, "its parts are not those of a session")
    ids, prefix, ended_by = plain["prefix_ids"], plain["prefix"], plain["ended_by"]
    _need(isinstance(ids, list) and all(map(_is_count, ids)), "its prefix has ids that are none")
    for name in ("n_prefix", "n_generated", "n_evaluated"):
        _need(_is_count(plain[name]), f"its {name} is not a number of tokens")
    _need(plain["n_prefix"] <= len(ids), "more of its prefix stands than there is")
    _need(plain["n_prefix"] + plain["n_generated"] <= logical, "its parts are more than the whole")
    _need(ended_by is None or _is_count(ended_by), "its end is not a token")
    _need(isinstance(plain["suffix_text"], (str, type(None))), "its suffix is not text")
    for name in ("templated", "plain", "merges"):
        _need(isinstance(plain[name], bool), f"its {name} is neither true nor false")
    for name in ("byte_hash", "token_hash", "suffix_class"):
        _need(isinstance(plain.get(name), (str, type(None))), f"its {name} is not text")
    text = None
    if prefix is not None:
        _need(
            isinstance(prefix, list) and _PAIR <= len(prefix) <= _PAIR + 1, "its prefix is not text"
        )
        cache_class = prefix[_PAIR] if len(prefix) > _PAIR else None
        tokens = tuple(ids) if prefix[0] is None else None
        text = PrefixInput(
            text=prefix[0], tokens=tokens, parse_special=prefix[1], cache_class=cache_class
        )
    return Parts(**{**plain, "prefix": text})


def _malformed(reason: object) -> SnapshotError:
    return SnapshotError(
        f"the saved session's header is malformed ({reason}); save it again", reason="header"
    )


def put(session: CoreSession, snapshot: Snapshot) -> None:
    """Give a session that is held and open the state of ``snapshot``.

    Raises `SnapshotError` (corrupt: unchanged; refused by the engine: cleared),
    `ManifestMismatchError` and `ContextOverflowError` (unchanged).
    """
    if not isinstance(snapshot, Snapshot):
        raise checks.refuse("snapshot", snapshot, "a Snapshot; read a file with load(path)")
    note = _opened(snapshot.data)
    own = session.identity if session.changed is None else session.identity_now()
    mismatch = own.mismatch(note["manifest"], strict=True) or own.mismatch(snapshot.manifest)
    if mismatch is not None:
        raise mismatch
    if session.changed is not None:  # what is held is let go of, so it must fit by then
        blob.unpack(snapshot.data)
        n_tokens = n_tokens_of(snapshot.data)
        session.resident.check_fits((), stage="restore", resident=0, more=n_tokens)
    state, parts, tokens = session.state, session.parts, session.resident.wanted()
    try:
        session.begin_anew_if_changed()
        _load(session, snapshot.data, note)
        session.enter(note["state"], note["parts"])
    except SnapshotError as error:
        if error.state_after == "unchanged":
            session.stay(state, parts, tokens)
        elif not len(session.resident.tape):
            session.enter(EMPTY, Parts())
            session.resident.owed = []
        raise
    except BaseException:
        session.stay(state, parts, tokens)
        raise


def _load(session: CoreSession, data: bytes, note: dict[str, Any]) -> None:
    resident = session.resident
    resident.load(data, note["logical"], note["cut"])
    if note["logical"] > len(resident.tape):
        resident.clear()
        error = _malformed("it counts more tokens than it holds")
        error.state_after = "cleared"
        raise error


def write(snapshot: Snapshot, path: str | os.PathLike[str]) -> None:
    """Write the file whole or not at all: a writer that is killed leaves the old file.

    Raises `InvalidInputError` for a folder, or a path in one that is not there, and OSError where
    the disk is full or the folder cannot be written.
    """
    try:
        atomic.write_whole(path, snapshot.data, private=True)
    except (IsADirectoryError, NotADirectoryError, FileNotFoundError) as error:
        allowed = "the path of a file, new or old, in a folder that is there"
        raise checks.refuse("path", os.fsdecode(path), allowed) from error


def read(path: str | os.PathLike[str]) -> Snapshot:
    """Return the snapshot in the file at ``path``.

    Raises `ModelNotFoundError` where there is none, `SnapshotError` for another or damaged file.
    """
    started = time.perf_counter()
    try:
        data = _read_saved(path)
    except FileNotFoundError as error:
        raise ModelNotFoundError(f"there is no saved session at {path}", path=str(path)) from error
    except OSError as error:
        raise SnapshotError(f"{path} cannot be read: {error}", reason="file") from error
    note = _opened(data)
    return Snapshot(
        manifest=note["manifest"],
        data=data,
        resident_tokens=note["logical"],
        elapsed_ms=(time.perf_counter() - started) * 1e3,
    )


def from_bytes(data: bytes) -> Snapshot:
    """Return the snapshot that ``data`` is, whole and undamaged. Raises `SnapshotError`."""
    blob.unpack(data)
    note = _opened(data)
    return Snapshot(manifest=note["manifest"], data=data, resident_tokens=note["logical"])


def _read_saved(path: str | os.PathLike[str]) -> bytes:
    """Return the file if it is as long as its header says. Raises OSError, `SnapshotError`.

    What is larger than the free memory is `OutOfMemoryError`, before it is read.
    """
    with open_regular(path) as file:
        n_bytes = os.fstat(file.fileno()).st_size
        start = file.read(blob.PREFIX_BYTES)
        start += file.read(blob.header_bytes(start))
        blob.check_size(start, n_bytes)
        free = free_bytes()
        if n_bytes > free:
            raise OutOfMemoryError(f"{path} has {n_bytes:,} bytes and {free:,} are free")
        return start + file.read()
