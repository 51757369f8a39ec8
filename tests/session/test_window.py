"""The window's edge: exactly full, shifted, truncated, and what goes on from there."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import numpy as np
import pytest

import infercore as ic
import pack


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


def test_samples_shift_in_a_context_that_cannot_be_saved() -> None:
    from infercore.testing import load_reference_model

    pack.need_pack()
    fields = {"max_tokens": 20, "temperature": 1.0, "ignore_eos": True}
    with load_reference_model(sequence_state=False) as model:
        found = []
        for n in (3, 1):
            session = model.new_session(n_ctx=40, overflow="shift")
            session.ensure_prefix([model.tokenizer.bos, 300])
            session.prefill_suffix([300] * 34)
            found.append(session.sample_many(n, seed=4 - n, **fields)[-1].tokens)
            assert session.explain_context().suffix_tokens == 34
    assert found[0] == found[1]


def test_shift_with_nothing_to_drop(reference: Any) -> None:
    text = "Once upon a time there was a baker named Mira"
    n = len(reference.tokenizer.encode(text))
    session = reference.new_session(n_ctx=n + 1, overflow="shift")
    session.ensure_prefix(text)
    chunks = list(session.decode(max_tokens=9, temperature=0, ignore_eos=True))
    assert chunks[-1].finish_reason == "context"
    assert sum(len(chunk.tokens) for chunk in chunks) == 1


def wait_for(there: Any) -> None:
    until = time.monotonic() + 20
    while not there():
        assert time.monotonic() < until
        time.sleep(0.005)


def told(chunks: Any) -> list[Any]:
    return [(chunk.text, chunk.finish_reason, chunk.shifted_out) for chunk in chunks]


@pytest.mark.parametrize("overflow", ["shift", "error"])
@pytest.mark.parametrize(("n_prefix", "n_suffix"), [(30, 0), (30, 1), (30, 2), (20, 10), (5, 20)])
@pytest.mark.parametrize("n_read", [2, 9, 99])
def test_a_window_is_filled_and_shifted_alike_alone_and_in_a_pool(
    reference: Any, n_prefix: int, n_suffix: int, n_read: int, overflow: str
) -> None:
    ids = reference.tokenizer.encode("There was a baker named Mira, who lived near. " * 9)
    found = []
    with reference.new_pool(n_ctx=32, n_parallel=2) as pool:
        alone = reference.new_session(n_ctx=32, overflow=overflow)
        for session in (alone, pool.open_session(overflow=overflow)):
            session.ensure_prefix(ids[:n_prefix])
            if n_suffix:
                session.prefill_suffix(ids[60 : 60 + n_suffix])
            made = []
            if n_prefix + n_suffix < 32 or overflow == "shift":
                stream = session.decode(max_tokens=14, temperature=0, ignore_eos=True)
                made = told(next(stream, ic.StreamChunk(text="")) for _ in range(n_read))
                stream.close()
            if overflow == "shift":  # what was moved is gone on behind
                made += told(session.decode(max_tokens=5, temperature=0, ignore_eos=True))
            n_resident = session.explain_context().resident_tokens
            assert n_resident <= 32
            assert session.snapshot().resident_tokens == n_resident
            found.append((made, n_resident))
        alone.close()
    assert found[0] == found[1]


def test_what_a_pool_moved_is_of_use_to_nobody_else(reference: Any) -> None:
    """A reader that has not heard of the shift yet, and a snapshot that was restored."""
    ids = reference.tokenizer.encode("There was a baker named Mira, who lived near. " * 9)
    with (
        reference.new_pool(n_ctx=32, n_parallel=3) as pool,
        reference.new_session(n_ctx=32) as cold,
    ):
        session = pool.open_session(overflow="shift")
        for n_read in (1, 2, 14):
            session.ensure_prefix(ids[:10])
            session.prefill_suffix(ids[60:80])
            stream = session.decode(max_tokens=14, temperature=0, ignore_eos=True)
            for _ in range(n_read):
                next(stream)
            wait_for(lambda: session.context.sequence.is_cut)
            stream.close()
            moved = list(session.context.sequence.tokens)
            snapshot = session.snapshot() if n_read > 2 else None
            session.ensure_prefix(ids[:10])
            others = [session, pool.open_session()]
            if snapshot is not None:
                restored = pool.open_session()
                restored.restore(snapshot)
                assert restored.explain_context().cuts == (10,)
            for other in others:
                other.ensure_prefix(moved[:14])
                other.prefill_suffix(moved[14:16])
                cold.ensure_prefix(moved[:14])
                cold.prefill_suffix(moved[14:16])
                gap = np.abs(other.context.logits() - cold.context.logits()).max()
                assert gap <= cold.context.tolerance


@pytest.mark.parametrize("overflow", ["shift", "error"])
@pytest.mark.parametrize("in_pool", [False, True])
def test_guesses_fill_the_window_as_plain_tokens_do(
    reference: Any, overflow: str, in_pool: bool
) -> None:
    ids = reference.tokenizer.encode("There was a baker named Mira. " * 4)[:24]
    guessing = ic.SpeculativeConfig(kind="draft_model", draft_model=reference, n_draft=5)
    found = []
    with reference.new_pool(n_ctx=32, n_parallel=2) as pool:
        for n in range(18, 24):
            texts = []
            for speculative in (None, guessing):
                opens = pool.open_session if in_pool else partial(reference.new_session, n_ctx=32)
                with opens(overflow=overflow) as session:
                    session.ensure_prefix(ids[:n])
                    chunks = list(
                        session.decode(
                            max_tokens=14, temperature=0, ignore_eos=True, speculative=speculative
                        )
                    )
                texts.append(("".join(c.text for c in chunks), chunks[-1].finish_reason))
            found.append(texts)
    assert all(plain == guessed for plain, guessed in found)


@pytest.mark.parametrize("in_pool", [False, True])
def test_what_fails_behind_the_last_wanted_token_fails_nobody(
    reference: Any, in_pool: bool
) -> None:
    guessing = ic.SpeculativeConfig(kind="draft_model", draft_model=reference, n_draft=5)
    with reference.new_pool(n_ctx=64) as pool:
        session = pool.open_session() if in_pool else reference.new_session(n_ctx=64)
        session.ensure_prefix("There was a baker")
        n = session.explain_context().resident_tokens

        def none_behind(tokens: Any, logits: Any) -> Any:
            return logits if len(tokens) < n + 3 else np.full_like(logits, -np.inf)

        fields = {"temperature": 0, "processors": [none_behind], "speculative": guessing}
        assert list(session.decode(max_tokens=3, **fields))[-1].finish_reason == "length"
        session.ensure_prefix("There was a baker")
        stream = session.decode(max_tokens=9, **fields)
        assert [len(next(stream).tokens) for _ in range(3)] == [1, 1, 1], "all that could be chosen"
        with pytest.raises(ic.InvalidStateError):
            next(stream)
        session.close()


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
