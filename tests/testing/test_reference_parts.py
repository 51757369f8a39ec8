"""Parts of the reference alone: number formats, flash attention and threads."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from infercore.testing import engine_of
from infercore.testing.attention import attend
from infercore.testing.kv_formats import KV_FORMATS
from infercore.testing.products import ROWS, Workers

RANDOM = np.random.default_rng(8)
IDS = [(i * 37 + 11) % 1000 for i in range(24)]


def numbers(*shape):
    return RANDOM.standard_normal(shape, dtype=np.float32)


# -- number formats ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "step"), [("f32", 0.0), ("f16", 2**-11), ("bf16", 2**-8), ("q8_0", 0.5 / 127 + 2**-11)]
)
def test_a_format_keeps_values_to_its_precision(kind, step):
    values = numbers(5, 2, 64)
    kept = KV_FORMATS[kind].pack(values)
    found = KV_FORMATS[kind].unpack(kept)
    assert found.dtype == np.float32
    assert found.shape == values.shape
    assert np.abs(found - values).max() <= step * np.abs(values).max()
    assert KV_FORMATS[kind].n_bytes(values.size) == kept.nbytes


def test_bf16_rounds_to_nearest():
    bf16 = KV_FORMATS["bf16"]
    values = np.array([1.0, 1.0 + 2**-8 - 2**-12, 1.0 + 2**-8 + 2**-12, -1.5], np.float32)
    expected = [1.0, 1.0, 1.0 + 2**-7, -1.5]
    assert bf16.unpack(bf16.pack(values)).tolist() == expected


def test_q8_0_of_nothing_is_nothing():
    q8_0 = KV_FORMATS["q8_0"]
    assert not q8_0.unpack(q8_0.pack(np.zeros((2, 32), np.float32))).any()


@pytest.mark.parametrize("kind", list(KV_FORMATS))
def test_state_in_every_format_goes_out_and_comes_back(reference_model, kind):
    with reference_model.new_context(n_ctx=64, type_k=kind, type_v=kind) as context:
        context.decode(IDS)
        data = context.save_state()
        context.decode_one(5)
        expected = context.logits().copy()
        context.clear()
        context.load_state(data)
        context.decode_one(5)
        assert np.array_equal(context.logits(), expected)
    plan = reference_model.plan_memory(n_ctx=64, type_k=kind, type_v=kind)
    assert plan.kv_bytes == 2 * KV_FORMATS[kind].n_bytes(64 * 4 * 2 * 32)


# -- flash attention -----------------------------------------------------------------------------


@pytest.mark.parametrize("block", [1, 7, 64, 1000])
def test_attention_in_blocks_is_attention(block):
    q, k, v = numbers(9, 4, 32), numbers(100, 2, 32), numbers(100, 2, 32)
    mask = np.arange(100) <= np.arange(91, 100)[:, None] - 80
    found = attend(q, k, v, mask, block=block)
    assert np.abs(found - attend(q, k, v, mask, block=None)).max() < 1e-6


def test_a_block_that_nobody_may_see_changes_nothing():
    q, k, v = numbers(2, 2, 8), numbers(6, 2, 8), numbers(6, 2, 8)
    mask = np.zeros((2, 6), np.bool_)
    mask[:, 4:] = True
    expected = attend(q, k[4:], v[4:], mask[:, 4:], block=None)
    assert np.abs(attend(q, k, v, mask, block=2) - expected).max() < 1e-6


# -- threads -------------------------------------------------------------------------------------


def test_as_many_threads_compute_as_were_set(reference_model):
    """Each waits for the others at the first product, so all of them must be there."""
    with reference_model.new_context(n_ctx=64) as context:
        context.set_threads(2, 3)
        for workers, n in zip(engine_of(context).workers, (2, 3), strict=True):
            assert met(workers, n) == n
        context.set_threads(1)
        assert met(engine_of(context).workers[0], 1) == 1


def met(workers, n):
    barrier, seen = threading.Barrier(n, timeout=20), set()

    class Weight(np.ndarray):
        def __getitem__(self, part):
            if threading.get_ident() not in seen:
                seen.add(threading.get_ident())
                barrier.wait()
            return np.asarray(self)[part]

    weight = numbers(ROWS * 4 * n, 8).view(Weight)
    workers.product(numbers(2, 8), weight)
    return len(seen)


@pytest.mark.parametrize("n_rows", [1, ROWS - 1, ROWS, 5 * ROWS + 3])
def test_the_bits_do_not_depend_on_the_threads(n_rows):
    x, weight = numbers(3, 40), numbers(n_rows, 40)
    rows = []
    for n in (1, 2, 5):
        workers = Workers(n)
        rows.append(workers.product(x, weight))
        workers.close()
    assert np.array_equal(rows[0], rows[1])
    assert np.array_equal(rows[0], rows[2])
    assert np.abs(rows[0] - x @ weight.T).max() < 1e-5


def test_threads_end_with_the_context(reference_model):
    before = threading.active_count()
    with reference_model.new_context(n_ctx=64, n_threads=4) as context:
        context.decode(IDS)
        assert threading.active_count() > before
        context.set_threads(1)
        assert soon(lambda: threading.active_count() == before)
        context.set_threads(3)
        context.decode([4, 5])
    assert threading.active_count() == before


def soon(holds, seconds=20):
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.01)
    return holds()
