"""Stopping a call that runs."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from infercore.engine import calls
from infercore.errors import DecodeAbortedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from infercore.engine.native import Native


class Abort:
    """What a call asks on its way, and who may stop it.

    An abort that arrives after its call has ended may stop a call that began before the abort
    returned, never a later one. ``asked`` and ``running`` are the two sides of that.
    """

    __slots__ = (
        "_callback", "_callback_error", "_engine_abort", "_lock", "_native", "asked",
        "asks_before_step", "running",
    )  # fmt: skip

    def __init__(self, native: Native) -> None:
        self._native = native
        self._lock = threading.RLock()  # a signal handler may abort
        self.asked = False
        self.running = False
        self._callback: Callable[[], bool] | None = None
        self._callback_error: BaseException | None = None
        optional = native.optional
        declared = native.capabilities.abort
        self._engine_abort = optional.abort if declared else None
        self.asks_before_step = False
        """Whether the callback must be asked before a step, as the engine cannot within one."""

    def ask(self) -> None:
        """Make the call that runs stop; without one running it does nothing."""
        with self._lock:
            if not self.running:
                return
            self.asked = True
            if self._engine_abort is not None:
                with calls.typed(self._native.backend, "aborting"):
                    self._engine_abort()

    def wait(self) -> None:
        """Return once an `ask` of another thread has left the engine."""
        with self._lock:
            pass

    def begin(self) -> None:
        """A call begins that may be stopped."""
        self.forget_late()
        self.running = True

    def forget_late(self) -> None:
        """Before a call that computes: what came too late for the one before must not end it."""
        if self.asked or self.running:
            self.end()

    def end(self) -> None:
        """The call has ended."""
        with self._lock:
            self.running = False
            if self.asked:
                self.asked = False
                if self._native.optional.clear_abort is not None:
                    self._native.judged(self._native.optional.clear_abort)

    def shall_stop(self) -> bool:
        """Whether the call that runs was asked to stop, or the callback wants it to."""
        return self.asked or (self._callback is not None and self._callback())

    def stopped(self, resident: int) -> BaseException:
        """Return what a stopped call raises: `DecodeAbortedError`, or what the callback raised."""
        error, self._callback_error = self._callback_error, None
        return error or aborted_with(resident)

    def set_callback(self, callback: Callable[[], bool] | None) -> None:
        """Ask ``callback`` too, in the engine where it can, else between its calls."""
        asked = None if callback is None else self._guarded(callback)
        own = self._native.optional.set_abort_callback
        if own is not None:
            self._native.judged(own, asked)
        self._callback = asked
        self.asks_before_step = asked is not None and own is None

    def _guarded(self, callback: Callable[[], bool]) -> Callable[[], bool]:
        """Return ``callback`` so that it never raises inside an engine: it aborts instead."""

        def ask() -> bool:
            try:
                return bool(callback())
            except BaseException as error:  # noqa: BLE001  (raised by the call that it stops)
                self._callback_error = error
                return True

        return ask


def aborted_with(resident: int) -> DecodeAbortedError:
    """Return the error of a call that was stopped with ``resident`` tokens held."""
    return DecodeAbortedError(
        f"cancelled with {resident} tokens resident; decode the rest to continue",
        resident_tokens=resident,
    )
