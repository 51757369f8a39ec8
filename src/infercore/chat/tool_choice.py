"""A grammar by which an answer is one call of a given tool, in the template's own form."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from infercore.chat.tool_format import HARMONY, JSON, NAMED, PYTHON, TAGGED
from infercore.errors import UnsupportedFeatureError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from infercore.chat.tool_format import ToolFormat
    from infercore.chat.tools import Tools
    from infercore.protocols.public import Tokenizer

_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_DEFINITIONS = ("$defs", "definitions")


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
    start = [
        writer.literal(before + form.section_open.text.lstrip()),
        "(" + " | ".join(f"call_{i}" for i in range(len(names))) + ")",
        writer.literal(form.section_close.text.rstrip()),
    ]
    text = "\n".join([f"start: {' '.join(filter(None, start))}", *rules])
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

    def call(self, name: str, schema: Mapping[str, Any]) -> str:
        form = self._form
        parts = (form.call_open.text.lstrip(), form.call_close.text.rstrip())
        opening, closing = map(self.literal, parts)
        return " ".join(filter(None, (opening, self._call(name, schema), closing)))

    def _json(self, name: str, schema: Mapping[str, Any]) -> str:
        form = self._form
        if form.name_key is None:
            before = f"{{{json.dumps(name)}: "
        else:
            keys = json.dumps(form.name_key), json.dumps(form.arguments_key)
            before = f"{{{keys[0]}: {json.dumps(name)}, {keys[1]}: "
        return f"{self.literal(before)} {_json_term(schema)} {self.literal('}')}"

    def _named(self, name: str, schema: Mapping[str, Any]) -> str:
        return f"{self.literal(name + self._form.after_name.text)} {_json_term(schema)}"

    def _harmony(self, name: str, schema: Mapping[str, Any]) -> str:
        before = f" to=functions.{name}<|channel|>commentary json<|message|>"
        return f"{self.literal(before)} {_json_term(schema)}"

    def _tagged(self, name: str, schema: Mapping[str, Any]) -> str:
        terms = [self.literal(name + self._form.after_name.text)]
        for key, kind, needed in _properties(schema):
            term = self._argument(key, kind)
            terms.append(term if needed else f"({term})?")
        return " ".join(terms)

    def _argument(self, key: str, kind: Mapping[str, Any]) -> str:
        form = self._form
        is_text = kind.get("type") == "string"
        mark = form.after_key if is_text else form.after_key_of_other
        value = self._text_value(key, kind) if is_text else _json_term(kind)
        before = self.literal(form.arg_open.text + key + mark.text)
        return f"{before} {value} {self.literal(form.arg_close.text)}"

    def _text_value(self, key: str, kind: Mapping[str, Any]) -> str:
        if "enum" in kind or "const" in kind:
            values = kind.get("enum", [kind.get("const")])
            return "(" + " | ".join(self.literal(str(value)) for value in values) + ")"
        bad = sorted(kind.keys() & {"pattern", "format", "minLength"})
        if bad:
            raise UnsupportedFeatureError(
                feature=f"tool_choice with {bad[0]!r}",
                hint=f"argument {key!r} is written without quotes here; use 'auto'",
            )
        first = self._form.arg_close.text.strip()[:1] or "<"
        length = f"{{0,{int(kind['maxLength'])}}}" if "maxLength" in kind else "*"
        escaped = f"\\{first}" if first in "]^\\-[/" else first
        return f"/[^{escaped}]{length}/"

    def _python(self, name: str, schema: Mapping[str, Any]) -> str:
        needed = [(key, kind) for key, kind, is_needed in _properties(schema) if is_needed]
        others = [(key, kind) for key, kind, is_needed in _properties(schema) if not is_needed]
        terms = [self.literal(f"{name}(")]
        for i, (key, kind) in enumerate(needed):
            comma = ", " if i else ""
            terms.append(f"{self.literal(f'{comma}{key}=')} {_json_term(kind)}")
        for key, kind in others if needed else ():
            terms.append(f"({self.literal(f', {key}=')} {_json_term(kind)})?")
        return " ".join([*terms, self.literal(")")])


def _quoted(data: bytes) -> str:
    return json.dumps(data.decode("utf-8", errors="replace"), ensure_ascii=False)


def _json_term(schema: Mapping[str, Any]) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": _SPACING}, ensure_ascii=False)


def _properties(schema: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any], bool]]:
    """Return each argument's name, schema (with the definitions it may refer to), and need."""
    shared = {key: schema[key] for key in _DEFINITIONS if key in schema}
    needed = set(schema.get("required", ()))
    rows = schema.get("properties", {}).items()
    return [(key, {**shared, **kind}, key in needed) for key, kind in rows]
