"""Wrong backends: each does one thing wrong, and names the laws that must find it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

MUTANTS: dict[str, Mutant] = {}


@attrs.frozen(kw_only=True)
class Mutant:
    """A change of a right backend, and the ids of the laws that it breaks."""

    name: str
    kills: tuple[str, ...]
    change: Callable[[pytest.MonkeyPatch], None]
    base: str = "toy"


def breaks(*kills: str, base: str = "toy") -> Callable[[Any], Any]:
    """Enter a function, which patches classes, as a mutant that breaks the laws ``kills``."""

    def enter(change: Callable[[pytest.MonkeyPatch], None]) -> Callable[..., None]:
        name = change.__name__
        if name in MUTANTS:
            raise ValueError(f"there are two mutants {name}")
        MUTANTS[name] = Mutant(name=name, kills=kills, change=change, base=base)
        return change

    return enter


def around(m: pytest.MonkeyPatch, cls: Any, method: str, change: Callable[..., Any]) -> None:
    """Replace ``cls.method`` by ``change(old, self, ...)``."""
    old = getattr(cls, method)

    def changed(self: Any, *args: Any, **kwargs: Any) -> Any:
        return change(old, self, *args, **kwargs)

    m.setattr(cls, method, changed)


def result(m: pytest.MonkeyPatch, cls: Any, method: str, change: Callable[[Any], Any]) -> None:
    """Let ``cls.method`` return ``change(what it returned)``."""
    around(m, cls, method, lambda old, self, *a, **k: change(old(self, *a, **k)))


def told(m: pytest.MonkeyPatch, cls: Any, method: str, **changes: Any) -> None:
    """Let ``cls.method`` tell other values in its status: ``field=lambda status: value``."""

    def change(status: Any) -> Any:
        return attrs.evolve(status, **{name: of(status) for name, of in changes.items()})

    result(m, cls, method, change)


def instead(
    m: pytest.MonkeyPatch, cls: Any, method: str, error: Any, value: Callable[..., Any]
) -> None:
    """Let ``cls.method`` return ``value(self)`` where it should raise ``error``."""

    def change(old: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return old(self, *args, **kwargs)
        except error:
            return value(self)

    around(m, cls, method, change)


def nothing(m: pytest.MonkeyPatch, cls: Any, method: str, value: Any = None) -> None:
    """Let ``cls.method`` do nothing."""
    m.setattr(cls, method, lambda *_, **__: value)


def load_all() -> dict[str, Mutant]:
    """Return every mutant by name."""
    from conformance.mutants import (  # noqa: F401
        of_adapters,
        of_attention,
        of_children,
        of_contexts,
        of_corners,
        of_decoding,
        of_encoders,
        of_files,
        of_forks,
        of_further,
        of_lives,
        of_made_rows,
        of_pools,
        of_sampling,
        of_sequences,
        of_sessions,
        of_settings,
        of_streams,
        of_tokenizers,
        of_told,
    )

    return dict(MUTANTS)
