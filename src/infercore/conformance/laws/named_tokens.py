"""The tokens that a model's files name, and what they put around a text."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infercore.conformance import gguf_copy
from infercore.conformance.expect import equal, foreseen, raises, that
from infercore.conformance.law import law
from infercore.conformance.laws.headers import is_gguf, loaded, set_number
from infercore.conformance.laws.settings import copied, decides, write
from infercore.errors import InferCoreError, ModelLoadError, PluginError
from infercore.weight_files import gguf

if TYPE_CHECKING:
    from infercore.conformance.rig import Rig


@law("TOK-20", since="1.2")
def check_the_tokens_that_the_files_name(rig: Rig) -> None:
    """The tokens that begin and end a text are those that config.json or the header names."""
    path = None if rig.path is None else Path(rig.path)
    if path is None or not ((path / "config.json").is_file() or is_gguf(path)):
        rig.leave("the model is neither a folder of weights nor a GGUF file")
    with copied(path) as copy:
        if path.is_dir():
            if not (path / "tokenizer.json").is_file() or not _names_ends(path):
                rig.leave("the folder's config.json and tokenizer.json name no end of a text")
            (_check_ends_of_folder if decides(path) else _check_ends_beside)(rig, copy)
            _check_frames(rig, copy)
            _check_lengths(rig, copy)
            _check_template(rig, copy)
            return
        whole = copy.read_bytes()
        for name, token in (("bos", 6), ("eos", 7)):
            key = f"tokenizer.ggml.{name}_token_id"
            if key in gguf.read(str(copy)).metadata:
                copy.write_bytes(set_number(whole, key, struct.pack("<I", token)))
                with rig.open_at(str(copy)) as model:
                    equal(getattr(model.tokenizer, name), token, name)
                    if name == "eos":
                        that(model.tokenizer.is_eog(token), f"{token} does not end a text")
        copy.write_bytes(whole)
        named = {"tokenizer__ggml__eom_token_id": gguf_copy.number(gguf_copy.UINT32, 9)}
        copy.write_bytes(gguf_copy.read(copy).other(**named).to_bytes())
        with rig.open_at(str(copy)) as model:
            that(model.tokenizer.is_eog(9), "the end of a message ends no text")


def _names_ends(folder: Path) -> bool:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return isinstance(config, dict) and config.get("eos_token_id") is not None


def _check_ends_of_folder(rig: Rig, folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    generation = folder / "generation_config.json"
    ends_of: tuple[Any, ...] = (7, [8, 9], 0)
    for eos in ends_of:
        write(generation, {"eos_token_id": eos})
        write(folder / "config.json", {**config, "bos_token_id": 6})
        with rig.open_at(str(folder)) as model:
            ends = eos if isinstance(eos, list) else [eos]
            equal((model.tokenizer.bos, model.tokenizer.eos), (6, ends[0]), "bos and eos")
            that(all(model.tokenizer.is_eog(token) for token in ends), f"{ends} end no text")
    write(folder / "config.json", {**config, "eos_token_id": 11})
    for said in ({"eos_token_id": None}, {}, None):
        write(generation, said) if said is not None else generation.unlink()
        with rig.open_at(str(folder)) as model:
            equal(model.tokenizer.eos, 11, f"eos of config.json alone, beside {said}")
            that(model.tokenizer.is_eog(11), f"11, eos of config.json, ends no text, beside {said}")
    n = rig.tokenizer.n_vocab
    write(folder / "config.json", {**config, "eos_token_id": n - 1})
    with rig.open_at(str(folder)) as model:
        equal(model.tokenizer.eos, n - 1, "eos, the last id that there is")
    _check_other_names(rig, folder)
    for name, ids in (("bos_token_id", n), ("eos_token_id", n), ("eos_token_id", [7, -1])):
        write(folder / "config.json", {**config, name: ids})
        what = f"{name} of {ids}, beyond the ids"
        error = raises(InferCoreError, lambda: rig.open_at(str(folder)).close(), what)
        that(not isinstance(error, PluginError), f"{what}: {error}")
        that(str(folder) in str(getattr(error, "path", folder)), f"{what}: no path in {error!r}")
    write(folder / "config.json", config)


def _check_ends_beside(rig: Rig, folder: Path) -> None:
    """The same where tokenizer_config.json comes first: without its names, and by them."""
    config, tokenizer, generation = (
        folder / f"{name}.json" for name in ("config", "tokenizer_config", "generation_config")
    )
    own = json.loads(config.read_text(encoding="utf-8"))
    without = {name: value for name, value in own.items() if name != "eos_token_id"}
    write(tokenizer, {})
    for ends in ([7], [8, 9], [0]):
        write(config, {**without, "bos_token_id": 6})
        write(generation, {"eos_token_id": ends if len(ends) > 1 else ends[0]})
        with rig.open_at(str(folder)) as model:
            found = model.tokenizer.bos, model.tokenizer.eos
            equal(found, (6, ends[0]), "bos and eos of config.json and generation_config.json")
            that(all(model.tokenizer.is_eog(token) for token in ends), f"{ends} end no text")
    write(generation, {"eos_token_id": None})
    for last in (11, rig.tokenizer.n_vocab - 1):
        write(config, {**own, "eos_token_id": last})
        with rig.open_at(str(folder)) as model:
            equal(model.tokenizer.eos, last, "eos of config.json alone")
            that(model.tokenizer.is_eog(last), f"{last} ends no text")
        generation.unlink(missing_ok=True)
    eot = rig.tokenizer.eot
    name = "" if eot is None else rig.tokenizer.token_bytes(eot).decode(errors="replace")
    for named in (name, {"content": name}) if eot is not None else ():
        write(tokenizer, {"eos_token": named})
        with rig.open_at(str(folder)) as model:
            equal(model.tokenizer.eos, rig.tokenizer.eot, f"eos that is called {named!r}")
            that(model.tokenizer.is_eog(last), f"{last}, eos of config.json, ends no text")
    for wrong in (rig.tokenizer.n_vocab, -1, [7, 10**9]):
        write(tokenizer, {})
        write(config, {**own, "eos_token_id": wrong, "bos_token_id": wrong})
        try:
            opened = loaded(rig, str(folder))
        except ModelLoadError as error:
            foreseen(error, f"ends of {wrong}, beyond the ids")
            continue
        with opened as model:
            for token in (model.tokenizer.bos, model.tokenizer.eos):
                fits = token is None or 0 <= token < model.tokenizer.n_vocab
                that(fits, f"{token} of {model.tokenizer.n_vocab} tokens begins or ends a text")
    write(config, own)


def _check_frames(rig: Rig, folder: Path) -> None:
    """What tokenizer.json puts around a text is put there, but for an end that is not wanted."""
    file, begin, end = folder / "tokenizer.json", rig.tokenizer.bos, rig.tokenizer.eos
    other = rig.tokenizer.eot
    if not file.is_file() or begin is None or end is None or other in (None, begin, end):
        return
    names = {token: rig.tokenizer.token_bytes(token).decode() for token in (begin, other, end)}
    said = json.loads(file.read_text(encoding="utf-8"))
    special = {name: {"id": name, "ids": [i], "tokens": [name]} for i, name in names.items()}
    before, middle, after = ({"SpecialToken": {"id": n, "type_id": 0}} for n in names.values())
    text = {"Sequence": {"id": "A", "type_id": 0}}
    plain = rig.tokenizer.encode("a", add_special=False)
    framed = [begin, *plain, other, end]
    config = {"bos_token": names[begin], "eos_token": names[end]}
    for single, asked, may in (
        ([before, text, middle, after], {}, [framed]),
        ([before, text, middle, after], {"add_eos_token": True}, [framed]),
        ([before, text, middle, after], {"add_eos_token": False}, [framed, framed[:-1]]),
        ([before, text, middle, after], {"add_bos_token": False}, [framed, framed[1:]]),
        ([text, middle], {"add_bos_token": True}, [framed[1:-1], framed[:-1]]),
        ([text], {"add_eos_token": True}, [plain, [*plain, end]]),
    ):
        said["post_processor"] = {
            "type": "TemplateProcessing", "single": single, "special_tokens": special,
            "pair": [text, {"Sequence": {"id": "B", "type_id": 1}}],
        }  # fmt: skip
        write(file, said)
        write(folder / "tokenizer_config.json", {**config, **asked})
        with rig.open_at(str(folder)) as model:
            found = model.tokenizer.encode("a")
            that(found in may, f"{found} is a text with {asked}, and {may[-1]} is expected")
            bare = model.tokenizer.encode("a", add_special=False)
            equal(bare, plain, "a text that nothing is put around")
    second = {"Sequence": {"id": "B", "type_id": 1}}
    for between, ids in (([middle], [other]), ([middle, middle], [other, other])):
        said["post_processor"] |= {
            "single": [before, text, middle, after],
            "pair": [before, text, *between, second, middle, after],
        }
        write(file, said)
        write(folder / "tokenizer_config.json", config)
        with rig.open_at(str(folder)) as model:
            (found,) = model.tokenizer.encode_many([("a", "a")])
            pair = [begin, *plain, *ids, *plain, other, end]
            equal(found, pair, f"a pair of texts with {len(ids)} tokens between them")


def _check_lengths(rig: Rig, folder: Path) -> None:
    """A text is neither cut nor filled up, though tokenizer.json asks for that (of encoders)."""
    file = folder / "tokenizer.json"
    whole = file.read_bytes()
    said = json.loads(whole)
    cut = {"direction": "Right", "max_length": 6, "strategy": "LongestFirst", "stride": 0}
    filled = {
        "strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None,
        "pad_id": 0, "pad_type_id": 0, "pad_token": said["added_tokens"][0]["content"],
    }  # fmt: skip
    text = rig.passage(3)
    with rig.open_at(str(folder)) as model:
        expected = model.tokenizer.encode(text)
    for changes in ({"truncation": cut}, {"padding": filled}):
        write(file, {**said, **changes})
        with rig.open_at(str(folder)) as model:
            equal(model.tokenizer.encode(text), expected, f"a text with {[*changes]}")
    file.write_bytes(whole)


_ENDS_OF_TURN = (b"<|im_end|>", b"<|eot_id|>", b"<|end|>", b"<end_of_turn>")


def _check_other_names(rig: Rig, folder: Path) -> None:
    """A turn's end is found by any known name; what is not special is no control token."""
    file, eot = folder / "tokenizer.json", rig.tokenizer.eot
    if eot is None or not file.is_file():
        return
    whole, own = file.read_bytes(), rig.tokenizer.token_bytes(eot)
    for name in _ENDS_OF_TURN if own in _ENDS_OF_TURN else ():
        file.write_bytes(whole.replace(own, name))
        with rig.open_at(str(folder)) as model:
            equal(model.tokenizer.eot, eot, f"the end of a turn that is called {name!r}")
    said = json.loads(whole)
    for entry in said["added_tokens"]:
        entry["special"] = entry["special"] and entry["id"] != eot
    write(file, said)
    with rig.open_at(str(folder)) as model:
        that(not model.tokenizer.is_control(eot), f"token {eot} is not special, and is control")
    file.write_bytes(whole)


def _check_template(rig: Rig, folder: Path) -> None:
    """Of several templates in tokenizer_config.json the one called default is the model's."""
    template = folder / "chat_template.jinja"
    if template.is_file():
        text = "{{ messages[0]['content'] }}"
        own = template.read_text(encoding="utf-8")
        write(folder / "tokenizer_config.json", {"chat_template": text})
        with rig.open_at(str(folder)) as model:
            equal(model.tokenizer.chat_template, own, f"the template, beside {text!r}")
        template.unlink()
        for_tools = {"name": "tool_use", "template": f"{text} with tools"}
        usual = {"name": "default", "template": text}
        for said in (text, [usual, for_tools], [for_tools, usual]):
            write(folder / "tokenizer_config.json", {"chat_template": said})
            with rig.open_at(str(folder)) as model:
                equal(model.tokenizer.chat_template, text, f"the template of {said!r}")
