"""The plugin interface: its version, its marker and its one hook."""

from __future__ import annotations

from typing import Any

import pluggy

API_VERSION = 1
PROJECT = "infercore"
ENTRY_POINT_GROUP = "infercore.backends"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def infercore_backend() -> Any:
    """Return a `BackendDescriptor`, or any object with its attributes."""
