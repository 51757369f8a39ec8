"""Hashes and identities."""

from __future__ import annotations

import json

import pytest

import infercore as ic
from infercore.values.manifest import IDENTITY_FIELDS, hash_text

VECTORS = [
    ([1, 2, 3], "e2e2033ae7e19d680599d4eb0a1359a2b48ec5baac75066c317fbf85159c54ef"),
    ([], "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"),
]


@pytest.mark.parametrize(("tokens", "digest"), VECTORS)
def test_hash_of_token_ids_has_the_published_values(tokens: list[int], digest: str) -> None:
    assert ic.hash_token_ids(tokens) == digest


def test_negative_ids_wrap_as_twos_complement() -> None:
    assert ic.hash_token_ids([-1]) == ic.hash_token_ids([2**64 - 1])


def test_hash_of_text_is_that_of_its_utf8_bytes() -> None:
    assert hash_text("é") == hash_text(b"\xc3\xa9".decode())
    assert hash_text("") == VECTORS[1][1]


@pytest.mark.parametrize("field", IDENTITY_FIELDS)
def test_each_identity_field_is_compared_and_digested(field: str) -> None:
    value = {"add_bos": True, "adapters": ("a",)}.get(field, "one")
    other = {"add_bos": False, "adapters": ("b",)}.get(field, "two")
    own = ic.ContextManifest(**{field: value})
    mismatch = own.mismatch(ic.ContextManifest(**{field: other}))
    assert mismatch is not None
    assert (mismatch.field, mismatch.expected, mismatch.actual) == (field, other, value)
    assert own.digest != ic.ContextManifest(**{field: other}).digest


def test_text_hashes_are_no_identity() -> None:
    own = ic.ContextManifest(backend="b", stable_byte_hash="x")
    stated = ic.ContextManifest(stable_byte_hash="y", volatile_token_hash="z")  # noqa: S106
    assert own.mismatch(stated) is None
    assert own.digest == ic.ContextManifest(backend="b").digest


def test_json_round_trip_with_segments() -> None:
    segment = ic.ManifestSegment(
        name="prefix", kind="stable", byte_start=0, byte_end=3, token_start=0, token_end=2
    )
    manifest = ic.ContextManifest(backend="b", adapters=("x", "y"), segments=(segment,))
    assert ic.ContextManifest.from_dict(json.loads(json.dumps(manifest.to_dict()))) == manifest


def test_other_data_is_refused() -> None:
    with pytest.raises(ic.InvalidInputError):
        ic.ContextManifest.from_dict({"no_such_field": 1})
