"""Guessing ahead changes how fast tokens come, never which."""

from __future__ import annotations

from typing import Any

import pytest

import infercore as ic
from infercore.testing import Faults, load_reference_model

PROMPT = "Once upon a time there was a baker named Mira"
REPEATS = "The baker sang a song. The miller sang a song. The baker sang"


def tokens_of(session: Any, prompt: str, **decode: Any) -> tuple[list[int], Any]:
    session.ensure_prefix(prompt)
    chunks = list(session.decode(**decode))
    return [token for chunk in chunks for token in chunk.tokens], chunks[-1]


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.9, "seed": 4}])
@pytest.mark.parametrize("prompt", [PROMPT, REPEATS])
def test_prompt_lookup_gives_the_same_tokens(
    session: Any, prompt: str, sampling: dict[str, Any]
) -> None:
    plain, _ = tokens_of(session, prompt, max_tokens=120, **sampling)
    guess = ic.SpeculativeConfig(n_draft=6)
    guessed, last = tokens_of(session, prompt, max_tokens=120, speculative=guess, **sampling)
    assert guessed == plain
    assert last.usage.completion_tokens == len(plain)
    assert 0 <= last.usage.accepted_tokens <= last.usage.drafted_tokens
    start = session.explain_context().prefix_tokens
    held = session.context.tokens()
    assert held[start : start + len(plain)] == plain


def test_a_draft_model_gives_the_same_tokens(model: Any, session: Any) -> None:
    plain, _ = tokens_of(session, PROMPT, max_tokens=60, temperature=0)
    config = ic.SpeculativeConfig(kind="draft_model", draft_model=model, n_draft=4)
    guessed, last = tokens_of(session, PROMPT, max_tokens=60, temperature=0, speculative=config)
    assert guessed == plain
    assert last.usage.accepted_tokens >= 0.9 * last.usage.drafted_tokens > 0


def test_repetitive_text_is_guessed(session: Any) -> None:
    refrain = "la la lo li. "
    prompt = "Once upon a time " + refrain * 12
    bias = dict.fromkeys(session.model.tokenizer.encode(refrain, add_special=False), 50.0)
    config = ic.SpeculativeConfig(n_draft=8)
    plain, _ = tokens_of(session, prompt, max_tokens=64, temperature=0, logit_bias=bias)
    guessed, last = tokens_of(
        session, prompt, max_tokens=64, temperature=0, logit_bias=bias, speculative=config
    )
    assert guessed == plain
    assert last.usage.drafted_tokens > 0


def test_every_end_in_the_middle_of_a_guess(session: Any) -> None:
    plain, _ = tokens_of(session, PROMPT, max_tokens=40, temperature=0)
    config = ic.SpeculativeConfig(n_draft=8)
    for n in range(1, 24):
        some, last = tokens_of(session, PROMPT, max_tokens=n, temperature=0, speculative=config)
        assert (some, last.finish_reason) == (plain[:n], "length")
        rest = [t for c in session.decode(max_tokens=40 - n, temperature=0) for t in c.tokens]
        assert some + rest == plain
    text = session.model.tokenizer.decode(plain)
    stop = text[30:36]
    session.ensure_prefix(PROMPT)
    chunks = list(session.decode(temperature=0, stop=[stop], speculative=config))
    assert "".join(chunk.text for chunk in chunks) == text[: text.index(stop)]


def test_the_window_is_never_exceeded(new_session: Any) -> None:
    session = new_session(n_ctx=48)
    config = ic.SpeculativeConfig(n_draft=16)
    plain, last = tokens_of(session, PROMPT, temperature=0, ignore_eos=True)
    guessed, end = tokens_of(session, PROMPT, temperature=0, ignore_eos=True, speculative=config)
    assert (guessed, end.finish_reason) == (plain, last.finish_reason) == (plain, "context")


def test_what_cannot_be_meant() -> None:
    for fields in ({"kind": "magic"}, {"n_draft": 0}, {"kind": "draft_model"}):
        with pytest.raises(ic.InvalidInputError):
            ic.SpeculativeConfig(**fields)  # type: ignore[arg-type]
    with pytest.raises(ic.InvalidInputError):
        ic.DecodeConfig(speculative=True)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "at", "fault"),
    [
        ("decode", 1, MemoryError("full")),
        ("decode_one", 2, RuntimeError("the draft is on fire")),
        ("logits", 3, OSError("gone")),
    ],
)
def test_a_draft_model_that_fails_ends_the_guessing_alone(
    golden: Any, caplog: pytest.LogCaptureFixture, call: str, at: int, fault: Exception
) -> None:
    """The reference drafts for itself, with faults."""
    faults = Faults()
    with (
        load_reference_model() as main,
        load_reference_model(faults=faults) as draft,
        main.new_session(n_ctx=256) as session,
    ):
        plain, _ = tokens_of(session, PROMPT, max_tokens=20, temperature=0)
        faults.plan(call, fault, at=at, times=99)
        config = ic.SpeculativeConfig(kind="draft_model", draft_model=draft, n_draft=4)
        guessed, last = tokens_of(session, PROMPT, max_tokens=20, temperature=0, speculative=config)
        assert (guessed, last.finish_reason) == (plain, "length")
        assert str(fault) in caplog.text
        assert session.state == "DECODED"
        faults.reset()
        again, last = tokens_of(session, PROMPT, max_tokens=20, temperature=0, speculative=config)
        assert again == plain
        assert last.usage.accepted_tokens > 0


def test_a_draft_model_without_room_for_a_context_changes_nothing(golden: Any) -> None:
    with load_reference_model() as main, main.new_session(n_ctx=256) as session:
        session.ensure_prefix(PROMPT)
        held = session.context.tokens()
        draft = load_reference_model()
        draft.close()
        config = ic.SpeculativeConfig(kind="draft_model", draft_model=draft)
        with pytest.raises(ic.SessionClosedError):
            session.decode(speculative=config)
        assert (session.state, session.context.tokens()) == ("PREFIXED", held)
        assert list(session.decode(max_tokens=2, temperature=0))
