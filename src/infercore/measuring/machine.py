"""What a figure depends on: versions, the machine, and how much memory this process holds."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

PACKAGES = ("infercore", "llama-cpp-python", "openvino", "openvino-genai", "numpy")
_CPUINFO = Path("/proc/cpuinfo")
_FAST = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "asimd", "sve")


def versions() -> dict[str, str]:
    """Return the versions of the packages that figures depend on, as far as they are installed."""
    installed = {name: _version(name) for name in PACKAGES}
    found = {name: version for name, version in installed.items() if version is not None}
    return {"python": platform.python_version(), **found}


def machine() -> dict[str, Any]:
    """Return what the processor is, and how busy it is; neither names nor addresses."""
    import psutil  # noqa: PLC0415  (help needs none of it)

    lines = dict(_fields(_CPUINFO))
    flags = lines.get("flags", lines.get("Features", "")).split()
    return {
        "system": platform.system(),
        "architecture": platform.machine(),
        "processor": lines.get("model name", platform.processor()),
        "cpus": _cpus(),
        "features": [name for name in _FAST if name in flags],
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "load_average": _load(),
    }


def resident_bytes() -> int:
    """Return the bytes of memory that this process holds, mapped files included."""
    import psutil  # noqa: PLC0415

    return int(psutil.Process().memory_info().rss)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _fields(path: Path) -> list[tuple[str, str]]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        return []
    pairs = (line.partition(":") for line in text.splitlines())
    return [(name.strip(), value.strip()) for name, _, value in pairs]


def _cpus() -> int | None:
    affinity = getattr(os, "sched_getaffinity", None)
    return os.cpu_count() if affinity is None else len(affinity(0))


def _load() -> float | None:
    """The mean number of running tasks in the last minute: more than the CPUs is too busy."""
    try:
        return round(os.getloadavg()[0], 2)
    except (OSError, AttributeError):
        return None
