from __future__ import annotations

import pytest

from infercore.errors import InvalidInputError
from infercore.testing import Faults, engine_of, load_reference_model, load_toy_model


@pytest.fixture
def faults():
    return Faults()


def test_the_chosen_call_fails_and_only_that(faults):
    with load_toy_model(faults=faults) as model, model.new_context(n_ctx=32) as context:
        faults.plan("decode", MemoryError("here"), at=2)
        context.decode([1])
        with pytest.raises(MemoryError):
            context.decode([2])
        context.decode([3])
        assert context.tokens() == [1, 3]
        assert faults.calls["decode"] == 3


@pytest.mark.parametrize(("work", "kept"), [("nothing", 0), ("half", 3), ("all", 6)])
def test_as_much_is_done_as_was_planned(faults, work, kept):
    with load_toy_model(faults=faults) as model, model.new_context(n_ctx=32) as context:
        faults.plan("decode", KeyboardInterrupt(), work=work)
        with pytest.raises(KeyboardInterrupt):
            context.decode([1, 2, 3, 4, 5, 6])
        assert context.n_past() == kept


def test_plans_hold_for_all_contexts_and_may_be_taken_back(faults):
    with load_toy_model(faults=faults) as model:
        first, second = model.new_context(n_ctx=32), model.new_context(n_ctx=32)
        faults.plan("decode", MemoryError(), times=2)
        for context in (first, second):
            with pytest.raises(MemoryError):
                context.decode([1])
        first.decode([1])
        faults.plan("decode", MemoryError())
        faults.reset()
        second.decode([1])
        first.close()
        second.close()


@pytest.mark.parametrize(
    ("call", "work"), [("dekode", "all"), ("decode", "most"), ("seq_remove", "half")]
)
def test_a_senseless_plan_is_refused(faults, call, work):
    with pytest.raises(InvalidInputError):
        faults.plan(call, MemoryError(), work=work)


def test_limits_take_methods_away():
    model = load_reference_model(kv_shift=False, abort=False, kv_copy="none")
    with model, model.new_context(n_ctx=32) as context:
        for name in ("seq_shift", "abort", "clear_abort", "seq_copy"):
            assert not hasattr(context._inner, name)
        assert hasattr(context._inner, "seq_divide")
        assert context.capabilities == model.capabilities
        assert not context.capabilities.kv_shift


def test_limits_and_faults_go_together(faults):
    model = load_reference_model(faults=faults, kv_remove="none")
    with model, model.new_context(n_ctx=32) as context:
        context.decode([1, 2, 3])
        assert context.seq_remove(0, 1, -1) is False
        faults.plan("decode", MemoryError())
        with pytest.raises(MemoryError):
            context.decode([4])


def test_a_look_past_the_api(faults):
    model = load_reference_model(faults=faults, state=False)
    with model, model.new_context(n_ctx=32) as context:
        context.decode([1, 2, 3])
        assert engine_of(context).sequences[0].tokens.tolist() == [1, 2, 3]


def test_an_unknown_capability_is_refused():
    with pytest.raises(InvalidInputError, match="kv_remove"):
        load_reference_model(kv_remov="none")
