"""Compiles and renders templates; `main` does so in a process of its own, under its limits."""

from __future__ import annotations

import json
import marshal
import os
import signal
import sys
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from functools import lru_cache
from typing import TYPE_CHECKING, Any, BinaryIO

import jinja2
from jinja2.exceptions import SecurityError

from infercore.chat import sandbox
from infercore.chat.wire import (
    HEADER,
    LENGTH,
    MAX_MEMORY_BYTES,
    MAX_TEXT_BYTES,
    REFUSED,
    STOPPED,
    TEXT,
    TOO_MUCH_MEMORY,
    UNREADABLE,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from jinja2 import Template


def answer(
    template: str, variables: Mapping[str, Any], now: tuple[float, float, str]
) -> tuple[bytes, str]:
    """Return what came of one render: `TEXT` and the text, or what is wrong and why.

    ``now`` is the time that `strftime_now` tells: seconds since the epoch, the offset from UTC in
    seconds, and the zone's name.
    """
    try:
        return TEXT, _text(_compiled(template), {**variables, "strftime_now": _clock(*now)})
    except Exception as error:  # noqa: BLE001  (whatever a template brings about is its refusal)
        return _what_it_means(error)


def _what_it_means(error: Exception) -> tuple[bytes, str]:
    if isinstance(error, jinja2.TemplateSyntaxError):
        return UNREADABLE, f"line {error.lineno}: {error}"
    if isinstance(error, SyntaxError):  # of the Python that Jinja makes of it
        return UNREADABLE, f"nested too deeply for a template: {error.msg}"
    if isinstance(error, RecursionError):
        return STOPPED, "it calls itself without end, or is nested too deeply"
    if isinstance(error, MemoryError):
        return STOPPED, TOO_MUCH_MEMORY
    text = str(error) or type(error).__name__
    return STOPPED if isinstance(error, SecurityError) else REFUSED, text


def _text(compiled: Template, variables: dict[str, Any]) -> str:
    token = sandbox.start()
    try:
        parts, n_bytes = [], 0
        for part in compiled.generate(variables):
            n_bytes += len(part.encode())
            if n_bytes > MAX_TEXT_BYTES:
                raise SecurityError(f"it makes more than {MAX_TEXT_BYTES >> 20} MiB of text")
            parts.append(part)
        return "".join(parts)
    finally:
        sandbox.finish(token)


@lru_cache(maxsize=32)
def _compiled(template: str) -> Template:
    environment = sandbox.BoundedEnvironment()
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    return environment.from_string(template)


def _raise(message: str) -> None:
    raise ValueError(message)


def _clock(seconds: float, offset: float, zone: str) -> Callable[[str], str]:
    def strftime_now(form: str) -> str:
        there = timezone(timedelta(seconds=offset), zone)
        return datetime.fromtimestamp(seconds, there).strftime(form)

    return strftime_now


def _to_json(
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002  (as templates call it)
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    """Without the HTML escapes of Jinja's own, as Hugging Face transformers has it."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=_as_list,
    )


def _as_list(value: Any) -> list[Any]:
    """What a filter such as ``map`` returns is a list to a template's author."""
    if isinstance(value, Iterator):
        return list(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


# -- in a process of its own -----------------------------------------------------------------


def main() -> None:
    """Answer requests from standard input until it ends, which it does with the other process."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the other process's business
    answer("{{ x }}", {}, (0.0, 0.0, "UTC"))  # what is imported late counts for nobody
    limit_memory()
    while True:
        head = requests.read(LENGTH.size)
        if len(head) < LENGTH.size:
            return
        kind, text = _answer_to(requests, *LENGTH.unpack(head))
        _send(answers, kind, text)
        if (kind, text) == (STOPPED, TOO_MUCH_MEMORY):
            return  # a new process has all of its memory again


def _answer_to(requests: BinaryIO, size: int) -> tuple[bytes, str]:
    try:
        request = marshal.loads(requests.read(size))  # noqa: S302  (its sender began this process)
    except MemoryError:
        return STOPPED, TOO_MUCH_MEMORY
    seconds, *what = request
    with _Watched(requests.fileno(), seconds):
        return answer(*what)


def _send(answers: BinaryIO, kind: bytes, text: str) -> None:
    data = text.encode("utf-8", errors="backslashreplace")
    answers.write(HEADER.pack(kind, len(data)) + data)
    answers.flush()


class _Watched:
    """Ends this process, whatever it is doing, after ``seconds`` or when the other one dies.

    The kernel does it by signals left at their defaults, so that no call of C can put it off.
    Where there are none, the other process ends this one.
    """

    def __init__(self, file: int, seconds: float) -> None:
        self._file = file
        self._seconds = seconds

    def __enter__(self) -> None:
        self._watch_pipe(on=True)
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, self._seconds)

    def __exit__(self, *_: object) -> None:
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, 0)
        self._watch_pipe(on=False)

    def _watch_pipe(self, *, on: bool) -> None:
        """Have SIGIO sent when the pipe's other end is closed (Linux)."""
        if sys.platform != "linux":
            return
        import fcntl  # noqa: PLC0415  (POSIX)
        import select  # noqa: PLC0415

        flags = fcntl.fcntl(self._file, fcntl.F_GETFL) & ~os.O_ASYNC
        fcntl.fcntl(self._file, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(self._file, fcntl.F_SETFL, flags | (os.O_ASYNC if on else 0))
        if on and select.select([self._file], [], [], 0)[0]:  # it was closed before
            os._exit(0)


def limit_memory() -> None:
    """Let this process take `MAX_MEMORY_BYTES` more than it has, where the platform can (Linux)."""
    if sys.platform != "linux":
        return
    import resource  # noqa: PLC0415  (POSIX)

    with open("/proc/self/statm", encoding="ascii") as file:
        held = int(file.read().split()[0]) * resource.getpagesize()
    limit = held + MAX_MEMORY_BYTES
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
