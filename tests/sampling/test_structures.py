"""Free text in which a mark begins a structure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import infercore as ic
from infercore.sampling.constraints import compile_constraint

if TYPE_CHECKING:
    from infercore.sampling.constraints import Constraint

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}},
    "required": ["n"],
    "additionalProperties": False,
}
FORMAT = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<f=add>", "schema": SCHEMA, "end": "</f>"},
        {"begin": "<f=say>", "schema": {"enum": ["hi"]}, "end": "</f>"},
    ],
    "triggers": ["<f="],
}


def takes(constraint: Constraint, tokenizer: Any, text: str) -> bool:
    """Whether the constraint takes all of ``text`` and may end there."""
    constraint.reset()
    try:
        constraint.accept_all(tokenizer.encode(text, add_special=False, parse_special=False))
    except ic.InvalidInputError:
        return False
    return constraint.is_accepting


def test_text_is_free_until_a_trigger(model: Any) -> None:
    constraint = compile_constraint(FORMAT, model.tokenizer)
    assert constraint is not None
    for good in (
        "",
        "Any text, even {odd} <text>.",
        'So: <f=add>{"n":3}</f>',
        'A <f=add>{"n":-12}</f> and <f=say>"hi"</f> and more.',
    ):
        assert takes(constraint, model.tokenizer, good), good
    for bad in (
        "So: <f=",
        "So: <f=mul>",
        "So: <f=add>{}</f>",
        'So: <f=add>{"n":"x"}</f>',
        'So: <f=add>{"n":3}',
        'So: <f=say>"ho"</f>',
        'So: <f=add>{"n": 3, "m": 4}</f>',
    ):
        assert not takes(constraint, model.tokenizer, bad), bad


def test_a_begin_is_its_own_trigger(model: Any) -> None:
    plain = {"type": "structural_tag", "structures": FORMAT["structures"]}
    constraint = compile_constraint(plain, model.tokenizer)
    assert constraint is not None
    assert takes(constraint, model.tokenizer, "So: <f=mul>")
    assert not takes(constraint, model.tokenizer, "So: <f=add>x")
    assert takes(constraint, model.tokenizer, 'So: <f=add>{"n":3}</f>')


def test_a_decode_follows_it(model: Any) -> None:
    with model.new_session(n_ctx=256) as session:
        session.ensure_prefix("Once upon a time there was a baker named Mira")
        free = "".join(c.text for c in session.decode(max_tokens=12, temperature=0))
        word = free.split()[2]
        session.ensure_prefix("Once upon a time there was a baker named Mira")
        shape = {"begin": word, "schema": SCHEMA, "end": "!"}
        chunks = session.decode(
            max_tokens=40,
            temperature=0,
            response_format={"type": "structural_tag", "structures": [shape]},
        )
        text = "".join(chunk.text for chunk in chunks)
    before = free[: free.index(word)]
    assert text.startswith(f'{before}{word}{{"n":')


@pytest.mark.parametrize(
    "wrong",
    [
        {"structures": []},
        {"structures": "text"},
        {"structures": [{"begin": "<a>"}]},
        {"structures": [{"begin": "", "schema": {}, "end": ""}]},
        {"triggers": ["<g="]},
        {"triggers": [""]},
        {"triggers": [5]},
        {"trigger": ["<f="]},
    ],
)
def test_what_is_malformed_is_refused(model: Any, wrong: dict[str, Any]) -> None:
    with pytest.raises((ic.InvalidInputError, ic.GrammarError)):
        compile_constraint({**FORMAT, **wrong}, model.tokenizer)


def test_a_wrong_schema_is_a_grammar_error(model: Any) -> None:
    shape = {"begin": "<a>", "schema": {"type": "nonsense"}, "end": ""}
    with pytest.raises(ic.GrammarError):
        compile_constraint({"type": "structural_tag", "structures": [shape]}, model.tokenizer)
