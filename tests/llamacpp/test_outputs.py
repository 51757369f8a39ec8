"""Rows of logits, embeddings, warm-up, counters and the log."""

from __future__ import annotations

import ctypes
import logging

import llama_cpp
import numpy as np
import pytest

import infercore as ic
from infercore_llamacpp import decoding
from llamacpp import random_gguf


def test_rows_are_those_asked_for(context, prompt):
    context.decode(prompt[:10], seq_id=0, logits="all")
    last = context.logits(9).copy()
    context.clear()
    context.decode(prompt[:10], seq_id=0, logits="last")
    assert np.abs(context.logits(0) - last).max() < 1e-4
    context.decode(prompt[10:12], seq_id=0, logits="none")
    with pytest.raises(ic.OutputNotAvailableError):
        context.logits(0)


def test_a_row_is_a_view_of_the_engine_s_own(context, prompt):
    context.decode(prompt, seq_id=0, logits="last")
    row = context.logits(0)
    assert row.dtype == np.float32
    assert row.shape == (1024,)
    assert not row.flags.owndata
    assert row.flags.writeable  # numpy.argmax copies what is read-only


def test_token_embeddings_and_logits_together(context, prompt):
    context.decode(prompt[:10], seq_id=0, logits="all")
    row = context.logits(9).copy()
    context.clear()
    context.set_embeddings(True)
    context.decode(prompt[:10], seq_id=0, logits="last")
    assert np.abs(context.logits(0) - row).max() < 1e-4
    assert context.embeddings().shape == (10, 128)
    assert context.effective["embeddings"] is True
    context.set_embeddings(False)
    context.decode(prompt[10:12], seq_id=0, logits="last")
    with pytest.raises(ic.OutputNotAvailableError):
        context.embeddings()


def test_pooling_is_what_numpy_makes_of_the_tokens(story, open_context, prompt):
    tokens = prompt[:30]
    each = open_context(story, embeddings=True)
    each.decode(tokens, seq_id=0, logits="none")
    rows = each.embeddings()
    for pooling, expected in (("mean", rows.mean(0)), ("last", rows[-1]), ("cls", rows[0])):
        context = open_context(story, pooling_type=pooling)
        assert context.effective["embeddings"] is True
        assert context.n_ubatch == context.n_batch
        context.decode(tokens, seq_id=0, logits="none")
        np.testing.assert_allclose(context.embedding(0), expected, atol=1e-4)


@pytest.mark.parametrize(
    ("fields", "n_ubatch"),
    [({"n_ctx": 661}, 660), ({"n_batch": 101}, 100), ({"n_ubatch": 8}, 8)],
)
def test_a_mean_of_several_takes_a_step_that_they_divide(story, open_context, fields, n_ubatch):
    context = open_context(story, pooling_type="mean", n_seq_max=4, **fields)
    assert context.n_ubatch == context.effective["n_ubatch"] == n_ubatch


@pytest.mark.parametrize("fields", [{"n_ubatch": 6}, {"n_batch": 3}])
def test_a_step_that_they_do_not_divide_is_refused(story, open_context, fields):
    with pytest.raises(ic.InvalidInputError, match="multiple of n_seq_max") as caught:
        open_context(story, pooling_type="mean", n_seq_max=4, **fields)
    assert caught.value.field == "n_ubatch"


def test_encoders(tiny, open_context):
    tokens = np.arange(20, dtype=np.int32)
    model = tiny("encoder")
    assert model.capabilities.encoder
    assert model.info.has_encoder
    context = open_context(model)
    assert context.effective["pooling_type"] == "mean"
    context.encode(tokens)
    pooled = context.embedding(0).copy()
    each = open_context(model, pooling_type="none")
    each.encode(tokens)
    np.testing.assert_allclose(each.embeddings().mean(0), pooled, atol=1e-5)
    scores = open_context(tiny("rank"))
    scores.encode(tokens)
    assert scores.embedding(0).shape == (1,)


def test_an_encoder_takes_several_texts_in_one_call(tiny, open_context):
    model = tiny("encoder")
    texts = [np.arange(5, dtype=np.int32), np.arange(7, 19, dtype=np.int32)]
    together = open_context(model, n_seq_max=2)
    positions = np.concatenate([np.arange(len(text)) for text in texts]).astype(np.int32)
    seq_ids = [(i,) for i, text in enumerate(texts) for _ in text]
    together.decode_batch(np.concatenate(texts), positions, seq_ids, np.ones(17, dtype=bool))
    for i, text in enumerate(texts):
        alone = open_context(model)
        alone.encode(text)
        np.testing.assert_allclose(together.embedding(i), alone.embedding(0), atol=1e-4)


def test_an_encoder_always_makes_embeddings(tiny, open_context):
    with pytest.raises(ic.UnsupportedFeatureError):
        open_context(tiny("encoder"), embeddings=False)
    with pytest.raises(ic.UnsupportedFeatureError):
        open_context(tiny("encoder")).set_embeddings(False)


def test_bidirectional_attention_changes_early_rows(context, prompt):
    rows = []
    for causal in (True, False, True):
        context.clear()
        context.set_causal_attention(causal)
        context.decode(prompt[:20], seq_id=0, logits="all")
        rows.append(context.logits(0).copy())
    assert np.abs(rows[0] - rows[1]).max() > 1e-2
    assert np.abs(rows[0] - rows[2]).max() < 1e-4


def test_warming_up_leaves_nothing_and_never_costs_tokens(context, prompt):
    context.warmup()
    assert context.n_past(0) == 0
    context.decode(prompt, seq_id=0, logits="none")
    context.warmup()
    assert context.n_past(0) == len(prompt)


def test_the_log_goes_to_a_logger_at_its_level(plugin_model, story_path, caplog):
    with caplog.at_level(logging.INFO, logger="infercore.llamacpp"):
        plugin_model.LlamaModel.load(str(story_path), ic.ModelConfig()).close()
    assert any("loaded meta data" in record.message for record in caplog.records)
    assert all(record.levelno >= logging.INFO for record in caplog.records)


def test_the_log_is_silent_by_default(plugin_model, story_path, capfd):
    plugin_model.LlamaModel.load(str(story_path), ic.ModelConfig()).close()
    assert capfd.readouterr() == ("", "")


def test_log_pieces_are_joined_into_lines():
    from infercore_llamacpp import log

    with log.listening() as lines:
        log.receive(2, b"one ")
        log.receive(5, b"line\n")
        log.receive(5, b".")
        log.receive(5, b".")
        log.receive(3, b"a warning\n")
        log.receive(1, b"not shown\n")
    assert lines == ["one line", "a warning"]
    assert not log.thread.complaints


@pytest.mark.parametrize("embeddings", [False, True])
@pytest.mark.parametrize("unified", [True, False])
def test_rows_lie_one_behind_the_other(story, open_context, prompt, unified, embeddings):
    """As the engine's own call for each of them says."""
    fields = {"embeddings": True, "pooling_type": "none"} if embeddings else {}
    context = open_context(
        story, n_seq_max=4, kv_unified=unified, n_batch=64, n_ubatch=16, **fields
    )
    for n in (13, 1, 7, 1):
        seq_ids = np.repeat(np.arange(4), n).astype(np.int32)
        ends = np.array([context.n_past(s) for s in range(4)])
        positions = (np.tile(np.arange(n), 4) + ends[seq_ids]).astype(np.int32)
        wanted = np.arange(4 * n) % 3 == 0
        context.decode_spans(prompt[: 4 * n], positions, seq_ids, wanted)
        for i, place in enumerate(np.flatnonzero(wanted).tolist()):
            address = decoding._logits_row(context._pointer, place)
            raw = (ctypes.c_float * story.traits.info.n_vocab).from_address(address)
            assert np.array_equal(context.logits(i), np.array(raw))


def test_rows_outlive_what_the_engine_puts_off(story, open_context, prompt):
    context = open_context(story, n_seq_max=3, kv_unified=False)
    wanted = np.ones(4, dtype=bool)
    seq_ids = np.array([0, 0, 1, 1], dtype=np.int32)
    context.decode_spans(prompt[:4], np.array([0, 1, 0, 1], dtype=np.int32), seq_ids, wanted)
    before = [context.logits(i).copy() for i in range(4)]
    context.seq_copy(0, 2, -1, -1)
    context.save_sequence(2)  # the copy is carried out first
    assert all(np.array_equal(context.logits(i), before[i]) for i in range(4))
    with pytest.raises(ic.OutputNotAvailableError):
        context.batch_index(0)
    context.decode_one(5, seq_id=2)
    assert context.batch_index(0) == 0
    assert not np.array_equal(context.logits(0), before[0])


def test_marks_of_rows_that_change_behind_a_read_only_view_are_read_anew(
    story, open_context, prompt
):
    context = open_context(story, n_seq_max=2)
    marks = np.ones(2, dtype=np.bool_)
    seen = marks[:]
    seen.flags.writeable = False
    ids = np.array([0, 1], dtype=np.int32)
    for position, n_rows in enumerate((2, 1)):
        marks[n_rows:] = False
        context.decode_spans(prompt[:2], np.full(2, position, dtype=np.int32), ids, seen)
        context.logits(n_rows - 1)
        with pytest.raises(ic.OutputNotAvailableError):
            context.logits(n_rows)


def moved(context, seed: int, n_tokens: int, n_vocab: int) -> float:
    """Return how far the logits of a random text are off, in one call and in calls of one token."""
    random = np.random.default_rng(seed)
    n = n_tokens or int(random.integers(3, 70))
    tokens = random.integers(0, n_vocab, n).astype(np.int32)
    context.clear()
    context.decode(tokens, seq_id=0, logits="last")
    row = context.logits(0).copy()
    context.clear()
    for token in tokens.tolist():
        context.decode_one(token, seq_id=0)
    return float(np.abs(context.logits(0) - row).max())


@pytest.mark.parametrize(
    ("type_k", "type_v", "flash", "shallow"),
    [
        ("f16", "f16", "off", 0.01), ("f16", "f16", "on", 0.02), ("bf16", "bf16", "off", 0.05),
        ("q8_0", "q8_0", "on", 0.05), ("q5_1", "f16", "off", 0.2), ("iq4_nl", "iq4_nl", "on", 0.4),
        ("q4_1", "f16", "off", 0.4), ("q4_0", "q4_0", "on", 0.4),
    ],
)  # fmt: skip
def test_the_tolerance_holds_on_a_deep_model(tiny, open_context, type_k, type_v, flash, shallow):
    context = open_context(tiny("deep"), type_k=type_k, type_v=type_v, flash_attn=flash)
    gaps = [moved(context, seed, 60, 128) for seed in range(8)]
    assert max(gaps) <= context.tolerance
    assert max(gaps) > shallow  # what shallow models stay below


@pytest.mark.parametrize(
    ("type_k", "type_v", "flash", "seeds"),
    [
        ("q4_0", "q4_0", "on", (80, 229)), ("q5_1", "q5_1", "on", (68, 171)),
        ("q4_0", "f16", "off", (15, 56)),
    ],
)  # fmt: skip
def test_one_key_rounded_the_other_way_is_within_the_tolerance(
    story, open_context, type_k, type_v, flash, seeds
):
    fields = {"n_threads": 1, "n_threads_batch": 1, "n_batch": 128}
    context = open_context(story, type_k=type_k, type_v=type_v, flash_attn=flash, **fields)
    gaps = [moved(context, seed, 0, 1024) for seed in seeds]  # which one, the processor decides
    assert 0.05 < max(gaps) <= context.tolerance <= 1.5


def test_quantised_weights_move_logits_more_with_each_layer(load, open_context, tmp_path):
    plain, path = random_gguf.write(tmp_path / "deep.gguf", "deep"), tmp_path / "q8_0.gguf"
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0
    asked = ctypes.byref(params)
    assert llama_cpp.llama_model_quantize(str(plain).encode(), str(path).encode(), asked) == 0
    context = open_context(load(path), type_k="f16", type_v="f16", flash_attn="on")
    gaps = [moved(context, seed, 68, 128) for seed in range(4)]
    assert 0.5 < max(gaps) <= context.tolerance  # what was stated for any depth
