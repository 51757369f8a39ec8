"""What happens where the system grants no more memory."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infercore.conformance import children
from infercore.conformance.expect import that
from infercore.conformance.law import law
from infercore.errors import (
    InferCoreError,
    InvalidInputError,
    OutOfMemoryError,
    PluginError,
    UnsupportedFeatureError,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from infercore.conformance.rig import Rig

_STATUS = Path("/proc/self/status")
_WANTED, _ROOM = 2**29, 2**26
"""Bytes that a context takes, and those that it can have."""


@law("MEM-14", tier="process", needs="plan_memory", since="1.2")
def check_where_memory_ends(rig: Rig) -> None:
    """Where the system grants no memory for a context, OutOfMemoryError says so, and others go on.

    A context that takes its memory later may be opened, and works. Where the process may open no
    more files, one opens, or any typed error says why not.
    """
    if not _STATUS.exists():
        rig.leave("this platform does not tell a process's memory through /proc")
    if rig.model.capabilities.gpu_offload:
        rig.leave("what drives a GPU takes addresses of its own")
    fields = _large(rig)
    tokens = rig.tokens(12)
    expected, context = rig.cold(tokens), rig.context()
    context.decode(tokens[:8])
    for limit in ("RLIMIT_AS", "RLIMIT_DATA"):
        for _ in range(2):
            _try(rig, little_memory(limit, _ROOM), fields, tokens[:4], OutOfMemoryError)
    with contextlib.suppress(UnsupportedFeatureError):
        few = rig.fields(n_threads=1, n_threads_batch=1)
        _try(rig, _no_more_files(), few, tokens[:4], InferCoreError)
    context.decode(tokens[8:])
    rig.near(context.logits(), expected, "logits of a context beside one that had no memory")
    rig.near(rig.cold(tokens), expected, "logits in a new context after that")


_ROOMS = """
from infercore import OutOfMemoryError, SessionFatalError
from infercore.conformance.laws.scarce import little_memory
limit, *rooms = arguments
tokens = rig.story_at(0, 40)
expected = rig.cold(tokens)
for mib in map(int, rooms):
    try:
        with little_memory(limit, mib * 2**20), rig.open_model() as model:
            with model.new_context(**rig.fields()) as context:
                context.decode(tokens)
                row = context.logits().copy()
    except OutOfMemoryError:
        continue
    except SessionFatalError:
        break
    rig.near(row, expected, f"logits with {mib} MiB left")
    break
else:
    print("never enough")
"""
_ROOMS_MIB = ("8", "24", "32", "40", "56", "96", "192", "384")
_MOST_OPENED = 2**28
"""Bytes of a model that is opened again and again."""


@law("MEM-15", tier="process", since="1.2")
def check_models_where_memory_ends(rig: Rig) -> None:
    """A model that is opened with ever more room raises OutOfMemoryError, or computes right.

    Whatever the room is too small for: the files, the context, what a step takes beside. Up to the
    first room that is enough. An engine that may have computed wrong can also end for good
    (SessionFatalError).
    """
    if not _STATUS.exists():
        rig.leave("this platform does not tell a process's memory through /proc")
    if rig.model.capabilities.gpu_offload:
        rig.leave("what drives a GPU takes addresses of its own")
    if (rig.model.info.size_bytes or 0) > _MOST_OPENED:
        rig.leave(f"the model has more than {_MOST_OPENED >> 20} MiB, too much to open so often")
    for limit in _COUNTED:
        if children.run(rig, _ROOMS, limit, *_ROOMS_MIB).strip():
            rig.leave(f"{_ROOMS_MIB[-1]} MiB are too little under {limit}: nothing was computed")


def _try(
    rig: Rig,
    scarce: Any,
    fields: dict[str, Any],
    tokens: list[int],
    typed: type[InferCoreError],
) -> None:
    try:
        with scarce, rig.model.new_context(**fields) as context:
            context.decode(tokens)
    except typed as error:
        that(str(error), "the error has no text")
        is_own = isinstance(error, PluginError) and not isinstance(error.__cause__, OSError)
        that(not is_own, f"a mistake of the plugin's own: {error}")


def _large(rig: Rig) -> dict[str, Any]:
    """Return fields of a context of `_WANTED` bytes or more."""
    for bits in range(12, 20):
        fields = rig.fields(n_ctx=2**bits)
        try:
            plan = rig.model.plan_memory(**fields)
        except (InvalidInputError, UnsupportedFeatureError):
            break
        if plan.kv_bytes + plan.compute_bytes > _WANTED:
            return fields
    return rig.leave("no window takes much memory")


_COUNTED = {"RLIMIT_AS": "VmSize", "RLIMIT_DATA": "VmData"}
"""What the system calls what each limit is of."""


@contextlib.contextmanager
def little_memory(limit: str, room: int) -> Iterator[None]:
    """Let this process have ``room`` bytes more than it has, as where a system is at its end."""
    import resource  # noqa: PLC0415  (of Unix alone)

    found = re.search(rf"{_COUNTED[limit]}:\s*(\d+) kB", _STATUS.read_text(encoding="utf-8"))
    taken, kind = int(found[1]) * 1024 if found else 0, getattr(resource, limit)
    soft, hard = resource.getrlimit(kind)
    limits = [taken + room, *(most for most in (soft, hard) if most != resource.RLIM_INFINITY)]
    resource.setrlimit(kind, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (soft, hard))


@contextlib.contextmanager
def _no_more_files() -> Iterator[None]:
    """Let this process open no file more than it has open."""
    import resource  # noqa: PLC0415  (of Unix alone)

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    last = max(map(int, os.listdir("/proc/self/fd")))
    filled: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, last + 1), hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                filled.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for number in filled:
            os.close(number)
