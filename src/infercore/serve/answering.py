"""From a request that generates to chunks: a session, its options, and several answers at once."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any, Literal

import attrs

from infercore.errors import InvalidInputError, SessionFatalError
from infercore.serve.errors import ApiError
from infercore.serve.wire import Sampled
from infercore.values.config import MAX_SEED, SamplingConfig

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence

    from infercore.serve.config import ServeConfig
    from infercore.serve.metrics import Metrics
    from infercore.serve.models import History, Served
    from infercore.session.asynchronous import AsyncDecodeStream, AsyncSession
    from infercore.session.pool import SessionPool
    from infercore.values.session import StreamChunk, ToolCall

MAX_ANSWERS = 128
MAX_MESSAGES = 2048
_MOST_DIGITS = 10  # of a token id
_MOST_BIAS = 1e6
_LEAST_TIME = 1e-3
_OF_DECODE = ("min_tokens", "include_stop")
_OF_OTHER_FORM = ("seed", "logit_bias")
FINISHED = {
    "eos": "stop",
    "stop": "stop",
    "cancelled": "length",  # by the server: a client that cancels reads no reason
    "length": "length",
    "context": "length",
    "timeout": "length",
    "tool_calls": "tool_calls",
}
"""What the protocol calls our finish reasons."""

_SAME_NAME = tuple(
    name
    for name in (*(field.name for field in attrs.fields(SamplingConfig)), *_OF_DECODE)
    if name in Sampled.__struct_fields__ and name not in _OF_OTHER_FORM
)
"""Fields of a request that a decode has by the same name and in the same form."""


@attrs.frozen(kw_only=True)
class Asked:
    """One request that generates: by whom, of which model, and how each answer is begun."""

    served: Served
    namespace: str
    history: History
    begin: Callable[[AsyncSession, dict[str, Any]], AsyncDecodeStream]
    fields: dict[str, Any]
    n: int
    timeout: float | None
    overflow: Literal["error", "truncate"] = "error"
    one_call: bool = False
    prompt: Any = None
    began: float = attrs.field(factory=time.perf_counter)

    @property
    def owner(self) -> tuple[str, str]:
        """Whose warm sessions may serve it: of the same caller, opened in the same way."""
        return self.namespace, self.overflow


def sampling_fields(request: Sampled, config: ServeConfig, n_tokens: int | None) -> dict[str, Any]:
    """Return what ``request`` says of sampling, length and form, as fields of `DecodeConfig`.

    What it leaves open of sampling is what the model's files recommend.
    """
    fields: dict[str, Any] = {"sampling": "model"}
    fields |= {name: value for name in _SAME_NAME if (value := getattr(request, name)) is not None}
    if request.seed is not None:  # the protocol's are signed and of 64 bits
        fields["seed"] = request.seed % (MAX_SEED + 1)
    limits = [limit for limit in (n_tokens, config.max_tokens) if limit is not None]
    if limits:
        fields["max_tokens"] = min(limits)
    if request.stop is not None:
        fields["stop"] = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)
    if request.logit_bias:
        fields["logit_bias"] = _bias(request.logit_bias)
    forms = {"gbnf": ("grammar", request.grammar), "regex": ("pattern", request.regex)}
    given = {kind: form for kind, form in forms.items() if form[1] is not None}
    if len(given) > 1:
        raise InvalidInputError(
            "give grammar or regex, not both", field="regex", value=request.regex, allowed="null"
        )
    for kind, (key, text) in given.items():
        fields["response_format"] = {"type": kind, key: text}
    return fields


def _bias(bias: dict[str, float]) -> dict[int, float]:
    if not all(
        key.isascii() and key.isdigit() and len(key) <= _MOST_DIGITS and abs(value) <= _MOST_BIAS
        for key, value in bias.items()
    ):
        raise InvalidInputError(
            "logit_bias maps token ids to numbers",
            field="logit_bias",
            value=bias,
            allowed="ids as strings of digits, numbers from -1e6 to 1e6",
        )
    return {int(key): value for key, value in bias.items()}


def n_answers(request: Sampled) -> int:
    """Return how many answers are wanted. Raises `InvalidInputError`."""
    n = 1 if request.n is None else request.n
    if not 1 <= n <= MAX_ANSWERS:
        raise InvalidInputError(
            f"n={n} is not allowed; send 1 to {MAX_ANSWERS}",
            field="n",
            value=n,
            allowed=f"1 to {MAX_ANSWERS}",
        )
    return n


def overflow_of(truncation: str | None) -> Literal["error", "truncate"]:
    """Return how a session treats a conversation that no longer fits.

    "auto" leaves out whole turns, oldest first, as the protocol's responses have it.
    Raises `InvalidInputError`.
    """
    if truncation not in (None, "disabled", "auto"):
        raise InvalidInputError(
            "truncation is 'auto' or 'disabled'",
            field="truncation",
            value=truncation,
            allowed="null, 'disabled' or 'auto'",
        )
    return "truncate" if truncation == "auto" else "error"


def history_of(messages: Sequence[Any]) -> History:
    """Return a conversation as what its next turn begins with.

    Raises `InvalidInputError` for more messages than any window has tokens for.
    """
    if len(messages) > MAX_MESSAGES:
        raise InvalidInputError(
            f"{len(messages)} messages are too many",
            field="messages",
            value=len(messages),
            allowed=f"at most {MAX_MESSAGES}",
        )
    return tuple(json.dumps(message, sort_keys=True, default=str) for message in messages)


@asynccontextmanager
async def _session(asked: Asked, *, first: bool) -> AsyncIterator[AsyncSession]:
    """Give a session: the one that holds the conversation's earlier turns, or a new one."""
    served = asked.served
    async with served.used(asked.timeout) as pool:
        session = served.warm.take(asked.owner, asked.history) if first else None
        if session is None or session.closed:
            session = await pool.aopen_session(namespace=asked.namespace, overflow=asked.overflow)
        is_usable = True
        try:
            yield session
        except SessionFatalError:
            is_usable = False
            raise
        finally:  # what a client left in the middle is as warm as what it read to the end
            if first and is_usable and asked.history and served.pool is pool and served.works:
                await served.warm.put(asked.owner, asked.history, session)
            else:
                await session.close()


async def answers(
    asked: Sequence[Asked], metrics: Metrics
) -> AsyncGenerator[tuple[int, StreamChunk], None]:
    """Give the chunks of all answers as they come, each with its answer's place among all.

    Closing this iterator, or cancelling its task, ends what runs within one step.
    """
    if sum(one.n for one in asked) > 1:
        async with asked[0].served.used(asked[0].timeout) as pool:
            _check_room(asked, pool)
    streams = [_answer(one, number, metrics) for one in asked for number in range(one.n)]
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for chunk in only:
                yield 0, chunk
        return
    async with aclosing(_together(streams)) as together:
        async for item in together:
            yield item


def _check_room(asked: Sequence[Asked], pool: SessionPool) -> None:
    """Raise an `ApiError` where one request has more answers than the pool ever has room for."""
    n_parallel = pool.effective.get("n_parallel")
    if n_parallel is None:  # it only embeds, which opening a session says
        return
    n_answers, n_most = sum(one.n for one in asked), n_parallel + pool.config.max_waiting
    if n_answers > n_most:
        raise ApiError(
            400,
            f"{n_answers} answers are more than the {n_most} that this model gives, or lets wait, "
            "at the same time; ask for fewer at once",
            param="n" if asked[0].n > 1 else "prompt",
            code="too_many_answers",
        )


async def _together(
    streams: Sequence[AsyncGenerator[StreamChunk, None]],
) -> AsyncGenerator[tuple[int, StreamChunk], None]:
    """Give the chunks of several streams that run at the same time, few ahead of the reader."""
    chunks: asyncio.Queue[Any] = asyncio.Queue(len(streams))

    async def work(place: int, stream: AsyncGenerator[StreamChunk, None]) -> None:
        try:
            async with aclosing(stream) as answer:
                async for chunk in answer:
                    await chunks.put((place, chunk))
        except Exception as error:  # noqa: BLE001  (raised to who reads)
            await chunks.put(error)
        else:
            await chunks.put(None)

    tasks = [asyncio.create_task(work(*item)) for item in enumerate(streams)]
    try:
        n_left = len(streams)
        while n_left:
            item = await chunks.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                n_left -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _answer(asked: Asked, number: int, metrics: Metrics) -> AsyncGenerator[StreamChunk, None]:
    fields = dict(asked.fields)
    if number and fields.get("seed") is not None:
        fields["seed"] = (fields["seed"] + number) % (MAX_SEED + 1)
    name = asked.served.name
    async with _session(asked, first=number == 0) as session:
        if asked.timeout is not None:  # loading took its part
            left = asked.began + asked.timeout - time.perf_counter()
            fields["timeout"] = max(left, _LEAST_TIME)
        stream = asked.begin(session, fields)
        last: float | None = None
        n_shown, is_counted = 0, False
        try:
            async for made in _one_call(session, stream) if asked.one_call else stream:
                chunk, now = made, time.perf_counter()
                if last is None:
                    metrics.first_token.labels(name).observe(now - asked.began)
                else:
                    metrics.between.labels(name).observe(now - last)
                last = now
                n_shown += len(chunk.tokens)
                if chunk.usage is not None:
                    metrics.count_usage(name, chunk.usage)
                    is_counted = True
                if chunk.logprobs:
                    await asked.served.learn(chunk.logprobs)
                if number and chunk.tool_calls:
                    calls = tuple(_call_of(number, call) for call in chunk.tool_calls)
                    chunk = attrs.evolve(chunk, tool_calls=calls)
                yield chunk
        finally:
            try:
                await stream.aclose()
            finally:
                if not is_counted:  # cut off: by its client, or by what failed
                    metrics.count_tokens(name, *stream.counts, n_shown)


async def _one_call(
    session: AsyncSession, stream: AsyncDecodeStream
) -> AsyncGenerator[StreamChunk, None]:
    """Give the chunks of an answer that ends with its first call of a tool."""
    has_called = False
    async for made in stream:
        chunk = made
        if has_called:  # what came before the end was heard
            reason = chunk.finish_reason and "tool_calls"
            chunk = attrs.evolve(
                chunk, text="", reasoning="", tool_calls=(), logprobs=None, finish_reason=reason
            )
        elif chunk.tool_calls:
            has_called = True
            chunk = attrs.evolve(chunk, tool_calls=chunk.tool_calls[:1])
            if chunk.finish_reason is None:
                session.cancel()
        yield chunk


def _call_of(number: int, call: ToolCall) -> ToolCall:
    """Return a call of the answer ``number``: the same chat gives each answer the same ids.

    They stay nine letters and digits, which is what the strictest template takes.
    """
    digest = hashlib.sha256(f"{number}\0{call.id}".encode()).hexdigest()
    return attrs.evolve(call, id=digest[: len(call.id)])


def thought_tokens(chunk: StreamChunk) -> int:
    """Return how many of a chunk's tokens are of a thought: those of text beside it are not."""
    return len(chunk.tokens) if chunk.reasoning and not chunk.text else 0


def usage_of(usages: Sequence[Any], n_thought: int = 0) -> dict[str, Any]:
    """Return the protocol's usage of all answers; their prompt counts once, as one evaluated it."""
    prompt = max((usage.prompt_tokens for usage in usages), default=0)
    completion = sum(usage.completion_tokens for usage in usages)
    cached = min((usage.cached_tokens for usage in usages), default=0)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": n_thought},
    }
