from __future__ import annotations

import gc
import json
import re
import time
import weakref

import jsonschema
import numpy as np
import pytest

from infercore.errors import GrammarError, InvalidInputError, InvalidTokenError
from infercore.sampling import PortableSampler, compile_constraint
from infercore.sampling.vocabulary import Vocabulary, ll_tokenizer
from infercore.values.config import SamplingConfig

CLOSED = {"additionalProperties": False}
SCHEMAS = {
    "flags": {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"type": "null"}},
        "required": ["a", "b"],
        **CLOSED,
    },
    "bounds": {"type": "integer", "minimum": -12, "maximum": 345},
    "multiple": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 10_000},
    "enum": {"enum": ["red", "gr\u00fcn", 3, None, {"x": [1]}]},
    "list": {
        "type": "array",
        "items": {"type": "number", "minimum": 0, "exclusiveMaximum": 1},
        "minItems": 2,
        "maxItems": 4,
    },
    "nested": {
        "type": "object",
        "properties": {
            "id": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 5}, "maxItems": 3},
            "in": {"type": "object", "properties": {"z": {"const": 1}}, **CLOSED},
        },
        "required": ["id"],
        **CLOSED,
    },
    "either": {"anyOf": [{"type": "string", "maxLength": 8}, {"type": "integer"}]},
    "tuple": {
        "type": "array",
        "prefixItems": [{"type": "string", "maxLength": 3}, {"type": "boolean"}],
        "items": False,
        "minItems": 2,
    },
    "tree": {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "v": {"type": "integer", "minimum": 0, "maximum": 9},
                    "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
                },
                "required": ["v", "next"],
                **CLOSED,
            }
        },
        "$ref": "#/$defs/node",
    },
    "patterns": {
        "type": "object",
        "patternProperties": {"^x[0-9]$": {"type": "integer", "minimum": 1, "maximum": 5}},
        "minProperties": 1,
        "maxProperties": 2,
        **CLOSED,
    },
    "free text": {"type": "string"},
    "date": {"type": "string", "format": "date"},
}


def text_of(tokenizer, tokens):
    return b"".join(tokenizer.token_bytes(token) for token in tokens).decode()


def generate(sampler, tokenizer, random, budget):
    """Return the tokens sampled from random rows, and whether the text ended."""
    tokens = []
    for _ in range(budget):
        row = random.standard_normal(tokenizer.n_vocab, dtype=np.float32)
        token = sampler.sample_logits(row)
        if tokenizer.is_eog(token):
            return tokens, True
        tokens.append(token)
    return tokens, False


@pytest.mark.parametrize("name", SCHEMAS)
def test_random_models_write_valid_json(tokenizer, name):
    schema = SCHEMAS[name]
    validator = jsonschema.Draft202012Validator(schema)
    start = compile_constraint(schema, tokenizer)
    finished = 0
    for seed in range(50):
        random = np.random.default_rng(seed)
        sampler = PortableSampler(
            SamplingConfig(seed=seed, temperature=1.0),
            tokenizer=tokenizer,
            n_vocab=tokenizer.n_vocab,
            constraint=start.clone(),
        )
        tokens, ended = generate(sampler, tokenizer, random, 60)
        finished += ended
        if not ended:  # a valid prefix is one that can still be completed
            rest, ended = generate(sampler, tokenizer, random, 3000)
            assert ended
            tokens += rest
        validator.validate(json.loads(text_of(tokenizer, tokens)))
    assert finished >= 5, "a budget of 60 tokens suffices now and then"


FORMATS = [
    ({"type": "json_object"}, "{}", None),
    ({"type": "object"}, '{"a":1}', None),
    ({"type": ["string", "null"]}, "null", None),
    ({"type": "json_schema", "schema": {"const": [1, "a"]}}, '[1,"a"]', None),
    ({"type": "json_schema", "name": "n", "strict": True, "schema": {"const": 1}}, "1", None),
    ({"type": "json_schema", "json_schema": {"name": "n", "schema": {"const": 2}}}, "2", None),
    ({"type": "regex", "pattern": "(ab|c)d{2}"}, "cdd", r"(ab|c)d{2}"),
    (
        {"type": "choice", "choices": ["yes", 'n"o\n', "\U0001f600 \u00e4"]},
        "\U0001f600 \u00e4",
        None,
    ),
    ({"type": "choice", "choices": ["a", ""]}, "", None),
    ({"type": "lark", "grammar": 'start: "x" y\ny: /[0-9]+/'}, "x12", r"x[0-9]+"),
    ({"type": "gbnf", "grammar": 'root ::= "a" b?\nb ::= [0-9] | "(" b ")"'}, "a((7))", None),
]


@pytest.mark.parametrize(("response_format", "text", "pattern"), FORMATS)
def test_every_form_takes_its_text_and_may_end_there(tokenizer, response_format, text, pattern):
    constraint = compile_constraint(response_format, tokenizer)
    constraint.accept_all(list(text.encode()))
    assert constraint.is_accepting
    constraint.accept(tokenizer.eos)
    assert constraint.is_finished
    constraint.accept(tokenizer.eot)  # what the mask allows is accepted, however often
    with pytest.raises(InvalidInputError, match="at place 1"):
        constraint.accept_all([tokenizer.eos, ord("a")])
    if pattern:
        assert re.fullmatch(pattern, text)


def test_none_is_no_constraint(tokenizer):
    assert compile_constraint(None, tokenizer) is None


@pytest.mark.parametrize(
    "response_format",
    [
        7,
        "json",
        ["a"],
        int,
        {"type": "yaml", "text": "a"},
        {"type": "regexp"},
        {"regex": "a+"},
        {"choice": ["a", "b"]},
        {"type": "regex"},
        {"type": "regex", "pattern": 3},
        {"type": "regex", "pattern": "a", "flags": "i"},
        {"type": "choice", "choices": []},
        {"type": "choice", "choices": "abc"},
        {"type": "choice", "choices": [1]},
        {"type": "json_schema", "schema": 3},
        {"type": "json_object", "schema": {}},
        {"const": {1, 2}},
    ],
)
def test_what_is_no_response_format_is_refused(tokenizer, response_format):
    with pytest.raises(InvalidInputError) as caught:
        compile_constraint(response_format, tokenizer)
    assert caught.value.field == "response_format"
    assert not isinstance(caught.value, GrammarError)


@pytest.mark.parametrize(
    ("response_format", "place"),
    [
        ({"type": "objekt", "properties": {}}, "at #: .*objekt"),
        ({"properties": {"a": {"items": {"minLength": -1}}}}, "at #/properties/a/items: "),
        ({"anyOf": [{}, {"uniqueItems": True}]}, "at #/anyOf/1: .*uniqueItems"),
        ({"$defs": {"a/b": {"not": {}}}, "$ref": "#/$defs/a~1b"}, r"at #/\$defs/a~1b: .*not"),
        ({"properties": {"a": {"$ref": "#/$defs/no"}}}, r"at #/properties/a: .*\$defs/no"),
        (
            {
                "$defs": {"ok": {}},
                "items": {"prefixItems": [{"$ref": "#/$defs/ok"}, {"uniqueItems": True}]},
            },
            "at #/items/prefixItems/1: ",
        ),
        ({"type": "string", "pattern": "("}, "(?s)at #: .*unclosed group"),
        ({"minimum": 3, "maximum": 1, "type": "integer"}, "at #: .*minimum"),
        ({"type": "regex", "pattern": "a(b"}, r"refused at column 2 of a\(b: unclosed group$"),
        ({"type": "regex", "pattern": "(?=a)b"}, "look-around"),
        ({"type": "lark", "grammar": "start: foo\n"}, "1.*unknown name"),
        ({"type": "lark", "grammar": ""}, "Empty grammar"),
        ({"type": "gbnf", "grammar": 'root ::= "a'}, "line 1"),
        ({"type": "gbnf", "grammar": 'a ::= "a"'}, "root"),
    ],
)
def test_a_bad_grammar_is_refused_with_its_place(tokenizer, response_format, place):
    with pytest.raises(GrammarError, match=place) as caught:
        compile_constraint(response_format, tokenizer)
    assert isinstance(caught.value.source, str)


def test_json_is_compact_unless_the_schema_says_otherwise(tokenizer):
    def takes(schema, text):
        constraint = compile_constraint(schema, tokenizer)
        try:
            constraint.accept_all(list(text))
        except InvalidInputError:
            return False
        return True

    schema = {"type": "array"}
    assert takes(schema, b"[1,2]")
    assert not takes(schema, b"[1, 2]")
    assert takes({**schema, "x-guidance": {"whitespace_flexible": True}}, b"[1, 2]")


def test_end_tokens_only_where_the_text_is_complete_and_controls_never(tokenizer):
    constraint = compile_constraint({"type": "regex", "pattern": "ab+"}, tokenizer)
    ends = [tokenizer.eos, tokenizer.eot]

    def allowed():
        return np.flatnonzero(constraint.allowed()).tolist()

    assert allowed() == [ord("a")]
    constraint.accept_all(b"ab")
    assert (constraint.is_accepting, constraint.is_finished) == (True, False)
    assert allowed() == [ord("b"), *ends]
    constraint.accept(tokenizer.eot)
    assert constraint.is_finished


def test_a_control_token_never_stands_for_its_text(tokenizer):
    constraint = compile_constraint({"type": "choice", "choices": ["[control]", "x"]}, tokenizer)
    assert np.flatnonzero(constraint.allowed()).tolist() == [ord("["), ord("x")]


def test_apply_forbids_in_place_and_beyond_the_tokenizer(tokenizer):
    constraint = compile_constraint({"type": "regex", "pattern": "a"}, tokenizer, n_vocab=300)
    row = np.arange(300, dtype=np.float32)
    row[ord("a")] = -np.inf
    constraint.apply(row)
    assert (row == -np.inf).all()
    row = np.arange(300, dtype=np.float32)
    constraint.apply(row)
    assert np.flatnonzero(row > -np.inf).tolist() == [ord("a")]
    assert row[ord("a")] == ord("a")
    assert constraint.allowed().shape == (300,)


@pytest.mark.parametrize(("tokens", "refused"), [(b"x", 0), (b"abx", 2), ([97, 256], 1)])
def test_a_refused_token_leaves_the_constraint_as_it_was(tokenizer, tokens, refused):
    constraint = compile_constraint({"type": "regex", "pattern": "abc"}, tokenizer)
    with pytest.raises(InvalidInputError, match=f"at place {refused}") as caught:
        constraint.accept_all(list(tokens))
    assert caught.value.value == list(tokens)[refused]
    constraint.accept_all(b"abc")
    assert constraint.is_accepting


@pytest.mark.parametrize("token", [-1, 259, 2**40])
def test_a_foreign_id_is_refused_and_changes_nothing(tokenizer, token):
    constraint = compile_constraint({"type": "regex", "pattern": "abc"}, tokenizer)
    with pytest.raises(InvalidTokenError):
        constraint.accept_all([97, token])
    constraint.accept_all(b"abc")


def test_forced_tokens_change_nothing_until_accepted(tokenizer):
    schema = {"properties": {"name": {"enum": ["a", "b"]}}, "required": ["name"], **CLOSED}
    constraint = compile_constraint({"type": "object", **schema}, tokenizer)
    forced = constraint.forced_tokens()
    assert bytes(forced) == b'{"name":"'
    assert constraint.forced_tokens() == forced
    constraint.accept_all(forced)
    assert constraint.forced_tokens() == []
    constraint.accept(ord("b"))
    assert bytes(constraint.forced_tokens()) == b'"}'


def test_clones_are_independent_and_reset_rewinds(tokenizer):
    constraint = compile_constraint({"type": "regex", "pattern": "ab(c|d)"}, tokenizer)
    constraint.accept(ord("a"))
    twin = constraint.clone()
    twin.accept(ord("b"))
    assert np.flatnonzero(constraint.allowed()).tolist() == [ord("b")]
    assert np.flatnonzero(twin.allowed()).tolist() == [ord("c"), ord("d")]
    assert not np.shares_memory(twin._words, constraint._words)  # threads may use both
    twin.accept_all([ord("c"), tokenizer.eos])
    twin.reset()
    assert np.flatnonzero(twin.allowed()).tolist() == [ord("a")]
    assert np.flatnonzero(constraint.allowed()).tolist() == [ord("b")]


def test_a_tokenizer_is_read_once_and_not_kept_alive(make_tokenizer):
    tokenizer = make_tokenizer()
    first = compile_constraint({"type": "regex", "pattern": "a"}, tokenizer)
    asked = tokenizer.eog_questions
    compile_constraint({"type": "regex", "pattern": "b"}, tokenizer)
    assert tokenizer.eog_questions == asked
    assert ll_tokenizer(tokenizer) is ll_tokenizer(tokenizer)
    reference = weakref.ref(tokenizer)
    del tokenizer, first
    gc.collect()
    assert reference() is None


def test_a_constraint_keeps_its_tokenizer(make_tokenizer):
    constraint = compile_constraint({"type": "choice", "choices": ["abc"]}, make_tokenizer())
    gc.collect()
    assert bytes(constraint.forced_tokens()) == b"abc"


def test_a_tokenizer_without_an_end_may_stop_but_never_name_it(make_tokenizer):
    class Endless(make_tokenizer):
        def is_eog(self, token):
            return False

    tokenizer = Endless()
    constraint = compile_constraint({"type": "regex", "pattern": "a"}, tokenizer)
    constraint.accept(ord("a"))
    assert constraint.is_finished
    assert not constraint.allowed().any()


def test_text_that_a_tokenizer_changes_is_tokenized_by_longest_matches(make_tokenizer):
    class Spaced(make_tokenizer):
        def encode(self, text, **options):
            return super().encode(" " + text, **options)

    tokenizer = Spaced([b"ab", b"abc"])
    vocabulary = Vocabulary(tokenizer)
    assert [tokenizer.token_bytes(token) for token in vocabulary("abcabd")] == [b"abc", b"ab", b"d"]
    with pytest.raises(TypeError):
        vocabulary(b"ab")
    constraint = compile_constraint({"type": "choice", "choices": ["abcd"]}, tokenizer)
    assert b"".join(map(tokenizer.token_bytes, constraint.forced_tokens())) == b"abcd"


def test_an_end_of_sequence_comes_first_among_the_ends(make_tokenizer):
    class Turned(make_tokenizer):
        def __init__(self):
            super().__init__()
            self.eos, self.eot = self.eot, self.eos

    tokenizer = Turned()
    assert Vocabulary(tokenizer).eog == [tokenizer.eos, tokenizer.eot]


def test_a_grammar_that_grows_too_complex_is_an_error_not_an_end(tokenizer):
    constraint = compile_constraint({"type": "regex", "pattern": "a"}, tokenizer)

    class Broken:
        def __getattr__(self, name):
            return lambda *_: {"is_error": True, "get_error": "too many states"}.get(name, 0)

    constraint._matcher = Broken()
    for use in (constraint.allowed, lambda: constraint.accept(97)):
        with pytest.raises(GrammarError, match="too many states") as caught:
            use()
        assert caught.value.source == "a"


def test_the_mask_costs_little(make_tokenizer):
    words = [f"{n:x}-".encode() for n in range(8000)]
    tokenizer = make_tokenizer(words)
    constraint = compile_constraint({"type": "string"}, tokenizer)
    constraint.accept(ord('"'))
    row = np.zeros(tokenizer.n_vocab, dtype=np.float32)
    times = []
    for _ in range(50):
        start = time.perf_counter()
        constraint.apply(row)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.0002
