"""Chooses the backend for a file, and says what to do where none can be chosen."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any

import attrs

from infercore.errors import (
    BackendNotFoundError,
    InferCoreError,
    InvalidInputError,
    ModelNotFoundError,
    PluginError,
)
from infercore.registry.known import KNOWN, KnownBackend, known_for
from infercore.registry.record import Record, described
from infercore.values import install
from infercore.values.checks import is_number, nearest
from infercore.values.handlers import is_a_handlers

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from infercore.values.info import BackendDescriptor


@attrs.frozen(kw_only=True)
class Match:
    """How well a backend reads a path: 0 = not at all; ``reason`` where its match failed.

    ``is_fault``: it answered with something that is no score.
    """

    record: Record
    score: float
    reason: str | None = None
    is_fault: bool = False


def path_text(path: object) -> str:
    """Return ``path`` as a str. Raises `InvalidInputError` for what is no path."""
    if not isinstance(path, (str, bytes, os.PathLike)):
        raise InvalidInputError(
            f"path={path!r} is not a path; give a str or an os.PathLike",
            field="path",
            value=path,
            allowed="a str or os.PathLike",
        )
    return os.fsdecode(path)


def matches(records: Iterable[Record], path: str) -> list[Match]:
    """Return how well each record with a descriptor reads ``path``, the best first.

    Equal scores are ordered by priority, then by name; never by the order of loading.
    """
    found = [_match(record, path) for record in records if record.descriptor is not None]
    return sorted(found, key=_order)


def best(found: Sequence[Match]) -> Match | None:
    """Return the best of `matches` that can be used here, None where there is none."""
    return next((m for m in found if m.score > 0 and m.record.error is None), None)


def _order(match: Match) -> tuple[float, int, str]:
    descriptor = match.record.descriptor
    return -match.score, -(descriptor.priority if descriptor else 0), match.record.name


def _match(record: Record, path: str) -> Match:
    try:
        score = record.descriptor.match(path)  # type: ignore[union-attr]
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a plugin may even call sys.exit
        if is_a_handlers(error):
            raise
        return Match(record=record, score=0.0, reason=f"match failed: {described(error)}")
    if not _is_score(score):
        return Match(record=record, score=0.0, reason=_no_score(score), is_fault=True)
    return Match(record=record, score=max(0.0, float(score)))


def _is_score(score: Any) -> bool:
    return is_number(score) and not math.isnan(score)


def _no_score(score: object) -> str:
    return f"match gave {score!r}, which is not a number"


def check_score(descriptor: BackendDescriptor, path: str) -> None:
    """Raise `PluginError` where ``match`` of a backend that was named gives no score.

    What it raises is left: the file is read by that backend because the user says so.
    """
    try:
        score = descriptor.match(path)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if is_a_handlers(error):
            raise
        return
    if not _is_score(score):
        raise PluginError(
            f"backend {descriptor.name!r}: {_no_score(score)}; this is a bug in the plugin",
            plugin=descriptor.name,
        )


def no_name(name: str, records: Sequence[Record], asked_by: str = "") -> BackendNotFoundError:
    """Return the error for a name that nothing has."""
    candidates = sorted({record.name for record in records} | set(KNOWN))
    if name in KNOWN:
        text = f"backend {name!r}{asked_by} is not installed; run: {KNOWN[name].install}"
    else:
        text = f"no backend is named {name!r}{asked_by}; {nearest(name, candidates)}"
        text += _installs(candidates, {record.name for record in records})
    return BackendNotFoundError(text, name=name, candidates=candidates)


def _installs(candidates: Sequence[str], installed: set[str]) -> str:
    missing = [KNOWN[name] for name in candidates if name in KNOWN and name not in installed]
    if not missing:
        return ""
    return " (not installed: " + "; ".join(f"{k.name}: {k.install}" for k in missing) + ")"


def none_reads(path: str, records: Sequence[Record], found: Sequence[Match]) -> InferCoreError:
    """Return the error for a path that no usable backend reads, with what to do next."""
    if not os.path.exists(path):
        return ModelNotFoundError(f"there is no file or folder {path}; check the path", path=path)
    known = known_for(path)
    broken = _broken_for(records, found, known)
    if broken is not None:
        text = f"{broken.name} would read {path}, but cannot be used: {broken.reason}"
    elif known is not None and known.name not in {record.name for record in records}:
        text = f"{path} can be read by backend {known.name!r}, not installed; run: {known.install}"
    elif not records:
        commands = "; ".join(f"{k.install}  ({k.formats})" for k in KNOWN.values())
        text = f"no backend is installed, so {path} cannot be read; run: {commands}"
    elif fault := next((m for m in found if m.is_fault), None):
        name = fault.record.name
        return PluginError(
            f"nothing else reads {path}, and backend {name!r} does not say whether it does: "
            f"{fault.reason}; this is a bug in the plugin",
            plugin=name,
            distribution=fault.record.distribution,
        )
    else:
        text = f"none of the installed backends reads {path} ({_summary(records, found)})"
        text += _advice(path)
    error = BackendNotFoundError(text, candidates=sorted({record.name for record in records}))
    if broken is not None:
        error.__cause__ = broken.error
    return error


def _advice(path: str) -> str:
    """Say what to do with a path that nothing reads."""
    names = os.listdir(path) if os.path.isdir(path) else [path]
    if any(name.lower().endswith(".safetensors") for name in names):
        return f"; safetensors weights must be converted first, see {install.GET_A_MODEL}"
    return "; check the file, or name a backend"


def _broken_for(
    records: Iterable[Record], found: Iterable[Match], known: KnownBackend | None
) -> Record | None:
    """The record that would read the path if only it worked."""
    for match in found:
        if match.score > 0 and match.record.error is not None:
            return match.record
    for record in records:
        if known is not None and record.name == known.name and record.error is not None:
            return record
    return None


def _summary(records: Iterable[Record], found: Iterable[Match]) -> str:
    """Each backend with its formats, or why it was not asked or did not answer."""
    reasons = {match.record.name: match.reason for match in found if match.reason}
    return ", ".join(_about(record, reasons.get(record.name)) for record in records)


def _about(record: Record, reason: str | None) -> str:
    why = record.reason or reason
    if why:
        return f"{record.name}: {why}"
    formats = record.descriptor.formats if record.descriptor else ()
    return f"{record.name}: {'/'.join(formats) or 'formats unknown'}"
