"""A backend and its engine: what it logs, and the package that brings it."""

from __future__ import annotations

import contextlib
import gc
import logging
import re
import signal
import sys
import threading
import time
from functools import partial
from importlib import metadata
from typing import TYPE_CHECKING, Any

from infercore.conformance.expect import equal, that
from infercore.conformance.law import law
from infercore.errors import (
    BackendUnavailableError,
    SessionFatalError,
    UnsupportedFeatureError,
)
from infercore.registry import Registry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from infercore.conformance.rig import Rig


@law("LIFE-16", since="1.2")
def check_what_a_log_handler_raises(rig: Rig) -> None:
    """What a handler of the log raises in the midst of a call is raised by it, and nothing is lost.

    As a Ctrl-C that comes there is. The call can be made again. Calls of a context are made right
    after a change of adapters, for which an engine may prepare its next step anew. What a signal's
    handler raises while a step runs comes out too, and the context holds what it says that it does.
    What Python calls for errors and signals is what it was.
    """
    hooks = _hooks()
    tokens = rig.tokens(4)
    expected = rig.cold(tokens)
    ways: dict[str, Callable[[], None]] = {
        "loading": lambda: rig.another_model().close(),
        "opening": lambda: rig.context().close(),
        "planning": lambda: _planned(rig),
    }
    for name, call in ways.items():
        for at in (0, 3):
            handler = _Raising(at)
            with _logged(handler):
                handler.check(call)
            with contextlib.suppress(UnsupportedFeatureError):
                call()
            rig.near(rig.cold(tokens), expected, f"logits after a handler raised while {name}")
    _check_calls(rig, tokens, expected)
    _check_signals(rig)
    for name, opened in {"a context": rig.context(), "a model": rig.another_model()}.items():
        handler = _Raising(0)
        with _logged(handler):
            handler.check(opened.close)
        opened.close()
        that(opened.closed, f"{name} whose close raised is still open")
    equal(_hooks(), hooks, "what Python calls for errors and signals")


def _hooks() -> tuple[object, ...]:
    caught = signal.getsignal(signal.SIGINT)
    return sys.excepthook, sys.unraisablehook, threading.excepthook, caught


def _check_calls(rig: Rig, tokens: list[int], expected: Any) -> None:
    batch = [(token, (0,), i == len(tokens) - 1) for i, token in enumerate(tokens)]
    calls: dict[str, Callable[[Any], object]] = {
        "decode": lambda context: context.decode(tokens),
        "decode_one": lambda context: context.decode_one(tokens[0]),
        "decode_batch": lambda context: context.decode_batch(batch),
        "decode_spans": lambda context: context.decode_spans([(0, tokens, "last")]),
    }
    calls |= {
        "set_threads": lambda context: context.set_threads(2),
        "save_state": lambda context: context.save_state(),
        "load_state": lambda context: context.load_state(context.save_state()),
        "load_sequence": lambda context: context.load_sequence(0, context.save_sequence(0)),
    }
    changes = (1.0, 0.0) if rig.adapter is not None and rig.context().capabilities.lora else ()
    if changes:
        calls["set_adapters"] = lambda context: context.set_adapters(rig.adapters_at(1.0))
    for name, call in calls.items():
        model = rig.another_model() if name == "set_adapters" else rig.model  # which knows none yet
        context = rig.opened(model.new_context(**rig.fields()))
        context.decode(tokens)
        for scale in changes if name != "set_adapters" else ():
            context.set_adapters(rig.adapters_at(scale))
        if name not in ("save_state", "load_state", "load_sequence"):
            context.clear()
        handler = _Raising(0)
        with _logged(handler), contextlib.suppress(UnsupportedFeatureError):
            handler.check(partial(call, context))
        if changes:
            context.set_adapters([])
        context.clear()
        context.decode(tokens)
        rig.near(context.logits(), expected, f"logits after a handler raised in {name}")


_STEPS = {"n_batch": 64, "n_ubatch": 32}


def _check_signals(rig: Rig) -> None:
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGALRM"):
        return  # signals come to the main thread alone
    before, more, probe = rig.tokens(9), rig.tokens(60), rig.tokens(1)
    spans = [(0, more, "last")]
    batch = [(token, (0,), i == len(more) - 1) for i, token in enumerate(more)]
    calls: dict[str, Callable[[Any], object]] = {
        "decode": lambda context: context.decode(more),
        "decode_one": lambda context: context.decode_one(more[0]),
        "decode_batch": lambda context: context.decode_batch(batch),
        "decode_spans": lambda context: context.decode_spans(spans),
    }
    for name, call in calls.items():
        with contextlib.suppress(UnsupportedFeatureError):
            context = rig.context(**_STEPS)
            call(context)  # what comes first takes longer
            context.clear()
            started = time.perf_counter()
            call(context)
            elapsed = time.perf_counter() - started
            for share in (0.2, 0.5, 0.8):
                context = rig.context(**_STEPS)
                context.decode(before)
                if _interrupted(partial(call, context), share * elapsed):
                    with contextlib.suppress(SessionFatalError):  # it may end the context
                        held = list(context.tokens())
                        known = held == [*before, *more][: len(held)]
                        that(known, f"{name} that a signal broke off left the tokens {held}")
                        context.decode(probe)
                        expected = rig.cold([*held, *probe], **_STEPS)
                        rig.near(context.logits(), expected, f"logits after a broken off {name}")
    _check_signals_of_two(rig)


def _check_signals_of_two(rig: Rig) -> None:
    """The same of calls on two sequences: each holds what it says that it does."""
    if not rig.context().capabilities.multi_sequence:
        return
    befores, more = (rig.tokens(9), rig.tokens(5)), (rig.tokens(34), rig.tokens(26))
    probe = rig.tokens(1)[0]
    ends = [len(tokens) - 1 for tokens in more]
    turns = [(i, s) for i in range(max(map(len, more))) for s in (0, 1) if i <= ends[s]]
    batch = [(more[s][i], (s,), i == ends[s]) for i, s in turns]
    spans = [(s, tokens, "last") for s, tokens in enumerate(more)]

    def begun() -> Any:
        context = rig.two(**_STEPS)
        for s, tokens in enumerate(befores):
            context.decode(tokens, seq_id=s)
        return context

    calls: dict[str, Callable[[Any], object]] = {
        "decode_batch": lambda context: context.decode_batch(batch),
        "decode_spans": lambda context: context.decode_spans(spans),
    }
    for name, call in calls.items():
        with contextlib.suppress(UnsupportedFeatureError):
            context = begun()
            started = time.perf_counter()
            call(context)
            elapsed = time.perf_counter() - started
            for share in (0.3, 0.6, 0.9):
                context = begun()
                if _interrupted(partial(call, context), share * elapsed):
                    with contextlib.suppress(SessionFatalError):  # it may end the context
                        _check_each_goes_on(rig, context, befores, more, probe, name)


def _check_each_goes_on(
    rig: Rig, context: Any, befores: Any, more: Any, probe: int, name: str
) -> None:
    for s in (0, 1):
        held, whole = list(context.tokens(s)), [*befores[s], *more[s]]
        known = len(befores[s]) <= len(held) and held == whole[: len(held)]
        that(known, f"{name} that a signal broke off left sequence {s} the tokens {held}")
        context.decode([probe], seq_id=s)
        expected = rig.cold([*held, probe], **_STEPS)
        rig.near(context.logits(), expected, f"logits of sequence {s} after a broken off {name}")


def _interrupted(call: Callable[[], object], delay: float) -> bool:
    """Make the call, and raise in it after ``delay`` seconds; return whether it came to that."""
    came = False

    def handle(*_: object) -> None:
        nonlocal came
        came = True
        raise _RaisedError("a signal")

    collects, old = gc.isenabled(), signal.signal(signal.SIGALRM, handle)
    gc.disable()  # what is raised in callbacks of the collector, whose ever they are, is lost
    try:
        signal.setitimer(signal.ITIMER_REAL, max(delay, 1e-5))
        try:
            call()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except _RaisedError:
        return True
    finally:
        signal.signal(signal.SIGALRM, old)
        if collects:
            gc.enable()
    that(not came, "what a signal's handler raised did not come out of the call")
    return False


def _planned(rig: Rig) -> None:
    with contextlib.suppress(UnsupportedFeatureError):
        rig.model.plan_memory(**rig.fields())


class _RaisedError(Exception):
    """What the handler raises."""


class _Raising(logging.Handler):
    """Raises at the record number ``at``, once."""

    def __init__(self, at: int) -> None:
        super().__init__(logging.DEBUG)
        self._left = at
        self.raised = False

    def emit(self, record: logging.LogRecord) -> None:
        """Count, and raise."""
        self._left -= 1
        if self._left < 0 and not self.raised:
            self.raised = True
            raise _RaisedError(record.getMessage())

    def check(self, call: Callable[[], object]) -> None:
        """Raise `LawError` where it raised in ``call``, and that did not come out."""
        try:
            call()
        except _RaisedError:
            return
        that(not self.raised, "what a handler of the log raised did not come out of the call")


@contextlib.contextmanager
def _logged(handler: logging.Handler) -> Iterator[None]:
    logger = logging.getLogger("infercore")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)


# -- its package -----------------------------------------------------------------------------------


def check_releases(rig: Rig, engine: str) -> None:
    """Raise `LawError` where the backend takes other releases of ``engine`` than it requires.

    With another, or none, it is unavailable, for a reason that names the package; so it is without
    any other package that it requires and the core does not.
    """
    own = _found(rig)
    if own.distribution is None:
        return
    about = own.usable()
    told = about.engine_version() if about.engine_version is not None else ""
    that(metadata.version(engine) in told, f"{engine} {told!r} is not what is installed")
    asked = [
        text for text in metadata.requires(own.distribution) or () if _name(text) == _name(engine)
    ]
    that(asked, f"{own.distribution} does not require {engine}")
    bounds = re.findall(r"(>=|<|==)\s*([\d.]+)", asked[0])
    for version, fits in _versions(bounds):
        with _as_if(engine, version):
            error = _found(rig).error
        that((error is None) == fits, f"{engine} {version}, of {asked[0]}: {error or 'is taken'}")
        if error is not None:
            for fact in (engine, version):
                that(fact in str(error), f"that {engine} {version} is there is not said: {error}")
    with _as_if(engine, None):
        found = _found(rig)
    that(isinstance(found.error, BackendUnavailableError), f"without {engine}: {found.error!r}")
    equal(getattr(found.error, "backend", None), rig.backend, "the backend of the error")
    that(engine in str(found.reason), f"without {engine}: {found.reason}")
    for package, modules in _others_needed(own.distribution, engine):
        with _hidden(modules), _as_if(package, None):
            found = _found(rig)
        is_said = isinstance(found.error, BackendUnavailableError) and package in str(found.reason)
        that(is_said, f"without {package}: {found.reason or 'the backend is usable'}")


def _others_needed(distribution: str, engine: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the other packages that a plugin requires beside the core's, and their modules.

    Without those that only some machines need, and those that bring no modules.
    """
    owners = metadata.packages_distributions()
    core, own = (
        [_name(text) for text in metadata.requires(name) or () if ";" not in text]
        for name in ("infercore", distribution)
    )
    for package in own:
        modules = [module for module, names in owners.items() if package in map(_name, names)]
        if modules and package not in {*core, "infercore", _name(engine)}:
            yield package, modules


def _name(requirement: str) -> str:
    found = re.match(r"[\w.-]+", requirement)
    return re.sub(r"[-_.]+", "-", found[0]).lower() if found is not None else ""


@contextlib.contextmanager
def _hidden(modules: list[str]) -> Iterator[None]:
    """Let ``modules`` be none that can be found."""
    kept = {module: sys.modules.get(module) for module in modules}
    sys.modules.update(dict.fromkeys(modules))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for module, was in kept.items():
            sys.modules.pop(module)
            if was is not None:
                sys.modules[module] = was


def _found(rig: Rig) -> Any:
    return next(record for record in Registry().records() if record.name == rig.backend)


def _versions(bounds: list[tuple[str, str]]) -> Iterator[tuple[str, bool]]:
    """Yield versions at each bound and just beside it, and whether they are required."""
    for sign, text in bounds:
        numbers = [int(number) for number in text.split(".")]
        yield text, sign != "<"
        if any(numbers[1:]) or sign == "==":
            last = max(i for i, number in enumerate(numbers) if number)
            below = [*numbers[:last], numbers[last] - 1]
            yield ".".join(map(str, [*below, 999] if sign == "<" else below)), sign == "<"
        else:
            yield f"{numbers[0] - 1}.999", sign == "<"
        if sign == ">=":
            yield f"{text}.1", True


@contextlib.contextmanager
def _as_if(engine: str, version: str | None) -> Iterator[None]:
    """Let the package be of another version, or not be there, as far as its metadata tells."""
    own: Any = metadata.Distribution.__dict__["from_name"]

    def from_name(cls: type[metadata.Distribution], name: str) -> metadata.Distribution:
        found: metadata.Distribution = own.__func__(cls, name)
        if name.lower() != engine.lower():
            return found
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return _Other(found, version)

    metadata.Distribution.from_name = classmethod(from_name)  # type: ignore[assignment]
    try:
        yield
    finally:
        metadata.Distribution.from_name = own  # type: ignore[method-assign]


class _Other(metadata.Distribution):
    def __init__(self, found: metadata.Distribution, version: str) -> None:
        self._found, self._version = found, version

    @property
    def version(self) -> str:
        """The version that is pretended."""
        return self._version

    def read_text(self, filename: str) -> str | None:
        """Return a file of the metadata."""
        return self._found.read_text(filename)

    def locate_file(self, path: Any) -> Any:
        """Return where a file is."""
        return self._found.locate_file(path)
