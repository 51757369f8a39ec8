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
    if settings.precision != "bf16" or _threads_of_stream(settings) > 1 or not _has_unit():
        return
    hint = "on this CPU the engine needs two threads a stream for it; give more, or f32"
    raise UnsupportedFeatureError(
        f"inference_precision='bf16' is not supported with one thread a stream; {hint}",
        feature="inference_precision",
        backend=BACKEND,
        hint=hint,
    )


def _threads_of_stream(settings: Settings) -> int:
    n_threads = settings.n_threads or _n_cpus()
    return n_threads // int(settings.properties.get("NUM_STREAMS", 1))


def _n_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _has_unit() -> bool:
    try:
        return _UNIT in _CPU.read_text()
    except OSError:
        return False
