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
    """Replace everything by ``data``. Raises `SnapshotError`; the context is empty then."""
    if not payload.is_of(data, traits.info.architecture):
        memory.clear()
        raise _refused("the context is empty now")
    if wrong := _poison(memory, data, traits, of_sequence=False):
        memory.clear()
        raise _poisonous(wrong, "the context is empty now")
    with log.listening():
        n_read = api.llama_state_set_data(context, _view(data), len(data))
        if not n_read or n_read != len(data):
            memory.clear(erase=True)
            raise _refused("the context is empty now")
    memory.note_restored()


def load_sequence(
    context: int, memory: Memory, seq_id: int, data: bytes | memoryview, traits: Traits
) -> None:
    """Replace one sequence by ``data``. Raises `SnapshotError`; the sequence is empty then."""
    if wrong := _poison(memory, data, traits, of_sequence=True):
        memory.remove(seq_id, 0, -1)
        raise _poisonous(wrong, f"sequence {seq_id} is empty now")
    data = payload.in_streams(data, memory.n_streams, traits)
    with log.listening():
        n_read = api.llama_state_seq_set_data(context, _view(data), len(data), seq_id)
        if not n_read or n_read != len(data):
            memory.remove(seq_id, 0, -1)
            raise _refused(f"sequence {seq_id} is empty now")
    memory.note_restored(seq_id)


def _poison(
    memory: Memory, data: bytes | memoryview, traits: Traits, *, of_sequence: bool
) -> str | None:
    """Return what in ``data`` would spoil the context; where that cannot be seen, note it."""
    try:
        return payload.complaint(data, traits, of_sequence=of_sequence)
    except payload.UnknownLayoutError:
        memory.may_hold_nan = True
        return None


def _poisonous(what: str, now: str) -> SnapshotError:
    error = SnapshotError(f"the saved state holds {what}; {now}", reason="numbers")
    error.state_after = "cleared"
    return error


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


def _refused(now: str) -> SnapshotError:
    error = SnapshotError(f"llama.cpp refused the saved state; {now}", reason="engine")
    error.state_after = "cleared"
    return log.explain(error)
