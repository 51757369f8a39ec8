"""Text to ids and back, by the model's own tokenizer.json."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infercore_openvino.files import find
from infercore_openvino.pieces import byte_alphabet, piece_reader
from infercore_openvino.tokenizer import JsonTokenizer


@pytest.fixture(scope="module")
def tokenizer(ov_path):
    return JsonTokenizer(find(str(ov_path)), 1100, str(ov_path))


def encode(tokenizer, text, *, special=False, parse=True):
    return tokenizer.encode(text, add_special=special, parse_special=parse)


def edited(copied, name, **changes):
    path = copied / name
    found = json.loads(path.read_text())
    for key, value in changes.items():
        found[key] = value
    path.write_text(json.dumps(found))
    return JsonTokenizer(find(str(copied)), 1024, str(copied))


def test_ids_are_those_of_transformers(tokenizer, golden) -> None:
    for prompt in golden.prompts:
        assert tuple(encode(tokenizer, prompt.text, special=True)) == prompt.tokens


def test_special_ids(tokenizer) -> None:
    assert (tokenizer.bos, tokenizer.eos, tokenizer.eot, tokenizer.add_bos) == (0, 1, 3, True)
    assert [t for t in range(1100) if tokenizer.is_eog(t)] == [1, 3]
    assert [t for t in range(1100) if tokenizer.is_control(t)] == [0, 1, 2, 3]


def test_control_tokens_in_a_text(tokenizer) -> None:
    text = "a<|im_end|>b"
    assert 3 in encode(tokenizer, text)
    assert 3 not in encode(tokenizer, text, parse=False)
    for parse in (True, False):
        ids = encode(tokenizer, text, parse=parse)
        assert b"".join(map(tokenizer.token_bytes, ids)).decode() == text


def test_the_start_is_added_once_when_asked(tokenizer) -> None:
    assert encode(tokenizer, "", special=True) == [0]
    assert encode(tokenizer, "") == []
    assert encode(tokenizer, "hello", special=True) == [0, *encode(tokenizer, "hello")]


@given(text=st.text(max_size=60))
def test_any_text_comes_back_from_its_bytes(tokenizer, text) -> None:
    for parse in (True, False):
        ids = encode(tokenizer, text, parse=parse)
        assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


def test_an_id_that_the_vocabulary_leaves_out_has_no_bytes(tokenizer) -> None:
    assert tokenizer.token_bytes(1099) == b""
    assert not tokenizer.is_control(1099)


def test_threads_do_not_meet(tokenizer) -> None:
    from concurrent.futures import ThreadPoolExecutor

    text = "a<|im_end|>b" * 20
    expected = {parse: encode(tokenizer, text, parse=parse) for parse in (True, False)}
    with ThreadPoolExecutor(2) as pool:
        kinds = [i % 2 == 0 for i in range(200)]
        found = pool.map(lambda parse: (parse, encode(tokenizer, text, parse=parse)), kinds)
        assert all(ids == expected[parse] for parse, ids in found)


def test_the_template(tokenizer, ov_path) -> None:
    assert tokenizer.chat_template == (ov_path / "chat_template.jinja").read_text()


# -- what configs say --------------------------------------------------------------------------


@pytest.mark.parametrize(("asked", "prefix"), [(True, [0]), (False, []), (None, [0])])
def test_add_bos_token_overrides_the_template(copied, asked, prefix) -> None:
    found = edited(copied, "tokenizer_config.json", add_bos_token=asked)
    assert encode(found, "", special=True) == prefix
    assert found.add_bos is bool(prefix)


def test_add_eos_token(copied) -> None:
    found = edited(copied, "tokenizer_config.json", add_eos_token=True)
    assert encode(found, "", special=True) == [0, 1]


def test_add_bos_token_without_a_template(copied) -> None:
    edited(copied, "tokenizer.json", post_processor=None)
    found = edited(copied, "tokenizer_config.json", add_bos_token=True)
    assert encode(found, "", special=True) == [0]


def test_names_come_before_ids(copied) -> None:
    found = edited(copied, "tokenizer_config.json", eos_token={"content": "<|im_end|>"})
    assert found.eos == 3
    found = edited(copied, "tokenizer_config.json", eos_token=None, bos_token=None)
    assert (found.bos, found.eos) == (0, 1)
    assert found.is_eog(1)
    assert found.is_eog(3)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("plain", "plain"),
        ([{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}], "d"),
        (None, None),
    ],
)
def test_templates_in_the_config(copied, template, expected) -> None:
    (copied / "chat_template.jinja").unlink()
    found = edited(copied, "tokenizer_config.json", chat_template=template)
    assert found.chat_template == expected


def test_limits_in_the_file_do_not_cut_texts(copied) -> None:
    truncation = {
        "direction": "Right",
        "max_length": 4,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    found = edited(copied, "tokenizer.json", truncation=truncation)
    assert len(encode(found, "many words in a row, one after another")) > 4


# -- pieces ------------------------------------------------------------------------------------


def test_the_byte_alphabet_has_every_byte_once() -> None:
    alphabet = byte_alphabet()
    assert sorted(alphabet.values()) == list(range(256))
    assert (alphabet["A"], alphabet["\u0120"], alphabet["\u010a"]) == (0x41, 0x20, 0x0A)


@pytest.mark.parametrize(
    ("description", "piece", "expected"),
    [
        ({"decoder": {"type": "ByteLevel"}}, "\u0120caf\u00c3\u00a9", b" caf\xc3\xa9"),
        (
            {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "ByteLevel"}]}},
            "\u0120",
            b" ",
        ),
        ({"decoder": {"type": "ByteLevel"}}, "\u65e5", "\u65e5".encode()),
        ({"decoder": {"type": "Metaspace"}}, "\u2581Hello", b" Hello"),
        ({"model": {"byte_fallback": True}}, "<0xE2>", b"\xe2"),
        ({"model": {"byte_fallback": True}}, "<0xE2>x", b"<0xE2>x"),
        (
            {
                "decoder": {
                    "type": "Sequence",
                    "decoders": [
                        {
                            "type": "Replace",
                            "pattern": {"String": "\u2581"},
                            "content": " ",
                        },
                        {"type": "ByteFallback"},
                    ],
                }
            },
            "\u2581a",
            b" a",
        ),
        ({}, "word", b"word"),
    ],
)
def test_pieces(description, piece, expected) -> None:
    assert piece_reader(description)(piece) == expected


def of_unigram(copied, **model):
    """Return a tokenizer that puts a space before each text, with a token for what it lacks."""
    texts = ["<unk>", "<s>", "\u2581", "\u2581a", "\u2581b", "a", "b"]
    path = copied / "tokenizer.json"
    description = {
        "version": "1.0",
        "added_tokens": [
            {"id": i, "content": text, "special": True, "single_word": False, "lstrip": False,
             "rstrip": False, "normalized": False}
            for i, text in enumerate(texts[:2])
        ],
        "pre_tokenizer": {"type": "Metaspace", "replacement": "\u2581",
                          "prepend_scheme": "always", "split": False},
        "decoder": {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always"},
        "model": {"type": "Unigram", "unk_id": 0, "byte_fallback": False,
                  "vocab": [[text, -float(i)] for i, text in enumerate(texts)], **model},
    }  # fmt: skip
    path.write_text(json.dumps(description))
    return JsonTokenizer(find(str(copied)), 7, str(copied))


def test_a_space_behind_an_unknown_character_that_is_named_is_kept(copied) -> None:
    texts = ["<unk>", "<s>", "\u2581", "a", "b"]
    of_unigram(copied)
    path = copied / "tokenizer.json"
    model = {"type": "BPE", "unk_token": "<unk>", "byte_fallback": False, "merges": [],
             "vocab": {text: i for i, text in enumerate(texts)}}  # fmt: skip
    path.write_text(json.dumps({**json.loads(path.read_text()), "model": model}))
    tokenizer = JsonTokenizer(find(str(copied)), 5, str(copied))
    ids = encode(tokenizer, "a\u2603 b")
    assert ids == [2, 3, 0, 2, 4]
    assert tokenizer.decode(ids, skip_special=False) == "a<unk> b"
    assert tokenizer.token_kind(0) == "unknown"


def test_a_space_behind_an_unknown_character_is_kept(copied) -> None:
    tokenizer = of_unigram(copied)
    ids = encode(tokenizer, "a\u2603 b")
    assert ids == [3, 0, 4]
    assert tokenizer.decode(ids, skip_special=False) == "a<unk> b"
    assert tokenizer.decode([3, 1, 4], skip_special=False) == "a<s>b"  # a control token splits


def test_what_a_stream_shows_is_what_decode_says(copied) -> None:
    import random
    from types import SimpleNamespace

    from infercore.engine.tokenizer import GuardedTokenizer
    from infercore.session.pieces import Pieces

    inner = of_unigram(copied)
    weights = SimpleNamespace(freed=False, begin=lambda: None, end=lambda: None)
    tokenizer = GuardedTokenizer(inner, dialect=None, weights=weights)
    pieces, rng = Pieces(tokenizer), random.Random(0)
    for _ in range(300):
        tokens = [5, *(rng.randrange(7) for _ in range(8))]
        shown = [
            pieces.shown(t, before) for before, t in zip([None, *tokens], tokens, strict=False)
        ]
        assert b"".join(shown).decode() == tokenizer.decode(tokens), tokens
