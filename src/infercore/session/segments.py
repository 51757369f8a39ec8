"""The manifest of what a session holds: identity, hashes, and segments of the text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from infercore.errors import InferCoreError
from infercore.values.manifest import ContextManifest, ManifestSegment, hash_bytes, hash_token_ids

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
        text = parts.prefix.text
        data = bytes_of(parts.prefix_ids, tokenizer) if text is None else text.encode()
        stable = ("prefix", n_prefix, data)
        pieces = _volatile_pieces(parts, volatile, n_generated, tokenizer)
    except InferCoreError:
        return manifest
    return attrs.evolve(
        manifest,
        volatile_byte_hash=hash_bytes(b"".join(data for _, _, data in pieces)),
        segments=_segments([stable, *pieces], tokens, parts),
    )


def _volatile_pieces(
    parts: Parts, volatile: list[int], n_generated: int, tokenizer: Any
) -> list[_Piece]:
    if not parts.plain:
        pieces = [("volatile", len(volatile), bytes_of(volatile, tokenizer))]
    else:
        n_suffix = len(volatile) - n_generated
        generated = bytes_of(volatile[n_suffix:], tokenizer)
        text = parts.suffix_text
        data = bytes_of(volatile[:n_suffix], tokenizer) if text is None else text.encode()
        pieces = [
            ("suffix", n_suffix, data),
            ("generated", n_generated, generated),
        ]
    return [piece for piece in pieces if piece[1] or piece[2]]


def bytes_of(tokens: Sequence[int], tokenizer: Any) -> bytes:
    """Return the bytes of tokens, control tokens as their text."""
    return b"".join(tokenizer.token_bytes(token) for token in tokens)


def _segments(
    pieces: Sequence[_Piece], tokens: Sequence[int], parts: Parts
) -> tuple[ManifestSegment, ...]:
    """Return contiguous segments of ``tokens``; the first is stable, the others are volatile."""
    classes = {
        "prefix": None if parts.prefix is None else parts.prefix.cache_class,
        "suffix": parts.suffix_class,
    }
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
                byte_hash=hash_bytes(data),
                token_hash=hash_token_ids(tokens[n_tokens : n_tokens + count]),
                cache_class=classes.get(name),
            )
        )
        n_bytes += len(data)
        n_tokens += count
    return tuple(segments)
