"""Warns of each public name, and each public method of one, that no page of the reference has."""

from __future__ import annotations

import importlib
import inspect
from typing import TYPE_CHECKING, Any

import attrs
from sphinx.util import logging

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment

MODULES = ("infercore", "infercore.testing", "infercore.conformance", "infercore_models")
logger = logging.getLogger(__name__)


def public_names() -> Iterator[str]:
    """Yield every name that users may rely on, and those of the members of classes."""
    for module in MODULES:
        home = importlib.import_module(module)
        for name in home.__all__:
            yield f"{module}.{name}"
            value = getattr(home, name)
            if inspect.isclass(value):
                yield from (f"{module}.{name}.{member}" for member in members(value))


def members(cls: type[Any]) -> Iterator[str]:
    """Yield the public members that ``cls`` itself defines."""
    fields = [field.name for field in attrs.fields(cls)] if attrs.has(cls) else []
    for name in {**dict.fromkeys(fields), **vars(cls)}:
        if not name.startswith("_"):
            yield name


def check(_: Sphinx, env: BuildEnvironment) -> None:
    """Warn of the names that are missing; ``sphinx-build -W`` makes that an error."""
    there = {name for name, *_ in env.get_domain("py").get_objects()}
    for name in public_names():
        if name not in there:
            logger.warning("the API reference has no %s", name)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the check."""
    app.connect("env-check-consistency", check)
    return {"parallel_read_safe": True}
