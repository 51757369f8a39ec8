"""What a session makes of token ids: taken as they are, hashed, saved, refused."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

import infercore as ic
from infercore.values.manifest import hash_token_ids

PREFIX, SUFFIX = "Once upon the é", " time \U0001f600"


@pytest.fixture
def session(toy: Any) -> Any:
    with toy.new_session(n_ctx=128) as opened:
        yield opened


def ids_of(model: Any, text: str) -> list[int]:
    return model.tokenizer.encode(text, add_special=False)


def test_the_hash_is_of_the_bytes_of_the_tokens(toy: Any, session: Any, greedy: Any) -> None:
    prefix, suffix = ids_of(toy, PREFIX), ids_of(toy, SUFFIX)
    status = session.ensure_prefix(ic.PrefixInput(tokens=prefix))
    assert status.stable_byte_hash == hashlib.sha256(PREFIX.encode()).hexdigest()
    session.prefill_suffix(suffix)
    greedy(session, 3)
    manifest = session.explain_context().manifest
    names = [(s.name, s.token_end - s.token_start) for s in manifest.segments]
    assert names == [("prefix", len(prefix)), ("suffix", len(suffix)), ("generated", 3)]
    assert manifest.segments[1].byte_hash == hashlib.sha256(SUFFIX.encode()).hexdigest()
    assert manifest.volatile_token_hash == hash_token_ids(session.context.tokens()[len(prefix) :])


def test_text_behind_ids_is_tokenized_apart_also_when_it_is_added(toy: Any, session: Any) -> None:
    prefix = ids_of(toy, PREFIX)
    session.ensure_prefix(prefix)
    session.prefill_suffix(" ti")
    session.prefill_suffix(ic.SuffixInput(text="me", mode="append"))
    session.prefill_suffix(ic.SuffixInput(tokens=ids_of(toy, "ly"), mode="append"))
    apart = [token for text in (" ti", "me", "ly") for token in ids_of(toy, text)]
    assert session.context.tokens() == [*prefix, *apart]


def test_ids_added_to_a_joint_suffix_and_text_added_to_ids(toy: Any, session: Any) -> None:
    session.ensure_prefix("Once")
    session.prefill_suffix(" upon")
    held = session.context.tokens()
    session.prefill_suffix(ic.SuffixInput(tokens=ids_of(toy, " a"), mode="append"))
    session.prefill_suffix(ic.SuffixInput(text=" time", mode="append"))
    assert session.context.tokens() == [*held, *ids_of(toy, " a"), *ids_of(toy, " time")]


def test_no_ids_are_an_empty_context(session: Any) -> None:
    assert session.ensure_prefix([]).prefix_tokens == 0
    with pytest.raises(ic.InvalidStateError):
        session.generate([])
    assert session.prefill_suffix([]).resident_tokens == 0


def test_saved_and_forked(reference: Any, tmp_path: Any) -> None:
    session = reference.new_session(n_ctx=128)
    prefix, suffix = ids_of(reference, PREFIX), ids_of(reference, SUFFIX)
    session.ensure_prefix(prefix)
    session.prefill_suffix(suffix)
    before = session.explain_context()
    session.save(tmp_path / "ids")
    twin = session.fork()
    with reference.new_session(n_ctx=128) as other:
        other.load(tmp_path / "ids")
        for each in (other, twin):
            assert each.explain_context().manifest == before.manifest
            each.prefill_suffix(" and")
            assert each.context.tokens()[: len(prefix)] == prefix
    twin.close()


def test_overflow_is_told_before_any_change(toy: Any, session: Any) -> None:
    session.ensure_prefix([3, 4])
    before = session.explain_context()
    for call in (session.ensure_prefix, session.prefill_suffix, session.generate):
        with pytest.raises(ic.ContextOverflowError):
            call([3] * 200)
    assert session.explain_context() == before


@pytest.mark.parametrize(
    "given",
    [b"ab", 5, None, {1, 2}, {1: 2}, iter([1])],
    ids=lambda given: type(given).__name__,
)
def test_what_is_no_sequence_is_refused(session: Any, given: Any) -> None:
    for call in (session.ensure_prefix, session.generate):
        with pytest.raises(ic.InvalidInputError):
            call(given)
    assert session.state == "EMPTY"


def test_a_value_has_a_text_or_tokens_and_nothing_that_only_a_text_has() -> None:
    for fields in (
        {},
        {"text": "a", "tokens": [1]},
        {"tokens": [1], "parse_special": False},
        {"tokens": "ab"},
        {"tokens": [True]},
    ):
        for cls in (ic.PrefixInput, ic.SuffixInput):
            with pytest.raises(ic.InvalidInputError):
                cls(**fields)
    with pytest.raises(ic.InvalidInputError):
        ic.SuffixInput(tokens=[1], boundary="joint")
    assert ic.SuffixInput(tokens=[1]).boundary == "split"
    assert ic.SuffixInput(text="a").boundary == "joint"
    assert ic.PrefixInput(tokens=[1, 2]).tokens == (1, 2)
