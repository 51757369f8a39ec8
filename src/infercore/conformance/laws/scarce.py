"""What happens where the system grants no more memory."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infercore.conformance.expect import that
from infercore.conformance.law import law
from infercore.errors import InvalidInputError, OutOfMemoryError, UnsupportedFeatureError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from infercore.conformance.rig import Rig

_STATUS = Path("/proc/self/status")
_WANTED, _ROOM = 2**29, 2**26
"""Bytes that a context takes, and those that it can have."""


@law("MEM-14", tier="process", needs="plan_memory", since="1.2")
def check_where_memory_ends(rig: Rig) -> None:
    """Where the system grants no memory for a context, OutOfMemoryError says so, and others go on.

    A context that takes its memory later may be opened, and works.
    """
    if not _STATUS.exists():
        rig.leave("this platform does not tell a process's memory through /proc")
    if rig.model.capabilities.gpu_offload:
        rig.leave("what drives a GPU takes addresses of its own")
    fields = _large(rig)
    tokens = rig.tokens(12)
    expected, context = rig.cold(tokens), rig.context()
    context.decode(tokens[:8])
    for _ in range(2):
        _try(rig, fields, tokens[:4])
    context.decode(tokens[8:])
    rig.near(context.logits(), expected, "logits of a context beside one that had no memory")
    rig.near(rig.cold(tokens), expected, "logits in a new context after that")


def _try(rig: Rig, fields: dict[str, Any], tokens: list[int]) -> None:
    try:
        with _little_memory(), rig.model.new_context(**fields) as context:
            context.decode(tokens)
    except OutOfMemoryError as error:
        that(str(error), "lack of memory is told without a word")


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


@contextlib.contextmanager
def _little_memory() -> Iterator[None]:
    """Let this process have `_ROOM` bytes more than it has, as where a system is at its end."""
    import resource  # noqa: PLC0415  (of Unix alone)

    found = re.search(r"VmSize:\s*(\d+) kB", _STATUS.read_text(encoding="utf-8"))
    taken = int(found[1]) * 1024 if found else 0
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limits = [taken + _ROOM, *(most for most in (soft, hard) if most != resource.RLIM_INFINITY)]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
