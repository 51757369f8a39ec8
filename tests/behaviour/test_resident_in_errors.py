"""What an error says is resident never exceeds the window, and is what the context holds."""

from __future__ import annotations

from typing import Any

import pytest

import infercore as ic

WINDOW = 64
FIELDS = {"n_batch": 16, "n_threads": 1, "n_threads_batch": 1}
IDS = list(range(20, 20 + WINDOW))


def shared(context: Any) -> None:
    """Two sequences that look at the same tokens."""
    context.decode(IDS[:40])
    if context.capabilities.kv_copy != "none":
        context.seq_copy(0, 1)


def moved(context: Any) -> None:
    """Tokens at positions far beyond their number."""
    context.decode(IDS[:40])
    if context.capabilities.kv_shift:
        context.seq_shift(0, 10, -1, 1000)


def holed(context: Any) -> None:
    """Tokens with a gap between them."""
    context.decode(IDS[:60])
    if context.capabilities.kv_remove == "any":
        context.seq_remove(0, 5, 40)


def full(context: Any) -> None:
    """Each sequence as full as may be."""
    share = WINDOW // 3 if context.effective.get("kv_unified") else WINDOW
    for seq_id in range(context.n_seq_max):
        context.decode(IDS[:share], seq_id=seq_id)


CALLS = {
    "decode": lambda c: c.decode(IDS * 2),
    "decode in another": lambda c: c.decode(IDS * 2, seq_id=1),
    "eval": lambda c: c.eval(IDS * 2, 3),
    "one by one": lambda c: [c.decode_one(5) for _ in range(2 * WINDOW)],
    "batch": lambda c: [
        c.decode_batch([(5, (0,), False), (6, (1,), False)]) for _ in range(2 * WINDOW)
    ],
    "spans": lambda c: [
        c.decode_spans([(0, IDS[:8], "none"), (1, IDS[:8], "last")]) for _ in range(WINDOW)
    ],
    "state": lambda c: c.decode(IDS * 3, logits="all"),
}


@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize("begin", [shared, moved, holed, full])
def test_an_overflow_counts_what_is_there(model: Any, begin: Any, unified: bool) -> None:
    n_ctx = WINDOW if unified else 3 * WINDOW  # of one sequence it is the same
    fields = {"n_ctx": n_ctx, "n_seq_max": 3, "kv_unified": unified}
    with model.new_context(**fields, **FIELDS) as context:
        for name, call in CALLS.items():
            context.clear()
            begin(context)
            with pytest.raises(ic.ContextOverflowError) as caught:
                call(context)
            error = caught.value
            told = (name, vars(error))
            assert 0 <= error.resident_tokens <= error.n_ctx <= WINDOW, told
            assert error.additional_tokens > 0, told
            assert error.resident_tokens + error.additional_tokens > error.n_ctx, told


@pytest.mark.parametrize("begin", [shared, moved, holed])
def test_an_abort_counts_what_is_there(model: Any, begin: Any) -> None:
    with model.new_context(n_ctx=WINDOW, n_seq_max=3, kv_unified=True, **FIELDS) as context:
        if not context.capabilities.abort:
            pytest.skip("this engine cannot be aborted")
        begin(context)
        context.set_abort_callback(lambda: True)
        with pytest.raises(ic.DecodeAbortedError) as caught:
            context.decode(IDS[:4])
        assert 0 <= caught.value.resident_tokens <= WINDOW
        assert caught.value.resident_tokens in {context.n_resident(0), context.n_resident(0) * 2}


def test_a_session_counts_what_is_there(model: Any) -> None:
    with model.new_session(n_ctx=WINDOW, n_threads=1, n_threads_batch=1) as session:
        session.ensure_prefix("Once upon a time")
        for call in (
            lambda: session.ensure_prefix("dog " * 100),
            lambda: session.prefill_suffix("dog " * 100),
            lambda: session.generate("dog " * 100),
            lambda: list(session.chat([{"role": "user", "content": "dog " * 100}])),
        ):
            with pytest.raises(ic.ContextOverflowError) as caught:
                call()
            assert 0 <= caught.value.resident_tokens <= caught.value.n_ctx == WINDOW
        session.ensure_prefix("dog " * 40)
        list(session.decode(max_tokens=200, ignore_eos=True))
        with pytest.raises(ic.ContextOverflowError) as caught:
            list(session.decode(max_tokens=5))
        assert caught.value.resident_tokens <= WINDOW
