"""`infercore.embed`: a vector for each text, from encoders and from language models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import infercore as ic
import pack

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NEAR = 1e-3


@pytest.fixture(scope="module")
def encoder_path(backend_name: str) -> Path:
    pack.need_pack()
    import infercore_models

    return infercore_models.path("encoder", pack.FORMATS[backend_name])


@pytest.fixture(scope="module")
def encoder(backend_name: str, encoder_path: Path) -> Iterator[Any]:
    with ic.load_model(encoder_path, backend=backend_name) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def golden_texts() -> Any:
    pack.need_pack()
    import infercore_models

    return infercore_models.golden_texts("encoder")


def cosines(left: Any, right: Any) -> Any:
    return (left * right).sum(1) / np.linalg.norm(left, axis=1) / np.linalg.norm(right, axis=1)


def test_ids_are_those_of_transformers(encoder: Any, golden_texts: Any) -> None:
    for found in golden_texts:
        assert tuple(encoder.tokenizer.encode(found.text)) == found.tokens


@pytest.mark.parametrize("pooling", [None, "mean", "cls", "last"])
def test_vectors_are_those_of_transformers(
    encoder: Any, golden_texts: Any, pooling: str | None
) -> None:
    pick = {"cls": lambda r: r[0], "last": lambda r: r[-1]}.get(str(pooling), lambda r: r.mean(0))
    expected = np.stack([pick(found.rows) for found in golden_texts])
    how = {"pooling": pooling, "normalize": False, "precision": "accurate"}
    vectors = ic.embed(encoder, [t.text for t in golden_texts], **how)
    assert vectors.dtype == np.float32
    assert vectors.shape == expected.shape
    assert (1 - cosines(vectors, expected)).max() < NEAR
    np.testing.assert_allclose(vectors, expected, atol=NEAR)


def test_both_engines_agree(golden_texts: Any) -> None:
    import infercore_models

    texts, found = [t.text for t in golden_texts], []
    for backend, form in pack.FORMATS.items():
        pack.need_backend(backend)
        path = infercore_models.path("encoder", form)
        how = {"pooling": "mean", "precision": "accurate"}
        found.append(ic.embed(path, texts, backend=backend, **how))
    assert (1 - cosines(*found)).max() < NEAR


def test_fields_of_the_context_are_honoured_or_refused(
    encoder_path: Path, encoder: Any, golden_texts: Any
) -> None:
    texts, backend = [t.text for t in golden_texts[:2]], encoder.backend
    plain = ic.embed(encoder, texts, n_threads=1)
    assert (1 - cosines(plain, ic.embed(encoder, texts))).max() < NEAR
    of_path = ic.embed(encoder_path, texts, backend=backend, n_threads=1, use_mmap=False)
    assert (1 - cosines(plain, of_path)).max() < NEAR
    for wrong in ({"n_ctx": 64}, {"n_threads": 0}, {"nthreads": 1}, {"type_k": "f5"}):
        with pytest.raises(ic.InvalidInputError):
            ic.embed(encoder, texts, **wrong)
    with pytest.raises(ic.InferCoreError):
        ic.embed(encoder, texts, adapters=[ic.AdapterSpec(path="none.gguf")])
    with pytest.raises((ic.InvalidInputError, ic.UnsupportedFeatureError)):
        ic.embed(encoder_path, texts, backend=backend, main_gpu=200)


def test_of_a_path_or_a_model_in_order_however_many(
    encoder_path: Path, encoder: Any, golden_texts: Any
) -> None:
    texts = [t.text for t in golden_texts] * 12
    from_path = ic.embed(encoder_path, texts, pooling="mean", backend=encoder.backend)
    alone = [ic.embed(encoder, [text], pooling="mean")[0] for text in texts[:7]]
    np.testing.assert_allclose(from_path, np.tile(np.stack(alone), (12, 1)), atol=1e-4)
    np.testing.assert_allclose(np.linalg.norm(from_path, axis=1), 1, atol=1e-5)


def test_what_is_alike_is_near(encoder: Any, golden_texts: Any) -> None:
    baker, same, dragon, *_ = ic.embed(encoder, [t.text for t in golden_texts], pooling="mean")
    assert baker @ same > baker @ dragon


def test_a_text_too_long_is_refused_before_anything(encoder: Any) -> None:
    long = "the old mill " * 400
    with pytest.raises(ic.InvalidInputError, match="text 1 cannot be embedded") as caught:
        ic.embed(encoder, ["short", long], pooling="mean")
    assert (caught.value.field, caught.value.value) == ("texts", 1)


# -- pools ---------------------------------------------------------------------------------------


def test_a_pool_of_an_encoder_honours_its_fields(encoder: Any, golden_texts: Any) -> None:
    texts = [t.text for t in golden_texts[:2]]
    exact = {"precision": "accurate"}
    with encoder.new_pool(**exact) as pool:
        expected = ic.embed(encoder, texts, pooling="mean", **exact)
        np.testing.assert_allclose(pool.embed(texts, pooling="mean"), expected, atol=1e-6)
    for wrong in ({"type_k": ic.KVType("none of its")}, {"backend_options": {"no_such": 1}}):
        with pytest.raises((ic.InvalidInputError, ic.UnsupportedFeatureError)):
            encoder.new_pool(**wrong)
    n_tokens = len(encoder.tokenizer.encode(texts[0]))
    with encoder.new_pool(n_ctx=n_tokens) as pool:
        assert pool.embed(texts[:1], pooling="mean").shape == (1, encoder.info.n_embd)
        with pytest.raises(ic.InvalidInputError, match=f"n_ctx is {n_tokens}") as caught:
            pool.embed([f"{texts[0]} {texts[1]}"], pooling="mean")
        assert caught.value.field == "texts"


@pytest.mark.parametrize(
    "field",
    [
        {"n_batch": 64}, {"n_ubatch": 8}, {"kv_unified": False},
        {"on_oom": "shrink"}, {"n_ctx_min": 8}, {"step_timeout": 5.0}, {"load_timeout": 5.0},
    ],
)  # fmt: skip
def test_a_pool_of_an_encoder_refuses_what_it_would_ignore(
    encoder: Any, field: dict[str, Any]
) -> None:
    with pytest.raises((ic.InvalidInputError, ic.UnsupportedFeatureError), match=next(iter(field))):
        encoder.new_pool(**field)


def test_a_pool_embeds_with_its_adapters(model: Any) -> None:
    import infercore_models

    path = str(infercore_models.path("storyteller-lora", "gguf-f32"))
    adapters = [ic.AdapterSpec(path=path, scale=4.0)]
    if not model.capabilities.lora:
        pytest.skip("refused: this engine takes no adapters")
    plain = ic.embed(model, ["Once upon a time"], pooling="mean")
    expected = ic.embed(model, ["Once upon a time"], pooling="mean", adapters=adapters)
    assert np.abs(expected - plain).max() > NEAR
    with model.new_pool(n_ctx=64, n_parallel=1, adapters=adapters) as pool:
        np.testing.assert_allclose(
            pool.embed(["Once upon a time"], pooling="mean"), expected, atol=1e-5
        )


# -- models that generate ------------------------------------------------------------------------


def test_a_language_model_needs_the_pooling_named(model: Any) -> None:
    with pytest.raises(ic.InvalidInputError, match="name one") as caught:
        ic.embed(model, ["a"])
    assert caught.value.field == "pooling"


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_a_language_model_pools_its_own_rows(model: Any, golden: Any, pooling: str) -> None:
    texts = [prompt.text for prompt in golden.prompts]
    vectors = ic.embed(model, texts, pooling=pooling, normalize=False)
    for text, vector in zip(texts, vectors, strict=True):
        with model.new_context(n_ctx=512, embeddings=True) as context:
            context.decode(model.tokenizer.encode(text))
            rows = context.embeddings()
        expected = {"mean": rows.mean(0), "cls": rows[0], "last": rows[-1]}[pooling]
        assert 1 - cosines(vector[None], expected[None])[0] < NEAR


def test_text_of_several_compute_steps_is_not_averaged_over_the_last(model: Any) -> None:
    text = "Once upon a time there was a baker named Mira. " * 60
    n_tokens = len(model.tokenizer.encode(text))
    assert 512 < n_tokens <= model.info.n_ctx_train
    vector = ic.embed(model, [text, "a"], pooling="mean", normalize=False)[0]
    with model.new_context(n_ctx=n_tokens, n_batch=100, embeddings=True) as context:
        context.decode(model.tokenizer.encode(text), logits="none")
        rows = context.embeddings()
    assert rows.shape[0] == n_tokens
    assert 1 - cosines(vector[None], rows.mean(0)[None])[0] < NEAR


def test_no_texts_give_no_vectors(model: Any) -> None:
    vectors = ic.embed(model, [], pooling="mean")
    assert vectors.shape == (0, model.info.n_embd)
    assert vectors.dtype == np.float32


@pytest.mark.parametrize("texts", ["a text", b"bytes", None, 5, [5], ["a", None], ["\ud800"]])
def test_texts_that_are_none(model: Any, texts: Any) -> None:
    with pytest.raises(ic.InvalidInputError) as caught:
        ic.embed(model, texts, pooling="mean")
    assert caught.value.field == "texts"


@pytest.mark.parametrize("pooling", ["none", "rank", "median", 1, np.zeros(3)], ids=str)
def test_a_pooling_that_gives_no_vector(model: Any, pooling: Any) -> None:
    with pytest.raises(ic.InvalidInputError) as caught:
        ic.embed(model, ["a"], pooling=pooling)
    assert caught.value.field == "pooling"


def test_an_encoder_has_no_session(encoder: Any) -> None:
    with pytest.raises(ic.UnsupportedFeatureError, match=r"infercore\.embed"):
        encoder.new_session(n_ctx=64)


@pytest.mark.parametrize("text", ["hello world", "Mira bakes bread", "a", "", "one, two."])
def test_an_encoders_text_begins_where_it_began(encoder: Any, text: str) -> None:
    ids = encoder.tokenizer.encode(text)
    bare = encoder.tokenizer.encode(text, add_special=False)
    shown = encoder.tokenizer.decode(ids, skip_special=True)
    assert shown == encoder.tokenizer.decode(bare)
    assert not shown.startswith(" ")
    assert shown.replace(" ", "") == text.lower().replace(" ", "") or "[UNK]" in shown
