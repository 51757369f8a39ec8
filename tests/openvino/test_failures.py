"""When the engine fails: typed errors, a true count, nothing silent."""

from __future__ import annotations

import gc
import sys

import numpy as np
import pytest

import infercore as ic
from infercore_openvino.cache import KvArray
from infercore_openvino.paged_request import PagedRequest


class Failing:
    """An infer request whose next call fails."""

    def __init__(self, request, error: BaseException) -> None:
        self._request = request
        self._error: BaseException | None = error

    def infer(self, *args, **kwargs):
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return self._request.infer(*args, **kwargs)

    def __getattr__(self, name):
        return getattr(self._request, name)


def break_next(context, error: BaseException) -> None:
    inner = context._inner
    inner._request = Failing(inner._request, error)
    if inner._paged is not None:
        paged, run = inner._paged, inner._paged._run

        def fail() -> None:
            paged._run = run
            raise error

        paged._run = fail


CALLS = {
    "decode": lambda context, story: context.decode(story[20:40]),
    "decode_one": lambda context, story: context.decode_one(story[20]),
    "decode_batch": lambda context, story: context.decode_batch(
        [(story[20], (0,), False), (story[21], (1,), True)]
    ),
}


@pytest.mark.parametrize(
    "words", ["std::bad_alloc", "Failed to allocate 4096 bytes of memory", "can't alloc"]
)
@pytest.mark.parametrize("call", CALLS)
def test_no_memory_in_a_step_leaves_what_was_there(
    open_context, story, reference, call, words
) -> None:
    context = open_context(n_seq_max=2)
    context.decode(story[:20])
    break_next(context, RuntimeError(f"Exception from x:1:\n{words}\n"))
    with pytest.raises(ic.OutOfMemoryError, match="a compute step"):
        CALLS[call](context, story)
    assert (context.n_past(), context.n_past(1)) == (20, 0)
    context.decode(story[20:25])
    np.testing.assert_allclose(context.logits(), reference(story[:25]), atol=1e-3)


@pytest.mark.parametrize("call", CALLS)
def test_an_unknown_failure_ends_the_context(open_context, story, call) -> None:
    context = open_context(n_seq_max=2)
    context.decode(story[:20])
    break_next(context, RuntimeError("Infer Request is busy"))
    with pytest.raises(ic.SessionFatalError):
        CALLS[call](context, story)
    with pytest.raises(ic.SessionFatalError):
        context.decode_one(5)


def test_an_interruption_leaves_the_context_usable(open_context, story, reference) -> None:
    context = open_context()
    context.decode(story[:20])
    break_next(context, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        context.decode(story[20:30])
    assert context.n_past() == 20
    context.decode_one(story[20])
    np.testing.assert_allclose(context.logits(), reference(story[:21]), atol=1e-3)


def test_a_stateful_failure_is_never_taken_for_resident_tokens(
    open_context, story, reference
) -> None:
    context = open_context(form="stateful")
    context.decode(story[:20])
    break_next(context, MemoryError())
    with pytest.raises(ic.OutOfMemoryError):
        context.decode(story[20:30])
    assert context.n_past() == 20  # each layer says that it took none
    context.decode(story[20:25])
    np.testing.assert_allclose(context.logits(), reference(story[:25]), atol=1e-3)


def test_layers_that_differ_after_a_failure_hold_nothing(open_context, story, monkeypatch) -> None:
    context = open_context(form="stateful")
    context.decode(story[:20])
    inner, lengths = context._inner, iter([30, 20])
    monkeypatch.setattr(inner, "_data", lambda: [np.empty((1, 1, n, 1)) for n in lengths])
    break_next(context, MemoryError())
    with pytest.raises(ic.SessionFatalError):
        context.decode(story[20:30])
    assert inner.n_past(0) == 0


def test_without_the_transformation_the_stateful_form_serves(
    ov_path, story, reference, monkeypatch, caplog
) -> None:
    monkeypatch.setitem(sys.modules, "openvino._offline_transformations", None)
    with ic.load_model(ov_path, backend="openvino") as model:
        assert model.capabilities.kv_copy == "none"
        assert "falling back to the stateful form" in caplog.text
        with model.new_context(n_ctx=64, type_k="f32") as context:
            assert context.effective["form"] == "stateful"
            context.decode(story[:30])
            np.testing.assert_allclose(context.logits(), reference(story[:30]), atol=1e-3)
        with pytest.raises(ic.UnsupportedFeatureError) as caught:
            model.new_context(n_ctx=64, backend_options={"form": "paged"})
        assert caught.value.feature == "form"


def test_logits_that_are_kept_outlive_all(ov_path, story, form) -> None:
    model = ic.load_model(ov_path, backend="openvino")
    context = model.new_context(n_ctx=64, backend_options={"form": form})
    context.decode(story[:10])
    kept = context.logits()
    expected = kept.copy()
    with pytest.raises(ValueError, match="read-only"):
        kept[0] = 1.0
    context.close()
    model.close()
    del context, model
    gc.collect()
    np.testing.assert_array_equal(kept, expected)


def test_a_state_that_sums_up_a_text_is_never_cut(copied, story):
    """Of a hybrid model: cutting it like keys and values would give wrong numbers in silence."""
    graph = copied / "openvino_model.xml"
    text = graph.read_text()
    assert "past_key_values.3.keypresent.3.key" in text
    graph.write_text(text.replace("past_key_values.3.keypresent.3.key", "cache_params.past.ssm.3"))
    with (
        ic.load_model(copied, backend="openvino") as model,
        model.new_context(n_ctx=64, n_threads=1) as context,
    ):
        context.decode(story[:3])
        assert context.capabilities.kv_remove == "none"
        assert not context.seq_remove(0, 1, 2)
        assert context.tokens() == story[:3]


def test_inputs_that_were_bound_in_part_are_bound_anew(open_context, story, monkeypatch) -> None:
    def row(n_bound: int | None) -> np.ndarray:
        context = open_context(n_seq_max=2)
        context.decode(story[:3])
        context.decode(story[5:7], seq_id=1)
        context.decode_one(story[3])
        if n_bound is not None:
            bind = PagedRequest._bind

            def bind_part(self, **arrays) -> None:
                bind(self, **dict(list(arrays.items())[:n_bound]))
                raise MemoryError

            monkeypatch.setattr(PagedRequest, "_bind", bind_part)
            with pytest.raises(ic.OutOfMemoryError):
                context.decode(story[8:9], seq_id=1)
            monkeypatch.setattr(PagedRequest, "_bind", bind)
        context.decode_one(story[4])
        return np.array(context.logits())

    expected = row(None)
    for n_bound in (1, 4, 9):
        np.testing.assert_array_equal(row(n_bound), expected)


def test_a_cache_that_cannot_grow_stays_as_it_was(open_context, story, monkeypatch) -> None:
    context = open_context(n_seq_max=2, n_ctx=64)
    cache = context._inner._cache
    sizes = [len(array.data) for array in cache.arrays]
    grown, calls = KvArray.grown, []

    def fails_later(self, n):
        calls.append(n)
        if len(calls) > 2:
            raise MemoryError
        return grown(self, n)

    monkeypatch.setattr(KvArray, "grown", fails_later)
    with pytest.raises(ic.OutOfMemoryError):
        cache._grow(2)
    assert [len(array.data) for array in cache.arrays] == sizes


def test_a_state_that_cannot_be_put_back_gives_its_blocks_back(
    open_context, story, monkeypatch
) -> None:
    context = open_context(n_seq_max=2, n_ctx=64)
    context.decode(story[:20])
    saved = context._inner.save_sequence(0)
    pool = context._inner._cache.tables.pool
    n_free = pool.n_free

    def fails(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(context._inner._cache.tables, "restore", fails)
    with pytest.raises(MemoryError):
        context._inner.load_sequence(1, saved)
    assert pool.n_free == n_free
