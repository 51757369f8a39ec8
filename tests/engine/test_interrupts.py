"""A Ctrl-C before or behind any engine call: the books stay true, or the context ends."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from infercore.errors import SessionFatalError
from infercore.testing import engine_of, load_reference_model
from infercore.testing.faults import Faults

IDS = [5, 6, 7, 8]
SAVED: dict[str, bytes] = {}
CALLS = {
    "decode_one": lambda c: c.decode_one(9),
    "decode_one in the other sequence": lambda c: c.decode_one(9, seq_id=1),
    "decode": lambda c: c.decode([9, 10, 11]),
    "decode in the other sequence": lambda c: c.decode([9, 10, 11], seq_id=1),
    "decode_batch": lambda c: c.decode_batch([(9, (0, 1), False), (10, (1,), True)]),
    "decode_spans": lambda c: c.decode_spans([(1, [9, 10, 11], "last"), (0, [12], "all")]),
    "eval": lambda c: c.eval([9], 2),
    "seq_keep": lambda c: c.seq_keep(0),
    "load_state": lambda c: c.load_state(SAVED["state"]),
    "load_sequence": lambda c: c.load_sequence(0, SAVED["sequence"]),
    "logits": lambda c: c.logits(),
    "n_past": lambda c: c.n_past(),
    "seq_remove": lambda c: c.seq_remove(0, 2, -1),
    "seq_remove of all": lambda c: c.seq_remove(-1),
    "seq_remove of a middle": lambda c: c.seq_remove(0, 1, 2),
    "seq_copy": lambda c: c.seq_copy(0, 1),
    "seq_shift": lambda c: c.seq_shift(0, 2, -1, 3),
    "seq_divide": lambda c: c.seq_divide(0, 2, -1, 2),
    "clear": lambda c: c.clear(),
    "save_sequence": lambda c: c.save_sequence(0),
    "save_state": lambda c: c.save_state(),
    "set_causal_attention": lambda c: c.set_causal_attention(True),
    "set_threads": lambda c: c.set_threads(1, 1),
    "synchronize": lambda c: c.synchronize(),
}
MAY_END = {"seq_remove of a middle", "seq_copy", "seq_shift", "seq_divide"}
"""Positions do not tell whether the engine did these."""


@pytest.fixture
def elsewhere():
    with ThreadPoolExecutor(1) as pool:
        yield lambda work: pool.submit(work).result(60)


def fill(context, how):
    context.clear()
    if how == "one after the other":
        context.decode(IDS)
        context.decode(IDS, seq_id=1)
    else:  # the cells of the sequences lie between each other
        for token in IDS:
            context.decode_batch([(token, (0,), False), (token, (1,), token == IDS[-1])])


def check(context):
    """The books say what the engine holds, and what is saved is restored with its own logits."""
    engine = engine_of(context)
    for seq_id in range(2):
        n_past, held = context.n_past(seq_id), context.tokens(seq_id)
        assert held == engine.sequences[seq_id].tokens.tolist()
        assert n_past == engine.n_past(seq_id)
        assert context.n_resident(seq_id) == len(held)
    cells = context._cells
    counted = (list(cells._lengths), cells.n_cells)
    cells.recount()
    assert counted == (cells._lengths, cells.n_cells)
    for seq_id in range(2):
        context.load_sequence(seq_id, context.save_sequence(seq_id))
        row = context.row_of(seq_id)
        if row is not None:
            restored = context.logits(row).copy()
            token = context.tokens(seq_id)[-1]
            context.seq_remove(seq_id, context.n_past(seq_id) - 1, -1)
            context.decode_one(token, seq_id=seq_id)
            assert abs(restored - context.logits()).max() < context.tolerance
    context.decode_one(3)
    assert context.logits().shape == (context._n_vocab,)


@pytest.fixture(scope="module")
def faulty():
    faults = Faults()
    with load_reference_model(faults=faults) as model:
        yield model, faults


@pytest.fixture
def opened(faulty):
    """Return a function that makes a context of two sequences that both hold IDS."""
    model, faults = faulty

    def open_one(how):
        context = model.new_context(n_ctx=64, n_batch=2, n_seq_max=2, kv_unified=True)
        context.decode([11, 12, 13, 14])
        SAVED.update(state=context.save_state(), sequence=context.save_sequence(0))
        fill(context, how)
        faults.reset()
        return context

    yield open_one
    faults.reset()


@pytest.mark.parametrize("how", ["one after the other", "in turns"])
@pytest.mark.parametrize("name", list(CALLS))
def test_an_interruption_at_any_engine_call(opened, faulty, elsewhere, name, how):
    _, faults = faulty
    with opened(how) as context:
        CALLS[name](context)
        made = [(call, at + 1) for call, n in faults.calls.items() for at in range(n)]
    for call, at in made:
        halves = ("half",) if call in {"decode", "decode_batch"} else ()
        for work in ("nothing", *halves, "all"):
            with opened(how) as context:
                faults.plan(call, KeyboardInterrupt(), at=at, work=work)
                with pytest.raises(KeyboardInterrupt):
                    CALLS[name](context)
                faults.reset()
                fatal = elsewhere(lambda context=context: checked(context))
                assert fatal is None or name in MAY_END, (call, at, work)


def checked(context):
    """Check it; return what a context that has ended says."""
    try:
        check(context)
    except SessionFatalError as error:
        return error
    return None


@pytest.mark.parametrize("work", ["nothing", "all"])
def test_an_interrupted_clear_is_done_or_not_begun(opened, faulty, elsewhere, work):
    with opened("in turns") as context:
        faulty[1].plan("clear", KeyboardInterrupt(), work=work)
        with pytest.raises(KeyboardInterrupt):
            context.clear()
        held = [context.tokens(), context.tokens(1)]
        assert held == [[], []] or (work == "nothing" and held == [IDS, IDS])
        elsewhere(lambda: check(context))


def test_an_interrupted_close_leaves_it_closed(opened, faulty, elsewhere):
    context = opened("in turns")
    faulty[1].plan("close", KeyboardInterrupt(), work="all")
    with pytest.raises(KeyboardInterrupt):
        context.close()
    elsewhere(context.close)
    assert context.closed


class AtLine:
    """Raises at the ``n``-th line of the books."""

    def __init__(self, n):
        self.left = n

    def trace(self, frame, event, _):
        if not frame.f_code.co_filename.endswith("cells.py"):
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self.trace


@pytest.mark.parametrize("call", ["whole", "tail", "keep", "clear"])
def test_an_interruption_at_any_line_of_the_books(reference_model, call):
    calls = {
        "whole": lambda context: context.seq_remove(1),
        "tail": lambda context: context.seq_remove(1, 4),
        "keep": lambda context: context.seq_keep(0),
        "clear": lambda context: context.clear(),
    }
    for n in range(1, 400, 3):
        with reference_model.new_context(n_ctx=64, n_seq_max=3, kv_unified=True) as context:
            context.decode([5, 6, 7, 8], seq_id=0)
            context.seq_copy(0, 1)
            context.decode([9, 10, 11], seq_id=1)
            at, before = AtLine(n), sys.gettrace()
            sys.settrace(at.trace)
            try:
                calls[call](context)
            except KeyboardInterrupt:
                pass
            finally:
                sys.settrace(before)
            try:
                held = {tuple(context.tokens(s)) for s in range(3)}
                for s in range(3):
                    assert context.n_resident(s) == len(context.tokens(s)) == context.n_past(s), n
            except SessionFatalError:
                continue
            assert held <= {(), (5, 6, 7, 8), (5, 6, 7, 8, 9, 10, 11)}, n
            context.decode([3] * (64 - context._cells.n_cells), seq_id=2)
        if at.left > 0:
            return
    pytest.fail("the call has more lines than were tried")
