"""LoRA adapters in OpenVINO's graph: the logits are llama.cpp's of the same file."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

import infercore as ic
import pack
from infercore_openvino.additions import Additions

BETWEEN_ENGINES = 1e-3
"""How far their logits are apart in float32, without an adapter too; logits span about 30."""


@pytest.fixture(scope="module")
def files():
    pack.need_backend("openvino")
    import infercore_models

    return {
        form: str(infercore_models.path("storyteller-lora", form)) for form in ("gguf-f32", "hf")
    }


@pytest.fixture(scope="module")
def llama_rows(story):
    """Return a function that gives llama.cpp's logits of the story's tokens."""
    pack.need_backend("llamacpp")
    with ic.load_model(pack.model_path("llamacpp"), backend="llamacpp") as model:
        yield lambda *adapters: rows(model, story[:48], *adapters)


def rows(model, tokens, *adapters, **fields):
    with model.new_context(**{**pack.EXACT, "n_ctx": 128, **fields}, adapters=adapters) as context:
        context.decode(tokens, logits="all")
        return np.array(context.logits_all())


@pytest.mark.parametrize("kind", ["gguf-f32", "hf"])
def test_the_logits_are_llama_cpp_s_of_the_same_adapter(
    ov_model, llama_rows, story, files, kind, form
):
    for scale in (1.0, -0.5):
        expected = llama_rows(ic.AdapterSpec(path=files["gguf-f32"], scale=scale))
        adapter = ic.AdapterSpec(path=files[kind], scale=scale)
        found = rows(ov_model, story[:48], adapter, backend_options={"form": form})
        assert np.abs(found - expected).max() < BETWEEN_ENGINES
        assert np.abs(found - llama_rows()).max() > 1


def test_both_files_of_an_adapter_give_the_same_bits(ov_model, story, files):
    gguf, folder = (rows(ov_model, story[:20], ic.AdapterSpec(path=p)) for p in files.values())
    assert (gguf == folder).all()


def test_contexts_beside_each_other_have_adapters_of_their_own(open_context, story, files, form):
    scales = (1.0, None, 0.25)
    contexts = [
        open_context(
            form=form,
            adapters=[] if scale is None else [ic.AdapterSpec(path=files["hf"], scale=scale)],
        )
        for scale in scales
    ]
    for token in story[:12]:
        for context in contexts:
            context.decode_one(token)
    found = [context.logits().copy() for context in contexts]
    for row, scale in zip(found, scales, strict=True):
        alone = open_context(form=form)
        alone.set_adapters([] if scale is None else [ic.AdapterSpec(path=files["hf"], scale=scale)])
        for token in story[:12]:
            alone.decode_one(token)
        assert (alone.logits() == row).all()
    assert np.abs(found[0] - found[2]).max() > 0.1


def test_what_is_resident_stays_when_the_list_changes(open_context, story, files, form):
    """The program of calls is llama.cpp's: KV of before, products of now."""
    pack.need_backend("llamacpp")

    def program(context):
        context.decode(story[:20])
        context.set_adapters([ic.AdapterSpec(path=files["gguf-f32"])])
        assert context.n_past() == 20
        context.decode(story[20:30])
        context.set_adapters([])
        context.decode(story[30:32])
        return context.logits().copy()

    found = program(open_context(form=form))
    with (
        ic.load_model(pack.model_path("llamacpp"), backend="llamacpp") as model,
        model.new_context(**{**pack.EXACT, "n_ctx": 128}) as context,
    ):
        expected = program(context)
    assert np.abs(found - expected).max() < BETWEEN_ENGINES


def test_a_matrix_that_the_model_lacks_leaves_all_as_it_was(
    open_context, story, files, tmp_path, form
):
    folder = shutil.copytree(files["hf"], tmp_path / "deeper")
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes().replace(b"layers.1", b"layers.9"))
    context = open_context(form=form, adapters=[ic.AdapterSpec(path=files["hf"])])
    context.decode(story[:10])
    with pytest.raises(ic.ModelFormatError, match=r"model\.layers\.9"):
        context.set_adapters([ic.AdapterSpec(path=str(folder))])
    context.decode_one(story[10])
    other = open_context(form=form, adapters=[ic.AdapterSpec(path=files["hf"])])
    other.decode(story[:10])
    other.decode_one(story[10])
    assert (context.logits() == other.logits()).all()


def test_settings_that_change_the_computation_are_refused(open_context, files, tmp_path):
    folder = shutil.copytree(files["hf"], tmp_path / "dora")
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "use_dora": True}))
    with pytest.raises(ic.UnsupportedFeatureError, match="use_dora"):
        open_context(adapters=[ic.AdapterSpec(path=str(folder))])


def test_a_graph_without_names_refuses_adapters(copied, files):
    graph = copied / "openvino_model.xml"
    graph.write_text(graph.read_text().replace("__module.", "module_"))
    with (
        ic.load_model(copied, backend="openvino") as model,
        pytest.raises(ic.UnsupportedFeatureError, match="no names"),
    ):
        model.new_context(n_ctx=64, adapters=[ic.AdapterSpec(path=files["hf"])])


def test_an_encoder_takes_none(files):
    import infercore_models

    path = infercore_models.path("encoder", "openvino")
    with (
        ic.load_model(path, backend="openvino") as model,
        pytest.raises(ic.UnsupportedFeatureError, match="adapters"),
    ):
        model.new_context(adapters=[ic.AdapterSpec(path=files["hf"])])


def test_the_plan_counts_the_adapter_s_file(ov_model, files):
    plain = ov_model.plan_memory(n_ctx=64)
    for path in files.values():
        plan = ov_model.plan_memory(n_ctx=64, adapters=[ic.AdapterSpec(path=path)])
        assert plan.weights_bytes > plain.weights_bytes


def test_one_graph_serves_the_same_places_in_any_order():
    matrices = (np.zeros((1, 4), np.float32), np.zeros((4, 1), np.float32))
    first, other = (Additions(adapters=dict.fromkeys(names, matrices)) for names in ("ab", "ba"))
    assert first.key == other.key
