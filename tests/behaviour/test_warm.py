"""What comes behind a prefix joins its text or stays apart, as asked."""

from __future__ import annotations

from typing import Any

import pytest

import infercore as ic


def test_append_after_an_end_of_turn_puts_that_token_first(
    model: Any, session: Any, golden: Any
) -> None:
    prompt = next(p for p in golden.prompts if p.ended)
    session.ensure_prefix(prompt.text)
    chunks = list(session.decode(max_tokens=300, temperature=0))
    assert chunks[-1].finish_reason == "eos"
    resident = session.context.tokens()
    assert not model.tokenizer.is_eog(resident[-1])
    status = session.prefill_suffix(ic.SuffixInput(text=" More.", mode="append"))
    n_more = len(model.tokenizer.encode(" More.", add_special=False))
    assert status.reused_tokens + status.prefilled_tokens == 1 + n_more
    after = session.context.tokens()
    assert after[: len(resident)] == resident
    assert model.tokenizer.is_eog(after[len(resident)])


def test_text_that_was_kept_apart_stays_apart_when_more_is_appended(
    model: Any, session: Any
) -> None:
    """An end-of-turn token that somebody typed must not become one by a later append."""
    eot = model.tokenizer.eot
    typed = model.tokenizer.token_bytes(eot).decode()
    session.ensure_prefix("Once upon a time")
    text = ic.SuffixInput(text=f" a {typed} b", parse_special=False, boundary="split")
    first = session.prefill_suffix(text)
    held = session.context.tokens()
    more = session.prefill_suffix(ic.SuffixInput(text=" and more", mode="append"))
    assert eot not in session.context.tokens()
    assert session.context.tokens()[: len(held)] == held
    assert more.suffix_tokens > first.suffix_tokens


def test_an_empty_suffix_leaves_the_prefix_as_it_was_tokenized(model: Any, session: Any) -> None:
    eot = model.tokenizer.eot
    typed = model.tokenizer.token_bytes(eot).decode()
    prefix = ic.PrefixInput(text=f"Once {typed}", parse_special=False)
    before = session.ensure_prefix(prefix)
    after = session.prefill_suffix("")
    assert eot not in session.context.tokens()
    assert (after.prefix_tokens, after.suffix_tokens) == (before.prefix_tokens, 0)


def test_append_before_a_decode_joins_or_stays_apart_as_asked(model: Any, session: Any) -> None:
    encode = model.tokenizer.encode
    session.ensure_prefix("Once upon")
    session.prefill_suffix(" a ti")
    joined = session.prefill_suffix(ic.SuffixInput(text="me there", mode="append"))
    assert session.context.tokens() == encode("Once upon a time there")
    assert joined.reused_tokens + joined.prefilled_tokens == joined.suffix_tokens
    session.prefill_suffix(" a ti")
    held = session.context.tokens()
    apart = ic.SuffixInput(text="me there", mode="append", boundary="split")
    status, more = session.prefill_suffix(apart), encode("me there", add_special=False)
    assert session.context.tokens() == [*held, *more]
    assert status.reused_tokens + status.prefilled_tokens == len(more) < status.suffix_tokens


@pytest.mark.parametrize("option", [{"bogus": 1}, {"response_format": {"type": "nonsense"}}])
def test_generate_with_a_bad_option_changes_nothing(session: Any, option: dict[str, Any]) -> None:
    with pytest.raises(ic.InvalidInputError):
        session.generate("Once", **option)
    assert session.state == "EMPTY"
    assert session.context.tokens() == []
