"""From options to a loaded model or an open session."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import attrs

import infercore
from infercore.cli.options import given
from infercore.cli.terminal import loading_bar, tell
from infercore.locating import locate
from infercore.registry import default_registry
from infercore.values import checks
from infercore.values.config import ContextConfig, ModelConfig

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from infercore import Model, Session


@contextmanager
def loaded(path: str, options: Mapping[str, Any], *, context: bool = False) -> Iterator[Model]:
    """Give the model at ``path``, loaded as ``options`` say.

    ``context``: the caller opens one with `context_fields`, so that ``--option`` may
    name a context's options too. Raises what `infercore.load_model` raises.
    """
    fields = given(ModelConfig, options)
    own, _ = _backend_options(path, options, context=context)
    if own:
        fields["backend_options"] = own
    path = locate(path, backend=options["backend"])
    with loading_bar(path) as report:
        if report is not None:
            fields["progress"] = report
        model = infercore.load_model(path, backend=options["backend"], **fields)
    with model:
        yield model


def context_fields(path: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `ContextConfig` that ``options`` give."""
    fields = given(ContextConfig, options)
    _, own = _backend_options(path, options, context=True)
    if own:
        fields["backend_options"] = own
    return fields


def plan_fields(path: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `infercore.plan_memory` that ``options`` give."""
    fields = {**given(ModelConfig, options), **given(ContextConfig, options)}
    of_model, of_context = _backend_options(path, options, context=True)
    if own := {**of_model, **of_context}:
        fields["backend_options"] = own
    return fields


@contextmanager
def opened(path: str, options: Mapping[str, Any]) -> Iterator[tuple[Model, Session]]:
    """Give the model at ``path`` and a session on it, and say what a full memory gave up."""
    fields = context_fields(path, options)
    if options.get("overflow") is not None:
        fields["overflow"] = options["overflow"]
    with (
        loaded(path, options, context=True) as model,
        model.new_session(**fields) as session,
    ):
        _tell_of_shrinking(getattr(getattr(session, "context", None), "attempts", ()))
        yield model, session


def _tell_of_shrinking(attempts: Sequence[Any]) -> None:
    """Say what ``--on-oom shrink`` gave up."""
    if len(attempts) > 1:
        got = attempts[-1]
        tell(
            f"not enough memory; opened on attempt {len(attempts)} with n_ctx={got.n_ctx}, "
            f"n_ubatch={got.n_ubatch}, type_k={got.type_k}, type_v={got.type_v}"
        )


def _backend_options(
    path: str, options: Mapping[str, Any], *, context: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what ``--option`` gives the model, and what it gives the context."""
    wanted = dict(options.get("backend_options", ()))
    if not wanted:
        return {}, {}
    registry, name = default_registry(), options["backend"]
    descriptor = registry.get(name) if name is not None else registry.choose(locate(path))
    of_context = descriptor.context_options if context else ()
    checks.check_options("--option", wanted, {*descriptor.model_options, *of_context})
    return (
        {key: value for key, value in wanted.items() if key in descriptor.model_options},
        {key: value for key, value in wanted.items() if key in of_context},
    )


def plain(value: Any) -> dict[str, Any]:
    """Return a value type as what JSON can hold."""
    return attrs.asdict(value, value_serializer=lambda _, __, item: _plain(item))


def _plain(item: Any) -> Any:
    return dict(item) if isinstance(item, Mapping) else item
