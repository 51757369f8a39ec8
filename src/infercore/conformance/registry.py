"""All laws, in order, and the choice of some of them."""

from __future__ import annotations

import fnmatch
import functools
import importlib
import pkgutil
import re
from typing import TYPE_CHECKING, Any

from infercore.conformance.law import GROUPS, TIERS, Law
from infercore.values import checks

if TYPE_CHECKING:
    from collections.abc import Sequence


@functools.cache
def laws() -> tuple[Law, ...]:
    """Return every law of the suite, by group and number."""
    package = importlib.import_module("infercore.conformance.laws")
    found: list[Law] = []
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        found += _laws_of(importlib.import_module(module.name))
    return tuple(sorted(found, key=_place))


def _laws_of(module: Any) -> list[Law]:
    marked = [getattr(value, "__infercore_law__", None) for value in vars(module).values()]
    return [law for law in marked if law is not None and law.check.__module__ == module.__name__]


def _place(law: Law) -> tuple[int, int]:
    group, number = law.id.split("-")
    return list(GROUPS).index(group), int(number)


def select(only: str | Sequence[str] | None = None) -> tuple[Law, ...]:
    """Return the laws that ``only`` names, all for None.

    Each name is an id ("DEC-1"), a pattern over ids (``"KV-*"``), a group ("decode") or a tier
    ("engine"). Raises `InvalidInputError` for a name that selects nothing.
    """
    if only is None:
        return laws()
    names = [only] if isinstance(only, str) else checks.items("only", only, "names of laws")
    chosen = {law.id for name in names for law in _named(name)}
    if not chosen:
        raise checks.refuse("only", only, "ids, patterns, groups or tiers of laws")
    return tuple(law for law in laws() if law.id in chosen)


def _named(name: str) -> list[Law]:
    found = [law for law in laws() if isinstance(name, str) and _is_meant(law, name)]
    if not found:
        known = ", ".join([*GROUPS.values(), *TIERS])
        raise checks.refuse("only", name, f"an id such as DEC-1, a pattern, or one of: {known}")
    return found


def _is_meant(law: Law, name: str) -> bool:
    if name in (law.group, law.tier):
        return True
    return re.match(fnmatch.translate(name.upper()), law.id) is not None
