"""What this CPU cannot do with the engine, though the engine tries."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from infercore import UnsupportedFeatureError
from infercore_openvino.engine import BACKEND

if TYPE_CHECKING:
    from infercore_openvino.settings import Settings

_CPU = Path("/proc/cpuinfo")
_UNIT = "amx_bf16"


def check(settings: Settings) -> None:
    """Raise `UnsupportedFeatureError` for settings over which the engine ends the process.

    With a matrix unit (AMX) and one thread a stream, compiling for bfloat16 divides by zero.
    """
    n_streams = settings.properties.get("NUM_STREAMS")
    if not divides_by_zero(settings.inference, settings.n_threads, n_streams):
        return
    hint = "on this CPU the engine needs two threads a stream for it; give more, or f32"
    raise UnsupportedFeatureError(
        f"inference_precision='bf16' is not supported with one thread a stream; {hint}",
        feature="inference_precision",
        backend=BACKEND,
        hint=hint,
    )


def divides_by_zero(inference: str, n_threads: int | None, n_streams: int | None) -> bool:
    """Tell whether compiling for such numbers would end the process."""
    per_stream = (n_threads or _n_cpus()) // (n_streams or 1)
    return inference == "bf16" and per_stream <= 1 and _has_unit()


def _n_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _has_unit() -> bool:
    try:
        return _UNIT in _CPU.read_text()
    except OSError:
        return False
