"""Paths, folders, the pack, aliases, and what is said where there is no model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import infercore as ic
import pack
from infercore.locating import locate, settings
from infercore.locating.locate import refuse_fetching
from infercore.locating.variants import chosen, variants


def test_a_path_is_taken_as_it_is(tmp_path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    assert locate(file) == locate(str(file)) == str(file)


def test_the_home_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    assert locate("~/m.gguf") == str(tmp_path / "m.gguf")
    with pytest.raises(ic.ModelNotFoundError, match=r"'~/n\.gguf'"):
        locate("~/n.gguf")


def test_a_folder_with_one_gguf_is_that_file(tmp_path) -> None:
    for i in (1, 2):
        (tmp_path / f"m-0000{i}-of-00002.gguf").write_bytes(b"GGUF")
    (tmp_path / "README.md").write_text("#")
    assert locate(tmp_path) == str(tmp_path / "m-00001-of-00002.gguf")
    (tmp_path / "other.gguf").write_bytes(b"GGUF")
    with pytest.raises(ic.ModelNotFoundError, match=r"several.*m-00001-of-00002.gguf, other.gguf"):
        locate(tmp_path)


@pytest.mark.parametrize("name", ["openvino_model.xml", "config.json"])
def test_a_folder_that_is_a_model_stays_one(tmp_path, name) -> None:
    (tmp_path / name).write_text("{}")
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    assert locate(tmp_path) == str(tmp_path)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("m.gguf", "pack:storyteller"),
        ("m.gguf", "docs/how-to/get-a-model.md"),
        ("meta/Llama-1B", "write hf:meta/Llama-1B"),
        ("https://huggingface.co/meta/Llama-1B", "it is hf:meta/Llama-1B;"),
        ("https://huggingface.co/o/r/resolve/main/d/f.gguf", "it is hf:o/r:d/f.gguf;"),
        ("https://huggingface.co/o/r/resolve/main/f.gguf?download=true", "it is hf:o/r:f.gguf;"),
        ("https://huggingface.co/o/r/tree/main", "it is hf:o/r;"),
        ("https://x.org/a.gguf", "from the hub only, by name (hf:ORG/REPO); from elsewhere, down"),
        ("https://x.org/a/b.gguf", "download the file first and give its path"),
        ("http://x.org", "download the file first and give its path"),
        ("", "there is no model at ''"),
    ],
)
def test_what_is_not_there(name, says) -> None:
    with pytest.raises(ic.ModelNotFoundError) as caught:
        ic.load_model(name)
    assert says in str(caught.value)


def test_the_pack(monkeypatch) -> None:
    pack.need_pack()
    pack.need_backend("llamacpp")
    assert locate("pack:storyteller", backend="llamacpp").endswith(".gguf")
    assert locate("pack:storyteller:gguf-f32").endswith(".gguf")
    monkeypatch.setenv("INFERCORE_BACKEND", "llamacpp")
    assert locate("pack:storyteller").endswith(".gguf")
    with ic.load_model("pack:storyteller") as model:
        assert model.backend == "llamacpp"
    with pytest.raises(ic.ModelNotFoundError, match=r"no model 'story'.*storyteller"):
        locate("pack:story")
    with pytest.raises(ic.ModelNotFoundError, match="no storyteller as 'q2'"):
        locate("pack:storyteller:q2")
    with pytest.raises(ic.ModelNotFoundError, match="write pack:storyteller"):
        locate("storyteller")


def test_an_alias(tmp_path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    settings.write(settings.with_alias(settings.read(), "small", str(file)))
    assert locate("small") == str(file)
    settings.write(settings.with_alias(settings.read(), "gone", "~/nowhere.gguf"))
    with pytest.raises(ic.ModelNotFoundError, match=r"'~/nowhere\.gguf'"):
        locate("gone")
    settings.write(settings.with_alias(settings.read(), "small", None))
    assert json.loads(Path(settings.file_path()).read_text())["aliases"] == {
        "gone": "~/nowhere.gguf"
    }


def test_a_file_goes_before_an_alias(tmp_path, monkeypatch) -> None:
    settings.write(settings.with_alias(settings.read(), "small", "hf:a/b"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small").write_bytes(b"GGUF")
    assert locate("small") == "small"


@pytest.mark.parametrize("alias", ["", "a/b", "hf:x", "a b", "~m", "-m", "a\\b"])
def test_what_cannot_be_an_alias(alias) -> None:
    with pytest.raises(ic.InvalidInputError, match="cannot be an alias"):
        settings.with_alias(settings.Settings(), alias, "hf:a/b")


@pytest.mark.parametrize("text", ["{", "[]", '{"default": 3}', '{"aliases": {"a": 1}}', "\xff"])
def test_damaged_settings_are_named(text) -> None:
    settings.write(settings.Settings())
    path = Path(settings.file_path())
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ic.InvalidInputError, match=r"models\.json cannot be read"):
        settings.read()
    assert path.read_text(encoding="latin-1") == text


def test_the_default_model(monkeypatch) -> None:
    assert settings.default_model() is None
    settings.write(settings.Settings(default="pack:storyteller"))
    assert settings.default_model() == "pack:storyteller"
    monkeypatch.setenv("INFERCORE_MODEL", "hf:a/b")
    assert settings.default_model() == "hf:a/b"


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("Qwen3-0.6B-Q4_K_M.gguf", "Q4_K_M"), ("m.IQ2_XXS.gguf", "IQ2_XXS"), ("m-f16.gguf", "f16"),
        ("m-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"), ("BF16/m-BF16-00001-of-00001.gguf", "BF16"),
        ("m-MXFP4_MOE.gguf", "MXFP4_MOE"), ("tinyllama.gguf", "tinyllama"), ("q8_0.gguf", "q8_0"),
    ],
)  # fmt: skip
def test_labels(name, label) -> None:
    assert [each.label for each in variants([name])] == [label]


def test_what_is_read_here_goes_first() -> None:
    found = variants(["m-Q4_K_M.gguf", "openvino_model.xml", "openvino_model.bin"])
    assert [each.kind for each in chosen(found, None, ["openvino"])] == ["openvino"]
    assert [each.kind for each in chosen(found, None, ["gguf", "openvino"])] == ["gguf"]
    assert [each.kind for each in chosen(found, None, [])] == ["gguf"]


def test_an_address_is_not_pulled() -> None:
    with pytest.raises(ic.InvalidInputError, match=r"is an address; .* download the file first"):
        refuse_fetching("https://x.org/a.gguf")


def test_a_model_is_called_by_its_file_or_by_what_says_more_than_its_folder(tmp_path):
    from infercore.locating import title

    def folder(*parts):
        path = tmp_path.joinpath(*parts)
        path.mkdir(parents=True)
        return str(path)

    (tmp_path / "small.gguf").touch()
    assert title(str(tmp_path / "small.gguf")) == "small.gguf"
    assert title(folder("models", "small") + "/") == "small"
    assert title(folder("storyteller", "openvino")) == "storyteller/openvino"
    snapshot = folder("hub", "models--ORG--a--b", "snapshots", "0123abcd")
    assert title(snapshot) == "ORG/a--b"
    assert title(folder("hub", "models--ORG--a--b", "snapshots", "0123abcd", "int4")) == (
        "ORG/a--b/int4"
    )
