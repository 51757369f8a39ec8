"""The rig that the conformance suite tries this backend with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

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


def golden() -> list[tuple[list[int], Any]]:
    """Return a text and its logits, from the table's numbers and by none of the backend's code."""
    tables = json.loads(Path(MODEL).read_text(encoding="utf-8"))["tables"]
    tokens = [256, *b"Once upon a time there was a village. The baker said"]
    rows = np.full((len(tokens), 258), 1e-4)
    for key, counts in tables.items():
        before, n_seen = [int(token) for token in key.split()], sum(counts.values())
        for i, row in enumerate(rows, 1):
            if tokens[max(0, i - len(before)) : i] == before or not before:
                for token, n in counts.items():
                    row[int(token)] += 10.0 ** len(before) * (n / n_seen)
    return [(tokens, np.log(rows / rows.sum(axis=1, keepdims=True)).astype(np.float32))]


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
        golden=golden(),
        require=("oracle", "observe", "kv_remove_any", "logits_all", "n_batch", "n_ubatch"),
        known={"DEC-25": "backend: a table looks at the last tokens alone"},
    )
