"""Constrained text: always what the format asks for, on every engine and after every end."""

from __future__ import annotations

import json
import os
import re
from typing import TYPE_CHECKING, Any, Literal

import attrs
import jsonschema
import numpy as np
import pytest

import infercore as ic
from infercore.sampling import compile_constraint
from schemas import SCHEMAS, closed

if TYPE_CHECKING:
    from collections.abc import Iterator

PROMPT = "Once upon a time there was a baker named Mira"
N_SEEDS = int(os.environ.get("INFERCORE_CONSTRAINT_SEEDS", "4"))
N_TOKENS = 60
N_MANY = 180
FORCING = closed(
    {
        "the name of the baker": {"enum": ["Mira", "Tom"]},
        "whether the bread is ready": {"type": "boolean"},
    }
)


class Counting:
    """Counts the engine calls of a context, which goes on working."""

    def __init__(self, context: Any, patch: pytest.MonkeyPatch) -> None:
        self.n_calls = self.n_tokens = 0
        decode, decode_one = context.decode, context.decode_one

        def counted(tokens: Any, **fields: Any) -> Any:
            self.n_calls, self.n_tokens = self.n_calls + 1, self.n_tokens + len(tokens)
            return decode(tokens, **fields)

        def counted_one(token: int, **fields: Any) -> Any:
            self.n_calls, self.n_tokens = self.n_calls + 1, self.n_tokens + 1
            return decode_one(token, **fields)

        patch.setattr(type(context), "decode", lambda _, *a, **k: counted(*a, **k))
        patch.setattr(type(context), "decode_one", lambda _, *a, **k: counted_one(*a, **k))


@pytest.fixture(scope="module")
def warm(model: Any, exact: dict[str, Any]) -> Iterator[Any]:
    """Return a session that the tests of many seeds share: opening one costs more than a run."""
    with model.new_session(n_ctx=512, **exact) as session:
        yield session


def run(session: Any, response_format: Any, prompt: str = PROMPT, **decode: Any) -> Any:
    """Return text, tokens and last chunk of a constrained decode."""
    session.ensure_prefix(prompt)
    fields = {"max_tokens": N_TOKENS, "temperature": 1.0, **decode}
    chunks = list(session.decode(response_format=response_format, **fields))
    tokens = [token for chunk in chunks for token in chunk.tokens]
    return "".join(chunk.text for chunk in chunks), tokens, chunks[-1]


def check_prefix(model: Any, response_format: Any, tokens: list[int]) -> None:
    """A fresh constraint takes all of ``tokens``, and there is a way on."""
    constraint = compile_constraint(response_format, model.tokenizer)
    constraint.accept_all(tokens)
    assert constraint.allowed().any()


# --- JSON schemas -------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_output_is_valid_or_a_prefix(warm: Any, name: str) -> None:
    schema = SCHEMAS[name]
    validator = jsonschema.Draft202012Validator(
        schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    ended = 0
    for seed in range(N_SEEDS):
        budget = N_TOKENS if seed % 2 else N_MANY
        text, tokens, last = run(warm, schema, seed=seed, max_tokens=budget)
        if last.finish_reason == "eos":
            validator.validate(json.loads(text))
            ended += 1
        else:
            assert (last.finish_reason, len(tokens)) == ("length", budget)
            check_prefix(warm.model, schema, tokens)
    counts = f"{ended} valid, {N_SEEDS - ended} valid prefixes"
    assert ended, "a long budget suffices now and then"
    print(f"{warm.model.backend} {name}: {counts}")  # noqa: T201  (shown with -rP)


@pytest.mark.parametrize("name", ["nested", "times", "unicode", "chain"])
def test_every_budget_leaves_a_valid_prefix(warm: Any, name: str) -> None:
    schema = SCHEMAS[name]
    _, whole, _ = run(warm, schema, seed=2, temperature=0)
    for budget in range(1, 16):
        _, tokens, last = run(warm, schema, temperature=0, max_tokens=budget)
        assert tokens == whole[:budget]
        assert last.usage.completion_tokens == len(tokens)
        check_prefix(warm.model, schema, tokens)


@attrs.frozen
class Loaf:
    kind: Literal["rye", "wheat"]
    slices: int
    sold: bool = False


def test_an_attrs_class_gives_its_instances(warm: Any) -> None:
    for seed in range(N_SEEDS):
        text, _, last = run(warm, Loaf, seed=seed, max_tokens=200)
        if last.finish_reason == "eos":
            loaf = Loaf(**json.loads(text))
            assert loaf.kind in {"rye", "wheat"}
            assert isinstance(loaf.slices, int)


# --- the other forms ----------------------------------------------------------------------

FORMS = [
    ({"type": "regex", "pattern": "(ab|c)d{2,4}[^x]?"}, "(ab|c)d{2,4}[^x]?"),
    ({"type": "regex", "pattern": "[\u00e4\u00f6\u65e5]{3}!"}, "[\u00e4\u00f6\u65e5]{3}!"),
    (
        {"type": "choice", "choices": ["Mira", "the \u00e4rger", 'a "b"\n']},
        'Mira|the \u00e4rger|a "b"\n',
    ),
    ({"type": "lark", "grammar": 'start: "x" y+\ny: /[0-9]/ | "-"'}, "x[0-9-]+"),
    ({"type": "gbnf", "grammar": 'root ::= "a" b\nb ::= [0-9] | "(" b ")"'}, r"a\(*[0-9]\)*"),
]


@pytest.mark.parametrize(("response_format", "pattern"), FORMS)
def test_the_other_forms(warm: Any, response_format: Any, pattern: str) -> None:
    ended = 0
    for seed in range(6):
        text, tokens, last = run(warm, response_format, seed=seed, temperature=1.2)
        if last.finish_reason == "eos":
            assert re.fullmatch(pattern, text, re.DOTALL), text
            ended += 1
        check_prefix(warm.model, response_format, tokens)
    assert ended


def test_a_bad_format_is_refused_before_anything_changes(session: Any) -> None:
    session.ensure_prefix(PROMPT)
    before, held = session.explain_context(), list(session.context.tokens())
    bad = [
        ({"type": "object", "properties": {"a": {"items": {"minLength": -1}}}}, "#/properties/a"),
        ({"anyOf": [{}, {"uniqueItems": True}]}, "#/anyOf/1"),
        ({"type": "string", "pattern": "("}, "unclosed group"),
        ({"type": "regex", "pattern": "a(b"}, "unclosed group"),
        ({"type": "lark", "grammar": "start: foo\n"}, "unknown name"),
        ({"type": "gbnf", "grammar": 'root ::= "a'}, "line 1"),
    ]
    for response_format, place in bad:
        with pytest.raises(ic.GrammarError, match=place) as caught:
            session.decode(response_format=response_format)
        assert isinstance(caught.value.source, str)
    with pytest.raises(ic.InvalidInputError):
        session.decode(response_format={"type": "choise", "choices": ["a"]})
    assert session.explain_context() == before
    assert list(session.context.tokens()) == held
    assert run(session, {"type": "choice", "choices": ["x"]})[0] == "x"


# --- forced tokens ------------------------------------------------------------------------


def test_forced_tokens_cost_no_call_of_their_own(
    session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    session.ensure_prefix(PROMPT)
    counting = Counting(session.context, monkeypatch)
    chunks = list(session.decode(response_format=FORCING, temperature=0, max_tokens=100))
    monkeypatch.undo()
    text = "".join(chunk.text for chunk in chunks)
    n_tokens = chunks[-1].usage.completion_tokens
    assert jsonschema.validate(json.loads(text), FORCING) is None
    assert counting.n_calls < n_tokens / 2, f"{counting.n_calls} calls for {n_tokens} tokens"
    report = session.explain_context()
    assert report.resident_tokens == report.prefix_tokens + n_tokens
    start = report.prefix_tokens
    assert session.model.tokenizer.decode(session.context.tokens()[start:]) == text


def test_forced_tokens_are_those_that_would_be_sampled(session: Any) -> None:
    for schema in (FORCING, closed({"a": {"const": "the little baker"}, "b": {"const": [1, 2]}})):
        text, tokens, _ = run(session, schema, temperature=0)
        slow, one_by_one, last = run(session, schema, temperature=0, logprobs=0)
        assert (text, tokens) == (slow, one_by_one)
        assert last.finish_reason == "eos"


def test_bias_processors_and_stop_tokens_hold_for_forced_tokens(session: Any) -> None:
    schema = closed({"kind": {"const": "baker"}})
    text, tokens, _ = run(session, schema, temperature=0)
    barred = max(tokens, key=lambda token: len(session.model.tokenizer.token_bytes(token)))
    with pytest.raises(ic.InvalidStateError, match="together forbid every token"):
        run(session, schema, temperature=0, logit_bias={barred: -np.inf})
    report = session.explain_context()
    held = session.context.tokens()[report.prefix_tokens : report.resident_tokens]
    assert held == tokens[: tokens.index(barred)]
    some, before, last = run(session, schema, temperature=0, stop_tokens=[barred])
    assert (before, last.finish_reason) == (tokens[: tokens.index(barred)], "stop")
    assert text.startswith(some)

    class Seen:
        n_rows = 0

        def apply(self, row: np.ndarray) -> np.ndarray:
            self.n_rows += 1
            return row

    seen = Seen()
    _, tokens, last = run(session, schema, temperature=0, processors=[seen])
    assert last.finish_reason == "eos"
    assert seen.n_rows == len(tokens) + 1


def test_the_window_ends_forced_tokens_too(new_session: Any) -> None:
    n_prompt = new_session().ensure_prefix(PROMPT).prefix_tokens
    session = new_session(n_ctx=n_prompt + 12)
    text, tokens, last = run(session, FORCING, temperature=0, max_tokens=None)
    assert last.finish_reason == "context"
    assert session.explain_context().resident_tokens == n_prompt + 12 == n_prompt + len(tokens)
    check_prefix(session.model, FORCING, tokens)
    assert text


# --- with everything else -----------------------------------------------------------------


def test_a_stop_string_cuts_constrained_text(session: Any) -> None:
    whole, _, _ = run(session, FORCING, temperature=0)
    for stop in ('":"', "bread", '"whe', "}"):
        text, _, last = run(session, FORCING, temperature=0, stop=[stop])
        assert (text, last.finish_reason) == (whole[: whole.index(stop)], "stop")
        report = session.explain_context()
        assert session.context.n_past() >= report.resident_tokens
    assert run(session, FORCING, temperature=0)[0] == whole


@pytest.mark.parametrize("how", ["cancel", "close", "drop"])
def test_a_decode_that_is_ended_in_the_middle(session: Any, how: str) -> None:
    whole, tokens, _ = run(session, FORCING, temperature=0)
    for n in (1, 2, 3, 5, 9):
        session.ensure_prefix(PROMPT)
        stream = session.decode(response_format=FORCING, temperature=0)
        chunks = [next(stream) for _ in range(n)]
        if how == "cancel":
            session.cancel()
            chunks += list(stream)
            assert chunks[-1].finish_reason == "cancelled"
        elif how == "close":
            stream.close()
        del stream
        shown = "".join(chunk.text for chunk in chunks)
        assert whole.startswith(shown)
        report = session.explain_context()
        held = session.context.tokens()[report.prefix_tokens : report.resident_tokens]
        assert held == tokens[: len(held)]
        assert session.model.tokenizer.decode(held).startswith(shown)
    assert run(session, FORCING, temperature=0)[0] == whole


def test_turn_after_turn_each_constraint_begins_anew(session: Any) -> None:
    session.ensure_prefix(PROMPT)
    spoken = ""
    for choice in ("yes", "no", "yes"):
        session.prefill_suffix(ic.SuffixInput(text=" Is it so? ", mode="append"))
        form = {"type": "choice", "choices": [choice]}
        spoken += "".join(c.text for c in session.decode(response_format=form, max_tokens=9))
    assert spoken == "yesnoyes"
    form = {"type": "regex", "pattern": "[a-z]{4}"}
    first = list(session.decode(response_format=form, max_tokens=20, temperature=0))
    second = list(session.decode(response_format=form, max_tokens=20, temperature=0))
    for chunks in (first, second):
        assert re.fullmatch("[a-z]{4}", "".join(chunk.text for chunk in chunks))
    free = list(session.decode(max_tokens=5, temperature=0))
    assert sum(len(chunk.tokens) for chunk in free) > 0


@pytest.mark.parametrize("fields", [{"temperature": 0}, {"temperature": 1.0, "seed": 3}])
@pytest.mark.parametrize("name", ["nested", "chain", "list", "any text"])
def test_guessing_ahead_within_a_constraint(warm: Any, name: str, fields: Any) -> None:
    session = warm
    schema = SCHEMAS[name]
    prompt = PROMPT + ' {"v":1,"next":{"v":1,"next":{"v":1,"next":'
    plain, tokens, last = run(session, schema, prompt, **fields)
    drafts = (
        ic.SpeculativeConfig(n_draft=5),
        ic.SpeculativeConfig(kind="draft_model", draft_model=warm.model, n_draft=4),
    )
    for speculative in drafts:
        guessed, ahead, end = run(session, schema, prompt, speculative=speculative, **fields)
        assert (guessed, ahead) == (plain, tokens)
        assert end.finish_reason == last.finish_reason
        report = session.explain_context()
        held = session.context.tokens()[report.prefix_tokens : report.resident_tokens]
        assert held == tokens


def test_ignore_eos_leaves_no_token_at_the_end_and_says_so(session: Any) -> None:
    session.ensure_prefix(PROMPT)
    form = {"type": "choice", "choices": ["x"]}
    with pytest.raises(ic.InvalidStateError, match="constraint is finished"):
        list(session.decode(response_format=form, ignore_eos=True, max_tokens=5))
    assert run(session, form)[0] == "x"
