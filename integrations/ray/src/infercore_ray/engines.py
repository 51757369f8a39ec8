"""The replicas of a model as a pool sees them: who answers, who died, and where a session is."""

from __future__ import annotations

import io
import itertools
import secrets
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import Context
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, cast

import attrs
import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import DeploymentUnavailableError

from infercore.errors import (
    InvalidInputError,
    InvalidStateError,
    SessionClosedError,
    SessionFatalError,
)
from infercore.isolated import wire
from infercore.isolated.child import DeathError
from infercore.isolated.pool import IsolatedPool
from infercore.values import checks
from infercore.values.pool import PoolStats
from infercore_ray.blocks import blocks_of
from infercore_ray.requests import Request, known, off_loop
from infercore_ray.routing import Route

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from infercore.session.pool import SessionPool

PREFIX = "model-"
"""What the name of a model's deployment begins with."""
_MOST_DEATHS = 3
_MOST_DEATHS_OF_STREAMS = 6
"""Streams of one replica see its death together, so one of them is no proof."""
_MOST_READERS = 1024
_STATS_S = 5.0
_LOOK_S = 1.0
_LEAVE_S = 2.0
_MOST_ID = 2**62
_AFTER_THE_FACT = frozenset({"cancel", "close", "explain_context"})
"""Calls that need no replica where the session has none."""
_INNOCENT = frozenset({"next", "end", *_AFTER_THE_FACT})
_NO_WORK = frozenset({"end", *_AFTER_THE_FACT})
_OF_STREAMS = frozenset({"open", "next"})
_BESIDE = frozenset({"cancel", "explain_context"})
"""Calls that come beside the one that a session is in."""
_BEGINS = frozenset({"ensure_prefix", "open", "sample_many", "beam_search"})
_ADDED = (
    "n_open", "n_running", "n_waiting", "n_cells", "n_cells_used", "n_cells_shared",
    "prompt_tokens", "cached_tokens", "restored_tokens", "generated_tokens", "n_steps",
    "n_preempted", "n_moved_out", "n_restarts",
)  # fmt: skip


def new_id() -> int:
    """Return a number for a session that no other program has."""
    return 1 + secrets.randbelow(_MOST_ID)


class Engines:
    """Answers for a pool by the replicas of a Serve deployment."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._calls = handle.options(method_name="call")
        self._lock = threading.Lock()
        self._busy: set[Place] = set()  # those with a call or a stream that has not ended
        self._drains = False
        self._origin = secrets.token_hex(8)
        self._numbers = itertools.count(1)
        self.reports: dict[str, Any] = {}
        """What empty sessions report, by their options."""
        self._threads = ThreadPoolExecutor(_MOST_READERS, thread_name_prefix="infercore-reader")
        self.n_restarts = 0
        self.fatal: SessionFatalError | None = None
        self.closed = False
        self.dropped: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self.facts: dict[str, Any] = self.ask("facts")
        threading.Thread(
            target=_end_dropped, args=(self.dropped,), name="infercore-left", daemon=True
        ).start()

    @property
    def counts(self) -> dict[str, int]:
        """Nothing: `stats` says what the replicas count that are there."""
        return {}

    def place(self) -> Place:
        """Return where a new session lives: nowhere yet."""
        return Place(self)

    def check(self) -> None:
        """Raise unless a call may be made."""
        if self.closed:
            raise SessionClosedError("this pool is closed; open a new one")
        if self.fatal is not None:
            raise SessionFatalError(str(self.fatal), cause=self.fatal.cause)

    def send(
        self,
        route: Route,
        request: Sequence[Any],
        answered: Callable[[Request], object] | None = None,
    ) -> Request:
        """Send a request on its way. Raises for what cannot cross."""
        frame = wire.pack(list(request))
        ours = attrs.evolve(route, origin=self._origin, number=next(self._numbers))
        # Serve would give all calls of an HTTP request one id, by which a router takes one for the
        # other, and cancel them with the request
        response = Context().run(self._calls.remote, ours, frame)
        return Request(response, answered, self._threads, self._look)

    def _look(self) -> None:
        """Raise `DeploymentUnavailableError` where the model is not served any more."""
        asked = Context().run(self._handle.options(method_name="where").remote)
        try:
            off_loop(partial(asked.result, timeout_s=_LOOK_S))
        except TimeoutError:  # it waits for a replica: there may be none yet
            with suppress(Exception):  # it may have ended just now
                asked.cancel()
        except RayError:  # it has just died
            pass

    def ask(self, name: str, *args: Any, **fields: Any) -> Any:
        """Return what a replica answers, another one where one died over it."""
        cause: BaseException | None = None
        for _ in range(_MOST_DEATHS):
            request = self.send(Route(begins=True, works=True), (0, name, list(args), fields))
            request.wait()
            if request.error is None:
                return request.result
            if not isinstance(request.error, DeathError):
                raise request.error
            cause = request.error.cause
        raise SessionFatalError(
            f"replicas died over {name!r}: {cause}", cause=cause or ChildProcessError()
        )

    def _ask_all(self, name: str, *args: Any, timeout: float | None = None) -> list[Any]:
        """Return what the replicas answer that are there. Raises `TimeoutError`."""
        frame = wire.pack([0, name, list(args), {}])
        asked = self._handle.broadcast("ask", frame)
        try:
            answers = off_loop(partial(asked.results, timeout_s=timeout, return_exceptions=True))
        except DeploymentUnavailableError:  # there is none
            return []
        found = []
        for answer in answers:
            if isinstance(answer, TimeoutError):
                raise answer
            if not isinstance(answer, BaseException):  # it died: it has nothing any more
                is_well, result, _ = wire.read(io.BytesIO(answer[1]).read)
                if not is_well:
                    raise result
                found.append(result)
        return found

    def stats(self) -> PoolStats | None:
        """Return the sum of what the replicas count; None where one does not answer at once."""
        try:
            found: list[PoolStats] = self._ask_all("stats", timeout=_STATS_S)
        except TimeoutError:
            return None
        if not found:
            return PoolStats()
        sums = {name: sum(getattr(each, name) for each in found) for name in _ADDED}
        n_steps = sums["n_steps"]
        batch = sum(each.mean_batch * each.n_steps for each in found) / n_steps if n_steps else 0.0
        return attrs.evolve(found[0], **sums, mean_batch=batch)

    def flush(self, namespace: str | None) -> None:
        """Forget what the replicas keep of sequences that lost their cells."""
        self._ask_all("of_pool", "flush_cache", [namespace], {})

    def close_at(self, replica: str, target: int) -> None:
        """Close a session at a replica that it was moved from."""
        self.send(Route(at=replica), (target, "close", [], {})).wait()

    def begins(self, place: Place) -> bool:
        """Note that a session begins a call; False where the pool drains. One call goes on."""
        with self._lock:
            if not self._drains:
                self._busy.add(place)
            return place in self._busy

    def ends(self, place: Place) -> None:
        """Note that the call of a session has ended."""
        with self._lock:
            self._busy.discard(place)

    def drain(self, timeout: float | None) -> bool:
        """Wait until the calls of this program have ended; the replicas go on for others.

        After ``timeout`` seconds the rest are cancelled.
        """
        until = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            self._drains = True
        while self._busy:
            if until is not None and time.monotonic() > until:
                with self._lock:
                    left = list(self._busy)
                for place in left:
                    place.cancel()
                return False
            time.sleep(0.005)
        return True

    def close(self, *, wait: bool = True) -> None:
        """End what this program has of the replicas, which go on; idempotent."""
        if self.closed:
            return
        self.closed = True
        with suppress(Exception):  # there may be no Ray any more
            leaving = self._handle.broadcast("leave", self._origin)
            if wait:
                off_loop(partial(leaving.results, timeout_s=_LEAVE_S, return_exceptions=True))
        self.dropped.put(None)
        self._threads.shutdown(wait=False)


def _go_on(_: Any) -> None:
    """Wait for nothing."""


def _end_dropped(dropped: SimpleQueue[Callable[[], object] | None]) -> None:
    """Close sessions that were dropped; finalizers put them here."""
    while (work := dropped.get()) is not None:
        with suppress(Exception):  # a replica that is gone has no session left
            work()


class _Left:
    """Takes what was dropped of one session."""

    def __init__(self, place: Place, dropped: SimpleQueue[Any]) -> None:
        self._place = place
        self._dropped = dropped

    def put(self, item: tuple[int, str], /) -> None:
        """Note that a session has nobody any more."""
        self._dropped.put(partial(self._place.let_go, *item))


class Place:
    """The replica that has a session; none before its first call, and after that one died.

    A session is brought to a replica together with the first call that needs one: only then is
    known which prefix it wants. After `_MOST_DEATHS` deaths in a row over its calls it is ended, or
    `_MOST_DEATHS_OF_STREAMS` while it was read, unless it got further meanwhile.
    """

    def __init__(
        self,
        engines: Engines,
        *,
        epoch: int = 1,
        replica: str | None = None,
        namespace: str = "",
        tokens: Sequence[int] = (),
    ) -> None:
        self._engines = engines
        self._lock = threading.Lock()
        self._epoch = epoch
        self._replica = replica
        self._namespace = namespace
        self._tokens = tokens
        self._given: list[Any] | None = None
        self._id: int | None = None
        self._n_deaths = self._n_deaths_read = 0
        self.left = _Left(self, engines.dropped)
        self.ended: dict[int, BaseException] = {}

    @property
    def closed(self) -> bool:
        """Whether the pool is closed."""
        return self._engines.closed

    @property
    def replica(self) -> str | None:
        """The name of the replica that has the session."""
        return self._replica

    def here(self) -> int:
        """Return how many places there have been."""
        self._engines.check()
        return self._epoch

    def beside(self) -> Place:
        """Return where a fork lives: on the same replica."""
        return Place(
            self._engines,
            epoch=self._epoch,
            replica=self._replica,
            namespace=self._namespace,
            tokens=self._tokens,
        )

    @property
    def living(self) -> int:
        """Return how many places there have been, 0 where none is known now."""
        return 0 if self._replica is None else self._epoch

    def is_lone(self, target: int) -> bool:  # noqa: ARG002  (all are alike)
        """Whether the session is to be tried alone: it has another replica each time."""
        return False

    def let_first(self, mark: int) -> None:
        """Wait for nobody: sessions that saw a death go to different replicas."""

    @contextmanager
    def alone(self, mark: int) -> Iterator[Callable[[Any], None]]:  # noqa: ARG002
        """Hold back nobody."""
        yield _go_on

    def forget_session(self, target: int) -> None:
        """Forget what was held against a session that is closed."""
        self.ended.pop(target, None)

    def went_on(self, target: int) -> None:  # noqa: ARG002
        """Note that the session got further."""
        self._n_deaths = self._n_deaths_read = 0

    def send(
        self,
        epoch: int,
        target: int,
        name: str,
        args: Sequence[Any] = (),
        fields: Mapping[str, Any] | None = None,
    ) -> Request:
        """Send a call to where the session is, which is brought somewhere first if need be."""
        if epoch != self._epoch:
            gone = ChildProcessError("the replica that had this session is gone")
            return known(error=DeathError(gone))
        given = {} if fields is None else dict(fields)
        if name == "open_session":
            return self._later(list(args), given)
        if name not in _INNOCENT and not self._engines.begins(self):
            return known(error=SessionClosedError("this pool drains; open a new one"))
        try:
            call = self._sent(epoch, target, name, args, given)
        except BaseException:
            self._engines.ends(self)
            raise
        if name == "close" or (call.error is not None and not isinstance(call.error, DeathError)):
            self._engines.ends(self)
        return call

    def send_next(self, epoch: int, target: int) -> Request:
        """Ask for a stream's next chunk."""
        return self.send(epoch, target, "next")

    def cancel(self) -> None:
        """Cancel what runs."""
        self.send(self._epoch, 0, "cancel")

    def _sent(
        self, epoch: int, target: int, name: str, args: Sequence[Any], given: dict[str, Any]
    ) -> Request:
        gone = DeathError(ChildProcessError("the replica that had this session is gone"))
        begins = name in _BEGINS and self._replica is not None  # it has not just arrived there
        if self._replica is None:
            if name in _AFTER_THE_FACT or self._given is None:
                return known(error=gone)
            opened = self._arrive(target, name, args, given)
            if opened.error is not None:
                return opened
        knows = name in _BEGINS or name == "close"
        route = Route(
            at=self._replica,
            blocks=self._blocks(self._tokens) if knows else (),
            begins=begins,
            works=name not in _NO_WORK,
        )
        answered = partial(self._answered, epoch, target, name)
        return self._engines.send(route, (self._id or target, name, list(args), given), answered)

    def _blocks(self, tokens: Sequence[int]) -> tuple[bytes, ...]:
        return tuple(blocks_of(self._namespace, tokens))

    def let_go(self, target: int, name: str) -> None:
        """End what was dropped, if it is anywhere."""
        self._engines.ends(self)
        if self._replica is not None and not self.closed:
            self.send(self._epoch, target, name).wait()

    # -- arriving ------------------------------------------------------------------------------

    def _later(self, given: list[Any], fields: dict[str, Any]) -> Request:
        """Bring a session with its first call; at once where its options were never tried."""
        self._given = [given, fields]
        target, options, value = given
        self._namespace = options.get("namespace", "")
        key = repr(sorted(options.items(), key=repr))
        report = self._engines.reports.get(key)
        if value is not None or report is not None:
            return known(report)
        tried = self._open(target, "open_session", (), options, None, fields)
        if tried.error is None:  # it tells what an empty one reports, and is in nobody's way
            self._engines.reports[key] = tried.result
            close = partial(self._engines.close_at, str(tried.replica), self._id or target)
            self._engines.dropped.put(close)
        return tried

    def _arrive(
        self, target: int, name: str, args: Sequence[Any], fields: Mapping[str, Any]
    ) -> Request:
        """Bring the session to a replica that holds what this call begins with."""
        given, more = self._given or ([], {})
        _, options, value = given
        tokens = self._tokens_of(name, args, fields) if value is None else value["tokens"]
        opened = self._open(target, name, tokens, options, value, more)
        if opened.error is None:
            self._replica, self._given, self._tokens = opened.replica, None, tokens
        return opened

    def _open(
        self,
        target: int,
        name: str,
        tokens: Sequence[int],
        options: Mapping[str, Any],
        value: Any,
        more: Mapping[str, Any],
    ) -> Request:
        """Open a session where its tokens are held, over a call of ``name``."""
        route = Route(blocks=self._blocks(tokens), begins=True, works=True)
        answered = partial(self._answered, self._epoch, target, name, is_call=False)
        self._id = new_id()  # what a replica still has of an earlier stay is another session
        request = (0, "open_session", [self._id, options, value], dict(more))
        opened = self._engines.send(route, request, answered)
        opened.wait()
        return opened

    def _tokens_of(
        self, name: str, args: Sequence[Any], fields: Mapping[str, Any]
    ) -> Sequence[int]:
        """Return what a call begins with, for the router; nothing where that is not known."""
        if name == "open":
            name, args, fields, *_ = args
        if name not in {"ensure_prefix", "prefill_suffix", "generating", "chat"}:
            return ()
        given = args[0] if args else ""
        if isinstance(given, (list, tuple)) and name != "chat":
            return given if all(type(token) is int for token in given) else ()
        kept = {key: value for key, value in fields.items() if key == "tools"}
        try:
            found: list[int] = self._engines.ask("tokens_of", name, [given], kept)
        except Exception:  # noqa: BLE001  (the call itself says what is wrong with it)
            return ()
        return found

    # -- answers -------------------------------------------------------------------------------

    def _answered(
        self, epoch: int, target: int, name: str, request: Request, *, is_call: bool = True
    ) -> None:
        """Note what an answer brought: the tokens there are now, or that the replica is gone."""
        if not isinstance(request.error, DeathError):
            if request.value is not None:
                self._tokens = request.value["tokens"]
            goes_on = request.error is None and request.value is None
            if is_call and name not in _BESIDE and not (name in _OF_STREAMS and goes_on):
                self._engines.ends(self)
            return
        with self._lock:
            if epoch != self._epoch:
                return
            left, self._replica = self._replica, None
            self._epoch += 1
            if request.has_died:
                self._engines.n_restarts += 1
                self._n_deaths += name not in _INNOCENT
                self._n_deaths_read += name == "next"
            elif left is not None:  # it was sent elsewhere, for its replica had much to do
                close = partial(self._engines.close_at, left, self._id or target)
                self._engines.dropped.put(close)
            if self._n_deaths >= _MOST_DEATHS or self._n_deaths_read >= _MOST_DEATHS_OF_STREAMS:
                self.ended[target] = request.error.cause
                self._engines.ends(self)


class ReplicaPool(IsolatedPool):
    """The pool of a model that Ray serves."""

    def __init__(self, engines: Engines) -> None:
        super().__init__(engines, engines.facts["config"])
        self._waiters = ThreadPoolExecutor(_MOST_READERS, thread_name_prefix="infercore-waiter")

    def new_target(self) -> int:
        """Return a number for a session that no other program has."""
        return new_id()


def connect(name: str) -> SessionPool:
    """Return the pool of the model ``name`` that an application on this Ray serves.

    It has the face of `SessionPool`; closing it leaves the replicas to others. A program that is
    not in a Ray yet joins the one that runs here, or that ``RAY_ADDRESS`` names. Raises
    `InvalidStateError` where there is none, `InvalidInputError` where no application serves that
    model, or several do.
    """
    checks.check_text("name", name)
    if not ray.is_initialized():
        try:
            ray.init(address="auto", log_to_driver=False)
        except ConnectionError as error:
            raise InvalidStateError(
                "no Ray runs here that could serve a model; start one, or set RAY_ADDRESS",
                operation="connect",
                state="no Ray",
            ) from error
    apps = serve.status().applications
    wanted = PREFIX + name
    found = [app for app, told in apps.items() if wanted in told.deployments]
    if len(found) != 1:
        models = sorted(
            each[len(PREFIX) :]
            for told in apps.values()
            for each in told.deployments
            if each.startswith(PREFIX)
        )
        raise InvalidInputError(
            f"{len(found)} applications serve a model {name!r}; there is {models}",
            field="name",
            value=name,
            allowed="the name of a model that one application serves",
        )
    return connect_to(wanted, found[0])


class Opening:
    """Opens the pool of a deployment; ``isolated`` says that its engines are in other processes."""

    isolated = True

    def __init__(self, deployment: str, app: str) -> None:
        self._deployment = deployment
        self._app = app

    def __call__(self) -> SessionPool:
        """Return the pool."""
        return connect_to(self._deployment, self._app)


def connect_to(deployment: str, app: str) -> SessionPool:
    """Return the pool of a deployment."""
    handle = serve.get_deployment_handle(deployment, app)
    return cast("SessionPool", ReplicaPool(Engines(handle)))
