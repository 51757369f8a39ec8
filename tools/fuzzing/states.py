"""Saved states with damage and right checksums: refused or taken, and the context lives on."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

import numpy as np

import infercore as ic
from fuzzing import Wrong
from fuzzing._bytes import NUMBERS, damaged, replaced
from infercore.engine import blob

if TYPE_CHECKING:
    from random import Random

LIMIT_S = 30.0
BATCH = 200
FIELDS: dict[str, tuple[dict[str, Any], ...]] = {
    "llamacpp": (
        {"type_k": "f32", "type_v": "f32", "flash_attn": "off"},
        {"n_seq_max": 3, "kv_unified": False},
        {"n_seq_max": 3, "type_k": "q8_0"},
    ),
    "openvino": ({}, {"n_seq_max": 3}, {"backend_options": {"form": "stateful"}}),
}
ONE = {"n_threads": 1, "n_threads_batch": 1}  # busy machines wait long for two at once
MODELS = {"llamacpp": "gguf-f32", "openvino": "openvino"}
ODD = (None, -1, True, 1.5, "x", [], [-1], [[0, 2**31]], {}, [{"seq_id": 0}], 2**70, *NUMBERS[:12])
POSITIONS = (-(2**31), -5, -1, 2, 100, 2**31 - 2, 2**31 - 1)
KV_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q4_0", "u8")
_FOREIGN_SHARE = 0.2
TEXT, OTHER = list(range(20, 50)), list(range(60, 75))


class States:
    """Contexts of several kinds, what each saved, and the row behind a text in each."""

    def __init__(self) -> None:
        import infercore_models  # noqa: PLC0415

        self._held: list[tuple[Any, bytes, bytes, Any]] = []
        self._paths = {b: str(infercore_models.path("storyteller", f)) for b, f in MODELS.items()}
        self._lora = str(infercore_models.path("storyteller-lora", "gguf-f32"))
        self._plain: dict[str, tuple[Any, Any]] = {}
        for backend, kinds in FIELDS.items():
            model = ic.load_model(self._paths[backend], backend=backend, check_in_child=False)
            self._held += [self._of(model.new_context(n_ctx=256, **ONE, **kind)) for kind in kinds]
            context = model.new_context(n_ctx=256, **ONE)
            context.decode([*TEXT, 5, 6])
            self._plain[backend] = context, context.logits().copy()

    def _of(self, context: Any) -> tuple[Any, bytes, bytes, Any]:
        context.decode(OTHER)
        row = context.logits().copy()
        context.clear()
        context.decode(TEXT)
        if context.n_seq_max > 1:
            context.seq_copy(0, 1)
        return context, context.save_state(), context.save_sequence(0), row

    def case(self, random: Random) -> str:
        """Load a state that was changed, or of another model; go on from it, and compare."""
        if random.random() < _FOREIGN_SHARE:
            return self._foreign(random)
        context, state, sequence, row = random.choice(self._held)
        whole = random.random() < 0.5
        data = changed(state if whole else sequence, random)
        try:
            context.load_state(data) if whole else context.load_sequence(0, data)
            for seq_id in range(context.n_seq_max):
                if len(context.tokens(seq_id)) != context.n_resident(seq_id):
                    raise Wrong(f"sequence {seq_id} counts other tokens than it holds")
                if 0 < context.n_past(seq_id) < 200:
                    context.decode([5, 6], seq_id=seq_id)
            return "taken"
        finally:
            try:
                context.seq_remove(-1)
                context.decode(OTHER)
            except ic.InferCoreError as error:
                raise Wrong(f"nothing goes in after it: {error!r}") from error
            gap = float(np.abs(context.logits() - row).max())
            context.clear()
            if not gap <= context.tolerance:
                raise Wrong(f"logits after it differ by {gap}")

    def _foreign(self, random: Random) -> str:
        """Offer what a context with another option saved: refused, or no other logits."""
        backend = random.choice(tuple(self._plain))
        context, row = self._plain[backend]
        options, fields, steering = self._other(random)
        shown = f"{backend} {options} {fields} {steering}"
        with (
            ic.load_model(
                self._paths[backend], backend=backend, check_in_child=False, backend_options=options
            ) as model,
            model.new_context(n_ctx=256, **ONE, **fields) as other,
        ):
            if steering:
                layers = {1: np.full(model.info.n_embd, steering, dtype=np.float32)}
                other.set_control_vector(layers)
            other.decode(TEXT)
            is_whole = random.random() < 0.5
            data = other.save_state() if is_whole else other.save_sequence(0)
        context.clear()
        context.load_state(data) if is_whole else context.load_sequence(0, data)
        context.decode([5, 6])
        gap = float(np.abs(context.logits() - row).max())
        if not gap <= context.tolerance:
            raise Wrong(f"the state of {shown} is taken, and logits differ by {gap}")
        return f"the state of {shown} is taken, and changes nothing"

    def _other(self, random: Random) -> tuple[dict[str, Any], dict[str, Any], float]:
        """Return options of a model, fields of a context, and what is added behind a layer."""
        r = random
        base, scale = r.choice((100.0, 5e5)) * r.uniform(0.5, 1), r.uniform(0.1, 0.9)
        epsilon, factor = 10 ** r.uniform(-3, -1), r.choice((0.0, 0.5, 1.0))
        overrides = (
            {"llama.rope.freq_base": base},
            {"llama.attention.layer_norm_rms_epsilon": epsilon},
        )
        fields: tuple[dict[str, Any], ...] = (
            {"rope_freq_base": base},
            {"rope_freq_scale": scale},
            {"rope_scaling_type": "yarn", "rope_freq_scale": scale, "yarn_ext_factor": factor},
            {"rope_scaling_type": "yarn", "rope_freq_scale": scale, "yarn_beta_fast": 8.0},
            {"yarn_attn_factor": scale},
            {"type_k": r.choice(KV_TYPES)},
            {"type_v": r.choice(KV_TYPES)},
            {"precision": "accurate"},
            {"flash_attn": r.choice(("on", "off"))},
            {"adapters": [ic.AdapterSpec(path=self._lora, scale=scale)]},
            {"backend_options": {"form": "stateful"}},
            {"backend_options": {"inference_precision": r.choice(("bf16", "f16"))}},
            {"attention_type": "non-causal"},
            {"swa_full": False},
        )
        kind = r.randrange(6)
        if kind < 2:
            return {"kv_overrides": overrides[kind]}, {}, 0.0
        return {}, ({} if kind == 2 else r.choice(fields)), (scale if kind == 2 else 0.0)


def changed(data: bytes, random: Random) -> bytes:
    """Return saved state with header or payload changed; its checksums are right mostly."""
    if random.random() < 0.2:
        return damaged(data, random)
    header, payload, logits = blob.unpack(data)
    kept = {k: v for k, v in header.items() if k not in {"payload_bytes", "logits_bytes"}}
    if random.random() < 0.4:
        kept = json.loads(json.dumps(kept))
        note = kept.get("note")
        if isinstance(note, dict) and random.random() < 0.6:  # a session's own: all of it alike
            put(random.choice([note, *parts(note)]), random)
        else:
            put(kept, random)
        return blob.pack(kept, payload, logits)
    if random.random() < 0.1:
        return blob.pack(kept, payload, damaged(bytes(logits) or b"\\0", random))
    kind, cells = random.random(), bytes(payload)
    if kind < 0.2:
        changed_cells = replaced(cells, random.randrange(40, len(cells)), b"\xff" * 8)  # NaN
    elif kind < 0.4:  # where a cell is
        at = cells.find(struct.pack("<i", random.randrange(1, 29)), 12)
        changed_cells = replaced(cells, at, struct.pack("<i", random.choice(POSITIONS)))
    else:
        changed_cells = damaged(cells, random, 0, random.choice((None, 400)))
    return blob.pack(kept, changed_cells, logits)


def parts(value: Any) -> list[Any]:
    """Return the lists and mappings within ``value`` that hold something, at any depth."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [part for each in inner if isinstance(each, (dict, list)) and each
            for part in (each, *parts(each))]  # fmt: skip


def put(value: Any, random: Random) -> None:
    """Set something inside of a JSON value to something odd."""
    if not value:
        return
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key = random.choice(keys)
    if isinstance(value[key], (dict, list)) and value[key] and random.random() < 0.7:
        put(value[key], random)
    else:
        value[key] = random.choice(ODD)


def open_target() -> States:
    """Return the target."""
    return States()
