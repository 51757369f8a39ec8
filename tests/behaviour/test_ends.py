"""What ends a text and what may not, what is never said twice, and how likely the prompt was."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import infercore as ic

if TYPE_CHECKING:
    from collections.abc import Sequence

PROMPT = "Once upon a time there was a baker named Mira"


def told(session: Any, **decode: Any) -> list[ic.StreamChunk]:
    return list(session.decode(**{"temperature": 0, **decode}))


def text_of(chunks: Sequence[ic.StreamChunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


def tokens_of(chunks: Sequence[ic.StreamChunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.tokens]


def test_a_finished_answer_ends_before_that(session: Any) -> None:
    session.ensure_prefix(PROMPT)
    chunks = told(
        session, min_tokens=20, response_format={"type": "choice", "choices": [" fox", " owl"]}
    )
    assert text_of(chunks) in (" fox", " owl")
    assert chunks[-1].finish_reason == "eos"


def test_a_stop_that_begins_within_the_least_number_of_tokens(session: Any) -> None:
    session.ensure_prefix(PROMPT)
    chunks = told(session, max_tokens=8)
    pieces = [session.model.tokenizer.decode([token]) for token in tokens_of(chunks)]
    stop = pieces[1][-1:] + pieces[2]
    session.ensure_prefix(PROMPT)
    shown = told(session, max_tokens=8, stop=[stop], min_tokens=2)
    assert text_of(shown) == "".join(pieces[:2])[:-1]
    assert (shown[-1].finish_reason, shown[-1].stopped_by) == ("stop", stop)


def test_the_engines_own_sampler_refuses_them(model: Any, session: Any) -> None:
    session.ensure_prefix(PROMPT)
    for wanted in ({"min_tokens": 3}, {"no_repeat_ngram_size": 2}):
        with pytest.raises(ic.UnsupportedFeatureError):
            session.decode(implementation="native", **wanted)
    for wanted in ({"no_repeat_ngram_size": 2}, {"adaptive_p_target": 0.2}):
        with pytest.raises(ic.UnsupportedFeatureError):
            model.new_sampler(implementation="native", **wanted)
    assert session.state == "PREFIXED"


def test_sequences_that_share_a_context_can_tell_too(
    model: Any, session: Any, exact: dict[str, Any], story: str
) -> None:
    text = story[:700]  # more than one call looks at
    session.ensure_prefix(text)
    wanted = told(session, max_tokens=6, prompt_logprobs=2)
    with model.new_pool(n_ctx=512, n_parallel=2, **exact) as pool, pool.open_session() as other:
        beside = pool.open_session()
        beside.ensure_prefix(text)
        stream = beside.decode(max_tokens=40, temperature=0)
        next(stream)
        for first in (True, False):
            other.ensure_prefix(text)
            chunks = told(other, max_tokens=6, prompt_logprobs=2)
            assert tokens_of(chunks) == tokens_of(wanted)
            assert [one.token for one in chunks[0].prompt_logprobs or ()] == [
                one.token for one in wanted[0].prompt_logprobs or ()
            ]
            t = 2 * session.context.tolerance + 1e-5
            pairs = zip(
                chunks[0].prompt_logprobs or (), wanted[0].prompt_logprobs or (), strict=True
            )
            assert all(abs(a.logprob - b.logprob) < t for a, b in pairs)
            usage = chunks[-1].usage
            assert usage is not None
            assert usage.cached_tokens == 0
            assert (usage.reevaluated_tokens > 0) or first
        assert text_of(list(stream))
        other.prefill_suffix(" and")
        stream = other.decode(prompt_logprobs=1)
        stream.cancel()
        assert list(stream)[-1].finish_reason == "cancelled"
        with pytest.raises(ic.InvalidInputError, match="prompt_logprobs"):
            other.sample_many(2, prompt_logprobs=1)
        other.ensure_prefix(PROMPT)
        chunks = told(other, max_tokens=24, stop=" stone", include_stop=True)
        assert text_of(chunks).endswith(" stone")
        assert chunks[-1].stopped_by == " stone"


def test_bad_values_are_refused() -> None:
    for wrong in ({"min_tokens": -1}, {"min_tokens": 5, "max_tokens": 4}, {"include_stop": 1}):
        with pytest.raises(ic.InvalidInputError):
            ic.DecodeConfig(**wrong)
    with pytest.raises(ic.InvalidInputError):
        ic.SamplingConfig(no_repeat_ngram_size=-1)
    with pytest.raises(ic.InvalidInputError):
        ic.DecodeConfig(prompt_logprobs=-1)
