"""What users who drive tokens and the cache themselves rely on, on every engine."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import infercore as ic
from infercore.testing import load_reference_model

if TYPE_CHECKING:
    from collections.abc import Callable

ABORT_SECONDS = 0.1


@pytest.fixture(scope="module")
def ids(model: Any, golden: Any) -> list[int]:
    """Return 700 ids of real text."""
    found: list[int] = []
    for prompt in golden.prompts:
        found += [*prompt.tokens, *prompt.greedy]
    assert len(found) >= 700
    return found[:700]


def relative(left: Any, right: Any) -> float:
    """Return the largest difference, in units of the largest logit where that exceeds 1."""
    return float(np.abs(left - right).max() / max(1.0, float(np.abs(right).max())))


def last_row(context: Any, ids: list[int], n_chunk: int) -> Any:
    for start in range(0, len(ids), n_chunk):
        context.decode(ids[start : start + n_chunk])
    return context.logits().copy()


def test_an_abort_from_another_thread_is_soon_and_counted_right(
    new_context: Callable[..., Any], ids: list[int]
) -> None:
    context = new_context(n_ctx=16384, n_ubatch=32)
    long = (ids * 24)[:16000]
    for _ in range(3):  # another process may have the processor just then
        context.clear()
        kept, took = aborted(context, long)
        assert kept == context.n_past() == context.n_resident() < len(long)
        assert context.tokens() == long[:kept]
        if took < ABORT_SECONDS + one_step(context, long):
            break
    else:
        pytest.fail(f"an abort took {took:.3f} s, and two before it too long too")
    assert context.tokens() == long[:kept]
    assert context.seq_remove(0, min(kept, 300))
    context.decode(ids[:10])
    fresh = last_row(new_context(), [*long[: min(kept, 300)], *ids[:10]], 32)
    assert relative(context.logits(), fresh) < 1e-4


def aborted(context: Any, ids: list[int]) -> tuple[int, float]:
    """Abort a prefill of ``ids``; return the tokens resident, and the seconds that took."""
    caught: list[ic.DecodeAbortedError] = []
    ended: list[float] = []

    def prefill() -> None:
        try:
            context.decode(ids, logits="none")
        except ic.DecodeAbortedError as error:
            caught.append(error)
        ended.append(time.perf_counter())

    worker = threading.Thread(target=prefill)
    worker.start()
    time.sleep(0.2)
    begun = time.perf_counter()
    while not ended:
        context.abort()
        time.sleep(0.001)
    worker.join()
    if not caught:
        pytest.fail("the prefill ended before it could be aborted")
    return caught[0].resident_tokens, ended[0] - begun


def one_step(context: Any, ids: list[int]) -> float:
    """Return the seconds of one micro-batch where the context stands."""
    begun = time.perf_counter()
    context.decode(ids[:32], logits="none")
    elapsed = time.perf_counter() - begun
    context.seq_remove(0, context.n_past() - 32)
    return elapsed


def test_contexts_in_two_threads_run_at_once_and_as_they_do_alone(
    new_context: Callable[..., Any], ids: list[int]
) -> None:
    texts = (ids[:600], ids[50:650])
    alone = [last_row(new_context(), text, 100) for text in texts]
    contexts = [new_context(), new_context()]
    inside: set[int] = set()
    met = threading.Event()

    def run(i: int) -> Any:
        def count() -> bool:
            inside.add(i)
            if len(inside) == 2:
                met.set()
            else:  # an engine that runs one context at a time never lets the other in
                met.wait(20)
            return False

        contexts[i].set_abort_callback(count)
        rows = last_row(contexts[i], texts[i], 100)
        contexts[i].set_abort_callback(None)
        return rows

    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(run, range(2)))
    assert met.is_set()
    for row, expected in zip(together, alone, strict=True):
        assert np.array_equal(row, expected)


def test_python_goes_on_while_the_engine_works(
    new_context: Callable[..., Any], ids: list[int]
) -> None:
    context = new_context(n_ctx=2048)
    ticks, done = [0], threading.Event()

    def tick() -> None:
        while not done.is_set():
            ticks[0] += 1
            time.sleep(0.001)

    ticker = threading.Thread(target=tick)
    ticker.start()
    begun = time.perf_counter()
    context.decode((ids * 3)[:2000], logits="none")
    elapsed = time.perf_counter() - begun
    counted = ticks[0]
    done.set()
    ticker.join()
    assert counted > elapsed * 1000 / 20  # a lock held over the call would allow none


def test_times_of_sessions_are_told_beside_those_of_the_engine(new_session: Any) -> None:
    session = new_session()
    session.ensure_prefix("Once upon a time")
    perf = session.context.perf()
    assert perf.tokenize_ms > 0
    assert (perf.sample_ms, perf.grammar_ms) == (0, 0)
    list(session.decode(max_tokens=4))
    sampled = session.context.perf()
    assert sampled.sample_ms > 0
    assert sampled.grammar_ms == 0
    choice = {"type": "choice", "choices": [" and an owl", " but a fox"]}
    stream = session.decode(max_tokens=40, response_format=choice)
    next(stream)
    compiled = session.context.perf().grammar_ms
    assert compiled > 0
    stream.close()
    perf = session.context.perf()
    assert perf.grammar_ms > compiled
    assert perf.sample_ms > sampled.sample_ms
    session.context.reset_perf()
    assert session.context.perf().tokenize_ms == session.context.perf().grammar_ms == 0


def test_warming_up_beside_what_is_held(
    new_context: Callable[..., Any], ids: list[int], backend_name: str
) -> None:
    for n_seq_max in (1, 2):
        context, plain = new_context(n_seq_max=n_seq_max), new_context(n_seq_max=n_seq_max)
        for one in (context, plain):
            one.decode(ids[:20])
        context.reset_perf()
        context.warmup()
        assert context.tokens() == ids[:20]
        assert (context.n_past(), context.seq_pos_max()) == (20, 19)
        assert context.perf().prefill_tokens == 0
        for one in (context, plain):
            one.decode(ids[20:30])
        assert np.array_equal(context.logits(), plain.logits())
    full = new_context(n_ctx=20)
    full.decode(ids[:20])
    if backend_name == "llamacpp" and full.effective["n_ctx"] == 20:
        with pytest.raises(ic.UnsupportedFeatureError, match="full"):
            full.warmup()
    assert full.tokens() == ids[:20]


def test_a_divide_onto_positions_that_are_held_is_computed_right(
    new_context: Any, golden: Any
) -> None:
    """Several tokens at one position, as the reference computes them, also after a removal."""
    ids = golden.prompts[0].tokens[:8] * 3
    if not new_context().capabilities.kv_divide:
        pytest.skip("this backend cannot divide positions")

    def rows(context: Any) -> list[Any]:
        context.decode(ids[:20])
        context.seq_divide(0, 10, 14, 2)
        context.decode_one(ids[20])
        found = [context.logits().copy()]
        assert context.seq_remove(0, 5, 6)
        context.decode_one(ids[21])
        assert (context.n_past(), context.n_resident()) == (22, 19)
        return [*found, context.logits().copy()]

    with load_reference_model() as reference, reference.new_context(n_ctx=64) as own:
        expected = rows(own)
    for found, right in zip(rows(new_context()), expected, strict=True):
        assert np.abs(found - right).max() < 1e-3


def test_one_token_for_several_sequences(new_context: Any, golden: Any) -> None:
    """It is right where they hold the same, however that came, and refused where they do not."""
    ids = list(golden.prompts[0].tokens)
    context = new_context(n_seq_max=3, kv_unified=True)
    context.decode(ids[:4], seq_id=0)
    context.decode(ids[:4], seq_id=1)
    context.decode([*ids[:3], ids[5]], seq_id=2)
    for wrong in ([(ids[4], [0, 2], True)], [(7, [0], False), (8, [1], False), (9, [0, 1], True)]):
        held = [context.tokens(s) for s in range(3)]
        with pytest.raises(ic.InvalidSequenceError, match="different tokens") as caught:
            context.decode_batch(wrong)
        assert caught.value.state_after == "unchanged"
        assert [context.tokens(s) for s in range(3)] == held
    context.decode_batch([(ids[4], [0, 1], False), (ids[5], [1, 0], True)])
    context.seq_remove(0)
    context.decode_one(ids[6], seq_id=1)
    fresh = new_context()
    fresh.decode(ids[:7])
    assert np.abs(context.logits() - fresh.logits()).max() < 1e-3
