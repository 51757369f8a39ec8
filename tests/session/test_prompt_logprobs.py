"""Log-probabilities of a prompt in a pool, where the engine loses what was evaluated for them."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

import infercore as ic

if TYPE_CHECKING:
    from collections.abc import Callable

TEXT = "the little dog and the baker went to see the big house and then they all played " * 8
POOL: dict[str, Any] = {"n_ctx": 512, "n_parallel": 2, "n_step_tokens": 64}
SECONDS = 60.0


def found_in(session: Any) -> tuple[list[float], list[int]]:
    chunks = list(session.decode(max_tokens=4, temperature=0, prompt_logprobs=1))
    told = [one.logprob for one in chunks[0].prompt_logprobs or ()]
    return told, [token for chunk in chunks for token in chunk.tokens]


def in_time(work: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()), daemon=True)
    thread.start()
    thread.join(SECONDS)
    assert found, "a call of a pool hangs"
    return found[0]


@pytest.fixture
def wanted(reference: Any) -> Any:
    with reference.new_session(n_ctx=512) as session:
        session.ensure_prefix(TEXT)
        return found_in(session)


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("at", [1, 2, 3])
def test_when_the_engine_is_opened_anew(
    reference: Any, faults: Any, wanted: Any, at: int, *, invariant: bool
) -> None:
    with reference.new_pool(**POOL, batch_invariant=invariant) as pool:
        session = pool.open_session()
        session.ensure_prefix(TEXT)
        faults.plan("decode", ic.SessionFatalError("lost", cause=None), at=at)
        told, tokens = in_time(lambda: found_in(session))
        assert pool.stats().n_restarts == 1
    assert told == pytest.approx(wanted[0], abs=1e-3)
    assert tokens == wanted[1]


def test_when_others_take_its_cells(reference: Any, wanted: Any) -> None:
    with reference.new_pool(**POOL, n_cells=512) as pool:
        session, other = pool.open_session(), pool.open_session()
        session.ensure_prefix(TEXT)
        places = session.context.scheduler.places
        step, n_taken = session.context.scheduler.stepping.evaluate, [0]

        def evaluate() -> bool:  # it has a place: it loses that and its cells, three times
            for job in [*session.context.scheduler.roster.running]:
                if job.n_looked and n_taken[0] < 3:
                    n_taken[0] += 1
                    places.preempt(job)
                    return True
            return bool(step())

        session.context.scheduler.stepping.evaluate = evaluate
        told, tokens = in_time(lambda: found_in(session))
        assert n_taken == [3]
        assert other.generate("tick tock", max_tokens=2)
    assert told == pytest.approx(wanted[0], abs=1e-3)
    assert tokens == wanted[1]


def test_bits_are_those_of_a_session_that_loses_nothing(reference: Any) -> None:
    def bits(*, loses: bool) -> list[float]:
        with reference.new_pool(n_ctx=512, n_parallel=2, batch_invariant=True) as pool:
            session = pool.open_session()
            session.ensure_prefix(TEXT)
            list(session.decode(max_tokens=1, temperature=0, prompt_logprobs=1))
            context = session.context
            if loses:
                context.owner.ask(
                    lambda: context.scheduler.places.let_go(context.sequence, keep=False)
                )
            chunks = session.decode(max_tokens=4, temperature=0, logprobs=1)
            return [one.logprob for chunk in chunks for one in chunk.logprobs or ()]

    assert bits(loses=False) == bits(loses=True)
