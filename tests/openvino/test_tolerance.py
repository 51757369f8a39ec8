"""What a context states about its logits holds on a model as deep as those that people run."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import infercore as ic
import pack

if TYPE_CHECKING:
    from collections.abc import Iterator

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "make_model.py"
N_TOKENS = 60


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Return a random model of 32 layers whose logits span 30, as those of trained ones do."""
    pack.need_backend("openvino")
    missing = [
        name
        for name in ("gguf", "openvino_genai", "tokenizers")
        if importlib.util.find_spec(name) is None
    ]
    if missing or not SCRIPT.is_file():
        pytest.skip(f"to write a deep model it takes {missing or SCRIPT}")
    folder = tmp_path_factory.mktemp("deep")
    command = [sys.executable, str(SCRIPT), str(folder), "--shape", "deep"]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    with ic.load_model(folder / "deep-ir", backend="openvino") as model:
        yield model


def moved(context: Any, seed: int) -> tuple[float, float]:
    """Return how far logits are off, of a text in one call and token by token, and their span."""
    tokens = np.random.default_rng(seed).integers(4, 1024, N_TOKENS).tolist()
    context.clear()
    context.decode(tokens)
    row = np.array(context.logits())
    context.clear()
    for token in tokens:
        context.decode_one(token)
    return float(np.abs(context.logits() - row).max()), float(np.ptp(row))


@pytest.mark.parametrize(
    ("precision", "kind"),
    [("accurate", "f32"), ("accurate", "f16"), ("accurate", "u8"), (None, None)],
)
def test_the_tolerance_holds_on_a_deep_model(deep: Any, precision: Any, kind: Any) -> None:
    with deep.new_context(n_ctx=256, precision=precision, type_k=kind, type_v=kind) as context:
        found = [moved(context, seed) for seed in range(4)]
        assert max(gap for gap, _ in found) <= context.tolerance
        assert all(20 < span < 40 for _, span in found)
        if context.effective["activations"] == "q8":
            assert max(gap for gap, _ in found) > 0.6  # what was stated for any depth
