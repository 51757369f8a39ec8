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
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import attrs

from infercore import trial
from infercore.engine import digest
from infercore.engine.patience import STEP_S, Patience
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
) -> None:
    """Load the file in a child, where ``config.check_in_child`` wants it; the child has ended then.

    ``only_plan`` lets it plan the memory and nothing more, which is not remembered. ``adapters``
    are tried on the model. Large files that the engine compiles late (`BackendDescriptor`) are only
    loaded: `FirstContext` tries the rest.
    Raises `ModelFormatError` where the child died or hung, `OutOfMemoryError` where the system
    ended it, and, only if it was asked for, `ModelLoadError` where no child can be had.
    """
    subject = _Subject(descriptor, path, config, tuple(adapters))
    if (files := subject.files()) is None:
        return
    until = "plan" if only_plan else "load" if subject.is_tried_in_two(files) else "use"
    found = subject.trial(files, until)
    if found is not None and _try(subject, found) and not only_plan:
        _keep(found.keys)


class FirstContext:
    """The trial of the first context of a large file, of whose load less was tried.

    Its child works beside the trial of the load, and the parent's load, if there is a processor for
    it, and has ended before the parent opens a context. It ends with this object too, and with the
    process.
    """

    def __init__(self, descriptor: BackendDescriptor, path: str, config: ModelConfig) -> None:
        self._subject = _Subject(descriptor, path, config)
        self._begun: weakref.finalize[Any, Any] | None = None

    def start_child(self) -> None:
        """Start the child, where it is needed and there is a processor for it."""
        due = self._due()
        if due is not None and sys.executable and _has_processors():
            with contextlib.suppress(OSError):  # the trial says what is wrong
                child = _start(self._subject.descriptor.name)
                self._begun = weakref.finalize(self, _end, child, due, os.getpid())
                _ask(child, due.asked)

    @scarcity_typed()
    def check(self) -> None:
        """Open a context in the child, and evaluate some tokens. Raises as `check` does."""
        due = self._due()
        if due is not None and _try(self._subject, due, self._child_of(due)):
            _keep(due.keys)
        self.close()

    def close(self) -> None:
        """End a child that nobody waits for."""
        if self._begun is not None:
            self._begun()

    def _due(self) -> _Trial | None:
        if not os.path.exists(self._subject.path) or (files := self._subject.files()) is None:
            return None
        return self._subject.trial(files, "use") if self._subject.is_tried_in_two(files) else None

    def _child_of(self, due: _Trial) -> subprocess.Popen[str] | None:
        """Return the child that began; none where the files are others now, nor in a fork."""
        if self._begun is None or (held := self._begun.peek()) is None:
            return None
        child, begun, parent = held[2]
        if begun != due or parent != os.getpid() or self._begun.detach() is None:
            return None
        return cast("subprocess.Popen[str]", child)


def _end(child: subprocess.Popen[str], _: _Trial, parent: int) -> None:
    if parent == os.getpid():
        with child:
            child.kill()


def _has_processors() -> bool:
    affinity = getattr(os, "sched_getaffinity", None)
    return ((os.cpu_count() or 1) if affinity is None else len(affinity(0))) > 1


@attrs.frozen
class _Trial:
    """What a child is asked, how long it may take, and what it is known by afterwards."""

    asked: str
    seconds: float
    keys: Sequence[str]


@attrs.frozen
class _Subject:
    """What is tried."""

    descriptor: BackendDescriptor
    path: str
    config: ModelConfig
    adapters: tuple[str, ...] = ()

    def files(self) -> dict[str, int] | None:
        """Return the size of each file; None if nobody wants a trial, or there are none to read."""
        if not _is_wanted(self.descriptor, self.config):
            return None
        try:
            found = [*_files(self.descriptor, self.path), *self.adapters]
            return {file: os.path.getsize(file) for file in found}
        except OSError:
            return None  # the backend itself says what is wrong

    def is_tried_in_two(self, files: Mapping[str, int]) -> bool:
        late = self.descriptor.compiles_late and not self.adapters
        return late and sum(files.values()) > _AT_ONCE_UP_TO_BYTES

    def trial(self, files: Mapping[str, int], until: str) -> _Trial | None:
        """Return the trial that is due; None where it is known how it ended."""
        asked = _request(self.descriptor, self.path, self.config, until, self.adapters)
        if asked is None:
            _no_child(self.path, self.config, "its options cannot be handed over")
            return None
        keys = _keys(self.descriptor, asked, list(files), only_load=until == "load")
        if not keys or (self.config.check_in_child is None and _is_known(keys)):
            return None
        n_bytes = sum(files.values())
        return _Trial(asked, _LEAST_SECONDS + n_bytes / _BYTES_PER_SECOND, keys)


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


def _no_child(path: str, config: ModelConfig, reason: str) -> bool:
    if config.check_in_child:
        raise ModelLoadError(
            f"{path} could not be tried in a child process: {reason}; load it without "
            "check_in_child=True",
            path=path,
        )
    logger.warning("%s was not tried in a child process: %s", path, reason)
    return False


def _files(descriptor: BackendDescriptor, path: str) -> Sequence[str]:
    if descriptor.files is not None:
        return [str(file) for file in descriptor.files(path)]
    return digest.files_at(path)


# -- the child ---------------------------------------------------------------------------------


def _try(subject: _Subject, due: _Trial, begun: subprocess.Popen[str] | None = None) -> bool:
    """Run the child, or that which has begun, to its end; return whether there was one.

    Raises for one that did not live.
    """
    path, adapters, descriptor = subject.path, subject.adapters, subject.descriptor
    if begun is None and not sys.executable:
        reason = "this Python is embedded in a program and has no executable"
        return _no_child(path, subject.config, reason)
    try:
        child = _start(descriptor.name) if begun is None else begun
    except OSError as error:
        return _no_child(path, subject.config, str(error))
    check_file = None if adapters or descriptor.check_file is None else descriptor.check_file
    tried = adapters[0] if adapters else path
    try:
        with child:
            try:
                if begun is None:
                    if check_file is not None:
                        check_file(path)
                    _ask(child, due.asked)
                _import_engine(descriptor)
                out, err = _told(child, due.seconds)
            except BaseException:
                child.kill()
                raise
    except subprocess.TimeoutExpired as error:
        raise ModelFormatError(
            f"{tried} failed its trial in a child process: it did not end within "
            f"{due.seconds:.0f} seconds of work; the file is corrupt, or this machine too slow for "
            "it (then load it with check_in_child=False)",
            path=tried,
        ) from error
    if trial.BEGUN not in out:
        return _no_child(path, subject.config, _last_line(err))
    if trial.ENDED not in out:
        raise _death(tried, child.returncode, err)
    return True


def _told(child: subprocess.Popen[str], seconds: float) -> tuple[str, str]:
    """Return what the child wrote until its end. Raises `subprocess.TimeoutExpired`."""
    patience = Patience(child.pid, seconds)
    while True:
        try:
            return child.communicate(timeout=STEP_S)
        except subprocess.TimeoutExpired:  # noqa: PERF203  (twice a second)
            if patience.is_spent():
                raise


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
