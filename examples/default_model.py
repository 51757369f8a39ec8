"""The model that an example takes when none is named: one of the pack that an engine here reads."""

from __future__ import annotations

import os

import infercore as ic

FORMATS = {"gguf": "gguf-f32", "openvino": "openvino", "hf": "hf"}


def default_models(name: str = "storyteller") -> list[str]:
    """Return the pack's model ``name`` once for each engine here, `INFERCORE_BACKEND`'s first.

    Ends the program, saying what to install, where there is no engine or no pack.
    """
    try:
        import infercore_models  # noqa: PLC0415  (only where no model is named)
    except ImportError:
        raise SystemExit("name a MODEL, or run: pip install ./models") from None
    there = infercore_models.names()[name]
    usable = [info for info in ic.backends() if info.available]
    usable.sort(key=lambda info: info.name != os.environ.get("INFERCORE_BACKEND"))
    wanted = [FORMATS[kind] for info in usable for kind in info.formats if kind in FORMATS]
    if not wanted:
        raise SystemExit("no engine is installed; run: pip install ./plugins/openvino")
    paths = [str(infercore_models.path(name, form)) for form in wanted if form in there]
    if not paths:
        raise SystemExit(f"the pack has no {name} that an engine here reads; name a MODEL")
    return paths


def default_model(name: str = "storyteller") -> str:
    """Return the first of `default_models`."""
    return default_models(name)[0]
