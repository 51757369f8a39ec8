"""Settings that change while a context is open: they change whole, or not at all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from infercore.engine import calls
from infercore.errors import InferCoreError

if TYPE_CHECKING:
    from collections.abc import Callable

    from infercore.engine.native import Native


def change(
    native: Native, own: Callable[..., object], value: tuple[Any, ...], before: tuple[Any, ...]
) -> None:
    """Call the engine's ``own`` with ``value``.

    After an interruption nobody knows how far it came, so ``before`` is set again; where that
    fails too, the context is trusted no more.
    """
    try:
        native.judged(own, *value)
    except BaseException as error:
        if not isinstance(error, InferCoreError) and not calls.is_of_the_engine(error):
            try:
                own(*before)
            except BaseException:  # noqa: BLE001  (what broke the call off is raised)
                native.lock.fail(error)
        raise
