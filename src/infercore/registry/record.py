"""One plugin as found: its backend, or the error that keeps it from working."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import attrs

from infercore.errors import BackendUnavailableError, PluginError
from infercore.values.handlers import is_a_handlers
from infercore.values.info import BackendDescriptor, BackendInfo, DeviceInfo

if TYPE_CHECKING:
    from collections.abc import Callable

Failure = PluginError | BackendUnavailableError


@attrs.frozen(kw_only=True)
class Record:
    """An entry point and what became of it.

    Without ``error`` the backend can be used. With one, ``descriptor`` is there only where the
    plugin itself is sound and its engine cannot run here. ``version`` is the distribution's.
    """

    name: str
    descriptor: BackendDescriptor | None = None
    error: Failure | None = None
    distribution: str | None = None
    version: str | None = None

    @property
    def reason(self) -> str | None:
        """Why it cannot be used, in one line; None where it can."""
        if self.error is None:
            return None
        if isinstance(self.error, BackendUnavailableError):
            return one_line(self.error.reason)
        return one_line(str(self.error))

    def usable(self) -> BackendDescriptor:
        """Return the descriptor. Raises the stored `PluginError` or `BackendUnavailableError`."""
        if self.error is not None:
            raise copy.copy(self.error) from self.error.__cause__
        if self.descriptor is None:
            raise PluginError(f"plugin {self.name} has no backend", plugin=self.name)
        return self.descriptor

    def info(self, *, devices: bool = False) -> BackendInfo:
        """Return what is known; with ``devices`` the engine is imported to list them.

        An engine that turns out then to be unusable here is not ``available``.
        """
        about = self.descriptor
        found = _devices(about) if devices and about and self.error is None else _Devices()
        return BackendInfo(
            name=self.name,
            available=self.error is None and found.usable,
            reason=self.reason or found.reason,
            summary=about.summary if about else "",
            formats=about.formats if about else (),
            distribution=self.distribution,
            plugin_version=self.version,
            version=_engine_version(about),
            api_version=about.api_version if about else None,
            priority=about.priority if about else 0,
            devices=found.devices,
        )


@attrs.frozen(kw_only=True)
class _Devices:
    """The devices of an engine; ``reason`` where they cannot be listed."""

    devices: tuple[DeviceInfo, ...] = ()
    reason: str | None = None
    usable: bool = True


def one_line(text: str) -> str:
    """Return ``text`` with its line breaks and runs of blanks made single blanks."""
    return " ".join(text.split())


def described(error: BaseException) -> str:
    """Return the type and the text of ``error`` in one line."""
    text = one_line(str(error))
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _engine_version(descriptor: BackendDescriptor | None) -> str | None:
    """A version that cannot be read is no reason to hide the backend."""
    if descriptor is None or descriptor.engine_version is None:
        return None
    tell: Callable[[], object] = descriptor.engine_version
    try:
        version = tell()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if is_a_handlers(error):
            raise
        return None
    return None if version is None else str(version)


def _devices(descriptor: BackendDescriptor) -> _Devices:
    if descriptor.devices is None:
        return _Devices()
    try:
        devices = tuple(descriptor.devices())
        wrong = [device for device in devices if not isinstance(device, DeviceInfo)]
    except BackendUnavailableError as error:
        return _Devices(reason=one_line(error.reason), usable=False)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a plugin may even call sys.exit
        if is_a_handlers(error):
            raise
        return _Devices(reason=f"its devices cannot be listed: {described(error)}")
    if wrong:
        return _Devices(reason=f"its devices cannot be listed: {wrong[0]!r} is not a DeviceInfo")
    return _Devices(devices=devices)
