"""Checks what a plugin's hook returned, and brings it into one shape."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from infercore.errors import InvalidInputError, PluginLoadError, PluginVersionError
from infercore.protocols.hooks import API_VERSION
from infercore.values.checks import is_integer
from infercore.values.info import BackendDescriptor

if TYPE_CHECKING:
    from infercore.registry.sources import Source

REQUIRED = ("name", "api_version", "match", "loader")
CALLABLE = ("match", "loader")
CALLABLE_OR_NONE = ("check", "engine_version", "devices", "plan_memory", "files", "check_file")
NAMES = ("formats", "model_options", "context_options", "neutral_options")


def validated(found: Any, source: Source) -> BackendDescriptor:
    """Return ``found`` as a `BackendDescriptor`; any object with its attributes will do.

    Raises `PluginVersionError` where it was written for another plugin interface,
    `PluginLoadError` where an attribute is missing or of a wrong type.
    """
    missing = [name for name in REQUIRED if not hasattr(found, name)]
    if missing:
        raise _wrong(source, f"its descriptor {found!r} lacks {', '.join(missing)}")
    _check_version(found.api_version, source)
    if found.name != source.name:
        raise _wrong(source, f"its descriptor is named {found.name!r}, not as the entry point")
    fields = {name: getattr(found, name) for name in _fields() if hasattr(found, name)}
    for name, value in fields.items():
        _check_field(name, value, source)
    try:
        return BackendDescriptor(**fields)
    except InvalidInputError as error:
        raise _wrong(source, f"its descriptor is not valid: {error}") from error


def _fields() -> list[str]:
    return [attribute.name for attribute in attrs.fields(BackendDescriptor)]


def _check_version(version: Any, source: Source) -> None:
    if not is_integer(version) or version < 1:
        raise _version_error(
            source, f"states api_version {version!r}; it must be a whole number of at least 1"
        )
    if version > API_VERSION:
        raise _version_error(
            source,
            f"needs version {version} of the plugin interface, this infercore has {API_VERSION}; "
            "upgrade infercore, or install an older version of the plugin",
        )


def _check_field(name: str, value: Any, source: Source) -> None:
    allowed = _allowed(name, value)
    if allowed:
        raise _wrong(source, f"its descriptor has {name}={value!r}, which must be {allowed}")


def _allowed(name: str, value: Any) -> str | None:
    """What ``name`` should hold, where ``value`` is something else."""
    if name in CALLABLE:
        return None if callable(value) else "callable"
    if name in CALLABLE_OR_NONE:
        return None if value is None or callable(value) else "callable or None"
    if name in NAMES:
        return None if _is_strings(value) else "a sequence of strings"
    if name == "summary":
        return None if isinstance(value, str) else "a string"
    if name == "priority":
        return None if is_integer(value) else "a whole number"
    return None


def _is_strings(value: Any) -> bool:
    return isinstance(value, (tuple, list, set, frozenset)) and all(
        isinstance(item, str) for item in value
    )


def _wrong(source: Source, what: str) -> PluginLoadError:
    return PluginLoadError(
        f"plugin {source.name} cannot be used: {what}; report it to the authors of "
        f"{source.distribution or 'the plugin'}",
        plugin=source.name,
        distribution=source.distribution,
    )


def _version_error(source: Source, what: str) -> PluginVersionError:
    return PluginVersionError(
        f"plugin {source.name} ({source.distribution or 'unknown distribution'}) {what}",
        plugin=source.name,
        distribution=source.distribution,
    )
