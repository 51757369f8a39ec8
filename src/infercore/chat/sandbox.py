"""Jinja for templates from untrusted files: no access to Python, and bounds on time and memory.

The sandbox of Jinja keeps a template from Python's insides. It does not keep it from counting to
10**12 or from doubling a string forty times, so that loop steps and calls are counted here, and
the sizes of what operators make are checked before they make it.
"""

from __future__ import annotations

import contextvars
from typing import TYPE_CHECKING, Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from jinja2.parser import Parser
    from jinja2.runtime import Context

MAX_STEPS = 1_000_000  # loop steps and calls of one render
MAX_SIZE = 64_000_000  # characters or items of one value, and of the whole text
_MAX_EXPONENT = 64

_steps: contextvars.ContextVar[list[int]] = contextvars.ContextVar("steps")


class GenerationTag(Extension):
    """``{% generation %}``: marks an answer for training; here its content is simply rendered.

    Source: ``AssistantTracker`` of Hugging Face transformers.
    """

    tags = {"generation"}  # noqa: RUF012  (Jinja's declaration)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the statements between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The environment in which chat templates run, with the settings that they expect.

    Those are the ones of ``apply_chat_template`` in Hugging Face transformers.
    """

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationTag]
        )
        self.filters["_counted"] = counted
        self.filters["_bounded"] = bounded

    def _generate(
        self,
        source: nodes.Template,
        name: str | None,
        filename: str | None,
        defer_init: bool = False,  # noqa: FBT001, FBT002  (Jinja's signature)
    ) -> str:
        source = _Bounds().visit(source)
        return super()._generate(source, name, filename, defer_init)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Let lists grow and shrink too: some templates count calls so, and all data are copies."""
        is_list_call = isinstance(obj, list) and attr in {"append", "pop"}
        return is_list_call or super().is_safe_attribute(obj, attr, value)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call ``function``, counted; sizes in its arguments are bounded."""
        step()
        for value in (*args, *kwargs.values()):
            if isinstance(value, int) and abs(value) > MAX_SIZE:
                raise SecurityError(f"the number {value} is too large for a chat template")
        return bounded(super().call(context, function, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Apply an operator whose result is not too large."""
        if operator == "**" and not (_small(left) and _small(right)):
            raise SecurityError("a power is too large for a chat template")
        if operator == "*" and _size(left) * _size(right) > MAX_SIZE:
            raise SecurityError("a product is too large for a chat template")
        if operator == "+" and _length(left) + _length(right) > MAX_SIZE:
            raise SecurityError("a sum is too large for a chat template")
        if operator == "%" and isinstance(left, str) and _has_long_width(left):
            raise SecurityError("a format is too wide for a chat template")
        return super().call_binop(context, operator, left, right)


class _Bounds(NodeTransformer):
    """Counts the steps of every loop, and bounds what ``~`` and ``{% set %}`` blocks make."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802  (Jinja's names)
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "_counted")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        return _filtered(node, "_bounded")

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.AssignBlock:  # noqa: N802
        self.generic_visit(node)
        inner = node.filter
        node.filter = nodes.Filter(inner, "_bounded", [], [], None, None, lineno=node.lineno)
        return node


def _filtered(node: Any, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def start() -> contextvars.Token[list[int]]:
    """Begin to count for one render; give the result to `finish`."""
    return _steps.set([0])


def finish(token: contextvars.Token[list[int]]) -> None:
    """Stop counting."""
    _steps.reset(token)


def step() -> None:
    """Count one step. Raises `SecurityError` when there were too many."""
    count = _steps.get()
    count[0] += 1
    if count[0] > MAX_STEPS:
        raise SecurityError(f"the chat template takes more than {MAX_STEPS} steps")


class counted:  # noqa: N801  (a filter)
    """The items of an iterable, each counted as a step; of the same length."""

    def __init__(self, items: Iterable[Any]) -> None:
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            step()
            yield item

    def __len__(self) -> int:
        return len(self._items)  # type: ignore[arg-type]


def bounded(value: Any) -> Any:
    """Return ``value``. Raises `SecurityError` where it is too large."""
    if isinstance(value, str) and len(value) > MAX_SIZE:
        raise SecurityError("a text is too large for a chat template")
    return value


def _small(value: Any) -> bool:
    return not isinstance(value, int) or abs(value) <= _MAX_EXPONENT


def _length(value: Any) -> int:
    return len(value) if isinstance(value, (str, bytes, list, tuple)) else 0


def _size(value: Any) -> int:
    """How many times a product may repeat the other side: a length, or a number."""
    return abs(value) if isinstance(value, int) else _length(value)


def _has_long_width(form: str) -> bool:
    digits = 0
    for character in form:
        digits = digits + 1 if character.isdigit() else 0
        if digits > len(str(MAX_SIZE)) - 1:
            return True
    return "*" in form
