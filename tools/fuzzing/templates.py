"""Chat templates as a hostile file may hold them: random Jinja that likes to grow.

Every other one is mild: it makes no more than plain Jinja may make here without limits, and the
text is compared with that one's.
"""

from __future__ import annotations

import contextlib
import re
import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

import infercore as ic
from fuzzing import Wrong
from infercore.chat import sandbox, worker
from infercore.chat.template import render

if TYPE_CHECKING:
    from random import Random

LIMIT_S = 25.0  # a template has 2 s of a processor, and 10 s by the clock
BATCH = 100
MAX_GROWTH = 200 << 20  # bytes that this process may take more, whatever the template does
MAX_OTHER = 400 << 20  # bytes of the process that renders, which may take 256 MiB
MAX_TEXT = 16 << 20

# Each with arguments that it takes; NUMBER and TEXT are filled in.
FILTERS = (
    "abs", "attr(TEXT)", "batch(NUMBER)", "batch(NUMBER, TEXT)", "capitalize", "center(NUMBER)",
    "count", "default(TEXT)", "dictsort", "escape", "filesizeformat", "first", "float",
    "forceescape",
    "format(NUMBER, TEXT)", "groupby('k')", "indent(NUMBER)", "indent(TEXT, true, true)", "int",
    "items", "join", "join(TEXT)", "last", "length", "list", "lower", "map('string')",
    "map('upper')", "map('list')", "max", "min", "pprint", "random", "reject('none')",
    "replace('a', TEXT)", "replace('', TEXT)", "reverse", "round(NUMBER)", "safe", "select",
    "slice(NUMBER)", "sort", "string",
    "striptags", "sum", "sum(start=[])", "title", "tojson", "tojson(indent=NUMBER)", "trim",
    "truncate(NUMBER)", "unique", "upper", "urlencode", "urlize", "wordcount", "wordwrap(NUMBER)",
    "wordwrap(1, wrapstring=TEXT)", "xmlattr",
)  # fmt: skip
TESTS = ("defined", "none", "string", "number", "iterable", "mapping", "odd", "true", "sequence")
METHODS = (
    "upper()", "split()", "split(TEXT)", "join(['a'] * NUMBER)", "replace('a', TEXT)",
    "ljust(NUMBER)", "center(NUMBER)", "zfill(NUMBER)", "translate({97: TEXT})", "encode()",
    "format(TEXT, NUMBER)", "expandtabs(NUMBER)", "splitlines()", "strip()", "items()", "keys()",
    "append(1)", "copy()", "count('a')", "bit_length()", "format_map({})", "mro()", "__class__",
    "__init__()", "hex()", "partition(TEXT)", "rsplit(TEXT)",
)  # fmt: skip
CALLS = (
    "range(NUMBER)", "range(NUMBER, NUMBER)", "lipsum(n=NUMBER)", "lipsum(max=NUMBER, min=1)",
    "cycler(TEXT, NUMBER)", "joiner(TEXT)", "namespace(a=NUMBER)", "dict(a=TEXT)",
    "strftime_now('%Y')", "strftime_now(TEXT)", "raise_exception(TEXT)",
)  # fmt: skip
NAMES = (
    "messages", "n.x", "n.y", "x", "i", "loop", "loop.index", "tools", "bos_token", "missing",
    "add_generation_prompt", "range", "self", "caller", "varargs", "messages[0].content",
    "messages[-1]", "messages[1]",
)  # fmt: skip
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2 + 2?"},
]
_PEAK = re.compile(r"VmHWM:\s*(\d+)")
_ADDRESS, _CLOCK = re.compile("0x[0-9a-f]+", re.IGNORECASE), re.compile("strftime_now|lipsum")
VARIABLES: dict[str, Any] = {"add_generation_prompt": True, "tools": None, "bos_token": "<s>"}


class _Maker:
    """Writes a template; ``depth`` bounds its nesting, and ``mild`` the size of what it makes."""

    def __init__(self, random: Random, *, mild: bool = False) -> None:
        self._random = random
        self._mild = mild

    def _pick(self, *choices: Any) -> Any:
        return self._random.choice(choices)

    def number(self) -> str:
        r = self._random
        if self._mild:
            return str(self._pick(0, 1, -1, 2, 3, 7, 12, 1.5))
        return str(self._pick(
            0, 1, -1, 2, 3, 7, r.randrange(100), r.randrange(10**6), 60_000_000, 10**7, 2**31,
            2**63, 10**30, -60_000_000, 1.5, "1e308", "0x7fffffff",
        ))  # fmt: skip

    def text(self) -> str:
        if self._mild:
            return str(self._pick("''", "'a'", "'%s'", "'{0}{1}'", "'\\n'", "'é🙂'", "'ab ' * 3"))
        return str(self._pick(
            "''", "'a'", "'x' * 1000", "'%s'", "'{0}{1}'", "'%100000000d'", "'{:>99999999}'",
            "'\\n'", "'é🙂'", "'ab ' * 100000", "'{% for %}'", "'<|im_end|>'", "'http://a.b '",
            "'y' * 60000000",
        ))  # fmt: skip

    def expression(self, depth: int) -> str:
        r, deeper = self._random, depth - 1
        if depth <= 0:
            return str(self._pick(self.number, self.text, lambda: self._pick(*NAMES))())
        e = self.expression
        kind = r.randrange(12)
        if kind == 0:
            return f"[{e(deeper)}, {e(deeper)}]"
        if kind == 1:
            return f"{{'k': {e(deeper)}, 1: {e(deeper)}}}"
        if kind == 2:
            operator = self._pick("+", "-", "*", "**", "//", "%", "~", "==", "<", "in", "and", "or")
            return f"({e(deeper)} {operator} {e(deeper)})"
        if kind == 3:
            return f"({e(deeper)} ~ {e(deeper)})"
        if kind in (4, 5, 6):
            return f"({e(deeper)} | {self.filled(self._pick(*FILTERS))})"
        if kind == 7:
            return f"({self.text()}).{self.filled(self._pick(*METHODS))}"
        if kind == 8:
            return self.filled(self._pick(*CALLS))
        if kind == 9:
            return f"({e(deeper)})[{self._pick('0', '-1', '1:', '::-1', e(deeper))}]"
        if kind == 10:
            return f"({e(deeper)} is {self._pick(*TESTS)})"
        return f"({self.number()} {self._pick('+', '*', '-')} {self.number()})"

    def filled(self, form: str) -> str:
        """Return ``form`` with its NUMBER and TEXT made."""
        while "NUMBER" in form:
            form = form.replace("NUMBER", self.number(), 1)
        while "TEXT" in form:
            form = form.replace("TEXT", self.text(), 1)
        return form

    def statement(self, depth: int) -> str:
        r, deeper = self._random, depth - 1
        s, e = self.statement, self.expression
        kind = r.randrange(11) if depth > 0 else r.randrange(4)
        if kind <= 1:
            return f"{{{{ {e(3)} }}}}"
        if kind == 2:
            return f"{{% set {self._pick('x', 'n.x', 'n.y')} = {e(3)} %}}"
        if kind == 3:
            grown = (
                "n.x + 'a'"
                if self._mild
                else self._pick(
                    "n.x + n.x", "[n.x, n.x]", "n.x ~ n.x", "n.y + [n.x * 2]", "{1: n.x}"
                )
            )
            return f"{{% set n.x = {grown} %}}"
        if kind in (4, 5, 6):
            far = ("range(3)",) if self._mild else ("range(40)", "range(99999)")
            where = self._pick(*far, "messages", e(2))
            return f"{{% for i in {where} %}}{s(deeper)}{s(deeper)}{{% endfor %}}"
        if kind == 7:
            return f"{{% if {e(2)} %}}{s(deeper)}{{% else %}}{s(deeper)}{{% endif %}}"
        if kind == 8:
            return f"{{% set x %}}{s(deeper)}{{% endset %}}"
        if kind == 9:
            again = "" if self._mild else self._pick("", "{{ f(x) }}", "{{ f(x) }}{{ f(x) }}")
            return f"{{% macro f(x) %}}{s(deeper)}{again}{{% endmacro %}}{{{{ f({e(1)}) }}}}"
        return f"{{% filter {self.filled(self._pick(*FILTERS))} %}}{s(deeper)}{{% endfilter %}}"


def template_of(random: Random) -> str:
    """Return a template; now and then one with a few characters changed."""
    maker = _Maker(random)
    start = "{% set n = namespace(x='abcdefgh', y=[1]) %}"
    text = start + "".join(maker.statement(3) for _ in range(random.randrange(1, 5)))
    for _ in range(random.choice((0,) * 9 + (1, 3))):
        at = random.randrange(len(text))
        text = (
            text[:at] + random.choice("{}%|()[]'\"x0\0\n\ud800") + text[at + random.randrange(2) :]
        )
    return text


def mild_template_of(random: Random) -> str:
    """Return a template that ends soon, whoever renders it."""
    maker = _Maker(random, mild=True)
    body = "".join(maker.statement(2) for _ in range(random.randrange(1, 4)))
    body = body.replace("| random)", "| first)")  # no two of them draw the same
    return "{% set n = namespace(x='abcdefgh', y=[1]) %}" + body


def _plain_text(template: str) -> str | None:
    """Return what Jinja's own sandbox makes of it, None where it refuses."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, sandbox.GenerationTag]
    )
    environment.filters["tojson"] = worker._to_json  # noqa: SLF001  (what is added to Jinja)
    environment.globals["raise_exception"] = worker._raise  # noqa: SLF001
    clock = {"strftime_now": worker._clock(0.0, 0.0, "UTC")}  # noqa: SLF001
    try:
        return environment.from_string(template).render(**VARIABLES, messages=MESSAGES, **clock)
    except Exception:  # noqa: BLE001  (whatever it refuses it for)
        return None


def _most_of_children() -> int:
    """Return the most bytes that a process which renders has held, as far as this can be seen."""
    most = [resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10]  # of those that ended
    for listed in Path("/proc/self/task").glob("*/children"):
        for pid in listed.read_text().split():
            with contextlib.suppress(OSError):
                found = _PEAK.search(Path(f"/proc/{pid}/status").read_text())
                most.append(int(found[1]) << 10 if found else 0)
    return max(most)


def _resident_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class Templates:
    """Renders each template once."""

    def __init__(self) -> None:
        from infercore.testing import load_toy_model  # noqa: PLC0415

        self._model = load_toy_model()
        self._tokenizer = self._model.tokenizer
        self._tokenizer.apply_chat_template(MESSAGES, chat_template="{{ messages }}")
        self._before = _resident_bytes()
        self._most = MAX_OTHER

    def case(self, random: Random) -> str:
        """Render; the text comes out or a typed error, and this process stays small."""
        try:
            return self._compared(random) if random.random() < 0.5 else self._rendered(random)
        except ic.InvalidInputError as error:
            if "has died" in str(error):  # neither of its limits ended the process
                raise Wrong(str(error)) from error
            raise

    @staticmethod
    def _compared(random: Random) -> str:
        template = mild_template_of(random)
        expected = _plain_text(template)
        try:
            text = render(template, MESSAGES, **VARIABLES)
        except ic.InvalidInputError as error:
            if expected is None:
                raise
            raise Wrong(f"refused, and Jinja renders it: {error} in {template!r}") from error
        if _ADDRESS.sub("", text) != _ADDRESS.sub("", expected or "") and not _CLOCK.search(
            template
        ):
            raise Wrong(f"{text!r}, and Jinja makes {expected!r} of {template!r}")
        return f"{text!r}"

    def _rendered(self, random: Random) -> str:
        template = template_of(random)
        variables = {"missing_tools": None} if random.random() < 0.1 else {}
        try:
            text = self._tokenizer.apply_chat_template(
                MESSAGES, chat_template=template, **variables
            )
        finally:
            grown = _resident_bytes() - self._before
            if grown > MAX_GROWTH:
                self._before += grown
                raise Wrong(f"the process grew by {grown >> 20} MiB")
            if sys.platform == "linux" and (held := _most_of_children()) > self._most:
                self._most = 2 * held
                raise Wrong(f"the process that renders took {held >> 20} MiB")
        if (n_bytes := len(text.encode(errors="surrogatepass"))) > MAX_TEXT:
            raise Wrong(f"a text of {n_bytes} bytes")
        return f"{len(text)} characters"


def open_target() -> Templates:
    """Return the target."""
    return Templates()
