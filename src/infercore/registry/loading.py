"""Loads each announced plugin in a try of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pluggy

from infercore.errors import (
    BackendUnavailableError,
    PluginConflictError,
    PluginError,
    PluginLoadError,
)
from infercore.protocols import hooks
from infercore.registry import environment
from infercore.registry.descriptor import validated
from infercore.registry.record import Failure, Record, described, one_line
from infercore.registry.sources import Source
from infercore.values.handlers import is_a_handlers

if TYPE_CHECKING:
    from collections.abc import Iterable

    from infercore.values.info import BackendDescriptor

HOOK = hooks.infercore_backend.__name__


def load_all(found: Iterable[Source | Record]) -> tuple[Record, ...]:
    """Return a record for each of ``found``, sorted by name; none can spoil another."""
    manager = pluggy.PluginManager(hooks.PROJECT)
    manager.add_hookspecs(hooks)
    items = list(found)
    by_name: dict[str, list[Source]] = {}
    for item in items:
        if isinstance(item, Source):
            by_name.setdefault(item.name, []).append(item)
    records = [item for item in items if isinstance(item, Record)]
    for sources in by_name.values():
        records.extend(_load_name(manager, sources))
    return tuple(sorted(records, key=lambda record: (record.name, record.distribution or "")))


def _load_name(manager: pluggy.PluginManager, sources: list[Source]) -> list[Record]:
    """Return the records of all sources that share one name."""
    if (reason := environment.disabled(sources[0].name)) is not None:
        return [_failed(source, _unavailable(source, reason)) for source in sources]
    if len(sources) > 1:
        return [_failed(source, _conflict(source, sources)) for source in sources]
    return [_load(manager, sources[0])]


def _load(manager: pluggy.PluginManager, source: Source) -> Record:
    descriptor = None
    try:
        descriptor = validated(_call_hook(manager, source), source)
        if descriptor.check is not None:
            descriptor.check()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a plugin may even call sys.exit
        if is_a_handlers(error):
            raise
        _roll_back(manager, source)
        return _failed(source, _failure(source, error, descriptor), descriptor)
    return _record(source, descriptor=descriptor)


def _call_hook(manager: pluggy.PluginManager, source: Source) -> Any:
    """Return what the hook of this one plugin returns."""
    plugin = source.entry.load()
    others = manager.get_plugins()
    manager.register(plugin, name=source.name)
    manager.check_pending()
    results = manager.subset_hook_caller(HOOK, remove_plugins=others)()
    if len(results) == 1:
        return results[0]
    raise PluginLoadError(
        f"plugin {source.name} ({source.entry.value}) gives {len(results)} backends instead of "
        f"one; it needs one function {HOOK} with the marker @infercore.hookimpl that returns a "
        f"descriptor{_similar(plugin)}",
        plugin=source.name,
        distribution=source.distribution,
    )


def _roll_back(manager: pluggy.PluginManager, source: Source) -> None:
    """Leave no trace of the plugin, so that its mistakes are not found again in the next one."""
    if manager.has_plugin(source.name):
        manager.unregister(name=source.name)


def _similar(plugin: object) -> str:
    """A hint at functions that may be the hook without its marker."""
    names = [name for name in dir(plugin) if name.startswith(f"{hooks.PROJECT}_")]
    return f" (it has {', '.join(names)})" if names else ""


def _failure(source: Source, error: BaseException, descriptor: BackendDescriptor | None) -> Failure:
    """Return ``error`` as the typed error of this plugin."""
    if isinstance(error, (PluginError, BackendUnavailableError)):
        return error
    if descriptor is not None:
        failure: Failure = _unavailable(source, described(error))
    else:
        failure = PluginLoadError(
            f"plugin {source.name} of {source.distribution or 'an unknown distribution'} cannot "
            f"be loaded: {described(error)}; reinstall it, or name it in {environment.DISABLE}",
            plugin=source.name,
            distribution=source.distribution,
        )
    failure.__cause__ = error
    return failure


def _unavailable(source: Source, reason: str) -> BackendUnavailableError:
    return BackendUnavailableError(
        f"backend {source.name} cannot be used here: {one_line(reason)}",
        backend=source.name,
        reason=reason,
    )


def _conflict(source: Source, sources: list[Source]) -> PluginConflictError:
    names = " and ".join(sorted(str(other.distribution) for other in sources))
    return PluginConflictError(
        f"backend {source.name} is offered by {names}; uninstall all but one of them",
        plugin=source.name,
        distribution=source.distribution,
    )


def _failed(source: Source, error: Failure, descriptor: BackendDescriptor | None = None) -> Record:
    return _record(source, error=error, descriptor=descriptor)


def _record(source: Source, **facts: Any) -> Record:
    return Record(
        name=source.name, distribution=source.distribution, version=source.version, **facts
    )
