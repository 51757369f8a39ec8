"""Checks of what users pass to a context, before the engine is called."""

from __future__ import annotations

import json
import operator
import os
from collections.abc import Mapping
from hashlib import blake2s
from typing import TYPE_CHECKING, Any

import numpy as np

from infercore.errors import InvalidInputError, InvalidPositionError, InvalidSequenceError
from infercore.errors import InvalidTokenError as _InvalidTokenError
from infercore.values import checks
from infercore.values.config import AdapterSpec
from infercore.weight_files import control_vector

if TYPE_CHECKING:
    from collections.abc import Sequence

    from infercore.protocols.spi import FloatArray, TokenArray

MAX_POSITION = 2**31 - 1


def token_error(token: object, n_vocab: int, *, field: str = "token") -> _InvalidTokenError:
    """Return the error for an id outside the vocabulary."""
    return _InvalidTokenError(
        f"{field}: {checks.shown(token)} is not in the vocabulary; ids go from 0 to {n_vocab - 1}",
        field=field,
        value=token,
        allowed=(0, n_vocab - 1),
    )


def check_token(token: Any, n_vocab: int, *, field: str = "token") -> int:
    """Return ``token`` as int. Raises `InvalidTokenError`."""
    if not checks.is_integer(token) or not 0 <= token < n_vocab:
        raise token_error(token, n_vocab, field=field)
    return operator.index(token)


def check_tokens(tokens: Sequence[int], n_vocab: int) -> TokenArray:
    """Return ``tokens`` as int32 [n_tokens]. Raises `InvalidTokenError`, `InvalidInputError`."""
    array = _as_array(tokens, n_vocab)
    if array.ndim != 1:
        raise checks.refuse("tokens", tokens, "a one-dimensional sequence of token ids")
    if array.size == 0:
        return np.empty(0, dtype=np.int32)
    if array.dtype.kind not in "iu":
        raise token_error(array.flat[0], n_vocab)
    low, high = int(array.min()), int(array.max())
    if low < 0 or high >= n_vocab:
        raise token_error(low if low < 0 else high, n_vocab)
    return np.ascontiguousarray(array, dtype=np.int32)


def _as_array(tokens: Any, n_vocab: int) -> Any:
    if isinstance(tokens, np.ndarray):
        return tokens
    try:
        ids = None if isinstance(tokens, (str, bytes)) else list(tokens)
    except TypeError:
        ids = None
    if ids is None:
        raise checks.refuse("tokens", tokens, "a sequence of token ids; encode text first")
    if not set(map(type, ids)) <= {int}:
        return np.array([check_token(token, n_vocab) for token in ids], dtype=np.int64)
    try:
        return np.array(ids, dtype=np.int64)
    except OverflowError as error:
        raise token_error(max(ids, key=abs), n_vocab) from error


def are_vectors(tokens: Any) -> bool:
    """Whether ``tokens`` are no ids but rows of numbers: a 2-D array of floats, or a list of such.

    What is neither is for `check_tokens` to refuse.
    """
    if isinstance(tokens, np.ndarray):
        return tokens.dtype.kind == "f" and tokens.ndim > 1
    first = tokens[0] if isinstance(tokens, (list, tuple)) and len(tokens) else None
    if isinstance(first, np.ndarray):
        return str(first.dtype.kind) == "f"
    return isinstance(first, (list, tuple)) and len(first) > 0 and isinstance(first[0], float)


def check_vectors(rows: Any, n_embd: int) -> FloatArray:
    """Return ``rows`` as finite float32 [n_rows, n_embd]. Raises `InvalidInputError`."""
    allowed = f"rows of {n_embd} finite numbers, as float32 holds them"
    try:
        with np.errstate(over="ignore"):
            found = np.ascontiguousarray(rows, dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise checks.refuse("tokens", rows, allowed) from error
    if found.ndim != len(("rows", "numbers")) or found.shape[1] != n_embd:
        raise checks.refuse("tokens", f"an array of shape {found.shape}", allowed)
    if not np.isfinite(found).all():
        raise checks.refuse("tokens", "a number that is none, or infinite", allowed)
    return found


def numbers_of(vectors: FloatArray) -> list[int]:
    """Return the negative number that stands for each row where tokens are listed.

    Made of its content, so that equal rows have equal numbers, as equal tokens have.
    """
    hashes = (blake2s(row.tobytes(), digest_size=4).digest() for row in vectors)
    return [-1 - (int.from_bytes(found, "little") & MAX_POSITION) for found in hashes]


def check_sequence(seq_id: Any, n_seq_max: int, field: str = "seq_id") -> int:
    """Return ``seq_id`` as int in 0..n_seq_max-1. Raises `InvalidSequenceError`."""
    if not checks.is_integer(seq_id) or not 0 <= seq_id < n_seq_max:
        raise InvalidSequenceError(
            f"{field}={checks.shown(seq_id)} is not a sequence of this context; ids go from 0 to "
            f"{n_seq_max - 1} (see n_seq_max)",
            field=field,
            value=seq_id,
            allowed=(0, n_seq_max - 1),
        )
    return operator.index(seq_id)


def check_range(p0: Any, p1: Any) -> tuple[int, int]:
    """Return the half-open range with -1 resolved. Raises `InvalidPositionError`."""
    for field, value in (("p0", p0), ("p1", p1)):
        if not checks.is_integer(value) or value < -1:
            raise _position_error(field, value, "-1, or a position of at least 0")
    start = 0 if p0 == -1 else min(operator.index(p0), MAX_POSITION)
    end = MAX_POSITION if p1 == -1 else min(operator.index(p1), MAX_POSITION)
    if end < start:
        raise _position_error("p1", p1, f"a position of at least p0={p0}")
    return start, end


def check_position(position: Any, field: str) -> int:
    """Return ``position`` as int of at least 0. Raises `InvalidPositionError`."""
    if not checks.is_integer(position) or position < 0:
        raise _position_error(field, position, "a position of at least 0")
    return operator.index(position)


def _position_error(field: str, value: object, allowed: str) -> InvalidPositionError:
    return InvalidPositionError(
        f"{field}={checks.shown(value)} is not allowed; give {allowed}",
        field=field,
        value=value,
        allowed=allowed,
    )


def check_logits_mode(logits: Any) -> str:
    """Return ``logits`` if it is "last", "all" or "none". Raises `InvalidInputError`."""
    if not isinstance(logits, str) or logits not in ("last", "all", "none"):
        raise checks.refuse("logits", logits, "'last', 'all' or 'none'")
    return logits


def check_bool(field: str, value: Any) -> bool:
    """Return ``value`` if it is a bool. Raises `InvalidInputError`."""
    if not isinstance(value, bool):
        raise checks.refuse(field, value, "True or False")
    return value


def gap_error(n_past: int, at: int) -> InvalidPositionError:
    """Return the error for a position that would leave a gap."""
    return InvalidPositionError(
        f"n_past={checks.shown(n_past)} would leave a gap: the sequence's next position is {at}",
        field="n_past",
        value=n_past,
        allowed=(0, at),
    )


def not_alike(first: int, other: int) -> InvalidSequenceError:
    """Return the error for a token that is to go to sequences of different content."""
    return InvalidSequenceError(
        f"sequences {first} and {other} hold different tokens, so one token cannot go to both; "
        "give each its own entry",
        field="seq_ids",
        value=(first, other),
        allowed="sequences that hold the same tokens",
    )


def too_many(field: str, n_tokens: int, limit: int, why: str) -> InvalidInputError:
    """Return the error for more tokens than one call may take."""
    return InvalidInputError(
        f"{n_tokens} tokens in one call, but {why}; give at most {limit}",
        field=field,
        value=n_tokens,
        allowed=limit,
    )


def check_adapters(adapters: Sequence[AdapterSpec]) -> tuple[AdapterSpec, ...]:
    """Return ``adapters`` as a tuple. Raises `InvalidInputError`."""
    chosen = tuple(checks.items("adapters", adapters, "AdapterSpec objects"))
    for adapter in chosen:
        if not isinstance(adapter, AdapterSpec):
            raise checks.refuse("adapters", adapter, "AdapterSpec objects")
    return chosen


def check_directions(directions: Any, n_layer: int, n_embd: int) -> FloatArray | None:
    """Return a control vector as float32 [n_layer, n_embd], None where there is none.

    Layers that ``directions`` leaves out are zero. Raises `InvalidInputError`, and what reading
    raises where it names files.
    """
    if directions is None:
        return None
    if isinstance(directions, (str, os.PathLike)):
        directions = AdapterSpec(path=os.fspath(directions))
    if isinstance(directions, AdapterSpec):
        directions = [directions]
    if not isinstance(directions, Mapping):
        allowed = "a mapping of layers to vectors, a file, AdapterSpec objects, or None"
        specs: Any = directions if isinstance(directions, (list, tuple)) else [None]
        if not all(isinstance(spec, AdapterSpec) for spec in specs):
            raise checks.refuse("directions", directions, allowed)
        read = control_vector.read(specs, n_layer, n_embd)
        return read if read.any() else None
    found = np.zeros((n_layer, n_embd), dtype=np.float32)
    for layer, given in directions.items():
        if not (checks.is_integer(layer) and 0 <= layer < n_layer):
            raise checks.refuse("directions", layer, f"layers from 0 to {n_layer - 1}")
        try:
            vector = np.asarray(given, dtype=np.float32)
        except (TypeError, ValueError) as error:
            raise checks.refuse("directions", given, f"{n_embd} numbers a layer") from error
        if vector.shape != (n_embd,) or not np.isfinite(vector).all():
            raise checks.refuse("directions", vector.shape, f"{n_embd} finite numbers a layer")
        found[layer] = vector
    return found if found.any() else None


def check_note(note: object) -> None:
    """Refuse what the header of saved state cannot hold."""
    if note is None:
        return
    try:
        if not isinstance(note, Mapping):
            raise TypeError
        json.dumps(dict(note))
    except (TypeError, ValueError, RecursionError) as error:
        raise checks.refuse("note", note, "a mapping that JSON can hold, or None") from error
