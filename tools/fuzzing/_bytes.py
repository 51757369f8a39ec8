"""Damage: bytes changed, cut, repeated, and numbers that are read as counts and sizes."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from random import Random

NUMBERS = (
    0, 1, 2, 3, 7, 8, 9, 10, 15, 16, 26, 27, 28, 30, 31, 32, 63, 64, 127, 128, 255, 256, 2**15,
    2**16, 2**24, 2**31 - 1, 2**31, 2**32 - 1, 2**33, 2**62, 2**63, 2**64 - 1,
)  # fmt: skip


def replaced(data: bytes, at: int, piece: bytes) -> bytes:
    """Return ``data`` with other bytes at ``at``."""
    return data[:at] + piece + data[at + len(piece) :]


def damaged(data: bytes, random: Random, start: int = 0, end: int | None = None) -> bytes:
    """Return ``data`` with up to four changes in [start, end)."""
    changed = bytearray(data)
    for _ in range(random.randint(1, 4)):
        last = min(len(changed), len(data) if end is None else end)
        if last <= start:
            break
        _change(changed, random, random.randrange(start, last))
    return bytes(changed)


def _change(data: bytearray, random: Random, at: int) -> None:
    kind = random.random()
    if kind < 0.35:
        data[at] ^= 1 << random.randrange(8)
    elif kind < 0.5:
        data[at] = random.randrange(256)
    elif kind < 0.8:
        layout = random.choice(("<B", "<H", "<I", "<Q", "<f"))
        value = random.choice(NUMBERS)
        size = struct.calcsize(layout)
        if layout == "<f":
            packed = struct.pack("<f", random.choice((0.0, -1.0, 1e38, float("nan"), float("inf"))))
        else:
            packed = struct.pack(layout, value % 256**size)
        data[at : at + size] = packed
    elif kind < 0.87:
        del data[at : at + random.choice((1, 4, 8, 32, 1000))]
    elif kind < 0.94:
        piece = data[at : at + random.choice((1, 4, 8, 32))]
        data[at:at] = piece
    else:
        del data[at:]
