"""Prefixes as chains of hashes: each stands for a block of tokens and all that is before it."""

from __future__ import annotations

from array import array
from hashlib import blake2b, sha256
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

BLOCK_TOKENS = 64
_BYTES = 8


def blocks_of(namespace: str | bytes, tokens: Sequence[int]) -> list[bytes]:
    """Return a hash for each whole block of ``tokens``; equal beginnings have equal hashes.

    ``namespace`` is that of a session, or its SHA-256: nothing is equal across two of them.
    """
    found = []
    last = sha256(namespace.encode()).digest() if isinstance(namespace, str) else namespace
    for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        block = array("q", tokens[start : start + BLOCK_TOKENS]).tobytes()
        last = blake2b(last + block, digest_size=_BYTES).digest()
        found.append(last)
    return found


def blocks_held(prefixes: Iterable[tuple[bytes, Sequence[int]]]) -> list[bytes]:
    """Return the hashes of all blocks in `SessionPool.held`, each once."""
    found: dict[bytes, None] = {}
    for namespace, tokens in prefixes:
        found.update(dict.fromkeys(blocks_of(namespace, tokens)))
    return list(found)
