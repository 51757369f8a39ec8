"""The rig that the conformance suite tries this backend with: the pack's storyteller."""

from __future__ import annotations

import infercore
from infercore.conformance import Rig
from infercore_openvino.conformance import pack_path


def open_path(path: str) -> infercore.Model:
    """Return the model at ``path``."""
    return infercore.load_model(path, backend="openvino-genai")


def rig() -> Rig:
    """Return the rig."""
    path = pack_path("storyteller")
    return Rig(
        backend="openvino-genai",
        open_model=lambda: open_path(path),
        open_path=open_path,
        path=path,
        tolerance=5e-3,
        exact={"precision": "accurate", "type_k": "f32", "type_v": "f32"},
        suite_version="1.2",
    )
