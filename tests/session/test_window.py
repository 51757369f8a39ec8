"""The window's edge: exactly full, shifted, truncated, and what goes on from there."""

from __future__ import annotations

from typing import Any

import pytest

import infercore as ic


def test_a_prefix_that_fills_the_window_exactly(toy: Any) -> None:
    for overflow in ("error", "truncate"):
        session = toy.new_session(n_ctx=16, overflow=overflow)
        status = session.ensure_prefix("x" * 15)
        assert (status.resident_tokens, status.available_tokens) == (16, 0)
        for call in (lambda s=session: s.decode(), lambda s=session: s.prefill_suffix("y")):
            with pytest.raises(ic.ContextOverflowError):
                call()
        assert session.state == "PREFIXED"


def test_a_full_window_is_shifted_by_the_next_decode_too(reference: Any) -> None:
    session = reference.new_session(n_ctx=64, overflow="shift")
    session.ensure_prefix("Once upon")
    free = session.context.n_free()
    list(session.decode(max_tokens=free, temperature=0, ignore_eos=True))
    assert session.context.n_free() == 0
    chunks = list(session.decode(max_tokens=3, temperature=0, ignore_eos=True))
    assert chunks[-1].finish_reason == "length"
    assert any(chunk.shifted_out for chunk in chunks)


def test_shift_with_nothing_to_drop(reference: Any) -> None:
    text = "Once upon a time there was a baker named Mira"
    n = len(reference.tokenizer.encode(text))
    session = reference.new_session(n_ctx=n + 1, overflow="shift")
    session.ensure_prefix(text)
    chunks = list(session.decode(max_tokens=9, temperature=0, ignore_eos=True))
    assert chunks[-1].finish_reason == "context"
    assert sum(len(chunk.tokens) for chunk in chunks) == 1


@pytest.fixture
def shifted(reference: Any) -> Any:
    session = reference.new_session(n_ctx=64, overflow="shift")
    session.ensure_prefix("Once upon")
    chunks = list(session.decode(max_tokens=80, temperature=0, ignore_eos=True))
    assert any(chunk.shifted_out for chunk in chunks)
    return session


def test_append_behind_moved_tokens_evaluates_only_what_is_new(shifted: Any) -> None:
    held = shifted.context.tokens()
    status = shifted.prefill_suffix(ic.SuffixInput(text=" And", mode="append"))
    n_new = len(shifted.encode(" And", parse_special=True, add_special=False))
    assert status.reused_tokens + status.prefilled_tokens == n_new
    assert shifted.context.tokens()[: len(held)] == held


@pytest.mark.parametrize("way", ["snapshot", "fork"])
def test_moved_tokens_are_not_taken_for_a_cold_run_elsewhere(
    reference: Any, shifted: Any, way: str
) -> None:
    start = shifted.explain_context().prefix_tokens
    text = reference.tokenizer.decode(shifted.context.tokens()[start : start + 8])
    if way == "fork":
        other = shifted.fork()
    else:
        other = reference.new_session(n_ctx=64, overflow="shift")
        other.restore(shifted.snapshot())
    other.ensure_prefix("Once upon")
    assert other.prefill_suffix(text).reused_tokens == 0
    other.close()


def test_a_chat_or_answer_without_room_changes_nothing(toy: Any) -> None:
    session = toy.new_session(n_ctx=40)
    session.ensure_prefix("Once")
    before = session.explain_context()
    with pytest.raises(ic.ContextOverflowError) as caught:
        session.chat([{"role": "user", "content": "x" * 20}])
    assert caught.value.stage == "decode"
    with pytest.raises(ic.ContextOverflowError):
        session.chat([{"role": "user", "content": "x" * 40}])
    assert session.explain_context() == before


def test_a_chat_leaves_out_whole_turns_where_that_was_asked_for(toy: Any) -> None:
    with toy.new_session(n_ctx=64, overflow="truncate") as session:
        turns = [{"role": role, "content": "x" * 9} for role in ("user", "assistant") * 4]
        last = {"role": "user", "content": "y" * 9}
        chunks = list(session.chat([*turns, last], max_tokens=1))
        assert chunks[0].dropped_messages == tuple(range(len(chunks[0].dropped_messages)))
        assert 0 < len(chunks[0].dropped_messages) <= len(turns)
        with pytest.raises(ic.ContextOverflowError):
            session.chat([{"role": "user", "content": "x" * 70}], max_tokens=1)


def test_a_bad_grammar_is_refused_before_a_chat_changes_anything(toy: Any) -> None:
    pytest.importorskip("llguidance")
    session = toy.new_session(n_ctx=128)
    session.ensure_prefix("Once")
    before = session.explain_context()
    bad = {"type": "grammar", "grammar": "start: ("}
    with pytest.raises((ic.GrammarError, ic.InvalidInputError)):
        session.chat([{"role": "user", "content": "x"}], response_format=bad)
    assert session.explain_context() == before


def test_a_native_sampler_after_a_restore(backend_name: str, model: Any, exact: Any) -> None:
    if not model.capabilities.native_sampler or not model.capabilities.sequence_state:
        pytest.skip(f"{backend_name} has no sampler of its own")
    fields = {"n_ctx": 64, **exact}
    with model.new_session(**fields) as session, model.new_session(**fields) as other:
        session.ensure_prefix("Once upon a time")
        other.restore(session.snapshot())
        native = {"max_tokens": 4, "temperature": 0, "implementation": "native"}
        expected = [t for chunk in session.decode(**native) for t in chunk.tokens]
        assert [t for chunk in other.decode(**native) for t in chunk.tokens] == expected


def test_a_malformed_header_is_a_typed_error(reference: Any) -> None:
    import attrs

    from infercore.engine import blob

    session = reference.new_session(n_ctx=64)
    session.ensure_prefix("Once upon")
    snapshot = session.snapshot()
    header, payload, _ = blob.unpack(snapshot.data)
    for change in (
        {"state": "FATAL"}, {"logical": -1}, {"logical": "5"}, {"parts": {}}, {"cut": []},
                   {"manifest": 5}, {"parts": None}, {"logical": 50}):  # fmt: skip
        data = blob.pack({**header, "note": {**header["note"], **change}}, payload)
        with pytest.raises(ic.SnapshotError) as caught:
            session.restore(attrs.evolve(snapshot, data=data))
        refused = caught.value.state_after == "unchanged"
        assert session.state == ("PREFIXED" if refused else "EMPTY")


def test_close_from_within_its_own_call_is_refused_and_changes_nothing(toy: Any) -> None:
    session = toy.new_session(n_ctx=64)
    session.ensure_prefix("Once")
    refused: list[bool] = []

    class Closing:
        def apply(self, logits: Any) -> Any:
            with pytest.raises(ic.SessionBusyError):
                session.close()
            refused.append(True)
            return logits

    fields = {"max_tokens": 3, "temperature": 0, "ignore_eos": True}
    chunks = list(session.decode(**fields, processors=[Closing()]))
    assert refused
    assert chunks[-1].finish_reason == "length"
    session.close()
    assert session.closed
