from __future__ import annotations

import hashlib
import json
import zlib

import pytest

from infercore.engine import blob
from infercore.errors import SnapshotError

HEADER = {"kind": "state", "n": 3}


@pytest.mark.parametrize(("payload", "logits"), [(b"", b""), (b"payload", b"logi"), (b"p", b"")])
def test_what_is_packed_comes_back(payload, logits):
    data = blob.pack(HEADER, payload, logits)
    for given in (data, bytearray(data), memoryview(data)):
        header, found, row = blob.unpack(given)
        assert (found, row) == (payload, logits)
        assert header.items() >= HEADER.items()


def test_every_changed_byte_and_every_cut_is_seen():
    data = blob.pack(HEADER, b"payload" * 3, b"logi")
    for i in range(len(data)):
        changed = bytearray(data)
        changed[i] ^= 0x41
        with pytest.raises(SnapshotError):
            blob.unpack(bytes(changed))
        with pytest.raises(SnapshotError):
            blob.unpack(data[:i])
    with pytest.raises(SnapshotError):
        blob.unpack(data + b"\0")


@pytest.mark.parametrize("data", [None, "text", 5, [1], b"", b"x" * 200])
def test_other_things_are_refused(data):
    with pytest.raises(SnapshotError) as caught:
        blob.unpack(data)
    assert caught.value.reason == "format"
    assert caught.value.state_after == "unchanged"


def crafted(header):
    """Return a blob with any header and a right checksum."""
    text = json.dumps(header).encode()
    start = blob.MAGIC + len(text).to_bytes(8, "little") + text
    start += zlib.crc32(start).to_bytes(4, "little")
    return start + zlib.crc32(start).to_bytes(4, "little")


WHOLE = {"format_version": 2, "payload_bytes": 0, "logits_bytes": 0}


@pytest.mark.parametrize(
    "header",
    [
        [], 3, {}, {**WHOLE, "payload_bytes": "7"}, {**WHOLE, "payload_bytes": -40},
        {**WHOLE, "payload_bytes": 9}, {**WHOLE, "logits_bytes": 2**70},
        {**WHOLE, "payload_bytes": -5, "logits_bytes": 5},
    ],
)  # fmt: skip
def test_a_senseless_header_is_refused(header):
    with pytest.raises(SnapshotError):
        blob.unpack(crafted(header))


def test_a_header_of_lists_in_lists_is_refused():
    text = b"[" * 200_000
    start = blob.MAGIC + len(text).to_bytes(8, "little") + text
    start += zlib.crc32(start).to_bytes(4, "little")
    with pytest.raises(SnapshotError):
        blob.unpack(start + zlib.crc32(start).to_bytes(4, "little"))


def test_a_view_with_gaps_and_one_that_was_released_are_refused():
    data = blob.pack(HEADER, b"payload")
    released = memoryview(data)
    released.release()
    for view in (memoryview(data)[::2], released):
        with pytest.raises(SnapshotError) as caught:
            blob.unpack(view)
        assert caught.value.reason == "format"


def test_another_version_is_named():
    with pytest.raises(SnapshotError, match="version 3") as caught:
        blob.unpack(crafted({**WHOLE, "format_version": 3}))
    assert caught.value.reason == "version"


def test_the_version_before_is_named_too():
    """It had one SHA-256 at the end, and no checksum of its header."""
    head = {"format_version": 1, "payload_bytes": 40, "logits_bytes": 0, "sealed": False}
    text = json.dumps(head).encode()
    old = blob.MAGIC + len(text).to_bytes(8, "little") + text + b"p" * 40
    with pytest.raises(SnapshotError, match="version 1") as caught:
        blob.unpack(old + hashlib.sha256(old).digest())
    assert caught.value.reason == "version"


def test_the_header_is_read_without_the_rest():
    data = bytearray(blob.pack(HEADER, b"payload", b"logi"))
    data[-6] ^= 1
    assert blob.read_header(data).items() >= HEADER.items()
    with pytest.raises(SnapshotError):
        blob.unpack(data)
    data[20] ^= 1
    with pytest.raises(SnapshotError):
        blob.read_header(data)


def test_the_payload_is_aligned():
    for n in range(40):
        data = blob.pack({"name": "n" * n}, b"payload")
        assert data.rindex(b"payload") % 16 == 0


def test_what_is_required_is_compared_field_by_field():
    blob.require({"a": 1, "b": 2}, {"a": 1})
    with pytest.raises(SnapshotError, match="b") as caught:
        blob.require({"a": 1, "b": 2}, {"a": 1, "b": 3})
    assert caught.value.reason == "b"
