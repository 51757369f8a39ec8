"""A turn of a chat: one engine call where nothing has to be kept between its two parts."""

from __future__ import annotations

import pytest

import infercore as ic
from infercore.testing import Faults, load_reference_model

FIRST = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who is Mira?"}]
SECOND = [*FIRST, {"role": "assistant", "content": "A baker."}, {"role": "user", "content": "Why?"}]


@pytest.fixture
def faults():
    return Faults()


@pytest.fixture
def session(faults):
    with load_reference_model(faults=faults) as model, model.new_session(n_ctx=512) as session:
        yield session


def answer(session, messages):
    return "".join(c.text for c in session.chat(messages, max_tokens=6, temperature=0))


def test_a_turn_is_evaluated_in_one_call(session, faults):
    answer(session, FIRST)
    before = faults.calls["decode"]
    stream = session.chat(SECOND, max_tokens=2)
    assert faults.calls["decode"] == before + 1
    assert session.state == "READY"
    stream.close()


def test_what_a_turn_reuses_is_counted_once(session):
    stream = session.chat(FIRST, max_tokens=1)
    assert session.context.perf().reused_tokens == 0
    cold = list(stream)[-1].usage
    assert cold.cached_tokens == 0
    warm = list(session.chat(SECOND, max_tokens=1))[-1].usage
    assert 0 < warm.cached_tokens < warm.prompt_tokens
    assert session.context.perf().reused_tokens == warm.cached_tokens


@pytest.mark.parametrize("work", ["nothing", "half", "all"])
def test_a_turn_that_failed_is_asked_again(session, faults, work):
    answer(session, FIRST)
    faults.plan("decode", ic.DecodeAbortedError("stopped", resident_tokens=0), work=work)
    with pytest.raises(ic.DecodeAbortedError):
        session.chat(SECOND, max_tokens=6)
    faults.reset()
    with session.model.new_session(n_ctx=512) as fresh:
        assert answer(session, SECOND) == answer(fresh, SECOND)
        assert session.explain_context().resident_tokens == fresh.explain_context().resident_tokens


def test_a_stable_part_that_was_reached_stays_the_prefix(session, faults):
    stable = session.chat(FIRST, max_tokens=1)
    n_prefix = session.explain_context().prefix_tokens
    stable.close()
    faults.plan("decode", ic.DecodeAbortedError("stopped", resident_tokens=0))
    other = [FIRST[0], {"role": "user", "content": "Who is Felix?"}]
    with pytest.raises(ic.DecodeAbortedError):
        session.chat(other)
    assert session.state == "PREFIXED"
    assert session.explain_context().prefix_tokens == n_prefix
