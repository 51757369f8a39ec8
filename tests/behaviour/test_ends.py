"""What ends a text and what may not, what is never said twice, and how likely the prompt was."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import infercore as ic

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PROMPT = "Once upon a time there was a baker named Mira"
SHORT = "A short tale about Oskar."


def told(session: Any, **decode: Any) -> list[ic.StreamChunk]:
    return list(session.decode(**{"temperature": 0, **decode}))


def text_of(chunks: Sequence[ic.StreamChunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


def tokens_of(chunks: Sequence[ic.StreamChunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.tokens]


def test_the_last_chunk_says_what_ended_the_text(session: Any) -> None:
    session.ensure_prefix(PROMPT)
    whole = told(session, max_tokens=24)
    assert whole[-1].stopped_by is None
    session.ensure_prefix(PROMPT)
    cut = told(session, max_tokens=24, stop=["never said", " bridge", "stone"])
    assert (cut[-1].finish_reason, cut[-1].stopped_by) == ("stop", "stone")
    token = tokens_of(whole)[4]
    session.ensure_prefix(PROMPT)
    cut = told(session, stop_tokens=[token])
    assert (cut[-1].finish_reason, cut[-1].stopped_by) == ("stop", token)
    session.ensure_prefix(SHORT)
    ended = told(session)
    assert ended[-1].finish_reason == "eos"
    assert session.model.tokenizer.is_eog(ended[-1].stopped_by)


def test_the_stop_string_is_left_where_that_was_asked_for(session: Any) -> None:
    for stop in (" bridge", "he stone brid", "one b"):
        session.ensure_prefix(PROMPT)
        bare = told(session, max_tokens=24, stop=stop)
        session.ensure_prefix(PROMPT)
        kept = told(session, max_tokens=24, stop=stop, include_stop=True)
        assert kept[-1].stopped_by == stop
        assert text_of(kept) == text_of(bare) + stop
        assert tokens_of(kept) == tokens_of(bare)


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_nothing_ends_a_text_too_early(session: Any, temperature: float) -> None:
    session.ensure_prefix(SHORT)
    n = len(tokens_of(told(session, temperature=temperature, seed=1)))
    session.ensure_prefix(SHORT)
    longer = told(session, min_tokens=n + 5, max_tokens=n + 9, temperature=temperature, seed=1)
    assert len(tokens_of(longer)) >= n + 5


def test_stop_tokens_and_strings_wait_too(session: Any) -> None:
    session.ensure_prefix(PROMPT)
    whole = told(session, max_tokens=24)
    first = tokens_of(whole)[0]
    session.ensure_prefix(PROMPT)
    found = told(session, max_tokens=8, min_tokens=8, stop_tokens=[first])
    assert first not in tokens_of(found)
    assert len(tokens_of(found)) == 8
    session.ensure_prefix(PROMPT)
    said = told(session, max_tokens=24, min_tokens=12, stop=", ")
    assert len(tokens_of(said)) > 12
    assert said[-1].stopped_by == ", "
    assert text_of(whole).startswith(text_of(said))
    assert ", " in text_of(said)


def test_a_finished_answer_ends_before_that(session: Any) -> None:
    session.ensure_prefix(PROMPT)
    chunks = told(
        session, min_tokens=20, response_format={"type": "choice", "choices": [" fox", " owl"]}
    )
    assert text_of(chunks) in (" fox", " owl")
    assert chunks[-1].finish_reason == "eos"


@pytest.mark.parametrize("n", [1, 2, 3])
def test_no_run_of_tokens_comes_twice(session: Any, n: int) -> None:
    session.ensure_prefix(PROMPT)
    prompt = session.context.tokens()
    found = tokens_of(told(session, max_tokens=60, no_repeat_ngram_size=n, ignore_eos=True))
    everything = [*prompt, *found]
    runs = [tuple(everything[i : i + n]) for i in range(len(everything) - n + 1)]
    new = runs[len(prompt) - n + 1 :]
    old = runs[: len(prompt) - n + 1]
    assert len(set(new)) == len(new)
    assert not set(new) & set(old)
    session.ensure_prefix(PROMPT)
    free = tokens_of(told(session, max_tokens=60, ignore_eos=True))
    assert (free != found) is (n < 3)


def test_the_engines_own_sampler_refuses_them(model: Any, session: Any) -> None:
    session.ensure_prefix(PROMPT)
    for wanted in ({"min_tokens": 3}, {"no_repeat_ngram_size": 2}):
        with pytest.raises(ic.UnsupportedFeatureError):
            session.decode(implementation="native", **wanted)
    for wanted in ({"no_repeat_ngram_size": 2}, {"adaptive_p_target": 0.2}):
        with pytest.raises(ic.UnsupportedFeatureError):
            model.new_sampler(implementation="native", **wanted)
    assert session.state == "PREFIXED"


def test_how_likely_the_prompt_was(
    session: Any, new_context: Callable[..., Any], story: str
) -> None:
    session.ensure_prefix(story[:400])
    session.prefill_suffix(story[400:700])
    ids = session.context.tokens()
    context = new_context()
    context.decode(ids, logits="all")
    rows = context.logits_all().astype(np.float64)
    rows -= rows.max(axis=1, keepdims=True)
    wanted = rows - np.log(np.exp(rows).sum(axis=1, keepdims=True))
    plain = told(session, max_tokens=6)
    session.prefill_suffix(story[400:700])
    chunks = told(session, max_tokens=6, prompt_logprobs=2)
    assert tokens_of(chunks) == tokens_of(plain)
    found = chunks[0].prompt_logprobs
    assert found is not None
    assert [one.token for one in found] == ids[1:]
    t = 2 * session.context.tolerance + 1e-5
    for i, one in enumerate(found):
        assert one.logprob == pytest.approx(wanted[i, ids[i + 1]], abs=t)
        assert one.top[0][1] == pytest.approx(wanted[i].max(), abs=t)
        assert len(one.top) == 2
    assert all(chunk.prompt_logprobs is None for chunk in chunks[1:])
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.cached_tokens == 0
    assert usage.reevaluated_tokens > 0
    assert session.explain_context().resident_tokens == len(ids) + 6


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
