"""Files with other vocabularies than the rig's own, made of them."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from infercore.conformance import gguf_copy
from infercore.conformance.expect import equal, foreseen, raises, that
from infercore.conformance.gguf_copy import BOOL, UINT32, number
from infercore.conformance.law import law
from infercore.conformance.laws.headers import is_gguf, loaded
from infercore.conformance.laws.other_files import must_be_refused, own_file
from infercore.errors import (
    InferCoreError,
    ModelLoadError,
    PluginError,
    UnsupportedFeatureError,
)
from infercore.weight_files import gguf

if TYPE_CHECKING:
    from infercore.conformance.rig import Rig


@law("TOK-22", since="1.2")
def check_other_vocabularies(rig: Rig) -> None:
    """Of a file with another vocabulary each token has the bytes that the file gives it.

    Long tokens too, and long texts of its metadata; the last token may be the end. One that cannot
    be read is refused; without any, ids alone are taken.
    """
    path = Path(rig.path) if rig.path is not None else rig.leave("the rig names no path")
    if (path / "tokenizer.json").is_file():
        _check_long_tokens(rig, path)
        return
    own = own_file(rig)
    tokens = gguf.read(str(rig.path)).metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, tuple):
        rig.leave("the model's file holds no vocabulary")
    ids = rig.tokens(6)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "other.gguf"
        for n_bytes in _LENGTHS:
            last, said = len(tokens) - 1, "d" * 4 * n_bytes
            named = [*tokens[:-1], b"x" * n_bytes]
            changed = own.other(
                tokenizer__ggml__tokens=gguf_copy.texts(named),
                tokenizer__ggml__bos_token_id=number(UINT32, 0),
                tokenizer__ggml__eos_token_id=number(UINT32, last),
                general__description=gguf_copy.text(said),
            )
            file.write_bytes(changed.to_bytes())
            with loaded(rig, str(file)) as model:
                found = model.tokenizer.token_bytes(last)
                equal(found, named[-1], f"a token of {n_bytes} bytes")
                equal(model.tokenizer.bos, 0, "what begins a text, the first token")
                equal(model.info.metadata["general.description"], said, "a long text")
                if n_bytes == _LENGTHS[0]:
                    _check_last_end(rig, model, last, ids)
        _check_added_of_header(rig, own, tokens, file)
        for what, changed in _vocabularies(own, tokens).items():
            file.write_bytes(changed.to_bytes())
            try:
                with loaded(rig, str(file)) as model:
                    _use(rig, model, ids, what)
            except InferCoreError as error:
                is_sound = what in (_SOUND, _SPACED)
                that(not is_sound and not isinstance(error, PluginError), f"{what}: {error}")
                foreseen(error, what)
        _check_no_weights(rig, own, file)
        _check_no_vocabulary(rig, own, file, ids)
        if rig.encoder is not None and is_gguf(Path(rig.encoder)):
            _check_pairs(rig, gguf_copy.read(Path(rig.encoder)), file)


_LENGTHS = (63, 64, 65, 300)
_USER_DEFINED = 4


def _check_added_of_header(
    rig: Rig, own: gguf_copy.Gguf, tokens: tuple[bytes, ...], file: Path
) -> None:
    """A token that the header calls user-defined is its text, in texts and alone."""
    kinds = gguf.read(str(rig.path)).metadata.get("tokenizer.ggml.token_type")
    if not isinstance(kinds, tuple):
        return
    last, name = len(tokens) - 1, "f\u00fcr"
    changed = own.other(
        tokenizer__ggml__tokens=gguf_copy.texts([*tokens[:-1], name.encode()]),
        tokenizer__ggml__token_type=gguf_copy.numbers("i", [*kinds[:-1], _USER_DEFINED]),
    )
    file.write_bytes(changed.to_bytes())
    with loaded(rig, str(file)) as model:
        tokenizer, what = model.tokenizer, f"{name!r}, user-defined in the header"
        equal(tokenizer.token_bytes(last), name.encode(), f"the bytes of {what}")
        equal(tokenizer.is_control(last), False, f"whether {what} is a control token")
        ids = tokenizer.encode(f"a{name}", add_special=False)
        equal(ids[-1], last, f"the last token of a text that ends in {what}")
        equal(tokenizer.decode(ids, skip_special=True), f"a{name}", f"a text that ends in {what}")


def _check_last_end(rig: Rig, model: Any, last: int, ids: list[int]) -> None:
    """The last token ends a text, and is passed over where ends are."""
    that(
        model.tokenizer.eos == last and model.tokenizer.is_eog(last),
        f"token {last} does not end a text",
    )
    kinds = ("portable", "native") if model.capabilities.native_sampler else ("portable",)
    with model.new_context(**rig.fields()) as context:
        context.decode(ids)
        for kind in kinds:
            for ignored in (False, True):
                fields = {"temperature": 0, "logit_bias": {last: 1e3}, "implementation": kind}
                sampler = model.new_sampler(**fields, ignore_eos=ignored)
                with contextlib.closing(sampler):
                    chosen = sampler.sample(context) == last
                equal(chosen, not ignored, f"an end with ignore_eos={ignored}, {kind}")


def _check_long_tokens(rig: Rig, path: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / path.name
        shutil.copytree(path, folder)
        file = folder / "tokenizer.json"
        file.chmod(0o600)
        said = json.loads(file.read_text(encoding="utf-8"))
        entry = said["added_tokens"][-1]
        for n_bytes in _LENGTHS:
            _rename(said, entry, "x" * n_bytes)
            file.write_text(json.dumps(said), encoding="utf-8")
            try:
                opened = loaded(rig, str(folder))
            except ModelLoadError as error:
                foreseen(error, f"a token of {n_bytes} bytes")
                continue
            with opened as model:
                found = model.tokenizer.token_bytes(entry["id"])
                equal(found, b"x" * n_bytes, f"a token of {n_bytes} bytes")
        _check_added_texts(rig, folder, said, entry)
        _check_steps(rig, folder, said)
        _check_pieces(rig, folder)
        _check_unknown(rig, folder)
        for what, (description, pieces, texts) in _spelt().items():
            _check_spelling(rig, folder, description, pieces, texts, what)


def _check_added_texts(rig: Rig, folder: Path, said: dict[str, Any], entry: dict[str, Any]) -> None:
    """An added token is its text, whether it is special or not, and whatever it is written with."""
    is_special, content = entry["special"], entry["content"]
    for entry["special"] in (True, False):
        for name in ("<think>", "f\u00fcr"):
            _rename(said, entry, name)
            (folder / "tokenizer.json").write_text(json.dumps(said), encoding="utf-8")
            try:
                opened = loaded(rig, str(folder))
            except ModelLoadError as error:
                foreseen(error, f"an added token {name!r}")
                continue
            with opened as model:
                tokenizer, what = model.tokenizer, f"{name!r}, special: {entry['special']}"
                equal(tokenizer.token_bytes(entry["id"]), name.encode(), f"the bytes of {what}")
                told = tokenizer.decode([entry["id"]], skip_special=False)
                equal(told, name, f"the text of {what}")
                if not entry["special"]:
                    ids = tokenizer.encode(f"a{name}", add_special=False)
                    told = tokenizer.decode(ids, skip_special=True)
                    equal(told, f"a{name}", f"a text that ends in {what}")
    entry["special"] = is_special
    _rename(said, entry, content)


def _rename(said: dict[str, Any], entry: dict[str, Any], name: str) -> None:
    """Call an added token ``name``, in the vocabulary too, as in each file that a library wrote.

    A library gives a name that stands in one place alone an id of its own.
    """
    vocab = said["model"].get("vocab")
    if isinstance(vocab, dict) and entry["content"] in vocab:
        named = {name if token == entry["content"] else token: i for token, i in vocab.items()}
        said["model"]["vocab"] = named
    entry["content"] = name


def _check_steps(rig: Rig, folder: Path, said: dict[str, Any]) -> None:
    """The same bytes where what splits and joins tokens is the last of several steps."""
    split = {
        "type": "Split", "pattern": {"String": "\0"}, "behavior": "Isolated", "invert": False
    }  # fmt: skip
    ways = (("decoder", "decoders", {"type": "Fuse"}), ("pre_tokenizer", "pretokenizers", split))
    for kind, name, first in ways:
        own = said.get(kind)
        if own is not None and own.get("type") != "Sequence":
            said[kind] = {"type": "Sequence", name: [first, own]}
    (folder / "tokenizer.json").write_text(json.dumps(said), encoding="utf-8")
    try:
        opened = loaded(rig, str(folder))
    except ModelLoadError as error:
        foreseen(error, "a tokenizer of several steps")
        return
    with opened as model:
        last = said["added_tokens"][-1]["id"]
        for token in set(range(rig.tokenizer.n_vocab)) - {last}:
            found, own = (each.token_bytes(token) for each in (model.tokenizer, rig.tokenizer))
            equal(found, own, f"the bytes of token {token}, joined in two steps")


_PIECES = (
    "<unk>",
    "<s>",
    "\u2581",
    "\u2581a",
    "\u2581b",
    "a",
    "b",
    "\u2581\u2581",
    "a\u2581\u2581b",
)


def _check_pieces(rig: Rig, folder: Path) -> None:
    """Of a vocabulary of pieces each has its bytes and its score; texts begin with no space."""
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    spaces = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always"}
    said = {
        "version": "1.0",
        "added_tokens": [
            {"id": i, "content": _PIECES[i], "special": True, **plain} for i in range(2)
        ],
        "pre_tokenizer": {**spaces, "split": False},
        "decoder": spaces,
        "model": {
            "type": "Unigram",
            "unk_id": 0,
            "byte_fallback": False,
            "vocab": [[piece, -0.5 * i] for i, piece in enumerate(_PIECES)],
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(said), encoding="utf-8")
    try:
        opened = loaded(rig, str(folder))
    except ModelLoadError as error:
        foreseen(error, "a vocabulary of pieces with scores")
        return
    with opened as model:
        tokenizer = model.tokenizer
        for i, piece in enumerate(_PIECES):
            equal(tokenizer.token_bytes(i), piece.replace("\u2581", " ").encode(), f"piece {i}")
        scores = [tokenizer.token_score(i) for i in range(len(_PIECES))]
        has_scores = any(score is not None for score in scores)  # a backend need not tell them
        equal(scores, [-0.5 * i if has_scores else None for i in range(len(_PIECES))], "scores")
        for beyond in (len(_PIECES), tokenizer.n_vocab - 1):
            found = (tokenizer.token_bytes(beyond), tokenizer.token_score(beyond))
            equal(found, (b"", None), f"bytes and score of {beyond}, beyond the pieces")
        for text in ("a b", "b", "ab  a"):
            told = tokenizer.decode(tokenizer.encode(text, add_special=False))
            equal(told, text, "a text of pieces, encoded and decoded")


def _check_unknown(rig: Rig, folder: Path) -> None:
    """Behind a token for what is not in the vocabulary the next word keeps its space."""
    spaces = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always"}
    pieces = ["<unk>", "\u2581", "a", "b", "\u2581a", "\u2581b"]
    merges = [["\u2581", "a"], ["\u2581", "b"]]
    for place in (0, len(pieces) - 1):
        names = [*pieces[1 : place + 1], pieces[0], *pieces[place + 1 :]]
        model = {
            "type": "BPE", "unk_token": pieces[0], "vocab": _numbered(names), "merges": merges
        }  # fmt: skip
        said = {
            "version": "1.0",
            "added_tokens": [{"id": place, "content": pieces[0], **_OF_AN_END}],
            "pre_tokenizer": {**spaces, "split": True},
            "decoder": spaces,
            "model": model,
        }
        (folder / "tokenizer.json").write_text(json.dumps(said), encoding="utf-8")
        try:
            opened = loaded(rig, str(folder))
        except ModelLoadError as error:
            foreseen(error, "a vocabulary with an unknown token")
            continue
        with opened as model_of_it:
            tokenizer = model_of_it.tokenizer
            ids = tokenizer.encode("a \u2603 b", add_special=False)
            that(place in ids, f"{ids} has no unknown token, {place}")
            told = tokenizer.decode(ids, skip_special=False)
            that(told.endswith(" b") and pieces[0] in told, f"'a \u2603 b' is decoded as {told!r}")


def _spelt() -> dict[str, tuple[dict[str, Any], dict[str, bytes], tuple[str, ...]]]:
    """Return vocabularies by what they are: the file, the bytes of pieces, texts made of them."""
    mark = "\u2581"
    byte_level = {
        "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True
    }  # fmt: skip
    to_mark = {"type": "Replace", "pattern": {"String": " "}, "content": mark}
    to_space = {"type": "Replace", "pattern": {"String": mark}, "content": " "}
    bare = {"type": "BPE", "unk_token": None, "merges": [["a", "b"]]}
    hexes = [f"<0x{value:02X}>" for value in range(256)]
    words = [mark, "a", "b", "ab", f"<0x41>{mark}", 2 * mark, f"a{mark}{mark}b"]
    fallback = {**bare, "byte_fallback": True, "merges": [["a", "b"]]}
    return {
        "pieces with bytes": (
            {
                "model": {**fallback, "vocab": _numbered([*hexes, *words])},
                "normalizer": {
                    "type": "Sequence",
                    "normalizers": [{"type": "Prepend", "prepend": mark}, to_mark],
                },
                "decoder": {
                    "type": "Sequence",
                    "decoders": [
                        to_space, {"type": "ByteFallback"}, {"type": "Fuse"},
                        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
                    ],
                },
            },
            {"<0x41>": b"A", "<0x0A>": b"\n", "<0xFF>": b"\xff", mark: b" ", "ab": b"ab",
             f"<0x41>{mark}": b"<0x41> ", 2 * mark: b"  ", f"a{mark}{mark}b": b"a  b"},
            ("ab a", "\u00e9", "b"),
        ),
        "pieces that are their text": (
            {"model": {**bare, "vocab": _numbered(["a", "b", "ab", "#a", "\u0120"])}},
            {"a": b"a", "ab": b"ab", "#a": b"#a", "\u0120": "\u0120".encode()},
            ("abba",),
        ),
        "pieces of words": (
            {
                "model": {
                    "type": "WordPiece", "unk_token": "[UNK]", "max_input_chars_per_word": 100,
                    "continuing_subword_prefix": "##",
                    "vocab": _numbered(["[UNK]", "c", "###", "##a", "#", "##b"]),
                },
                "pre_tokenizer": {"type": "WhitespaceSplit"},
                "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": False},
            },
            {"###": b"#", "##a": b"a", "#": b" #", "c": b" c"},
            ("c#a", "#b c##"),
        ),
        "bytes by characters": (
            {
                "model": {**bare, "vocab": _numbered(["a", "b", "ab", *"\u0120\u010a\u65e5"])},
                "pre_tokenizer": byte_level,
                "decoder": byte_level,
            },
            {"ab": b"ab", "\u0120": b" ", "\u010a": b"\n", "\u65e5": "\u65e5".encode()},
            ("ab a\n",),
        ),
    }  # fmt: skip


def _numbered(pieces: list[str]) -> dict[str, int]:
    return {piece: i for i, piece in enumerate(pieces)}


def _check_spelling(
    rig: Rig,
    folder: Path,
    description: dict[str, Any],
    pieces: dict[str, bytes],
    texts: tuple[str, ...],
    what: str,
) -> None:
    """Each piece of such a vocabulary has its bytes, and texts come back; or it is refused.

    Two texts with an end token between them come back too, with the end shown or left out.
    """
    vocab = description["model"]["vocab"]
    added = {"id": len(vocab), "content": _END, **_OF_AN_END}
    said = {"version": "1.0", "added_tokens": [added], **description}
    said["model"] = {**description["model"], "vocab": {**vocab, _END: len(vocab)}}
    (folder / "tokenizer.json").write_text(json.dumps(said), encoding="utf-8")
    try:
        opened = loaded(rig, str(folder))
    except ModelLoadError as error:
        foreseen(error, what)
        return
    with opened as model:
        tokenizer = model.tokenizer
        for piece, data in pieces.items():
            equal(tokenizer.token_bytes(vocab[piece]), data, f"{what}: the bytes of {piece!r}")
            kind = tokenizer.token_kind(vocab[piece])
            is_byte = len(data) == 1 < len(piece)  # which a backend need not know
            that(kind == "normal" or (is_byte and kind == "byte"), f"{what}: {piece!r} is {kind!r}")
        for text in texts:
            ids = tokenizer.encode(text, add_special=False)
            equal(tokenizer.decode(ids), text, f"{what}: a text, encoded and decoded")
            two = f"{text}{_END}{text}"
            ids = tokenizer.encode(two, add_special=False, parse_special=True)
            shown = {skip: tokenizer.decode(ids, skip_special=skip) for skip in (False, True)}
            with_end = shown[False].replace(f"{_END} ", _END)  # some keep the space that was added
            equal(with_end, two, f"{what}: texts with an end between them")
            without = shown[False].replace(_END, "")
            equal(shown[True], without, f"{what}: texts whose end between them is left out")


_END = "</s>"
_OF_AN_END = {
    "special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False
}  # fmt: skip

_SOUND, _SPACED = "pieces with each byte", "pieces that begin with a space"
_SCORES = (0.0, -0.25, -0.5)
_NO_BYTE = "a last token that is marked as a byte and is none"


def _vocabularies(own: gguf_copy.Gguf, tokens: tuple[bytes, ...]) -> dict[str, gguf_copy.Gguf]:
    """Return other vocabularies by what they are: no text may end the process."""
    pieces = own.other(tokenizer__ggml__model=gguf_copy.text("llama"), tokenizer__ggml__scores=None)
    spelt = [f"<0x{value:02X}>".encode() for value in range(256)]
    whole = [*spelt, *(b"t%d" % i for i in range(len(tokens) - 256))]
    spaced = [piece.encode() for piece in ("\u2581", "\u2581a", "a", "b", "\u2581b")]
    kinds = gguf_copy.numbers("i", [*[1] * (len(tokens) - 1), 6])
    one_less = [*whole[:0xF0], b"none", *whole[0xF1:]]  # with which some characters begin
    return {
        "pieces without bytes": pieces,
        _SOUND: pieces.other(tokenizer__ggml__tokens=gguf_copy.texts(whole)),
        _SPACED: pieces.other(
            tokenizer__ggml__tokens=gguf_copy.texts([*spelt, *spaced, *whole[256:]][: len(tokens)]),
            tokenizer__ggml__token_type=gguf_copy.numbers(
                "i", [3, 3, *[6] * 254, *[1] * (len(tokens) - 257), _USER_DEFINED]
            ),
            tokenizer__ggml__scores=gguf_copy.numbers(
                "f", [_SCORES[i % len(_SCORES)] for i in range(len(tokens))]
            ),
        ),
        "pieces with all bytes but one": pieces.other(
            tokenizer__ggml__tokens=gguf_copy.texts(one_less)
        ),
        _NO_BYTE: pieces.other(
            tokenizer__ggml__tokens=gguf_copy.texts([*whole[:-1], b"some text"]),
            tokenizer__ggml__token_type=kinds,
        ),
    }


def _use(rig: Rig, model: Any, ids: list[int], what: str) -> None:
    tokenizer = model.tokenizer
    for text in ("a b", "\u00ff\u2581\U0001f600", "\x00\x01\x7f"):
        tokenizer.decode(tokenizer.encode(text))
    tokenizer.decode(tokenizer.encode(" " * 40))  # each may be three tokens, of one byte each
    if what == _NO_BYTE:
        equal(tokenizer.token_bytes(tokenizer.n_vocab - 1), b"some text", what)
    if what == _SPACED:
        _check_spaced(tokenizer)
    with model.new_context(**rig.fields(n_ctx=32)) as context:
        context.decode(ids)
        that(np.isfinite(context.logits()).all(), f"{what}: logits that are no numbers")


def _check_spaced(tokenizer: Any) -> None:
    """A space before a text goes with each text, and none that was in it."""
    scores = tuple(tokenizer.token_score(token) for token in range(len(_SCORES)))
    equal(scores, scores if scores == (None,) * len(_SCORES) else _SCORES, f"{_SPACED}: scores")
    added = tokenizer.token_bytes(tokenizer.n_vocab - 1).decode(errors="replace")
    for text in ("a b", " a", "ab  b", f"a{added}b", f"{added}a b"):
        decoded = tokenizer.decode(tokenizer.encode(text), skip_special=True)
        equal(decoded, text, f"{_SPACED}: a text that was encoded and decoded")
    begin, text = tokenizer.bos, tokenizer.encode("ab  b", add_special=False)
    name = tokenizer.decode([begin], skip_special=False)
    two = [*text, begin, *text]
    shown, found = (tokenizer.decode(two, skip_special=skip) for skip in (False, True))
    equal(found, shown.replace(name, ""), f"{_SPACED}: two texts, what parts them left out")


def _check_pairs(rig: Rig, own: gguf_copy.Gguf, file: Path) -> None:
    """What the file says of a separator stands between the texts of a pair."""
    separator = 4
    for has_one in (False, True):
        changed = own.other(
            tokenizer__ggml__add_sep_token=number(BOOL, has_one),
            tokenizer__ggml__seperator_token_id=number(UINT32, separator),
        )
        file.write_bytes(changed.to_bytes())
        with loaded(rig, str(file)) as model:
            tokenizer = model.tokenizer
            first, second = (tokenizer.encode(text, add_special=False) for text in ("a cat", "b"))
            begin, end = tokenizer.encode("", add_special=True)
            middle = [end, separator] if has_one else [end]
            found = tokenizer.encode_many([("a cat", "b")])[0]
            equal(found, [begin, *first, *middle, *second, end], "the ids of a pair of texts")


def _check_no_weights(rig: Rig, own: gguf_copy.Gguf, file: Path) -> None:
    without = gguf_copy.Gguf(own.version, own.entries, ())
    for what, changed in {
        "a vocabulary alone": without,
        "no vocabulary and no weights": without.other(tokenizer__ggml__tokens=None),
    }.items():
        file.write_bytes(changed.to_bytes())
        must_be_refused(rig, file, what)


def _check_no_vocabulary(rig: Rig, own: gguf_copy.Gguf, file: Path, ids: list[int]) -> None:
    names = [key for key in own.entries if key.startswith("tokenizer.")]
    entries = {key: value for key, value in own.entries.items() if key not in names}
    architecture = gguf.read(str(rig.path)).architecture
    entries["tokenizer.ggml.model"] = gguf_copy.text("none")
    entries[f"{architecture}.vocab_size"] = number(UINT32, rig.model.info.n_vocab)
    file.write_bytes(gguf_copy.Gguf(own.version, entries, own.tensors).to_bytes())
    try:
        opened = loaded(rig, str(file))
    except ModelLoadError as error:
        foreseen(error, "no vocabulary")
        return
    with opened as model:
        tokenizer = model.tokenizer
        text = raises(UnsupportedFeatureError, lambda: tokenizer.encode("a"), "a text")
        that("encode" in text.feature, f"a text without vocabulary is refused as {text.feature!r}")
        equal(tokenizer.token_bytes(ids[0]), b"", "the bytes of a token that has no text")
        equal((tokenizer.is_eog(1), tokenizer.is_control(1)), (False, False), "an end, a control")
        with model.new_context(**rig.fields()) as context:
            context.decode(ids)
            rig.same_bits(context.logits(), rig.cold(ids), "logits without a vocabulary")
