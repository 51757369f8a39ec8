"""Where plugins are announced: the entry points of installed distributions."""

from __future__ import annotations

import importlib.metadata
import re
from typing import TYPE_CHECKING, Any

import attrs

from infercore.errors import PluginLoadError
from infercore.protocols.hooks import ENTRY_POINT_GROUP
from infercore.registry.record import Record, described
from infercore.values.handlers import is_a_handlers

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


@attrs.frozen(kw_only=True)
class Source:
    """An entry point, with the distribution that announces it."""

    entry: Any
    distribution: str | None
    version: str | None

    @property
    def name(self) -> str:
        """The backend's name, as users type it."""
        return str(self.entry.name)


def installed() -> Iterator[Source | Record]:
    """Yield each backend that a distribution on ``sys.path`` announces.

    The distributions are read one by one: broken metadata of one becomes a `Record` with its
    error, where ``importlib.metadata.entry_points`` would fail for all. Of two copies of one
    distribution the first on the path counts, as it does for import.
    """
    seen: set[str] = set()
    for distribution in importlib.metadata.distributions():
        name = "?"
        try:
            text = distribution.read_text("entry_points.txt") or ""
            if ENTRY_POINT_GROUP not in text:
                continue
            name = str(distribution.metadata["Name"])
            if _normal(name) not in seen:
                seen.add(_normal(name))
                yield from _entries(distribution, name)
        except Exception as error:  # one try for each distribution
            if is_a_handlers(error):
                raise
            yield _unreadable(name, error)


def given(entry_points: Iterable[Any]) -> Iterator[Source]:
    """Yield a source for each of ``entry_points``."""
    for entry in entry_points:
        distribution = getattr(entry, "dist", None)
        yield Source(
            entry=entry,
            distribution=getattr(distribution, "name", None),
            version=getattr(distribution, "version", None),
        )


def _entries(distribution: importlib.metadata.Distribution, name: str) -> list[Source]:
    found = [entry for entry in distribution.entry_points if entry.group == ENTRY_POINT_GROUP]
    return [
        Source(entry=entry, distribution=name, version=distribution.version)
        for entry in dict.fromkeys(found)
    ]


def _normal(name: str) -> str:
    """The form in which names of distributions are compared (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _unreadable(distribution: str, cause: Exception) -> Record:
    error = PluginLoadError(
        f"the metadata of {distribution} cannot be read ({described(cause)}); reinstall it",
        plugin=distribution,
        distribution=distribution,
    )
    error.__cause__ = cause
    return Record(name=distribution, error=error, distribution=distribution)
