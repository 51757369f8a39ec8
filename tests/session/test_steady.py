"""Steps in which each session of a pool wants a token: what is kept between them, and shown."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import infercore as ic
from infercore.session.cost_model import CostModel
from infercore.session.generation import Generation
from infercore.session.jobs import Generating
from infercore.session.steady import Steady

if TYPE_CHECKING:
    from collections.abc import Iterator

TEXTS = ("Once upon a time", "The baker had a dog", "A little girl")


@pytest.fixture
def pool(reference: Any) -> Iterator[Any]:
    with reference.new_pool(n_parallel=3, n_ctx=128, batching="always") as pool:
        yield pool


def streams_of(pool: Any, **fields: Any) -> list[Any]:
    sessions = [pool.open_session() for _ in TEXTS]
    for session, text in zip(sessions, TEXTS, strict=True):
        session.ensure_prefix(text)
    return [s.decode(**{"max_tokens": 24, "temperature": 0, **fields}) for s in sessions]


def read_in_turn(streams: list[Any]) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in streams]
    left = dict(enumerate(streams))
    while left:
        for i, stream in [*left.items()]:
            chunk = next(stream, None)
            if chunk is None:
                del left[i]
            else:
                found[i] += chunk.tokens
    return found


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"logit_bias": {5: -2.0}, "ignore_eos": True},
        {"stop": ["never there"]},
        {"logprobs": 1},
        {"temperature": 0.8, "seed": 3},
    ],
)
def test_texts_are_those_of_steps_of_any_kind(
    pool: Any, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    found = read_in_turn(streams_of(pool, **fields))
    monkeypatch.setattr(Steady, "find", lambda *_: False)
    assert read_in_turn(streams_of(pool, **fields)) == found


def test_members_are_looked_at_once_while_they_stay(
    pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, steps = [], []
    look, take = Steady._look, Steady.take
    monkeypatch.setattr(Steady, "_look", lambda *a: looks.append(a) or look(*a))
    monkeypatch.setattr(Steady, "take", lambda *a: steps.append(a) or take(*a))
    streams = streams_of(pool, max_tokens=40, ignore_eos=True)
    jobs = [next(stream) and stream._job for stream in streams]
    for job in jobs:
        job.n_ahead = 10**6
        pool.owner.scheduler.wake()
    read_in_turn(streams)
    assert len(steps) > 30
    assert len(looks) < len(steps)


def test_a_row_that_is_no_number_ends_one_session(
    pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = streams_of(pool, ignore_eos=True)
    for stream in streams:
        next(stream)
    bad = streams[1]._job.sequence.own_id
    own = pool.owner.scheduler.context.decode_each

    def decode_each(tokens: Any, seq_ids: Any) -> Any:
        rows = np.array(own(tokens, seq_ids))
        rows[[s == bad for s in seq_ids], 3] = np.nan
        return rows

    def begin() -> None:
        monkeypatch.setattr(pool.owner.scheduler.context, "decode_each", decode_each)
        for stream in streams:
            stream._job.n_ahead = 10**6  # all go on, read or not

    pool.owner.ask(begin)
    with pytest.raises(ic.InvalidStateError):
        list(streams[1])
    for stream in (streams[0], streams[2]):
        assert [chunk.finish_reason for chunk in stream][-1] == "length"


def test_what_fails_to_be_shown_is_its_readers_alone(
    pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = streams_of(pool, ignore_eos=True)
    for stream in streams:
        next(stream)
    broken, own = streams[1]._generation, Generation.show

    def show(self: Any, token: int) -> Any:
        if self is broken:
            raise ic.InvalidTokenError("no such token", field="token", value=token, allowed="none")
        return own(self, token)

    monkeypatch.setattr(Generation, "show", show)
    with pytest.raises(ic.InvalidTokenError):
        list(streams[1])
    for stream in (streams[0], streams[2]):
        assert [chunk.finish_reason for chunk in stream][-1] == "length"


def test_tokens_without_text_keep_no_reader_waiting(
    pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of a character is a token that no reader gets: the next one must follow by itself."""
    own = Generation.show

    def show(self: Any, token: int) -> Any:
        found = own(self, token)
        if found is None or self._n_shown % 4:
            self._shown[:0] = () if found is None else found.tokens
            return None
        return found

    monkeypatch.setattr(Generation, "show", show)
    found = read_in_turn(streams_of(pool, ignore_eos=True))
    assert [len(tokens) for tokens in found] == [24] * 3


def test_a_job_counts_what_reached_its_reader() -> None:

    ahead = Generating.is_ahead.fget  # type: ignore[attr-defined]
    job = SimpleNamespace(n_given=3, n_unshown=1, n_asked=0, n_ahead=2)
    assert ahead(job)
    job.n_unshown = 2
    assert not ahead(job)


def test_what_looking_at_a_prompt_costs_is_not_what_reading_one_does(
    pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    record = CostModel.record
    monkeypatch.setattr(CostModel, "record", lambda *a: seen.append(a[2]) or record(*a))
    with pool.open_session() as session:
        session.ensure_prefix("Once upon a time there was a baker")
        assert sum(seen) > 4
        seen.clear()
        list(session.decode(max_tokens=2, temperature=0, prompt_logprobs=0))
    assert sum(seen) == 0
