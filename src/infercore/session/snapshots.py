"""A session's state as a value or a file, and branches of a session."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from infercore.engine import atomic, blob
from infercore.errors import ModelNotFoundError, SnapshotError
from infercore.session.parts import DECODED, EMPTY, PREFIXED, READY, Parts
from infercore.values import checks
from infercore.values.manifest import ContextManifest
from infercore.values.session import PrefixInput, Snapshot

if TYPE_CHECKING:
    import os

    from infercore.session.session import CoreSession


def take(session: CoreSession) -> Snapshot:
    """Return the snapshot of a session that is held and open."""
    started = time.perf_counter()
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
    plain["prefix"] = None if prefix is None else [prefix.text, prefix.parse_special]
    return plain


def _parts(plain: dict[str, Any]) -> Parts:
    prefix = plain.pop("prefix")
    parts = Parts(**plain)
    if prefix is not None:
        parts.prefix = PrefixInput(text=prefix[0], parse_special=prefix[1])
    return parts


def _opened(data: bytes) -> dict[str, Any]:
    """Return what a session noted in its saved sequence, as objects. Raises `SnapshotError`.

    Of the rest nothing is looked at: the context does so when it restores it.
    """
    note: dict[str, Any] | None = blob.read_header(data).get("note")
    if note is None:
        raise SnapshotError(
            "these bytes are a context's, not a session's; give them to the context", reason="kind"
        )
    try:
        note["manifest"] = ContextManifest.from_dict(note["manifest"])
        note["parts"] = _parts(note["parts"])
        known = note["state"] in (EMPTY, PREFIXED, READY, DECODED)
        counts = [note["logical"], 0 if note["cut"] is None else note["cut"]]
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise _malformed(error) from error
    if not known or not all(checks.is_integer(count) and count >= 0 for count in counts):
        raise _malformed("a value is out of its range")
    return note


def _malformed(reason: object) -> SnapshotError:
    return SnapshotError(
        f"the saved session's header is malformed ({reason}); save it anew", reason="header"
    )


def put(session: CoreSession, snapshot: Snapshot) -> None:
    """Give a session that is held and open the state of ``snapshot``.

    Raises `SnapshotError` (corrupt: unchanged; refused by the engine: cleared),
    `ManifestMismatchError` and `ContextOverflowError` (unchanged).
    """
    if not isinstance(snapshot, Snapshot):
        raise checks.refuse("snapshot", snapshot, "a Snapshot; read a file with load(path)")
    note = _opened(snapshot.data)
    mismatch = session.identity.mismatch(note["manifest"], strict=True)
    if mismatch is not None:
        raise mismatch
    try:
        _load(session, snapshot.data, note)
    except BaseException:
        if not len(session.resident.tape):
            session.enter(EMPTY, Parts())
            session.resident.owed = []
        raise
    session.enter(note["state"], note["parts"])


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

    Raises OSError where the disk is full or the folder cannot be written.
    """
    atomic.write_whole(path, snapshot.data)


def read(path: str | os.PathLike[str]) -> Snapshot:
    """Return the snapshot in the file at ``path``.

    Raises `ModelNotFoundError` where there is none, `SnapshotError` for another or damaged file.
    """
    started = time.perf_counter()
    try:
        data = Path(path).read_bytes()
    except FileNotFoundError as error:
        raise ModelNotFoundError(f"there is no saved session at {path}", path=str(path)) from error
    note = _opened(data)
    return Snapshot(
        manifest=note["manifest"],
        data=data,
        resident_tokens=note["logical"],
        elapsed_ms=(time.perf_counter() - started) * 1e3,
    )
