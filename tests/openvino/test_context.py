"""What both forms of the graph do the same way."""

from __future__ import annotations

import numpy as np
import pytest

import infercore as ic
import pack

NEAR = 1e-3


def logits_of(context) -> np.ndarray:
    return np.array(context.logits())


@pytest.mark.parametrize("number", range(5))
def test_logits_are_those_of_transformers(open_context, golden, form, number) -> None:
    prompt = golden.prompts[number]
    context = open_context(form=form)
    context.decode(prompt.tokens, logits="all")
    np.testing.assert_allclose(context.logits_all(), prompt.logits, atol=NEAR)


def test_200_greedy_tokens_are_those_of_transformers(open_context, golden, form) -> None:
    prompt = max(golden.prompts, key=lambda p: len(p.greedy))
    context = open_context(form=form)
    context.decode(prompt.tokens)
    tokens = []
    for _ in range(200):
        tokens.append(int(context.logits().argmax()))
        context.decode_one(tokens[-1])
    assert tuple(tokens) == prompt.greedy[:200]


def test_the_default_cache_in_16_bits_is_within_its_tolerance(ov_model, golden) -> None:
    prompt = max(golden.prompts, key=lambda p: len(p.tokens))
    with ov_model.new_context(n_ctx=256) as context:
        # on a processor that computes in bfloat16 the cache is in it too
        usual = "bf16" if context.effective["inference_precision"] == "bf16" else "f16"
        assert (context.effective["type_k"], context.effective["type_v"]) == (usual, usual)
        context.decode(prompt.tokens, logits="all")
        np.testing.assert_allclose(context.logits_all(), prompt.logits, atol=context.tolerance)


@pytest.mark.parametrize("n_ubatch", [1, 7, 32, 100])
def test_steps_of_any_size_agree(open_context, story, reference, form, n_ubatch) -> None:
    tokens = story[:100]
    context = open_context(form=form, n_ubatch=n_ubatch)
    context.decode(tokens, logits="all")
    np.testing.assert_allclose(context.logits(), reference(tokens), atol=NEAR)
    assert context.logits_all().shape == (100, 1024)
    np.testing.assert_allclose(context.logits(40), reference(tokens[:41]), atol=NEAR)


def test_the_same_calls_give_the_same_bits(open_context, story, form) -> None:
    rows = []
    for _ in range(2):
        context = open_context(form=form)
        context.decode(story[:50])
        for token in story[50:60]:
            context.decode_one(token)
        rows.append(logits_of(context))
    np.testing.assert_array_equal(*rows)


@pytest.mark.parametrize("cut", [1, 31, 32, 33, 64, 79])
def test_a_trimmed_context_goes_on_as_a_fresh_one(
    open_context, story, reference, form, cut
) -> None:
    context = open_context(form=form)
    context.decode(story[:80])
    assert context.seq_remove(0, cut)
    assert (context.n_past(), context.n_resident()) == (cut, cut)
    other = story[100:120]
    context.decode(other)
    np.testing.assert_allclose(context.logits(), reference(story[:cut] + other), atol=NEAR)


def test_a_hole_is_as_if_its_tokens_had_never_been_seen(open_context, story, form) -> None:
    """The tail was made with the hole's tokens; so compare with the other form, same history."""
    results = []
    for kind in ("paged", "stateful"):
        context = open_context(form=kind)
        context.decode(story[:60])
        assert context.seq_remove(0, 10, 25)
        assert (context.n_past(), context.n_resident()) == (60, 45)
        assert (context.seq_pos_min(), context.seq_pos_max()) == (0, 59)
        context.decode(story[60:70])
        results.append(logits_of(context))
    np.testing.assert_allclose(*results, atol=NEAR)


def test_many_removals_do_not_grow_the_state(open_context, story, reference, form) -> None:
    context = open_context(form=form, n_ctx=64)
    for _ in range(12):
        context.decode(story[:40])
        context.seq_remove(0, 10)
    context.decode(story[10:40])
    np.testing.assert_allclose(context.logits(), reference(story[:40]), atol=NEAR)


def test_clear_starts_anew(open_context, story, reference, form) -> None:
    context = open_context(form=form)
    context.decode(story[:33])
    context.clear()
    assert (context.n_past(), context.seq_pos_max()) == (0, -1)
    context.decode(story[5:9])
    np.testing.assert_allclose(context.logits(), reference(story[5:9]), atol=NEAR)


def test_warmup_keeps_what_is_resident(open_context, story, reference, form) -> None:
    context = open_context(form=form)
    context.warmup()
    context.decode(story[:20])
    context.warmup()
    assert context.n_past() == 20
    context.decode_one(story[20])
    np.testing.assert_allclose(context.logits(), reference(story[:21]), atol=NEAR)


def test_one_token_after_many_and_many_after_one(open_context, story, reference, form) -> None:
    context = open_context(form=form)
    context.decode(story[:5])
    context.decode_one(story[5])
    context.decode(story[6:40])
    context.decode_one(story[40])
    context.decode_one(story[41])
    np.testing.assert_allclose(context.logits(), reference(story[:42]), atol=NEAR)


# -- cancelling --------------------------------------------------------------------------------


def test_a_callback_cancels_between_steps(open_context, story, reference, form) -> None:
    context = open_context(form=form, n_ubatch=10)
    asked = []
    context.set_abort_callback(lambda: asked.append(1) or len(asked) > 5)
    with pytest.raises(ic.DecodeAbortedError) as caught:
        context.decode(story[:90])
    kept = caught.value.resident_tokens
    assert 0 < kept < 90
    assert kept % 10 == 0
    assert context.n_past() == kept
    context.set_abort_callback(None)
    context.decode(story[kept:90])
    np.testing.assert_allclose(context.logits(), reference(story[:90]), atol=NEAR)


# -- embeddings --------------------------------------------------------------------------------


def test_hidden_states_make_the_logits(open_context, story, form) -> None:
    context = open_context(form=form, embeddings=True, n_ubatch=16)
    context.decode(story[:40], logits="all")
    vectors = context.embeddings()
    assert vectors.shape == (40, 128)
    logits = context.logits_all()
    weights = np.linalg.lstsq(vectors, logits, rcond=None)[0]
    np.testing.assert_allclose(vectors @ weights, logits, atol=1e-2)


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_pooling_is_exact(open_context, story, form, pooling) -> None:
    tokens = story[:30]
    single = open_context(form=form, embeddings=True)
    single.decode(tokens)
    vectors = np.array(single.embeddings(), dtype=np.float64)
    expected = {"mean": vectors.mean(axis=0), "cls": vectors[0], "last": vectors[-1]}
    context = open_context(form=form, embeddings=True, pooling_type=pooling)
    context.decode(tokens)
    np.testing.assert_allclose(context.embedding(), expected[pooling], atol=1e-5)


def test_embeddings_are_switched_on_and_off(open_context, story, form) -> None:
    context = open_context(form=form)
    context.decode(story[:4])
    with pytest.raises(ic.OutputNotAvailableError):
        context.embeddings()
    context.set_embeddings(True)
    context.decode(story[4:6])
    assert context.embeddings().shape == (2, 128)
    assert context.effective["embeddings"] is True
    context.set_embeddings(False)
    context.decode_one(story[6])
    with pytest.raises(ic.OutputNotAvailableError):
        context.embeddings()


# -- saved state -------------------------------------------------------------------------------


@pytest.mark.parametrize("hole", [False, True])
@pytest.mark.parametrize("types", ["f32", "f16"])
def test_a_restored_sequence_goes_on_with_the_same_bits(
    open_context, story, form, types, hole
) -> None:
    fields = {"type_k": types, "type_v": types}
    context = open_context(form=form, **fields)
    context.decode(story[:50])
    if hole:
        context.seq_remove(0, 10, 20)
    data = context.save_sequence(0)
    other = open_context(form=form, **fields)
    other.decode(story[60:90])
    other.load_sequence(0, data)
    assert (other.n_past(), other.n_resident()) == (50, 40 if hole else 50)
    for one in (context, other):
        one.decode(story[50:55])
    # the stateful form adds up zeros for a hole, in another order of summation
    atol = 1e-4 if hole and form == "stateful" else 0
    np.testing.assert_allclose(context.logits(), other.logits(), rtol=0, atol=atol)


def test_an_empty_state_is_a_state(open_context, form) -> None:
    context = open_context(form=form)
    data = context.save_state()
    context.decode([0, 5, 6])
    context.load_state(data)
    assert context.n_past() == 0


def test_saved_state_has_no_more_than_it_must(open_context, story, form) -> None:
    """Slots that are not used do not show in the bytes."""
    blobs = []
    for junk in (story[:30], story[200:230]):
        context = open_context(form=form)
        context.decode(junk)
        context.clear()
        context.decode(story[:3])
        blobs.append(context.save_sequence(0))
    assert blobs[0] == blobs[1]


def test_a_state_of_another_precision_is_refused(open_context, story, form) -> None:
    context = open_context(form=form)
    context.decode(story[:9])
    data = context.save_sequence(0)
    other = open_context(form=form, type_k="f16", type_v="f16")
    with pytest.raises(ic.SnapshotError, match="type_k"):
        other.load_sequence(0, data)
    assert other.n_past() == 0
    other.decode(story[:3])


def test_a_state_of_the_other_form_is_refused(open_context, story) -> None:
    contexts = [open_context(form=form) for form in ("stateful", "paged")]
    for context in contexts:
        context.decode(story[:12])
    rows = [context.logits().copy() for context in contexts]
    states = [context.save_state() for context in contexts]
    for context, row, state in zip(contexts, rows, reversed(states), strict=True):
        with pytest.raises(ic.SnapshotError):
            context.load_state(state)
        context.clear()
        context.decode(story[:12])
        np.testing.assert_allclose(context.logits(), row, atol=1e-3)


# -- the life of a context ---------------------------------------------------------------------


def test_contexts_share_what_is_compiled(ov_model, open_context, form) -> None:
    first, second = open_context(form=form), open_context(form=form, n_ctx=64)
    assert first._inner._compiled is second._inner._compiled
    other = open_context(form=form, type_k="f16", type_v="f16")
    assert other._inner._compiled is not first._inner._compiled


def test_a_context_outlives_its_model(ov_path, story) -> None:
    model = ic.load_model(ov_path, backend="openvino")
    context = model.new_context(n_ctx=64)
    model.close()
    context.decode(story[:5])
    context.close()
    assert context.closed


def test_a_graph_without_contexts_is_dropped_for_another(ov_model, open_context, form) -> None:
    first = open_context(form=form)
    compiled = first._inner._compiled
    first.close()
    second = open_context(form=form, n_threads=1)
    assert second._inner._compiled is not compiled
    assert compiled.engine is None


def test_contexts_opened_and_closed_again_and_again(open_context, story, reference, form) -> None:
    """Giving memory back and running the same compiled graph again corrupts the heap."""
    expected = reference(story[:30])
    for _ in range(6):
        contexts = [open_context(form=form, embeddings=True) for _ in range(3)]
        for context in contexts:
            context.decode(story[:30])
            np.testing.assert_allclose(context.logits(), expected, atol=NEAR)
        for context in contexts:
            context.close()


def test_evaluated_tokens_are_counted(open_context, story, form) -> None:
    context = open_context(form=form)
    context.decode(story[:20])
    context.decode_one(story[20])
    assert context._inner.n_evaluated == 21


def test_attention_that_is_not_causal_is_llama_cpp_s(ov_model, story):
    pack.need_backend("llamacpp")
    fields = {**pack.EXACT, "n_ctx": 128, "attention_type": "non-causal"}
    rows = []
    with ic.load_model(pack.model_path("llamacpp"), backend="llamacpp") as llama:
        for model in (llama, ov_model):
            with model.new_context(**fields) as context:
                assert context.effective["attention_type"] == "non-causal"
                context.decode(story[:30], logits="all")
                rows.append(np.array(context.logits_all()))
                context.decode(story[30:40], logits="all")
                rows.append(np.array(context.logits_all()))
    assert np.abs(rows[0] - rows[2]).max() < 1e-3
    assert np.abs(rows[1] - rows[3]).max() < 1e-3
    with ov_model.new_context(**{**fields, "attention_type": "causal"}) as context:
        context.decode(story[:30])
        assert np.abs(context.logits() - rows[0][-1]).max() > 0.1
    with pytest.raises(ic.UnsupportedFeatureError, match="takes no mask"):
        ov_model.new_context(**fields, backend_options={"form": "paged"})
