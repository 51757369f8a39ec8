"""The manifest of what a session holds: identity, hashes, and segments of the text."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import attrs

from infercore.errors import InferCoreError
from infercore.values.manifest import ContextManifest, ManifestSegment, hash_token_ids

if TYPE_CHECKING:
    from collections.abc import Sequence

    from infercore.session.parts import Parts

_Piece = tuple[str, int, bytes]  # name, number of tokens, text as UTF-8


def manifest_of(
    identity: ContextManifest, parts: Parts, tokens: Sequence[int], n_generated: int, tokenizer: Any
) -> ContextManifest:
    """Return ``identity`` with the hashes and segments of the logical context ``tokens``.

    The stable segment is the prefix as it was given. A token that a merge over the seam made is
    counted with the segment it ends in. Generated text is the bytes of its tokens, control
    tokens as their text. Volatile hashes and segments are left out where there is no prefix, and
    those that need the tokenizer of a model that is closed.
    """
    manifest = attrs.evolve(
        identity, stable_byte_hash=parts.byte_hash, stable_token_hash=parts.token_hash
    )
    if parts.prefix is None:
        return manifest
    n_prefix = min(parts.n_prefix, len(tokens))
    volatile = list(tokens[n_prefix:])
    manifest = attrs.evolve(manifest, volatile_token_hash=hash_token_ids(volatile))
    try:
        pieces = _volatile_pieces(parts, volatile, n_generated, tokenizer)
    except InferCoreError:
        return manifest
    stable = ("prefix", n_prefix, parts.prefix.text.encode())
    return attrs.evolve(
        manifest,
        volatile_byte_hash=_sha256(b"".join(data for _, _, data in pieces)),
        segments=_segments([stable, *pieces]),
    )


def _volatile_pieces(
    parts: Parts, volatile: list[int], n_generated: int, tokenizer: Any
) -> list[_Piece]:
    if not parts.plain:
        pieces = [("volatile", len(volatile), _bytes_of(volatile, tokenizer))]
    else:
        n_suffix = len(volatile) - n_generated
        generated = _bytes_of(volatile[n_suffix:], tokenizer)
        pieces = [
            ("suffix", n_suffix, parts.suffix_text.encode()),
            ("generated", n_generated, generated),
        ]
    return [piece for piece in pieces if piece[1] or piece[2]]


def _bytes_of(tokens: Sequence[int], tokenizer: Any) -> bytes:
    return b"".join(tokenizer.token_bytes(token) for token in tokens)


def _segments(pieces: Sequence[_Piece]) -> tuple[ManifestSegment, ...]:
    """Return contiguous segments; the first is stable, the others are volatile."""
    segments = []
    n_bytes = n_tokens = 0
    for i, (name, count, data) in enumerate(pieces):
        segments.append(
            ManifestSegment(
                name=name,
                kind="volatile" if i else "stable",
                byte_start=n_bytes,
                byte_end=n_bytes + len(data),
                token_start=n_tokens,
                token_end=n_tokens + count,
                byte_hash=_sha256(data),
            )
        )
        n_bytes += len(data)
        n_tokens += count
    return tuple(segments)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
