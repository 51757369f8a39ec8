"""The guarded model: weights that outlive their last context, and what is made from them."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import attrs

from infercore.engine import calls, digest, plugin_checks, window
from infercore.engine.arguments import check_token
from infercore.engine.context import GuardedContext
from infercore.engine.gate import fork_count
from infercore.engine.ladder import allocate
from infercore.engine.sampler import GuardedSampler
from infercore.engine.tokenizer import Dialect, GuardedTokenizer
from infercore.errors import (
    InvalidStateError,
    PluginLoadError,
    SessionClosedError,
    UnsupportedFeatureError,
)
from infercore.values import checks, shown
from infercore.values.config import KV_TYPES, ContextConfig, SamplingConfig
from infercore.values.field_texts import lists_fields
from infercore.values.manifest import kv_options
from infercore.values.pool import (
    PoolConfig,
    is_for_a_pool,
    pool_config,
    shared_context,
    with_shared_context,
)
from infercore.values.recommended import recommended_sampling

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from typing_extensions import Self, Unpack

    from infercore.engine.trial import FirstContext
    from infercore.protocols.public import Sampler
    from infercore.protocols.session import Session
    from infercore.protocols.spi import EngineModel
    from infercore.session.pool import SessionPool
    from infercore.values.config import AdapterSpec
    from infercore.values.fields import (
        ContextFields,
        PlanFields,
        PoolFields,
        SamplingFields,
        SessionFields,
    )
    from infercore.values.info import BackendDescriptor, Capabilities, MemoryPlan, ModelInfo

SESSION_FIELDS = ("profile_id", "prompt_format", "add_bos", "overflow")


@attrs.frozen(kw_only=True)
class Services:
    """What layers above provide: sampler, session, and what a chat template can do."""

    new_sampler: Callable[[GuardedModel, SamplingConfig], Sampler]
    new_session: Callable[[GuardedModel, GuardedContext, dict[str, Any]], Session]
    new_pool: Callable[[GuardedModel, PoolConfig, bool], SessionPool]
    dialect: Callable[[str, str, str], Dialect]


class _Weights:
    """The engine's model and the count of those that need it; freed when none is left."""

    def __init__(self, inner: EngineModel, backend: str) -> None:
        self.inner = inner
        self._backend = backend
        self._lock = threading.Lock()
        self._born = fork_count()
        self._n_users = 1
        self._n_calls = 0

    @property
    def freed(self) -> bool:
        """Whether nothing needs the weights any more."""
        return self._n_users == 0

    def take(self) -> None:
        with self._lock:
            if self._n_users == 0:
                raise SessionClosedError("this model is closed; load it again")
            self._n_users += 1

    def release(self) -> None:
        with self._lock:
            self._n_users -= 1
            last = self._n_users == self._n_calls == 0
        self._free(last)

    def begin(self) -> None:
        """Keep them for a call, which is refused where nobody needs them any more."""
        with self._lock:
            if self._n_users == 0:
                raise SessionClosedError("the model of this tokenizer is closed; load it again")
            self._n_calls += 1

    def end(self) -> None:
        with self._lock:
            self._n_calls -= 1
            last = self._n_users == self._n_calls == 0
        self._free(last)

    def _free(self, last: bool) -> None:  # noqa: FBT001  (nobody else calls it)
        if last and self._born == fork_count():  # in a fork they are the parent's
            with calls.typed(self._backend, "closing a model"):
                self.inner.close()


class _Lease:
    """Keeps the weights for one object; called when that is closed."""

    def __init__(self, weights: _Weights) -> None:
        self._weights = weights
        weights.take()

    def take(self) -> _Lease:
        return _Lease(self._weights)

    def __call__(self) -> None:
        self._weights.release()


class GuardedModel:
    """A `Model` over a plugin's `EngineModel`."""

    def __init__(
        self,
        inner: EngineModel,
        *,
        descriptor: BackendDescriptor,
        services: Services,
        load_ms: float = 0.0,
        options: Mapping[str, Any] | None = None,
        try_adapter: Callable[[str], None] | None = None,
        first_context: FirstContext | None = None,
        name: str = "",
    ) -> None:
        plugin_checks.check_model(inner, descriptor.name)
        self._name = name
        self._inner = inner
        self._weights = _Weights(inner, descriptor.name)
        self._descriptor = descriptor
        self._services = services
        self._load_ms = load_ms
        self._try_adapter = try_adapter
        self._first_context = first_context
        self._born = fork_count()
        self.backend = descriptor.name
        self.backend_version = _version(descriptor)
        self.info = _with_sampling(inner.info)
        self.runtime = _runtime(inner, descriptor, options or {})
        self._closed = threading.Event()
        weights = self._weights
        self.tokenizer = GuardedTokenizer(
            inner.tokenizer,
            dialect=services.dialect,
            weights=weights,
            backend=descriptor.name,
        )
        # Last, so that a model which could not be guarded is still its loader's to close.
        self._finalizer = weakref.finalize(self, self._weights.release)
        # A tokenizer keeps the weights that it reads, also where the model is let go of.
        self._tokenizer_finalizer = weakref.finalize(self.tokenizer, _Lease(weights))

    def __repr__(self) -> str:
        if self.closed:
            return "<Model closed>"
        shape = f"{self.info.architecture} {shown.count(self.info.n_params)}"
        whose = f"{self._name} on {self.backend}".lstrip()
        return f"<Model {whose}, {shape}, n_ctx_train {self.info.n_ctx_train}>"

    @property
    def capabilities(self) -> Capabilities:
        """Those of a context with the default config."""
        return self._inner.capabilities

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed.is_set()

    @property
    def files(self) -> Sequence[str]:
        """The files whose bytes make the model."""
        return tuple(self._inner.files)

    @property
    def digest(self) -> str:
        """SHA-256 hex over the model's files, cached."""
        with calls.typed(self.backend, "reading the digest of a model"):
            own = getattr(self._inner, "digest", None)
        if own is not None and not isinstance(own, str):
            made = f"is {plugin_checks.shown(own)}, not a str"
            raise plugin_checks.wrong(self.backend, "model.digest", made)
        return digest.of_files(self._inner.files) if own is None else own

    @property
    def native_handle(self) -> Any:
        """What the engine's own API takes; calls past this object are the caller's to answer for.

        Raises `SessionClosedError` after close, `UnsupportedFeatureError` without one.
        """
        self._check_open()
        own = getattr(self._inner, "native_handle", None)
        if own is None:
            raise UnsupportedFeatureError(feature="native_handle", backend=self.backend)
        with calls.typed(self.backend, "giving the native handle"):
            return own()

    def _check_open(self) -> None:
        if self.closed:
            raise SessionClosedError("this model is closed; load it again")
        if self._born != fork_count():
            raise InvalidStateError(
                "this model was loaded before os.fork(); load it in the child",
                operation="use",
                state="forked",
            )

    @lists_fields("ContextConfig")
    def new_context(
        self, config: ContextConfig | None = None, **fields: Unpack[ContextFields]
    ) -> GuardedContext:
        """Return a new context on these weights; see `Model.new_context`."""
        self._check_open()
        return self.context_of(checks.build(ContextConfig, config, fields))

    def context_of(self, config: ContextConfig) -> GuardedContext:
        """Return a new context, even of a closed model that another context keeps alive."""
        self._check_context(config)
        first = self._first_context  # once: other threads may open contexts too
        if first is not None:
            first.check()
            self._first_context = None
        self._try_adapters(config.adapters)
        asked = self._resolved(config)
        started = time.perf_counter()
        lease = _Lease(self._weights)
        try:
            with calls.typed(self.backend, "opening a context"):
                kinds = self._inner.capabilities
                plan = None if kinds.gpu_offload else self._plan
                make = getattr(self._inner, plugin_checks.opener_of(self._inner))
                inner, got, attempts = allocate(make, asked, kinds, plan)
        except BaseException:
            lease()
            raise
        try:
            with calls.typed(self.backend, "opening a context"):
                plugin_checks.check_context(inner, self.backend)
                _check_methods(inner, self.backend)
                _check_precision(inner, got, self.backend)
                return GuardedContext(
                    inner,
                    release=lease,
                    config=got,
                    window=window.window_of(got.n_ctx or 0, inner.effective),
                    n_vocab=self.tokenizer.n_vocab,
                    backend=self.backend,
                    identity=lambda: self._state_identity(inner.effective),
                    try_adapters=self._try_adapters,
                    attempts=attempts,
                    layers=(self.info.n_layer, self.info.n_embd),
                    load_ms=self._load_ms + (time.perf_counter() - started) * 1e3,
                )
        except BaseException:
            _close(inner)
            lease()
            raise

    def _resolved(self, config: ContextConfig) -> ContextConfig:
        """Return ``config`` with its window as a number, which is enough for its sequences."""
        config = self._fitted(config)
        n_ctx = window.resolve_n_ctx(config, self.info)
        window.check_parts(n_ctx, config.n_seq_max, unified=config.kv_unified)
        return attrs.evolve(config, n_ctx=n_ctx)

    def _fitted(self, config: ContextConfig) -> ContextConfig:
        """Return ``config`` with a number where the largest window is asked for."""
        if not window.is_fit(config):
            return config
        plan = self._planner("n_ctx='fit'")
        with calls.typed(self.backend, "planning memory"):
            return window.fitted(config, lambda tried: plan(self._resolved(tried)), is_loaded=True)

    def _pool_config(self, pool: PoolConfig) -> PoolConfig:
        """Return ``pool`` with numbers where its window and its cells are left to memory."""
        config = pool.context
        if window.is_fit(config):
            pool = pool.with_window(window.resolve_n_ctx(self._fitted(config), self.info))
        plan, kinds = self._plan, self._inner.capabilities
        if plan is None or kinds.encoder or not kinds.multi_sequence:
            return pool
        self._check_context(config)
        n_ctx = window.resolve_n_ctx(pool.context, self.info)
        config = attrs.evolve(pool.context, n_ctx=n_ctx)
        with calls.typed(self.backend, "planning memory"), suppress(OSError):
            return pool.with_cells(
                n_ctx,
                lambda most: window.fitted_cells(
                    config, most, lambda tried: plan(self._resolved(tried)), is_loaded=True
                ),
            )
        return pool  # its file is gone, from which plans are made

    def _check_context(self, config: ContextConfig) -> None:
        """Raise for fields that this model's contexts cannot honour."""
        self._check_options(config)
        self._check_adapters(config)
        self._check_kv_types(config)

    def _check_options(self, config: ContextConfig) -> None:
        known = self._descriptor.context_options
        for key in config.backend_options:
            if key in self._descriptor.model_options and key not in known:
                raise checks.refuse("backend_options", key, "it to load_model: it is the model's")
        checks.check_options("backend_options", config.backend_options, known)

    def _check_adapters(self, config: ContextConfig) -> None:
        if config.adapters and not self._inner.capabilities.lora:
            raise UnsupportedFeatureError(feature="adapters", backend=self.backend)

    def _try_adapters(self, adapters: Sequence[AdapterSpec]) -> None:
        """Try files that were not seen before in a child process, as the model's own was."""
        if self._try_adapter is not None:
            for path in {adapter.path: None for adapter in adapters}:
                self._try_adapter(path)

    def _check_kv_types(self, config: ContextConfig) -> None:
        """Refuse a type that only a plugin can know, and this one does not declare."""
        declared = self._inner.capabilities.kv_types
        for field in ("type_k", "type_v"):
            kind = getattr(config, field)
            if kind is not None and kind not in (*KV_TYPES, *declared):
                hint = f"this model's are {', '.join(declared) or 'not known'}"
                raise UnsupportedFeatureError(
                    feature=f"{field}={str(kind)!r}", backend=self.backend, hint=hint
                )

    def _state_identity(self, effective: Mapping[str, Any]) -> dict[str, Any]:
        """What saved state must agree in."""
        return {
            "backend": self.backend,
            "backend_version": self.backend_version,
            "model_digest": self.digest,
            "kv": kv_options(effective),
            "runtime": {name: str(value) for name, value in self.runtime.items()},
            "adapters": digest.adapter_identities(effective.get("adapters") or ()),
        }

    @lists_fields("SamplingConfig")
    def new_sampler(
        self, config: SamplingConfig | None = None, **fields: Unpack[SamplingFields]
    ) -> Sampler:
        """Return a sampler for this model's vocabulary; see `Model.new_sampler`."""
        self._check_open()
        return self._services.new_sampler(self, checks.build(SamplingConfig, config, fields))

    def new_native_sampler(self, config: SamplingConfig) -> GuardedSampler:
        """Return the engine's own sampler. Raises `UnsupportedFeatureError` without one."""
        make = getattr(self._inner, "new_sampler", None)
        if not self._inner.capabilities.native_sampler or make is None:
            raise UnsupportedFeatureError(
                feature="native_sampler",
                backend=self.backend,
                hint="use implementation='portable'",
            )
        if config.no_repeat_ngram_size:
            raise UnsupportedFeatureError(
                feature="no_repeat_ngram_size",
                backend=self.backend,
                hint="the engine's own sampler has none",
            )
        if config.adaptive_p_target >= 0:
            raise UnsupportedFeatureError(
                feature="adaptive_p_target",
                backend=self.backend,
                hint="a copy of the engine's own sampler would restart its random numbers; "
                "use implementation='portable'",
            )
        for token in config.logit_bias:
            check_token(token, self.tokenizer.n_vocab, field="logit_bias")
        lease = _Lease(self._weights)
        try:
            with calls.typed(self.backend, "making a sampler"):
                inner = plugin_checks.check_sampler(make(config), self.backend)
        except BaseException:
            lease()
            raise
        n_vocab = self.tokenizer.n_vocab
        return GuardedSampler(inner, n_vocab=n_vocab, release=lease, backend=self.backend)

    @lists_fields("SessionOptions", "ContextConfig")
    def new_session(
        self, config: ContextConfig | None = None, **fields: Unpack[SessionFields]
    ) -> Session:
        """Return a session over a new context of its own; see `Model.new_session`."""
        kinds = self._inner.capabilities
        if kinds.encoder:
            hint = "this model only makes embeddings, it cannot generate text; use infercore.embed"
            if kinds.logits_all:
                hint = (
                    "this model generates from encoded text; use new_context(), "
                    "encode() and decode()"
                )
            raise UnsupportedFeatureError(feature="session", backend=self.backend, hint=hint)
        given: dict[str, Any] = {**fields}
        options = {name: given.pop(name) for name in SESSION_FIELDS if name in given}
        context = self.new_context(config, **given)
        try:
            return self._services.new_session(self, context, options)
        except BaseException:
            context.close()
            raise

    @lists_fields("PoolConfig", "ContextConfig")
    def new_pool(
        self, config: PoolConfig | None = None, **fields: Unpack[PoolFields]
    ) -> SessionPool:
        """Return a pool of sessions that share one engine; see `Model.new_pool`."""
        built = pool_config(config, fields)
        if built.isolate:
            raise checks.refuse(
                "isolate", True, "a path to open_pool(path, isolate=True): this model is here"
            )
        return self.pool_of(built)

    def pool_of(self, config: PoolConfig, *, owns_model: bool = False) -> SessionPool:
        """Return a pool, which closes this model with itself where it ``owns_model``."""
        self._check_open()
        if self._inner.capabilities.logits == "none":
            hint = "a pool chooses tokens from logits; open sessions of their own"
            raise UnsupportedFeatureError(feature="pool", backend=self.backend, hint=hint)
        return self._services.new_pool(self, self._pool_config(config), owns_model)

    @lists_fields("ContextConfig", "PoolConfig")
    def plan_memory(
        self, config: ContextConfig | None = None, **fields: Unpack[PlanFields]
    ) -> MemoryPlan:
        """Return the bytes that such a context will take; see `Model.plan_memory`."""
        self._check_open()
        if is_for_a_pool(config, fields):
            return self._planned_pool(config, fields)
        return self._planned(checks.build(ContextConfig, config, fields))

    def _planned(self, config: ContextConfig) -> MemoryPlan:
        plan = self._planner("plan_memory")
        self._check_context(config)
        asked = self._resolved(config)
        with calls.typed(self.backend, "planning memory"):
            return plan(asked)

    @property
    def _plan(self) -> Callable[[ContextConfig], MemoryPlan] | None:
        """What plans memory, and refuses what is no plan; None where a plugin has no such call."""
        plan = getattr(self._inner, "plan_memory", None)
        if plan is None:
            return None
        return lambda config: plugin_checks.check_plan(plan(config), self.backend)

    def _planner(self, feature: str) -> Callable[[ContextConfig], MemoryPlan]:
        plan = self._plan
        if plan is None:
            raise UnsupportedFeatureError(feature=feature, backend=self.backend)
        return plan

    def _planned_pool(self, config: Any, fields: Mapping[str, Any]) -> MemoryPlan:
        if isinstance(config, ContextConfig):
            config = PoolConfig(context=config)
        pool = self._pool_config(pool_config(config, fields))
        n_ctx = window.resolve_n_ctx(pool.context, self.info)
        pool.check_window(n_ctx)
        kinds = self._inner.capabilities
        wanted = shared_context(
            pool, n_ctx, multi_sequence=kinds.multi_sequence, scans_cells=kinds.scans_cells
        )
        return with_shared_context(wanted, pool, n_ctx, self._planned)

    def close(self) -> None:
        """Release the weights once the last context is closed; idempotent."""
        self._closed.set()
        if self._first_context is not None:
            self._first_context.close()
        self._finalizer()
        self._tokenizer_finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _runtime(
    inner: EngineModel, descriptor: BackendDescriptor, options: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return what KV values depend on beside a context's own options.

    What the plugin tells, and all that the model was loaded with and that is not known to be
    neutral: so nobody forgets an option.
    """
    neutral = getattr(descriptor, "neutral_options", ())
    named = {name: value for name, value in options.items() if name not in neutral}
    told: Mapping[str, Any] = getattr(inner, "runtime", {})
    if not isinstance(told, Mapping):
        made = f"is {plugin_checks.shown(told)}, not a mapping"
        raise plugin_checks.wrong(descriptor.name, "model.runtime", made)
    return {**told, "options": _canonical(named)} if named else told


def _canonical(value: object) -> str:
    """Return a text that is the same for equal options, in whatever order they were given."""
    if isinstance(value, Mapping):
        pairs = sorted((repr(key), _canonical(item)) for key, item in value.items())
        return "{" + ", ".join(f"{key}: {item}" for key, item in pairs) + "}"
    return repr(value)


def _close(context: Any) -> None:
    """Close what a plugin gave for a context, as far as it can be."""
    close = getattr(context, "close", None)
    if callable(close):
        with suppress(Exception):  # what came first is what is wrong
            close()


def _with_sampling(info: ModelInfo) -> ModelInfo:
    """Return ``info`` with the sampling that its metadata recommends, where it says none itself."""
    found = {} if info.sampling else recommended_sampling(info.metadata)
    return attrs.evolve(info, sampling=found) if found else info


def _version(descriptor: BackendDescriptor) -> str:
    version = getattr(descriptor, "engine_version", None)
    if not callable(version):
        return "unknown"
    with calls.typed(descriptor.name, "reading the version of its engine"):
        return str(version())


_METHODS_OF = {
    "kv_shift": ("seq_shift",),
    "kv_divide": ("seq_divide",),
    "multi_sequence": ("decode_batch",),
    "state": ("save_state", "load_state"),
    "sequence_state": ("save_sequence", "load_sequence"),
    "embeddings": ("embedding", "embeddings", "set_embeddings"),
    "encoder": ("encode",),
    "abort": ("abort", "clear_abort"),
    "live_threads": ("set_threads",),
    "lora": ("set_adapters",),
}


def _check_precision(inner: Any, config: ContextConfig, backend: str) -> None:
    """Refuse a precision that a plugin from before the field ignores."""
    if config.precision == "default" or config.precision is None:
        return
    if inner.effective.get("precision") != config.precision:
        raise UnsupportedFeatureError(
            feature=f"precision={config.precision!r}", backend=backend, hint="leave it out"
        )


def _check_methods(inner: Any, backend: str) -> None:
    """Refuse a plugin that declares what it does not have."""
    declared = inner.capabilities
    needed = [
        name
        for capability, names in _METHODS_OF.items()
        if getattr(declared, capability)
        for name in names
    ]
    if declared.kv_copy != "none":
        needed.append("seq_copy")
    if declared.logits == "none" and not declared.native_sampler:
        raise PluginLoadError(
            f"backend {backend!r} shows no logits and declares no native_sampler to choose tokens",
            plugin=backend,
        )
    if declared.logits == "top" and not declared.n_top:
        raise PluginLoadError(
            f"backend {backend!r} declares logits='top' and no n_top: how many a row has",
            plugin=backend,
        )
    missing = [name for name in needed if not callable(getattr(inner, name, None))]
    if missing:
        raise PluginLoadError(
            f"backend {backend!r} declares capabilities without their methods: "
            + ", ".join(missing),
            plugin=backend,
        )
