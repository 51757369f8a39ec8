"""The model pack: what is named is there, is small, and fits together."""

from __future__ import annotations

import json
import struct
from importlib import resources
from pathlib import Path

import numpy as np
import pytest

import infercore_models

MAX_SIZE_BYTES = 26_500_000
EVERY_FORMAT = [(name, form) for name, forms in infercore_models.names().items() for form in forms]
NAMES = ["storyteller", "agent"]


def safetensors_header(folder: Path) -> dict[str, dict[str, object]]:
    with (folder / "model.safetensors").open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header: dict[str, dict[str, object]] = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return header


def test_storyteller_is_there_in_four_formats() -> None:
    assert infercore_models.names()["storyteller"] == ("hf", "gguf-f32", "gguf-q8_0", "openvino")


def test_agent_is_there_in_four_formats() -> None:
    assert infercore_models.names()["agent"] == ("hf", "gguf-f32", "gguf-q8_0", "openvino")


@pytest.mark.parametrize("form", ["hf", "openvino"])
def test_the_agent_has_a_template_for_tools(form: str) -> None:
    folder = infercore_models.path("agent", form)
    template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    for word in ("tools", "tool_calls", "reasoning_content", "enable_thinking"):
        assert word in template


def test_the_draft_is_an_eighth_of_the_storyteller_with_its_vocabulary() -> None:
    forms = infercore_models.names()["storyteller-draft"]
    assert forms == ("gguf-f32", "openvino")
    sizes = [
        infercore_models.path(name, "openvino").joinpath("openvino_model.bin").stat().st_size
        for name in ("storyteller-draft", "storyteller")
    ]
    assert sizes[0] < sizes[1] / 7
    told = [
        json.loads((infercore_models.path(name, "openvino") / "tokenizer.json").read_text("utf-8"))
        for name in ("storyteller-draft", "storyteller")
    ]
    assert told[0]["model"] == told[1]["model"]


def test_encoder_is_there_in_three_formats() -> None:
    assert infercore_models.names()["encoder"] == ("hf", "gguf-f32", "openvino")


def test_an_adapter_is_there_for_peft_and_as_gguf() -> None:
    assert infercore_models.names()["storyteller-lora"] == ("hf", "gguf-f32")


def test_the_adapter_is_small_and_the_same_in_both_formats() -> None:
    folder = infercore_models.path("storyteller-lora", "hf")
    file = infercore_models.path("storyteller-lora", "gguf-f32")
    settings = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    assert (settings["peft_type"], settings["r"], settings["lora_alpha"]) == ("LORA", 2, 4.0)
    data = (folder / "adapter_model.safetensors").read_bytes()
    assert len(data) + file.stat().st_size < 100_000
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    names = {name for name in header if name != "__metadata__"}
    assert len(names) == 2 * 2 * 7
    written = file.read_bytes()
    assert written[:4] == b"GGUF"
    for name in names:  # keys and queries are permuted in llama.cpp's format, but for their A
        if "lora_A" in name or "v_proj" in name:
            start, end = header[name]["data_offsets"]
            assert data[8 + length :][start:end] in written, name


def test_other_kinds_of_memory_are_there_as_gguf() -> None:
    assert infercore_models.names()["sliding"] == ("gguf-f32",)
    assert infercore_models.names()["recurrent"] == ("gguf-f32", "openvino")


def test_names_gives_a_fresh_mapping() -> None:
    infercore_models.names().clear()
    assert infercore_models.names()


@pytest.mark.parametrize("name", ["storyteller-lora", "storyteller-draft", "recurrent"])
def test_what_has_no_golden_outputs(name: str) -> None:
    with pytest.raises(infercore_models.UnknownModelError):
        infercore_models.golden(name)
    with pytest.raises(infercore_models.UnknownModelError):
        infercore_models.golden_texts(name)


@pytest.mark.parametrize(("name", "form"), EVERY_FORMAT)
def test_every_named_format_exists(name: str, form: str) -> None:
    path = infercore_models.path(name, form)
    assert path.is_absolute()
    assert path.is_file() if form.startswith("gguf") else path.is_dir()


def test_unknown_model_names_the_known_ones() -> None:
    with pytest.raises(infercore_models.UnknownModelError, match="storyteller") as caught:
        infercore_models.path("novelist", "hf")
    assert isinstance(caught.value, LookupError)
    assert caught.value.known == tuple(infercore_models.names())


def test_unknown_format_names_the_known_ones() -> None:
    with pytest.raises(infercore_models.UnknownFormatError, match="gguf-q8_0") as caught:
        infercore_models.path("storyteller", "onnx")
    assert isinstance(caught.value, LookupError)
    assert caught.value.known == infercore_models.names()["storyteller"]


def test_golden_of_an_unknown_model_is_the_same_error() -> None:
    with pytest.raises(infercore_models.UnknownModelError):
        infercore_models.golden("novelist")


def test_package_data_stay_small() -> None:
    root = Path(str(resources.files(infercore_models)))
    files = [file for file in root.rglob("*") if "__pycache__" not in file.parts]
    assert sum(file.stat().st_size for file in files if file.is_file()) < MAX_SIZE_BYTES


def test_package_is_marked_as_typed_and_has_its_card() -> None:
    root = resources.files(infercore_models)
    assert (root / "py.typed").is_file()
    assert "storyteller" in (root / "MODEL_CARD.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("form", ["gguf-f32", "gguf-q8_0"])
def test_gguf_files_begin_as_gguf_version_3(form: str) -> None:
    head = infercore_models.path("storyteller", form).read_bytes()[:8]
    assert head == b"GGUF" + struct.pack("<I", 3)


def test_weights_are_all_float32() -> None:
    header = safetensors_header(infercore_models.path("storyteller", "hf"))
    assert {tensor["dtype"] for tensor in header.values()} == {"F32"}


def test_both_folders_hold_the_same_tokenizer() -> None:
    hf, openvino = (infercore_models.path("storyteller", form) for form in ("hf", "openvino"))
    read = [json.loads((d / "tokenizer.json").read_text(encoding="utf-8")) for d in (hf, openvino)]
    assert read[0] == read[1]


def test_configuration_of_the_model() -> None:
    folder = infercore_models.path("storyteller", "hf")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["max_position_embeddings"] == 1024
    assert config["num_key_value_heads"] < config["num_attention_heads"]
    assert config["hidden_size"] // config["num_attention_heads"] >= 32


@pytest.mark.parametrize("name", NAMES)
def test_golden_shapes(name: str) -> None:
    golden = infercore_models.golden(name)
    assert len(golden.prompts) >= 3
    for prompt in golden.prompts:
        assert prompt.logits.dtype == np.float32
        assert prompt.logits.shape[0] == len(prompt.tokens)
        assert np.isfinite(prompt.logits).all()
        assert max((*prompt.tokens, *prompt.greedy)) < prompt.logits.shape[1]
        assert not prompt.logits.flags.writeable


@pytest.mark.parametrize("name", NAMES)
def test_greedy_begins_with_the_best_token(name: str) -> None:
    for prompt in infercore_models.golden(name).prompts:
        assert prompt.greedy[0] == prompt.logits[-1].argmax()


@pytest.mark.parametrize("name", NAMES)
def test_prompts_begin_with_one_bos(name: str) -> None:
    config = infercore_models.path(name, "hf") / "config.json"
    bos = json.loads(config.read_text(encoding="utf-8"))["bos_token_id"]
    for prompt in infercore_models.golden(name).prompts:
        assert prompt.tokens[0] == bos
        assert bos not in prompt.tokens[1:]


def test_some_continuations_end_and_some_go_on() -> None:
    golden = infercore_models.golden("storyteller")
    endless = [p for p in golden.prompts if not p.ended]
    assert len(endless) >= 2
    assert all(len(p.greedy) == golden.max_new_tokens >= 200 for p in endless)
    assert any(p.ended for p in golden.prompts)


def test_golden_is_sure_of_what_comes_next() -> None:
    for prompt in infercore_models.golden("storyteller").prompts:
        second, best = np.sort(prompt.logits[-1])[-2:]
        assert best - second > 0.05


# -- the encoder ---------------------------------------------------------------------------------


def test_golden_texts_of_the_encoder() -> None:
    golden = infercore_models.golden_texts("encoder")
    assert len(golden) >= 5
    for found in golden:
        assert found.rows.dtype == np.float32
        assert found.rows.shape == (len(found.tokens), 64)
        assert np.isfinite(found.rows).all()
        assert not found.rows.flags.writeable


def test_goldens_of_the_other_kind_are_unknown() -> None:
    with pytest.raises(infercore_models.UnknownModelError, match="storyteller"):
        infercore_models.golden("encoder")
    with pytest.raises(infercore_models.UnknownModelError, match="encoder"):
        infercore_models.golden_texts("storyteller")


def test_the_encoder_says_how_it_is_pooled() -> None:
    for form in ("hf", "openvino"):
        folder = infercore_models.path("encoder", form)
        pooling = json.loads((folder / "1_Pooling" / "config.json").read_text(encoding="utf-8"))
        assert pooling["pooling_mode_mean_tokens"] is True


def test_both_folders_of_the_encoder_hold_the_same_tokenizer() -> None:
    hf, openvino = (infercore_models.path("encoder", form) for form in ("hf", "openvino"))
    read = [json.loads((d / "tokenizer.json").read_text(encoding="utf-8")) for d in (hf, openvino)]
    assert read[0]["model"] == read[1]["model"]
