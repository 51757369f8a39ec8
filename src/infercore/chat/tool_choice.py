"""A grammar by which an answer is one call of a given tool, in the template's own form."""

from __future__ import annotations

import json
import keyword
from typing import TYPE_CHECKING, Any

from infercore.chat.literal import Literal
from infercore.chat.notation import ITEM
from infercore.chat.tool_format import BRACED, HARMONY, JSON, NAMED, NESTED, PYTHON, TAGGED
from infercore.errors import UnsupportedFeatureError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from infercore.chat.tool_format import ToolFormat
    from infercore.chat.tools import Tools
    from infercore.protocols.public import Tokenizer

_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_DEFINITIONS = ("$defs", "definitions")
_WRITTEN = {  # what is honoured where arguments are written one by one, or says nothing
    *_DEFINITIONS, "type", "properties", "required", "additionalProperties", "title",
    "description", "examples", "default", "deprecated", "$schema", "$id", "$comment",
}  # fmt: skip


def call_grammar(
    form: ToolFormat | None, tools: Tools, names: Sequence[str], tokenizer: Tokenizer, before: str
) -> dict[str, Any]:
    """Return a ``response_format`` for ``before`` and one call of one of ``names``.

    Raises `UnsupportedFeatureError` where the template's form of calls is not known, or cannot
    hold what a tool's schema asks for.
    """
    if form is None:
        raise UnsupportedFeatureError(
            feature="tool_choice",
            hint="how this model's template writes calls cannot be read back; use 'auto' or 'none'",
        )
    writer = _Writer(form, tokenizer)
    rules = [f"call_{i}: {writer.call(name, tools.schema(name))}" for i, name in enumerate(names)]
    calls = " | ".join(f"call_{i}" for i in range(len(names)))
    start = " ".join(filter(None, (writer.literal(before), f"({calls})")))
    text = "\n".join([f"start: {start}", *rules])
    return {"type": "lark", "grammar": text}


class _Writer:
    """Writes the parts of a call as Lark, control tokens by their ids."""

    def __init__(self, form: ToolFormat, tokenizer: Tokenizer) -> None:
        self._form = form
        self._tokenizer = tokenizer
        self._call: Callable[[str, Mapping[str, Any]], str] = {
            JSON: self._json,
            NAMED: self._named,
            TAGGED: self._tagged,
            NESTED: self._nested,
            BRACED: self._braced,
            PYTHON: self._python,
            HARMONY: self._harmony,
        }[form.kind]

    def literal(self, text: str) -> str:
        """Return ``text`` as terms; the text of a control token becomes that token."""
        terms: list[str] = []
        plain = b""
        for token in self._tokenizer.encode(text, add_special=False) if text else ():
            if self._tokenizer.is_control(token):
                terms += [_quoted(plain)] if plain else []
                terms.append(f"<[{token}]>")
                plain = b""
            else:
                plain += self._tokenizer.token_bytes(token)
        if not terms:
            return _quoted(text.encode()) if text else ""
        return " ".join([*terms, _quoted(plain)] if plain else terms)

    def fixed(self, name: str, *parts: Literal | str) -> str:
        """Return what stands around a call of ``name`` as terms; an id is any that would do."""
        terms, text = [], ""
        for kind, value in _joined(parts):
            if kind == "id":
                terms += [self.literal(text), _ANY_ID]
                text = ""
            else:
                text += name if kind == "name" else value
        return " ".join(filter(None, (*terms, self.literal(text))))

    def call(self, name: str, schema: Mapping[str, Any]) -> str:
        form = self._form
        opening = Literal((*form.section_open.parts, *form.call_open.parts)).stripped(start=True)
        closing = Literal((*form.call_close.parts, *form.section_close.parts)).stripped(end=True)
        body = self._call(name, schema)
        terms = (self.fixed(name, opening), body, self.fixed(name, closing))
        return " ".join(filter(None, terms))

    def _json(self, name: str, schema: Mapping[str, Any]) -> str:
        form = self._form
        if form.name_key is None:
            before = f"{{{json.dumps(name)}: "
        else:
            keys = json.dumps(form.name_key), json.dumps(form.arguments_key)
            before = f"{{{keys[0]}: {json.dumps(name)}, {keys[1]}: "
        return f"{self.literal(before)} {_json_term(_object(schema))} {self.literal('}')}"

    def _named(self, name: str, schema: Mapping[str, Any]) -> str:
        return f"{self.fixed(name, name, self._form.after_name)} {_json_term(_object(schema))}"

    def _harmony(self, name: str, schema: Mapping[str, Any]) -> str:
        before = f" to=functions.{name}<|channel|>commentary json<|message|>"
        return f"{self.literal(before)} {_json_term(_object(schema))}"

    def _tagged(self, name: str, schema: Mapping[str, Any]) -> str:
        terms = [self.fixed(name, name, self._form.after_name)]
        for key, kind, needed in _properties(schema):
            term = self._argument(key, kind)
            terms.append(term if needed else f"({term})?")
        return " ".join(terms)

    def _argument(self, key: str, kind: Mapping[str, Any]) -> str:
        form = self._form
        is_text = kind.get("type") == "string"
        mark = form.after_key if is_text else form.after_key_of_other
        end = form.arg_close.text
        value = self._text_value(key, kind, end) if is_text else _json_term(kind)
        before = self.literal(form.arg_open.text + key + mark.text)
        return f"{before} {value} {self.literal(end)}"

    def _text_value(self, key: str, kind: Mapping[str, Any], end: str) -> str:
        """A text of ``kind`` that ``end`` follows and that does not hold its first character."""
        first = end.strip()[:1] or "<"
        if "enum" in kind or "const" in kind:
            values = kind["enum"] if "enum" in kind else [kind["const"]]
            texts = [value for value in values if isinstance(value, str) and first not in value]
            if not texts:
                raise _cannot(key, "enum")
            return "(" + " | ".join(_quoted(text.encode()) for text in texts) + ")"
        bad = sorted(kind.keys() - _WRITTEN - {"maxLength", "minLength"})
        if bad:
            raise _cannot(key, bad[0])
        least, most = int(kind.get("minLength", 0)), kind.get("maxLength")
        length = (
            "*" if not least and most is None else f"{{{least},{'' if most is None else most}}}"
        )
        escaped = f"\\{first}" if first in "]^\\-[/" else first
        return f"/[^{escaped}]{length}/"

    # -- values within values: each kind by its own rules --------------------------------------

    def _nested(self, name: str, schema: Mapping[str, Any]) -> str:
        terms = [self.fixed(name, name, self._form.after_name)]
        return " ".join([*terms, *self._elements(schema)])

    def _elements(self, schema: Mapping[str, Any]) -> list[str]:
        rows = [(self._element(key, kind), needed) for key, kind, needed in _properties(schema)]
        return [term if needed else f"({term})?" for term, needed in rows]

    def _element(self, key: str, kind: Mapping[str, Any]) -> str:
        form = self._form
        opening = self.literal(form.arg_open.text + key + form.after_key.text)
        closing = self.literal(form.arg_close.text + key + form.after_key.text)
        what = _single_type(key, kind)
        if what == "object":
            value = " ".join(self._elements(kind))
        elif what == "array":
            item = self._element(ITEM, _items(key, kind))
            value = f"({item}){_repeated(kind)}"
        elif what == "string":
            value = self._text_value(key, kind, form.arg_close.text)
        else:
            value = _json_term(kind)
        return " ".join(filter(None, (opening, value, closing)))

    def _braced(self, name: str, schema: Mapping[str, Any]) -> str:
        return f"{self.literal(name)} {self._braces(schema)}"

    def _braces(self, schema: Mapping[str, Any]) -> str:
        rows = sorted(
            _properties(schema), key=lambda row: not row[2]
        )  # those that are needed first
        needed = [
            f"{self.literal(f'{k}:')} {self._braced_value(k, v)}" for k, v, must in rows if must
        ]
        others = [
            f"{self.literal(f'{k}:')} {self._braced_value(k, v)}" for k, v, must in rows if not must
        ]
        terms = [term for i, one in enumerate(needed) for term in ([_COMMA] if i else []) + [one]]
        terms += [f"({_COMMA} {one})?" for one in others] if needed else _some_of(others, _COMMA)
        return " ".join(['"{"', *terms, '"}"'])

    def _braced_value(self, key: str, kind: Mapping[str, Any]) -> str:
        what, quote = _single_type(key, kind), self._form.quote
        if what == "object":
            return self._braces(kind)
        if what == "array":
            item = self._braced_value(key, _items(key, kind))
            least, most = _limits(kind)
            if most == 0:
                return '"[" "]"'
            more = _repetition(max(0, least - 1), None if most is None else most - 1)
            inside = f"{item} ({_COMMA} {item}){more}"
            return f'"[" {inside if least else f"({inside})?"} "]"'
        if what != "string":
            return _json_term(kind)
        marks = self.literal(quote)
        return f"{marks} {self._text_value(key, kind, quote)} {marks}"

    def _python(self, name: str, schema: Mapping[str, Any]) -> str:
        needed = [(key, kind) for key, kind, is_needed in _properties(schema) if is_needed]
        others = [(key, kind) for key, kind, is_needed in _properties(schema) if not is_needed]
        for key, _, _ in _properties(schema):
            if not key.isidentifier() or keyword.iskeyword(key):
                raise _cannot(key, "a name that Python's calls cannot have")
        terms = [self.literal(f"{name}(")]
        for i, (key, kind) in enumerate(needed):
            comma = ", " if i else ""
            terms.append(f"{self.literal(f'{comma}{key}=')} {_json_term(kind)}")
        comma = self.literal(", ")
        rows = [f"{self.literal(f'{key}=')} {_json_term(kind)}" for key, kind in others]
        terms += [f"({comma} {row})?" for row in rows] if needed else _some_of(rows, comma)
        return " ".join([*terms, self.literal(")")])


_COMMA = '","'
_ANY_ID = "/[a-z0-9]{9}/"
"""An id that a call may have: the reader gives each call one of its own."""


def _joined(parts: Sequence[Literal | str]) -> Iterator[tuple[str, str]]:
    for part in parts:
        yield from (("text", part),) if isinstance(part, str) else part.parts


def _some_of(terms: Sequence[str], comma: str) -> list[str]:
    """Return a term for any of ``terms`` in their order, with ``comma`` between two, or none."""
    chains = [
        " ".join([term, *(f"({comma} {other})?" for other in terms[i + 1 :])])
        for i, term in enumerate(terms)
    ]
    return [f"({' | '.join(chains)})?"] if chains else []


def _cannot(key: str, what: str) -> UnsupportedFeatureError:
    return UnsupportedFeatureError(
        feature=f"tool_choice with {what!r}",
        hint=f"{key!r} is written without quotes here; use tool_choice='auto'",
    )


def _single_type(key: str, kind: Mapping[str, Any]) -> str:
    """The one type that a value has. Raises `UnsupportedFeatureError` where there are several."""
    what = kind.get("type")
    if not isinstance(what, str):
        raise _cannot(key, "several types")
    return what


def _items(key: str, kind: Mapping[str, Any]) -> Mapping[str, Any]:
    bad = sorted(kind.keys() - _WRITTEN - {"items", "minItems", "maxItems"})
    if bad or not isinstance(kind.get("items"), dict):
        raise _cannot(key, bad[0] if bad else "items of any kind")
    items: Mapping[str, Any] = kind["items"]
    return items


def _limits(kind: Mapping[str, Any]) -> tuple[int, int | None]:
    most = kind.get("maxItems")
    return int(kind.get("minItems", 0)), None if most is None else int(most)


def _repetition(least: int, most: int | None) -> str:
    if most is None:
        return "*" if not least else f"{{{least},}}"
    return f"{{{least},{most}}}"


def _repeated(kind: Mapping[str, Any]) -> str:
    return _repetition(*_limits(kind))


def _quoted(data: bytes) -> str:
    return json.dumps(data.decode("utf-8", errors="replace"), ensure_ascii=False)


def _object(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema of arguments, which are an object also where it does not say so."""
    return {**schema, "type": "object"}


def _json_term(schema: Mapping[str, Any]) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": _SPACING}, ensure_ascii=False)


def _properties(schema: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any], bool]]:
    """Return each argument's name, schema (with the definitions it may refer to), and need.

    Raises `UnsupportedFeatureError` where more is asked of them than their own schemas say.
    """
    shared = {key: schema[key] for key in _DEFINITIONS if key in schema}
    needed = set(schema.get("required", ()))
    rows = schema.get("properties", {})
    bad = sorted(schema.keys() - _WRITTEN) or sorted(needed - rows.keys())
    if bad:
        raise _cannot("the arguments", bad[0])
    given = [(key, {} if kind is True else kind) for key, kind in rows.items() if kind is not False]
    return [(key, {**shared, **kind}, key in needed) for key, kind in given]
