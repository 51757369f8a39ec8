"""Exports without a cache whose tokens look back only, as embedding models made of decoders."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import infercore as ic
import pack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

N_VOCAB, N_EMBD = 1024, 32
TOKENS = [5, 9, 700, 31, 8, 2, 77]


def write(folder: Path, *, causal: bool) -> None:
    """Write a graph of one layer of attention, without positions."""
    ov = pytest.importorskip("openvino", reason="writes the graph")
    from openvino import opset13 as op

    rng = np.random.default_rng(3)
    ids = op.parameter([-1, -1], np.int64, name="input_ids")
    mask = op.parameter([-1, -1], np.int64, name="attention_mask")
    table = op.constant(rng.standard_normal((N_VOCAB, N_EMBD), dtype=np.float32))
    rows = op.gather(table, ids, op.constant(0, dtype=np.int64))
    one = op.constant(np.array([1], dtype=np.int64))
    heads = op.unsqueeze(rows, one)
    seen = op.unsqueeze(op.convert(mask, "boolean"), op.constant(np.array([1, 2], np.int64)))
    looked = (
        op.scaled_dot_product_attention(heads, heads, heads, causal=True)
        if causal
        else op.scaled_dot_product_attention(heads, heads, heads, seen)
    )
    out = op.add(op.squeeze(looked, one), rows)
    out.output(0).set_names({"last_hidden_state"})
    for parameter in (ids, mask):
        parameter.output(0).set_names({parameter.get_friendly_name()})
    ov.save_model(
        ov.Model([op.result(out)], [ids, mask], "encoder"),
        folder / "openvino_model.xml",
        compress_to_fp16=False,
    )


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """Return a function that writes and loads a model of either kind, once."""
    pack.need_backend("openvino")
    pack.need_pack()
    import infercore_models

    source, loaded = infercore_models.path("encoder", "openvino"), {}

    def make(*, causal: bool) -> Any:
        if causal not in loaded:
            folder = tmp_path_factory.mktemp("causal" if causal else "both")
            for name in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copy(source / name, folder)
            config = {"model_type": "x", "num_hidden_layers": 1, "hidden_size": N_EMBD}
            config |= {"num_attention_heads": 1, "max_position_embeddings": 128}
            (folder / "config.json").write_text(json.dumps(config))
            write(folder, causal=causal)
            loaded[causal] = ic.load_model(folder, backend="openvino")
        return loaded[causal]

    yield make
    for model in loaded.values():
        model.close()


@pytest.mark.parametrize("causal", [True, False])
def test_its_attention_is_told_as_it_is(make: Callable[..., Any], causal: bool) -> None:
    model, own = make(causal=causal), "causal" if causal else "non-causal"
    other = "non-causal" if causal else "causal"
    for asked in (None, own):
        with model.new_context(n_ctx=64, attention_type=asked) as context:
            assert context.effective["attention_type"] == own
            context.encode(TOKENS)
            whole = context.embeddings().copy()
            context.encode(TOKENS[:3])
            same = np.abs(context.embeddings() - whole[:3]).max() < 1e-5
            assert same == causal
    with pytest.raises(ic.UnsupportedFeatureError) as caught:
        model.new_context(n_ctx=64, attention_type=other)
    assert caught.value.feature == "attention_type"


def test_a_text_is_never_cut_into_several(make: Callable[..., Any]) -> None:
    """Nothing is kept of the first part, also where its tokens would not look ahead."""
    with make(causal=True).new_context(n_ctx=64, n_batch=4, n_ubatch=4) as context:
        with pytest.raises(ic.InvalidInputError, match="4"):
            context.encode(TOKENS)
        entries = [(token, [0], False) for token in TOKENS]
        with pytest.raises(ic.InvalidInputError, match="4"):
            context.decode_batch(entries)
        context.encode(TOKENS[:4])


def test_its_vectors_are_the_last_tokens(make: Callable[..., Any]) -> None:
    model = make(causal=True)
    vector = ic.embed(model, ["a b c"], pooling="last", normalize=False)[0]
    with model.new_context(n_ctx=64, pooling_type="none") as context:
        context.encode(model.tokenizer.encode("a b c"))
        assert np.abs(context.embeddings()[-1] - vector).max() < 1e-5
