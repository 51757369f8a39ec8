"""The format of saved state: a header that can be checked before the engine sees the payload.

``magic (8) | header length (8, little-endian) | header (JSON) | payload | logits (float32)
| SHA-256 (32)``

The digest covers all before it; of a payload that is such a blob itself (``sealed``) only what
stands around it, as hashing it twice would double the time.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from infercore.errors import SnapshotError

MAGIC = b"infcstat"
FORMAT_VERSION = 1
MAX_COUNT = 2**31
_DIGEST_BYTES = 32
_PREFIX_BYTES = 16


def pack(
    header: dict[str, Any], payload: bytes, logits: bytes = b"", *, sealed: bool = False
) -> bytes:
    """Return the blob of ``payload`` and ``logits`` under ``header``."""
    head = {
        **header,
        "format_version": FORMAT_VERSION,
        "payload_bytes": len(payload),
        "logits_bytes": len(logits),
        "sealed": sealed,
    }
    text = json.dumps(head).encode()
    start = MAGIC + len(text).to_bytes(8, "little") + text
    return b"".join([start, payload, logits, _digest(start, payload, logits, sealed=sealed)])


def _digest(*parts: bytes | memoryview, sealed: bool) -> bytes:
    digest = hashlib.sha256()
    for i, part in enumerate(parts):
        if not (sealed and i == 1):
            digest.update(part)
    return digest.digest()


def unpack(data: bytes) -> tuple[dict[str, Any], bytes, bytes]:
    """Return header, payload and logits of a blob. Raises `SnapshotError` for anything else."""
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise _error(f"is a {type(data).__name__}, not bytes", "format")
    view = memoryview(data)
    if len(view) < _PREFIX_BYTES + _DIGEST_BYTES or view[:8] != MAGIC:
        raise _error("does not start as saved state does", "format")
    start = _PREFIX_BYTES + int.from_bytes(view[8:_PREFIX_BYTES], "little")
    end = len(view) - _DIGEST_BYTES
    header = _header(view[_PREFIX_BYTES:start]) if start <= end else None
    if header is None:
        raise _truncated()
    middle = start + header["payload_bytes"]
    whole = middle + header["logits_bytes"] == end
    parts = (view[:start], view[start:middle], view[middle:end])
    if not whole or _digest(*parts, sealed=header["sealed"]) != view[end:]:
        raise _truncated()
    if header["format_version"] != FORMAT_VERSION:
        raise _error(
            f"has format version {header['format_version']}, this is {FORMAT_VERSION}", "version"
        )
    return header, bytes(parts[1]), bytes(parts[2])


_HEADER_TYPES = {
    "format_version": int,
    "payload_bytes": int,
    "logits_bytes": int,
    "sealed": bool,
}


def _header(text: memoryview) -> dict[str, Any] | None:
    """Return the header, None where it was damaged."""
    try:
        header = json.loads(bytes(text))
    except ValueError:
        return None
    if not isinstance(header, dict):
        return None
    if any(not isinstance(header.get(name), kind) for name, kind in _HEADER_TYPES.items()):
        return None
    return header


def _truncated() -> SnapshotError:
    return _error("is truncated or was changed (its checksum differs)", "checksum")


def require(header: dict[str, Any], expected: dict[str, Any]) -> None:
    """Raise `SnapshotError` for the first field of ``expected`` that the header has otherwise."""
    for field, value in expected.items():
        if header.get(field) != value:
            raise _error(f"has {field} {header.get(field)!r}, this context {value!r}", field)


def check_held(header: dict[str, Any], n_seq_max: int | None) -> None:
    """Raise `SnapshotError` unless the header says what is held as `pack`'s callers write it.

    ``n_seq_max`` bounds the ids of the sequences; None asks for exactly one, of any id.
    """
    sequences, row_of = header.get("sequences"), header.get("row_of")
    well = (
        _is_count(header.get("n_cells"))
        and _are_counts(row_of)
        and isinstance(sequences, list)
        and all(_is_sequence(item) for item in sequences)
    )
    if not well or not isinstance(sequences, list):
        raise _error("has a header that does not say what is held", "header")
    ids = [item["seq_id"] for item in sequences]
    known = len(ids) == 1 if n_seq_max is None else all(i < n_seq_max for i in ids)
    if not known or len(set(ids)) != len(ids):
        raise _error(f"holds the sequences {ids}, which do not fit this call", "header")


def check_row(logits: bytes, n_vocab: int) -> None:
    """Raise `SnapshotError` unless ``logits`` is a row of float32 [n_vocab], or empty."""
    if len(logits) not in {0, 4 * n_vocab}:
        raise _error(f"has {len(logits)} bytes of logits, a row is {4 * n_vocab}", "logits")


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < MAX_COUNT


def _are_counts(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_count, value))


def _is_sequence(item: object) -> bool:
    if not isinstance(item, dict) or not _is_count(item.get("seq_id")):
        return False
    runs, cells, tokens = (item.get(name) for name in ("runs", "cells", "tokens"))
    if not isinstance(runs, list) or not isinstance(cells, list) or not isinstance(tokens, list):
        return False
    if not all(_are_counts(run) and len(run) == 2 for run in runs):  # noqa: PLR2004
        return False
    if not (_are_counts(cells) and _are_counts(tokens)):
        return False
    return len(cells) == len(runs) and sum(n for _, n in runs) == len(tokens)


def _error(what: str, reason: str) -> SnapshotError:
    return SnapshotError(f"the saved state {what}; save it anew from this model", reason=reason)
