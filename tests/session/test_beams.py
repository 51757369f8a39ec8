"""The rules of a beam search, on rows made by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from infercore.session.beams import BeamSearch

END = 3


def row(*probabilities: float) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(np.array(probabilities, dtype=np.float32))


def search(n: int, *, max_tokens: int = 8, penalty: float = 1.0, early: bool = True) -> BeamSearch:
    return BeamSearch(
        n, max_tokens=max_tokens, length_penalty=penalty, early_stopping=early, ends=[END]
    )


def test_the_likeliest_go_on_and_name_whom_they_continue() -> None:
    beams = search(2)
    first = beams.step([row(0.6, 0.3, 0.1, 0)])
    assert [move.path.tokens for move in first] == [(0,), (1,)]
    second = beams.step([row(0.5, 0.5, 0, 0), row(0, 0.99, 0.01, 0)])
    assert [(move.parent, move.path.tokens) for move in second] == [(0, (0, 0)), (0, (0, 1))]
    assert second[0].path.total == pytest.approx(math.log(0.3))


def test_behind_an_end_as_many_go_on() -> None:
    """A beam whose likeliest token ends it may still have the two that go on."""
    beams = search(2)
    beams.step([row(0.6, 0.4, 0, 0)])
    moves = beams.step([row(0.3, 0.25, 0, 0.45), row(0.34, 0.33, 0.33, 0)])
    assert [(move.parent, move.path.tokens) for move in moves] == [(0, (0, 0)), (0, (0, 1))]


def test_an_end_counts_only_among_the_likeliest() -> None:
    beams = search(2)
    beams.step([row(0.5, 0.3, 0, 0.2)])
    assert beams.finished == ()
    beams = search(2)
    beams.step([row(0.5, 0.1, 0, 0.4)])
    (path,) = beams.finished
    assert (path.tokens, path.ended_by, path.logprobs) == ((), END, (pytest.approx(math.log(0.4)),))
    assert [path.tokens for path in beams.running] == [(0,), (1,)]


def test_the_end_counts_in_the_length() -> None:
    beams = search(1, penalty=2.0)
    beams.step([row(1, 0, 0, 0)])
    beams.step([row(0.1, 0.1, 0.1, 0.7)])
    (path,) = beams.finished
    assert path.score(2.0) == pytest.approx(math.log(0.7) / 4)
    assert beams.done


def test_early_stopping_ends_once_enough_have_ended() -> None:
    beams = search(2, penalty=0.0)
    beams.step([row(0.6, 0, 0, 0.4)])
    assert not beams.done
    assert beams.step([row(0.9, 0, 0, 0.1)]) == []
    assert beams.done, "although 0.54 may end better than 0.06"


def test_without_it_a_search_goes_on_while_a_better_one_may_come() -> None:
    beams = search(1, penalty=0.0, early=False)
    beams.step([row(0.9, 0, 0, 0.1)])
    beams.step([row(0.1, 0, 0, 0.9)])
    assert beams.done, "0.09 cannot get better than 0.81"
    beams = search(2, penalty=0.0, early=False)
    beams.step([row(0.6, 0, 0, 0.4)])
    beams.step([row(0.9, 0, 0, 0.1)])
    assert len(beams.finished) == 2
    assert not beams.done, "0.54 may end better than 0.06"


def test_at_the_limit_the_likeliest_end_as_they_are() -> None:
    beams = search(2, max_tokens=1)
    assert beams.step([row(0.5, 0.3, 0.2, 0)]) == []
    assert [path.tokens for path in beams.finished] == [(0,), (1,)]
    assert [path.ended_by for path in beams.finished] == [None, None]


def test_impossible_tokens_are_never_taken() -> None:
    beams = search(4)
    moves = beams.step([row(0.7, 0.3, 0, 0)])
    assert [move.path.tokens for move in moves] == [(0,), (1,)]
