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
_LEVELS = (logging.WARNING, logging.ERROR, logging.CRITICAL)


class ToProgram(logging.Handler):
    """Sends what is logged as an answer that nobody asked for."""

    def __init__(self, send: Callable[[list[Any]], None]) -> None:
        super().__init__(logging.WARNING)
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        """Send a record's text, and whether it is silent where nobody listens."""
        is_silent = any(
            isinstance(handler, logging.NullHandler)
            for handler in logging.getLogger(record.name).handlers
        )
        told = [record.name, record.levelno, record.getMessage()[:_MOST_CHARACTERS], is_silent]
        self._send([LOG, True, told, None])

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
        if not f"{name}.".startswith(f"{_ROOT}.") or type(text) is not str or level not in _LEVELS:
            raise ValueError("no log record of ours")
        if len(self._by) < _MOST_TOLD and self._by.setdefault((name, text), epoch) != epoch:
            return
        logger = logging.getLogger(name)
        if is_silent and not logger.handlers:
            logger.addHandler(logging.NullHandler())
        with suppress(Exception):  # who listens must not disturb who works
            logger.log(level, "%s", text)
