"""Forks that share a context: each has its own truth, and a thread of its own if it likes."""

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


def test_a_fork_has_the_window_though_cells_are_few(pair: Any, greedy: Any, reference: Any) -> None:
    """Both together need more cells than there are: one loses its own, and no token."""
    session, twin = pair
    other = "x y z " * 12
    n_other = len(reference.tokenizer.encode(other))
    n = session.explain_context().resident_tokens
    assert 64 - n < n_other <= 64
    assert session.ensure_prefix(other).prefix_tokens == n_other
    report = twin.explain_context()
    assert (report.resident_tokens, report.held_tokens) == (n, 0)
    assert twin.prefill_suffix(" and").reevaluated_tokens
    with pytest.raises(ic.ContextOverflowError) as caught:
        session.ensure_prefix(other * 2)
    assert (caught.value.stage, caught.value.n_ctx) == ("prefix", 64)


def test_statuses_and_reports_count_the_room_alike(pair: Any) -> None:
    session, twin = pair
    twin.prefill_suffix(" who had a dog")
    status = session.prefill_suffix(" and")
    assert status.available_tokens == session.explain_context().available_tokens
    assert status.available_tokens == 64 - status.resident_tokens


def test_a_shared_context_answers_or_refuses_by_name(pair: Any, reference: Any) -> None:
    context = pair[0].context
    for name in vars(ic.Context):
        if not name.startswith("_"):
            assert getattr(context, name) is not None
    with reference.new_context(n_ctx=64) as own:
        for name in ("n_ubatch", "n_threads", "n_threads_batch", "pooling_type", "attempts"):
            assert getattr(context, name) == getattr(own, name)
    assert context.perf().prefill_tokens > 0
    for call in ("set_adapters", "set_threads", "seq_shift", "save_state", "close"):
        with pytest.raises(ic.UnsupportedFeatureError, match=rf"Context\.{call} .*new_context"):
            getattr(context, call)(1)
    with pytest.raises(ic.UnsupportedFeatureError, match="native_handle"):
        _ = context.native_handle
    assert not hasattr(context, "set_adaptors")


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


def test_two_threads_use_two_forks_at_once(pair: Any, greedy: Any, cold_greedy: Any) -> None:
    session, twin = pair
    expected = {one: cold_greedy(one.model, text, 5) for one, text in
                ((session, TEXT), (twin, "tick"))}  # fmt: skip
    wrong: list[Any] = []

    def work(one: Any, text: str) -> None:
        for _ in range(6):
            one.ensure_prefix(text)
            tokens = greedy(one, 5)
            if tokens != expected[one]:
                wrong.append(tokens)

    threads = [threading.Thread(target=work, args=a) for a in ((session, TEXT), (twin, "tick"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_callback_cannot_wait_for_its_own_engine(pair: Any, greedy: Any) -> None:
    session, twin = pair
    outcomes: list[str] = []

    class Meanwhile:
        def apply(self, logits: Any) -> Any:
            try:
                twin.ensure_prefix("tick")
            except ic.SessionBusyError:
                outcomes.append("busy")
            return logits

    list(session.decode(max_tokens=1, temperature=0, processors=[Meanwhile()]))
    assert outcomes == ["busy"]
    assert twin.ensure_prefix("tick").prefix_tokens


def test_the_context_ends_with_the_last_of_them(reference: Any) -> None:
    session = reference.new_session(n_ctx=64, n_seq_max=2, kv_unified=True)
    session.ensure_prefix(TEXT)
    context = session.context
    twin = session.fork()
    stranger = twin.fork()  # no sequence is left: it has a context of its own
    session.close()
    assert not context.closed
    assert twin.prefill_suffix(" who").resident_tokens
    twin.close()
    assert context.closed
    assert stranger.prefill_suffix(" who").resident_tokens
    stranger.close()
    assert stranger.context.closed


def test_a_stream_collected_anywhere_leaves_what_was_shown(
    pair: Any, greedy: Any, cold_greedy: Any
) -> None:
    session, twin = pair
    expected = cold_greedy(session.model, TEXT, 6)
    stream = session.decode(max_tokens=6, temperature=0)
    shown = list(next(stream).tokens)
    cycle = [stream]
    cycle.append(cycle)
    del stream, cycle

    class Collecting:
        def apply(self, logits: Any) -> Any:
            gc.collect()
            return logits

    list(twin.decode(max_tokens=2, temperature=0, processors=[Collecting()]))
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
    assert chunks[-1].finish_reason == "length"
    assert gone
    assert session.prefill_suffix(ic.SuffixInput(text="", mode="append")).resident_tokens <= n_ctx
    twin.close()
    session.close()


def test_an_empty_session_is_forked_into_an_empty_sequence(reference: Any) -> None:
    session = reference.new_session(n_ctx=64, n_seq_max=2, kv_unified=True)
    twin = session.fork()
    assert twin.state == "EMPTY"
    twin.ensure_prefix(TEXT)
    twin.close()
    session.close()
