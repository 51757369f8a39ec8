"""LoRA adapters of the reference: read from a PEFT folder, added at each product."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

import pack
from infercore.errors import ModelFormatError, ModelNotFoundError, UnsupportedFeatureError
from infercore.testing import load_reference_model
from infercore.values.config import AdapterSpec

IDS = [(i * 37 + 11) % 1000 for i in range(24)]


@pytest.fixture
def folder(tmp_path):
    pack.need_pack()
    import infercore_models

    source = infercore_models.path("storyteller-lora", "hf")
    return shutil.copytree(source, tmp_path / "adapter")


def logits(model, *adapters):
    with model.new_context(n_ctx=64, adapters=adapters) as context:
        context.decode(IDS, logits="all")
        return context.logits_all().copy()


def edit(folder, **changes):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("scale", [1.0, 0.25, -1.0])
def test_an_adapter_is_what_it_adds_to_the_weights(reference_model, folder, scale):
    adapter = AdapterSpec(path=str(folder), scale=scale)
    with load_reference_model(merged=[adapter]) as merged:
        expected = logits(merged)
    found = logits(reference_model, adapter)
    assert np.abs(found - expected).max() < 1e-4
    assert np.abs(found - logits(reference_model)).max() > 0.1


def test_merged_weights_have_an_identity_of_their_own(reference_model, folder):
    digests = set()
    for scales in ([], [1.0], [0.5]):
        merged = [AdapterSpec(path=str(folder), scale=scale) for scale in scales]
        with load_reference_model(merged=merged) as model, model.new_session(n_ctx=32) as session:
            digests.add(session.explain_context().manifest.runtime_digest)
    assert len(digests) == 3


def test_alpha_and_rank_set_the_scale(reference_model, folder):
    plain = logits(reference_model, AdapterSpec(path=str(folder), scale=0.5))
    edit(folder, lora_alpha=2.0)
    assert np.abs(logits(reference_model, AdapterSpec(path=str(folder))) - plain).max() < 1e-4
    edit(folder, lora_alpha=2.0 / np.sqrt(2), use_rslora=True)
    assert np.abs(logits(reference_model, AdapterSpec(path=str(folder))) - plain).max() < 1e-4


def test_an_encoder_takes_no_adapters(folder):
    import infercore_models

    path = infercore_models.path("encoder", "hf")
    adapter = AdapterSpec(path=str(folder))
    with (
        load_reference_model(path) as encoder,
        pytest.raises(UnsupportedFeatureError, match="adapters"),
    ):
        encoder.new_context(adapters=[adapter])


def test_what_is_not_there(reference_model, tmp_path):
    with pytest.raises(ModelNotFoundError):
        logits(reference_model, AdapterSpec(path=str(tmp_path / "none")))
    with pytest.raises(ModelFormatError, match=r"adapter_config\.json"):
        logits(reference_model, AdapterSpec(path=str(tmp_path)))


@pytest.mark.parametrize(
    "changes",
    [{"peft_type": "LOHA"}, {"use_dora": True}, {"bias": "all"}, {"modules_to_save": ["lm_head"]},
     {"rank_pattern": {"q_proj": 4}}, {"fan_in_fan_out": True}],
)  # fmt: skip
def test_another_kind_of_adapter_is_refused(reference_model, folder, changes):
    edit(folder, **changes)
    with pytest.raises(UnsupportedFeatureError, match=next(iter(changes))):
        logits(reference_model, AdapterSpec(path=str(folder)))


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"lora_alpha": "much"}'])
def test_broken_settings_are_refused(reference_model, folder, text):
    (folder / "adapter_config.json").write_text(text)
    with pytest.raises(ModelFormatError):
        logits(reference_model, AdapterSpec(path=str(folder)))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("layers.1", "layers.9"),  # of a deeper model
        ("q_proj.lora_A", "q_proj.lora_C"),
        ("lora_A", "lora_X"),
        ('"shape": [2, 128]', '"shape": [1, 256]'),
    ],
)
def test_foreign_tensors_are_refused(reference_model, folder, old, new):
    path = folder / "adapter_model.safetensors"
    data = path.read_bytes()
    assert len(old) == len(new)
    path.write_bytes(data.replace(old.encode(), new.encode()))
    with pytest.raises(ModelFormatError, match="not a LoRA adapter for this model"):
        logits(reference_model, AdapterSpec(path=str(folder)))
