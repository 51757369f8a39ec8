"""What a caller asks of a pool of sessions, and what a pool says of itself."""

from __future__ import annotations

import os  # noqa: TC003  (attrs resolves annotations)
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import attrs

from infercore.errors import InvalidInputError, UnsupportedFeatureError
from infercore.values import checks
from infercore.values.config import MAX_SEQUENCES, ContextConfig
from infercore.values.field_texts import lists_fields
from infercore.values.shown import one_line, table

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

T = TypeVar("T")
GIB = 2**30
NOT_IN_A_POOL = {
    "n_seq_max": "a pool sets it from n_parallel",
    "pooling_type": "name the pooling in pool.embed(texts, pooling=...)",
}
"""Fields of a context that a pool decides itself, and what to do instead."""
SERVED: Mapping[str, Any] = MappingProxyType(
    {"max_step_ms": 450.0, "batching": "always", "cache_bytes": GIB}
)
"""Fields of a pool behind a server, where the caller leaves them open."""


def _folder(value: str | os.PathLike[str] | None) -> str | None:
    return None if value is None else checks.check_path("cache_dir", value)


def _context(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    if not isinstance(value, ContextConfig):
        raise checks.refuse(attribute.name, value, "a ContextConfig")


def _seconds() -> Any:
    return checks.number(1e-3, 1e9, optional=False)


@lists_fields("PoolConfig")
@attrs.frozen(kw_only=True, field_transformer=checks.plain_numbers)
class PoolConfig:
    """How many sessions share one engine, and on what terms.

    ``n_parallel`` sessions are decoded in one engine call; any number of sessions may be open.
    ``n_cells`` is the number of tokens that all of them can hold together (None = ``n_parallel``
    times the window, or, where the backend can plan its memory, what that has room for), while
    ``context.n_ctx`` is the window of each. Where sequences have cells of their own
    (``batch_invariant``, ``kv_unified=False``), ``n_cells`` holds a window for each place.
    ``n_step_tokens`` bounds the tokens of one call. None = a piece of prompt beside sessions that
    generate is chosen by measuring: such a call is to take ``max_step_ms`` milliseconds (None =
    near 2.5 times as long as without the piece, at most 250). ``max_waiting`` bounds the calls that
    wait for a place; beyond that, a namespace without any call still gets one in. ``batching`` is
    "always", "never" or "auto", which takes turns where that is faster here. With
    ``batch_invariant`` a session computes the same bits as it does alone, and nothing is batched.

    Sequences that lose their cells go to ``cache_bytes`` bytes of host memory, then to at most
    ``cache_dir_bytes`` bytes of files in ``cache_dir``. With ``cache_bytes``, where ``n_cells`` and
    ``kv_unified`` are left open and the engine's calls read the cells of all sequences
    (`Capabilities.scans_cells`), the sessions that run have cells of their own. A stream that
    nobody reads for ``reader_timeout`` seconds is cancelled. An engine that fails for good is
    reopened, at most ``max_restarts`` times in ``restart_window`` seconds. With ``isolate``, which
    needs `open_pool` with a path, model and pool live in a separate process, which is restarted
    when it dies, within the same limit. An engine call that takes ``step_timeout`` seconds longer
    than expected ends the process, as does loading for more than ``load_timeout``; without
    ``isolate`` these two are refused when the pool is opened.

    Raises `InvalidInputError` for a value that is not allowed, a window beyond ``n_cells``, and
    for the fields of a context that a pool sets itself: ``n_seq_max`` and ``pooling_type``.
    """

    n_parallel: int = attrs.field(
        default=8, validator=checks.integer(1, MAX_SEQUENCES, optional=False)
    )
    n_cells: int | None = attrs.field(default=None, validator=checks.integer(1, 2**31 - 1))
    n_step_tokens: int | None = attrs.field(default=None, validator=checks.integer(1, 2**31 - 1))
    max_step_ms: float | None = attrs.field(default=None, validator=checks.number(1.0, 1e9))
    max_waiting: int = attrs.field(
        default=1024, validator=checks.integer(0, 2**31 - 1, optional=False)
    )
    batching: Literal["auto", "always", "never"] = attrs.field(
        default="auto", validator=checks.one_of("auto", "always", "never", optional=False)
    )
    batch_invariant: bool = attrs.field(default=False, validator=checks.boolean(optional=False))
    cache_bytes: int = attrs.field(default=0, validator=checks.integer(0, optional=False))
    cache_dir: str | None = attrs.field(default=None, converter=_folder)
    cache_dir_bytes: int = attrs.field(
        default=10 * GIB, validator=checks.integer(0, optional=False)
    )
    reader_timeout: float | None = attrs.field(default=None, validator=checks.number(1e-3, 1e9))
    isolate: bool = attrs.field(default=False, validator=checks.boolean(optional=False))
    step_timeout: float = attrs.field(default=60.0, validator=_seconds())
    load_timeout: float = attrs.field(default=600.0, validator=_seconds())
    max_restarts: int = attrs.field(default=3, validator=checks.integer(0, 10**6, optional=False))
    restart_window: float = attrs.field(default=600.0, validator=_seconds())
    context: ContextConfig = attrs.field(factory=ContextConfig, validator=_context)

    def __attrs_post_init__(self) -> None:
        for name, instead in NOT_IN_A_POOL.items():
            if getattr(self.context, name) is not None:
                raise _not_in_a_pool(name, getattr(self.context, name), instead)
        window: object = self.context.n_ctx
        if window != "fit":
            self.check_window(self.context.n_ctx)
        elif self.batch_invariant or self.context.kv_unified is False:
            raise checks.refuse("n_ctx", window, "a number, where each session has its own cells")
        if self.batch_invariant and self.batching == "always":
            raise checks.refuse(
                "batching", self.batching, "'auto' or 'never' with batch_invariant=True"
            )
        if self.max_step_ms is not None:
            for name in ("n_step_tokens", "batch_invariant"):
                if getattr(self, name):
                    raise checks.refuse("max_step_ms", self.max_step_ms, f"None with {name}")
        n_batch = self.context.n_batch
        if self.n_step_tokens is not None and n_batch is not None and self.n_step_tokens > n_batch:
            raise checks.refuse(
                "n_step_tokens", self.n_step_tokens, f"at most n_batch={n_batch}, or None"
            )

    def with_window(self, n_ctx: int) -> PoolConfig:
        """Return this pool with the window that memory has room for, as far as its cells go."""
        n_ctx = n_ctx if self.n_cells is None else min(n_ctx, self.n_cells)
        return attrs.evolve(self, context=attrs.evolve(self.context, n_ctx=n_ctx))

    def with_cells(self, n_ctx: int, fitting: Callable[[int], int]) -> PoolConfig:
        """Return this pool with as many cells as memory has room for, where it leaves them open.

        ``n_ctx`` is the window of a session; ``fitting`` returns how many of so many have room.
        """
        if self.n_cells is not None or self.batch_invariant or self.context.kv_unified is False:
            return self
        most = self.n_parallel * n_ctx
        n_cells = fitting(most)
        return self if n_cells >= most else attrs.evolve(self, n_cells=n_cells)

    def check_window(self, n_ctx: int | None) -> None:
        """Raise `InvalidInputError` if a session's window ``n_ctx`` is larger than ``n_cells``.

        None and 0 stand for windows that only the model knows; check again once it is loaded.
        """
        if n_ctx is not None and self.n_cells is not None and n_ctx > self.n_cells:
            raise InvalidInputError(
                f"n_cells={self.n_cells} holds less than one session's window n_ctx={n_ctx}; "
                "raise n_cells or lower n_ctx",
                field="n_cells",
                value=self.n_cells,
                allowed=f"an integer of at least {n_ctx}, or None",
            )


def _not_in_a_pool(name: str, value: object, instead: str) -> InvalidInputError:
    return InvalidInputError(
        f"{name} is not a field of a pool; {instead}", field=name, value=value, allowed=None
    )


_OF_POOL = tuple(field.name for field in attrs.fields(PoolConfig))
_OF_CONTEXT = tuple(field.name for field in attrs.fields(ContextConfig))


def pool_config(config: PoolConfig | None, fields: Mapping[str, Any]) -> PoolConfig:
    """Return ``config``, or a new one, with ``fields`` of a pool or of its context laid over it.

    Raises `InvalidInputError` for a field of neither, naming the nearest one.
    """
    for name in fields:
        if name in NOT_IN_A_POOL and fields[name] is not None:
            raise _not_in_a_pool(name, fields[name], NOT_IN_A_POOL[name])
    checks.check_options("PoolConfig", fields, (*_OF_POOL, *_OF_CONTEXT))
    of_pool = {name: value for name, value in fields.items() if name in _OF_POOL}
    of_context = {name: value for name, value in fields.items() if name in _OF_CONTEXT}
    if of_context:
        base = of_pool.get("context", config.context if isinstance(config, PoolConfig) else None)
        of_pool["context"] = checks.build(ContextConfig, base, of_context)
    return checks.build(PoolConfig, config, of_pool)


def served_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``fields`` of a pool with those of `SERVED` that they leave open."""
    defaults = dict(SERVED)
    if fields.get("batch_invariant"):  # how calls are cut decides the bits
        defaults = {"cache_bytes": SERVED["cache_bytes"]}
    elif fields.get("precision") != "accurate":
        defaults["flash_attn"] = "auto"
    if fields.get("n_step_tokens") is not None:
        defaults.pop("max_step_ms", None)
    return {**defaults, **fields}


def is_for_a_pool(config: object, fields: Mapping[str, Any]) -> bool:
    """Return whether ``config`` or ``fields`` are a pool's, and not a context's alone."""
    return isinstance(config, PoolConfig) or any(
        name in _OF_POOL and name != "context" for name in fields
    )


MOST_SEQUENCES = 256


def shared_context(
    config: PoolConfig, n_ctx: int, *, multi_sequence: bool = True, scans_cells: bool = False
) -> ContextConfig:
    """Return the context that sessions with a window of ``n_ctx`` tokens share.

    Where the engine ``scans_cells`` and idle sequences have host memory to go to, those that run
    have cells of their own.
    """
    if not multi_sequence:
        return attrs.evolve(config.context, n_ctx=n_ctx)
    n_cells = config.n_cells or config.n_parallel * n_ctx
    unified = config.context.kv_unified
    if unified is None:
        apart = scans_cells and config.cache_bytes and config.n_cells is None
        unified = not (config.batch_invariant or apart)
    n_seq_max = min(MOST_SEQUENCES, 4 * config.n_parallel, n_cells)
    if not unified:  # a part of the cells for each, as large as its window
        n_seq_max = _n_windows(config, n_ctx, config.n_parallel)
        n_cells = n_seq_max * n_ctx
    return attrs.evolve(
        config.context, n_ctx=n_cells, n_seq_max=n_seq_max, kv_unified=bool(unified)
    )


def _n_windows(config: PoolConfig, n_ctx: int, n_most: int) -> int:
    """Return how many places with a window of their own there are: those that ``n_cells`` hold."""
    return n_most if config.n_cells is None else max(1, min(n_most, config.n_cells // n_ctx))


def with_shared_context(
    wanted: ContextConfig, config: PoolConfig, n_ctx: int, work: Callable[[ContextConfig], T]
) -> T:
    """Return what ``work`` returns for the context ``wanted`` of a pool, or for a smaller one.

    It has fewer places where the engine refuses so many, a single sequence where the options allow
    no more. Where the caller left ``kv_unified`` open and the engine's sequences have caches of
    their own, each place has one of ``n_ctx`` tokens, and there are as many as ``n_cells`` has room
    for.
    """
    try:
        return work(wanted)
    except UnsupportedFeatureError as error:
        n = wanted.n_seq_max or 1
        if "kv_unified" in error.feature and wanted.kv_unified and not config.context.kv_unified:
            n = _n_windows(config, n_ctx, min(n, config.n_parallel))
            fewer = attrs.evolve(wanted, n_ctx=n * n_ctx, n_seq_max=n, kv_unified=None)
        elif "n_seq_max" in error.feature and n > 1:
            n = config.n_parallel if n > config.n_parallel else n // 2
            fewer = attrs.evolve(wanted, n_seq_max=n)
            if n == 1:
                fewer = attrs.evolve(wanted, n_ctx=n_ctx, n_seq_max=None, kv_unified=None)
            elif not wanted.kv_unified:
                fewer = attrs.evolve(fewer, n_ctx=n * n_ctx)
        else:
            raise
    return with_shared_context(fewer, config, n_ctx, work)


@attrs.frozen(kw_only=True)
class PoolStats:
    """What a pool has done since it was opened, and what it is doing now.

    ``n_open`` sessions are open, ``n_running`` of them have a place and ``n_waiting`` calls wait
    for one. Of ``n_cells``, ``n_cells_used`` hold tokens of open sessions, ``n_cells_shared`` of
    them for more than one. ``prompt_tokens`` were requested; of these ``cached_tokens`` were
    resident (held by the same session or copied from another) and ``restored_tokens`` came back
    from memory or disk, or were where a closed session had left them.
    ``mean_batch`` is the mean number of sessions per step; ``step_ms`` a moving average of a step's
    time. ``batching`` says what is in force, "always" or "never" (with "auto" the last choice).
    ``n_preempted`` counts sessions that lost their cells while running, ``n_moved_out`` sequences
    moved to memory or disk, ``n_restarts`` engines that were reopened.
    """

    n_open: int = 0
    n_running: int = 0
    n_waiting: int = 0
    n_cells: int = 0
    n_cells_used: int = 0
    n_cells_shared: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    restored_tokens: int = 0
    generated_tokens: int = 0
    n_steps: int = 0
    mean_batch: float = 0.0
    n_preempted: int = 0
    n_moved_out: int = 0
    n_restarts: int = 0
    batching: str = "always"
    step_ms: float | None = None

    def __repr__(self) -> str:
        return one_line(self)

    def _repr_html_(self) -> str:
        rows = [(field.name, getattr(self, field.name)) for field in attrs.fields(PoolStats)]
        own = self.n_cells_used - self.n_cells_shared
        parts = {"cells of one session": own, "shared cells": self.n_cells_shared}
        return table("PoolStats", rows, parts, self.n_cells - self.n_cells_used)
