"""infercore on Ray Serve: replicas of pools behind one HTTP front, routed by what they hold.

`build_app` makes a Serve application, `app_builder` one from a Serve YAML, and `connect` gives the
pool of a model that an application serves to a program on the same Ray. Ray is imported when one
of them is asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infercore_ray.application import app_builder as app_builder
    from infercore_ray.application import build_app as build_app
    from infercore_ray.engines import connect as connect

__all__ = ["app_builder", "build_app", "connect"]
_WHERE = {"app_builder": "application", "build_app": "application", "connect": "engines"}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)
