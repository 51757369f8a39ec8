"""The environment variables that steer discovery and choice."""

from __future__ import annotations

import os

DISABLE = "INFERCORE_DISABLE_PLUGINS"
ONLY = "INFERCORE_PLUGINS"
DEFAULT = "INFERCORE_BACKEND"


def disabled(name: str) -> str | None:
    """Return why the environment keeps the plugin ``name`` from being imported, or None."""
    if name in _names(DISABLE):
        return f"disabled by {DISABLE}"
    only = _names(ONLY)
    if only and name not in only:
        return f"not among {ONLY}={','.join(only)}"
    return None


def default_backend() -> str | None:
    """Return the name in ``INFERCORE_BACKEND``, None where it is unset or empty."""
    return os.environ.get(DEFAULT, "").strip() or None


def _names(variable: str) -> tuple[str, ...]:
    parts = os.environ.get(variable, "").split(",")
    return tuple(part.strip() for part in parts if part.strip())
