"""Tables that are read from the classes: the fields of a config, and the errors with their states.

``config-fields`` takes the name of an attrs class of infercore. Types, defaults and what is
accepted come from the class; what a field means stands in ``infercore.values.field_texts``, which
must have an entry for each field and no others. The lists of fields that docstrings end with are
left out of the reference, which has these tables.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, ClassVar

import attrs
from docutils import nodes
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective

import infercore
from infercore import errors
from infercore.errors import InvalidInputError
from infercore.values import field_texts

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from sphinx.application import Sphinx


class _Unacceptable:
    """A value that no field takes, so that its validator tells what it would take."""

    def __repr__(self) -> str:
        return "this"


class Table(SphinxDirective):
    """A directive that writes a table in Markdown and lets the page's parser read it."""

    def table(self, head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[nodes.Node]:
        """Return the nodes of a table."""
        lines = [_row(head), _row(["---"] * len(head)), *map(_row, rows)]
        content = StringList(lines, source=self.get_source_info()[0])
        parent = nodes.Element()
        self.state.nested_parse(content, self.content_offset, parent)
        return parent.children


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


class ConfigFields(Table):
    """``{config-fields} ContextConfig``: each field, what it takes, its default and meaning."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the table."""
        name = self.arguments[0]
        cls = getattr(infercore, name)
        self.env.note_dependency(field_texts.__file__)
        meanings = field_texts.TEXTS[name]
        fields = attrs.fields(cls)
        odd = {field.name for field in fields} ^ set(meanings)
        if odd:
            raise self.error(f"field_texts and {name} differ in {', '.join(sorted(odd))}")
        rows = [(f"`{f.name}`", accepted(f), default(f), meanings[f.name]) for f in fields]
        return self.table(("field", "takes", "default", "meaning"), rows)


def accepted(field: attrs.Attribute[Any]) -> str:
    """Return what ``field`` takes, in the words of its validator or converter."""
    try:
        if field.converter is not None:
            field.converter(_Unacceptable())
        if field.validator is not None:
            field.validator(None, field, _Unacceptable())
    except InvalidInputError as error:
        return str(error.allowed)
    return "see its meaning"


def default(field: attrs.Attribute[Any]) -> str:
    """Return the default of ``field`` as it is written in Python."""
    value = field.default
    if isinstance(value, attrs.Factory):  # type: ignore[arg-type]
        if value.takes_self:
            return "decided by the other fields"
        value = value.factory()
        if attrs.has(type(value)):
            return f"`{type(value).__name__}()`"
        return "`{}`" if not value else f"`{value!r}`"
    return "needed" if value is attrs.NOTHING else f"`{value!r}`"


class ErrorTable(Table):
    """``{error-table}``: every error, its builtin, its own attributes and the state afterwards."""

    columns: ClassVar = ("error", "is also", "attributes", "state afterwards")

    def run(self) -> list[nodes.Node]:
        """Return the table."""
        found = [v for v in vars(errors).values() if inspect.isclass(v)]
        rows = [_error_row(e) for e in found if issubclass(e, errors.InferCoreError)]
        return self.table(self.columns, rows[1:])


def _error_row(error: type[errors.InferCoreError]) -> tuple[str, ...]:
    builtin = next(base for base in error.__mro__ if base.__module__ == "builtins")
    names = [n for n in inspect.signature(error.__init__).parameters if n not in _NOT_FACTS]
    facts = ", ".join(f"`{name}`" for name in names) or "none"
    link = f"[`{error.__name__}`](#infercore.{error.__name__})"
    return link, f"`{builtin.__name__}`", facts, error.state_after


def leave_out_fields(_: Sphinx, __: str, ___: str, ____: Any, _____: Any, lines: list[str]) -> None:
    """End a docstring before its first list of fields."""
    for place, line in enumerate(lines):
        if line.startswith(field_texts.HEADING):
            del lines[place:]
            break


_NOT_FACTS = {"self", "message", "args", "kwargs"}


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directives."""
    app.add_directive("config-fields", ConfigFields)
    app.add_directive("error-table", ErrorTable)
    app.connect("autodoc-process-docstring", leave_out_fields)
    return {"parallel_read_safe": True}
