"""One change each to Python source, of the kinds that authors of plugins make by mistake.

A place is a node of the syntax tree; an operator gives the nodes that could stand there instead.
Annotations, docstrings, decorators, f-strings and what only type checkers read stay as they are.
"""

from __future__ import annotations

import ast
import copy
from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Variants = Iterator[tuple[str, ast.AST]]

COMPARISON, BOUND, SIGN, CONSTANT = "comparison", "bound", "sign", "constant"
ARGUMENTS, AXIS, DROPPED, CALL = "swapped arguments", "axis", "dropped statement", "dropped call"
CONDITION, EXTREME, DEFAULT = "condition", "min and max", "default"
SLICE, COPY, EARLY = "slice", "copy left out", "early end"
OPERATORS = (
    COMPARISON, BOUND, SIGN, CONSTANT, ARGUMENTS, AXIS, DROPPED, CALL, CONDITION, EXTREME, DEFAULT,
    SLICE, COPY, EARLY,
)  # fmt: skip

MAX_SHOWN = 160
"""Characters of a node that are shown whole."""

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
_BOUNDS: dict[type[ast.cmpop], type[ast.operator]] = {
    ast.Lt: ast.Sub, ast.LtE: ast.Add, ast.Gt: ast.Add, ast.GtE: ast.Sub,
}  # fmt: skip
_SIGNS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr,
    ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
_EXTREMES = {
    "min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum", "any": "all",
    "all": "any", "argmin": "argmax", "argmax": "argmin",
}  # fmt: skip
_TRANSPARENT = (
    "abs", "bool", "float", "int", "list", "reversed", "set", "sorted", "tuple", "exp", "log",
    "sqrt", "tanh", "cumsum", "unique",
)  # fmt: skip
_COPIES = ("array", "copy", "deepcopy", "ascontiguousarray", "clone", "tobytes")


@attrs.frozen(kw_only=True)
class Mutant:
    """One change: where it is, and what stands there before and after.

    ``index`` counts the places of the file in the order of `places`, ``variant`` the changes of
    that place. ``lines`` are those of the statement: where none of them runs, nothing changes.
    ``at_import`` tells that it runs when the module is imported.
    """

    file: str
    index: int
    variant: int
    operator: str
    function: str
    line: int
    lines: tuple[int, int]
    at_import: bool
    before: str
    after: str

    @property
    def label(self) -> str:
        """File, line, and what became of what."""
        return f"{self.file}:{self.line} {self.operator}: {self.before} -> {self.after}"


@attrs.frozen
class Place:
    """A node that may be changed, and what it is part of."""

    node: ast.AST
    function: str
    lines: tuple[int, int]
    at_import: bool


def mutants(file: str, source: str) -> list[Mutant]:
    """Return every change that the operators make to ``source``."""
    found = []
    for index, place in enumerate(places(ast.parse(source))):
        for variant, (operator, new) in enumerate(variants(place.node)):
            before, after = _shown(place.node), _shown(new)
            if before == after:
                continue
            line = getattr(place.node, "lineno", place.lines[0])
            found.append(
                Mutant(
                    file=file, index=index, variant=variant, operator=operator,
                    function=place.function, line=line, lines=_lines(place, new),
                    at_import=place.at_import, before=before, after=after,
                )
            )  # fmt: skip
    return found


def changed(source: str, mutant: Mutant) -> ast.Module:
    """Return the tree of ``source`` with the one change of ``mutant``."""
    tree = ast.parse(source)
    for index, place in enumerate(places(tree)):
        if index == mutant.index:
            _, new = list(variants(place.node))[mutant.variant]
            tree = _Replacing(place.node, new).visit(tree)
            return ast.fix_missing_locations(tree)
    raise LookupError(f"{mutant.label} is not in this source")


class _Replacing(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self._old, self._new = old, new

    def visit(self, node: ast.AST) -> Any:
        """Return what stands in the place of ``node``."""
        if node is self._old:
            return ast.copy_location(self._new, node)
        return self.generic_visit(node)


def _shown(node: ast.AST) -> str:
    if isinstance(node, ast.Slice):
        node = ast.Subscript(ast.Name("_"), node)
    text = " ".join(ast.unparse(ast.fix_missing_locations(copy.deepcopy(node))).split())
    return text if len(text) <= MAX_SHOWN else f"{text[:100]} ... {text[-50:]}"


def _lines(place: Place, new: ast.AST) -> tuple[int, int]:
    """The lines that have to run for the change to show."""
    if isinstance(new, ast.FunctionDef) and isinstance(place.node, ast.FunctionDef):
        last = place.node.body[-1]
        return last.lineno, last.end_lineno or last.lineno
    return place.lines


# -- where ------------------------------------------------------------------------------------


def places(tree: ast.Module) -> list[Place]:
    """Return the nodes that may be changed, always in the same order."""
    found: list[Place] = []
    _Places(found).walk_body(tree.body, "", at_import=True)
    return found


class _Places:
    def __init__(self, found: list[Place]) -> None:
        self._found = found

    def walk_body(self, body: list[ast.stmt], function: str, *, at_import: bool) -> None:
        for statement in body:
            if not _is_kept(statement):
                self._statement(statement, function, at_import=at_import)

    def _statement(self, node: ast.stmt, function: str, *, at_import: bool) -> None:
        if isinstance(node, ast.ClassDef):
            self.walk_body(node.body, _inside(function, node.name), at_import=at_import)
            return
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            self._function(node, function, at_import=at_import)
            return
        lines = _header(node)
        self._found.append(Place(node, function, lines, at_import))
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "msg", "type_comment"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.stmt):
                    self.walk_body([child], function, at_import=at_import)
                elif isinstance(child, (ast.ExceptHandler, ast.match_case)):
                    self.walk_body(child.body, function, at_import=at_import)
                elif isinstance(child, ast.AST):
                    self._expression(child, function, lines, at_import=at_import)

    def _function(self, node: Any, function: str, *, at_import: bool) -> None:
        name = _inside(function, node.name)
        lines = (node.lineno, max(node.lineno, node.body[0].lineno - 1))
        self._found.append(Place(node, name, lines, at_import=False))
        for default in [*node.args.defaults, *node.args.kw_defaults]:
            if default is not None:
                self._expression(default, name, lines, at_import=at_import)
        self.walk_body(node.body, name, at_import=False)

    def _expression(
        self, node: ast.AST, function: str, lines: tuple[int, int], *, at_import: bool
    ) -> None:
        if isinstance(node, ast.JoinedStr) or (
            isinstance(node, ast.keyword) and node.arg in _WORDS
        ):
            return
        self._found.append(Place(node, function, lines, at_import))
        for child in ast.iter_child_nodes(node):
            self._expression(child, function, lines, at_import=at_import)


def _inside(function: str, name: str) -> str:
    return f"{function}.{name}" if function else name


def _is_kept(node: ast.stmt) -> bool:
    """Whether it is a docstring, an import, a name for type checkers, or an assertion of types."""
    if isinstance(node, (ast.Import, ast.ImportFrom, ast.Pass, ast.Global, ast.Nonlocal)):
        return True
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return True
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return True
    if isinstance(node, ast.Assign):
        return ast.unparse(node.targets[0]) in ("__all__", "__slots__")
    return False


def _header(node: ast.stmt) -> tuple[int, int]:
    body = getattr(node, "body", None)
    if body:
        return node.lineno, max(node.lineno, body[0].lineno - 1)
    return node.lineno, node.end_lineno or node.lineno


# -- what -------------------------------------------------------------------------------------


def variants(node: ast.AST) -> Variants:
    """Yield an operator's name and what it puts in the place of ``node``, for each change."""
    for kind, changes in _CHANGES:
        if isinstance(node, kind):
            yield from changes(node)


def _with(node: Any, **fields: Any) -> Any:
    """Return a copy of ``node`` with other fields."""
    new = copy.copy(node)
    for name, value in fields.items():
        setattr(new, name, value)
    return new


def _plus(node: ast.expr, operator: ast.operator) -> ast.expr:
    return ast.BinOp(left=node, op=operator, right=ast.Constant(1))


def _compare(node: ast.Compare) -> Variants:
    for i, operator in enumerate(node.ops):
        new = _COMPARISONS[type(operator)]()
        yield COMPARISON, _with(node, ops=[*node.ops[:i], new, *node.ops[i + 1 :]])
        if bound := _BOUNDS.get(type(operator)):
            moved = _plus(node.comparators[i], bound())
            right = [*node.comparators[:i], moved, *node.comparators[i + 1 :]]
            yield BOUND, _with(node, comparators=right)


def _is_text(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, (str, bytes))
    return isinstance(node, (ast.JoinedStr, ast.List, ast.Tuple, ast.Dict))


def _binary(node: ast.BinOp) -> Variants:
    new = _SIGNS.get(type(node.op))
    if new and not _is_text(node.left) and not _is_text(node.right):
        yield SIGN, _with(node, op=new())


def _augmented(node: ast.AugAssign) -> Variants:
    new = _SIGNS.get(type(node.op))
    if new and not _is_text(node.value):
        yield SIGN, _with(node, op=new())
    yield DROPPED, ast.Pass()


def _unary(node: ast.UnaryOp) -> Variants:
    if isinstance(node.op, ast.USub):
        yield SIGN, node.operand
    elif isinstance(node.op, ast.Not):
        yield CONDITION, node.operand
    elif isinstance(node.op, ast.Invert):
        yield SIGN, node.operand


def _constant(node: ast.Constant) -> Variants:
    value = node.value
    if isinstance(value, bool):
        yield CONSTANT, ast.Constant(not value)
    elif isinstance(value, int):
        yield CONSTANT, ast.Constant(value + 1)
        if value > 0:
            yield CONSTANT, ast.Constant(value - 1)
    elif isinstance(value, float):
        yield CONSTANT, ast.Constant(value * 2 if value else 1.0)


def _name_of(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


_UNORDERED = ("array_equal", "gcd", "isclose", "max", "maximum", "min", "minimum")
"""Functions of two arguments that give the same whichever comes first."""
_WORDS = ("hint", "strict")
"""Keywords that compute nothing: advice in an error, and zip's assertion of equal lengths."""


def _call(node: ast.Call) -> Variants:
    name, args = _name_of(node.func), node.args
    can_swap = len(args) > 1 and not any(isinstance(arg, ast.Starred) for arg in args[:2])
    if can_swap and not (name in _UNORDERED and len(args) == 2):  # noqa: PLR2004
        yield ARGUMENTS, _with(node, args=[args[1], args[0], *args[2:]])
    if other := _EXTREMES.get(name):
        yield EXTREME, _with(node, func=_renamed(node.func, other))
    if name in _TRANSPARENT and len(args) == 1:
        yield CALL, args[0]
    if name in _COPIES:
        yield from _uncopied(node)
    if name in ("getattr", "get") and len(args) == (3 if name == "getattr" else 2):
        yield DEFAULT, args[-1]
    if name == "range":
        yield from _ranges(node)
    yield from _keywords(node)


def _renamed(function: ast.expr, name: str) -> ast.expr:
    if isinstance(function, ast.Attribute):
        return _with(function, attr=name)
    return ast.Name(name, ast.Load())


def _uncopied(node: ast.Call) -> Variants:
    if node.args and isinstance(node.args[0], (ast.List, ast.ListComp, ast.Tuple)):
        return  # nobody else holds that list: nothing is copied
    if node.args:
        yield COPY, node.args[0]
    elif isinstance(node.func, ast.Attribute):
        yield COPY, node.func.value


def _ranges(node: ast.Call) -> Variants:
    args = node.args
    end = min(len(args), 2) - 1
    yield SLICE, _with(node, args=[*args[:end], _plus(args[end], ast.Sub()), *args[end + 1 :]])
    if end:
        yield SLICE, _with(node, args=[_plus(args[0], ast.Add()), *args[1:]])


def _keywords(node: ast.Call) -> Variants:
    for i, keyword in enumerate(node.keywords):
        others = [*node.keywords[:i], *node.keywords[i + 1 :]]
        if keyword.arg == "axis":
            turned = _with(keyword, value=_other_axis(keyword.value))
            yield AXIS, _with(node, keywords=[*node.keywords[:i], turned, *node.keywords[i + 1 :]])
        elif keyword.arg is not None and keyword.arg not in _WORDS:
            yield DEFAULT, _with(node, keywords=others)


def _other_axis(node: ast.expr) -> ast.expr:
    return ast.Constant(1 if ast.unparse(node) == "0" else 0)


def _attribute(node: ast.Attribute) -> Variants:
    if node.attr == "T":
        yield AXIS, node.value


def _boolean(node: ast.BoolOp) -> Variants:
    other = ast.Or if isinstance(node.op, ast.And) else ast.And
    yield CONDITION, _with(node, op=other())
    if isinstance(node.op, ast.Or):
        yield DEFAULT, node.values[-1]


def _choice(node: ast.IfExp) -> Variants:
    yield CONDITION, node.body
    yield CONDITION, node.orelse


def _if(node: ast.If) -> Variants:
    yield CONDITION, _with(node, test=ast.Constant(True))
    yield CONDITION, _with(node, test=ast.Constant(False))


def _while(node: ast.While) -> Variants:
    yield CONDITION, _with(node, test=ast.Constant(False))
    yield EARLY, _with(node, body=[*node.body, ast.Break()])


def _for(node: ast.For) -> Variants:
    yield EARLY, _with(node, body=[*node.body, ast.Break()])


def _comprehension(node: ast.comprehension) -> Variants:
    for i in range(len(node.ifs)):
        yield CONDITION, _with(node, ifs=[*node.ifs[:i], *node.ifs[i + 1 :]])


def _slice(node: ast.Slice) -> Variants:
    upper = ast.Constant(-1) if node.upper is None else _plus(node.upper, ast.Sub())
    if node.step is None:
        yield SLICE, _with(node, upper=upper)
    if node.lower is not None:
        yield SLICE, _with(node, lower=_plus(node.lower, ast.Add()))


def _lone(node: ast.Expr) -> Variants:
    if isinstance(node.value, ast.Call):
        yield CALL, ast.Pass()


def _assign(node: ast.Assign) -> Variants:
    if all(isinstance(target, (ast.Attribute, ast.Subscript)) for target in node.targets):
        yield DROPPED, ast.Pass()


def _dropped(node: ast.AST) -> Variants:
    names = isinstance(node, ast.Delete) and all(isinstance(t, ast.Name) for t in node.targets)
    if not names:  # a name that ends here does so with its function, too
        yield DROPPED, ast.Pass()


def _returns(node: ast.FunctionDef) -> Variants:
    """A function that gives nothing back returns before its last statement."""
    first = 1 if ast.get_docstring(node, clean=False) is not None else 0
    gives = any(isinstance(n, (ast.Yield, ast.YieldFrom)) for n in ast.walk(node)) or any(
        isinstance(n, ast.Return) and n.value is not None for n in ast.walk(node)
    )
    if not gives and len(node.body) - first > 1:
        yield EARLY, _with(node, body=[*node.body[:-1], ast.Return(), node.body[-1]])


_CHANGES: tuple[tuple[type[ast.AST], Callable[[Any], Variants]], ...] = (
    (ast.Compare, _compare),
    (ast.BinOp, _binary),
    (ast.AugAssign, _augmented),
    (ast.UnaryOp, _unary),
    (ast.Constant, _constant),
    (ast.Call, _call),
    (ast.Attribute, _attribute),
    (ast.BoolOp, _boolean),
    (ast.IfExp, _choice),
    (ast.If, _if),
    (ast.While, _while),
    (ast.For, _for),
    (ast.comprehension, _comprehension),
    (ast.Slice, _slice),
    (ast.Expr, _lone),
    (ast.Assign, _assign),
    (ast.Delete, _dropped),
    (ast.Raise, _dropped),
    (ast.FunctionDef, _returns),
)
