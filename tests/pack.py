"""The engines that tests run on, the model pack in their formats, and what to do without them."""

from __future__ import annotations

import importlib.util
import os
from types import MappingProxyType
from typing import TYPE_CHECKING, NoReturn

import pytest

if TYPE_CHECKING:
    from pathlib import Path

MODEL = "storyteller"
FORMATS = MappingProxyType({"llamacpp": "gguf-f32", "openvino": "openvino"})
EXACT = MappingProxyType(
    {"precision": "accurate", "flash_attn": "off", "type_k": "f32", "type_v": "f32"}
)
REQUIRE = "INFERCORE_REQUIRE_BACKENDS"


def required() -> tuple[str, ...]:
    """Return the backends whose absence is a failure, from ``INFERCORE_REQUIRE_BACKENDS``."""
    return tuple(part.strip() for part in os.environ.get(REQUIRE, "").split(",") if part.strip())


def missing(backend: str) -> str | None:
    """Return why ``backend`` cannot be used here, None where it can."""
    from infercore.errors import InferCoreError
    from infercore.registry import default_registry

    try:
        default_registry().get(backend)
    except InferCoreError as error:
        return str(error)
    return None


def skip_or_fail(reason: str, *, failing: bool) -> NoReturn:
    """Skip the test, or fail it where the environment requires what is missing."""
    if failing:
        pytest.fail(f"{reason} (required by {REQUIRE})", pytrace=False)
    pytest.skip(reason)


def need_backend(backend: str) -> None:
    """Skip the test without ``backend``, or fail it where that is required."""
    reason = missing(backend)
    if reason is not None:
        skip_or_fail(reason, failing=backend in required())


def need_pack() -> None:
    """Skip the test without the model pack, or fail it where any engine is required."""
    if importlib.util.find_spec("infercore_models") is None:
        reason = "the model pack is not installed; run: pip install ./models"
        skip_or_fail(reason, failing=bool(required()))


def model_path(backend: str) -> Path:
    """Return the model in the format of ``backend``, with float32 weights."""
    need_pack()
    import infercore_models

    return infercore_models.path(MODEL, FORMATS[backend])
