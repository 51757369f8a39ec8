"""What laws say of what they find. A law that is broken raises `LawError`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

Error = TypeVar("Error", bound=BaseException)
_SHOWN = 300
_MISTAKES = (AttributeError, NameError, TypeError, LookupError, ArithmeticError)


class LawError(AssertionError):
    """A law is broken; the text says what was found and what should be there."""


class NotApplicable(Exception):  # noqa: N818  (it is an outcome, not an error)
    """A law cannot be tried here; the text says why."""


def that(condition: object, text: str) -> None:
    """Raise `LawError` with ``text`` unless ``condition`` holds."""
    if not condition:
        raise LawError(text)


def equal(found: Any, expected: Any, what: str) -> None:
    """Raise `LawError` unless ``found == expected``."""
    if found != expected:
        raise LawError(f"{what}: found {_short(found)}, expected {_short(expected)}")


def raises(kind: type[Error], call: Callable[..., object], what: str) -> Error:
    """Return the error of type ``kind`` that ``call`` raises; `LawError` for anything else."""
    try:
        result = call()
    except kind as error:
        return error
    except LawError:
        raise
    except Exception as error:
        raise LawError(
            f"{what}: raised {type(error).__name__} ({_short(str(error))}), expected "
            f"{kind.__name__}"
        ) from error
    raise LawError(f"{what}: returned {_short(result)}, expected {kind.__name__}")


def foreseen(error: BaseException, what: str) -> None:
    """Raise `LawError` where ``error`` is what the core makes of a mistake in the plugin's code."""
    cause = error.__cause__
    if isinstance(cause, _MISTAKES) and str(error).startswith("backend "):
        raise LawError(f"{what}: a {type(cause).__name__} is behind it ({cause})") from error


def _short(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
