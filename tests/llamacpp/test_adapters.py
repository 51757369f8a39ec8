"""LoRA adapters."""

from __future__ import annotations

import numpy as np
import pytest

import infercore as ic
from llamacpp import random_gguf


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    return str(random_gguf.write(tmp_path_factory.mktemp("lora") / "lora.gguf", "adapter"))


def row_of(context):
    context.clear()
    context.decode(np.arange(20, dtype=np.int32), seq_id=0, logits="last")
    return context.logits(0).copy()


def test_an_adapter_changes_the_numbers_by_its_scale_and_goes_without_trace(
    tiny, open_context, adapter
):
    context = open_context(tiny("llama"))
    plain = row_of(context)
    rows = {}
    for scale in (0.0, 0.5, 1.0):
        context.set_adapters([ic.AdapterSpec(path=adapter, scale=scale)])
        assert context.effective["adapters"][0].scale == scale
        rows[scale] = row_of(context)
    assert np.abs(rows[0.0] - plain).max() < 1e-4
    assert np.abs(rows[0.5] - plain).max() > 1e-2
    assert np.abs(rows[1.0] - rows[0.5]).max() > 1e-2
    context.set_adapters([])
    assert (row_of(context) == plain).all()


def test_a_list_is_applied_as_a_whole(tiny, open_context, adapter):
    context = open_context(tiny("llama"))
    context.set_adapters([ic.AdapterSpec(path=adapter, scale=1.0)])
    once = row_of(context)
    fields = {"adapters": (ic.AdapterSpec(path=adapter, scale=1.0),)}
    assert np.abs(row_of(open_context(tiny("llama"), **fields)) - once).max() < 1e-4
    other = open_context(tiny("llama"))
    assert np.abs(row_of(other) - once).max() > 1e-2


def test_a_wrong_adapter_is_refused_and_the_old_list_stays(
    tiny, open_context, adapter, story_path, tmp_path
):
    context = open_context(tiny("llama"))
    context.set_adapters([ic.AdapterSpec(path=adapter)])
    before = row_of(context)
    with pytest.raises(ic.ModelNotFoundError):
        context.set_adapters([ic.AdapterSpec(path=str(tmp_path / "none.gguf"))])
    with pytest.raises(ic.ModelFormatError, match="not a LoRA adapter"):
        context.set_adapters([ic.AdapterSpec(path=str(story_path))])
    assert (row_of(context) == before).all()
    with pytest.raises(ic.ModelFormatError):
        open_context(tiny("llama"), adapters=(ic.AdapterSpec(path=str(story_path)),))
