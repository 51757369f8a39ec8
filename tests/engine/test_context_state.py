from __future__ import annotations

import numpy as np
import pytest

from infercore.engine import blob
from infercore.errors import (
    ContextOverflowError,
    InvalidInputError,
    InvalidSequenceError,
    OutOfMemoryError,
    OutputNotAvailableError,
    PluginError,
    SnapshotError,
)
from infercore.testing.reference_context import ReferenceContext

IDS = [(i * 37 + 11) % 250 for i in range(20)]


def opened(model, **fields):
    return model.new_context(**{"n_ctx": 64, "n_seq_max": 4, "kv_unified": True, **fields})


def filled(model, **fields):
    """Return a context with a fork, a hole and a shift in it."""
    context = opened(model, **fields)
    context.decode(IDS)
    context.seq_copy(0, 2)
    context.decode([7, 8, 9], seq_id=2)
    context.decode(IDS[:6], seq_id=1)
    context.seq_remove(1, 2, 4)
    context.seq_shift(1, 4, -1, 3)
    context.decode_one(5, seq_id=2)
    return context


def books(context):
    ids = range(context.n_seq_max)
    return (
        [(context.tokens(s), list(context._cells.positions(s))) for s in ids],
        context.n_free(),
    )


@pytest.mark.parametrize("row", [None, 1, "no", np.zeros(3)])
def test_whether_the_row_is_saved_is_a_bool(reference_model, row):
    context = filled(reference_model)
    with pytest.raises(InvalidInputError, match="row"):
        context.save_sequence(0, row=row)


def test_a_state_comes_back_whole(reference_model):
    with filled(reference_model) as source, opened(reference_model) as target:
        data = source.save_state()
        target.decode([1, 2, 3], seq_id=3)
        target.load_state(data)
        assert books(target) == books(source)
        assert np.array_equal(target.logits(), source.logits())
        for s in range(3):
            source.decode([4, 5], seq_id=s)
            target.decode([4, 5], seq_id=s)
            assert np.array_equal(target.logits(), source.logits())
        with opened(reference_model) as third:
            third.load_state(target.save_state())
            assert books(third) == books(source)


def test_a_sequence_goes_to_another_context_as_by_its_saved_state(reference_model, monkeypatch):
    with (
        filled(reference_model) as source,
        opened(reference_model) as packed,
        opened(reference_model) as handed,
    ):
        for s in (2, 1, 3):  # with its row; with a hole and a shift; empty
            packed.load_sequence(s, source.save_sequence(s))
            with monkeypatch.context() as only:
                only.setattr(blob, "pack", None)
                only.setattr(blob, "unpack", None)
                handed.take_over(s, source.hand_over(s))
            assert books(handed) == books(packed)
            assert handed.row_of(s) == packed.row_of(s)
        for s in (1, 2):
            for context in (packed, handed):
                context.decode([4, 5], seq_id=s)
            assert np.array_equal(handed.logits(), packed.logits())


def test_what_is_handed_over_stays_as_it_was(reference_model, monkeypatch):
    """An engine may use its buffer again, unless it says that it deals in views."""
    buffer, save = bytearray(), ReferenceContext.save_sequence

    def into_buffer(inner, seq_id):
        buffer[:] = save(inner, seq_id)
        return buffer

    with filled(reference_model) as source, opened(reference_model) as target:
        monkeypatch.setattr(ReferenceContext, "save_sequence", into_buffer)
        handed = source.hand_over(2)
        buffer[:] = bytes(len(buffer))
        target.take_over(0, handed)
        for context, s in ((source, 2), (target, 0)):
            context.decode([4, 5], seq_id=s)
        assert np.array_equal(target.logits(), source.logits())


def test_a_sequence_is_not_taken_from_other_settings(reference_model):
    with filled(reference_model) as source, opened(reference_model, type_k="f16") as target:
        target.decode([1, 2, 3])
        with pytest.raises(SnapshotError) as caught:
            target.take_over(0, source.hand_over(2))
        assert (caught.value.state_after, target.n_past()) == ("unchanged", 3)


def test_restored_logits_are_one_row(reference_model):
    with opened(reference_model) as context:
        context.decode(IDS, logits="all")
        row = context.logits().copy()
        context.load_state(context.save_state())
        assert np.array_equal(context.logits(), row)
        with pytest.raises(OutputNotAvailableError):
            context.logits(1)
        with pytest.raises(OutputNotAvailableError):
            context.logits_all()
        with pytest.raises(ValueError, match="read-only"):
            context.logits()[0] = 1


def test_stale_logits_are_not_saved(reference_model):
    with opened(reference_model) as context:
        context.decode(IDS)
        context.seq_remove(0, 10, -1)
        data = context.save_state()
        context.decode(IDS)
        context.load_state(data)
        assert context.tokens() == IDS[:10]
        with pytest.raises(OutputNotAvailableError):
            context.logits()


def test_a_sequence_goes_to_another_place(reference_model, fresh_logits):
    with filled(reference_model) as source, opened(reference_model) as target:
        target.decode([1, 2], seq_id=0)
        target.decode([3] * 9, seq_id=3)
        target.load_sequence(3, source.save_sequence(2))
        assert target.tokens(3) == [*IDS, 7, 8, 9, 5]
        assert target.tokens(0) == [1, 2]
        assert np.array_equal(target.logits(), source.logits())
        target.decode_one(6, seq_id=3)
        expected = fresh_logits([*IDS, 7, 8, 9, 5, 6])
        assert np.abs(target.logits() - expected).max() < target.tolerance


def test_holes_come_back_as_holes(reference_model):
    with filled(reference_model) as source, opened(reference_model) as target:
        target.load_sequence(0, source.save_sequence(1))
        assert list(target._cells.positions(0)) == [0, 1, 7, 8]
        assert (target.n_past(), target.n_resident()) == (9, 4)
        assert target._inner.sequences[0].positions.tolist() == [0, 1, 7, 8]


def test_a_sequence_is_saved_with_its_own_logits_only(reference_model):
    """The last call was about another sequence: its logits do not belong here."""
    with opened(reference_model, n_ctx=128) as context:
        context.decode(IDS, seq_id=0)
        context.decode([1, 2], seq_id=1)
        other = context.logits().copy()
        context.load_sequence(2, context.save_sequence(0))
        assert context.row_of(2) is None
        assert np.array_equal(context.logits(), other)
        context.decode_batch([(5, [0], True), (6, [1], False)])
        row = context.logits().copy()
        saved = [context.save_sequence(s) for s in (0, 1)]
        context.seq_remove(0)
        context.load_sequence(3, saved[0])
        assert np.array_equal(context.logits(context.row_of(3)), row)
        context.load_sequence(3, saved[1])
        with pytest.raises(OutputNotAvailableError):
            context.logits()


def test_a_fork_is_saved_with_the_logits_of_its_source(reference_model):
    with opened(reference_model) as context:
        context.decode(IDS, seq_id=0)
        row = context.logits().copy()
        context.seq_copy(0, 1)
        context.load_sequence(2, context.save_sequence(1))
        assert np.array_equal(context.logits(), row)


def test_an_empty_context_and_an_empty_sequence(reference_model):
    with opened(reference_model) as context:
        empty, nothing = context.save_state(), context.save_sequence(1)
        context.decode(IDS)
        context.load_sequence(0, nothing)
        assert context.n_past() == 0
        context.decode(IDS)
        context.load_state(empty)
        assert context.n_free() == 64
        context.decode(IDS)


def test_forked_cells_are_shared_again(reference_model):
    with opened(reference_model) as context:
        context.decode(IDS * 2)
        for s in (1, 2, 3):
            context.seq_copy(0, s)
        assert context.n_free() == 24
        context.load_state(context.save_state())
        assert context.n_free() == 24
        context.decode([1] * 24)


@pytest.mark.parametrize("kind", ["state", "sequence"])
def test_any_change_is_seen_and_nothing_is_lost(reference_model, state_of, kind):
    with opened(reference_model) as context:
        context.decode(IDS)
        data = getattr(context, f"save_{kind}")()
        context.decode([1, 2])
        before = state_of(context)
        places = {*range(0, len(data), max(1, len(data) // 60)), *range(40), len(data) - 1}
        for place in places:
            changed = bytearray(data)
            changed[place] ^= 0x10
            for wrong in (bytes(changed), data[:place]):
                with pytest.raises(SnapshotError) as caught:
                    load(context, kind, wrong)
                assert caught.value.state_after == "unchanged"
        for wrong in (b"", None, "text", data + b"x", data[1:]):
            with pytest.raises(SnapshotError):
                load(context, kind, wrong)
        assert state_of(context) == before


def load(context, kind, data):
    if kind == "state":
        context.load_state(data)
    else:
        context.load_sequence(0, data)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"type_k": "f16"}, "kv"),
        ({"rope_freq_base": 5000.0}, "kv"),
        ({"n_seq_max": 2}, "n_seq_max"),
    ],
)
def test_another_shape_is_refused(reference_model, state_of, fields, reason):
    with opened(reference_model) as source, opened(reference_model, **fields) as target:
        source.decode(IDS)
        target.decode([1, 2])
        before = state_of(target)
        with pytest.raises(SnapshotError) as caught:
            target.load_state(source.save_state())
        assert caught.value.reason == reason
        assert state_of(target) == before


def test_another_model_is_refused(reference_model, tmp_path, state_of):
    import shutil

    from infercore.testing import load_reference_model
    from infercore.testing.reference import storyteller

    twin = tmp_path / "twin"
    shutil.copytree(storyteller(), twin)
    with (twin / "config.json").open("a") as file:
        file.write("\n")
    other = load_reference_model(twin)
    with other, opened(reference_model) as source, opened(other) as target:
        source.decode(IDS)
        before = state_of(target)
        for kind in ("state", "sequence"):
            with pytest.raises(SnapshotError) as caught:
                load(target, kind, getattr(source, f"save_{kind}")())
            assert caught.value.reason == "model_digest"
        assert state_of(target) == before


def test_the_kinds_are_not_mixed_up(reference_model):
    with opened(reference_model) as context:
        context.decode(IDS)
        with pytest.raises(SnapshotError) as caught:
            context.load_state(context.save_sequence(0))
        assert caught.value.reason == "kind"
        with pytest.raises(SnapshotError):
            context.load_sequence(0, context.save_state())
        with pytest.raises(InvalidSequenceError):
            context.load_sequence(4, context.save_sequence(0))
        with pytest.raises(InvalidSequenceError):
            context.save_sequence(-1)
        assert context.tokens() == IDS


def test_what_does_not_fit_is_refused_unchanged(reference_model, state_of):
    with opened(reference_model) as source, opened(reference_model, n_ctx=16) as target:
        source.decode(IDS)
        target.decode([1, 2])
        before = state_of(target)
        for kind in ("state", "sequence"):
            with pytest.raises(ContextOverflowError) as caught:
                load(target, kind, getattr(source, f"save_{kind}")())
            assert (caught.value.stage, caught.value.n_ctx) == ("restore", 16)
        assert state_of(target) == before


def test_a_sequence_needs_room_beside_the_others(reference_model, state_of):
    with opened(reference_model) as context:
        context.decode(IDS * 2)
        data = context.save_sequence(0)
        context.seq_copy(0, 1)
        before = state_of(context)
        with pytest.raises(ContextOverflowError):
            context.load_sequence(1, data)
        assert state_of(context) == before
        context.seq_remove(0)
        context.load_sequence(1, data)
        assert context.tokens(1) == IDS * 2


# -- an engine that refuses, or restores something else -----------------------------------------


@pytest.fixture
def broken(reference_model):
    from infercore.testing import Faults, load_reference_model

    faults = Faults()
    with load_reference_model(faults=faults) as model, opened(model) as context:
        context.decode(IDS)
        yield context, faults


@pytest.mark.parametrize("kind", ["state", "sequence"])
@pytest.mark.parametrize("work", ["nothing", "all"])
def test_a_restore_that_fails_leaves_it_empty_and_usable(broken, kind, work, fresh_logits):
    context, faults = broken
    data = getattr(context, f"save_{kind}")()
    context.decode([1, 2, 3], seq_id=2)
    faults.plan(f"load_{kind}", RuntimeError("no"), work=work)
    with pytest.raises(SnapshotError) as caught:
        load(context, kind, data)
    assert (caught.value.state_after, caught.value.reason) == ("cleared", "engine")
    assert isinstance(caught.value.__cause__, RuntimeError)
    others = 3 if kind == "sequence" else 0  # what is restored alone fails alone
    assert [context.n_past(s) for s in range(4)] == [0, 0, others, 0]
    assert context.tokens(2) == [1, 2, 3][:others]
    assert context.n_free() == 64 - others
    assert context.row_of(0) is None
    assert context.n_outputs == (1 if others else 0)
    load(context, kind, data)
    context.decode_one(3)
    assert np.abs(context.logits() - fresh_logits([*IDS, 3])).max() < context.tolerance
    if others:
        context.decode_one(4, seq_id=2)
        assert np.abs(context.logits() - fresh_logits([1, 2, 3, 4])).max() < context.tolerance


@pytest.mark.parametrize("kind", ["state", "sequence"])
@pytest.mark.parametrize("work", ["nothing", "all"])
def test_an_interrupted_restore_leaves_it_empty(broken, kind, work):
    context, faults = broken
    data = getattr(context, f"save_{kind}")()
    context.decode([1])
    faults.plan(f"load_{kind}", KeyboardInterrupt(), work=work)
    with pytest.raises(KeyboardInterrupt):
        load(context, kind, data)
    assert context.n_past() == context.n_resident() == 0
    load(context, kind, data)
    assert context.tokens() == IDS


def test_a_restore_of_something_else_is_seen(broken):
    """An engine whose positions differ from the saved ones did not restore."""
    context, _ = broken
    data = context.save_state()
    engine = context._inner._inner
    engine.load_state = lambda _: engine.seq_remove(0, 5, -1)
    with pytest.raises(SnapshotError) as caught:
        context.load_state(data)
    assert (caught.value.state_after, caught.value.reason) == ("cleared", "positions")
    assert context.n_past() == 0


def test_a_state_of_another_version_of_the_engine_is_refused(reference_model, monkeypatch):
    with opened(reference_model) as context:
        context.decode(IDS)
        data = context.save_state()
        other = {**context._saving.identity(), "backend_version": "numpy 0.1"}
        monkeypatch.setattr(context._saving, "identity", lambda: other)
        with pytest.raises(SnapshotError) as caught:
            context.load_state(data)
        assert caught.value.reason == "backend_version"


@pytest.mark.parametrize("takes_views", [False, True])
def test_an_engine_is_given_bytes_unless_it_takes_views(reference_model, monkeypatch, takes_views):
    monkeypatch.setattr(ReferenceContext, "takes_views", takes_views, raising=False)
    with opened(reference_model) as context:
        context.decode(IDS)
        state, sequence = context.save_state(), context.save_sequence(0)
        engine, given = context._inner, []
        for name in ("load_state", "load_sequence"):
            own = getattr(engine, name)

            def load(*args, own=own):
                given.append(type(args[-1]))
                own(*args[:-1], bytes(args[-1]))

            monkeypatch.setattr(engine, name, load, raising=False)
        context.load_state(state)
        context.load_sequence(1, sequence)
        assert given == [memoryview if takes_views else bytes] * 2
        assert context.tokens(1) == IDS


def test_a_saved_sequence_may_be_any_buffer(reference_model, monkeypatch):
    with opened(reference_model) as context:
        context.decode(IDS)
        expected = context.save_sequence(0)
        own = context._inner.save_sequence
        for kind in (bytearray, memoryview, lambda b: np.frombuffer(b, dtype=np.uint8)):
            monkeypatch.setattr(
                context._inner, "save_sequence", lambda s, kind=kind: kind(own(s)), raising=False
            )
            assert context.save_sequence(0) == expected


def test_a_note_stands_in_the_header_and_changes_nothing_else(reference_model):
    with opened(reference_model) as context:
        context.decode(IDS)
        data = context.save_sequence(0, note={"for": "me", "n": 3})
        assert blob.read_header(data)["note"] == {"for": "me", "n": 3}
        assert "note" not in blob.read_header(context.save_sequence(0))
        context.load_sequence(2, data)
        assert context.tokens(2) == IDS


def crafted(data, **changed):
    """Return saved state whose first sequence says something else, under right checksums."""
    header, payload, logits = blob.unpack(data)
    header["sequences"][0] |= changed
    return blob.pack(header, payload, logits)


@pytest.mark.parametrize(
    "changed",
    [
        {"tokens": [0, 1, 10**6]},
        {"tokens": [0, 1, -(2**40)]},
        {"runs": [[0, 3], [3, 0]], "cells": [0, 3]},
        {"runs": [[0, 2**40]]},
        {"cells": [2**31]},
    ],
)
@pytest.mark.parametrize("kind", ["state", "sequence"])
def test_a_header_that_says_what_cannot_be_is_refused_unchanged(reference_model, changed, kind):
    with opened(reference_model) as context:
        context.decode(IDS[:3])
        data = context.save_state() if kind == "state" else context.save_sequence(0)
        load = context.load_state if kind == "state" else lambda d: context.load_sequence(0, d)
        with pytest.raises(SnapshotError) as caught:
            load(crafted(data, **changed))
        assert (caught.value.reason, caught.value.state_after) == ("header", "unchanged")
        assert context.tokens() == IDS[:3]
        load(data)


def test_cells_may_have_any_numbers(reference_model):
    """What they are called costs no memory: this would be eight gigabytes."""
    with opened(reference_model) as context:
        context.decode(IDS[:3])
        context.load_state(crafted(context.save_state(), cells=[2**31 - 4]))
        assert context.tokens() == IDS[:3]
        assert context.n_free() == 64 - 3


def test_what_a_state_takes_is_counted_from_its_cells(reference_model):
    with opened(reference_model) as context:
        context.decode(IDS * (40 // len(IDS)))
        n_tokens = context.n_past()
        context.seq_copy(0, 1)
        data = context.save_state()
        context.clear()
        with pytest.raises(ContextOverflowError) as caught:
            context.load_state(crafted(data, cells=[1000]))
        assert caught.value.additional_tokens == 2 * n_tokens > 64
        context.load_state(data)
        assert context.n_free() == 64 - n_tokens


@pytest.mark.parametrize(
    ("given", "typed"), [(None, PluginError), (MemoryError("full"), OutOfMemoryError)]
)
def test_state_that_cannot_be_put_together_is_a_typed_error(
    reference_model, monkeypatch, given, typed
):
    with opened(reference_model) as context:
        context.decode(IDS)

        def pack(*_):
            raise given

        if given is None:  # not a buffer
            monkeypatch.setattr(context._inner, "save_state", lambda: None, raising=False)
        else:
            monkeypatch.setattr(blob, "pack", pack)
        with pytest.raises(typed):
            context.save_state()
        monkeypatch.undo()
        assert context.tokens() == IDS
        context.load_state(context.save_state())
