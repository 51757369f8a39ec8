"""The queue of a pool: one caller's many calls do not keep another's from a place."""

from __future__ import annotations

import random
from typing import Any

import pytest

import infercore as ic
from infercore.session.jobs import Job
from infercore.session.prefixes import Prefixes
from infercore.session.sequence import Sequence
from infercore.session.tape import common_prefix
from infercore.session.waiting import Waiting


def job_of(namespace: str) -> Job:
    return Job(Sequence(namespace))


def test_namespaces_take_turns_and_their_calls_keep_their_order() -> None:
    waiting = Waiting()
    many, one = [job_of("many") for _ in range(5)], job_of("one")
    for job in [*many, one]:
        waiting.append(job)
    assert len(waiting) == 6
    assert list(waiting) == [*many, one]
    taken = [waiting.take() for _ in range(6)]
    assert taken == [many[0], one, *many[1:]]
    assert not waiting
    assert not list(waiting)


def test_who_is_put_back_is_the_next_one() -> None:
    waiting = Waiting()
    jobs = [job_of("a"), job_of("b"), job_of("a")]
    for job in jobs:
        waiting.append(job)
    first = waiting.take()
    waiting.put_back(first)
    assert waiting.take() is first
    waiting.remove(jobs[1])
    assert jobs[1] not in waiting
    assert waiting.take() is jobs[2]
    assert len(waiting) == 0


def test_a_stream_that_rested_goes_on_before_those_that_have_not_begun() -> None:
    waiting = Waiting()
    new, first, second = (job_of("a") for _ in range(3))
    first.placed_once = second.placed_once = True
    waiting.append(new)
    for job in (first, second):
        waiting.resume(job)
    assert [waiting.take() for _ in range(3)] == [first, second, new]


def test_a_call_of_another_namespace_has_the_next_place(reference: Any) -> None:
    with reference.new_pool(n_parallel=1, n_ctx=64) as pool:
        order: list[str] = []
        scheduler = pool.owner.scheduler
        begin = scheduler._begin

        def noted(job: Any) -> None:
            order.append(job.sequence.namespace)
            begin(job)

        scheduler._begin = noted
        sessions = [pool.open_session(namespace="many") for _ in range(12)]
        sessions.append(pool.open_session(namespace="one"))

        def submit() -> None:  # at once: the owner does what is posted before its next step
            for session in sessions:
                scheduler._accept(Job(session.context.sequence, [1, 2, 3], n_keep=0))

        pool.owner.ask(submit)
        for session in sessions:
            job = session.context.sequence.job
            if job is not None:
                job.wait()
        assert order[1] == "one"
        assert len(order) == len(sessions)
        assert isinstance(pool.stats(), ic.PoolStats)


def test_the_longest_beginning_is_found_as_by_looking_at_all() -> None:
    rng = random.Random(7)
    sequences: set[Sequence] = set()
    prefixes = Prefixes(sequences, copies="any", cuts=True, multiple=None)
    for _ in range(400):
        change(rng, sequences)
        asking = Sequence(rng.choice("ab"))
        asking.tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 9))]
        n_most = rng.randrange(len(asking.tokens) + 1)
        source, n = prefixes.source(asking, n_most)
        lengths = [
            min(common_prefix(s.tokens[: s.n_held], asking.tokens), n_most)
            for s in sequences
            if s.seq_id is not None and not s.is_cut and s.namespace == asking.namespace
        ]
        assert n == max(lengths, default=0)
        assert (source is None) == (n == 0)
        if source is not None:
            assert source.namespace == asking.namespace
            assert source.tokens[:n] == asking.tokens[:n]
            assert source.n_held >= n


def change(rng: random.Random, sequences: set[Sequence]) -> None:
    """Let a sequence come, go, grow, be cut, or lose its cells."""
    how = rng.choice(["come", "grow", "grow", "cut", "lose", "go", "behind a cut"])
    if how == "come" or not sequences:
        sequence = Sequence(rng.choice("ab"))
        sequence.seq_id = 1
        sequences.add(sequence)
        return
    sequence = rng.choice(sorted(sequences, key=id))
    if how == "grow":
        sequence.seq_id = 1
        sequence.extend([rng.randrange(2) for _ in range(rng.randrange(1, 4))])
        sequence.hold(rng.randrange(sequence.n_held, len(sequence.tokens) + 1))
    elif how == "cut":
        sequence.truncate(rng.randrange(len(sequence.tokens) + 1))
    elif how == "lose":
        sequence.lose()
    elif how == "behind a cut":
        sequence.cut = None if sequence.is_cut else 0
    else:
        sequences.discard(sequence)


def evaluated(ends: list[int], *, seq_id: int | None) -> Sequence:
    sequence = Sequence("")
    sequence.extend(range(20))
    for end in ends:
        sequence.hold(end)
    if seq_id is None:
        sequence.lose()
    sequence.seq_id = seq_id
    return sequence


@pytest.mark.parametrize(
    ("ends", "n_taken"),
    [
        ([], 20),  # it never evaluated anything
        ([4, 8, 12, 16, 20], 20),
        ([4, 8, *range(9, 21)], 8),  # what it generated came a token a call
        ([4, 8, 10], 8),  # the end of a prompt that was shorter
    ],
)
def test_who_lost_its_cells_takes_none_with_other_bits(ends: list[int], n_taken: int) -> None:
    asking, other = evaluated(ends, seq_id=None), evaluated([4, 8, 12, 16, 20], seq_id=1)
    prefixes = Prefixes({asking, other}, copies="any", cuts=True, multiple=4)
    assert prefixes.source(asking, 20) == (other, n_taken)
    other.truncate(4)
    other.extend(range(4, 20))
    (running,) = [Job(other)]
    running.sequence.hold(4)
    assert prefixes.is_coming(asking, 4, [running]) == (n_taken >= 4 + 8)
