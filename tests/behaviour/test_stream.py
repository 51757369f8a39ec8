"""Every end of a stream is defined, and the session is usable after each."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import infercore as ic

PROMPT = "Once upon a time there was a baker named Mira"


def joined(chunks: list[Any]) -> str:
    return "".join(chunk.text for chunk in chunks)


def ids(chunks: list[Any]) -> list[int]:
    return [token for chunk in chunks for token in chunk.tokens]


def test_joined_text_is_the_text_of_the_tokens(model: Any, session: Any) -> None:
    session.ensure_prefix(PROMPT)
    chunks = list(session.decode(max_tokens=100, temperature=1.5, seed=7))
    assert joined(chunks) == model.tokenizer.decode(ids(chunks), skip_special=True)
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].usage.completion_tokens == len(ids(chunks))


def test_generated_tokens_are_resident_and_a_second_decode_continues(session: Any) -> None:
    session.ensure_prefix(PROMPT)
    whole = ids(list(session.decode(max_tokens=40, temperature=0)))
    start = session.explain_context().prefix_tokens
    assert session.context.tokens()[start:] == whole
    session.ensure_prefix(PROMPT)
    first = ids(list(session.decode(max_tokens=15, temperature=0)))
    second = ids(list(session.decode(max_tokens=25, temperature=0)))
    assert first + second == whole


def test_length_and_usage(session: Any) -> None:
    status = session.ensure_prefix(PROMPT)
    last = list(session.decode(max_tokens=5, temperature=0))[-1]
    assert last.finish_reason == "length"
    usage = last.usage
    assert (usage.prompt_tokens, usage.cached_tokens) == (status.prefix_tokens, 0)
    assert usage.completion_tokens == 5
    assert usage.time_to_first_token_ms > 0
    assert usage.tokens_per_second > 0
    session.ensure_prefix(PROMPT)
    warm = list(session.decode(max_tokens=1, temperature=0))[-1].usage
    assert warm.cached_tokens == status.prefix_tokens - 1


def test_the_window_filled(new_session: Any) -> None:
    session = new_session(n_ctx=64)
    status = session.ensure_prefix(PROMPT)
    chunks = list(session.decode(temperature=0, ignore_eos=True))
    assert chunks[-1].finish_reason == "context"
    assert len(ids(chunks)) == 64 - status.prefix_tokens
    assert session.explain_context().available_tokens == 0
    with pytest.raises(ic.ContextOverflowError) as caught:
        session.decode(max_tokens=1)
    assert (caught.value.stage, caught.value.n_ctx) == ("decode", 64)


def test_a_stop_string_never_leaks(session: Any) -> None:
    session.ensure_prefix(PROMPT)
    whole = joined(list(session.decode(max_tokens=60, temperature=0)))
    for start in range(5, 40):
        stop = whole[start : start + 6]
        session.ensure_prefix(PROMPT)
        chunks = list(session.decode(max_tokens=60, temperature=0, stop=[stop]))
        assert joined(chunks) == whole[: whole.index(stop)]
        assert chunks[-1].finish_reason == "stop"
        tail = session.explain_context().resident_tokens
        assert session.context.n_past() == tail


def test_a_stop_token_is_not_resident(model: Any, session: Any) -> None:
    session.ensure_prefix(PROMPT)
    whole = ids(list(session.decode(max_tokens=20, temperature=0)))
    stop = whole[10]
    session.ensure_prefix(PROMPT)
    chunks = list(session.decode(max_tokens=20, temperature=0, stop_tokens=[stop]))
    assert ids(chunks) == whole[: whole.index(stop)]
    assert chunks[-1].finish_reason == "stop"


def test_closing_the_iterator_keeps_what_was_shown(session: Any) -> None:
    session.ensure_prefix(PROMPT)
    whole = ids(list(session.decode(max_tokens=30, temperature=0)))
    for n in (0, 1, 7):
        session.ensure_prefix(PROMPT)
        stream = session.decode(max_tokens=30, temperature=0)
        shown = [next(stream) for _ in range(n)]
        stream.close()
        stream.close()
        assert ids(shown) == whole[: len(ids(shown))]
        rest = ids(list(session.decode(max_tokens=30 - len(ids(shown)), temperature=0)))
        assert ids(shown) + rest == whole


def test_dropping_the_iterator_frees_the_session(session: Any) -> None:
    session.ensure_prefix(PROMPT)
    stream = session.decode(max_tokens=30, temperature=0)
    next(stream)
    with pytest.raises(ic.SessionBusyError):
        session.ensure_prefix(PROMPT)
    del stream
    session.ensure_prefix(PROMPT)


def test_an_iterator_left_in_another_thread_frees_the_session(session: Any) -> None:
    session.ensure_prefix(PROMPT)
    shown: list[Any] = []

    def read_some() -> None:
        stream = session.decode(temperature=0, ignore_eos=True)
        shown.extend(next(stream) for _ in range(3))

    thread = threading.Thread(target=read_some)
    thread.start()
    thread.join()
    start = session.explain_context().prefix_tokens
    assert session.context.tokens()[start:] == ids(shown)
    session.ensure_prefix(PROMPT)


def test_an_open_decode_holds_the_session(session: Any) -> None:
    session.ensure_prefix(PROMPT)
    stream = session.decode(max_tokens=30)
    for call in (
        lambda: session.decode(),
        lambda: session.prefill_suffix("x"),
        session.snapshot,
        session.fork,
    ):
        with pytest.raises(ic.SessionBusyError):
            call()
    assert session.explain_context().state in {"PREFIXED", "DECODED"}
    stream.close()


def test_cancel_from_another_thread(session: Any) -> None:
    session.ensure_prefix(PROMPT)
    stream = session.decode(temperature=0, ignore_eos=True)
    shown = [next(stream)]
    thread = threading.Thread(target=session.cancel)
    thread.start()
    thread.join()
    shown += list(stream)
    assert shown[-1].finish_reason == "cancelled"
    start = session.explain_context().prefix_tokens
    assert session.context.tokens()[start:] == ids(shown)
    assert session.state == "DECODED"


def test_closing_the_session_in_mid_decode(new_session: Any) -> None:
    session = new_session()
    session.ensure_prefix(PROMPT)
    stream = session.decode(max_tokens=30)
    next(stream)
    session.close()
    with pytest.raises(ic.SessionClosedError):
        next(stream)
    report = session.explain_context()
    assert (report.state, report.closed) == ("CLOSED", True)
    with pytest.raises(ic.SessionClosedError):
        session.ensure_prefix("x")


def test_control_tokens_are_text_only_when_asked_for(model: Any, session: Any) -> None:
    bias = {model.tokenizer.bos: 1000.0}
    session.ensure_prefix(PROMPT)
    plain = list(session.decode(max_tokens=3, temperature=0, logit_bias=bias))
    assert joined(plain) == ""
    assert ids(plain) == [model.tokenizer.bos] * 3
    session.ensure_prefix(PROMPT)
    shown = list(session.decode(max_tokens=3, temperature=0, logit_bias=bias, special_text=True))
    assert joined(shown) == model.tokenizer.token_bytes(model.tokenizer.bos).decode() * 3


def test_logprobs(session: Any) -> None:
    session.ensure_prefix(PROMPT)
    chunks = list(session.decode(max_tokens=10, temperature=0, logprobs=3))
    steps = [step for chunk in chunks for step in chunk.logprobs]
    assert [step.token for step in steps] == ids(chunks)
    for step in steps:
        assert step.logprob <= 0
        assert len(step.top) == 3
        assert step.top[0] == (step.token, pytest.approx(step.logprob))


def test_the_seed_is_reported_and_repeats(session: Any) -> None:
    session.ensure_prefix(PROMPT)
    first = list(session.decode(max_tokens=20, temperature=1.2))
    seed = first[-1].usage.seed
    session.ensure_prefix(PROMPT)
    assert ids(list(session.decode(max_tokens=20, temperature=1.2, seed=seed))) == ids(first)


class Raising:
    def apply(self, logits: Any) -> Any:
        raise ZeroDivisionError("mine")


def test_a_processor_that_raises_reaches_the_caller_and_frees_the_session(session: Any) -> None:
    session.ensure_prefix(PROMPT)
    with pytest.raises(ZeroDivisionError, match="mine"):
        list(session.decode(max_tokens=3, processors=[Raising()]))
    session.ensure_prefix(PROMPT)
    assert joined(list(session.decode(max_tokens=3, temperature=0)))
