"""The registry: one scan, kept until it is asked to look again."""

from __future__ import annotations

import importlib
import threading
from typing import TYPE_CHECKING, Any

from infercore.errors import InvalidInputError, InvalidStateError
from infercore.registry import choice, environment

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable

    from infercore.registry.choice import Match
    from infercore.registry.record import Record
    from infercore.values.info import BackendDescriptor, BackendInfo


class Registry:
    """All backends that are announced, usable or not; may be used from many threads.

    ``entry_points`` stands in for those of the installed distributions. Nothing is imported
    before the first question; the answer is kept until `refresh`. Two environment variables act
    before import: ``INFERCORE_DISABLE_PLUGINS=a,b`` and ``INFERCORE_PLUGINS=only,these``.
    """

    def __init__(self, entry_points: Iterable[Any] | None = None) -> None:
        self._entry_points = None if entry_points is None else tuple(entry_points)
        self._records: tuple[Record, ...] | None = None
        self._lock = threading.Lock()
        self._scanning: int | None = None

    def records(self) -> tuple[Record, ...]:
        """Return a record for each entry point, sorted by name. Scans on the first call.

        Raises `InvalidStateError` where a plugin asks while it is being loaded.
        """
        records = self._records
        if records is not None:
            return records
        self._refuse_while_scanning("records")
        with self._lock:
            if self._records is None:
                self._records = self._scan()
            return self._records

    scan = records

    def refresh(self) -> None:
        """Forget what was found; the next question scans again."""
        self._refuse_while_scanning("refresh")
        importlib.invalidate_caches()
        with self._lock:
            self._records = None

    def infos(self, *, devices: bool = False) -> list[BackendInfo]:
        """Return what is known of each backend; ``devices`` imports the usable engines."""
        return [record.info(devices=devices) for record in self.records()]

    def record(self, name: str) -> Record:
        """Return the record of ``name``. Raises `BackendNotFoundError`."""
        return self._record(name)

    def get(self, name: str) -> BackendDescriptor:
        """Return the backend ``name``.

        Raises `BackendNotFoundError` where nothing has that name, `PluginError` where its
        plugin is broken, `BackendUnavailableError` where it cannot run here.
        """
        return self._record(name).usable()

    def matches(self, path: str | os.PathLike[str]) -> list[Match]:
        """Return how well each backend reads ``path``, the best first."""
        return choice.matches(self.records(), choice.path_text(path))

    def choose(self, path: str | os.PathLike[str]) -> BackendDescriptor:
        """Return the backend for ``path``: by score, then priority, then name.

        ``INFERCORE_BACKEND``, where it is set, is taken as if it had been named. Raises
        `BackendNotFoundError` where none reads the path, `ModelNotFoundError` where nothing is
        there, and what `get` raises for the default.
        """
        text = choice.path_text(path)
        if (default := environment.default_backend()) is not None:
            return self._record(default, f" (from {environment.DEFAULT})").usable()
        found = self.matches(text)
        match = choice.best(found)
        if match is None:
            error = choice.none_reads(text, self.records(), found)
            raise error from error.__cause__
        return match.record.usable()

    def _record(self, name: str, asked_by: str = "") -> Record:
        if not isinstance(name, str):
            from infercore.values import checks  # noqa: PLC0415  (the scan needs none of it)

            raise InvalidInputError(
                f"backend={checks.shown(name)} is not a name; give a str such as 'llamacpp'",
                field="backend",
                value=name,
                allowed="a str",
            )
        records = self.records()
        for record in records:
            if record.name == name:
                return record
        raise choice.no_name(name, records, asked_by)

    def _refuse_while_scanning(self, operation: str) -> None:
        """Keep a plugin from waiting for the scan that is loading it."""
        if self._scanning == threading.get_ident():
            raise InvalidStateError(
                "a plugin asked for the backends while it was being loaded; ask later, when a "
                "model is loaded",
                operation=operation,
                state="scanning",
            )

    def _scan(self) -> tuple[Record, ...]:
        from infercore.registry import loading, sources  # noqa: PLC0415  (only when asked)

        self._scanning = threading.get_ident()
        try:
            given = self._entry_points
            return loading.load_all(sources.installed() if given is None else sources.given(given))
        finally:
            self._scanning = None


_DEFAULT = Registry()


def default_registry() -> Registry:
    """Return the registry of this process."""
    return _DEFAULT
