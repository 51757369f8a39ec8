"""Runs laws on a rig, and turns what happens into outcomes."""

from __future__ import annotations

import platform
import time
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

import infercore
from infercore.conformance.expect import LawError, NotApplicable
from infercore.conformance.law import SUITE_VERSION, Law
from infercore.conformance.options import is_kept, option_of
from infercore.conformance.registry import laws, select
from infercore.conformance.report import FAIL, KNOWN, NOT_APPLICABLE, OK, REFUSED, Report, Result
from infercore.conformance.requirements import REQUIREMENTS
from infercore.conformance.rig import Rig
from infercore.conformance.standing import check_names, standing_of
from infercore.engine import calls
from infercore.engine.digest import of_path
from infercore.errors import (
    PluginError,
    SessionFatalError,
    TransientEngineError,
    UnsupportedFeatureError,
)
from infercore.values import checks
from infercore.values.config import DecodeConfig, SamplingConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

N_HELD = 8
"""Tokens that a context holds when a refusal is probed."""
N_TRIES = 3
"""How often a law is tried on an engine that says that it was busy."""
MAX_WAIT_S = 2.0
_OF_LOGITS = frozenset(
    {
        *("logits", "logits_all", "implementation='portable'", "beam_search", "pool"),
        *(field.name for kind in (DecodeConfig, SamplingConfig) for field in attrs.fields(kind)),
    }
)
"""What an engine that shows no logits may refuse, wherever a law meets it."""
_NOT_ACROSS = frozenset({"processors", "progress", "draft_model", "implementation='native'"})
"""What a process of its own refuses, wherever a law meets it."""


def check_backend(
    rig: Rig,
    *,
    only: str | Sequence[str] | None = None,
    seed: int = 0,
    require: Sequence[str] = (),
    on_result: Callable[[Result], object] | None = None,
) -> Report:
    """Return the report of running the laws that ``only`` names on ``rig``.

    ``only`` holds ids, patterns, groups or tiers (see `select`); ``seed`` chooses the tokens and
    texts that laws use; ``require`` names what must be there, beside ``rig.require`` (see `Rig`);
    ``on_result`` is called with each result as it comes. The rig's model is closed at the end.
    Raises `InvalidInputError` where ``rig`` is not a `Rig`, nothing is selected, ``rig.known``
    names no law, or ``require`` something that there is not.
    """
    chosen = select(only)
    if not isinstance(rig, Rig):
        raise checks.refuse("rig", rig, "a Rig, such as find_rig(name) returns")
    check_known(rig)
    require = checks.items("require", require, "a sequence of names")
    check_names((*rig.require, *require))
    started = time.perf_counter()
    try:
        facts = describe(rig, require)
        results = [_told(run_law(law, rig, seed=seed), on_result) for law in chosen]
    finally:
        rig.close()
    elapsed = time.perf_counter() - started
    return Report(results=tuple(results), seed=seed, elapsed_s=elapsed, **facts)


def _told(result: Result, on_result: Callable[[Result], object] | None) -> Result:
    if on_result is not None:
        on_result(result)
    return result


def check_known(rig: Rig) -> None:
    """Raise `InvalidInputError` where ``rig.known`` names a law that there is not."""
    ids = {law.id for law in laws()}
    for identifier in rig.known:
        if identifier not in ids:
            raise checks.refuse("known", identifier, "ids of laws, such as DEC-1")


def describe(rig: Rig, require: Sequence[str] = ()) -> dict[str, Any]:
    """Return what a report says of the backend, its models, the versions and what is missing."""
    model = rig.model
    fields = {} if rig.is_encoder else rig.fields()
    capabilities = rig.opened(model.new_context(**fields)).capabilities
    rig.tidy()
    return {
        "backend": rig.label,
        "versions": {
            "infercore": infercore.__version__,
            "suite": SUITE_VERSION,
            "pinned suite": rig.suite_version,
            "engine": str(getattr(model, "backend_version", "unknown")),
            "python": platform.python_version(),
            "numpy": np.__version__,
        },
        "model": {
            "architecture": model.info.architecture,
            "digest": model.digest,
            "encoder digest": "" if rig.encoder is None else rig.encoder_model.digest,
            "adapter digest": "" if rig.adapter is None else of_path(rig.adapter),
        },
        "capabilities": attrs.asdict(capabilities),
        "standing": standing_of(rig, require),
    }


def run_law(law: Law, rig: Rig, *, seed: int = 0) -> Result:
    """Return the outcome of one law."""
    rig.begin(law.id, seed)
    started = time.perf_counter()
    outcome, reason, cause = _judged(law, rig)
    return Result(
        id=law.id,
        group=law.group,
        tier=law.tier,
        text=law.text,
        outcome=outcome,
        reason=reason,
        newer=law.newer_than(rig.suite_version),
        elapsed_ms=(time.perf_counter() - started) * 1e3,
        cause=cause,
        drawn=rig.drawn if outcome == FAIL else (),
    )


Found = tuple[str, "str | None", "str | None"]
"""Outcome, reason, and the plugin's own exception behind it."""


def _judged(law: Law, rig: Rig) -> Found:
    """The outcome, with what is known of failures taken into account."""
    outcome, reason, cause = _tried(law, rig)
    known = rig.known.get(law.id)
    if known is None or outcome == NOT_APPLICABLE:
        return outcome, reason, cause
    if outcome == FAIL:
        return KNOWN, known, cause
    why = f"known to fail ({known}), but it is {outcome}; remove the entry from the rig"
    return FAIL, why, None


def _tried(law: Law, rig: Rig) -> Found:
    if rig.is_encoder and law.model == "generator":
        return NOT_APPLICABLE, "the model is an encoder, and the law is about generating text", None
    if rig.in_pool and law.tier == "engine":
        return NOT_APPLICABLE, "the law is about the engine, which is tried without a pool", None
    drawn, busy = rig.random.getstate(), ""
    for n_tries in range(1, N_TRIES + 1):
        try:
            try:
                outcome, reason = _run(law, rig)
            finally:
                rig.tidy()
        except NotApplicable as left:  # noqa: PERF203  (each try may fail)
            return NOT_APPLICABLE, str(left), None
        except Exception as error:  # noqa: BLE001  (whatever a backend raises breaks the law)
            transient = _transient(error)
            if transient is None or n_tries == N_TRIES:
                return _failed(law, rig, error)
            busy = f"tried {n_tries + 1} times, as the engine was busy ({transient})"
            time.sleep(min(transient.retry_after or 0.0, MAX_WAIT_S))
            rig.random.setstate(drawn)
        else:
            return outcome, reason or busy or None, None
    raise AssertionError  # the last try returns


def _transient(error: BaseException | None) -> TransientEngineError | None:
    """Return the failure behind ``error`` that changed nothing and need not come again."""
    while error is not None and not isinstance(error, TransientEngineError):
        error = error.__cause__
    return error


def _failed(law: Law, rig: Rig, error: Exception) -> Found:
    """Return the outcome of a law that ended with ``error``."""
    is_law = isinstance(error, LawError)
    refusal = error.__cause__ if is_law else error
    if not rig.shows_all_logits and _is_of_logits(refusal):
        return REFUSED, f"not declared: all logits can be read ({refusal})", None
    if rig.isolated and getattr(refusal, "feature", None) in _NOT_ACROSS:
        return REFUSED, f"not declared: what stays in its own process ({refusal})", None
    option = None if is_law else option_of(error, rig.asked)
    of_encoder = rig.is_encoder or law.needs == "encoder"
    limits = option is not None and option not in rig.require
    if limits and is_kept(rig, str(option), of_encoder=of_encoder):
        return REFUSED, f"not honoured: {option} ({refusal})", None
    said = str(error) if is_law else f"{type(error).__name__}: {error}"
    return FAIL, said, cause_of(error)


def _is_of_logits(error: BaseException | None) -> bool:
    return isinstance(error, UnsupportedFeatureError) and error.feature in _OF_LOGITS


def cause_of(error: BaseException) -> str | None:
    """Return what the plugin itself raised, with its place, or what the core found wrong with it.

    None where neither is behind ``error``.
    """
    fault: BaseException | None = None
    last = error
    behind: BaseException | None = error
    while behind is not None:
        last = behind
        fault = behind if isinstance(behind, PluginError) else fault
        first = behind.cause if isinstance(behind, SessionFatalError) else None
        behind = behind.__cause__ or first
    if calls.raised_at(last) is not None:
        return calls.described(last)
    return None if fault is None else str(fault)


def _run(law: Law, rig: Rig) -> tuple[str, str | None]:
    if law.needs is None or REQUIREMENTS[law.needs].declared(rig):
        law.check(rig)
        return OK, None
    rig.tidy()
    _check_refusal(law, rig, law.needs)
    return REFUSED, f"not declared: {REQUIREMENTS[law.needs].text}"


def _check_refusal(law: Law, rig: Rig, needs: str) -> None:
    """Raise `LawError` unless the undeclared call is refused and changes nothing."""
    tokens = rig.tokens(N_HELD + 1)
    context = rig.context()
    context.decode(tokens[:N_HELD])
    with rig.unchanged(context, f"the context that refused {needs}"):
        _probe(law, rig, context, needs)
    context.decode_one(tokens[-1])
    control = rig.context()
    control.decode(tokens[:N_HELD])
    control.decode_one(tokens[-1])
    if rig.shows_no_logits:
        return
    rig.same_bits(context.logits(), control.logits(), f"after {needs} was refused")


def _probe(law: Law, rig: Rig, context: Any, needs: str) -> None:
    probe = law.refusal or (lambda held: REQUIREMENTS[needs].probe(rig, held))
    try:
        probe(context)
    except UnsupportedFeatureError:
        return
    except LawError:
        raise
    except Exception as error:
        raise LawError(
            f"{needs} is not declared, and the call raised {type(error).__name__} ({error}) "
            "instead of UnsupportedFeatureError"
        ) from error
    raise LawError(f"{needs} is not declared, but the call was not refused")
