"""A restored state that holds no numbers cannot spoil a context."""

from __future__ import annotations

import numpy as np
import pytest

import infercore as ic
from infercore_llamacpp import payload

NAN = b"\xff\xff\xff\xff"
KINDS = [
    {"type_k": "f32", "type_v": "f32"},
    {"type_k": "f16", "type_v": "f16", "n_seq_max": 2, "kv_unified": False},
    {"type_k": "bf16", "type_v": "bf16", "flash_attn": "on"},
    {"type_k": "q8_0", "type_v": "q4_1", "flash_attn": "on"},
    {"type_k": "iq4_nl", "type_v": "q5_1", "flash_attn": "on"},
]


def spoiled(data, n=16):
    """Yield copies of ``data`` with four bytes set, at places all over it."""
    for at in np.linspace(0, len(data) - len(NAN), n).astype(int).tolist():
        changed = bytearray(data)
        changed[at : at + len(NAN)] = NAN
        yield changed


def refused(context, data, *, whole):
    try:
        context.load_state(data) if whole else context.load_sequence(0, data)
    except ic.SnapshotError:  # the core clears then
        context.clear() if whole else context.seq_remove(0, 0, -1)
        return True
    return False


def heals(context):
    context.clear()
    context.decode(np.arange(5, 25, dtype=np.int32), seq_id=0, logits="last")
    return np.isfinite(context.logits(0)).all()


@pytest.mark.parametrize(
    "fields", KINDS, ids=lambda fields: f"{fields['type_k']}-{fields['type_v']}"
)
@pytest.mark.parametrize("whole", [True, False])
def test_no_state_poisons_a_context_for_good(story, open_context, fields, whole):
    context = open_context(story, **fields)
    context.decode(np.arange(5, 45, dtype=np.int32), seq_id=0, logits="none")
    saved = context.save_state() if whole else context.save_sequence(0)
    assert not payload.complaint(saved, story.traits, of_sequence=not whole)
    for data in spoiled(saved):
        if refused(context, data, whole=whole):
            assert context.n_past(0) == 0
        assert heals(context)


@pytest.mark.parametrize("kind", ["recurrent", "sliding", "mrope"])
def test_nor_one_of_another_kind_of_memory(tiny, open_context, kind):
    context = open_context(tiny(kind), swa_full=False)
    context.decode(np.arange(5, 45, dtype=np.int32), seq_id=0, logits="none")
    for data in spoiled(context.save_sequence(0)):
        refused(context, data, whole=False)
        assert context.seq_remove(0, 0, -1)  # without a clear, as a session does it
        context.decode(np.arange(5, 25, dtype=np.int32), seq_id=0, logits="last")
        assert np.isfinite(context.logits(0)).all()
        assert heals(context)


def test_the_reader_knows_the_layout_of_caches_alone(story, tiny, open_context):
    for kind in ("sliding", "mrope"):
        context = open_context(tiny(kind), swa_full=False)
        context.decode(np.arange(5, 45, dtype=np.int32), seq_id=0, logits="none")
        saved = context.save_sequence(0)
        assert not payload.complaint(saved, context.model.traits, of_sequence=True)
        with pytest.raises(payload.UnknownLayoutError):
            payload.complaint(saved[:-3], context.model.traits, of_sequence=True)
    with pytest.raises(payload.UnknownLayoutError):
        payload.complaint(b"", tiny("recurrent").traits, of_sequence=True)
    with pytest.raises(payload.UnknownLayoutError):
        payload.complaint(bytes(8) + b"\xff" * 64, story.traits, of_sequence=True)
