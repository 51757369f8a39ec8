"""Parts of the guarded context, each alone, without an engine behind it."""

from __future__ import annotations

import numpy as np
import pytest

from infercore.engine.abort import Abort
from infercore.engine.cells import CellMap
from infercore.engine.gate import Gate
from infercore.engine.native import Native
from infercore.engine.outputs import Outputs
from infercore.engine.room import Room
from infercore.engine.spans import check_spans
from infercore.engine.window import Window
from infercore.errors import ContextOverflowError, DecodeAbortedError, OutputNotAvailableError
from infercore.values.info import Capabilities

N_VOCAB = 4


class Engine:
    """An engine that only counts what it is asked."""

    def __init__(self, **capabilities):
        self.capabilities = Capabilities(kv_remove="any", **capabilities)
        self.asked = []

    def abort(self):
        self.asked.append("abort")

    def clear_abort(self):
        self.asked.append("clear")


def native(engine):
    return Native(engine, Gate("context"), "mine")


def test_outputs_keep_the_numbers_of_rows_that_stay():
    outputs = Outputs(lambda i: np.full(N_VOCAB, i, np.float32), N_VOCAB)
    outputs.set_rows([(0,), (1, 2), (3,)], {0: 0, 1: 1, 2: 1, 3: 2}, all_rows=True)
    outputs.drop(0)
    outputs.drop(1)
    assert (outputs.count, outputs.of(0), outputs.of(2), outputs.of(3)) == (2, None, 1, 2)
    assert [outputs.row(i)[0] for i in (1, 2, -1)] == [1, 2, 2]
    for read in (lambda: outputs.row(0), lambda: outputs.row(-3), outputs.rows):
        with pytest.raises(OutputNotAvailableError):
            read()
    outputs.restore(np.full(N_VOCAB, 9, np.float32), [0])
    assert (outputs.row(-1)[0], outputs.of(0), outputs.n_in_engine) == (9, 3, 2)
    with pytest.raises(OutputNotAvailableError):
        outputs.engine_row(3)
    for seq_id in range(4):
        outputs.drop(seq_id)
    assert outputs.count == 0


@pytest.mark.parametrize(("shared", "free"), [(True, (1, 1, 1)), (False, (1, 3, 4))])
def test_room_is_that_of_the_window(shared, free):
    cells = CellMap(3)
    room = Room(Window(n_ctx=5 if shared else 12, n_ctx_seq=4, n_seq_max=3, shared=shared), cells)
    cells.append((0,), [1, 2, 3], 0)
    cells.append((1,), [4], 0)
    assert tuple(room.free(s) for s in range(3)) == free
    assert room.free(0, keep=1) == free[0] + 2
    with pytest.raises(ContextOverflowError):
        room.check_each({0: 2, 1: free[1]}, 2 + free[1])
    room.check_each({1: free[1]}, free[1])
    cells.copy(0, 2, 0, 3)
    assert room.given_back(0, 0) == (0 if shared else 3)


def test_an_abort_reaches_only_the_call_that_runs():
    engine = Engine(abort=True)
    abort = Abort(native(engine))
    abort.ask()
    assert not abort.shall_stop()
    abort.begin()
    abort.ask()
    assert abort.shall_stop()
    abort.end()
    assert engine.asked == ["abort", "clear"]
    abort.begin()
    assert not abort.shall_stop()


def test_what_a_callback_raises_is_what_the_stopped_call_raises():
    abort, mine = Abort(native(Engine())), ValueError("mine")

    def callback():
        raise mine

    abort.set_callback(callback)
    assert abort.asks_before_step
    assert abort.shall_stop()
    assert abort.stopped(3) is mine
    assert isinstance(abort.stopped(3), DecodeAbortedError)


def test_spans_become_columns():
    spans = check_spans([(2, [5, 6], "all"), (1, (), "last"), (0, np.array([7]), "last")], 9, 3)
    columns = spans.columns([10, 4])
    assert columns.tokens.tolist() == [5, 6, 7]
    assert columns.positions.tolist() == [10, 11, 4]
    assert columns.seq_ids.tolist() == [2, 2, 0]
    assert columns.wanted.tolist() == [True, True, True]
    assert spans.rows() == ([(2,), (2,), (0,)], {2: 1, 0: 2})
    assert list(spans.within(1, 3)) == [(0, 1, 1, 2), (1, 0, 2, 3)]
