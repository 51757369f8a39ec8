"""Files that were not seen before are tried in a child process before this one loads them.

Engines end the process over some corrupt files, and whether they will cannot always be read from
the file. So a child loads it first, evaluates some tokens and ends; then the parent loads. What
was tried is remembered in the user's cache folder, by path, device, inode, size and time of each
file, and of smaller files by their digest too.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from infercore import trial
from infercore.engine import digest
from infercore.errors import ModelFormatError, ModelLoadError, OutOfMemoryError
from infercore.registry import default_registry, environment
from infercore.values.files import scarcity_typed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from infercore.values.config import ModelConfig
    from infercore.values.info import BackendDescriptor

logger = logging.getLogger("infercore")

CHILD = trial.__name__
# Modules of the working folder are not the child's business.
_FLAGS = ("-P",) if sys.version_info >= (3, 11) else ()
_LEAST_SECONDS = 120.0
_BYTES_PER_SECOND = 20e6  # a file is read and evaluated faster than this, on any disk
_AT_ONCE_UP_TO_BYTES = 1 << 28  # loading and compiling less takes no longer than starting a child
_HASH_UP_TO_BYTES = 1 << 28  # a larger one is tried sooner than it is hashed
_MAX_KEPT = 4096
_NOT_ASKED = ("check_in_child", "progress")  # fields of a config that are not the child's
_seen: dict[str, None] = {}


@scarcity_typed()
def check(
    descriptor: BackendDescriptor,
    path: str,
    config: ModelConfig,
    *,
    only_plan: bool = False,
    adapters: Sequence[str] = (),
    of_context: bool = False,
) -> None:
    """Load the file in a child, where ``config.check_in_child`` wants it; the child has ended then.

    ``only_plan`` lets it plan the memory and nothing more, which is not remembered. ``adapters``
    are tried on the model. Large files that the engine compiles late (`BackendDescriptor`) are only
    loaded, and compiled in a second trial right before the first context: ``of_context``.
    Raises `ModelFormatError` where the child died or hung, `OutOfMemoryError` where the system
    ended it, and, only if it was asked for, `ModelLoadError` where no child can be had.
    """
    if not _is_wanted(descriptor, config) or (of_context and not os.path.exists(path)):
        return
    files = [*_files(descriptor, path), *adapters]
    try:
        n_bytes = sum(map(os.path.getsize, files))
    except OSError:
        return  # the backend itself says what is wrong
    in_two = descriptor.compiles_late and not adapters and n_bytes > _AT_ONCE_UP_TO_BYTES
    if of_context and not in_two:
        return
    until = "plan" if only_plan else "load" if in_two and not of_context else "use"
    asked = _request(descriptor, path, config, until=until, adapters=adapters)
    if asked is None:
        _no_child(path, config, "its options cannot be handed over")
        return
    keys = _keys(descriptor, asked, files, only_load=in_two and not of_context)
    if not keys or (config.check_in_child is None and _is_known(keys)):
        return
    reason = _try(descriptor, path, adapters, asked, _seconds(n_bytes))
    if reason is not None:
        _no_child(path, config, reason)
        return
    if not only_plan:
        _keep(keys)


def _is_wanted(descriptor: BackendDescriptor, config: ModelConfig) -> bool:
    if config.check_in_child is not None:
        return config.check_in_child
    # One that was handed over in person no child can find.
    return descriptor.tries_in_child and any(
        record.name == descriptor.name for record in default_registry().records()
    )


def _request(
    descriptor: BackendDescriptor,
    path: str,
    config: ModelConfig,
    *,
    until: str,
    adapters: Sequence[str],
) -> str | None:
    """Return what the child is asked to do, None where it cannot be said in JSON."""
    fields = attrs.asdict(config, recurse=False)
    given = {name: _plain(value) for name, value in fields.items() if name not in _NOT_ASKED}
    request: dict[str, Any] = {
        "backend": descriptor.name,
        "path": os.path.abspath(path),
        "config": given,
        "options": _plain(descriptor.trial_options),
    }
    if adapters:
        request["adapters"] = [os.path.abspath(adapter) for adapter in adapters]
    try:
        return json.dumps({**request, "until": until})
    except (TypeError, ValueError):
        return None


def _plain(value: object) -> object:
    return (
        {key: _plain(item) for key, item in value.items()} if isinstance(value, Mapping) else value
    )


def _no_child(path: str, config: ModelConfig, reason: str) -> None:
    if config.check_in_child:
        raise ModelLoadError(
            f"{path} could not be tried in a child process: {reason}; load it without "
            "check_in_child=True",
            path=path,
        )
    logger.warning("%s was not tried in a child process: %s", path, reason)


def _files(descriptor: BackendDescriptor, path: str) -> Sequence[str]:
    if descriptor.files is not None:
        return [str(file) for file in descriptor.files(path)]
    return digest.files_at(path)


def _seconds(n_bytes: int) -> float:
    return _LEAST_SECONDS + n_bytes / _BYTES_PER_SECOND


# -- the child ---------------------------------------------------------------------------------


def _try(
    descriptor: BackendDescriptor,
    path: str,
    adapters: Sequence[str],
    asked: str,
    seconds: float,
) -> str | None:
    """Run the child; return why there was none. Raises for one that did not live."""
    if not sys.executable:
        return "this Python is embedded in a program and has no executable"
    try:
        child = _start(descriptor.name)
    except OSError as error:
        return str(error)
    check_file = None if adapters or descriptor.check_file is None else descriptor.check_file
    tried = adapters[0] if adapters else path
    try:
        with child:
            try:
                if check_file is not None:
                    check_file(path)
                _ask(child, asked)
                _import_engine(descriptor)
                out, err = child.communicate(timeout=seconds)
            except BaseException:
                child.kill()
                raise
    except subprocess.TimeoutExpired as error:
        raise ModelFormatError(
            f"{tried} failed its trial in a child process: it did not end within "
            f"{seconds:.0f} seconds",
            path=tried,
        ) from error
    if trial.BEGUN not in out:
        return _last_line(err)
    if trial.ENDED not in out:
        raise _death(tried, child.returncode, err)
    return None


def _start(backend: str) -> subprocess.Popen[str]:
    """Return the child, which imports the engine and waits to be asked."""
    folders = os.pathsep.join(os.path.abspath(entry) for entry in sys.path if entry)
    return subprocess.Popen(  # noqa: S603  (our own module, in our own interpreter)
        [sys.executable, *_FLAGS, "-m", CHILD, backend],
        env={
            **os.environ,
            "PYTHONPATH": folders,
            environment.ONLY: backend,
            "OPENBLAS_NUM_THREADS": "1",  # NumPy would start threads that nobody needs
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )


def _ask(child: subprocess.Popen[str], asked: str) -> None:
    assert child.stdin is not None  # noqa: S101  (it was asked for)
    with contextlib.suppress(BrokenPipeError):
        child.stdin.write(asked + "\n")
        child.stdin.flush()


def _import_engine(descriptor: BackendDescriptor) -> None:
    """Import what this process will need, while the child works."""
    with contextlib.suppress(Exception):  # the load says what is wrong
        if descriptor.prepare is not None:
            descriptor.prepare(in_child=False)


def _last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "it says nothing")


def _death(path: str, code: int, err: str) -> MemoryError | ModelFormatError:
    if code == -getattr(signal, "SIGKILL", 0):
        return OutOfMemoryError(
            f"the system killed the child process that tried {path}, because memory ran out; close "
            "other programs, or use a smaller model"
        )
    name = signal.Signals(-code).name if code < 0 else f"code {code}"
    return ModelFormatError(
        f"{path} failed its trial in a child process, which ended by {name}: "
        f"{_last_line(err)}; the file is corrupt, or of a kind that the engine cannot run",
        path=path,
    )


# -- what was tried ----------------------------------------------------------------------------


def _keys(
    descriptor: BackendDescriptor, asked: str, files: Sequence[str], *, only_load: bool
) -> list[str]:
    """Return what the trial is known by: files as they lie there, and small ones by content.

    The engine's version and all that was asked for are part of either. Empty where they cannot
    be read, as a folder cannot: the backend itself says what is wrong.
    """
    version = descriptor.engine_version() if descriptor.engine_version is not None else ""
    request = json.loads(asked)
    del request["path"], request["until"], request["options"]
    request.pop("adapters", None)
    how = f"{json.dumps(request, sort_keys=True)}|{version}{'|load' * only_load}"
    try:
        stats = [(os.path.realpath(file), os.stat(file)) for file in sorted(files)]
    except OSError:
        return []
    place = [
        [path, at.st_dev, at.st_ino, at.st_size, at.st_mtime_ns, at.st_ctime_ns]
        for path, at in stats
    ]
    keys = [_hash(f"{how}|{json.dumps(place)}")]
    if keys[0] not in _known() and sum(found.st_size for _, found in stats) <= _HASH_UP_TO_BYTES:
        try:
            keys.append(_hash(f"{how}|{digest.of_files(files)}"))
        except OSError:
            return []
    return keys


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def _is_known(keys: Sequence[str]) -> bool:
    known = _known()
    found = any(key in known for key in keys)
    if found and any(key not in known for key in keys):
        _keep(keys)
    return found


def _known() -> dict[str, None]:
    if not _seen:
        _seen.update(_read())
    return _seen


def _read() -> dict[str, None]:
    path = digest.cache_file("tried.json")
    try:
        kept = json.loads(path.read_text()) if path is not None else []
    except (OSError, ValueError):
        return {}
    return (
        dict.fromkeys(key for key in kept if isinstance(key, str)) if isinstance(kept, list) else {}
    )


def _keep(keys: Sequence[str]) -> None:
    """Remember; where the cache cannot be written the next process tries again."""
    _seen.update(dict.fromkeys(keys))
    path = digest.cache_file("tried.json")
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = list({**_read(), **dict.fromkeys(keys)})[-_MAX_KEPT:]
        handle, name = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "w") as file:
            json.dump(kept, file)
        Path(name).replace(path)
    except OSError:
        return


def forget() -> None:
    """Forget what this process knows; what is in the cache folder is read again."""
    _seen.clear()
