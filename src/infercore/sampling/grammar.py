"""From what a caller gives as ``response_format`` to a grammar that llguidance has checked."""

from __future__ import annotations

import contextlib
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import attrs

from infercore.errors import GrammarError, InferCoreError, InvalidInputError
from infercore.limited import wire
from infercore.limited.process import LimitedProcess
from infercore.sampling.class_schema import schema_of_class
from infercore.sampling.gbnf_lark import lark_of
from infercore.sampling.schema_keywords import TYPES, simplified
from infercore.sampling.vocabulary import ll_tokenizer, llguidance
from infercore.values import checks
from infercore.values.handlers import is_a_handlers

if TYPE_CHECKING:
    from infercore.protocols.public import Tokenizer

MAX_CHARACTERS = 1_000_000  # of a grammar or schema
MAX_SECONDS = 5.0  # that compiling may take
MAX_STEP_ITEMS = 20_000  # of a parser for one mask: a fifth of a second
_MAX_TRIED = 4096
_REFUSED_FOR_S = 60.0  # then it is tried again: a crowded machine may have been the reason
_MAX_LINES, _MAX_LINE = 12, 300  # of an error of llguidance
limited = LimitedProcess()
"""A process of their own: no chat's template waits behind a grammar."""
_tried: set[int] = set()
_too_large: dict[int, tuple[str, float]] = {}  # why, and until when it is not tried again
_FIELD = "response_format"
_REQUIRED = {
    "json_schema": "schema",
    "json_object": None,
    "regex": "pattern",
    "choice": "choices",
    "lark": "grammar",
    "gbnf": "grammar",
    "structural_tag": "structures",
}
_STRUCTURE = {"begin", "schema", "end"}
_LABELS = {"name", "description", "strict"}
_SCHEMA_KEYWORDS = {
    "$ref", "$defs", "definitions", "properties", "required", "items", "prefixItems", "enum",
    "const", "anyOf", "allOf", "oneOf", "additionalProperties", "minimum", "maximum",
}  # fmt: skip


_REGEX_ERROR = re.compile(
    r"regex parse error:\n {4}(?P<shown>.*)\n {4}(?P<before> *)\^+\nerror: (?P<why>.*)"
)


@attrs.frozen
class Grammar:
    """A grammar in llguidance's form (``text``), and the caller's ``source`` for messages.

    ``schema`` is kept where it came from one. GBNF is put into that form when the vocabulary is
    known, as it may name tokens.
    """

    text: str
    source: str
    schema: Mapping[str, Any] | None = None
    gbnf: bool = False

    def matcher(self, tokenizer: Tokenizer) -> Any:
        """Return a new ``llguidance.LLMatcher``. Raises `GrammarError`, naming the place."""
        module = llguidance()
        if len(self.source) > MAX_CHARACTERS:
            self._refuse(f"it has {len(self.source)} characters; give at most {MAX_CHARACTERS}")
        text = self.text
        if self.gbnf:
            text = module.LLMatcher.grammar_from_lark(lark_of(self.source, tokenizer))
        self._try(text)
        limits = module.LLParserLimits(step_max_items=MAX_STEP_ITEMS)
        matcher = module.LLMatcher(ll_tokenizer(tokenizer), text, log_level=0, limits=limits)
        if matcher.is_error():
            self._refuse(str(matcher.get_error()))
        matcher.compute_bitmask()  # kept until it is asked for, in the step of a pool maybe
        if matcher.is_error():
            why = str(matcher.get_error()).split("\n<state>")[0]
            if "limit" in why:
                self._refuse_size(why)
            raise GrammarError(f"no text fits the grammar: {why}", source=self.source)
        return matcher

    def _try(self, text: str) -> None:
        """Let a process with limits compile it first, as nothing stops llguidance on its way."""
        if hash(text) in _tried:
            return
        with limited.turn():
            self._try_now(text)

    def _try_now(self, text: str) -> None:
        if hash(text) in _tried:  # by who had the turn before
            return
        why, until = _too_large.get(hash(text), ("", 0.0))
        if time.monotonic() < until:
            self._refuse_size(why)
        kind, why = limited.run("infercore.limited.grammars:verdict", text, seconds=MAX_SECONDS)
        if kind == wire.STOPPED:
            if len(_too_large) >= _MAX_TRIED:
                _too_large.clear()
            _too_large[hash(text)] = why, time.monotonic() + _REFUSED_FOR_S
            self._refuse_size(why)
        if kind != wire.TEXT:
            self._refuse(why)
        if len(_tried) >= _MAX_TRIED:
            _tried.clear()
        _tried.add(hash(text))

    def _refuse_size(self, why: str) -> NoReturn:
        raise GrammarError(
            f"the grammar is too large to compile: {why}; simplify it", source=self.source
        )

    def _refuse(self, error: str) -> NoReturn:
        raise GrammarError(self._explained(error), source=self.source)

    def _explained(self, error: str) -> str:
        if self.schema is not None:
            where = self._place(error)
            return f"the JSON schema is refused at {_shortened(where)}: {_shortened(error)}"
        if found := _REGEX_ERROR.search(error):  # three lines, the second of which has a mark
            where = f"column {len(found['before']) + 1} of {_shortened(found['shown'])}"
            return f"the regular expression is refused at {where}: {found['why']}"
        return f"the grammar is refused: {_shortened(_without_wrapping(error))}"

    def _place(self, error: str) -> str:
        """Return where in the schema an error sits; the whole of it where that takes too long."""
        work = "infercore.limited.grammars:place"
        kind, found = limited.run(work, json.dumps(self.schema), error, seconds=MAX_SECONDS)
        return found if kind == wire.TEXT else "#"


def grammar_of(response_format: Any) -> Grammar:
    """Return the grammar of ``response_format``; see `compile_constraint` for the forms.

    Raises `InvalidInputError` for none of them and `GrammarError` for a GBNF syntax error. The
    grammar itself is checked by `Grammar.matcher`.
    """
    if isinstance(response_format, type):
        return _from_schema(_class_schema(response_format))
    if not isinstance(response_format, Mapping):
        raise checks.refuse(_FIELD, response_format, _forms())
    if _is_schema(response_format):
        return _from_schema(response_format)
    return _from_typed(response_format)


def _forms() -> str:
    names = ", ".join(repr(name) for name in _REQUIRED)
    return f"a JSON schema, a mapping with a type of {names}, an attrs class or a pydantic model"


def _is_schema(value: Mapping[str, Any]) -> bool:
    kind = value.get("type")
    if isinstance(kind, str) and kind in _REQUIRED:
        return False
    if kind is None and not _REQUIRED.keys().isdisjoint(value):
        return False  # {"regex": ...} would be a schema that constrains nothing
    is_known = kind is None or isinstance(kind, list)
    is_known = is_known or (isinstance(kind, str) and kind in TYPES)
    return is_known or not _SCHEMA_KEYWORDS.isdisjoint(value)


def _class_schema(cls: type) -> Mapping[str, Any]:
    if attrs.has(cls):
        return schema_of_class(cls)
    base = getattr(sys.modules.get("pydantic"), "BaseModel", None)
    if base is not None and issubclass(cls, base):
        schema: Mapping[str, Any] = cls.model_json_schema()  # type: ignore[attr-defined]
        return schema
    raise checks.refuse(_FIELD, cls, _forms())


def _from_typed(value: Mapping[str, Any]) -> Grammar:
    kind = value.get("type")
    if kind is None:
        raise InvalidInputError(
            f"{_FIELD} names {sorted(_REQUIRED.keys() & value)} but has no type; give "
            '{"type": "regex", "pattern": ...} and the like',
            field=_FIELD,
            value=dict(value),
            allowed=_forms(),
        )
    if not isinstance(kind, str) or kind not in _REQUIRED:
        raise InvalidInputError(
            f"{_FIELD} has the unknown type {checks.shown(kind)}; "
            f"{checks.nearest(kind, _REQUIRED)}",
            field=_FIELD,
            value=kind,
            allowed=_forms(),
        )
    if kind == "json_schema" and "schema" not in value and "json_schema" in value:
        value = {"type": kind, **value["json_schema"]}  # the form of OpenAI's API
    content = _content(kind, value)
    if kind == "structural_tag":
        return _from_structures(content, value.get("triggers"))
    return _MAKERS[kind](content)


def _content(kind: str, value: Mapping[str, Any]) -> Any:
    required = _REQUIRED[kind]
    known = {"type"} | ({required} if required else set())
    known |= {"json_schema": _LABELS, "structural_tag": {"triggers"}}.get(kind, set())
    checks.check_options(_FIELD, value, known)
    if required is not None and required not in value:
        raise InvalidInputError(
            f"{_FIELD} of type {kind!r} needs {required!r}",
            field=_FIELD,
            value=dict(value),
            allowed=f"a mapping with {required!r}",
        )
    return value[required] if required else None


def _from_schema(schema: Any) -> Grammar:
    if not isinstance(schema, Mapping):
        raise checks.refuse(_FIELD, schema, "a JSON schema as a mapping")
    try:
        source = json.dumps(schema, allow_nan=False)
        plain = json.loads(source)
    except (TypeError, ValueError) as error:
        raise checks.refuse(_FIELD, schema, "a schema that JSON can hold") from error
    except RecursionError as error:
        raise GrammarError("the JSON schema is nested too deeply", source="") from error
    if len(source) > MAX_CHARACTERS:
        return Grammar("", source)
    with _malformed_typed(source):
        sound = simplified(plain, source)
        return Grammar(_schema_grammar(sound), source, sound)


@contextlib.contextmanager
def _malformed_typed(source: str) -> Iterator[None]:
    """Raise what a schema brings about whose keywords have values of other types."""
    try:
        yield
    except InferCoreError:
        raise
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        RecursionError,
        TypeError,
        ValueError,
    ) as e:
        if is_a_handlers(e):
            raise
        what = _shortened(str(e) or type(e).__name__)
        raise GrammarError(f"the JSON schema is malformed: {what}", source=source) from e


def _schema_grammar(schema: Mapping[str, Any]) -> str:
    matcher = llguidance().LLMatcher
    text: str = matcher.grammar_from_json_schema(dict(schema), {"whitespace_flexible": False})
    return text


def _from_object(_: None) -> Grammar:
    return _from_schema({"type": "object"})


def _from_regex(pattern: Any) -> Grammar:
    source = checks.check_text(_FIELD, pattern)
    return Grammar(llguidance().LLMatcher.grammar_from_regex(source), source)


def _from_lark(grammar: Any) -> Grammar:
    source = checks.check_text(_FIELD, grammar)
    return Grammar(llguidance().LLMatcher.grammar_from_lark(source), source)


def _from_gbnf(grammar: Any) -> Grammar:
    source = checks.check_text(_FIELD, grammar)
    return Grammar("", source, gbnf=True)


def _from_choices(choices: Any) -> Grammar:
    if isinstance(choices, str) or not isinstance(choices, (list, tuple)) or not choices:
        raise checks.refuse(_FIELD, choices, "a list of choices, at least one")
    texts = [checks.check_text(_FIELD, choice) for choice in choices]
    if sum(map(len, texts)) > MAX_CHARACTERS:
        raise GrammarError(
            f"the choices have more than {MAX_CHARACTERS} characters; give fewer", source=texts[0]
        )
    pattern = "|".join("".join(f"\\u{{{ord(char):x}}}" for char in text) for text in texts)
    grammar = llguidance().LLMatcher.grammar_from_regex(f"(?:{pattern})")
    return Grammar(grammar, json.dumps(texts))


def _from_structures(structures: Any, triggers: Any) -> Grammar:
    """Free text, in which a trigger begins one of ``structures``: text, JSON, text."""
    if not isinstance(structures, (list, tuple)) or not structures:
        raise checks.refuse("structures", structures, "a list of mappings, at least one")
    marks = None if triggers is None else checks.items("triggers", triggers, "a list of str")
    for mark in marks or ():
        checks.check_text("triggers", mark)
    tags = [_structure(one, marks) for one in structures]
    lark = llguidance().StructTag.to_grammar(tags, assume_special=False)
    return Grammar(llguidance().LLMatcher.grammar_from_lark(lark), lark)


def _structure(given: Any, triggers: list[str] | None) -> Any:
    if not isinstance(given, Mapping) or set(given) != _STRUCTURE:
        raise checks.refuse("structures", given, f"mappings of {', '.join(sorted(_STRUCTURE))}")
    begin = checks.check_text("begin", given["begin"])
    end = checks.check_text("end", given["end"])
    found = [begin] if triggers is None else [mark for mark in triggers if begin.startswith(mark)]
    if not begin or not found or not found[0]:
        raise checks.refuse("begin", begin, "text that one of the triggers begins")
    schema = _from_schema(given["schema"]).schema
    if schema is None:
        raise GrammarError("the JSON schema of a structure is too large", source=begin)
    plain = {"x-guidance": {"whitespace_flexible": False}, **schema}
    return llguidance().StructTag(trigger=found[0], begin=begin, grammar=plain, end=end)


def _shortened(text: str) -> str:
    """Return ``text`` without the middle of long lines: they quote the grammar."""
    half = _MAX_LINE // 2
    lines = text.splitlines()[:_MAX_LINES]
    return "\n".join(
        line if len(line) <= _MAX_LINE else f"{line[:half]} ... {line[-half:]}" for line in lines
    )


def _without_wrapping(error: str) -> str:
    """Return ``error`` without the lines of the grammar that llguidance wraps a regex in."""
    if "(in regex): " not in error:
        return error.strip()
    return error.split("(in regex): ", 1)[1].split("\n   1 | ", 1)[0].strip()


_MAKERS: dict[str, Callable[[Any], Grammar]] = {
    "json_schema": _from_schema,
    "json_object": _from_object,
    "regex": _from_regex,
    "choice": _from_choices,
    "lark": _from_lark,
    "gbnf": _from_gbnf,
}
