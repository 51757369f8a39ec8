"""Requests to a deployment of Serve: what is waited for, and what an answer or a death means."""

from __future__ import annotations

import asyncio
import io
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import DeploymentUnavailableError, RequestCancelledError

from infercore.errors import SessionFatalError
from infercore.isolated import wire
from infercore.isolated.child import DeathError
from infercore_ray.replica import GONE

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor

LOOK_S = 10.0
"""Seconds of waiting after which is asked whether the model is served at all."""


def off_loop(work: Callable[[], Any]) -> Any:
    """Return what ``work`` returns; in another thread where a loop runs in this one.

    Serve refuses to wait in a loop, where a pool's calls that take no time may be made.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return work()
    with ThreadPoolExecutor(1) as other:
        return other.submit(work).result()


class Request:
    """A call of a replica; ``error`` is a `DeathError` where that died, or has not the session.

    ``answered`` is called once, with this; ``has_died`` says whether the replica died. Serve never
    answers what waited for a replica when the application was deleted, so ``look`` is called from
    time to time, which raises `DeploymentUnavailableError` then.
    """

    def __init__(
        self,
        response: Any,
        answered: Callable[[Request], object] | None = None,
        threads: Executor | None = None,
        look: Callable[[], object] | None = None,
    ) -> None:
        self._response = response
        self._look = look
        self._lock = threading.Lock()
        self._threads = threads
        self._answered = answered
        self.done = self
        self.replica: str | None = None
        self.result: Any = None
        self.error: BaseException | None = None
        self.value: Any = None
        self.has_died = False

    def wait(self, timeout: float = -1, /) -> bool:
        """Wait for the answer; an interruption leaves it to be waited for again."""
        if not self._lock.acquire(timeout=timeout if timeout > 0 else -1):
            return False
        try:
            return self._response is None or self._waited(timeout)
        finally:
            self._lock.release()

    def when_open(self, callback: Callable[[], object], /) -> None:
        """Call ``callback`` when the answer is there: a thread waits for it."""
        if self._threads is None:
            callback()
        else:
            self._threads.submit(self.wait).add_done_callback(lambda _: callback())

    def _waited(self, timeout: float) -> bool:
        try:
            self.replica, frame = self._answer(None if timeout < 0 else time.monotonic() + timeout)
        except TimeoutError:
            return False
        except (RequestCancelledError, RayError) as error:
            self.has_died = not isinstance(error, (RequestCancelledError, RayTaskError))
            self.error = error if isinstance(error, RayTaskError) else DeathError(error)
        except DeploymentUnavailableError as error:
            self.error = SessionFatalError(
                f"this model is not served any more: {error}", cause=error
            )
        else:
            self._take(frame)
        self._response = None
        if self._answered is not None:
            self._answered(self)
        return True

    def _answer(self, until: float | None) -> tuple[str, bytes]:
        """Return who answers, and what. Raises `TimeoutError`."""
        while True:
            left = LOOK_S if until is None else until - time.monotonic()
            seconds = max(0.0, min(left, LOOK_S))
            try:
                found: tuple[str, bytes] = off_loop(
                    partial(self._response.result, timeout_s=seconds)
                )
            except TimeoutError:
                if left < LOOK_S:
                    raise
            else:
                return found
            try:
                if self._look is not None:
                    self._look()
            except DeploymentUnavailableError:
                with suppress(Exception):  # it may have ended just now
                    self._response.cancel()  # Serve would look for a replica for ever
                raise

    def _take(self, frame: bytes) -> None:
        if frame == GONE:
            self.error = DeathError(ChildProcessError("the replica does not have this session"))
            return
        is_well, result, self.value = wire.read(io.BytesIO(frame).read)
        if is_well:
            self.result = result
        else:
            self.error = result


def known(result: Any = None, error: BaseException | None = None) -> Request:
    """Return a call that is answered already."""
    request = Request(None)
    request.result, request.error = result, error
    return request
