"""The format of saved state: a header that can be checked before the engine sees the payload.

``magic (8) | header length (8, little-endian) | header (JSON) | CRC-32 (4) | payload
| logits (float32) | CRC-32 (4)``

Each checksum covers all before it, so that a header can be trusted without reading the rest.
They are there against damage, for which CRC-32 serves as well as a digest in half the time: the
payload is some 25 KB a token. Version 1 had one SHA-256 at the end.
"""

from __future__ import annotations

import json
import zlib
from typing import TYPE_CHECKING, Any

from infercore.errors import SnapshotError

if TYPE_CHECKING:
    from typing_extensions import Buffer

MAGIC = b"infcstat"
FORMAT_VERSION = 2
MAX_COUNT = 2**31
MAX_BYTES = 2**62
_CHECKSUM_BYTES = 4
PREFIX_BYTES = 16
MAX_HEADER_BYTES = 2**28
_PAIR = 2
_ALIGNMENT_BYTES = 16  # of the payload, by blanks behind the header: NumPy is slow without


def pack(header: dict[str, Any], payload: Buffer, logits: Buffer = b"") -> bytes:
    """Return the blob of ``payload`` and ``logits`` under ``header``; each is copied once."""
    body, row = memoryview(payload).cast("B"), memoryview(logits).cast("B")
    head = {
        **header,
        "format_version": FORMAT_VERSION,
        "payload_bytes": len(body),
        "logits_bytes": len(row),
    }
    text = json.dumps(head).encode()
    text += b" " * (-(PREFIX_BYTES + len(text) + _CHECKSUM_BYTES) % _ALIGNMENT_BYTES)
    start = MAGIC + len(text).to_bytes(8, "little") + text
    first = _checksum(start)
    return b"".join([start, first, body, row, _checksum(start, first, body, row)])


def _checksum(*parts: bytes | memoryview) -> bytes:
    value = 0
    for part in parts:
        value = zlib.crc32(part, value)
    return value.to_bytes(_CHECKSUM_BYTES, "little")


def unpack(data: Buffer) -> tuple[dict[str, Any], memoryview, memoryview]:
    """Return header, payload and logits of a blob, the last two as views of ``data``.

    Raises `SnapshotError` for anything else.
    """
    header, view, start = _opened(data)
    end = len(view) - _CHECKSUM_BYTES
    middle = start + header["payload_bytes"]
    whole = start <= middle <= end and middle + header["logits_bytes"] == end
    if not whole or _checksum(view[:end]) != view[end:]:
        raise _truncated()
    return header, view[start:middle], view[middle:end]


def read_header(data: Buffer) -> dict[str, Any]:
    """Return the header of a blob, without looking at the rest. Raises `SnapshotError`."""
    return _opened(data)[0]


def header_bytes(start: Buffer) -> int:
    """Return how many bytes the header and its checksum take behind these first `PREFIX_BYTES`.

    Raises `SnapshotError` where no header is that long.
    """
    view = memoryview(start)
    n_bytes = int.from_bytes(view[len(MAGIC) : PREFIX_BYTES], "little") + _CHECKSUM_BYTES
    if n_bytes > MAX_HEADER_BYTES:
        raise _truncated()
    return n_bytes


def _rest_bytes(start: Buffer) -> int:
    """Return how many bytes follow a header. Raises `SnapshotError` where ``start`` is none."""
    header = _opened(start)[0]
    return int(header["payload_bytes"]) + int(header["logits_bytes"]) + _CHECKSUM_BYTES


def _opened(data: Buffer) -> tuple[dict[str, Any], memoryview, int]:
    """Return the header, all bytes, and where the payload starts."""
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise _error(f"is a {type(data).__name__}, not bytes", "format")
    try:
        view = memoryview(data).cast("B")
    except (TypeError, ValueError) as error:  # with gaps, or released
        raise _error("cannot be read from one end to the other", "format") from error
    if len(view) < PREFIX_BYTES + 2 * _CHECKSUM_BYTES or view[:8] != MAGIC:
        raise _error("does not start like saved state", "format")
    end = PREFIX_BYTES + int.from_bytes(view[8:PREFIX_BYTES], "little")
    start = end + _CHECKSUM_BYTES
    header = _header(view[PREFIX_BYTES:end]) if start <= len(view) else None
    if header is None:
        raise _truncated()
    if header["format_version"] != FORMAT_VERSION:
        raise _error(
            f"has format version {header['format_version']}, this is {FORMAT_VERSION}", "version"
        )
    if _checksum(view[:end]) != view[end:start]:
        raise _truncated()
    return header, view, start


_COUNTS = ("format_version", "payload_bytes", "logits_bytes")


def _header(text: memoryview) -> dict[str, Any] | None:
    """Return the header, None where it was damaged."""
    try:
        header = json.loads(bytes(text))
    except (ValueError, RecursionError):  # the latter of lists in lists
        return None
    if not isinstance(header, dict):
        return None
    counts = [header.get(name) for name in _COUNTS]
    if any(type(count) is not int or not 0 <= count < MAX_BYTES for count in counts):
        return None
    return header


def check_size(start: Buffer, n_bytes: int) -> None:
    """Raise `SnapshotError` unless a blob that starts so, header and all, has ``n_bytes``."""
    if len(memoryview(start)) + _rest_bytes(start) != n_bytes:
        raise _truncated()


def _truncated() -> SnapshotError:
    return _error("is truncated or was changed (its checksum differs)", "checksum")


def require(header: dict[str, Any], expected: dict[str, Any]) -> None:
    """Raise `SnapshotError` for the first field of ``expected`` that the header has otherwise."""
    for field, value in expected.items():
        if header.get(field) != value:
            raise _error(f"has {field} {header.get(field)!r}, this context {value!r}", field)


def check_held(header: dict[str, Any], n_seq_max: int | None, n_vocab: int) -> None:
    """Raise `SnapshotError` unless the header says what is held as `pack`'s callers write it.

    ``n_seq_max`` bounds the ids of the sequences; None asks for exactly one, of any id.
    """
    sequences, row_of = header.get("sequences"), header.get("row_of")
    well = (
        _are_counts(row_of)
        and isinstance(sequences, list)
        and all(_is_sequence(item, n_vocab) for item in sequences)
    )
    if not well or not isinstance(sequences, list):
        raise _error("has a header that does not say what is held", "header")
    ids = [item["seq_id"] for item in sequences]
    known = len(ids) == 1 if n_seq_max is None else all(i < n_seq_max for i in ids)
    if not known or len(set(ids)) != len(ids):
        raise _error(f"holds the sequences {ids}, which do not fit this call", "header")


def check_row(logits: memoryview, n_vocab: int) -> None:
    """Raise `SnapshotError` unless ``logits`` is a row of float32 [n_vocab], or empty."""
    if len(logits) not in {0, 4 * n_vocab}:
        raise _error(f"has {len(logits)} bytes of logits, a row is {4 * n_vocab}", "logits")


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < MAX_COUNT


def _are_counts(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_count, value))


def _is_held(value: object, n_vocab: int) -> bool:
    """Whether it is a token, or the negative number that stands for a row of numbers."""
    return type(value) is int and -MAX_COUNT <= value < n_vocab


def _is_run(value: object) -> bool:
    """Whether it is a position and a length, which is not a number of tokens without one."""
    return isinstance(value, list) and len(value) == _PAIR and _are_counts(value) and value[1] > 0


def _is_sequence(item: object, n_vocab: int) -> bool:
    if not isinstance(item, dict) or not _is_count(item.get("seq_id")):
        return False
    runs, cells, tokens = (item.get(name) for name in ("runs", "cells", "tokens"))
    if not isinstance(runs, list) or not isinstance(cells, list) or not isinstance(tokens, list):
        return False
    if not all(map(_is_run, runs)):
        return False
    if not _are_counts(cells) or not all(_is_held(token, n_vocab) for token in tokens):
        return False
    return len(cells) == len(runs) and sum(n for _, n in runs) == len(tokens)


def _error(what: str, reason: str) -> SnapshotError:
    return SnapshotError(f"the saved state {what}; save it again from this model", reason=reason)
