"""Stopping a call that runs."""

from __future__ import annotations

from infercore.engine import calls
from infercore.engine.context_base import ContextBase
from infercore.errors import DecodeAbortedError


class Aborting(ContextBase):
    """abort, and what a call asks on its way.

    An abort that arrives after its call has ended may stop a call that began before the abort
    returned, never a later one.
    """

    def abort(self) -> None:
        """Make the call that runs stop; without one running it does nothing."""
        with self._abort_lock:
            if not self._abortable:
                return
            self._aborted = True
            if self.capabilities.abort and hasattr(self._inner, "abort"):
                with calls.typed(self._backend, "aborting"):
                    self._inner.abort()

    def _begin_abortable(self) -> None:
        self._forget_late_abort()
        self._abortable = True

    def _forget_late_abort(self) -> None:
        """Before a call that computes: what came too late for the one before must not end it."""
        if self._aborted or self._abortable:
            self._end_abortable()

    def _end_abortable(self) -> None:
        with self._abort_lock:
            self._abortable = False
            if self._aborted:
                self._aborted = False
                if hasattr(self._inner, "clear_abort"):
                    self._judged(self._inner.clear_abort)

    def _check_abort(self, seq_id: int) -> None:
        if self._shall_stop():
            raise self._take_callback_error() or aborted_with(self._cells.length(seq_id))

    def _shall_stop(self) -> bool:
        callback = self._abort_callback
        return self._aborted or (callback is not None and callback())

    def _take_callback_error(self) -> BaseException | None:
        error, self._callback_error = self._callback_error, None
        return error


def aborted_with(resident: int) -> DecodeAbortedError:
    """Return the error of a call that was stopped with ``resident`` tokens held."""
    return DecodeAbortedError(
        f"cancelled with {resident} tokens resident; decode the rest to go on",
        resident_tokens=resident,
    )
