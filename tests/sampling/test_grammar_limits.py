"""Compiling a grammar has a budget; what goes beyond it is typed, within seconds."""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from infercore.errors import GrammarError, InvalidInputError
from infercore.limited import wire
from infercore.sampling import compile_constraint, grammar

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="where the kernel keeps the limits")


def nested(depth):
    schema = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def patterns(n):
    return {"type": "string", "allOf": [{"pattern": f".*{chr(97 + i % 26)}.*"} for i in range(n)]}


PATTERNS = patterns(18)  # without limits it takes some seconds and 500 MB; each one more twice that
BOMBS = {
    "patterns all at once": PATTERNS,
    "many choices": {"type": "choice", "choices": [f"choice number {i}" for i in range(200_000)]},
    "many alternatives": {
        "type": "gbnf",
        "grammar": "root ::= " + " | ".join(f'"alternative {i}"' for i in range(60_000)),
    },
    "a deep schema": nested(900),
    "a schema too deep for JSON": nested(20_000),
    "a deep grammar": {
        "type": "lark",
        "grammar": "start: " + "(" * 100_000 + '"a"' + ")" * 100_000,
    },
    "a deep expression": {"type": "regex", "pattern": "(" * 100_000 + "a" + ")" * 100_000},
    "many properties": {"properties": {f"p{i}": {"type": "string"} for i in range(20_000)}},
    "a long list of values": {"enum": [f"value {i}" for i in range(100_000)]},
}


@pytest.fixture
def short(monkeypatch):
    """Give compiling a second, so that the tests need not wait long."""
    monkeypatch.setattr(grammar, "MAX_SECONDS", 1.0)


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_typed(tokenizer, short, name):
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()
    with pytest.raises(GrammarError) as caught:
        compile_constraint(BOMBS[name], tokenizer)
    assert time.perf_counter() - started < 8
    assert len(str(caught.value)) < 5000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 << 10


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": [0, *range(4000, 8000)], "not": {"enum": [*range(2000, 8000)]}},
        {"type": "array", "items": {"enum": [*range(12)]}, "maxItems": 3, "minContains": 3,
         "contains": {"enum": [0, 1, *range(100, 4000)]}},
    ],
)  # fmt: skip
def test_long_lists_are_compared_at_once(tokenizer, schema):
    started = time.perf_counter()
    assert compile_constraint(schema, tokenizer)
    assert time.perf_counter() - started < 4  # each with each would take a minute


@pytest.fixture(autouse=True)
def nothing_refused(monkeypatch):
    monkeypatch.setattr(grammar, "_too_large", {})


def test_what_has_no_end_is_stopped_by_the_default(tmp_path):
    """In a process that the kernel ends, as nothing in Python can end a compiler."""
    program = tmp_path / "program.py"
    program.write_text(
        "import resource\n"
        "from infercore.errors import GrammarError\n"
        "from infercore.sampling import compile_constraint\n"
        "from infercore.testing import load_toy_model\n"
        "tokenizer = load_toy_model().tokenizer\n"
        "resource.setrlimit(resource.RLIMIT_CPU, (10, 10))\n"
        f"try: compile_constraint({patterns(60)}, tokenizer)\n"
        "except GrammarError as error: print(error)\n"
    )
    command = [sys.executable, str(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert "too large to compile: it takes more than" in done.stdout, (done.returncode, done.stderr)


def test_what_was_too_large_is_refused_at_once_for_a_while(tokenizer, short, monkeypatch):
    tried = []
    for _ in range(2):
        with pytest.raises(GrammarError, match="too large to compile"):
            compile_constraint(PATTERNS, tokenizer)
        monkeypatch.setattr(grammar.limited, "run", lambda *_, **__: tried.append(1))
    assert not tried
    monkeypatch.setattr(grammar, "_REFUSED_FOR_S", 0.0)
    grammar._too_large.clear()
    refused = lambda *_, **__: tried.append(1) or (wire.STOPPED, "it takes too long")  # noqa: E731
    monkeypatch.setattr(grammar.limited, "run", refused)
    for _ in range(2):
        with pytest.raises(GrammarError, match="takes too long"):
            compile_constraint(PATTERNS, tokenizer)
    assert len(tried) == 2


def test_the_time_is_named(tokenizer, monkeypatch):
    monkeypatch.setattr(grammar, "MAX_SECONDS", 0.25)  # before its memory is too much
    with pytest.raises(GrammarError, match=r"more than 0\.25 seconds"):
        compile_constraint(PATTERNS, tokenizer)
    monkeypatch.undo()  # a new child takes time to start
    assert compile_constraint({"type": "regex", "pattern": "a"}, tokenizer)


def test_what_was_tried_once_is_not_tried_again(tokenizer, monkeypatch):
    one = {"type": "regex", "pattern": "tried (once|twice)"}
    compile_constraint(one, tokenizer)
    monkeypatch.setattr(grammar.limited, "run", lambda *_, **__: pytest.fail("tried again"))
    compile_constraint(one, tokenizer)


def test_thousands_of_choices_are_no_bomb(tokenizer):
    choices = [f"choice number {i}" for i in range(5000)]
    constraint = compile_constraint({"type": "choice", "choices": choices}, tokenizer)
    constraint.accept_all(list(b"choice number 4711"))
    assert constraint.is_accepting


def test_a_process_that_is_killed(tokenizer, monkeypatch):
    monkeypatch.setattr(grammar.limited, "run", lambda *_, **__: (wire.STOPPED, "it has died"))
    with pytest.raises(GrammarError, match="it has died"):
        compile_constraint({"type": "regex", "pattern": "never before"}, tokenizer)


@pytest.mark.parametrize("value", [{"const": {1, 2}}, {"const": object()}, {1: 2, "const": b"x"}])
def test_what_json_cannot_hold(tokenizer, value):
    with pytest.raises(InvalidInputError):
        compile_constraint(value, tokenizer)


def test_a_mask_that_takes_long_is_refused_before_anything_is_decoded(make_tokenizer):
    words = [left + right for left in (b"a", b"b ", b"c") for right in (b"d", b"e ", b"fg", b"h i")]
    n = 600
    rules = "\n".join(f'r{i} ::= [a-z ]+ "{i}"?' for i in range(n))
    text = f"root ::= ({' | '.join(f'r{i}' for i in range(n))})*\n{rules}"
    with pytest.raises(GrammarError, match="Too many items"):
        compile_constraint({"type": "gbnf", "grammar": text}, make_tokenizer(words))


def test_where_an_error_sits_is_looked_for_within_limits(tokenizer, short):
    """A part that has no error may be as heavy as any."""
    schema = {"properties": {"a": patterns(60), "b": {"$ref": "#/nowhere"}}}
    started = time.process_time()
    with pytest.raises(GrammarError, match="nowhere"):
        compile_constraint(schema, tokenizer)
    assert time.process_time() - started < 1


def test_who_waits_for_the_same_grammar_tries_it_no_more(tokenizer, monkeypatch):
    tried = []

    def slow(*_, **__):
        tried.append(1)
        time.sleep(0.3)
        return wire.TEXT, ""

    monkeypatch.setattr(grammar.limited, "run", slow)
    with ThreadPoolExecutor(4) as threads:
        one = {"type": "regex", "pattern": "the same"}
        assert all(threads.map(lambda _: compile_constraint(one, tokenizer), range(4)))
    assert len(tried) == 1
