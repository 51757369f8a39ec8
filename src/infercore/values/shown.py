"""How values show themselves: in one line, and in a notebook as a table with bars."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_HASH = re.compile(r"[0-9a-f]{64}")
_MOST_CHARACTERS = 60
_MOST_ITEMS = 8
_COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b79a20")
_FREE = "#e0e0e0"


def one_line(value: Any) -> str:
    """Return ``Name(field=value, ...)`` of an attrs object, without what says nothing.

    Fields that have their default are left out, hashes are cut to eight digits, long texts and
    collections are cut or counted.
    """
    parts = [
        f"{field.name}={_short(getattr(value, field.name))}"
        for field in attrs.fields(type(value))
        if field.repr and not _says_nothing(field, getattr(value, field.name))
    ]
    return f"{type(value).__name__}({', '.join(parts)})"


def _says_nothing(field: attrs.Attribute[Any], value: Any) -> bool:
    if value is None or (hasattr(value, "__len__") and not len(value) and value != ""):
        return True
    return field.default is not attrs.NOTHING and bool(value == field.default)


def _short(value: Any) -> str:
    if isinstance(value, str):
        if _HASH.fullmatch(value):
            return f"'{value[:8]}...'"
        cut = value if len(value) <= _MOST_CHARACTERS else value[:_MOST_CHARACTERS] + "..."
        return repr(cut)
    if isinstance(value, float):
        return f"{value:.4g}"
    if hasattr(value, "items"):
        return f"<{len(value)} entries>"
    if isinstance(value, (tuple, list)) and len(value) > _MOST_ITEMS:
        return f"<{len(value)} items>"
    return repr(value)


def size(n_bytes: float) -> str:
    """Return a number of bytes as people read it: "3.2 MiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n_bytes < 1024 or unit == "GiB":  # noqa: PLR2004  (a unit is 1,024 of the one before)
            return f"{n_bytes:.0f} B" if unit == "B" else f"{n_bytes:.1f} {unit}"
        n_bytes /= 1024
    raise AssertionError  # pragma: no cover


def count(n: float) -> str:
    """Return a number as model cards have it: "0.8M", "7.2B"."""
    for unit, one in (("B", 1e9), ("M", 1e5), ("K", 1e3)):
        if n >= one:
            return f"{n / {'B': 1e9, 'M': 1e6, 'K': 1e3}[unit]:.1f}{unit}"
    return f"{n:.0f}"


def table(
    title: str,
    rows: Iterable[tuple[str, object]],
    bar: Mapping[str, float] | None = None,
    free: float = 0,
) -> str:
    """Return HTML: ``title``, a bar of the parts of ``bar`` with what is ``free``, and the rows."""
    cells = "".join(
        f"<tr><th style='text-align:left'>{_escaped(name)}</th>"
        f"<td style='text-align:left'>{_escaped(_cell(value))}</td></tr>"
        for name, value in rows
    )
    drawn = "" if bar is None else _bar(bar, free)
    return f"<div><b>{_escaped(title)}</b>{drawn}<table>{cells}</table></div>"


def fields_table(value: Any, *, without: tuple[str, ...] = ()) -> str:
    """Return HTML of an attrs object: a row a field that has something in it."""
    rows = [
        (field.name, getattr(value, field.name))
        for field in attrs.fields(type(value))
        if field.name not in without and getattr(value, field.name) not in (None, (), "")
    ]
    return table(type(value).__name__, rows)


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.4g}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return str(value)


def _bar(parts: Mapping[str, float], free: float) -> str:
    total = sum(parts.values()) + free
    if total <= 0:
        return ""
    named = [
        (name, amount, _COLOURS[i % len(_COLOURS)])
        for i, (name, amount) in enumerate(parts.items())
    ]
    drawn = "".join(
        f"<span title='{_escaped(name)}' style='display:inline-block;height:1em;"
        f"width:{100 * amount / total:.2f}%;background:{colour}'></span>"
        for name, amount, colour in [*named, ("free", free, _FREE)]
        if amount > 0
    )
    legend = " ".join(
        f"<span style='color:{colour}'>&#9632;</span> {_escaped(name)}" for name, _, colour in named
    )
    style = "width:100%;max-width:30em;white-space:nowrap"
    return f"<div style='{style}'>{drawn}</div><div>{legend}</div>"


def _escaped(text: object) -> str:
    """Return ``text`` for HTML: names and metadata come from files that nobody has read."""
    from html import escape  # noqa: PLC0415  (kept off the import path)

    return escape(str(text))
