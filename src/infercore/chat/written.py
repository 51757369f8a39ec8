"""Arguments as models write them, JSON or Python, and what of that has one meaning only."""

from __future__ import annotations

import ast
import json
import math
import re
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_DEPTH = 100
"""How deep arguments may be nested."""

_MAX_CALL = 1_000_000  # characters of a call that Python's parser is given
_WORDS = {"true": True, "false": False, "null": None}
_LARGEST = sys.float_info.max


class AmbiguousError(ValueError):
    """The text has no meaning, or more than one."""


def from_json(text: str, *, forced: bool) -> dict[str, Any] | None:
    """Return the mapping that ``text`` stands for, None where it is none, or names a key twice.

    ``forced``: a grammar wrote the text, and grammars cannot keep keys apart; then the last counts.
    """
    pairs = None if forced else _once
    try:
        value = json.loads(text, parse_constant=_refuse, object_pairs_hook=pairs)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise AmbiguousError
    return found


def _refuse(name: str) -> Any:
    raise AmbiguousError(name)


_ARGUMENT = re.compile(r"(?:\(|, )(\w+)=")


def from_json_call(text: str) -> dict[str, Any] | None:
    """Return the keyword arguments of ``(a=1, b="x")`` whose values a grammar wrote as JSON."""
    decode = json.JSONDecoder(parse_constant=_refuse).raw_decode
    found: dict[str, Any] = {}
    at = 0
    try:
        while argument := _ARGUMENT.match(text, at):
            found[argument[1]], at = decode(text, argument.end())
    except (ValueError, RecursionError):
        return None
    return found if text[at:] in (")", "()") else None


def from_python(text: str) -> dict[str, Any] | None:
    """Return the keyword arguments of the call ``text``, None where it has others.

    Some templates write line breaks within quotes, which Python does not read.
    """
    found = _call(text.strip())
    return found if found is not None else _call(text.replace("\n", "\\n"))


def _call(source: str) -> dict[str, Any] | None:
    if len(source) > _MAX_CALL:
        return None
    try:
        call = ast.parse(source, mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        return _once([(_name(word), _literal(word.value)) for word in call.keywords])
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _name(word: ast.keyword) -> str:
    if word.arg is None:
        raise AmbiguousError("**")
    return word.arg


def _literal(node: ast.expr, depth: int = 0) -> Any:
    """Return the value of a literal of JSON's kinds, in Python's words or JSON's."""
    if depth > MAX_DEPTH:
        raise AmbiguousError
    if isinstance(node, ast.Name) and node.id in _WORDS:
        return _WORDS[node.id]
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_literal(item, depth + 1) for item in node.elts]
    if isinstance(node, ast.Dict):
        keys = [_key(key) for key in node.keys]
        return _once([(k, _literal(v, depth + 1)) for k, v in zip(keys, node.values, strict=True)])
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _literal(node.operand, MAX_DEPTH)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return -value
    if isinstance(node, ast.Constant) and isinstance(node.value, (str, int, float, type(None))):
        return node.value
    raise AmbiguousError


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise AmbiguousError


def plain(value: Any, *, forced: bool, depth: int = 0) -> Any:
    """Return ``value`` if it can be written as JSON in UTF-8, raise `AmbiguousError` if not.

    ``forced``: half a surrogate pair becomes U+FFFD, and a number beyond all the largest there is.
    """
    if depth > MAX_DEPTH:
        raise AmbiguousError
    if isinstance(value, dict):
        return {
            plain(key, forced=forced): plain(item, forced=forced, depth=depth + 1)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [plain(item, forced=forced, depth=depth + 1) for item in value]
    if isinstance(value, str):
        return _encodable(value, forced=forced)
    if isinstance(value, float) and not math.isfinite(value):
        if not forced or math.isnan(value):
            raise AmbiguousError
        return math.copysign(_LARGEST, value)
    return value


def _encodable(text: str, *, forced: bool) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        if not forced:
            raise AmbiguousError from None
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
