"""Rows of numbers in place of tokens: what the model's own table gives is what its tokens give."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import infercore as ic
import infercore_models
from infercore.weight_files import safetensors

if TYPE_CHECKING:
    from collections.abc import Callable

SHARED = {"n_seq_max": 2, "kv_unified": True}


@pytest.fixture(scope="module")
def table() -> Any:
    """Return the row of each token [n_vocab, n_embd]."""
    folder = infercore_models.path("storyteller", "hf")
    return safetensors.read(str(folder / "model.safetensors"))["model.embed_tokens.weight"]


@pytest.fixture
def ids(golden: Any) -> list[int]:
    return list(golden.prompts[1].tokens)


def near(context: Any, found: Any, wanted: Any) -> bool:
    return bool(np.abs(found - wanted).max() <= 2 * context.tolerance + 1e-6)


def test_the_numbers_count_not_the_table(
    new_context: Callable[..., Any], table: Any, ids: list[int]
) -> None:
    context = new_context()
    context.decode(ids)
    plain = context.logits().copy()
    rows = table[ids]
    rows[3:9] = table[50:56]
    context.clear()
    context.decode_spans([(0, rows, "last")])
    assert not near(context, context.logits(), plain)


def test_several_sequences_between_tokens(
    new_context: Callable[..., Any], table: Any, ids: list[int]
) -> None:
    plain, context = new_context(), new_context(**SHARED)
    plain.decode(ids)
    context.decode_spans([(0, ids[:5], "none"), (1, ids[:2], "none")])
    context.decode_spans([(1, table[ids[2:]], "last"), (0, table[ids[5:-1]], "none")])
    assert context.n_outputs == 1
    assert near(context, context.logits(), plain.logits())
    context.decode_spans([(0, ids[-1:], "last")])
    assert near(context, context.logits(), plain.logits())
    held = context.tokens(0)
    assert held[:5] == ids[:5]
    assert held[-1] == ids[-1]
    assert all(number < 0 for number in held[5:-1])
    assert held[5:-1] == context.tokens(1)[5:-1]


def test_embeddings_behind_them(
    new_context: Callable[..., Any], table: Any, ids: list[int]
) -> None:
    plain, given = (new_context(embeddings=True, **SHARED) for _ in range(2))
    plain.decode_spans([(0, ids[:9], "last"), (1, ids[9:12], "none")])
    given.decode_spans([(0, table[ids[:9]], "last"), (1, table[ids[9:12]], "none")])
    assert given.embeddings().shape == (12, table.shape[1])
    np.testing.assert_allclose(given.embeddings(), plain.embeddings(), atol=1e-3)
    assert near(given, given.logits(), plain.logits())


def test_lists_empty_rows_and_wide_floats(new_context: Callable[..., Any], table: Any) -> None:
    context = new_context()
    context.decode_spans([(0, table[[5, 6]], "last")])
    wanted, held = context.logits().copy(), context.tokens()
    for rows in (table[[5, 6]].tolist(), list(table[[5, 6]]), table[[5, 6]].astype(np.float64)):
        context.clear()
        context.decode_spans([(0, rows, "last")])
        assert np.array_equal(context.logits(), wanted)
        assert context.tokens() == held
    context.decode_spans([(0, table[:0], "last")])
    assert context.tokens() == held


def test_what_holds_them_is_saved_copied_and_cut(
    new_context: Callable[..., Any], table: Any, ids: list[int]
) -> None:
    context, other = new_context(**SHARED), new_context(**SHARED)
    context.decode_spans([(0, table[ids], "last")])
    wanted = context.logits().copy()
    other.load_state(context.save_state())
    assert other.tokens() == context.tokens()
    assert np.array_equal(other.logits(), wanted)
    other.load_sequence(1, context.save_sequence(0))
    other.decode_batch([(9, (0, 1), True)])  # both hold the same
    context.seq_copy(0, 1)
    context.decode_spans([(0, table[[9]], "last")])
    assert near(context, context.logits(), other.logits())
    context.decode_spans([(1, table[[10]], "none")])
    with pytest.raises(ic.InvalidSequenceError, match="different tokens"):
        context.decode_batch([(9, (0, 1), True)])
    assert context.seq_remove(1, len(ids) - 1)
    context.decode_one(ids[-1], seq_id=1)
    assert near(context, context.logits(), wanted)


def wrong(table: Any) -> list[Any]:
    rows = table[[5, 6]]
    return [
        rows[:, :-1], rows[None], rows * np.nan, rows.astype(np.float64) * 1e300, rows[0],
        [[1.0, 2.0], [3.0]], [["a"] * table.shape[1]], [[None]], rows.astype(complex),
    ]  # fmt: skip


def test_what_fits_no_row_is_refused(new_context: Callable[..., Any], table: Any) -> None:
    context = new_context(n_ctx=64, **SHARED)
    context.decode([5, 6])
    row = context.logits().copy()
    for rows in wrong(table):
        with pytest.raises(ic.InvalidInputError):
            context.decode_spans([(0, rows, "last")])
    with pytest.raises(ic.InvalidInputError, match="two calls"):
        context.decode_spans([(0, table[[5]], "last"), (1, [5], "last")])
    with pytest.raises(ic.InvalidSequenceError):
        context.decode_spans([(0, table[[5]], "last"), (0, table[[5]], "last")])
    with pytest.raises(ic.ContextOverflowError):
        context.decode_spans([(0, table[:80], "last")])
    assert context.tokens() == [5, 6]
    assert np.array_equal(context.logits(), row)


def test_a_session_goes_on_behind_them(new_session: Callable[..., Any], table: Any) -> None:
    session, text = new_session(), "Once upon a time there was a baker"
    n = session.ensure_prefix(text).prefix_tokens
    wanted = [c.text for c in session.decode(max_tokens=6, temperature=0)]
    session.ensure_prefix(text)
    session.context.seq_remove(0, n)
    session.context.decode_spans([(0, table[[7, 8, 9]], "none")])
    status = session.ensure_prefix(text)
    assert (status.resident_tokens, session.context.n_past() >= n) == (n, True)
    assert [c.text for c in session.decode(max_tokens=6, temperature=0)] == wanted


def test_an_encoder_takes_none(backend_name: str) -> None:
    kind = {"llamacpp": "gguf-f32"}.get(backend_name, backend_name)
    path = infercore_models.path("encoder", kind)
    with ic.load_model(path, backend=backend_name) as model, model.new_context() as context:
        rows = np.zeros((2, model.info.n_embd), np.float32)
        with pytest.raises(ic.UnsupportedFeatureError):
            context.decode_spans([(0, rows, "none")])
