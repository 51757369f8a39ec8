"""``/v1/completions``: text that goes on."""

from __future__ import annotations

import asyncio
import codecs
import time
import uuid
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from infercore.errors import InvalidInputError
from infercore.serve.answering import (
    FINISHED,
    Asked,
    answers,
    n_answers,
    sampling_fields,
    usage_of,
)
from infercore.serve.responding import DONE, event
from infercore.serve.wire import check_settled
from infercore.session.asynchronous import completion

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from infercore.serve.config import ServeConfig
    from infercore.serve.metrics import Metrics
    from infercore.serve.models import Served
    from infercore.serve.wire import CompletionRequest
    from infercore.session.asynchronous import AsyncSession
    from infercore.values.session import TokenLogprob

MAX_LOGPROBS = 5
MAX_PROMPTS = 128
DEFAULT_TOKENS = 16
"""Tokens of an answer where the request names no number, as the protocol has it."""


def prompts_of(request: CompletionRequest) -> list[Any]:
    """Return the prompts: texts, or lists of token ids."""
    prompt: Any = request.prompt
    if isinstance(prompt, str):
        return [prompt]
    kinds = {type(part) for part in prompt}
    if len(prompt) > MAX_PROMPTS and kinds != {int}:
        raise InvalidInputError(
            f"{len(prompt)} prompts are too many",
            field="prompt",
            value=len(prompt),
            allowed=f"at most {MAX_PROMPTS}",
        )
    if len(kinds) != 1:
        raise InvalidInputError(
            "the prompt is empty, or mixes texts and token ids",
            field="prompt",
            value=prompt,
            allowed="a text, texts, token ids, or lists of those",
        )
    return [prompt] if kinds == {int} else list(prompt)


def asked_of(
    request: CompletionRequest, prompt: Any, served: Served, namespace: str, config: ServeConfig
) -> Asked:
    """Return what is asked for one of the prompts. Raises `InvalidInputError`."""
    check_settled(request)
    n = n_answers(request)
    if request.best_of not in (None, n):
        raise InvalidInputError(
            f"best_of is not supported here; leave it out, or send {n}, as many as are answered",
            field="best_of",
            value=request.best_of,
            allowed=f"null or {n}",
        )
    n_tokens = DEFAULT_TOKENS if request.max_tokens is None else request.max_tokens
    fields = sampling_fields(request, config, n_tokens)
    if prompt == []:
        raise InvalidInputError(
            "a prompt has no token", field="prompt", value=prompt, allowed="token ids"
        )
    if request.logprobs is not None:
        if not 0 <= request.logprobs <= MAX_LOGPROBS:
            raise InvalidInputError(
                f"logprobs={request.logprobs} is not allowed; send 0 to {MAX_LOGPROBS}",
                field="logprobs",
                value=request.logprobs,
                allowed=f"0 to {MAX_LOGPROBS}",
            )
        if request.echo:  # the protocol's lists would begin with the prompt's
            raise InvalidInputError(
                "probabilities of a prompt are not reported here; leave out echo, or logprobs",
                field="echo",
                value=True,
                allowed="false beside logprobs",
            )
        fields["logprobs"] = request.logprobs

    def begin(session: AsyncSession, decode: dict[str, Any]) -> Any:
        return completion(session, prompt, **decode)

    return Asked(
        served=served,
        namespace=namespace,
        history=("completion", prompt if isinstance(prompt, str) else repr(prompt)),
        begin=begin,
        fields=fields,
        n=n,
        timeout=config.request_timeout,
        prompt=prompt,
    )


class _Logprobs:
    """The parallel lists in which this route reports probabilities.

    An offset is a place in the text sent: a token that goes on with a character is where that
    begins, and a control token, which writes nothing, where the next one is.
    """

    def __init__(self, served: Served) -> None:
        self._served = served
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def rows(self, found: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
        if found is None:
            return None
        return {
            "tokens": [self._text(each.token) for each in found],
            "token_logprobs": [each.logprob for each in found],
            "top_logprobs": [self._top(each) for each in found],
            "text_offset": [self._place(each.token) for each in found],
        }

    def _top(self, found: TokenLogprob) -> dict[str, float]:
        """Return the likeliest by their texts, the chosen one among them."""
        top: dict[str, float] = {}
        for token, logprob in found.top:
            top.setdefault(self._text(token), logprob)  # the likeliest of one text
        return {**top, self._text(found.token): found.logprob}

    def _place(self, token: int) -> int:
        """Return where ``token`` is in the text, and count what it writes."""
        place = self._offset
        if token not in self._served.control:
            self._offset += len(self._utf8.decode(self._served.token_bytes[token]))
        return place

    def _text(self, token: int) -> str:
        """Return a token's text; of one that is not whole characters, its bytes by number."""
        data = self._served.token_bytes[token]
        try:
            return data.decode()
        except UnicodeDecodeError:
            return f"bytes:{repr(data)[2:-1]}"


def _head(model: str) -> dict[str, Any]:
    return {
        "id": f"cmpl-{uuid.uuid4().hex}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": model,
    }


async def streamed(
    request: CompletionRequest, asked: Sequence[Asked], metrics: Metrics
) -> AsyncGenerator[bytes, None]:
    """Give the answers as events, those of all prompts at the same time."""
    head = _head(request.model)
    wants_usage = request.stream_options is not None and request.stream_options.include_usage
    if wants_usage:
        head["usage"] = None
    usages: list[Any] = []
    async with aclosing(_choices(request, asked, metrics, usages)) as choices:
        async for choice in choices:
            yield event({**head, "choices": [choice]})
    if wants_usage:
        yield event({**head, "choices": [], "usage": _sum(usages)})
    yield DONE


async def whole(
    request: CompletionRequest, asked: Sequence[Asked], metrics: Metrics
) -> dict[str, Any]:
    """Return the answers as one document."""
    usages: list[Any] = []
    rows: dict[int, dict[str, Any]] = {}
    async with aclosing(_choices(request, asked, metrics, usages)) as choices:
        async for choice in choices:
            row = rows.setdefault(choice["index"], choice)
            if row is not choice:
                row["text"] += choice["text"]
                row["finish_reason"] = choice["finish_reason"]
                if choice["logprobs"] is not None:
                    for key, values in choice["logprobs"].items():
                        row["logprobs"] = row["logprobs"] or {}
                        row["logprobs"].setdefault(key, []).extend(values)
    return {
        **_head(request.model),
        "choices": [rows[index] for index in sorted(rows)],
        "usage": _sum(usages),
    }


async def _choices(
    request: CompletionRequest, asked: Sequence[Asked], metrics: Metrics, usages: list[Any]
) -> AsyncGenerator[dict[str, Any], None]:
    """Give pieces of all choices, whose prompts run at the same time; ``usages`` by prompt."""
    usages += [[] for _ in asked]
    logprobs: dict[int, _Logprobs] = {}
    async with aclosing(answers(asked, metrics)) as chunks:
        async for place, chunk in chunks:
            one = asked[place // asked[0].n]
            if chunk.usage is not None:
                usages[place // one.n].append(chunk.usage)
            text = chunk.text
            if place not in logprobs:
                logprobs[place] = _Logprobs(one.served)
                if request.echo:
                    text = await _echo(one) + text
            reason = None if chunk.finish_reason is None else FINISHED[chunk.finish_reason]
            yield {
                "index": place,
                "text": text,
                "logprobs": logprobs[place].rows(chunk.logprobs),
                "finish_reason": reason,
            }


async def _echo(asked: Asked) -> str:
    prompt = asked.prompt
    if isinstance(prompt, str):
        return prompt
    async with asked.served.used() as pool:
        text: str = await asyncio.to_thread(pool.tokenizer.decode, prompt)
        return text


def _sum(usages: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """Return the usage of all prompts together."""
    rows = [usage_of(of_prompt) for of_prompt in usages]
    total = {
        key: sum(row[key] for row in rows)
        for key in ("prompt_tokens", "completion_tokens", "total_tokens")
    }
    cached = sum(row["prompt_tokens_details"]["cached_tokens"] for row in rows)
    return {**total, "prompt_tokens_details": {"cached_tokens": cached}}
