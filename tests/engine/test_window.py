from __future__ import annotations

import pytest

from infercore.engine.window import resolve_n_ctx, window_of
from infercore.errors import InvalidInputError
from infercore.values.config import ContextConfig
from infercore.values.info import ModelInfo


def info(trained):
    return ModelInfo(
        architecture="x", n_vocab=2, n_ctx_train=trained, n_embd=1, n_layer=1, n_head=1,
        n_head_kv=1, n_params=0, size_bytes=0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("n_ctx", "trained", "expected"),
    [
        (None, 1024, 1024),
        (None, 32768, 4096),
        (None, 0, 4096),
        (0, 1024, 1024),
        (77, 1024, 77),
        (2048, 1024, 2048),
        (1, 0, 1),
    ],
)
def test_the_window_that_is_asked_for(n_ctx, trained, expected):
    assert resolve_n_ctx(ContextConfig(n_ctx=n_ctx), info(trained)) == expected


def test_the_trained_window_must_be_known():
    with pytest.raises(InvalidInputError, match="n_ctx=0"):
        resolve_n_ctx(ContextConfig(n_ctx=0), info(0))


@pytest.mark.parametrize(
    ("effective", "n_ctx_seq", "shared"),
    [
        ({}, 100, True),
        ({"n_seq_max": 1}, 100, True),
        ({"n_seq_max": 3}, 33, False),
        ({"n_seq_max": 3, "kv_unified": True}, 100, True),
    ],
)
def test_sequences_share_the_window_or_have_a_part_each(effective, n_ctx_seq, shared):
    window = window_of(100, effective)
    assert (window.n_ctx, window.n_ctx_seq, window.shared) == (100, n_ctx_seq, shared)
