"""What an engine's process logs, from warnings up, is logged in the program that it works for."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from infercore.isolated.board import LOG

if TYPE_CHECKING:
    from collections.abc import Callable

_ROOT = "infercore"
_MOST_CHARACTERS = 10_000
_MOST_TOLD = 1000


class ToProgram(logging.Handler):
    """Sends what is logged as an answer that nobody asked for."""

    def __init__(self, send: Callable[[list[Any]], None]) -> None:
        super().__init__(logging.WARNING)
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        """Send a record's text, traceback and all, and whether it is silent if nobody listens."""
        try:
            text = self.format(record)[:_MOST_CHARACTERS]
        except Exception:  # noqa: BLE001  (it is no fault of the call that logged)
            self.handleError(record)
            return
        is_silent = any(
            isinstance(handler, logging.NullHandler)
            for handler in logging.getLogger(record.name).handlers
        )
        self._send([LOG, True, [record.name, record.levelno, text, is_silent], None])

    def listen(self) -> None:
        """Take all that is logged in this process."""
        logger = logging.getLogger(_ROOT)
        logger.handlers, logger.propagate = [self], False


class Told:
    """What the processes of one pool have logged: each line once, though each start logs it."""

    def __init__(self) -> None:
        self._by: dict[tuple[str, str], int] = {}

    def log(self, epoch: int, name: Any, level: Any, text: Any, is_silent: Any) -> None:
        """Log what process number ``epoch`` did, unless an earlier one logged the same.

        Raises `ValueError` for what is no record of this package.
        """
        is_ours = f"{name}.".startswith(f"{_ROOT}.") and type(text) is str
        if not is_ours or type(level) is not int or level < logging.WARNING:
            raise ValueError("no log record of ours")
        if len(self._by) < _MOST_TOLD and self._by.setdefault((name, text), epoch) != epoch:
            return
        logger = logging.getLogger(name)
        if is_silent and not logger.handlers:
            logger.addHandler(logging.NullHandler())
        with suppress(Exception):  # who listens must not disturb who works
            logger.log(level, "%s", text)
