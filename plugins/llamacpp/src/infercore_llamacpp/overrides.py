"""Metadata overrides (``kv_overrides``): values that take the place of the file's own."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

from infercore import InvalidInputError
from infercore_llamacpp.library import api

_MAX_BYTES = 127  # of a key or a text, in the engine's struct


def to_overrides(params: Any, overrides: object) -> object:
    """Write ``overrides`` into ``params``; returns the array, to be kept until it is used."""
    if not overrides:
        return None
    if not isinstance(overrides, Mapping):
        raise _refuse(overrides, "a mapping of metadata keys to values")
    array = (api.llama_model_kv_override * (len(overrides) + 1))()  # ends with an empty key
    for entry, (key, value) in zip(array, overrides.items(), strict=False):
        _fill(entry, key, value)
    params.kv_overrides = ctypes.cast(array, ctypes.POINTER(api.llama_model_kv_override))
    return array


def _fill(entry: Any, key: str, value: object) -> None:
    entry.key = _text(key)
    if key.endswith(".block_count"):
        raise _refuse(key, "keys other than the number of layers, which the file decides")
    if isinstance(value, bool):
        entry.tag, entry.value.val_bool = api.LLAMA_KV_OVERRIDE_TYPE_BOOL, value
    elif isinstance(value, int) and -(2**63) <= value < 2**63:
        entry.tag, entry.value.val_i64 = api.LLAMA_KV_OVERRIDE_TYPE_INT, value
    elif isinstance(value, float):
        entry.tag, entry.value.val_f64 = api.LLAMA_KV_OVERRIDE_TYPE_FLOAT, value
    else:
        entry.tag, entry.value.val_str = api.LLAMA_KV_OVERRIDE_TYPE_STR, _text(value)


def _text(value: object) -> bytes:
    if not isinstance(value, str) or not 0 < len(value.encode()) <= _MAX_BYTES or "\0" in value:
        raise _refuse(value, f"bool, int, float or text of 1 to {_MAX_BYTES} bytes")
    return value.encode()


def _refuse(value: object, allowed: str) -> InvalidInputError:
    return InvalidInputError(
        f"kv_overrides does not take {value!r}; give {allowed}",
        field="kv_overrides",
        value=value,
        allowed=allowed,
    )
