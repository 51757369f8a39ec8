"""Several sessions in one context: each has its own truth, and room is counted once."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest

import infercore as ic

TEXT = "Once upon the time there was a baker"


@pytest.fixture
def pair(reference: Any) -> Any:
    session = reference.new_session(n_ctx=64, n_seq_max=3, kv_unified=True)
    session.ensure_prefix(TEXT)
    twin = session.fork()
    yield session, twin
    twin.close()
    session.close()


def test_cells_that_a_twin_holds_too_are_not_room(pair: Any) -> None:
    session, twin = pair
    n = session.explain_context().resident_tokens
    assert session.context.n_free() == 64 - n
    other = "x y z " * 12
    n_other = len(session.encode(other, parse_special=True))
    assert 64 - n + 1 < n_other <= 64
    before = session.explain_context()
    with pytest.raises(ic.ContextOverflowError) as caught:
        session.ensure_prefix(other)
    assert caught.value.stage == "prefix"
    assert session.explain_context() == before
    twin.close()
    assert session.ensure_prefix(other).prefix_tokens == n_other


def test_statuses_and_reports_count_the_room_alike(pair: Any) -> None:
    session, twin = pair
    twin.prefill_suffix(" who had a dog")
    status = session.prefill_suffix(" and")
    assert status.available_tokens == session.explain_context().available_tokens
    assert status.available_tokens == session.context.n_free()


def test_steps_of_two_decodes_may_alternate(pair: Any, greedy: Any, cold_greedy: Any) -> None:
    session, twin = pair
    expected = cold_greedy(session.model, TEXT, 6), cold_greedy(session.model, "tick tock", 6)
    twin.ensure_prefix("tick tock")
    streams = [s.decode(max_tokens=6, temperature=0) for s in (session, twin)]
    found: tuple[list[int], list[int]] = ([], [])
    for _ in range(7):
        for stream, tokens in zip(streams, found, strict=True):
            tokens += [t for chunk in [next(stream, None)] if chunk for t in chunk.tokens]
    assert found == expected


def test_tokens_evaluated_ahead_survive_another_session(
    pair: Any, greedy: Any, cold_greedy: Any
) -> None:
    session, twin = pair
    text = "tick tock tick tock tick tock tick"
    session.ensure_prefix(text)
    expected = cold_greedy(session.model, text, 8)
    guesses = ic.SpeculativeConfig(kind="prompt_lookup")
    shown: list[int] = []
    for chunk in session.decode(max_tokens=8, temperature=0, speculative=guesses):
        shown += chunk.tokens
        twin.ensure_prefix("a")
        greedy(twin, 1)
    assert shown == expected


def test_two_threads_never_mix_their_logits(pair: Any, greedy: Any, cold_greedy: Any) -> None:
    session, twin = pair
    expected = {one: cold_greedy(one.model, text, 5) for one, text in
                ((session, TEXT), (twin, "tick"))}  # fmt: skip
    wrong: list[Any] = []

    def work(one: Any, text: str) -> None:
        for _ in range(15):
            try:
                one.ensure_prefix(text)
                tokens = greedy(one, 5)
            except ic.SessionBusyError:
                continue
            if tokens != expected[one]:
                wrong.append(tokens)

    threads = [threading.Thread(target=work, args=a) for a in ((session, TEXT), (twin, "tick"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_no_other_session_comes_between_a_decode_and_its_sample(pair: Any) -> None:
    session, twin = pair
    outcomes: list[str] = []

    class Meanwhile:
        def apply(self, logits: Any) -> Any:
            thread = threading.Thread(target=enter)
            thread.start()
            thread.join()
            return logits

    def enter() -> None:
        try:
            twin.ensure_prefix("tick")
            outcomes.append("entered")
        except ic.SessionBusyError:
            outcomes.append("busy")

    list(session.decode(max_tokens=1, temperature=0, processors=[Meanwhile()]))
    assert outcomes == ["busy"]


def test_closed_while_another_call_has_the_context(pair: Any, greedy: Any) -> None:
    session, twin = pair
    twin.prefill_suffix(" who had a dog")
    n_cells = 64 - session.context.n_free()

    session.context.set_abort_callback(lambda: bool(twin.close()))
    session.prefill_suffix(" and")
    session.context.set_abort_callback(None)
    fresh = session.fork()
    assert fresh.context is session.context
    assert 64 - session.context.n_free() < n_cells
    fresh.ensure_prefix("tick")
    assert fresh.context.tokens(fresh.resident.seq_id) == fresh.model.tokenizer.encode("tick")
    fresh.close()


def test_a_stream_collected_within_another_sessions_call(
    pair: Any, greedy: Any, cold_greedy: Any
) -> None:
    session, twin = pair
    expected = cold_greedy(session.model, TEXT, 6)
    stream = session.decode(max_tokens=6, temperature=0)
    shown = list(next(stream).tokens)
    cycle = [stream]
    cycle.append(cycle)
    del stream, cycle

    twin.context.set_abort_callback(lambda: gc.collect() < 0)
    twin.prefill_suffix(" and")
    twin.context.set_abort_callback(None)
    assert shown + greedy(session, 6 - len(shown)) == expected


@pytest.mark.parametrize("n_more", [4, 40])
def test_shift_where_cells_are_shared(reference: Any, n_more: int) -> None:
    prefix, suffix = "Once upon", " the time there was a baker who had a dog and a cat and a house"
    n_ctx = len(reference.tokenizer.encode(prefix + suffix)) + n_more
    session = reference.new_session(n_ctx=n_ctx, n_seq_max=2, kv_unified=True, overflow="shift")
    inner = vars(vars(session.context)["_inner"]).get("_inner", vars(session.context)["_inner"])
    inner.shares_cells = True
    session.ensure_prefix(prefix)
    session.prefill_suffix(suffix)
    twin = session.fork()
    chunks = list(session.decode(max_tokens=n_more + 2, temperature=0, ignore_eos=True))
    gone = [t for chunk in chunks for t in chunk.shifted_out]
    assert chunks[-1].finish_reason == ("length" if gone else "context")
    assert bool(gone) == (n_more == 40)
    assert session.context.tokens(session.resident.seq_id) == session.resident.tape.tokens()
    assert session.context.n_past(session.resident.seq_id) == len(session.resident.tape)
    twin.close()
    session.close()


def test_an_empty_session_is_forked_into_an_empty_sequence(reference: Any) -> None:
    session = reference.new_session(n_ctx=64, n_seq_max=2, kv_unified=True)
    twin = session.fork()
    assert twin.state == "EMPTY"
    twin.ensure_prefix(TEXT)
    twin.close()
    assert session.context.n_free() == 64
    session.close()
