"""The functions users start from."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, cast

import attrs

from infercore.engine import calls, plugin_checks, trial, window
from infercore.engine.arguments import check_bool
from infercore.engine.model import SESSION_FIELDS
from infercore.errors import UnsupportedFeatureError
from infercore.loading import is_model, load, loaded
from infercore.locating import locate
from infercore.registry import default_registry
from infercore.registry.choice import check_score
from infercore.session.async_context import AsyncContext
from infercore.session.asynchronous import AsyncSession, Opening
from infercore.values import checks
from infercore.values.config import ContextConfig, ModelConfig
from infercore.values.field_texts import lists_fields
from infercore.values.pool import (
    PoolConfig,
    is_for_a_pool,
    pool_config,
    shared_context,
    with_shared_context,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from typing_extensions import Unpack

    from infercore.embedding import Pooling
    from infercore.protocols.public import Backend, Model
    from infercore.protocols.session import Session
    from infercore.protocols.spi import FloatArray
    from infercore.session.pool import SessionPool
    from infercore.values.fields import (
        ContextFields,
        EmbedFields,
        ModelFields,
        OpenPlanFields,
        OpenPoolFields,
        OpenSessionFields,
    )
    from infercore.values.info import BackendDescriptor, BackendInfo, MemoryPlan

    AnyPath = str | os.PathLike[str]


def backends(*, devices: bool = False) -> list[BackendInfo]:
    """Return every registered backend, usable or not, sorted by name.

    ``devices=True`` also lists compute devices, which imports the usable engines.
    """
    if not isinstance(devices, bool):
        raise checks.refuse("devices", devices, "True or False")
    return default_registry().infos(devices=devices)


def get_backend(name: str) -> Backend:
    """Return the backend ``name``.

    Raises `BackendNotFoundError`, `BackendUnavailableError` or `PluginError`, naming the cause.
    """
    return CoreBackend(default_registry().get(name))


@lists_fields("ModelConfig")
def load_model(
    path: AnyPath,
    *,
    backend: str | None = None,
    config: ModelConfig | None = None,
    **fields: Unpack[ModelFields],
) -> Model:
    """Return the model at ``path``, loaded by ``backend`` or by the one that suits it best.

    Raises `ModelNotFoundError`, `ModelFormatError`, `BackendNotFoundError`,
    `BackendUnavailableError`, `PluginError`, `InvalidInputError` or `OutOfMemoryError`; nothing
    is held then.
    """
    built = checks.build(ModelConfig, config, fields)
    where = locate(path, backend=backend)
    return load(_descriptor(backend, where), where, built)


@lists_fields("SessionOptions", "ContextConfig", "ModelConfig")
def open_session(
    path_or_model: AnyPath | Model,
    *,
    backend: str | None = None,
    config: ContextConfig | None = None,
    isolate: bool = False,
    step_timeout: float | None = None,
    load_timeout: float | None = None,
    max_restarts: int | None = None,
    restart_window: float | None = None,
    **fields: Unpack[OpenSessionFields],
) -> Session:
    """Return a session on a model, or on the model at a path, which it then owns.

    ``fields`` are those of `ContextConfig`, `ModelConfig` (for a path) and the session's own:
    ``profile_id``, ``prompt_format``, ``add_bos``, ``overflow``. Each of ``backend_options`` goes
    where it belongs, to the model or to the context. With ``isolate=True`` (only with a path) model
    and session live in a separate process, which may die: ``step_timeout``, ``load_timeout``,
    ``max_restarts`` and ``restart_window`` as in `PoolConfig`. Raises what `load_model` and
    `Model.new_session` raise; nothing is held then.
    """
    given: dict[str, Any] = {**fields}
    limits = {
        "step_timeout": step_timeout,
        "load_timeout": load_timeout,
        "max_restarts": max_restarts,
        "restart_window": restart_window,
    }
    limits = {name: value for name, value in limits.items() if value is not None}
    _check_isolate(path_or_model, check_bool("isolate", isolate), limits)
    if not isinstance(path_or_model, (str, os.PathLike)):
        return loaded(path_or_model, backend).new_session(config, **given)
    where = locate(path_or_model, backend=backend)
    descriptor = _descriptor(backend, where)
    of_model = _take_model_fields(given, config, descriptor)
    if isolate:
        options = {name: given.pop(name) for name in SESSION_FIELDS if name in given}
        alone = PoolConfig(n_parallel=1, context=ContextConfig() if config is None else config)
        pool = _isolated(where, descriptor, of_model, pool_config(alone, {**given, **limits}))
        try:
            session: Session = pool.open_only_session(options)
        except BaseException:
            pool.close()
            raise
        return session
    with load(descriptor, where, of_model) as model:
        return model.new_session(config, **given)


def _check_isolate(path_or_model: object, isolate: bool, limits: Mapping[str, Any]) -> None:  # noqa: FBT001
    """Refuse what only a process of its own has, where there is none."""
    for name, value in limits.items():
        if not isolate:
            raise checks.refuse(name, value, "isolate=True beside it: it is that process's")
    if isolate and not isinstance(path_or_model, (str, os.PathLike)):
        raise checks.refuse(
            "isolate", True, "a path to open_session(path, isolate=True): this model is here"
        )


_MODEL_FIELDS = {a.name for a in ModelConfig.__attrs_attrs__} - {"backend_options"}


def _take_model_fields(
    fields: dict[str, Any], config: ContextConfig | None, descriptor: BackendDescriptor
) -> ModelConfig:
    """Take those of a model out of ``fields``; what is left is for a context of ``config``."""
    of_model = {name: fields.pop(name) for name in list(fields) if name in _MODEL_FIELDS}
    if "backend_options" in fields:
        options = ContextConfig(backend_options=fields.pop("backend_options")).backend_options
        of_model["backend_options"], of_context = _parted(options, descriptor)
        if of_context or config is None:
            fields["backend_options"] = of_context
    return ModelConfig(**of_model)


def _parted(
    options: Mapping[str, Any], descriptor: BackendDescriptor
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return which of ``options`` are the model's and which the context's; some may be both's."""
    model, context = descriptor.model_options, descriptor.context_options
    checks.check_options("backend_options", options, (*model, *context))
    return (
        {key: value for key, value in options.items() if key in model},
        {key: value for key, value in options.items() if key in context},
    )


def _descriptor(backend: str | None, path: str) -> BackendDescriptor:
    """Return the backend that was named, or the one that suits ``path`` best."""
    registry = default_registry()
    return registry.get(backend) if backend is not None else registry.choose(path)


@lists_fields("SessionOptions", "ContextConfig", "ModelConfig")
def aopen_session(
    path_or_model: AnyPath | Model,
    *,
    backend: str | None = None,
    config: ContextConfig | None = None,
    isolate: bool = False,
    step_timeout: float | None = None,
    load_timeout: float | None = None,
    max_restarts: int | None = None,
    restart_window: float | None = None,
    **fields: Unpack[OpenSessionFields],
) -> Opening[AsyncSession]:
    """Return an object that opens an `AsyncSession`, by ``async with`` or by ``await``.

    Arguments and errors as in `open_session`; loading runs in a thread.
    """

    def work() -> Session:
        return open_session(
            path_or_model,
            backend=backend,
            config=config,
            isolate=isolate,
            step_timeout=step_timeout,
            load_timeout=load_timeout,
            max_restarts=max_restarts,
            restart_window=restart_window,
            **fields,
        )

    return Opening(work, AsyncSession)


@lists_fields("ContextConfig")
def aopen_context(
    model: Model, config: ContextConfig | None = None, **fields: Unpack[ContextFields]
) -> Opening[AsyncContext]:
    """Return an object that opens an `AsyncContext`, by ``async with`` or by ``await``.

    ``fields`` are those of `ContextConfig`. Raises what `Model.new_context` raises, and
    `InvalidInputError` for anything but a model; opening runs in a thread.
    """
    if not is_model(model):
        raise checks.refuse("model", model, "a Model, which load_model returns")
    return Opening(lambda: model.new_context(config, **fields), AsyncContext)


@lists_fields("PoolConfig", "ContextConfig", "ModelConfig")
def aopen_pool(
    path_or_model: AnyPath | Model,
    *,
    backend: str | None = None,
    config: PoolConfig | None = None,
    **fields: Unpack[OpenPoolFields],
) -> Opening[SessionPool]:
    """Return an object that opens a `SessionPool`, by ``async with`` or by ``await``.

    Arguments and errors as in `open_pool`; loading runs in a thread.
    """

    def work() -> SessionPool:
        return open_pool(path_or_model, backend=backend, config=config, **fields)

    return Opening(work, lambda pool: pool)


@lists_fields("PoolConfig", "ContextConfig", "ModelConfig")
def open_pool(
    path_or_model: AnyPath | Model,
    *,
    backend: str | None = None,
    config: PoolConfig | None = None,
    **fields: Unpack[OpenPoolFields],
) -> SessionPool:
    """Return a pool of sessions on a model, or on the model at a path, which it then owns.

    ``fields`` are those of `PoolConfig`, of its context, and of `ModelConfig` (for a path). Raises
    what `load_model` and `Model.new_pool` raise; nothing is held then.
    """
    given: dict[str, Any] = {**fields}
    if not isinstance(path_or_model, (str, os.PathLike)):
        return loaded(path_or_model, backend).new_pool(config, **given)
    where = locate(path_or_model, backend=backend)
    descriptor = _descriptor(backend, where)
    of_context = config.context if isinstance(config, PoolConfig) else None
    of_model = _take_model_fields(given, of_context, descriptor)
    built = pool_config(config, given)
    if built.isolate:
        return cast("SessionPool", _isolated(where, descriptor, of_model, built))
    model = load(descriptor, where, of_model)
    try:
        return model.pool_of(built, owns_model=True)
    except BaseException:
        model.close()
        raise


def _isolated(
    path: str, descriptor: BackendDescriptor, model: ModelConfig, config: PoolConfig
) -> Any:
    """Return a pool whose engine lives in a process of its own."""
    from infercore.isolated.pool import IsolatedPool  # noqa: PLC0415  (imports NumPy)
    from infercore.isolated.process import EngineProcess  # noqa: PLC0415  (imports NumPy)

    if model.progress is not None:
        raise UnsupportedFeatureError(
            feature="progress",
            backend=descriptor.name,
            hint="callbacks stay in their own process",
        )
    process = EngineProcess(
        {
            "path": os.path.abspath(path),
            "backend": descriptor.name,
            "model": model,
            "config": config,
        },
        step_timeout=config.step_timeout,
        load_timeout=config.load_timeout,
        max_restarts=config.max_restarts,
        restart_window=config.restart_window,
    )
    return IsolatedPool(process, config)


def embed(
    path_or_model: AnyPath | Model,
    texts: Sequence[str],
    *,
    pooling: Pooling | None = None,
    normalize: bool = True,
    backend: str | None = None,
    **fields: Unpack[EmbedFields],
) -> FloatArray:
    """Return one vector for each of ``texts``, in their order: float32 [n_texts, n_embd].

    ``pooling`` ("mean", "cls" or "last") says how the vectors of a text's tokens become one; None
    takes the model's own; a model that has none needs one named. ``normalize``
    gives each vector the length 1. Several texts go through the engine at once where it can. With
    "rank", for a model trained to rank, each text gets its scores, one per class, which are never
    normalized: [n_texts, n_classes]. ``fields`` are those of `ContextConfig` (``n_threads``,
    ``adapters``, ...) except sizes and pooling, which the texts decide, and for a path those of
    `ModelConfig`.

    Raises `InvalidInputError` for a str in place of a list, a text of no tokens or of more tokens
    than the model has learned, a missing pooling, and "rank" for a model that does not rank;
    nothing was evaluated then. Raises what `load_model` raises for a path.
    """
    from infercore.embedding import embed_texts  # noqa: PLC0415  (imports NumPy)

    if not isinstance(path_or_model, (str, os.PathLike)):
        model = loaded(path_or_model, backend)
        return embed_texts(model, texts, fields, pooling=pooling, normalize=normalize)
    given: dict[str, Any] = {**fields}
    where = locate(path_or_model, backend=backend)
    descriptor = _descriptor(backend, where)
    of_model = _take_model_fields(given, None, descriptor)
    with load(descriptor, where, of_model) as model:
        return embed_texts(model, texts, given, pooling=pooling, normalize=normalize)


def rerank(
    path_or_model: AnyPath | Model,
    query: str,
    documents: Sequence[str],
    *,
    top_n: int | None = None,
    backend: str | None = None,
    **fields: Unpack[EmbedFields],
) -> list[tuple[int, float]]:
    """Return the index and score of each of ``documents``, the best answer to ``query`` first.

    The score is that of the model's ranking head (its first class), as the head gives it; documents
    with the same score keep their order. ``top_n`` keeps only the best. The two texts are combined
    by the file's template for that, otherwise one after the other with the tokens that begin and
    end a text. ``fields`` are those of `embed`.

    Raises `UnsupportedFeatureError` for a model that does not rank, `InvalidInputError` for a str
    in place of a list and for a pair with more tokens than the model has learned; nothing was
    evaluated then. Raises what `load_model` raises for a path.
    """
    from infercore.embedding import rank_documents  # noqa: PLC0415  (imports NumPy)

    if not isinstance(path_or_model, (str, os.PathLike)):
        model = loaded(path_or_model, backend)
        return rank_documents(model, query, documents, fields, top_n)
    given: dict[str, Any] = {**fields}
    where = locate(path_or_model, backend=backend)
    descriptor = _descriptor(backend, where)
    of_model = _take_model_fields(given, None, descriptor)
    with load(descriptor, where, of_model) as model:
        return rank_documents(model, query, documents, given, top_n)


@lists_fields("ContextConfig", "PoolConfig", "ModelConfig")
def plan_memory(
    path: AnyPath,
    config: ContextConfig | PoolConfig | None = None,
    *,
    backend: str | None = None,
    **fields: Unpack[OpenPlanFields],
) -> MemoryPlan:
    """Return how much memory the model at ``path`` will take with such a context or pool, in bytes.

    ``fields`` are those of `ContextConfig` or `PoolConfig`, and those of `ModelConfig` with which
    the model will be loaded; each of ``backend_options`` goes where it belongs. The backend is
    chosen as in `load_model`. Raises `UnsupportedFeatureError` where it cannot say before loading,
    and what loading and opening raise for a field that cannot be honoured.
    """
    where = locate(path, backend=backend)
    descriptor = _descriptor(backend, where)
    tell = getattr(descriptor, "plan_memory", None)
    if tell is None:
        raise UnsupportedFeatureError(feature="plan_memory", backend=descriptor.name)

    def plan(*args: Any) -> MemoryPlan:
        return plugin_checks.check_plan(tell(*args), descriptor.name)

    of_context = config.context if isinstance(config, PoolConfig) else config
    given: dict[str, Any] = {**fields}
    of_model = _take_model_fields(given, of_context, descriptor)
    pool = pool_config(_pool(config), given) if is_for_a_pool(config, given) else None
    built = checks.build(ContextConfig, of_context, given) if pool is None else pool.context
    checks.check_options("backend_options", built.backend_options, descriptor.context_options)
    trial.check(descriptor, where, of_model, only_plan=True)
    with calls.typed(descriptor.name, "planning memory"):
        if window.is_fit(built):
            built = window.fitted(
                built, lambda tried: plan(where, of_model, tried), is_loaded=False
            )
            if pool is not None:
                pool = pool.with_window(plan(where, of_model, built).n_ctx)
                built = pool.context
        if isinstance(built.n_ctx, int) and built.n_ctx:
            window.check_parts(built.n_ctx, built.n_seq_max, unified=built.kv_unified)
        result = plan(where, of_model, built)
        if pool is not None:  # now its window is known
            pool.check_window(result.n_ctx)
            built = attrs.evolve(built, n_ctx=result.n_ctx)
            pool = pool.with_cells(
                result.n_ctx,
                lambda most: window.fitted_cells(
                    built, most, lambda tried: plan(where, of_model, tried), is_loaded=False
                ),
            )
            result = with_shared_context(
                shared_context(pool, result.n_ctx),
                pool,
                result.n_ctx,
                lambda wanted: plan(where, of_model, wanted),
            )
    return result


def _pool(config: object) -> PoolConfig | None:
    """Return ``config``, or a pool's with it as the context's."""
    if config is None or isinstance(config, PoolConfig):
        return config
    if not isinstance(config, ContextConfig):
        raise checks.refuse("config", config, "a PoolConfig or a ContextConfig")
    return PoolConfig(context=config)


class CoreBackend:
    """A `Backend` over a plugin's descriptor."""

    def __init__(self, descriptor: BackendDescriptor) -> None:
        self._descriptor = descriptor
        self.name = descriptor.name

    @property
    def info(self) -> BackendInfo:
        """What is known about it, including its devices."""
        return default_registry().record(self.name).info(devices=True)

    def match(self, path: AnyPath) -> float:
        """Return how well it can read ``path``: 0 = not at all.

        Raises `InvalidInputError` for what is no path, `PluginError` where the plugin fails.
        """
        where = checks.check_path("path", path)
        check_score(self._descriptor, where)
        with calls.typed(self.name, "scoring a path"):
            return float(self._descriptor.match(where))

    def load_model(
        self, path: AnyPath, config: ModelConfig | None = None, **fields: Unpack[ModelFields]
    ) -> Model:
        """Return the model at ``path``; see `infercore.load_model`."""
        built = checks.build(ModelConfig, config, fields)
        return load(self._descriptor, locate(path, backend=self.name), built)
