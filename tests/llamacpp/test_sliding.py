"""A sliding window with room for all tokens: what it has passed may be gone all the same."""

from __future__ import annotations

import random

import numpy as np
import pytest

import infercore as ic
import infercore_models
from llamacpp.random_gguf import WINDOW

TEXT = "Once upon a time there was a baker named Mira who lived in a small village. " * 4


@pytest.mark.parametrize("seed", range(4))
def test_going_back_beside_other_sequences_is_right_or_refused(tiny, open_context, seed):
    """The engine gives cells that a window has passed to other sequences."""
    model, rng = tiny("sliding"), random.Random(seed)
    fields = {"n_ctx": 512, "n_batch": 64, "n_ubatch": 32}
    context, fresh = (open_context(model, n_seq_max=3, **fields), open_context(model, **fields))
    texts = np.random.default_rng(seed).integers(0, 128, (3, 160)).astype(np.int32)
    n_refused = 0
    for _ in range(60):
        seq_id, n = rng.randrange(3), rng.randrange(WINDOW, 160)
        tokens, n_held = texts[seq_id], context.n_past(seq_id)
        if n_held >= n and not context.seq_remove(seq_id, n - 1, -1):
            n_refused += 1
            context.seq_remove(seq_id, 0, -1)
        _decode(context, tokens[context.n_past(seq_id) : n], seq_id)
        fresh.clear()
        _decode(fresh, tokens[:n], 0)
        gap = np.abs(context.logits(0) - fresh.logits(0)).max()
        assert gap < 1e-3, f"{n} tokens of sequence {seq_id} behind {n_held}"
    assert n_refused


def test_a_part_whose_window_is_gone_is_not_copied(tiny, open_context):
    context = open_context(tiny("sliding"), n_ctx=512, n_seq_max=3, n_batch=64, n_ubatch=32)
    tokens = np.random.default_rng(1).integers(0, 128, 200).astype(np.int32)
    _decode(context, tokens[:30], 1)  # its cells are free when 0 is at its end
    _decode(context, tokens, 0)
    assert context.seq_remove(1, 0, -1)
    _decode(context, tokens[::-1], 1)  # in those, and then in what 0's window has passed
    assert context.seq_pos_min(0) > 0
    with pytest.raises(ic.UnsupportedFeatureError, match="kv_copy"):
        context.seq_copy(0, 2, 0, 60)
    context.seq_copy(0, 2, -1, -1)
    for seq_id in (0, 2):
        _decode(context, tokens[:1], seq_id)
    assert context.n_past(2) == context.n_past(0) == 201


def _decode(context, tokens, seq_id):
    for start in range(0, len(tokens), 50):
        part = tokens[start : start + 50]
        context.decode(part, seq_id=seq_id, logits="last")


def test_vectors_that_are_asked_for_later_are_those_of_all_tokens(tiny, open_context):
    """A call of several steps makes them whole, also where they were off when it was opened."""
    model = tiny("sliding")
    fields = {"n_ctx": 512, "n_batch": 128, "n_ubatch": 32, "pooling_type": "none"}
    tokens = np.random.default_rng(4).integers(0, 128, 90).astype(np.int32)
    found = []
    for on in (True, False):
        context = open_context(model, embeddings=on, **fields)
        context.set_embeddings(True)
        context.decode(tokens, seq_id=0, logits="last")
        found.append(context.embeddings().copy())
    assert found[0].shape == found[1].shape
    assert len(found[0]) == 90
    assert np.abs(found[0] - found[1]).max() < 1e-3


@pytest.fixture(scope="module")
def sliding():
    with ic.load_model(infercore_models.path("sliding", "gguf-f32")) as model:
        yield model


def test_a_session_goes_back_behind_a_cut(sliding):
    tokens = sliding.tokenizer.encode(TEXT)
    with sliding.new_session(n_ctx=512) as session:
        session.ensure_prefix(tokens)
        session.evict(10, 30)
        list(session.decode(max_tokens=10, temperature=0))
        session.ensure_prefix(tokens[:40])
        found = _text(session)
    with sliding.new_session(n_ctx=512) as session:
        session.ensure_prefix(tokens[:40])
        assert found == _text(session)


@pytest.mark.parametrize("seed", range(3))
def test_sessions_of_a_pool_go_back_and_forth(sliding, seed):
    rng = random.Random(seed)
    texts = [[(37 * i + 11 * j) % 700 + 300 for j in range(160)] for i in range(3)]
    with sliding.new_pool(n_ctx=512, n_cells=512) as pool:
        sessions = [pool.open_session() for _ in texts]
        for _ in range(14):
            i, n = rng.randrange(3), rng.randrange(20, 150)
            sessions[i].ensure_prefix(texts[i][:n])
            with sliding.new_session(n_ctx=512) as alone:
                alone.ensure_prefix(texts[i][:n])
                assert _text(sessions[i]) == _text(alone)


def _text(session):
    return "".join(chunk.text for chunk in session.decode(max_tokens=6, temperature=0))


@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize("rows", ["none", "ends", "all", "some"])
def test_a_call_of_several_steps_has_its_rows(tiny, open_context, rows, unified):
    """Rows that are wanted at the ends come from the last step; others are copied."""
    fields = {"n_ctx": 768, "n_seq_max": 3, "n_batch": 256, "kv_unified": unified}
    few = open_context(tiny("sliding"), n_ubatch=256, **fields)
    many = open_context(tiny("sliding"), n_ubatch=32, **fields)
    rng = np.random.default_rng(2)
    tokens = rng.integers(0, 128, 150).astype(np.int32)
    seq_ids = np.repeat([2, 0, 1], [100, 20, 30]).astype(np.int32)
    positions = np.concatenate([np.arange(100), np.arange(20), np.arange(30)]).astype(np.int32)
    wanted = {
        "none": np.zeros(150, bool),
        "ends": np.isin(np.arange(150), [98, 99, 119, 149]),
        "all": np.ones(150, bool),
        "some": rng.random(150) < 0.2,
    }[rows]
    for context in (few, many):
        context.decode_spans(tokens, positions, seq_ids, wanted)
        assert [context.n_past(s) for s in range(3)] == [20, 30, 100]
    n = int(wanted.sum())
    for i in range(n):
        assert np.abs(few.logits(i) - many.logits(i)).max() < 1e-3
    if rows == "ends":
        assert many.batch_index(n - 1) < 32
    with pytest.raises(ic.OutputNotAvailableError):
        many.logits(n)
