"""Text that must keep to a form."""

from __future__ import annotations

import importlib.util
import json
import re
from typing import TYPE_CHECKING, Any

from infercore.conformance.expect import equal, raises, that
from infercore.conformance.law import law
from infercore.conformance.rig import generated, joined
from infercore.errors import GrammarError, InvalidInputError, UnsupportedFeatureError

if TYPE_CHECKING:
    from infercore.conformance.rig import Rig

CHOICES = ("yes", "no", "perhaps")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Mira", "Anton"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def _session(rig: Rig) -> tuple[Any, str]:
    if importlib.util.find_spec("llguidance") is None:
        rig.leave("llguidance is not installed")
    session, text = rig.session(), rig.passage(6)
    session.ensure_prefix(text)
    return session, text


def _constrained(session: Any, form: Any, **fields: Any) -> list[Any]:
    asked = {"max_tokens": 60, "temperature": 1.5, "response_format": form, **fields}
    return list(session.decode(**asked))


@law("CON-1", tier="session")
def check_choice(rig: Rig) -> None:
    """A choice gives one of the choices and then ends, whatever the seed."""
    session, text = _session(rig)
    for seed in range(6):
        session.ensure_prefix(text)
        chunks = _constrained(session, {"type": "choice", "choices": list(CHOICES)}, seed=seed)
        that(joined(chunks) in CHOICES, f"{joined(chunks)!r} is none of the choices")
        equal(chunks[-1].finish_reason, "eos", "finish_reason")


@law("CON-2", tier="session")
def check_regex(rig: Rig) -> None:
    """A regular expression matches the whole text."""
    session, text = _session(rig)
    pattern = "[a-c]{3}-[0-9]{2}"
    for seed in range(4):
        session.ensure_prefix(text)
        found = joined(_constrained(session, {"type": "regex", "pattern": pattern}, seed=seed))
        that(re.fullmatch(pattern, found), f"{found!r} does not match {pattern}")


@law("CON-3", tier="session")
def check_json_schema(rig: Rig) -> None:
    """A JSON schema gives JSON that conforms to it."""
    session, text = _session(rig)
    for seed in range(3):
        session.ensure_prefix(text)
        value = json.loads(joined(_constrained(session, SCHEMA, seed=seed)))
        equal(set(value), {"name", "age"}, "keys")
        that(value["name"] in ("Mira", "Anton"), f"the name {value['name']!r}")
        that(0 <= value["age"] <= 99, f"the age {value['age']!r}")  # noqa: PLR2004


@law("CON-4", tier="session")
def check_bad_grammar(rig: Rig) -> None:
    """A wrong schema or pattern raises GrammarError before anything is decoded."""
    session, _ = _session(rig)
    before = session.explain_context()
    for form in ({"type": "regex", "pattern": "("}, {"type": "lark", "grammar": "start: ("}):
        raises(GrammarError, lambda f=form: _constrained(session, f), f"response_format {form}")
    raises(InvalidInputError, lambda: _constrained(session, 5), "response_format 5")
    equal(session.explain_context(), before, "the report afterwards")


@law("CON-5", tier="session")
def check_constraint_starts_anew(rig: Rig) -> None:
    """Each decode starts its constraint afresh, and the next one without it is free."""
    session, text = _session(rig)
    form = {"type": "choice", "choices": list(CHOICES)}
    for _ in range(2):
        that(joined(_constrained(session, form, seed=1)) in CHOICES, "a second decode")
    session.ensure_prefix(text)
    free = generated(list(session.decode(max_tokens=6, temperature=0, ignore_eos=True)))
    rig.follows(rig.tokenizer.encode(text), free, "a decode without constraint")


@law("CON-6", tier="session")
def check_constraint_is_never_dropped(rig: Rig) -> None:
    """A sampler that cannot keep a constraint refuses it."""
    session, _ = _session(rig)
    form = {"type": "choice", "choices": list(CHOICES)}
    raises(
        UnsupportedFeatureError,
        lambda: _constrained(session, form, implementation="native"),
        "a constraint for the engine's own sampler",
    )


@law("CON-7", tier="session")
def check_constraint_at_temperature_zero(rig: Rig) -> None:
    """At temperature 0 the constrained text is the same each time, and keeps its form."""
    session, text = _session(rig)
    found = set()
    for seed in (1, 2):
        session.ensure_prefix(text)
        form = {"type": "regex", "pattern": "[0-9]{4}"}
        found.add(joined(_constrained(session, form, temperature=0, seed=seed)))
    equal(len(found), 1, f"different texts among {found}")
    that(re.fullmatch("[0-9]{4}", found.pop()), "the text does not match")
