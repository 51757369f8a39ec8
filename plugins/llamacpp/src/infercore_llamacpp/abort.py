"""Stopping a decode that runs: by a flag that any thread may set, or by asking a callback."""

from __future__ import annotations

import ctypes
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from infercore_llamacpp import log
from infercore_llamacpp.library import api

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


_LIBC = ctypes.CDLL("msvcrt" if sys.platform == "win32" else None)


class AbortSwitch:
    """What the engine asks at every graph node whether to stop.

    With no callback set it asks ``strlen`` about two bytes: true once the first is not zero. That
    is compiled code, so asking costs nothing and needs no interpreter lock.
    """

    def __init__(self, context: int) -> None:
        self._context = context
        self._flag = ctypes.create_string_buffer(2)
        self._native = ctypes.cast(_LIBC.strlen, api.ggml_abort_callback)
        self.ask(None)

    def set(self) -> None:
        """Make the running call, or the next one, stop. May be called from any thread."""
        self._flag[0] = b"\1"

    def clear(self) -> None:
        """Let later calls run."""
        self._flag[0] = b"\0"

    def ask(self, callback: Callable[[], bool] | None) -> None:
        """Ask ``callback`` too; None goes back to the flag alone."""
        chosen = (
            self._native if callback is None else api.ggml_abort_callback(self._asker(callback))
        )
        api.llama_set_abort_callback(self._context, chosen, ctypes.addressof(self._flag))
        self._callback = chosen  # the engine holds only a pointer, and had the old one till now

    @contextmanager
    def off(self) -> Iterator[None]:
        """Let nothing stop what runs inside."""
        api.llama_set_abort_callback(self._context, api.ggml_abort_callback(), None)
        try:
            yield
        finally:
            address = ctypes.addressof(self._flag)
            api.llama_set_abort_callback(self._context, self._callback, address)

    def _asker(self, callback: Callable[[], bool]) -> Callable[[object], bool]:
        def ask(_data: object) -> bool:
            if self._flag[0] != b"\0":
                return True
            try:
                return callback()
            except BaseException as error:  # noqa: BLE001  (cannot pass through the engine)
                log.was_raised = True
                log.thread.raised = error
                return True

        return ask
