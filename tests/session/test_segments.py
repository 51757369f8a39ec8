"""The manifest's segments: contiguous, stable before volatile, hashed, covering the text."""

from __future__ import annotations

import hashlib
from typing import Any

import infercore as ic
from infercore.values.manifest import hash_token_ids

PREFIX, SUFFIX = "Once upon the é", " time \U0001f600"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def manifest_of(session: Any) -> ic.ContextManifest:
    manifest: ic.ContextManifest = session.explain_context().manifest
    for a, b in zip(manifest.segments, manifest.segments[1:], strict=False):
        assert (a.byte_end, a.token_end) == (b.byte_start, b.token_start)
    return manifest


def test_of_prefix_suffix_and_what_was_generated(toy: Any, greedy: Any) -> None:
    session = toy.new_session(n_ctx=128)
    assert manifest_of(session).segments == ()
    session.ensure_prefix(PREFIX)
    session.prefill_suffix(SUFFIX)
    generated = greedy(session, 5)
    text = b"".join(map(toy.tokenizer.token_bytes, generated))
    manifest, n = manifest_of(session), len(toy.tokenizer.encode(PREFIX))
    names = [(segment.name, segment.kind) for segment in manifest.segments]
    assert names == [("prefix", "stable"), ("suffix", "volatile"), ("generated", "volatile")]
    stable, suffix, made = manifest.segments
    assert (stable.byte_start, stable.byte_end) == (0, len(PREFIX.encode()))
    assert (stable.token_start, stable.token_end) == (0, n)
    assert stable.byte_hash == manifest.stable_byte_hash == sha256(PREFIX.encode())
    assert suffix.byte_hash == sha256(SUFFIX.encode())
    assert made.byte_hash == sha256(text)
    assert made.token_end == session.context.n_past()
    assert manifest.volatile_byte_hash == sha256(SUFFIX.encode() + text)
    assert manifest.volatile_token_hash == hash_token_ids(session.context.tokens()[n:])
    assert ic.ContextManifest.from_dict(manifest.to_dict()) == manifest
    assert manifest.digest == session.identity.digest


def test_of_a_prefix_alone(toy: Any) -> None:
    session = toy.new_session(n_ctx=128)
    session.ensure_prefix(PREFIX)
    manifest = manifest_of(session)
    assert [segment.name for segment in manifest.segments] == ["prefix"]
    assert manifest.volatile_byte_hash == sha256(b"")


def test_what_is_no_longer_one_text_is_told_by_its_tokens(toy: Any, greedy: Any) -> None:
    session = toy.new_session(n_ctx=128)
    session.ensure_prefix(PREFIX)
    greedy(session, 3)
    session.prefill_suffix(ic.SuffixInput(text=" and", mode="append"))
    held = session.context.tokens()[len(toy.tokenizer.encode(PREFIX)) :]
    volatile = manifest_of(session).segments[1]
    assert volatile.name == "volatile"
    assert volatile.byte_hash == sha256(b"".join(map(toy.tokenizer.token_bytes, held)))


def test_of_a_truncated_suffix(toy: Any) -> None:
    session = toy.new_session(n_ctx=32, overflow="truncate")
    session.ensure_prefix("Once")
    status = session.prefill_suffix("x" * 30 + "yz")
    assert status.truncated_tokens == (ord("x"),) * 6
    manifest = manifest_of(session)
    assert manifest.volatile_byte_hash == sha256(b"x" * 24 + b"yz")
    assert manifest.segments[-1].token_end == session.context.n_past()


def test_a_closed_session_still_tells_what_it_can(toy: Any, greedy: Any) -> None:
    session = toy.new_session(n_ctx=64)
    session.ensure_prefix(PREFIX)
    greedy(session, 3)
    session.close()
    assert session.explain_context().manifest.stable_byte_hash == sha256(PREFIX.encode())
