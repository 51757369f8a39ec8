"""Validators for the value types: each refuses with the field, the value and what is allowed."""

from __future__ import annotations

import difflib
import math
import operator
import os
import reprlib
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import attrs

from infercore.errors import InvalidInputError
from infercore.values.field_texts import TEXTS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

T = TypeVar("T")
Validator = "Callable[[Any, attrs.Attribute[Any], Any], None]"


class _Shown(reprlib.Repr):
    """Values as they are shown in errors: whole unless they are long."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdict = 16
        self.maxstring = self.maxother = self.maxlong = 200

    def repr1(self, x: Any, level: int) -> str:
        """Return what Python shows of ``x``, or of what kind it is: some have no text at all."""
        try:
            return super().repr1(x, level)
        except Exception:  # noqa: BLE001  (an integer of too many digits, or a caller's own class)
            return f"<{type(x).__name__} object>"


shown = _Shown().repr
"""The repr of a value, cut where it is long."""


def refuse(field: str, value: object, allowed: str) -> InvalidInputError:
    """Return the error for ``value`` of ``field``."""
    return InvalidInputError(
        f"{field}={shown(value)} is not allowed; give {allowed}",
        field=field,
        value=value,
        allowed=allowed,
    )


def _bounds(low: float | None, high: float | None) -> str:
    if low is not None and high is not None:
        return f" from {low} to {high}"
    if low is not None:
        return f" of at least {low}"
    return f" of at most {high}" if high is not None else ""


def integer(
    low: int | None = None, high: int | None = None, *, optional: bool = True
) -> Callable[[Any, attrs.Attribute[Any], Any], None]:
    """Accept an int (not a bool) in ``low..high``, and None where ``optional``."""
    allowed = f"an integer{_bounds(low, high)}" + (", or None" if optional else "")

    def check(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        if value is None and optional:
            return
        if not is_integer(value) or not _within(value, low, high):
            raise refuse(attribute.name, value, allowed)

    return check


def number(
    low: float | None = None,
    high: float | None = None,
    *,
    optional: bool = True,
    infinite: bool = False,
) -> Callable[[Any, attrs.Attribute[Any], Any], None]:
    """Accept a real number in ``low..high``; NaN never, infinity only where ``infinite``."""
    allowed = f"a number{_bounds(low, high)}" + (", or None" if optional else "")

    def check(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        if value is None and optional:
            return
        if not is_number(value) or not _fits_float(value):
            raise refuse(attribute.name, value, allowed)
        if math.isnan(value) or (math.isinf(value) and not infinite):
            raise refuse(attribute.name, value, allowed)
        if not _within(value, low, high):
            raise refuse(attribute.name, value, allowed)

    return check


def plain_numbers(_: type, fields: list[attrs.Attribute[Any]]) -> list[attrs.Attribute[Any]]:
    """Let the fields of a class hold int and float, whatever kind of number they are given.

    To be given to attrs as ``field_transformer``. What is equal then has one text and one digest;
    what is refused is told as it was given.
    """
    return [field if field.converter else _plain(field) for field in fields]


def _plain(field: attrs.Attribute[Any]) -> attrs.Attribute[Any]:
    kinds = {"int": (int, plain_int), "float": (float, _plain_float)}
    found = kinds.get(str(field.type).partition(" ")[0])
    if found is None:
        return field
    own, plain = found

    def hold(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        if value is not None and type(value) is not own:
            object.__setattr__(instance, attribute.name, plain(value))

    checked = [field.validator] if field.validator is not None else []
    return field.evolve(validator=attrs.validators.and_(*checked, hold))


def plain_int(value: Any) -> Any:
    """Return an integer of any kind as an int; anything else as it is."""
    return operator.index(value) if is_integer(value) else value


def _plain_float(value: Any) -> Any:
    return float(value) if is_number(value) and _fits_float(value) else value


_MOST_SECONDS = 1e9


def check_seconds(field: str, value: object) -> None:
    """Raise `InvalidInputError` unless ``value`` is a number of seconds above 0, or None."""
    if value is not None and not (is_number(value) and 0 < value <= _MOST_SECONDS):  # type: ignore[operator]
        raise refuse(field, value, "seconds above 0, at most 1e9, or None")


def check_wait(field: str, value: object) -> None:
    """Raise `InvalidInputError` unless ``value`` is a number of seconds, maybe 0, or None."""
    if value is not None and not (is_number(value) and 0 <= value <= _MOST_SECONDS):  # type: ignore[operator]
        raise refuse(field, value, "seconds of at least 0, at most 1e9, or None")


def seconds() -> Callable[[Any, attrs.Attribute[Any], Any], None]:
    """Accept what `check_seconds` does."""
    return lambda _, attribute, value: check_seconds(attribute.name, value)


def boolean(*, optional: bool = True) -> Callable[[Any, attrs.Attribute[Any], Any], None]:
    """Accept True and False, and None where ``optional``."""

    def check(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        if not (isinstance(value, bool) or (value is None and optional)):
            raise refuse(
                attribute.name, value, "True, False or None" if optional else "True or False"
            )

    return check


def text(*, optional: bool = False) -> Callable[[Any, attrs.Attribute[Any], Any], None]:
    """Accept a str that can be encoded as UTF-8 (no lone surrogates)."""

    def check(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        if value is None and optional:
            return
        check_text(attribute.name, value)

    return check


def one_of(
    *choices: object, optional: bool = True
) -> Callable[[Any, attrs.Attribute[Any], Any], None]:
    """Accept one of ``choices``, and None where ``optional``."""

    def check(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        if value is None and optional:
            return
        if not any(type(value) is type(choice) and value == choice for choice in choices):
            names = ", ".join(repr(choice) for choice in choices)
            raise refuse(attribute.name, value, f"one of {names}")

    return check


def content(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    """Check a message's content: a str, parts as mappings with a type, or None."""
    if isinstance(value, str):
        check_text(attribute.name, value)
    elif value is not None and not (
        isinstance(value, Sequence)
        and all(isinstance(part, Mapping) and isinstance(part.get("type"), str) for part in value)
    ):
        raise refuse(attribute.name, value, "a str, None, or parts: mappings with a type")


def is_integer(value: object) -> bool:
    """Return whether ``value`` is an integer of any kind (NumPy's too), but no bool."""
    if isinstance(value, bool):
        return False
    try:
        operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return False
    return True


def is_number(value: object) -> bool:
    """Return whether ``value`` is a real number of any kind, but no bool."""
    return is_integer(value) or isinstance(value, float) or type(value).__name__ == "float32"


def is_finite(value: object) -> bool:
    """Return whether ``value`` is a real number that a float can hold: no NaN, no infinity."""
    return is_number(value) and _fits_float(value) and math.isfinite(value)  # type: ignore[arg-type]


def _fits_float(value: Any) -> bool:
    try:
        float(value)
    except OverflowError:
        return False
    return True


def _within(value: Any, low: float | None, high: float | None) -> bool:
    return (low is None or value >= low) and (high is None or value <= high)


def items(field: str, value: Any, allowed: str) -> list[Any]:
    """Return what is in ``value`` as a list; `InvalidInputError` where it cannot be iterated."""
    if isinstance(value, (str, bytes)):
        raise refuse(field, value, allowed)
    try:
        return list(value)
    except TypeError as error:
        raise refuse(field, value, allowed) from error


def check_text(field: str, value: object) -> str:
    """Return ``value`` if it is a str that UTF-8 can hold, else raise `InvalidInputError`."""
    if not isinstance(value, str):
        raise refuse(field, value, "a str")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        shown = value[max(0, error.start - 10) : error.start + 10]
        raise InvalidInputError(
            f"{field} holds a lone surrogate at index {error.start} ({shown!r}), which UTF-8 "
            "cannot hold; decode the text with errors='replace' first",
            field=field,
            value=shown,
            allowed="text without lone surrogates",
        ) from error
    return value


def check_path(field: str, value: object) -> str:
    """Return ``value``, a str or `os.PathLike`, as a str that the system takes for a path.

    Raises `InvalidInputError` for anything else, for NUL, and for characters that the file
    system's encoding lacks.
    """
    path = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if not isinstance(path, str) or not path:
        raise refuse(field, value, "a path, as str or os.PathLike")
    try:
        encoded = os.fsencode(path)
    except UnicodeEncodeError as error:
        encoding = sys.getfilesystemencoding()
        raise refuse(field, value, f"a path that {encoding} can hold (see PYTHONUTF8)") from error
    if b"\0" in encoded:
        raise refuse(field, value, "a path without NUL characters")
    return path


_CLOSE = 0.6
"""From this share of common letters on, a name is a slip of another: "vllm" is none of llamacpp."""


def nearest(given: object, known: Iterable[str]) -> str:
    """Return a hint that names the closest of ``known``, or all of them where none is close."""
    names, name = sorted(known), given if isinstance(given, str) else shown(given)
    close = difflib.get_close_matches(name, names, n=1, cutoff=_CLOSE)
    close += [longer for longer in names if len(name) > 1 and longer.startswith(name)]
    if close:
        return f"did you mean {close[0]!r}?"
    return "known are: " + ", ".join(names) if names else "there are none"


def check_options(field: str, options: Mapping[str, object], known: Iterable[str]) -> None:
    """Refuse a key of ``options`` that is not in ``known``, naming the nearest one."""
    names = tuple(known)
    for key in options:
        if key not in names:
            raise InvalidInputError(
                f"unknown option {shown(key)} in {field}; {_home(key) or nearest(key, names)}",
                field=field,
                value=key,
                allowed=names,
            )


_HOMES = {
    "ModelConfig": "load_model",
    "ContextConfig": "new_session, new_context or open_session",
    "SessionOptions": "new_session or open_session",
    "PoolConfig": "new_pool or open_pool",
    "DecodeConfig": "decode, generate or chat",
    "SamplingConfig": "decode, generate or chat",
    "ChatRequest": "chat",
}


def _home(name: str) -> str:
    """Return where the field ``name`` of another config belongs, "" where there is none."""
    homes = (home for cls, home in _HOMES.items() if name in TEXTS[cls])
    return next((f"give it to {home}" for home in homes), "")


def build(cls: type[T], config: T | None, fields: Mapping[str, Any]) -> T:
    """Return ``config``, or a new one of ``cls``, with ``fields`` laid over it.

    Raises `InvalidInputError` for a field that ``cls`` does not have, naming the nearest one.
    """
    known = _names(cls)
    check_options(cls.__name__, fields, known)
    if config is None:
        return cls(**fields)
    if not isinstance(config, cls):
        raise refuse("config", config, f"a {cls.__name__}")
    return attrs.evolve(config, **fields) if fields else config  # type: ignore[misc]


def _names(cls: type) -> Sequence[str]:
    return tuple(attribute.name for attribute in attrs.fields(cls))


class _Frozen(dict[Any, Any]):
    """A mapping in a frozen value: it refuses changes, has a hash, can be copied and pickled."""

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("a value's mapping cannot be changed; make another with attrs.evolve")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self))  # values may have none

    def __reduce__(self) -> tuple[type[_Frozen], tuple[dict[Any, Any]]]:
        return _Frozen, (dict(self),)


def frozen_mapping(value: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return a read-only copy of ``value`` ({} for None)."""
    given = {} if value is None else value
    if not isinstance(given, Mapping):
        raise refuse("mapping", given, "a mapping, or None")
    return _Frozen(given)


def check_template(template: object) -> str:
    """Return a chat template that a caller gave; empty is none.

    Raises `InvalidInputError` for a text that shows no message, such as the name of a template.
    """
    text = check_text("chat_template", template)
    if text and "{{" not in text and "{%" not in text:
        raise refuse("chat_template", template, "the text of a Jinja template, not its name")
    return text
