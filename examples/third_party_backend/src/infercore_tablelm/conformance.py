"""The rig that the conformance suite tries this backend with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import infercore
from infercore.conformance import Observation, Rig
from infercore.testing import engine_of

MODEL = str(Path(__file__).parent / "data" / "story.tablelm.json")


def open_path(path: str) -> infercore.Model:
    """Return the model at ``path``."""
    return infercore.load_model(path, backend="tablelm")


def observe(context: Any, seq_id: int) -> Observation:
    """Return what the engine holds, read past the API."""
    del seq_id
    cells = engine_of(context)._cells  # noqa: SLF001
    return Observation(resident=len(cells), tokens=tuple(token for _, token in cells))


def rig() -> Rig:
    """Return the rig."""
    return Rig(
        backend="tablelm",
        open_model=lambda: open_path(MODEL),
        open_path=open_path,
        path=MODEL,
        tolerance=0.0,
        suite_version="1.2",
        observe=observe,
        known={"DEC-25": "backend: a table looks at the last tokens alone"},
    )
