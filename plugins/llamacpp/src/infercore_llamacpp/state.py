"""Saving and restoring what a context holds, as the engine's own bytes.

They hold no logits, and say nothing of the model: both are the caller's to add.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np

from infercore import InferCoreError, SnapshotError
from infercore_llamacpp import log, payload
from infercore_llamacpp.library import api

if TYPE_CHECKING:
    from infercore_llamacpp.memory import Memory
    from infercore_llamacpp.traits import Traits

_BYTES = ctypes.POINTER(ctypes.c_uint8)


def save(context: int) -> memoryview:
    """Return all sequences of ``context``."""
    return _read(api.llama_state_get_size, api.llama_state_get_data, context)


def save_sequence(context: int, seq_id: int) -> memoryview:
    """Return one sequence of ``context``."""

    def get(handle: int, target: Any, size: int) -> int:
        n_bytes: int = api.llama_state_seq_get_data(handle, target, size, seq_id)
        return n_bytes

    return _read(lambda handle: api.llama_state_seq_get_size(handle, seq_id), get, context)


def load(context: int, memory: Memory, data: bytes | memoryview, traits: Traits) -> None:
    """Replace everything by ``data``. Raises `SnapshotError`; the caller clears then."""
    if not payload.is_of(data, traits.info.architecture):
        raise _refused()
    _check_numbers(memory, data, traits, of_sequence=False)
    with log.listening():
        _check_read(api.llama_state_set_data(context, _view(data), len(data)), data)


def load_sequence(
    context: int, memory: Memory, seq_id: int, data: bytes | memoryview, traits: Traits
) -> None:
    """Replace one sequence by ``data``. Raises `SnapshotError`; the caller empties it then."""
    _check_numbers(memory, data, traits, of_sequence=True)
    data = payload.in_streams(data, memory.n_streams, traits)
    with log.listening():
        _check_read(api.llama_state_seq_set_data(context, _view(data), len(data), seq_id), data)


def _check_numbers(
    memory: Memory, data: bytes | memoryview, traits: Traits, *, of_sequence: bool
) -> None:
    """Refuse ``data`` that would spoil the context; where that cannot be seen, note it."""
    try:
        wrong = payload.complaint(data, traits, of_sequence=of_sequence)
    except payload.UnknownLayoutError:
        memory.may_hold_nan = True
        return
    if wrong:
        raise SnapshotError(f"it holds {wrong}", reason="numbers")


def _check_read(n_bytes: int, data: bytes | memoryview) -> None:
    if not n_bytes or n_bytes != len(data):  # the engine reads nothing where there is nothing
        raise _refused()


def _read(get_size: Any, get_data: Any, context: int) -> memoryview:
    with log.listening():
        size: int = get_size(context)
        buffer = np.empty(size, dtype=np.uint8)
        written = get_data(context, buffer.ctypes.data_as(_BYTES), size)
    if written != size or not size:
        raise InferCoreError(f"llama.cpp saved {written} of {size} bytes of its state")
    return buffer.data


def _view(data: bytes | memoryview) -> Any:
    return np.frombuffer(data, dtype=np.uint8).ctypes.data_as(_BYTES)


def _refused() -> SnapshotError:
    return log.explain(SnapshotError("llama.cpp cannot read it", reason="engine"))
