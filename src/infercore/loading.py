"""How a plugin loads a model: tried before, guarded after, each failure a typed error."""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING, Any

import attrs

from infercore.engine import calls, trial
from infercore.engine.model import GuardedModel
from infercore.errors import (
    BackendUnavailableError,
    InferCoreError,
    ModelFormatError,
    ModelLoadError,
    OutOfMemoryError,
    PluginError,
)
from infercore.locating import title
from infercore.registry.choice import check_score
from infercore.services import SERVICES
from infercore.values import checks
from infercore.values.handlers import is_a_handlers

if TYPE_CHECKING:
    from collections.abc import Callable

    from infercore.protocols.public import Model
    from infercore.values.config import ModelConfig
    from infercore.values.info import BackendDescriptor

_MISTAKES = (AttributeError, TypeError, NameError, KeyError, IndexError, AssertionError)


def is_model(model: object) -> bool:
    """Whether ``model`` is one that was loaded, and no path."""
    return all(hasattr(model, name) for name in ("new_session", "new_context", "tokenizer"))


def loaded(model: Any, backend: str | None) -> Model:
    """Return ``model`` if it is one; a backend cannot be chosen for it any more."""
    if not is_model(model):
        raise checks.refuse("path_or_model", model, "a path, as str or os.PathLike, or a Model")
    if backend is not None:
        raise checks.refuse(
            "backend", backend, f"None: the model is loaded already, by {model.backend!r}"
        )
    found: Model = model
    return found


def load(descriptor: BackendDescriptor, path: str, config: ModelConfig) -> GuardedModel:
    """Return the model at ``path``; nothing is held where this raises."""
    checks.check_options("backend_options", config.backend_options, descriptor.model_options)
    check_score(descriptor, path)
    first_context = trial.FirstContext(descriptor, path, config)
    try:
        first_context.start_child()
        trial.check(descriptor, path, config)
        return _load_tried(descriptor, path, config, first_context)
    except BaseException:
        first_context.close()
        raise


def _load_tried(
    descriptor: BackendDescriptor,
    path: str,
    config: ModelConfig,
    first_context: trial.FirstContext,
) -> GuardedModel:
    started = time.perf_counter()
    progress = _Progress(config.progress, path)
    if config.progress is not None:
        config = attrs.evolve(config, progress=progress)
    progress.tell(0.0)
    try:
        inner = descriptor.loader(path, config)
    except InferCoreError:
        raise
    except Exception as error:
        if error is progress.error or is_a_handlers(error):  # the caller's own
            raise
        raise _load_failure(descriptor.name, path, error) from error
    load_ms = (time.perf_counter() - started) * 1e3
    model = _guarded(inner, descriptor, path, load_ms, config, first_context)
    try:
        progress.tell(1.0)
    except BaseException:
        model.close()
        raise
    return model


def _guarded(
    inner: Any,
    descriptor: BackendDescriptor,
    path: str,
    load_ms: float,
    config: ModelConfig,
    first_context: trial.FirstContext,
) -> GuardedModel:
    """Return the guard around a plugin's model; weights without one are freed."""
    try:
        # Now: a Ctrl-C in an import that several threads wait for leaves them waiting.
        import infercore.sampling.factory  # noqa: F401, PLC0415

        return GuardedModel(
            inner,
            descriptor=descriptor,
            services=SERVICES,
            load_ms=load_ms,
            options=config.backend_options,
            name=title(path),
            try_adapter=lambda adapter: _try_adapter(descriptor, path, config, adapter),
            first_context=first_context,
        )
    except BaseException as error:
        if callable(close := getattr(inner, "close", None)):
            with contextlib.suppress(Exception):  # what came first is what is wrong
                close()
        if not isinstance(error, Exception):
            raise
        # Not the loader's: what is wrong is no fault of the file.
        calls.raise_typed(descriptor.name, "loading a model", error)


def _try_adapter(
    descriptor: BackendDescriptor, path: str, config: ModelConfig, adapter: str
) -> None:
    """Try an adapter in a child; what is no file at all is the plugin's own to refuse."""
    if os.path.isfile(adapter):
        trial.check(descriptor, path, config, adapters=(adapter,))


def _load_failure(backend: str, path: str, error: Exception) -> InferCoreError:
    """Return the typed error for what a plugin's loader raised."""
    message = f"backend {backend!r} could not load {path!r}: {calls.described(error)}"
    if isinstance(error, MemoryError):
        return OutOfMemoryError(message)
    if isinstance(error, ImportError):
        return BackendUnavailableError(message, backend=backend, reason=str(error))
    if isinstance(error, _MISTAKES):
        return PluginError(f"{message}; this is a bug in the plugin", plugin=backend)
    return ModelFormatError(f"backend {backend!r} could not load {path!r}: {error}", path=path)


class _Progress:
    """The caller's callback, which hears each fraction once, and what it raised."""

    def __init__(self, report: Callable[[float], object] | None, path: str) -> None:
        self._report = report
        self._path = path
        self._heard = -1.0
        self.error: BaseException | None = None

    def __call__(self, fraction: float) -> object:
        if self._report is None or fraction <= self._heard:
            return None
        self._heard = fraction
        try:
            return self._report(fraction)
        except BaseException as error:
            self.error = error
            raise

    def tell(self, fraction: float) -> None:
        """Call it for a plugin that may not. Raises `ModelLoadError` where it cancels."""
        if self(fraction) is False:
            text = f"loading {self._path} was cancelled by progress"
            raise ModelLoadError(text, path=self._path)
