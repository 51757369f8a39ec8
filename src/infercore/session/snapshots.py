"""A session's state as a value or a file, and branches of a session."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from infercore.engine import blob
from infercore.errors import ModelNotFoundError, SnapshotError
from infercore.session.parts import EMPTY, Parts
from infercore.values import checks
from infercore.values.manifest import ContextManifest
from infercore.values.session import PrefixInput, Snapshot

if TYPE_CHECKING:
    from infercore.session.session import CoreSession


def take(session: CoreSession) -> Snapshot:
    """Return the snapshot of a session that is held and open."""
    started = time.perf_counter()
    resident = session.resident
    header = {
        "kind": "session",
        "state": session.state,
        "manifest": session.identity.to_dict(),
        "logical": resident.tape.logical,
        "parts": _plain(session.parts),
    }
    payload = session.context.save_sequence(resident.seq_id)
    data = blob.pack(header, payload, sealed=True)
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


def put(session: CoreSession, snapshot: Snapshot) -> None:
    """Give a session that is held and open the state of ``snapshot``.

    Raises `SnapshotError` (corrupt: unchanged; refused by the engine: cleared),
    `ManifestMismatchError` and `ContextOverflowError` (unchanged).
    """
    if not isinstance(snapshot, Snapshot):
        raise checks.refuse("snapshot", snapshot, "a Snapshot; read a file with load(path)")
    header, payload, _ = blob.unpack(snapshot.data)
    blob.require(header, {"kind": "session"})
    mismatch = session.identity.mismatch(
        ContextManifest.from_dict(header["manifest"]), strict=True
    )
    if mismatch is not None:
        raise mismatch
    resident = session.resident
    try:
        session.guarded(lambda: resident.load(payload, header["logical"]))
    except SnapshotError as error:
        if error.state_after == "cleared":
            session.enter(EMPTY, Parts())
        raise
    session.enter(header["state"], _parts(header["parts"]))


def write(snapshot: Snapshot, path: str | os.PathLike[str]) -> None:
    """Write the file whole or not at all: a writer that is killed leaves the old file.

    Raises OSError where the disk is full or the folder cannot be written.
    """
    target = Path(path)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(snapshot.data)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise


def read(path: str | os.PathLike[str]) -> Snapshot:
    """Return the snapshot in the file at ``path``.

    Raises `ModelNotFoundError` where there is none, `SnapshotError` for another or damaged file.
    """
    started = time.perf_counter()
    try:
        data = Path(path).read_bytes()
    except FileNotFoundError as error:
        raise ModelNotFoundError(f"there is no saved session at {path}", path=str(path)) from error
    header, _, _ = blob.unpack(data)
    blob.require(header, {"kind": "session"})
    return Snapshot(
        manifest=ContextManifest.from_dict(header["manifest"]),
        data=data,
        resident_tokens=header["logical"],
        elapsed_ms=(time.perf_counter() - started) * 1e3,
    )
