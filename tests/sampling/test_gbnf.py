"""GBNF means what llama.cpp means by it: what it takes, what it leaves, and what it refuses."""

from __future__ import annotations

import os
import pathlib
import re

import pytest

from infercore.errors import GrammarError, InvalidInputError
from infercore.sampling import compile_constraint, gbnf

FOLDER = "INFERCORE_GRAMMARS"


def takes(tokenizer, grammar, text):
    constraint = compile_constraint({"type": "gbnf", "grammar": grammar}, tokenizer)
    try:
        constraint.accept_all(list(text.encode()))
    except InvalidInputError:
        return False
    return constraint.is_accepting


# What llama.cpp's own sampler says of these, tried over a real vocabulary.
TAKEN = [
    ('root ::= "a" ws "\\n"\nws ::= [ \\t\\n]*', ["a \n", "a\n", "a\n\n"], ["a", "a "]),
    ('root ::= id " " id\nid ::= [a-z ]+', ["a b", "a b c"], ["a", " a"]),
    ("root ::= .+", ["\n", "a\r\n", "é"], [""]),
    ('root ::= ("c" | ("ab" | [a])) x\nx ::= [ab]', ["ab", "aba", "ca"], ["a", "abc"]),
    ("root ::= ([x]*)*", ["", "xx"], ["y"]),
    ('root ::= ("a"+)+', ["a", "aaa"], [""]),
    ('root ::= "ab"{2}{2}', ["abababab"], ["abab", "ababab"]),
    ('root ::= "a"{0} "b"', ["b"], ["ab"]),
    ('root ::= "a"{ 1 , 2 }', ["a", "aa"], ["", "aaa"]),
    ('root ::= "a"{1,2001}', ["a" * 2003], [""]),
    ('root ::= "\\u0041\\x42\\U00000043"', ["ABC"], ["A"]),
    ("root ::= [\\u00e0-\\u00ff]", ["é"], ["a"]),
    ("root ::= [\\U0001F600-\\U0001F64F]", ["😀"], ["a", "é"]),
    ("root ::= [^a-c]", ["d", "\n", "🙂"], ["a", "b", ""]),
    ("root ::= [a-]+", ["a-", "-"], ["b"]),
    ('root ::= [] "a" [^]', ["a"], ["", "ab"]),
    ('root ::= "" | "a"', ["", "a"], ["b"]),
    ('root ::= ( "a" |\n "b"\n )\n', ["a", "b"], ["ab"]),
    ('root ::= "a" |\n "b" # or\nx ::= "c"', ["a", "b"], ["c"]),
    ('root ::= "a"\nroot ::= "b"', ["b"], ["a"]),
    ('\n # first\r\nroot::="a"\r\n\r\n', ["a"], []),
    ('root ::= "a" root | "b"', ["b", "aab"], ["a"]),
    ('root ::= "\\"" [^"\\\\]* "\\""', ['"x y"'], ['"']),
    ('root ::= x x\nx ::= "a"? "b"?', ["", "ab", "ba", "abab"], ["bbb"]),
]


@pytest.mark.parametrize(("grammar", "taken", "left"), TAKEN)
def test_the_language_is_llama_cpps(tokenizer, grammar, taken, left):
    assert [text for text in taken if not takes(tokenizer, grammar, text)] == []
    assert [text for text in left if takes(tokenizer, grammar, text)] == []


@pytest.mark.parametrize(
    ("grammar", "place", "why"),
    [
        ('root ::= "a', "line 1, column 12", "within quotes"),
        ("root ::= [a", "line 1, column 12", "within quotes or brackets"),
        ('a ::= "a"', "line 1, column 1", "no rule 'root'"),
        ("", "line 1, column 1", "no rule 'root'"),
        ('root ::= "a" | x', "line 1, column 16", "no rule 'x'"),
        ('root ::= "a"\n  | "b"', "line 2, column 3", "name of a rule"),
        ("root = x", "line 1, column 6", "expected '::='"),
        ("root ::= (x", "line 1, column 12", "expected ')'"),
        ("root ::= x)", "line 1, column 11", "end of the line"),
        ("root ::= *", "line 1, column 10", "nothing stands before"),
        ('root ::= "a" "" +', "line 1, column 17", "nothing stands before"),
        ('root ::= "a"{0}*', "line 1, column 16", "nothing stands before"),
        ('root ::= "a"{2', "line 1, column 15", "expected '}'"),
        ('root ::= "a"{,2}', "line 1, column 14", "expected a number"),
        ('root ::= "a"{3,1}', "line 1, column 13", "upper bound"),
        ('root ::= "a"{2001}', "line 1, column 13", "more than 2000"),
        ('root ::= ("a"{0,100}){100}', "line 1, column 22", "exceed 2000"),
        ('root ::= "a"{99999999999999999999}', "line 1, column 34", "too large"),
        ('root ::= "\\q"', "line 1, column 11", "unknown escape"),
        ('root ::= "\\x4"', "line 1, column 11", "2 hexadecimal"),
        ("root ::= [z-a]", "line 1, column 11", "z-a holds no character"),
        ('root ::= "\\ud800"', "line 1, column 11", "matches no character"),
        ("root ::= [\\x00]", "line 1, column 10", "matches no character"),
        ('root ::= root "a" | "b"', "line 1, column 10", "left recursion"),
        ('root ::= x\nx ::= "y"? root "z" | "w"', "line 2, column 12", "left recursion"),
        ('root ::= "a" root', "line 1, column 1", "never ends"),
        ("root ::= a_b", "line 1, column 11", "end of the line"),
        ("root ::= <[999999]>", "line 1, column 10", "the vocabulary has"),
        ("root ::= <ab>", "line 1, column 10", "4 tokens, not one"),
        ("root ::= <[257]>", "line 1, column 10", "end-of-generation"),
        ("root ::= !x", "line 1, column 11", "expected '<'"),
        ('root ::= "a\0"', "line 1, column 12", "NUL"),
    ],
)
def test_a_refusal_quotes_the_users_text(tokenizer, grammar, place, why):
    with pytest.raises(GrammarError, match=re.escape(why)) as caught:
        compile_constraint({"type": "gbnf", "grammar": grammar}, tokenizer)
    assert f"refused at {place}: " in str(caught.value)
    assert caught.value.source == grammar
    line = grammar.split("\n")[int(place.split()[1].strip(",")) - 1]
    assert line in str(caught.value)


def test_a_long_line_is_shown_around_the_place(tokenizer):
    grammar = "root ::= " + '"a" ' * 100 + "?? " + '"b" ' * 100 + "nowhere"
    with pytest.raises(GrammarError) as caught:
        compile_constraint({"type": "gbnf", "grammar": grammar}, tokenizer)
    assert len(str(caught.value)) < 300


def test_tokens_by_number_text_and_negation(make_tokenizer):
    tokenizer = make_tokenizer([b"<think>", b"yes"])
    think, yes = 256, 257

    def constraint(grammar):
        return compile_constraint({"type": "gbnf", "grammar": grammar}, tokenizer)

    for grammar in ("root ::= <think> .*", f"root ::= <[{think}]> .*"):
        found = constraint(grammar)
        assert found.allowed().nonzero()[0].tolist() == [think]
        found.accept_all([think, ord("a")])
        assert found.is_accepting
    others = constraint("root ::= !<think>").allowed()
    assert not others[think]
    assert others[yes]
    assert others[tokenizer.control]
    assert not others[tokenizer.eos]


def test_names_of_rules_are_no_names_of_ours(tokenizer):
    grammar = 'root ::= start rule-0 CHAR-0\nstart ::= "a"\nrule-0 ::= "b"\nCHAR-0 ::= "c"'
    assert takes(tokenizer, grammar, "abc")


def test_deep_nesting_is_typed(tokenizer):
    grammar = "root ::= " + "(" * 5000 + '"a"' + ")" * 5000
    with pytest.raises(GrammarError, match="nested"):
        compile_constraint({"type": "gbnf", "grammar": grammar}, tokenizer)


def grammars():
    folder = os.environ.get(FOLDER)
    if not folder:
        reason = f"set {FOLDER} to a folder of .gbnf files (llama.cpp: grammars)"
        return [pytest.param(None, marks=pytest.mark.skip(reason=reason))]
    found = sorted(pathlib.Path(folder).glob("*.gbnf"))
    assert found, f"{FOLDER} has no .gbnf files"
    return [pytest.param(path, id=path.stem) for path in found]


SAMPLES = {
    "arithmetic": (["1=2\n", "a*(b+1) = 3\n", "1=1\n2=2\n"], ["1=2", "=1\n"]),
    "chess": (["1. e4 e5\n1. e4 e5\n", "1. O-O Nxf3+\n2. a1=Q b2\n"], ["1. e4 e5\n"]),
    "json": (['{"a":[1,2.5e3,"x\\n"]}', "{}", '{ "a": true }'], ["[]", "{'a':1}"]),
    "list": (["- a\n- b c\n"], ["- a", "a\n"]),
    "english": (["Hello, world."], ["é"]),
    "japanese": (["こんにちは"], ["hello"]),
}


@pytest.mark.parametrize("path", grammars())
def test_llama_cpps_own_grammars(tokenizer, path):
    source = path.read_text(encoding="utf-8")
    assert "root" in gbnf.read(source)
    taken, left = SAMPLES.get(path.stem, ([], []))
    assert [text for text in taken if not takes(tokenizer, source, text)] == []
    assert [text for text in left if takes(tokenizer, source, text)] == []
