"""The calls of a context, awaited."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from infercore.session.asynchronous import shared_threads
from infercore.session.turns import Turns
from infercore.values import checks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from typing_extensions import Self

    from infercore.protocols.guarded import SessionContext
    from infercore.protocols.public import Context, Sampler
    from infercore.protocols.spi import FloatArray
    from infercore.values.config import AdapterSpec, ControlVector
    from infercore.values.info import Capabilities, PerfCounters

T = TypeVar("T")


class AsyncContext:
    """A `Context` for asyncio: tokens, positions and logits, with calls that are awaited.

    It has the calls of `Context`, with the same errors and states, and runs them in a thread, one
    after the other. Cancelling the task aborts the call in the engine and waits until it has
    stopped; what was evaluated by then stays resident (`n_resident`), and the context keeps
    working. Rows of logits and embeddings are copies that belong to the caller, not views.
    Properties and `abort` never wait.
    """

    def __init__(self, context: SessionContext) -> None:
        if not hasattr(context, "abort"):
            raise TypeError(
                "infercore.AsyncContext takes a context; to open one, use "
                "await infercore.aopen_context(model)"
            )
        self._context: Any = context
        self._turns = Turns(shared_threads, context.abort, context.release_threads)

    def __repr__(self) -> str:
        return repr(self._context).replace("<", "<Async", 1)

    @property
    def context(self) -> Context:
        """The underlying context; it is busy while one of its calls is awaited."""
        context: Context = self._context
        return context

    # -- facts ---------------------------------------------------------------------------------

    @property
    def n_ctx(self) -> int:
        """See `Context.n_ctx`."""
        value: int = self._context.n_ctx
        return value

    @property
    def n_ctx_seq(self) -> int:
        """See `Context.n_ctx_seq`."""
        value: int = self._context.n_ctx_seq
        return value

    @property
    def n_batch(self) -> int:
        """See `Context.n_batch`."""
        value: int = self._context.n_batch
        return value

    @property
    def n_ubatch(self) -> int:
        """See `Context.n_ubatch`."""
        value: int = self._context.n_ubatch
        return value

    @property
    def n_seq_max(self) -> int:
        """See `Context.n_seq_max`."""
        value: int = self._context.n_seq_max
        return value

    @property
    def n_threads(self) -> int:
        """See `Context.n_threads`."""
        value: int = self._context.n_threads
        return value

    @property
    def n_threads_batch(self) -> int:
        """See `Context.n_threads_batch`."""
        value: int = self._context.n_threads_batch
        return value

    @property
    def n_outputs(self) -> int:
        """See `Context.n_outputs`."""
        value: int = self._context.n_outputs
        return value

    @property
    def output_serial(self) -> int:
        """See `Context.output_serial`."""
        value: int = self._context.output_serial
        return value

    @property
    def pooling_type(self) -> str:
        """See `Context.pooling_type`."""
        value: str = self._context.pooling_type
        return value

    @property
    def tolerance(self) -> float:
        """See `Context.tolerance`."""
        value: float = self._context.tolerance
        return value

    @property
    def capabilities(self) -> Capabilities:
        """See `Context.capabilities`."""
        value: Capabilities = self._context.capabilities
        return value

    @property
    def effective(self) -> Mapping[str, Any]:
        """See `Context.effective`."""
        value: Mapping[str, Any] = self._context.effective
        return value

    @property
    def attempts(self) -> Sequence[Any]:
        """See `Context.attempts`."""
        value: Sequence[Any] = self._context.attempts
        return value

    @property
    def native_handle(self) -> Any:
        """See ``Context.native_handle``."""
        return self._context.native_handle

    @property
    def closed(self) -> bool:
        """See `Context.closed`."""
        value: bool = self._context.closed
        return value

    def abort(self) -> None:
        """See `Context.abort`; may be called from any thread or task."""
        self._context.abort()

    # -- calls ---------------------------------------------------------------------------------

    async def _run(self, work: Callable[[], T]) -> T:
        if self.closed:
            return work()  # raises what a closed context raises
        return await self._turns.run(work)

    async def _copied(self, work: Callable[[], FloatArray]) -> FloatArray:
        return await self._run(lambda: work().copy())

    async def decode(
        self,
        tokens: Sequence[int],
        *,
        seq_id: int = 0,
        logits: Literal["last", "all", "none"] = "last",
    ) -> None:
        """See `Context.decode`."""
        await self._run(partial(self._context.decode, tokens, seq_id=seq_id, logits=logits))

    async def decode_one(self, token: int, *, seq_id: int = 0) -> None:
        """See `Context.decode_one`."""
        await self._run(partial(self._context.decode_one, token, seq_id=seq_id))

    async def eval(self, tokens: Sequence[int], n_past: int, *, seq_id: int = 0) -> None:
        """See `Context.eval`."""
        await self._run(partial(self._context.eval, tokens, n_past, seq_id=seq_id))

    async def decode_batch(self, entries: Sequence[tuple[int, Sequence[int], bool]]) -> None:
        """See `Context.decode_batch`."""
        await self._run(partial(self._context.decode_batch, entries))

    async def decode_spans(self, spans: Sequence[tuple[int, Sequence[Any], str]]) -> None:
        """See `Context.decode_spans`."""
        await self._run(partial(self._context.decode_spans, spans))

    async def encode(self, tokens: Sequence[int]) -> None:
        """See `Context.encode`."""
        await self._run(partial(self._context.encode, tokens))

    async def sample(self, sampler: Sampler, i: int = -1) -> int:
        """See `Sampler.sample`, which chooses from output row ``i`` of this context."""
        if not callable(sample := getattr(sampler, "sample", None)):
            raise checks.refuse("sampler", sampler, "a sampler of this context's model")
        return await self._run(partial(sample, self._context, i))

    async def logits(self, i: int = -1) -> FloatArray:
        """See `Context.logits`; the array belongs to the caller."""
        return await self._copied(partial(self._context.logits, i))

    async def logits_all(self) -> FloatArray:
        """See `Context.logits_all`; the array belongs to the caller."""
        return await self._copied(self._context.logits_all)

    async def embedding(self, seq_id: int = 0) -> FloatArray:
        """See `Context.embedding`; the array belongs to the caller."""
        return await self._copied(partial(self._context.embedding, seq_id))

    async def embeddings(self) -> FloatArray:
        """See `Context.embeddings`; the array belongs to the caller."""
        return await self._copied(self._context.embeddings)

    async def n_past(self, seq_id: int = 0) -> int:
        """See `Context.n_past`."""
        value: int = await self._run(partial(self._context.n_past, seq_id))
        return value

    async def n_resident(self, seq_id: int = 0) -> int:
        """See `Context.n_resident`."""
        value: int = await self._run(partial(self._context.n_resident, seq_id))
        return value

    async def n_free(self, seq_id: int = 0) -> int:
        """See `Context.n_free`."""
        value: int = await self._run(partial(self._context.n_free, seq_id))
        return value

    async def tokens(self, seq_id: int = 0) -> list[int]:
        """See `Context.tokens`."""
        value: list[int] = await self._run(partial(self._context.tokens, seq_id))
        return value

    async def seq_pos_min(self, seq_id: int = 0) -> int:
        """See `Context.seq_pos_min`."""
        value: int = await self._run(partial(self._context.seq_pos_min, seq_id))
        return value

    async def seq_pos_max(self, seq_id: int = 0) -> int:
        """See `Context.seq_pos_max`."""
        value: int = await self._run(partial(self._context.seq_pos_max, seq_id))
        return value

    async def seq_remove(self, seq_id: int, p0: int = -1, p1: int = -1) -> bool:
        """See `Context.seq_remove`."""
        value: bool = await self._run(partial(self._context.seq_remove, seq_id, p0, p1))
        return value

    async def seq_copy(self, src: int, dst: int, p0: int = -1, p1: int = -1) -> None:
        """See `Context.seq_copy`."""
        await self._run(partial(self._context.seq_copy, src, dst, p0, p1))

    async def seq_keep(self, seq_id: int) -> None:
        """See `Context.seq_keep`."""
        await self._run(partial(self._context.seq_keep, seq_id))

    async def seq_shift(self, seq_id: int, p0: int, p1: int, delta: int) -> None:
        """See `Context.seq_shift`."""
        await self._run(partial(self._context.seq_shift, seq_id, p0, p1, delta))

    async def seq_divide(self, seq_id: int, p0: int, p1: int, d: int) -> None:
        """See `Context.seq_divide`."""
        await self._run(partial(self._context.seq_divide, seq_id, p0, p1, d))

    async def clear(self) -> None:
        """See `Context.clear`."""
        await self._run(self._context.clear)

    async def save_state(self) -> bytes:
        """See `Context.save_state`."""
        value: bytes = await self._run(self._context.save_state)
        return value

    async def load_state(self, data: bytes) -> None:
        """See `Context.load_state`."""
        await self._run(partial(self._context.load_state, data))

    async def save_sequence(self, seq_id: int = 0) -> bytes:
        """See `Context.save_sequence`."""
        value: bytes = await self._run(partial(self._context.save_sequence, seq_id))
        return value

    async def seq_state_size(self, seq_id: int = 0) -> int:
        """See `Context.seq_state_size`."""
        value: int = await self._run(partial(self._context.seq_state_size, seq_id))
        return value

    async def load_sequence(self, seq_id: int, data: bytes) -> None:
        """See `Context.load_sequence`."""
        await self._run(partial(self._context.load_sequence, seq_id, data))

    async def set_threads(self, n: int, n_batch: int | None = None) -> None:
        """See `Context.set_threads`."""
        await self._run(partial(self._context.set_threads, n, n_batch))

    async def set_embeddings(self, on: bool) -> None:  # noqa: FBT001  (the contract's signature)
        """See `Context.set_embeddings`."""
        await self._run(partial(self._context.set_embeddings, on))

    async def set_causal_attention(self, on: bool) -> None:  # noqa: FBT001  (the contract's signature)
        """See `Context.set_causal_attention`."""
        await self._run(partial(self._context.set_causal_attention, on))

    async def set_abort_callback(self, callback: Callable[[], bool] | None) -> None:
        """See `Context.set_abort_callback`."""
        await self._run(partial(self._context.set_abort_callback, callback))

    async def set_adapters(self, adapters: Sequence[AdapterSpec]) -> None:
        """See `Context.set_adapters`."""
        await self._run(partial(self._context.set_adapters, adapters))

    async def set_control_vector(self, directions: ControlVector | None) -> None:
        """See `Context.set_control_vector`."""
        await self._run(partial(self._context.set_control_vector, directions))

    async def warmup(self) -> None:
        """See `Context.warmup`."""
        await self._run(self._context.warmup)

    async def synchronize(self) -> None:
        """See `Context.synchronize`."""
        await self._run(self._context.synchronize)

    async def perf(self) -> PerfCounters:
        """See `Context.perf`."""
        value: PerfCounters = await self._run(self._context.perf)
        return value

    async def reset_perf(self) -> None:
        """See `Context.reset_perf`."""
        await self._run(self._context.reset_perf)

    async def close(self) -> None:
        """Abort the running call and free the memory; idempotent. See `Context.close`."""
        if not self.closed:
            self.abort()
            await self._turns.run(self._context.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
