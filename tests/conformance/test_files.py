"""Laws about files and devices let rightly written plugins pass."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest

import infercore
import pack
from conformance.mutants.of_files import with_a_size
from infercore.conformance import LawError, NotApplicable, Rig, find_rig, run_law, select
from infercore.conformance.laws import headers, kinds, vocabularies
from infercore.errors import InvalidInputError, OutOfMemoryError
from infercore.values.info import BackendInfo, DeviceInfo
from infercore.weight_files import gguf

CONFIG = {
    "hidden_size": 64, "max_position_embeddings": 514, "sliding_window": 4096,
    "num_attention_heads": None,
}  # fmt: skip
INFO = {
    "architecture": "some", "n_embd": 64, "n_layer": 3, "n_head": 4, "n_head_kv": 2, "n_vocab": 9,
    "n_ctx_train": 512, "n_params": 8, "size_bytes": 32, "sliding_window": None, "metadata": {},
    "has_encoder": True,
}  # fmt: skip


def model(**info: Any) -> Any:
    tokenizer = SimpleNamespace(chat_template=None, n_vocab=9)
    return SimpleNamespace(info=SimpleNamespace(**{**INFO, **info}), tokenizer=tokenizer)


@pytest.mark.parametrize("still", [{"use_sliding_window": False}, {"layer_types": ["full"]}])
def test_a_config_is_compared_where_it_has_numbers(tmp_path: Path, still: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **still}))
    headers.compare_with_config(model(), tmp_path)
    for wrong in ({"n_embd": 65}, {"n_ctx_train": 515}, {"sliding_window": 4096}):
        with pytest.raises(LawError, match=next(iter(wrong))):
            headers.compare_with_config(model(**wrong), tmp_path)


def test_metadata_may_be_text_or_json(tmp_path: Path) -> None:
    still = {**CONFIG, "use_sliding_window": False}
    said = 'a "quoted" ü\\name'
    (tmp_path / "config.json").write_text(json.dumps({**still, "motto": said}))
    for told in (said, json.dumps(said)):
        headers.compare_with_config(model(metadata={"motto": told}), tmp_path)
    for told in (f'"{said}"', f"{said}'s", said.strip('a "')):
        with pytest.raises(LawError, match="motto"):
            headers.compare_with_config(model(metadata={"motto": told}), tmp_path)


def test_a_header_of_a_part_and_of_layers_that_differ() -> None:
    metadata = {
        "general.architecture": "some", "some.attention.head_count": 4,
        "some.attention.head_count_kv": (0, 2, 0), "split.count": 2,
    }  # fmt: skip
    found = gguf.Header(metadata, {"a": gguf.Tensor("a", (4,), 0, 0)})
    headers._as_header(model(metadata={k: str(v) for k, v in metadata.items()}), found)
    with pytest.raises(LawError, match="n_head_kv"):
        headers._as_header(model(n_head_kv=3), found)


def rig_at(path: Path) -> Any:
    rig: Any = SimpleNamespace(
        backend="reference",
        path=path,
        model=None,
        encoder=None,
        wrong_files=(),
        leave=lambda why: Rig.leave(rig, why),
    )
    return rig


def test_large_models_are_not_copied_for_each_lie(tmp_path: Path) -> None:
    path = tmp_path / "large.gguf"
    with path.open("wb") as file:
        file.truncate(2**28 + 1)
    with pytest.raises(NotApplicable, match="256 MiB"):
        headers.check_headers_that_lie(rig_at(path))


def test_an_encoder_without_learned_positions_keeps_the_law(monkeypatch: Any) -> None:
    lengths = []

    def opened(**fields: Any) -> Any:
        vector = [1.0 if fields["n_ctx"] < broken else float("nan")]
        return SimpleNamespace(
            encode=lambda ids: lengths.append(len(ids)), embedding=lambda: vector
        )

    encoder = SimpleNamespace(
        info=SimpleNamespace(n_ctx_train=8), tokenizer=SimpleNamespace(encode=lambda _: [1, 2, 3])
    )
    rig: Any = SimpleNamespace(
        encoder_model=encoder, story="", encoder_context=opened, opened=lambda context: context
    )
    broken = 100
    kinds.check_windows_of_learned_positions(rig)
    assert lengths == [8, 9]
    broken = 9
    with pytest.raises(LawError, match="9 tokens"):
        kinds.check_windows_of_learned_positions(rig)


@pytest.mark.parametrize("name", ["dxg", "mali0", "kgsl-3d0", "nvhost-gpu", "nvmap", "hl0"])
def test_a_gpu_may_have_other_names(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    device = DeviceInfo(name="GPU", kind="gpu", description="one")
    found = BackendInfo(name="some", available=True, devices=(device,))
    monkeypatch.setattr(infercore, "backends", lambda devices: [found])
    monkeypatch.setattr(kinds, "Path", lambda path: tmp_path if path == "/dev" else Path("/"))
    rig: Any = SimpleNamespace(
        backend="some",
        model=SimpleNamespace(capabilities=SimpleNamespace(gpu_offload=True)),
    )
    with pytest.raises(LawError, match="GPUs on a machine"):
        kinds.check_devices(rig)
    (tmp_path / name).touch()
    kinds.check_devices(rig)


def test_an_option_of_the_size_that_is_allowed_keeps_the_law(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pack.need_pack()
    with_a_size(monkeypatch, most=4)
    found = run_law(select("BAD-19")[0], find_rig("reference"))
    assert (found.outcome, found.reason) == ("ok", None)


def refused(allowed: object) -> Any:
    def opened(_: Any, options: Any, **__: Any) -> None:
        ((name, value),) = options.items()
        if value != "a":
            raise InvalidInputError(f"{name} is none", field=name, value=value, allowed=allowed)

    return opened


@pytest.mark.parametrize(
    "allowed",
    [
        ["a"], "one of 'a'", "a number from 0.5 to 2", "a folder, such as '/var/cache/x'",
        "an integer; True is none", "a multiple of 16 from 0 to 100",
    ],
)  # fmt: skip
def test_what_is_allowed_is_tried_in_known_words_alone(
    allowed: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kinds, "_open", refused(allowed))
    rig: Any = SimpleNamespace(encoder=None)
    kinds._check_allowed(rig, "way", allowed)


@pytest.mark.parametrize("allowed", [("a", "b"), "one of 'a', 'b'", "True or False"])
def test_what_is_allowed_and_refused_breaks_the_law(
    allowed: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kinds, "_open", refused(allowed))
    rig: Any = SimpleNamespace(encoder=None)
    with pytest.raises(LawError, match="said to be allowed"):
        kinds._check_allowed(rig, "way", allowed)


def test_an_encoder_may_refuse_what_a_decoder_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    def new_context(**_: Any) -> Any:
        raise InvalidInputError("way", field="way", allowed="nothing")

    monkeypatch.setattr(kinds, "_open", refused(["a"]))
    rig: Any = SimpleNamespace(encoder="e", encoder_model=SimpleNamespace(new_context=new_context))
    kinds._check_allowed(rig, "way", ["a"])


def test_what_there_is_no_memory_for_may_be_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(_: Any, options: Any) -> None:
        if not 1 <= options["size"] <= 1024:
            raise InvalidInputError("size", field="size", value=options["size"], allowed="less")
        raise OutOfMemoryError("too much")

    monkeypatch.setattr(kinds, "_open", opened)
    rig: Any = SimpleNamespace(encoder=None)
    kinds._check_allowed(rig, "size", "an integer from 1 to 1024")


@pytest.mark.parametrize(
    ("fields", "may_be"), [({"num_key_value_heads": 1}, True), ({"sliding_window": 7}, False)]
)
def test_weights_overrule_a_config_only_in_what_they_hold(
    fields: dict[str, int], may_be: bool, tmp_path: Path
) -> None:
    pack.need_pack()
    rig = find_rig("reference")
    assert rig.path is not None
    folder = shutil.copytree(rig.path, tmp_path / "model", copy_function=shutil.copyfile)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))
    with rig.open_model() as own:
        info = attrs.evolve(own.info, metadata={})  # which tells nothing of the config
        model = SimpleNamespace(info=info, tokenizer=own.tokenizer)
        with pytest.raises(LawError):
            headers.compare_with_config(model, folder)
        with nullcontext() if may_be else pytest.raises(LawError, match="sliding_window"):
            headers.compare_with_config(model, folder, own.info)


def test_a_format_of_which_no_lies_are_known_is_left(tmp_path: Path) -> None:
    path = tmp_path / "some.model"
    path.write_text("weights")
    with pytest.raises(NotApplicable, match="to lie in"):
        headers.check_headers_that_lie(rig_at(path))


def test_a_renamed_token_has_one_name_in_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    pack.need_pack()
    asked: list[dict[str, Any]] = []
    opened = vocabularies.loaded

    def loaded(rig: Rig, path: str) -> Any:
        asked.append(json.loads((Path(path) / "tokenizer.json").read_text(encoding="utf-8")))
        return opened(rig, path)

    monkeypatch.setattr(vocabularies, "loaded", loaded)
    assert run_law(select("TOK-22")[0], find_rig("reference")).outcome == "ok"
    named = [said for said in asked if isinstance(said["model"]["vocab"], dict)]
    assert named
    for said in named:
        for entry in said["added_tokens"]:
            assert said["model"]["vocab"][entry["content"]] == entry["id"]
