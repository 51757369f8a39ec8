"""Beams and samples: what one search gives, alone, together with others, and in a pool."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

import infercore as ic
import infercore_models

if TYPE_CHECKING:
    from collections.abc import Callable

SEARCHES = infercore_models.golden_beams("storyteller")
PROMPT = "Once upon a time"


def assert_equal(found: list[ic.Beam], wanted: infercore_models.GoldenBeams, t: float) -> None:
    """Compare with transformers: the same beams; those of near ties in any order."""
    assert len(found) == len(wanted.beams)
    scores = {beam.tokens: beam for beam in wanted.beams}
    for place, beam in enumerate(found):
        golden = wanted.beams[place]
        if beam.tokens != golden.tokens:
            golden = scores[beam.tokens]
        assert (beam.finish_reason == "eos") is golden.ended
        if golden.score is not None:
            assert beam.score == pytest.approx(golden.score, abs=2 * t)


def of(search: infercore_models.GoldenBeams, **options: Any) -> dict[str, Any]:
    return {
        "n_beams": search.n_beams,
        "max_tokens": search.max_tokens,
        "length_penalty": search.length_penalty,
        "early_stopping": search.early_stopping,
        **options,
    }


@pytest.mark.parametrize("n_seq_max", [1, 8])
def test_beams_are_those_of_transformers(new_session: Callable[..., Any], n_seq_max: int) -> None:
    session = new_session(
        n_ctx=512, n_seq_max=n_seq_max, kv_unified=True if n_seq_max > 1 else None
    )
    for search in SEARCHES[:: 3 if n_seq_max > 1 else 9]:
        session.ensure_prefix(search.text)
        assert session.explain_context().resident_tokens == len(search.tokens)
        found = session.beam_search(**of(search, n_return=search.n_beams))
        assert_equal(found, search, session.context.tolerance)


def test_a_pool_gives_the_same_beams(model: Any, exact: dict[str, Any]) -> None:
    with model.new_pool(n_ctx=256, n_parallel=4, **exact) as pool, pool.open_session() as session:
        for search in SEARCHES[3::9]:
            session.ensure_prefix(search.text)
            found = session.beam_search(**of(search, n_return=search.n_beams))
            assert_equal(found, search, session.context.tolerance)


def test_a_beam_says_what_it_is(new_session: Callable[..., Any]) -> None:
    session = new_session()
    session.ensure_prefix(PROMPT)
    (beam,) = session.beam_search(3, max_tokens=5)
    assert isinstance(beam, ic.Completion)
    assert len(beam.tokens) == 5
    assert beam.finish_reason == "length"
    assert beam.text == session.model.tokenizer.decode(beam.tokens)
    assert [one.token for one in beam.logprobs] == list(beam.tokens)
    assert beam.score == pytest.approx(sum(one.logprob for one in beam.logprobs) / 5)
    assert beam.usage.completion_tokens == 5
    assert beam.usage.prompt_tokens == session.explain_context().resident_tokens


def test_a_full_window_ends_beams(new_session: Callable[..., Any]) -> None:
    session = new_session(n_ctx=24)
    n = session.ensure_prefix(PROMPT).prefix_tokens
    (beam,) = session.beam_search(2, max_tokens=100, early_stopping=False)
    assert beam.finish_reason in ("context", "eos")
    assert len(beam.tokens) <= 24 - n


def test_a_pool_samples_more_than_it_has_places(model: Any, exact: dict[str, Any]) -> None:
    with model.new_pool(n_ctx=256, n_parallel=2, **exact) as pool, pool.open_session() as session:
        session.ensure_prefix("A short")
        found = session.sample_many(5, seed=3, max_tokens=8, temperature=1.5)
        assert [one.usage.seed for one in found] == [3, 4, 5, 6, 7]
        assert pool.stats().n_open == 1
        assert session.state == "PREFIXED"


@pytest.mark.parametrize("options", [{}, {"speculative": ic.SpeculativeConfig()}])
def test_one_sample_where_engines_are_shared_is_that_of_a_session(
    model: Any, new_session: Callable[..., Any], exact: dict[str, Any], options: dict[str, Any]
) -> None:
    prompt = "Once upon a time Once upon a time there was"
    options = {"max_tokens": 20, "temperature": 0, **options}
    alone, forked = new_session(), new_session(n_seq_max=2)
    with model.new_pool(n_ctx=256, n_parallel=2, **exact) as pool, pool.open_session() as pooled:
        for session in (alone, forked, pooled):
            session.ensure_prefix(prompt)
        with forked.fork() as fork:
            sessions = (alone, forked, fork, pooled)
            texts = [session.sample_many(1, **options)[0].text for session in sessions]
    assert len(set(texts)) == 1


@pytest.mark.parametrize("n_beams", [1, 3])
def test_beams_go_on_from_what_was_moved(
    new_session: Callable[..., Any], story: str, n_beams: int
) -> None:
    """An evicted session computes with what was there before, in turns as together."""

    def begun(**fields: Any) -> Any:
        session = new_session(**fields)
        ids = session.model.tokenizer.encode(story)[:40]
        session.ensure_prefix(ids[:3])
        session.prefill_suffix(ids[3:])
        session.evict(4, 14)
        return session

    tokens, logprobs = likely(begun())
    found = []
    for fields in ({"n_seq_max": 1}, {"n_seq_max": 4, "kv_unified": True}):
        session = begun(**fields)
        beams = session.beam_search(n_beams, max_tokens=4, n_return=n_beams)
        found.append([beam.tokens for beam in beams])
        assert session.explain_context().cuts == (4,)
        after = likely(session)
        assert after[0] == tokens
        assert after[1] == pytest.approx(logprobs, abs=2 * session.context.tolerance + 1e-5)
    assert found[0] == found[1]
    if n_beams == 1:
        assert list(found[0][0]) == tokens[:4]


def likely(session: Any) -> tuple[list[int], list[float]]:
    """Return what a greedy decode takes, and how likely each token is."""
    chunks = session.decode(max_tokens=8, temperature=0, logprobs=0, ignore_eos=True)
    found = [one for chunk in chunks for one in chunk.logprobs or ()]
    return [one.token for one in found], [one.logprob for one in found]


@pytest.mark.parametrize("is_evicted", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_samples_that_shift_leave_the_session_as_it_was(
    new_session: Callable[..., Any], *, n: int, is_evicted: bool
) -> None:
    """Tokens that repeat look the same wherever they were moved from."""

    def begun() -> Any:
        session = new_session(n_ctx=40, overflow="shift")
        session.ensure_prefix([session.model.tokenizer.bos, 300])
        session.prefill_suffix([300] * 34)
        if is_evicted:
            session.evict(5, 7)
        return session

    fields = {"max_tokens": 20, "temperature": 1.0, "ignore_eos": True}
    session, same = begun(), begun()
    before = session.explain_context()
    samples = session.sample_many(n, seed=1, **fields)
    after = session.explain_context()
    for field in ("state", "resident_tokens", "prefix_tokens", "suffix_tokens", "cuts"):
        assert getattr(after, field) == getattr(before, field), field
    for i, sample in enumerate(samples):
        chunks = list(begun().decode(seed=1 + i, **fields))
        assert any(chunk.shifted_out for chunk in chunks)
        assert list(sample.tokens) == [token for chunk in chunks for token in chunk.tokens]
    (tokens, logprobs), wanted = likely(session), likely(same)
    assert tokens == wanted[0]
    assert logprobs == pytest.approx(wanted[1], abs=2 * session.context.tolerance + 1e-5)


class LateBehind:
    """A processor that lets all time pass before the ``n``-th token of all."""

    def __init__(self, n: int, seconds: float) -> None:
        self.n, self.seconds = n, seconds

    def apply(self, logits: Any) -> Any:
        self.n -= 1
        if self.n == 0:
            time.sleep(self.seconds)
        return logits


@pytest.mark.parametrize("n_seq_max", [1, 2])
def test_a_timeout_is_that_of_all_samples(new_session: Callable[..., Any], n_seq_max: int) -> None:
    session = new_session(n_seq_max=n_seq_max)
    session.ensure_prefix(PROMPT)
    late = LateBehind(4, 0.6)
    found = session.sample_many(
        3, seed=7, max_tokens=50, ignore_eos=True, timeout=0.5, processors=[late], logprobs=0
    )
    assert [sample.finish_reason for sample in found] == ["timeout"] * 3
    assert [sample.usage.seed for sample in found] == [7, 8, 9]
    n_tokens = [len(sample.tokens) for sample in found]
    assert n_tokens[0] > 0 == n_tokens[2]
    assert [sample.usage.completion_tokens for sample in found] == n_tokens
    assert [len(sample.logprobs) for sample in found] == n_tokens
    assert session.state == "PREFIXED"
    with pytest.raises(ic.CallTimeoutError):
        session.sample_many(3, timeout=1e-9)
    assert len(session.sample_many(2, max_tokens=3)) == 2


@pytest.mark.parametrize("n_seq_max", [1, 2])
def test_a_late_reader_is_told_the_time_since_the_call(
    new_session: Callable[..., Any], n_seq_max: int
) -> None:
    session = new_session(n_seq_max=n_seq_max)
    session.ensure_prefix(PROMPT)
    session.sample_many(1, max_tokens=1)
    if n_seq_max > 1:
        session.fork().close()
    stream = session.decode(timeout=0.05)
    time.sleep(0.1)
    with pytest.raises(ic.CallTimeoutError) as caught:
        next(stream)
    assert caught.value.elapsed_ms >= 100


@pytest.mark.parametrize("n_seq_max", [1, 3])
def test_a_cancel_ends_them(new_session: Callable[..., Any], n_seq_max: int) -> None:
    untouched = new_session(n_seq_max=n_seq_max)
    untouched.ensure_prefix(PROMPT)
    session = new_session(n_seq_max=n_seq_max)
    session.ensure_prefix(PROMPT)
    timer = threading.Timer(0.3, session.cancel)
    timer.start()
    with pytest.raises(ic.DecodeAbortedError):
        session.sample_many(40, max_tokens=400, ignore_eos=True)
    timer.join()
    _check_no_more_than_the_last_token_is_owed(session, untouched)
    timer = threading.Timer(0.2, session.cancel)
    timer.start()
    with pytest.raises(ic.DecodeAbortedError):
        session.beam_search(32, max_tokens=900, length_penalty=9.0, early_stopping=False)
    timer.join()
    _check_no_more_than_the_last_token_is_owed(session, untouched)
    texts = [
        one.generate(" there was", max_tokens=8, temperature=0) for one in (session, untouched)
    ]
    assert texts[0] == texts[1]


def _check_no_more_than_the_last_token_is_owed(session: Any, untouched: Any) -> None:
    """Where the cancel fell into the evaluation of the token that gives the next row."""
    n = untouched.explain_context().resident_tokens
    assert n - 1 <= session.explain_context().resident_tokens <= n


def test_in_tasks(model: Any, exact: dict[str, Any]) -> None:
    async def main() -> None:
        async with ic.aopen_session(model, n_ctx=256, **exact) as session:
            await session.ensure_prefix(PROMPT)
            (beam,) = await session.beam_search(2, max_tokens=4)
            assert len(beam.tokens) == 4
            assert len(await session.sample_many(2, max_tokens=3)) == 2

    asyncio.run(main())


def test_bad_options_change_nothing(new_session: Callable[..., Any]) -> None:
    session = new_session()
    with pytest.raises(ic.InvalidStateError):
        session.beam_search(2, max_tokens=3)
    with pytest.raises(ic.InvalidStateError):
        session.sample_many(2)
    session.ensure_prefix(PROMPT)
    for options in (
        {"n_beams": 0},
        {"n_beams": True},
        {"n_return": 3},
        {"n_return": 0},
        {"max_tokens": 0},
        {"length_penalty": float("nan")},
        {"early_stopping": "never"},
    ):
        with pytest.raises(ic.InvalidInputError):
            session.beam_search(**{"n_beams": 2, "max_tokens": 3, **options})
    for n in (0, -1, 1.5, "2", 10**6):
        with pytest.raises(ic.InvalidInputError):
            session.sample_many(n)
    with pytest.raises(ic.InvalidInputError):
        session.sample_many(2, tempreature=0)
    assert session.state == "PREFIXED"
