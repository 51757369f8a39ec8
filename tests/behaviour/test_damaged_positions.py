"""A saved state with a position that no token has leaves nothing behind."""

from __future__ import annotations

import contextlib
import struct
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import infercore as ic
from infercore.engine import blob

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TEXT, OTHER = [5, 6, 7, 8, 9], [30, 31, 32]
REACH = 500  # bytes in which the engines keep positions


def damaged(data: memoryview) -> Iterator[bytes]:
    """Yield ``data`` with each number at its start changed, and right checksums."""
    header, payload, logits = blob.unpack(data)
    kept = {k: v for k, v in header.items() if k not in {"payload_bytes", "logits_bytes"}}
    for at in range(0, min(REACH, len(payload) - 8), 4):
        for value in (-1, -5, 2**31 - 1):
            changed = bytearray(payload)
            struct.pack_into("<i", changed, at, value)
            yield blob.pack(kept, bytes(changed), logits)


@pytest.mark.parametrize("whole", [True, False])
def test_a_damaged_position_spoils_nothing(new_context: Callable[..., Any], *, whole: bool) -> None:
    context = new_context(n_ctx=64)
    context.decode(OTHER)
    row = context.logits().copy()
    context.clear()
    context.decode(TEXT)
    saved = context.save_state() if whole else context.save_sequence(0)
    for data in damaged(memoryview(saved)):
        with contextlib.suppress(ic.SnapshotError):
            context.load_state(data) if whole else context.load_sequence(0, data)
        context.seq_remove(-1)
        context.decode(OTHER)
        assert np.abs(context.logits() - row).max() <= context.tolerance
        context.seq_remove(-1)
