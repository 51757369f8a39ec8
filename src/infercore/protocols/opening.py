"""The error for calling a class directly whose objects come from a function."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

C = TypeVar("C", bound=type)


def opened_by(how: str, *, internal: str | None = None) -> Callable[[C], C]:
    """Make a direct call of the class a `TypeError` that says ``how`` its objects are made.

    Subclasses are made as usual. ``internal`` is the keyword that only the core's own call has.
    """

    def decorate(cls: C) -> C:
        def new(made: type, *_: object, **fields: object) -> Any:
            if made is cls and (internal is None or internal not in fields):
                raise TypeError(f"infercore.{cls.__name__} is not called directly; use {how}")
            return object.__new__(made)

        cls.__new__ = staticmethod(new)  # type: ignore[method-assign,assignment]
        return cls

    return decorate
