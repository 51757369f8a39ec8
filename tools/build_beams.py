"""Computes the golden beams of the model pack anew, from the weights that lie in it.

    python tools/build_beams.py

Needs torch and transformers; they were computed with torch 2.13.0 and transformers 5.23.0.
"""

from __future__ import annotations

from pathlib import Path

from model_pack import golden_beams

DATA = Path(__file__).resolve().parents[1] / "models" / "src" / "infercore_models" / "data"

if __name__ == "__main__":
    golden_beams.write(DATA / "storyteller" / "hf", DATA / "storyteller" / "beams.json")
