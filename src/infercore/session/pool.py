"""Many sessions on one engine: a pool opens them, counts them, and ends with them."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from functools import partial
from hashlib import sha256
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from infercore.engine import window
from infercore.engine.arguments import check_bool
from infercore.errors import SessionClosedError, UnsupportedFeatureError
from infercore.protocols.opening import opened_by
from infercore.session.asynchronous import AsyncSession, Opening
from infercore.session.base import SessionOptions
from infercore.session.cost_model import CostModel
from infercore.session.embedder import Embedder, unit
from infercore.session.homes import Share
from infercore.session.ranking import RANK, best_first, check_ranks, pairs_of
from infercore.session.runner import Owner
from infercore.session.scheduler import Scheduler
from infercore.session.session import CoreSession
from infercore.session.store import Store
from infercore.values import checks
from infercore.values.field_texts import lists_fields
from infercore.values.pool import PoolStats, shared_context, with_shared_context

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from typing_extensions import Self, Unpack

    from infercore.embedding import Pooling
    from infercore.errors import SessionFatalError
    from infercore.protocols.guarded import SessionModel
    from infercore.protocols.public import Tokenizer
    from infercore.protocols.spi import FloatArray
    from infercore.values.config import ContextConfig, DecodeConfig
    from infercore.values.fields import SessionOptionFields
    from infercore.values.info import Capabilities, ModelInfo
    from infercore.values.pool import PoolConfig

_CALL_TOKENS = 256
"""Tokens of a call of a prompt where the bits are to be those of a session alone."""


@opened_by("infercore.open_pool(path_or_model) or model.new_pool()", internal="new_sampler")
class SessionPool:
    """Sessions that share one engine: its weights, its cells and its calls.

    Each session may be used in its own thread or task. ``close`` ends running calls; every later
    call of the pool or its sessions raises `SessionClosedError`.
    """

    def __init__(
        self,
        model: SessionModel,
        config: PoolConfig,
        *,
        new_sampler: Callable[[DecodeConfig], Any],
        embed: Callable[[Any, Sequence[str], str | None], FloatArray],
        owns_model: bool = False,
    ) -> None:
        self.model = model
        self._store: Store | None = None
        self._embedder = Embedder(partial(embed, model))
        self.config = config
        self._new_sampler = new_sampler
        self._lock = threading.Lock()
        self._n_open = 0
        self._draining = False
        self.window = window.resolve_n_ctx(config.context, model.info)
        config.check_window(self.window)
        _refuse_times_of_a_child(config, model.backend)
        self._owner = None if model.capabilities.encoder else self._new_owner()
        self._finalizer = weakref.finalize(self, _end, self._owner, model if owns_model else None)

    def _new_owner(self) -> Owner:
        """Open the context that the sessions share, and return who owns it."""
        model, config, n_ctx = self.model, self.config, self.window
        wanted = shared_context(
            config,
            n_ctx,
            multi_sequence=model.capabilities.multi_sequence,
            scans_cells=model.capabilities.scans_cells,
        )
        multiple = None
        if config.batch_invariant and config.cache_dir is not None:
            raise UnsupportedFeatureError(
                feature="cache_dir with batch_invariant",
                backend=model.backend,
                hint="bits depend on how a sequence was evaluated; use cache_bytes",
            )
        if config.batch_invariant:
            most = config.context.n_batch or _CALL_TOKENS
            multiple = config.n_step_tokens or min(_CALL_TOKENS, most)
            _check_invariant(model, wanted, config, n_ctx)
        self._store = _store_of(config, model.capabilities)
        scheduler = Scheduler(
            # It lives in the finalizer, so nothing of it may keep the pool alive.
            lambda: with_shared_context(wanted, config, n_ctx, model.context_of),
            costs=CostModel(
                batching=config.batching,
                step_tokens=config.n_step_tokens,
                max_step_ms=config.max_step_ms,
            ),
            n_parallel=config.n_parallel,
            max_waiting=config.max_waiting,
            n_step_tokens=config.n_step_tokens,
            multiple=multiple,
            one_a_call=config.batch_invariant,
            max_restarts=config.max_restarts,
            restart_window=config.restart_window,
            store=self._store,
            own_bytes=config.cache_bytes if config.batch_invariant else 0,
            keeps_at_end=config.cache_dir is not None,
        )
        # Less than was asked for where memory had no room for it (``on_oom="shrink"``).
        self.window = min(self.window, int(scheduler.context.n_ctx_seq))
        return Owner(scheduler)

    @property
    def owner(self) -> Owner:
        """Who owns the engine's context. Raises `UnsupportedFeatureError` for an encoder."""
        if self._owner is None:
            raise UnsupportedFeatureError(
                feature="session",
                backend=self.model.backend,
                hint="this model only makes embeddings, it generates no text; use embed or rerank",
            )
        return self._owner

    # -- facts ---------------------------------------------------------------------------------

    def __repr__(self) -> str:
        if self.closed:
            return "<SessionPool closed>"
        if self._owner is None:
            return f"<SessionPool on {self.model.backend}, for embeddings>"
        now = self.stats()
        sessions = f"n_open {now.n_open}, n_running {now.n_running}, n_waiting {now.n_waiting}"
        return f"<SessionPool {sessions}, {now.n_cells_used}/{now.n_cells} cells>"

    @property
    def info(self) -> ModelInfo:
        """The model's."""
        info: ModelInfo = self.model.info
        return info

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's."""
        return self.model.tokenizer

    @property
    def capabilities(self) -> Capabilities:
        """Those of the context that the sessions share."""
        if self._owner is None:
            kinds: Capabilities = self.model.capabilities
            return kinds
        shared: Capabilities = self._owner.scheduler.context.capabilities
        return shared

    @property
    def effective(self) -> Mapping[str, Any]:
        """The values in force: of the context, and of the pool's own fields."""
        if self._owner is None:
            return {"n_ctx": self.window}
        scheduler = self._owner.scheduler
        own = {
            "n_parallel": scheduler.n_places,
            "n_cells": scheduler.context.n_ctx,
            "n_ctx": self.window,
            "batching": self.config.batching,
        }
        return {**scheduler.context.effective, **own}

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        if self._owner is None:
            return self._embedder.closed
        scheduler = self._owner.scheduler
        return scheduler.closed or scheduler.stopping

    @property
    def failure(self) -> SessionFatalError | None:
        """The error that ended the engine for good; None while it works. Then close the pool."""
        return None if self._owner is None else self._owner.scheduler.fatal

    def stats(self) -> PoolStats:
        """Return what the pool has done and is doing; never waits for a step."""
        if self._owner is None:
            return PoolStats(n_steps=self._embedder.n_calls)
        scheduler = self._owner.scheduler
        count = scheduler.count
        n_cells = int(scheduler.context.n_ctx)
        used, shared = (0, 0) if scheduler.closed else scheduler.context.look_taken()
        used = max(0, used - sum(left.n_cells for left in tuple(scheduler.places.left)))
        return PoolStats(
            n_open=0 if self.closed else self._n_open,
            n_running=scheduler.n_running,
            n_waiting=scheduler.admission.n_waiting,
            n_cells=n_cells,
            n_cells_used=used,
            n_cells_shared=shared,
            prompt_tokens=count.evaluated_tokens + count.cached_tokens,
            cached_tokens=count.cached_tokens,
            restored_tokens=count.restored_tokens,
            generated_tokens=count.generated_tokens,
            n_steps=count.n_steps,
            mean_batch=count.n_batched / count.n_steps if count.n_steps else 0.0,
            n_preempted=count.n_preempted,
            n_moved_out=count.n_moved_out,
            n_restarts=count.n_restarts,
            batching="never" if scheduler.takes_turns else "always",
            step_ms=count.step_ms,
        )

    def held(self) -> list[tuple[bytes, tuple[int, ...]]]:
        """Return what sequences hold in cells and in memory: SHA-256 of the namespace, and tokens.

        For routing requests to several pools. Waits for the running step.
        """
        if self._owner is None:
            return []
        scheduler = self._owner.scheduler
        found = self._owner.ask(
            lambda: [(s.namespace, tuple(s.tokens[: s.n_held])) for s in scheduler.sequences]
        )
        stored = [] if self._store is None else self._store.held()
        return [
            (sha256(namespace.encode()).digest(), tokens) for namespace, tokens in found
        ] + stored

    @property
    def reader_timeout(self) -> float | None:
        """Seconds after which a stream that nobody reads is cancelled."""
        return self.config.reader_timeout

    def share_for_fork(self, namespace: str) -> Share:
        """Return what a fork has of the pool."""
        return Share(self, namespace)

    def count_open(self, change: int) -> None:
        """Count sessions that are opened and closed."""
        with self._lock:
            self._n_open += change

    def check_open(self) -> None:
        """Raise `SessionClosedError` if no new call may begin."""
        if self._draining:
            raise SessionClosedError("this pool is closed; open a new one")
        self._check_not_closed()
        if self._owner is not None:
            self._owner.check()

    def _check_not_closed(self) -> None:
        if self.closed:
            raise SessionClosedError("this pool is closed; open a new one")

    # -- sessions ------------------------------------------------------------------------------

    @lists_fields("SessionOptions")
    def open_session(
        self, *, namespace: str = "", **options: Unpack[SessionOptionFields]
    ) -> CoreSession:
        """Return a session of this pool; never waits.

        Prefixes are shared only within ``namespace``. ``options`` are ``profile_id``,
        ``prompt_format``, ``add_bos`` and ``overflow``, as in `Model.new_session`.
        """
        checks.check_text("namespace", namespace)
        built = checks.build(SessionOptions, None, options)
        self.check_open()
        share = Share(self, namespace)
        try:
            return CoreSession(
                self.model, share, seq_id=0, new_sampler=self._new_sampler, options=built
            )
        except BaseException:
            share.give_back(0)
            raise

    # -- texts ---------------------------------------------------------------------------------

    def embed(
        self, texts: Sequence[str], *, pooling: Pooling | None = None, normalize: bool = True
    ) -> FloatArray:
        """Return one vector for each of ``texts``: float32 [n_texts, n_embd].

        Arguments and errors as in `infercore.embed`. Fields of the pool's context apply (adapters,
        precision, ...), except those that the texts decide; where an encoder's pool was given
        ``n_ctx``, longer texts are refused. Concurrent callers share engine calls.
        """
        self.check_open()
        if pooling is not None:
            checks.check_text("pooling", pooling)
        check_bool("normalize", normalize)
        listed = tuple(checks.items("texts", texts, "a sequence of texts"))
        vectors = self._embedder.vectors(listed, pooling)
        ranks = pooling == RANK or (
            pooling is None and RANK in self.model.capabilities.pooling
        )  # what ranks does so by itself
        return unit(vectors) if normalize and not ranks else vectors

    async def aembed(
        self, texts: Sequence[str], *, pooling: Pooling | None = None, normalize: bool = True
    ) -> FloatArray:
        """See `embed`."""
        return await asyncio.to_thread(self.embed, texts, pooling=pooling, normalize=normalize)

    def rerank(
        self, query: str, documents: Sequence[str], *, top_n: int | None = None
    ) -> list[tuple[int, float]]:
        """Return the index and score of each of ``documents``, best first.

        Arguments and errors as in `infercore.rerank`. Concurrent callers share engine calls.
        """
        self.check_open()
        pairs = pairs_of(query, documents, top_n)
        check_ranks(self.model)
        return best_first(self._embedder.vectors(pairs, RANK), top_n)

    async def arerank(
        self, query: str, documents: Sequence[str], *, top_n: int | None = None
    ) -> list[tuple[int, float]]:
        """See `rerank`."""
        return await asyncio.to_thread(self.rerank, query, documents, top_n=top_n)

    def flush_cache(self, namespace: str | None = None) -> None:
        """Forget what is kept of closed sessions and of sequences that lost their cells.

        In all namespaces, or in one.
        """
        if namespace is not None:
            checks.check_text("namespace", namespace)
        self._check_not_closed()
        if self._store is not None:
            self._store.flush(namespace)
        if self._owner is not None:
            self._owner.scheduler.flush(namespace)

    @lists_fields("SessionOptions")
    def aopen_session(
        self, *, namespace: str = "", **options: Unpack[SessionOptionFields]
    ) -> Opening[AsyncSession]:
        """Return an `AsyncSession` of this pool, with ``await`` or ``async with``.

        Options are those of `open_session`.
        """
        work = partial(self.open_session, namespace=namespace, **options)
        return Opening(work, AsyncSession)

    # -- ends ----------------------------------------------------------------------------------

    def drain(self, timeout: float | None = None) -> bool:
        """Let running calls finish, and no new one begin.

        Calls still running after ``timeout`` seconds are cancelled, and False is returned; texts
        that are being embedded by then are not broken off.
        """
        checks.check_wait("timeout", timeout)
        self._draining = True
        until = None if timeout is None else time.perf_counter() + timeout
        while self._n_busy():
            if until is not None and time.perf_counter() > until:
                self._embedder.refuse()
                if self._owner is not None:
                    for unread in self._owner.scheduler.unread.valuerefs():
                        if (stream := unread()) is not None:
                            stream.cancel()
                    self._owner.ask(self._owner.scheduler.endings.cancel_all)
                return False
            time.sleep(0.002)
        return True

    def _n_busy(self) -> int:
        n_calls = 0 if self._owner is None else self._owner.scheduler.n_unfinished
        return n_calls + self._embedder.n_unfinished

    def close(self) -> None:
        """End everything; idempotent. Running calls are cancelled."""
        self._draining = True
        self._embedder.close()
        if self._owner is not None:
            self._owner.stop()
        self._finalizer()

    async def adrain(self, timeout: float | None = None) -> bool:
        """See `drain`."""
        return await asyncio.to_thread(self.drain, timeout)

    async def aclose(self) -> None:
        """See `close`."""
        await asyncio.to_thread(self.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _end(owner: Owner | None, model: SessionModel | None) -> None:
    """What becomes of a pool that was dropped; of its model, where it owns that."""
    if owner is not None:
        owner.stop(wait=False)
    if model is not None:
        model.close()


def _refuse_times_of_a_child(config: PoolConfig, backend: str) -> None:
    """Raise `UnsupportedFeatureError` for limits that only a child could be held to."""
    for field in attrs.fields(type(config)):
        is_limit = field.name in ("step_timeout", "load_timeout")
        if is_limit and getattr(config, field.name) != field.default:
            raise UnsupportedFeatureError(
                feature=field.name,
                backend=backend,
                hint="an engine in this process cannot be ended; leave it out, or give timeout= to "
                "calls",
            )


def _check_invariant(
    model: SessionModel, wanted: ContextConfig, config: PoolConfig, n_ctx: int
) -> None:
    """Raise `UnsupportedFeatureError` unless neighbours leave a sequence the bits it has alone."""
    with with_shared_context(wanted, config, n_ctx, model.context_of) as context:
        if context.n_seq_max == 1:
            return
        prompt, other = _probe_tokens(model, 24), _probe_tokens(model, 17, first=5)
        rows = []
        for seq_id, neighbours in ((0, ()), (1, (0, 2)), (0, (1, 2))):
            context.clear()
            for neighbour in neighbours:
                if neighbour < context.n_seq_max:
                    context.decode(other, seq_id=neighbour)
            context.decode(prompt[:16], seq_id=seq_id)
            for neighbour in neighbours:
                if neighbour < context.n_seq_max:
                    context.decode_one(other[0], seq_id=neighbour)
            context.decode(prompt[16:-1], seq_id=seq_id)
            found = [np.array(context.logits(-1))]
            context.decode_one(prompt[-1], seq_id=seq_id)
            rows.append([*found, np.array(context.logits(-1))])
    for row in rows[1:]:
        if not all(np.array_equal(a, b) for a, b in zip(row, rows[0], strict=True)):
            raise UnsupportedFeatureError(
                feature="batch_invariant",
                backend=model.backend,
                hint="with these options a sequence has other bits beside others than alone",
            )


def _probe_tokens(model: SessionModel, n: int, first: int = 0) -> list[int]:
    """Return ``n`` tokens that are no control tokens."""
    tokenizer = model.tokenizer
    plain = (t for t in range(tokenizer.n_vocab) if not tokenizer.is_control(t))
    return list(islice(cycle(list(islice(plain, first, first + 64))), n))


def _store_of(config: PoolConfig, kinds: Capabilities) -> Store | None:
    if not kinds.sequence_state or not (config.cache_bytes or config.cache_dir):
        return None
    if config.batch_invariant:  # what others evaluated may have other bits: each keeps its own
        return None
    return Store(
        n_bytes=config.cache_bytes,
        folder=config.cache_dir,
        folder_bytes=config.cache_dir_bytes,
        can_cut=kinds.kv_remove in ("any", "suffix"),
    )
