"""A token of each of several sequences in one call, which most steps of a pool are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import infercore as ic

if TYPE_CHECKING:
    from collections.abc import Callable

IDS = list(range(20, 60))


@pytest.fixture
def three(new_context: Callable[..., Any]) -> Any:
    context = new_context(n_ctx=192, n_seq_max=3)
    for seq_id in range(3):
        context.decode(IDS[seq_id : seq_id + 5], seq_id=seq_id)
    return context


def test_rows_and_books_are_those_of_spans(three: Any, new_context: Callable[..., Any]) -> None:
    other = new_context(n_ctx=192, n_seq_max=3)
    for seq_id in range(3):
        other.decode(IDS[seq_id : seq_id + 5], seq_id=seq_id)
    for token in (7, 9):
        found = [row.copy() for row in three.decode_each([token, token + 1], [2, 0])]
        other.decode_spans([(2, [token], "last"), (0, [token + 1], "last")])
        for i, row in enumerate(found):
            assert np.array_equal(row, other.logits(i))
            assert np.array_equal(row, three.logits(i))
    for seq_id in range(3):
        assert three.tokens(seq_id) == other.tokens(seq_id)
        assert three.n_past(seq_id) == other.n_past(seq_id)
    assert (three.row_of(2), three.row_of(0), three.row_of(1)) == (0, 1, None)
    assert three.perf().prefill_tokens == other.perf().prefill_tokens


@pytest.mark.parametrize("is_done", [False, True])
@pytest.mark.parametrize(
    ("error", "typed"),
    [
        (KeyboardInterrupt(), KeyboardInterrupt),
        (
            ic.ContextOverflowError(
                stage="engine", resident_tokens=0, additional_tokens=2, n_ctx=9
            ),
            ic.ContextOverflowError,
        ),
        (RuntimeError("no idea"), ic.SessionFatalError),
    ],
)
def test_after_a_failure_the_books_are_the_engines(
    three: Any, monkeypatch: pytest.MonkeyPatch, error: Any, typed: Any, *, is_done: bool
) -> None:
    own = three._appending._decode_columns
    assert own is not None, "both engines take columns"

    def failing(*columns: Any) -> None:
        if is_done:
            own(*columns)
        raise error

    monkeypatch.setattr(three._appending, "_decode_columns", failing)
    with pytest.raises(typed):
        three.decode_each([7, 8], [2, 0])
    monkeypatch.undo()
    if typed is ic.SessionFatalError:
        with pytest.raises(ic.SessionFatalError):
            three.n_past(0)
        return
    assert three.n_outputs == 0
    assert [three.n_resident(s) for s in range(3)] == [5 + is_done, 5, 5 + is_done]
    assert [three.n_past(s) for s in range(3)] == [5 + is_done, 5, 5 + is_done]
    three.decode_each([9, 10, 11], [0, 1, 2])
    assert three.n_outputs == 3


def test_no_room_is_said_before(new_context: Callable[..., Any]) -> None:
    context = new_context(n_ctx=64, n_seq_max=2, kv_unified=True)
    context.decode((IDS * 2)[:60])
    for token in range(2):
        context.decode_each([token + 5, token + 6], [0, 1])
    with pytest.raises(ic.ContextOverflowError):
        context.decode_each([5, 6], [0, 1])
    assert [context.n_resident(s) for s in range(2)] == [62, 2]


def test_rows_of_one_array_are_those_of_the_last_call(three: Any) -> None:
    for token in (7, 9):
        rows = three.decode_each([token, token + 1, token], [2, 0, 1])
        assert isinstance(rows, np.ndarray)
        assert rows.flags.writeable  # numpy.argmax copies what is read-only
        assert all(np.array_equal(rows[i], three.logits(i)) for i in range(3))
    three.seq_remove(0, 4, -1)  # the position that was counted on is so no more
    three.decode_each([8, 10, 11], [2, 0, 1])
    assert [three.n_past(s) for s in range(3)] == [5, 8, 8]
    assert three.tokens(0) == [*IDS[:4], 10]


@pytest.mark.parametrize("wrong", ["rows", np.zeros((3, 7), np.float32), np.zeros((2, 7))])
def test_rows_that_are_none_are_the_plugins_fault(
    three: Any, monkeypatch: pytest.MonkeyPatch, wrong: Any
) -> None:
    monkeypatch.setattr(three._outputs, "_engine_rows", lambda _: wrong)
    with pytest.raises(ic.PluginError, match=r"logits_rows\(2\)"):
        three.decode_each([7, 8], [2, 0])
