"""Frames between a program and its worker: JSON with bytes beside it, and nothing that is code.

A worker may be corrupt, so of what it sends only known value classes are built, through their own
checks, and a frame that is not well formed is a `FrameError`.
"""

from __future__ import annotations

import builtins
import json
import os
import struct
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from infercore import errors
from infercore.errors import InferCoreError, InvalidInputError, UnsupportedFeatureError
from infercore.sampling.class_schema import schema_of_class
from infercore.values import config, info, manifest, pool, session

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_HEAD = struct.Struct("<II")
_SIZE = struct.Struct("<Q")
_SHORT = (1 << 32) - 1
"""In place of the number of parts: bytes of a form of their own follow."""
_NEXT = struct.Struct("<IIQQ?")
_NEXT_BODY = struct.Struct("<QQ?")
_CHUNK = struct.Struct("<IIQHHB16sd")
_CHUNK_BODY = struct.Struct("<QHHB16sd")
MARK = _HEAD.pack(0, _SHORT)
"""A frame of nothing."""
_MOST_JSON = 1 << 30
_MOST_PARTS = 1 << 16
_MOST_BYTES = 1 << 36
_MOST_DEPTH = 200
_MOST_DIGITS = 4000
_ONE_READ = 1 << 18
_PLAIN = (str, int, float, bool, type(None))
_KINDS = "biuf"
_CLASSES: dict[str, type] = {
    name: found
    for module in (config, info, manifest, pool, session)
    for name, found in vars(module).items()
    if isinstance(found, type) and attrs.has(found) and not name.startswith("_")
}


class FrameError(Exception):
    """What was read is no frame of ours."""


class _Packer:
    """Makes a value plain; ``loose`` writes what cannot cross as its text, else it is refused."""

    def __init__(self, *, loose: bool) -> None:
        self.parts: list[bytes] = []
        self._loose = loose
        self._depth = 0

    def plain(self, value: Any, name: str) -> Any:
        if self._depth >= _MOST_DEPTH:
            raise _too_large(name, f"a value nested more than {_MOST_DEPTH} deep")
        self._depth += 1
        try:
            return self._plain(value, name)
        finally:
            self._depth -= 1

    def _plain(self, value: Any, name: str) -> Any:  # noqa: C901, PLR0911, PLR0912  (a case a kind)
        kind = type(value)
        if kind is int and abs(value).bit_length() > 3 * _MOST_DIGITS:
            raise _too_large(name, "an integer of thousands of digits")
        if kind in _PLAIN:
            return value
        if kind is list or kind is tuple:
            items = [self.plain(item, name) for item in value]
            return {"$l": items} if kind is list else {"$t": items}
        if isinstance(value, (range, deque)):
            return {"$l": [self.plain(item, name) for item in value]}
        if isinstance(value, config.KVType):
            return {"$k": str(value)}
        if isinstance(value, (bytes, bytearray, memoryview)):
            self.parts.append(bytes(value))
            return {"$b": len(self.parts) - 1}
        if isinstance(value, Mapping):
            return {"$d": [[self.plain(k, name), self.plain(v, name)] for k, v in value.items()]}
        if isinstance(value, np.generic) and value.dtype.kind in _KINDS:
            return value.item()
        if isinstance(value, np.ndarray) and value.dtype.kind in _KINDS:
            return self._array(value)
        if isinstance(value, BaseException):
            return self._error(value)
        if _CLASSES.get(kind.__name__) is kind:
            return {"$v": kind.__name__, "f": self._fields(value)}
        if isinstance(value, os.PathLike):
            return os.fspath(value)
        if name == "response_format" and isinstance(value, type) and attrs.has(value):
            return self.plain(schema_of_class(value), name)
        if isinstance(value, (str, int, float)):  # of a class of its own, such as an enum
            base = next(b for b in (bool, int, float, str) if isinstance(value, b))
            return base(value)
        if self._loose:
            return str(value)
        raise UnsupportedFeatureError(
            feature=name,
            hint=f"a {kind.__name__} cannot be handed to the process of an isolated engine; leave "
            "it out, or open without isolate=True",
        )

    def _array(self, value: Any) -> Any:
        self.parts.append(np.ascontiguousarray(value).tobytes())
        return {"$a": len(self.parts) - 1, "s": list(value.shape), "k": value.dtype.str}

    def _fields(self, value: Any) -> dict[str, Any]:
        """Return the fields that are not at their defaults."""
        found = {}
        for field in attrs.fields(type(value)):
            item = getattr(value, field.name)
            default = field.default
            unset = (
                item is default
                if default is None or default is attrs.NOTHING
                else (type(item) is type(default) and item == default)
            )
            if field.init and not unset:
                found[field.alias] = self.plain(item, field.name)
        return found

    def _error(self, error: BaseException) -> Any:
        loose = _Packer(loose=True)
        loose.parts, loose._depth = self.parts, self._depth
        facts = {key: loose.plain(item, key) for key, item in vars(error).items()}
        cause = error.__cause__
        return {
            "$e": _error_name(error),
            "args": [loose.plain(item, "args") for item in error.args],
            "facts": facts,
            "cause": None if cause is None or cause is error else loose.plain(str(cause), "cause"),
        }


def _too_large(name: str, what: str) -> InvalidInputError:
    return InvalidInputError(
        f"{name} holds {what}, which cannot be handed to the process of an isolated engine",
        field=name,
        value=what,
        allowed="less",
    )


def _error_name(error: BaseException) -> str:
    """Return the nearest class of ``error`` that both sides know."""
    for kind in type(error).__mro__:
        if _error_class(kind.__name__) is kind:
            return kind.__name__
    return "RuntimeError"


def _error_class(name: str) -> type[BaseException] | None:
    found = getattr(errors, name, None) or getattr(builtins, name, None)
    is_error = isinstance(found, type) and issubclass(found, Exception)
    return found if is_error else None


def pack(message: Any, *, loose: bool = False) -> bytes:
    """Return the frame of ``message``.

    Raises `UnsupportedFeatureError`, naming the field, for what cannot cross; with ``loose`` that
    crosses as its text. Raises `InvalidInputError` for what is too large.
    """
    packer = _Packer(loose=loose)
    plain = packer.plain(message, "value")
    text = json.dumps(plain, separators=(",", ":")).encode()
    parts = packer.parts
    n_bytes = sum(map(len, parts))
    if len(text) > _MOST_JSON or len(parts) > _MOST_PARTS or n_bytes > _MOST_BYTES:
        raise _too_large("a call", f"{len(parts)} values of {len(text) + n_bytes} bytes")
    sizes = b"".join(_SIZE.pack(len(part)) for part in parts)
    return b"".join((_HEAD.pack(len(text), len(parts)), sizes, text, *parts))


def pack_next(number: int, target: int, *, in_lane: bool = False) -> bytes:
    """Return the frame that asks for a session's next chunk, as request ``number``."""
    return _NEXT.pack(_NEXT.size - _HEAD.size, _SHORT, number, target, in_lane)


def next_of(data: bytes) -> tuple[int, int, bool]:
    """Return what `pack_next` was given."""
    found: tuple[int, int, bool] = _NEXT_BODY.unpack(data)
    return found


def pack_chunk(
    number: int,
    text: str,
    shown: Sequence[int],
    chosen: Sequence[int],
    position: tuple[int, float] | None,
) -> bytes:
    """Return the frame of an ordinary chunk: its text and tokens, those chosen since, the place.

    Raises ValueError, OverflowError or `struct.error` for what has no room in it.
    """
    state, mu = position or (0, 0.0)
    rest = struct.pack(f"<{len(shown) + len(chosen)}I", *shown, *chosen) + text.encode()
    fields = len(shown), len(chosen), position is not None, state.to_bytes(16, "little"), mu
    return _CHUNK.pack(_CHUNK.size - _HEAD.size + len(rest), _SHORT, number, *fields) + rest


def chunk_of(data: bytes) -> tuple[int, str, tuple[int, ...], list[int], tuple[int, float] | None]:
    """Return what `pack_chunk` was given. Raises `FrameError`."""
    try:
        number, n_shown, n_chosen, is_placed, state, mu = _CHUNK_BODY.unpack_from(data)
        tokens = struct.unpack_from(f"<{n_shown + n_chosen}I", data, _CHUNK_BODY.size)
        text = data[_CHUNK_BODY.size + 4 * len(tokens) :].decode()
    except (struct.error, UnicodeDecodeError) as error:
        raise FrameError(f"a chunk that cannot be read: {error!r}") from error
    position = (int.from_bytes(state, "little"), mu) if is_placed else None
    return number, text, tokens[:n_shown], list(tokens[n_shown:]), position


class Input:
    """Reads a pipe; ``before_waiting`` is called before each read, which may wait."""

    def __init__(self, file: int, before_waiting: Callable[[], object]) -> None:
        self._file = file
        self._before_waiting = before_waiting
        self._data = b""
        self._at = 0

    def take(self, n: int) -> bytes:
        """Return the next ``n`` bytes. Raises `EOFError`."""
        start = self._at
        if len(self._data) - start < n:
            self._read(n)
            start = 0
        self._at = start + n
        data = self._data[start : self._at]
        if self._at == len(self._data):  # a large one is not held twice
            self._data, self._at = b"", 0
        return data

    def _read(self, n: int) -> None:
        """Have ``n`` bytes, from the start."""
        parts = [self._data[self._at :]]
        n_missing = n - len(parts[0])
        while n_missing > 0:
            self._before_waiting()
            data = os.read(self._file, _ONE_READ if n <= _ONE_READ else min(n_missing, _ONE_READ))
            if not data:
                raise EOFError
            parts.append(data)
            n_missing -= len(data)
        self._data = b"".join(parts)


def bodies(data: bytes) -> list[bytes]:
    """Return those of the small frames that ``data`` holds, without marks. Raises `FrameError`."""
    found, at, end = [], 0, len(data)
    while at < end:
        start = at + _HEAD.size
        size, kind = _HEAD.unpack_from(data, at) if start <= end else (0, 0)
        at = start + size
        if kind != _SHORT or at > end:
            raise FrameError("no whole frame")
        if size:
            found.append(data[start:at])
    return found


def read(take: Callable[[int], bytes]) -> Any:
    """Return the next message; ``take(n)`` returns n bytes. Raises `EOFError`, `FrameError`.

    Bytes are what `next_of` or `chunk_of` reads.
    """
    n_text, n_parts = _HEAD.unpack(take(_HEAD.size))
    if n_parts == _SHORT and n_text <= _MOST_JSON:
        return take(n_text)
    if n_text > _MOST_JSON or n_parts > _MOST_PARTS:
        raise FrameError("a frame that is too large")
    sizes = [_SIZE.unpack(take(_SIZE.size))[0] for _ in range(n_parts)]
    if sum(sizes) > _MOST_BYTES:
        raise FrameError("a frame that is too large")
    text = take(n_text)
    parts = [take(size) for size in sizes]
    try:
        return _value(json.loads(text), parts)
    except FrameError:
        raise
    except Exception as error:
        raise FrameError(f"a frame that cannot be read: {error!r}") from error


def _value(plain: Any, parts: list[bytes]) -> Any:  # noqa: C901, PLR0911  (a case a kind)
    if type(plain) is not dict:
        if type(plain) is list:
            raise FrameError("a list that is none")
        return plain
    kind = next(iter(plain))
    given = plain[kind]
    if kind == "$l":
        return [_value(item, parts) for item in given]
    if kind == "$t":
        return tuple([_value(item, parts) for item in given])
    if kind == "$d":
        return {_value(key, parts): _value(item, parts) for key, item in given}
    if kind == "$v":
        fields = {str(key): _value(item, parts) for key, item in plain["f"].items()}
        return _CLASSES[given](**fields)
    if kind == "$b":
        return parts[given]
    if kind == "$a":
        dtype = np.dtype(plain["k"])
        if dtype.kind not in _KINDS:
            raise FrameError("an array of no numbers")
        return np.frombuffer(parts[given], dtype=dtype).reshape(plain["s"]).copy()
    if kind == "$k":
        return config.KVType(given)
    if kind == "$e":
        return _as_error(plain, parts)
    raise FrameError(f"a value of no kind: {kind!r}")


def _as_error(plain: dict[str, Any], parts: list[bytes]) -> BaseException:
    found = _error_class(str(plain["$e"])) or RuntimeError
    args = tuple(_value(item, parts) for item in plain["args"])
    error: BaseException
    if issubclass(found, InferCoreError):
        error = found.__new__(found, *args)
        error.args = args
    else:
        try:
            error = found(*args)
        except TypeError:  # a class with arguments of its own
            error = RuntimeError(*args)
    for key, item in plain["facts"].items():
        setattr(error, str(key), _value(item, parts))
    if plain["cause"] is not None:
        error.__cause__ = RuntimeError(plain["cause"])
    return error


def write_all(file: int, data: bytes) -> None:
    """Write all of ``data``."""
    n = os.write(file, data)
    if n < len(data):
        rest = memoryview(data)[n:]
        while rest:
            rest = rest[os.write(file, rest) :]
