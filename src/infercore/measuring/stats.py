"""Medians with their spread, and runs that take turns."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, TypeVar

import attrs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence


T = TypeVar("T")


@attrs.frozen(kw_only=True)
class Spread:
    """The median of ``n`` values, the least and the greatest of them."""

    median: float
    low: float
    high: float
    n: int


def spread(values: Sequence[float]) -> Spread:
    """Return the median and the range of ``values``, of which there must be one."""
    return Spread(
        median=statistics.median(values), low=min(values), high=max(values), n=len(values)
    )


def ratios(values: Sequence[float], by: Sequence[float]) -> Spread:
    """Return the spread of ``values`` over ``by``, pair by pair."""
    return spread([a / b for a, b in zip(values, by, strict=True)])


def in_turns(runs: Mapping[str, Callable[[], T]], n: int) -> dict[str, list[T]]:
    """Run everything ``n`` times in turns, each round begun by another; return what they gave.

    What slows the machine for a while then slows all of them, so that their ratios hold.
    """
    results: dict[str, list[T]] = {name: [] for name in runs}
    for turn in range(n):
        for name in _rotated(list(runs), turn):
            results[name].append(runs[name]())
    return results


def _rotated(names: list[str], by: int) -> Iterator[str]:
    start = by % len(names)
    yield from names[start:]
    yield from names[:start]


def number(value: float) -> str:
    """Return ``value`` with three or four significant digits, and no exponent."""
    for limit, digits in ((0.1, 4), (1, 3), (10, 2), (100, 1)):
        if abs(value) < limit:
            return f"{value:.{digits}f}"
    return f"{value:.0f}"
