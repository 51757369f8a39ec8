"""What the engine allocated is freed once, with its last user, the context before its model."""

from __future__ import annotations

import gc

import pytest

from infercore_llamacpp.owned import Owned


@pytest.fixture
def freed():
    return []


def test_a_context_goes_before_its_model(freed):
    model = Owned(freed.append, 1)
    context = Owned(freed.append, 2, model)
    del model
    assert freed == []
    del context
    assert freed == [2, 1]


def test_garbage_in_a_cycle_goes_in_that_order_too(freed):
    model = Owned(freed.append, 1)
    users = [model, Owned(freed.append, 2, model)]
    users.append(users)
    del model, users
    gc.collect()
    assert freed == [2, 1]


def test_it_is_freed_once(freed):
    model = Owned(freed.append, 1)
    model.free()
    model.free()
    del model
    assert freed == [1]


def test_it_is_let_go_at_once_where_nobody_uses_it(freed):
    model = Owned(freed.append, 1)
    context = Owned(freed.append, 2, model)
    use = context.use()
    context.let_go()
    model.let_go()
    assert freed == []
    del use
    context.let_go()
    assert freed == [2]
    del context
    model.let_go()
    assert freed == [2, 1]
