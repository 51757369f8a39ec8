"""Steps of a pool: who is evaluated with whom, in which order, and who waits."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

import infercore as ic
from infercore.testing import reference_settings
from session.pool_texts import TEXTS
from session.pool_waits import SECONDS, in_threads

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def pool(reference: Any) -> Iterator[Any]:
    with reference.new_pool(n_parallel=4, n_ctx=256) as pool:
        yield pool


def test_who_has_begun_answers_before_the_others_are_read(reference: Any) -> None:
    """Else a call waits twice: for its prompt, and behind all others' prompts for its answer."""
    n_calls, order = 6, list[Any]()
    with reference.new_pool(n_parallel=1, n_ctx=64) as pool:
        scheduler = pool.owner.scheduler
        sessions = [pool.open_session() for _ in range(n_calls)]

        def note(sequences: list[Any]) -> None:
            time.sleep(0.02)  # callers are back before the next step, as with a real engine
            order.extend(sequences)

        pool.owner.ask(lambda: setattr(scheduler.stepping, "on_call", note))
        in_threads(
            *(
                lambda i=i, session=session: session.generate(TEXTS[i], max_tokens=4)
                for i, session in enumerate(sessions)
            )
        )
    answered = len(order) - order[::-1].index(order[0])
    assert len(set(order)) == n_calls
    assert len(set(order[:answered])) <= 2


@pytest.mark.parametrize("text", [TEXTS[0], (5, 6, 7)], ids=["text", "tokens"])
def test_a_prompt_that_is_generated_from_is_one_call(reference: Any, text: Any) -> None:
    """Its first token had one of its own."""
    with reference.new_pool(n_parallel=2, n_ctx=64) as pool, pool.open_session() as session:
        with reference.new_session(n_ctx=64) as alone:
            expected = alone.generate(text, max_tokens=1, temperature=0)
        assert session.generate(text, max_tokens=1, temperature=0) == expected
        assert pool.stats().n_steps == 1


def test_a_prompt_that_was_not_evaluated_leaves_the_session_empty(reference: Any) -> None:
    with reference.new_pool(n_parallel=1, n_ctx=64) as pool, pool.open_session() as session:
        with pytest.raises(ic.CallTimeoutError):
            session.generate(TEXTS[0], max_tokens=1, timeout=1e-9)
        assert session.state == "EMPTY"
        assert session.generate(TEXTS[0], max_tokens=1, temperature=0)


def test_a_first_token_waits_for_no_step_behind_it(
    reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with reference.new_pool(n_ctx=256) as pool, pool.open_session() as session:
        session.ensure_prefix("Once upon a time")
        kind = type(pool.owner.scheduler.context)
        evaluate, goes_on = kind.decode_one, threading.Event()

        def held(*args: Any, **fields: Any) -> Any:
            goes_on.wait(SECONDS / 6)
            return evaluate(*args, **fields)

        monkeypatch.setattr(kind, "decode_one", held)
        with session.decode(max_tokens=2, temperature=0, ignore_eos=True) as stream:
            begun = time.monotonic()
            assert next(stream).tokens
            assert time.monotonic() - begun < SECONDS / 7, "it came with the second"
            goes_on.set()
            assert list(stream)


def test_a_call_has_its_sequences_in_their_order(
    reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine with cells apart evaluates neighbours together, and cuts a call elsewhere."""
    calls: list[list[int]] = []
    with reference.new_pool(n_parallel=4, n_ctx=128, batching="always", n_step_tokens=64) as pool:
        kind = type(pool.owner.scheduler.context)
        each, spans = kind.decode_each, kind.decode_spans

        def seen_each(self: Any, tokens: Any, seq_ids: Any) -> Any:
            calls.append(list(seq_ids))
            return each(self, tokens, seq_ids)

        def seen_spans(self: Any, found: Any) -> Any:
            calls.append([seq_id for seq_id, *_ in found])
            return spans(self, found)

        monkeypatch.setattr(kind, "decode_each", seen_each)
        monkeypatch.setattr(kind, "decode_spans", seen_spans)
        sessions = [pool.open_session() for _ in range(4)]
        for session, text in zip(sessions, TEXTS, strict=False):
            session.ensure_prefix(text)
        streams = [s.decode(max_tokens=12, ignore_eos=True) for s in reversed(sessions)]
        late = pool.open_session()
        assert all(next(stream).tokens for stream in streams)
        in_threads(*(lambda s=s: list(s) for s in streams), lambda: late.ensure_prefix("tick tock"))
    assert any(len(ids) > 1 for ids in calls)
    assert all(ids == sorted(ids) for ids in calls), calls


@pytest.mark.parametrize("n", [1, 3])
def test_samples_of_one_call_do_not_wait_for_one_another(reference: Any, n: int) -> None:
    with reference.new_pool(n_parallel=n, n_ctx=64, max_waiting=0) as pool:
        session = pool.open_session()
        session.ensure_prefix("Once upon a time")
        assert len(session.sample_many(2 * n, max_tokens=3)) == 2 * n


def test_an_answer_without_a_step_has_a_batch_of_one(reference: Any) -> None:
    with reference.new_pool(n_ctx=64) as pool, pool.open_session() as session:
        session.ensure_prefix(TEXTS[0])
        list(session.decode(max_tokens=1, temperature=0))
        session.ensure_prefix(TEXTS[0])
        *_, last = session.decode(max_tokens=1, temperature=0)
        assert isinstance(last.usage.mean_batch, float)
        assert last.usage.mean_batch >= 1.0


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "always"),
        ({"batching": "always"}, "always"),
        ({"batching": "never"}, "never"),
        ({"batch_invariant": True}, "never"),
    ],
)
def test_statistics_say_whether_sessions_share_calls(
    reference: Any, fields: dict[str, Any], expected: str
) -> None:
    with reference.new_pool(n_parallel=2, n_ctx=64, **fields) as pool:
        assert pool.stats().batching == expected


@pytest.mark.parametrize(("most", "places"), [(16, 16), (5, 4), (4, 4), (3, 2), (1, 1)])
def test_an_engine_of_few_sequences_has_a_pool_of_as_many(
    reference: Any, monkeypatch: pytest.MonkeyPatch, most: int, places: int
) -> None:
    allowed = tuple(range(1, most + 1))
    monkeypatch.setitem(reference_settings._CONTEXT_VALUES, "n_seq_max", allowed)
    with reference.new_pool(n_ctx=64, n_parallel=4, batching="always") as pool:
        assert pool._owner.scheduler.context.n_seq_max == places
        texts = [pool.open_session().generate("Once", max_tokens=2, temperature=0) for _ in "ab"]
    assert texts[0] == texts[1]
