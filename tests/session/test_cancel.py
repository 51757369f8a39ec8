"""A cancel at any step leaves a session whose next answer is a cold one's."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

import infercore as ic

if TYPE_CHECKING:
    from collections.abc import Callable

PREFIX = "Once upon the time there was a baker named Mira, who lived by the river. "
SUFFIX = "One evening the baker walked home. "


class CancelAt:
    """Cancels a session from within its k-th engine call."""

    def __init__(self, session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.session = session
        self.left = -1
        inner = vars(session.context)["_inner"]
        for name in ("decode", "decode_one"):
            found = getattr(inner, name, None)
            if found is not None:
                monkeypatch.setattr(inner, name, self.around(found), raising=False)
        session.context._decode_one_inner = getattr(inner, "decode_one", None)

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **fields: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                self.session.cancel()
            return call(*args, **fields)

        return counted


def tokens_told(call: Callable[[str], Any], text: str) -> int | None:
    """Return the tokens that a cancelled call tells to be resident."""
    try:
        call(text)
    except ic.DecodeAbortedError as error:
        return error.resident_tokens
    return None


def test_in_a_prefill(
    any_model: Any, cold_greedy: Any, greedy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = cold_greedy(any_model, PREFIX + SUFFIX)
    for k in range(1, 40):
        with any_model.new_session(n_ctx=256, n_batch=4) as session:
            at = CancelAt(session, monkeypatch)
            at.left = k
            cancelled = 0
            for call, text in ((session.ensure_prefix, PREFIX), (session.prefill_suffix, SUFFIX)):
                told = tokens_told(call, text)
                if told is not None:
                    cancelled += 1
                    assert told == session.context.n_past()
                    assert session.state in {"EMPTY", "PREFIXED"}
                    kept = session.context.n_past()
                    status = call(text)
                    resumed = status.reused_tokens + status.prefix_tokens * (text == SUFFIX)
                    assert resumed >= kept or any_model.capabilities.kv_remove == "none"
            left, at.left = at.left, -1
            assert greedy(session) == expected
        if left > 0:
            assert not cancelled
            return
    pytest.fail("the prefill took more engine calls than were tried")


def test_in_a_decode(
    any_model: Any, cold_greedy: Any, greedy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    n = 10
    expected = cold_greedy(any_model, PREFIX, n)
    for k in range(1, n + 1):
        with any_model.new_session(n_ctx=256, n_batch=16) as session:
            session.ensure_prefix(PREFIX)
            at = CancelAt(session, monkeypatch)
            at.left = k
            chunks = list(session.decode(max_tokens=n, temperature=0))
            shown = [token for chunk in chunks for token in chunk.tokens]
            if at.left <= 0:
                assert chunks[-1].finish_reason == "cancelled" or shown == expected
            assert shown == expected[: len(shown)]
            assert session.context.tokens() == any_model.tokenizer.encode(PREFIX) + shown
            if len(shown) < len(expected):
                assert shown + greedy(session, n - len(shown)) == expected


def test_while_the_text_is_still_being_tokenized(toy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    session = toy.new_session(n_ctx=64)
    encode = session.encode

    def encode_and_cancel(*args: Any, **fields: Any) -> list[int]:
        session.cancel()
        return encode(*args, **fields)

    monkeypatch.setattr(session, "encode", encode_and_cancel)
    with pytest.raises(ic.DecodeAbortedError):
        session.ensure_prefix("Once")
    monkeypatch.undo()
    assert session.ensure_prefix("Once").prefilled_tokens == 5


def test_when_nothing_runs_does_nothing(toy: Any, greedy: Any) -> None:
    session = toy.new_session(n_ctx=64)
    session.cancel()
    session.ensure_prefix("Once")
    session.cancel()
    assert greedy(session, 3)


@pytest.mark.parametrize("at", range(1, 5))
def test_in_a_call_that_verifies_guesses(
    reference: Any, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    text = "tick tock tick tock tick tock tick tock tick"
    speculative = ic.SpeculativeConfig(kind="prompt_lookup")
    session = reference.new_session(n_ctx=256)
    session.ensure_prefix(text)
    stream = session.decode(max_tokens=8, temperature=0, speculative=speculative)
    shown = list(next(stream).tokens)
    decode, left = session.context.decode, iter(range(at - 1, -1000, -1))

    def cancelling(*args: Any, **fields: Any) -> None:
        if next(left) == 0:
            session.cancel()
            raise ic.DecodeAbortedError("stopped", resident_tokens=0)
        decode(*args, **fields)

    monkeypatch.setattr(session.context, "decode", cancelling)
    chunks = list(stream)
    shown += [token for chunk in chunks for token in chunk.tokens]
    assert chunks[-1].finish_reason in {"cancelled", "length", "eos"}
    held = session.context.tokens()[: session.explain_context().resident_tokens]
    assert held == reference.tokenizer.encode(text) + shown
    session.close()


def test_a_second_cancel_while_the_first_one_is_heeded(
    reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = reference.new_session(n_ctx=256)
    session.ensure_prefix(PREFIX)
    expected = [t for c in session.decode(max_tokens=8, temperature=0) for t in c.tokens]
    session.prefill_suffix("")
    stream = session.decode(max_tokens=8, temperature=0)
    shown = list(next(stream).tokens)

    def stopped(*args: Any, **fields: Any) -> None:
        session.cancel()
        raise ic.DecodeAbortedError("stopped", resident_tokens=0)

    with monkeypatch.context() as patch:
        patch.setattr(session.context, "decode", stopped)
        patch.setattr(session.context, "decode_one", stopped)
        last = list(stream)[-1]
    assert last.finish_reason == "cancelled"
    assert last.usage.completion_tokens == len(shown)
    more = session.decode(max_tokens=8 - len(shown), temperature=0)
    assert shown + [t for c in more for t in c.tokens] == expected
    session.close()


def test_between_the_making_of_a_stream_and_the_end_of_its_call(
    reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with reference.new_session(n_ctx=64) as session:
        session.ensure_prefix("Once")
        made: list[Any] = []

        def sees_no_stream_yet() -> Any:  # then another thread makes one, and its call ends
            monkeypatch.undo()
            made.append(session.decode(max_tokens=20, temperature=0))

        monkeypatch.setattr(session, "open_stream", sees_no_stream_yet)
        session.cancel()
        assert list(made[0])[-1].finish_reason == "cancelled"


def test_while_a_pool_is_given_the_job(reference: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with reference.new_pool(n_ctx=256) as pool, pool.open_session() as session:
        session.ensure_prefix("Once")
        submit = session.context.submit

        def cancelled_meanwhile(job: Any) -> None:
            session.cancel()
            submit(job)

        monkeypatch.setattr(session.context, "submit", cancelled_meanwhile)
        chunks = list(session.decode(max_tokens=200, temperature=0))
        assert chunks[-1].finish_reason == "cancelled"
        assert sum(len(chunk.tokens) for chunk in chunks) < 200


def test_a_time_that_is_over_before_its_timer_has_a_turn(
    any_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "Timer", IdleTimer)
    with any_model.new_session(n_ctx=64) as session:
        with pytest.raises(ic.CallTimeoutError) as caught:
            session.ensure_prefix("Once upon", timeout=1e-9)
        assert (caught.value.resident_tokens, session.state) == (0, "EMPTY")
        assert session.ensure_prefix("Once upon", timeout=60.0).prefilled_tokens


class IdleTimer:
    """A timer whose thread never runs, as on a machine that is busy."""

    ident = None

    def __init__(self, *_: Any) -> None:
        pass

    def start(self) -> None:
        pass

    cancel = join = start


def test_a_timer_that_cannot_be_started_leaves_nothing(
    reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unstartable(threading.Timer):
        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    with reference.new_session(n_ctx=64) as session:
        with monkeypatch.context() as patch:
            patch.setattr(threading, "Timer", Unstartable)
            with pytest.raises(RuntimeError, match="new thread"):
                session.ensure_prefix("Once upon", timeout=1e-3)
        time.sleep(0.01)
        assert session.ensure_prefix("Once upon").prefilled_tokens
