"""Which releases of llama-cpp-python fit, read from its metadata: no engine is imported."""

from __future__ import annotations

import importlib.util
import re
import sys
from importlib import metadata
from typing import Any

from infercore import BackendUnavailableError

DISTRIBUTION = "llama-cpp-python"
OLDEST, TOO_NEW = (0, 3, 36), (0, 4)


def unavailable(reason: str) -> BackendUnavailableError:
    """Return the error that says why llama.cpp cannot be used."""
    return BackendUnavailableError(
        f"the llamacpp backend cannot run here: {reason}", backend="llamacpp", reason=reason
    )


def installed() -> str:
    """Return the version of the engine's package. Raises `BackendUnavailableError` without it."""
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError as error:
        raise unavailable(f"{DISTRIBUTION} is missing; run: pip install {DISTRIBUTION}") from error


def check_version(version: str) -> None:
    """Raise unless ``version`` is a release whose structs are those known here."""
    numbers = tuple(int(part) for part in re.findall(r"\d+", version))
    if not OLDEST <= numbers < TOO_NEW:
        wanted = f">={'.'.join(map(str, OLDEST))},<{'.'.join(map(str, TOO_NEW))}"
        raise unavailable(
            f"{DISTRIBUTION} {version} is installed and {wanted} is needed; "
            f"run: pip install '{DISTRIBUTION}{wanted}'"
        )


def leave_out_front() -> None:
    """Let this process import the package's bindings without the rest, as half of the time goes.

    What else the package offers is missing then: only for a process that is wholly ours.
    """
    spec: Any = importlib.util.find_spec("llama_cpp")
    sys.modules.setdefault("llama_cpp", importlib.util.module_from_spec(spec))
