"""Every public call with values of wrong types: a typed error, and the object as it was."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import os
import tempfile
from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

import infercore as ic
from fuzzing import Patience, Wrong
from infercore.protocols import public, session
from infercore.values import checks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from random import Random

LIMIT_S = 30.0
BATCH = 300
ENGINES = {"llamacpp": "gguf-f32", "openvino": "openvino", "reference": "hf"}
FUNCTIONS = (
    "load_model", "open_session", "open_pool", "aopen_session", "aopen_pool", "aopen_context",
    "embed", "rerank", "plan_memory", "get_backend", "backends", "hash_token_ids", "free_bytes",
    "open_regular", "read_regular",
)  # fmt: skip
NOT_CALLED = {
    "native_handle", "close", "__enter__", "__exit__", "aclose", "run", "owner", "share_for_fork",
    "count_open", "check_open", "drain", "adrain", "held",
}  # fmt: skip
_MOST_CHUNKS = 8
_TAKE_FIELDS = {("Model.new_context", "model"), ("Session.decode", "session")}
VALUES: dict[str, Any] = {
    "tokens": [5, 6], "token": 5, "text": "Once", "texts": ["Once"], "prefix": "Once upon",
    "suffix": " a time", "messages": [{"role": "user", "content": "Hi"}], "logits": "last",
    "seq_id": 0, "src": 0, "dst": 1, "p0": -1, "p1": -1, "delta": 1, "d": 2, "n_past": 0, "i": -1,
    "n": 1, "on": True, "entries": [(5, (0,), True)], "spans": [(0, [5, 6], "last")],
    "adapters": [], "callback": None, "name": "llamacpp", "max_tokens": 2, "role": "user",
    "content": "Hi", "namespace": "", "timeout": 1.0, "fields": {}, "decode": {}, "kwargs": {},
}  # fmt: skip


def _modules() -> dict[str, Any]:
    """Return what holds each function and class of values that is called."""
    classes = (
        name
        for name in ic.__all__
        if inspect.isclass(getattr(ic, name)) and hasattr(getattr(ic, name), "__attrs_attrs__")
    )
    found: dict[str, Any] = dict.fromkeys((*FUNCTIONS, *classes), ic)
    if find_spec("starlette"):
        import infercore.serve  # noqa: PLC0415

        found.update(dict.fromkeys(("ServeConfig", "create_app"), infercore.serve))
    return found


_MODULES = _modules()


class Untyped(Exception):  # noqa: N818  (a finding)
    """An exception that is no `InferCoreError`, and the call that it came from."""


class Odd:
    """A class that nothing here knows."""


class Unshown:
    """One that cannot even be shown."""

    def __repr__(self) -> str:
        raise ValueError("no repr")


def fail(*_: object, **__: object) -> None:
    """Raise what a caller's own function may raise."""
    raise ZeroDivisionError


def odd_values() -> list[Any]:
    """Return values of many types; new ones, as some are used up."""
    cycle: list[Any] = []
    cycle.append(cycle)
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    return [
        None, 0, 5, -1, -(2**70), 2**31, 2**70, 1.5, float("nan"), float("inf"), True, 1j, "", "x",
        "\0", "\ud800", "é" * 300, b"", b"x" * 100, bytearray(b"x"), [], [None], ["x"], [[1]],
        [2**70], {}, {"a": 1}, {1: 2}, {None: None}, (1, 2), set(), object(), Odd, Odd(), len, fail,
        np.zeros(3), np.array("x"), np.float32(1), np.int64(3), np.zeros((2, 2), dtype=object),
        iter([1, "x"]), range(3), Ellipsis, NotImplemented, cycle, memoryview(b"ab"), 10**400,
        "../" * 5, "/", "/dev/null", [{"role": "user"}], [{"role": 5, "content": 5}],
        [{"role": "user", "content": object()}], {"type": "regex", "pattern": 5},
        {"type": ["x"]}, {"type": {}}, np.array(["a", "b"]), [np.zeros(2)], {"a": np.zeros(2)},
        {"type": np.zeros(2)}, {"type": "regex", "pattern": np.zeros(2)}, (np.zeros(2), "x"),
        [{"role": np.zeros(2), "content": np.zeros(2)}],
        [(1, 2, 3)], [(5, 0, True)], [(5, (), None)], [-1], [5, 10**6], np.array([5, 10**6]),
        [(10**6, (0,), True)], [(5, (7,), True)], [(5, (-1,), True)], [(0, [10**6], "last")],
        [(9, [5], "last")], [(-1, [5], "all")], range(-1, 2), range(10**6, 10**6 + 2), 10**6,
        ic.ContextConfig(), ic.SamplingConfig(), type, Exception("x"), lambda: None,
        10**5000, -(10**5000), [10**5000], {"maximum": 10**5000}, {10**5000: 1}, Unshown(), deep,
        {"const": deep}, "x" * 100_000,
    ]  # fmt: skip


_OF = {"pool": ("of_pool", "waited_of_pool"), "isolated": ("of_isolated",)}
_UNCHANGED = (ic.InvalidInputError, ic.InvalidStateError, ic.UnsupportedFeatureError)


class World:
    """One engine's objects, each made when it is first used, and anew when it is lost."""

    def __init__(self, backend: str) -> None:
        import infercore_models  # noqa: PLC0415

        self.path = str(infercore_models.path("storyteller", ENGINES[backend]))
        if backend == "reference":
            from infercore.testing import load_reference_model  # noqa: PLC0415

            self.model: Any = load_reference_model()
        else:
            self.model = ic.load_model(self.path, backend=backend)
        self.loop = asyncio.new_event_loop()
        self._fields = {"n_ctx": 64, "n_threads": 1, "n_threads_batch": 1}

    def renew(self, where: str) -> None:
        """Let go of what was lost; the next call makes it anew."""
        for name in (*_OF.get(where, ()), where):
            if (lost := vars(self).pop(name, None)) is not None and name != "model":
                with contextlib.suppress(ic.InferCoreError):
                    self._now(lost.aclose() if hasattr(lost, "aclose") else lost.close())

    def _now(self, result: Any) -> Any:
        return self.loop.run_until_complete(result) if inspect.isawaitable(result) else result

    @cached_property
    def context(self) -> Any:
        """A context of two sequences."""
        context = self.model.new_context(n_seq_max=2, **self._fields)
        context.decode([5, 6, 7])
        return context

    @cached_property
    def session(self) -> Any:
        """A session with a prefix."""
        return self._begun(self.model.new_session(**self._fields))

    @cached_property
    def sampler(self) -> Any:
        """A sampler."""
        return self.model.new_sampler(seed=1)

    @cached_property
    def pool(self) -> Any:
        """A pool for two."""
        return self.model.new_pool(n_parallel=2, **self._fields)

    @cached_property
    def of_pool(self) -> Any:
        """A session of that pool."""
        return self._begun(self.pool.open_session())

    @cached_property
    def waited(self) -> Any:
        """A session whose calls are awaited."""
        return self._now(self._awaited(ic.aopen_session))

    @cached_property
    def waited_context(self) -> Any:
        """A context whose calls are awaited."""
        return self._now(self._awaited(ic.aopen_context, n_seq_max=2))

    @cached_property
    def waited_of_pool(self) -> Any:
        """A session of the pool whose calls are awaited."""
        return self._now(self.pool.aopen_session())

    async def _awaited(self, opening: Any, **fields: Any) -> Any:
        return await opening(self.model, **self._fields, **fields)

    @staticmethod
    def _begun(opened: Any) -> Any:
        opened.ensure_prefix("Once upon a time")
        return opened

    @cached_property
    def isolated(self) -> Any:
        """A pool in a process of its own."""
        if self.model.backend != "llamacpp":
            return self.pool  # what is checked there is the core's, and each process takes seconds
        backend = self.model.backend
        return ic.open_pool(self.path, backend=backend, n_parallel=2, isolate=True, **self._fields)

    @cached_property
    def of_isolated(self) -> Any:
        """A session of that pool."""
        return self._begun(self.isolated.open_session())

    def held(self, where: str) -> Any:
        """Return what a call that is refused leaves as it was."""
        if where == "context":
            context = self.context
            return [(context.tokens(seq), context.n_past(seq)) for seq in (0, 1)]
        if where in ("session", "of_pool"):
            report = getattr(self, where).explain_context()
            return report.state, report.resident_tokens
        return None

    @property
    def tokenizer(self) -> Any:
        return self.model.tokenizer

    @staticmethod
    def targets() -> Iterator[tuple[str, str, str]]:
        """Yield the calls of the protocols: what to show, where the object is held, the method."""
        held = (
            (public.Model, "model"), (public.Tokenizer, "tokenizer"),
            (public.Context, "context"), (public.Sampler, "sampler"),
            (session.Session, "session"), (session.Session, "of_pool"),
            (ic.SessionPool, "pool"), (ic.AsyncSession, "waited"),
            (ic.AsyncSession, "waited_of_pool"), (ic.AsyncContext, "waited_context"),
            (ic.SessionPool, "isolated"), (session.Session, "of_isolated"),
        )  # fmt: skip
        for protocol, where in held:
            for name, member in vars(protocol).items():
                if inspect.isfunction(member) and name not in NOT_CALLED and name[0] != "_":
                    yield f"{protocol.__name__}.{name}", where, name


class Calls:
    """Makes one call a case."""

    def __init__(self) -> None:
        os.chdir(tempfile.mkdtemp(prefix="infercore-fuzz-"))
        names = {"llamacpp": "infercore_llamacpp", "openvino": "infercore_openvino"}
        self._names = [name for name, module in names.items() if find_spec(module)] + ["reference"]
        self._worlds: dict[str, World] = {}

    def world(self, name: str) -> World:
        """Return the objects of an engine, opened once."""
        if name not in self._worlds:
            self._worlds[name] = World(name)
        return self._worlds[name]

    def case(self, random: Random) -> str:
        """Call something with one, two or three odd arguments."""
        world = self.world(random.choice(self._names))
        name, where, method = random.choice(self._all())
        call = called(world, where, method)
        return made(world, name, where, method, self._arguments(random, call, world))

    @staticmethod
    def _all() -> list[tuple[str, str, str]]:
        found = [(name, "", name) for name in _MODULES]
        return found + list(World.targets()) * 2

    def _arguments(self, random: Random, call: Callable[..., Any], world: World) -> dict[str, Any]:
        odd = odd_values()
        usual = usual_values(world)
        found: dict[str, Any] = {}
        names = []
        for parameter in inspect.signature(call).parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                found.update(self._fields(random, parameter.name, call, odd))
            elif parameter.kind is not parameter.VAR_POSITIONAL:
                names.append(parameter.name)
                if parameter.name in usual:
                    found[parameter.name] = usual[parameter.name]
                elif parameter.default is parameter.empty:
                    found[parameter.name] = random.choice(odd)
        for name in random.sample(names, min(len(names), random.choice((1, 1, 1, 2, 3)))):
            found[name] = random.choice(odd)
        return found

    @staticmethod
    def _fields(
        random: Random, name: str, call: Callable[..., Any], odd: list[Any]
    ) -> dict[str, Any]:
        """Fields of configs, as keywords."""
        known = fields_of(name, call)
        found = {field: random.choice(odd) for field in random.sample(known, random.randrange(2))}
        if ic.DecodeConfig in _configs(name, call):
            found.setdefault("max_tokens", 2)
        return found


def called(world: World, where: str, method: str) -> Callable[..., Any]:
    """Return what is called."""
    found: Callable[..., Any] = getattr(
        getattr(world, where) if where else _MODULES[method], method
    )
    return found


def usual_values(world: World) -> dict[str, Any]:
    """Return a value of the right type for each argument that has no default."""
    return {**VALUES, "path": world.path, "path_or_model": world.model}


def _configs(name: str, call: Callable[..., Any]) -> tuple[Any, ...]:
    if name == "decode" or getattr(call, "__name__", "") in ("decode", "chat"):
        return ic.DecodeConfig, ic.SamplingConfig
    return ic.ContextConfig, ic.ModelConfig, ic.SamplingConfig


def fields_of(name: str, call: Callable[..., Any]) -> list[str]:
    """Return the fields of configs that ``call`` may take as keywords, in its argument ``name``."""
    return [field.name for cls in _configs(name, call) for field in cls.__attrs_attrs__]


def made(world: World, name: str, where: str, method: str, arguments: dict[str, Any]) -> str:
    """Make one call; return what was done, raise what is a finding or a typed error."""
    call = called(world, where, method)
    given = ", ".join(f"{field}={checks.shown(value):.80}" for field, value in arguments.items())
    shown = f"{world.model.backend}: {where} {name}({given})"
    try:
        inspect.signature(call).bind(**arguments)
    except TypeError:
        return "Python's own TypeError"
    before = world.held(where)
    try:
        _use(world.loop, call(**arguments))
    except ZeroDivisionError:
        return f"{shown}: the caller's own error"
    except (ic.SessionFatalError, ic.PluginError) as error:
        world.renew(where)
        raise Wrong(f"{shown}: {error!r}") from error
    except ic.SessionClosedError:
        world.renew(where)
        raise
    except _UNCHANGED as error:
        if (after := world.held(where)) != before:
            raise Wrong(f"{shown}: {error!r}, and holds {after}, not {before}") from error
        raise
    except ic.InferCoreError:
        raise
    except OSError as error:  # what a disk says is the system's own error, and documented there
        if not name.endswith((".save", "_regular")):
            raise Untyped(f"{shown}: {error!r}") from error
        return f"{shown}: {error!r}"
    except Exception as error:
        if isinstance(error, TypeError) and "keyword" in str(error):
            return "Python's own TypeError"  # of a call that another process made
        raise Untyped(f"{shown}: {error!r}") from error
    return shown


def _use(loop: Any, result: Any) -> None:
    """Read a stream; close what was opened."""
    if inspect.isawaitable(result):
        _use(loop, loop.run_until_complete(_with_patience(result)))
    elif hasattr(result, "__anext__"):
        loop.run_until_complete(_with_patience(_read(result)))
    elif inspect.isgenerator(result) or hasattr(result, "__next__"):
        with contextlib.closing(result):
            for _ in itertools.islice(result, _MOST_CHUNKS):
                pass
    elif hasattr(result, "close") and not isinstance(result, type):
        _use(loop, result.close())


def sweep(world: World) -> list[tuple[str, str, str, str, int]]:
    """Return every call with every odd value in every argument: (name, where, method, field, i).

    The fields of configs are given to one opener of each kind, not to all that take them; values
    are made beside the reference alone, as they know of no engine.
    """
    found = []
    n_odd = len(odd_values())
    is_reference = world.model.backend not in ENGINES or world.model.backend == "reference"
    for name, where, method in [*((name, "", name) for name in _MODULES), *World.targets()]:
        call = called(world, where, method)
        if inspect.isclass(call) and not is_reference:
            continue
        fields = []
        for parameter in inspect.signature(call).parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                fields += fields_of(parameter.name, call) if (name, where) in _TAKE_FIELDS else []
            elif parameter.kind is not parameter.VAR_POSITIONAL:
                fields.append(parameter.name)
        found += [(name, where, method, field, i) for field in fields for i in range(n_odd)]
    return found


def swept(world: World, entry: tuple[str, str, str, str, int]) -> str:
    """Make one call of `sweep`; the arguments that have no default are as they should be."""
    name, where, method, field, i = entry
    call = called(world, where, method)
    usual, arguments = usual_values(world), {}
    for parameter in inspect.signature(call).parameters.values():
        is_needed = parameter.default is parameter.empty and "VAR" not in parameter.kind.name
        if is_needed and parameter.name in usual:
            arguments[parameter.name] = usual[parameter.name]
    if ic.DecodeConfig in _configs("", call):
        arguments["max_tokens"] = 2
    return made(world, name, where, method, {**arguments, field: odd_values()[i]})


async def _with_patience(work: Any) -> Any:
    """Wait for it, and not for a machine that stood still."""
    task, patience = asyncio.ensure_future(work), Patience(LIMIT_S / 2)
    while not (await asyncio.wait({task}, timeout=patience.step_s()))[0]:
        patience.spend()
        if patience.left_s <= 0:
            return await asyncio.wait_for(task, 0)
    return await task


async def _read(stream: Any) -> None:
    """Read the start of a stream."""
    n = 0
    try:
        async for _ in stream:
            if (n := n + 1) == _MOST_CHUNKS:
                return
    finally:
        await stream.aclose()


def open_target() -> Calls:
    """Return the target."""
    return Calls()
