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
from infercore.session.parts import DECODED, EMPTY, PREFIXED, READY, Parts
from infercore.values import checks
from infercore.values.manifest import ContextManifest
from infercore.values.session import PrefixInput, Snapshot

if TYPE_CHECKING:
    from infercore.session.session import CoreSession


def take(session: CoreSession) -> Snapshot:
    """Return the snapshot of a session that is held and open."""
    started = time.perf_counter()
    session.make_whole()
    resident = session.resident
    header = {
        "kind": "session",
        "state": session.state,
        "manifest": session.identity.to_dict(),
        "logical": resident.tape.logical,
        "cut": resident.tape.cut,
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


def _opened(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Return header and payload, the header's values as objects. Raises `SnapshotError`."""
    header, payload, _ = blob.unpack(data)
    blob.require(header, {"kind": "session"})
    try:
        header["manifest"] = ContextManifest.from_dict(header["manifest"])
        header["parts"] = _parts(header["parts"])
        known = header["state"] in (EMPTY, PREFIXED, READY, DECODED)
        counts = [header["logical"], 0 if header["cut"] is None else header["cut"]]
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise _malformed(error) from error
    if not known or not all(checks.is_integer(count) and count >= 0 for count in counts):
        raise _malformed("a value is out of its range")
    return header, payload


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
    header, payload = _opened(snapshot.data)
    mismatch = session.identity.mismatch(header["manifest"], strict=True)
    if mismatch is not None:
        raise mismatch
    try:
        _load(session, payload, header)
    except BaseException:
        if not len(session.resident.tape):
            session.enter(EMPTY, Parts())
            session.resident.owed = []
        raise
    session.enter(header["state"], header["parts"])


def _load(session: CoreSession, payload: bytes, header: dict[str, Any]) -> None:
    resident = session.resident
    resident.load(payload, header["logical"], header["cut"])
    if header["logical"] > len(resident.tape):
        resident.clear()
        error = _malformed("it counts more tokens than it holds")
        error.state_after = "cleared"
        raise error


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
    header, _ = _opened(data)
    return Snapshot(
        manifest=header["manifest"],
        data=data,
        resident_tokens=header["logical"],
        elapsed_ms=(time.perf_counter() - started) * 1e3,
    )
