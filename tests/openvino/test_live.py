"""What changes in an open context of OpenVINO, by another compiled graph that takes over."""

from __future__ import annotations

import numpy as np
import pytest

import infercore as ic
import pack

BETWEEN_ENGINES = 1e-3


def usable() -> int:
    from infercore_openvino.cpu import usable_cores

    return usable_cores()


def test_the_engine_itself_changes_no_threads(open_context):
    compiled = open_context()._inner._compiled.engine
    with pytest.raises(RuntimeError, match="not possible to set property"):
        compiled.set_property({"INFERENCE_NUM_THREADS": 1})


def test_threads_change_and_what_is_held_stays(open_context, reference, story, form):
    context = open_context(form=form, n_threads=1)
    context.decode(story[:20])
    before = context.logits().copy()
    for n in (usable(), 1, usable()):
        context.set_threads(n)
        assert (context.n_threads, context.n_threads_batch) == (n, n)
        engine = context._inner._compiled.engine
        streams = context.effective["num_streams"]
        assert engine.get_property("INFERENCE_NUM_THREADS") == n * streams
        assert context.n_past() == 20
        context.eval(story[19:20], 19)
        assert np.abs(context.logits() - before).max() < context.tolerance
    context.decode(story[20:30])
    assert np.abs(context.logits() - reference(story[:30])).max() < context.tolerance


def test_the_last_outputs_outlive_a_change_of_threads(open_context, story, form):
    context = open_context(form=form, n_threads=1, embeddings=True, n_batch=8, n_ubatch=8)
    for n_tokens in (20, 5):  # rows that were copied from steps, then a view
        context.decode(story[:n_tokens], logits="all")
        rows, vectors = context.logits_all().copy(), context.embeddings().copy()
        for n in (1, usable()):
            context.set_threads(n)
            assert np.array_equal(context.logits_all(), rows)
            assert np.array_equal(context.logits(), rows[-1])
            assert np.array_equal(context.embeddings(), vectors)


def test_attention_changes_live_as_in_llama_cpp(open_context, story):
    """The program of calls is llama.cpp's: keys and values of before, attention of now."""
    pack.need_backend("llamacpp")

    def program(context):
        rows = []
        for on, tokens in ((False, story[:12]), (True, story[12:20]), (False, story[20:24])):
            context.set_causal_attention(on)
            assert context.effective["attention_type"] == ("causal" if on else "non-causal")
            context.decode(tokens, logits="all")
            rows.append(context.logits_all().copy())
        return np.concatenate(rows)

    found = program(open_context(form="stateful"))
    plain = open_context(form="stateful")
    plain.decode(story[:24], logits="all")
    assert np.abs(found - plain.logits_all()).max() > 0.1
    with (
        ic.load_model(pack.model_path("llamacpp"), backend="llamacpp") as model,
        model.new_context(**{**pack.EXACT, "n_ctx": 128}) as context,
    ):
        assert np.abs(found - program(context)).max() < BETWEEN_ENGINES


def test_paged_attention_takes_no_mask(open_context, story):
    context = open_context(form="paged")
    context.set_causal_attention(True)
    context.decode(story[:5])
    row = context.logits().copy()
    with pytest.raises(ic.UnsupportedFeatureError, match="takes no mask"):
        context.set_causal_attention(False)
    assert np.array_equal(context.logits(), row)
    engine = context._inner._compiled.graph.model
    attention = [n for n in engine.get_ordered_ops() if "PagedAttention" in n.get_type_name()]
    names = {name for port in engine.inputs for name in port.get_names()}
    assert attention
    assert "attention_mask" not in names


def test_control_vectors_are_llama_cpp_s(open_context, ov_model, story, form):
    pack.need_backend("llamacpp")
    n_layer, n_embd = ov_model.info.n_layer, ov_model.info.n_embd
    draw = np.random.default_rng(5).normal(0, 3, (n_layer, n_embd)).astype(np.float32)
    directions = {layer: draw[layer] for layer in range(1, n_layer)}

    def program(context):
        context.decode(story[:20])
        context.set_control_vector(directions)
        context.decode(story[20:30], logits="all")
        rows = context.logits_all().copy()
        context.set_control_vector(None)
        context.decode(story[30:32])
        return np.concatenate([rows, context.logits()[None]])

    found = program(open_context(form=form))
    plain = open_context(form=form)
    plain.decode(story[:30])
    assert np.abs(found[9] - plain.logits()).max() > 0.1
    with (
        ic.load_model(pack.model_path("llamacpp"), backend="llamacpp") as model,
        model.new_context(**{**pack.EXACT, "n_ctx": 128}) as context,
    ):
        assert np.abs(found - program(context)).max() < BETWEEN_ENGINES


def test_all_at_once(open_context, story, form):
    """Rows, a vector, an adapter and threads live in one graph; each goes away again."""
    import infercore_models

    adapter = ic.AdapterSpec(path=str(infercore_models.path("storyteller-lora", "hf")))
    context, plain = open_context(form=form), open_context(form=form)
    width = context._inner._compiled.graph.shape.n_embd
    rows = np.random.default_rng(1).normal(0, 0.1, (3, width)).astype(np.float32)
    context.decode_spans([(0, rows, "none")])
    context.set_adapters([adapter])
    context.set_control_vector({0: rows[0]})
    context.set_threads(1)
    context.decode(story[:5])
    context.set_control_vector(None)
    context.set_adapters([])
    plain.decode_spans([(0, rows, "last")])
    context.seq_remove(0, 3)
    context.decode(story[:9])
    plain.decode(story[:9])
    assert np.abs(context.logits() - plain.logits()).max() < context.tolerance
