"""Directories that are damaged, foreign or incomplete are refused by name."""

from __future__ import annotations

import json
import shutil
import struct
import sys

import numpy as np
import pytest

from infercore.errors import BackendUnavailableError, ModelFormatError, ModelNotFoundError
from infercore.testing import load_reference_model
from infercore.testing.reference import storyteller
from infercore.weight_files import safetensors


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(storyteller(), tmp_path / "model")


def edit(folder, **changes):
    path = folder / "config.json"
    settings = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in settings.items() if v is not None}))


def tensors_file(path, tensors):
    """Write ``(name, dtype, array)`` as a safetensors file."""
    header, body = {}, b""
    for name, dtype, array in tensors:
        data = array.tobytes()
        offsets = [len(body), len(body) + len(data)]
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": offsets}
        body += data
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)
    return str(path)


def test_number_formats_become_float32(tmp_path):
    numbers = np.array([[1.5, -2.0], [0.25, 3.0]], dtype=np.float32)
    upper = (numbers.view(np.uint32) >> 16).astype(np.uint16)
    path = tensors_file(
        tmp_path / "t",
        [("a", "F32", numbers), ("b", "F16", numbers.astype(np.float16)), ("c", "BF16", upper)],
    )
    for tensor in safetensors.read(path).values():
        assert tensor.dtype == np.float32
        assert np.array_equal(tensor, numbers)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x05",
        b"\xff" * 8,
        b"\x02" + bytes(7) + b"{}"[:1],
        b"\x02" + bytes(7) + b"[]",
        struct.pack("<Q", 7) + b'{"a":1}',
        struct.pack("<Q", 8) + b'{"a":{}}',
    ],
)
def test_damaged_tensors_are_refused(tmp_path, data):
    (tmp_path / "t").write_bytes(data)
    with pytest.raises(ModelFormatError, match="fetch it again"):
        safetensors.read(str(tmp_path / "t"))


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
        {"dtype": "F32", "shape": [-2], "data_offsets": [8, 0]},
        {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": ["x"], "data_offsets": [0, 8]},
    ],
)
def test_a_tensor_must_lie_in_the_file(tmp_path, entry):
    text = json.dumps({"a": entry}).encode()
    (tmp_path / "t").write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))
    with pytest.raises(ModelFormatError):
        safetensors.read(str(tmp_path / "t"))


@pytest.mark.parametrize("size", [0, 100, 5_000, 3_000_000])
def test_a_truncated_model_is_refused(folder, size):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ModelFormatError):
        load_reference_model(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "mamba"}, {"hidden_act": "gelu"}, {"attention_bias": True},
        {"rope_parameters": {"rope_type": "yarn"}}, {"hidden_size": None}, {"hidden_size": "many"},
        {"hidden_size": 64}, {"num_hidden_layers": 5}, {"vocab_size": 1000},
        {"tie_word_embeddings": False}, {"num_key_value_heads": 4},
    ],
)  # fmt: skip
def test_another_architecture_or_shape_is_refused(folder, changes):
    edit(folder, **changes)
    with pytest.raises(ModelFormatError):
        load_reference_model(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", "3"])
def test_a_broken_config_is_refused(folder, text):
    (folder / "config.json").write_text(text)
    with pytest.raises(ModelFormatError):
        load_reference_model(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_missing_file_is_refused(folder, name):
    (folder / name).unlink()
    with pytest.raises(ModelFormatError):
        load_reference_model(folder)


def test_a_broken_tokenizer_is_refused(folder):
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelFormatError, match=r"tokenizer\.json"):
        load_reference_model(folder)


def test_no_model_at_all(tmp_path):
    with pytest.raises(ModelNotFoundError):
        load_reference_model(tmp_path / "missing")


def test_numbers_are_checked(folder):
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-4:] = struct.pack("<f", float("nan"))
    path.write_bytes(data)
    with pytest.raises(ModelFormatError, match="finite"):
        load_reference_model(folder)


def test_older_directories_say_the_same_elsewhere(folder):
    """Before transformers 5 rope stood at the top, and few files lay beside the model."""
    edit(folder, rope_parameters=None, rope_theta=10_000.0, head_dim=None)
    for name in ("generation_config.json", "chat_template.jinja", "tokenizer_config.json"):
        (folder / name).unlink()
    with load_reference_model() as new, load_reference_model(folder) as old:
        assert (old.tokenizer.bos, old.tokenizer.eos, old.tokenizer.eot) == (0, 1, 3)
        assert old.tokenizer.chat_template is None
        rows = []
        for model in (new, old):
            with model.new_context(n_ctx=32) as context:
                context.decode([0, 50, 60])
                rows.append(context.logits().copy())
        assert np.array_equal(*rows)


def test_an_own_head_is_used(folder):
    tensors = safetensors.read(str(folder / "model.safetensors"))
    head = -tensors["model.embed_tokens.weight"]
    tensors_file(
        folder / "model.safetensors",
        [(name, "F32", array) for name, array in {**tensors, "lm_head.weight": head}.items()],
    )
    edit(folder, tie_word_embeddings=False)
    with load_reference_model() as tied, load_reference_model(folder) as own:
        rows = []
        for model in (tied, own):
            with model.new_context(n_ctx=32) as context:
                context.decode([0, 50, 60])
                rows.append(context.logits().copy())
        assert np.allclose(rows[0], -rows[1])


def test_without_the_tokenizers_package_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(BackendUnavailableError, match="pip install tokenizers") as caught:
        load_reference_model()
    assert caught.value.backend == "reference"


def test_without_the_pack_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "infercore_models", None)
    with pytest.raises(ModelNotFoundError, match="infercore-models"):
        load_reference_model()
