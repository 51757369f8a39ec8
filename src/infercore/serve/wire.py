"""Requests of the protocol as they come over the wire, read strictly by msgspec.

A field that is not listed here is refused by its name. Fields that the server does not act on are
listed with the values that mean what it does anyway (`SETTLED`).
Source: the OpenAI API reference (chat completions, completions, embeddings, responses).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import msgspec

from infercore.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterable

Json = dict[str, Any]
MAX_DEPTH = 180
"""How deep a field may be nested: what goes to an isolated engine has a limit of its own, 200."""


class Request(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What all requests have."""

    model: str

    @property
    def n_places(self) -> int:
        """How many answers it takes, as a limit of one key counts them."""
        return 1

    @property
    def names(self) -> dict[str, str]:
        """What this route calls the fields that errors name."""
        return {"session": "model", "rerank": "model"}


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Options of a stream."""

    include_usage: bool = False
    include_obfuscation: bool = False


class Sampled(Request, kw_only=True):
    """What requests have that generate text; the last block is infercore's own."""

    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None

    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    top_n_sigma: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    dynatemp_range: float | None = None
    dynatemp_exponent: float | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    adaptive_p_target: float | None = None
    adaptive_p_decay: float | None = None
    repeat_penalty: float | None = None
    penalty_last_n: int | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    min_keep: int | None = None
    no_repeat_ngram_size: int | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    include_stop: bool | None = None
    grammar: str | None = None
    regex: str | None = None

    @property
    def n_places(self) -> int:
        """How many answers it takes."""
        return max(1, self.n or 1)

    @property
    def names(self) -> dict[str, str]:
        """What this route calls the fields that errors name."""
        form = "grammar" if self.grammar is not None else "response_format"
        return {**super().names, "response_format": form if self.regex is None else "regex"}


OF_MESSAGES = ("role", "content", "tool_calls", "tool_call_id", "id", "arguments")
"""Fields inside messages that errors name."""
_FREE = (None, {"type": "text"})
"""Forms of an answer that leave it as it comes."""


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """One message of a chat; clients send back what they got, so that comes empty or null too."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Json] | None = None
    name: str | None = None
    tool_calls: list[Json] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    annotations: list[Json] | None = None
    audio: Json | None = None
    function_call: Json | None = None


class ChatRequest(Sampled, kw_only=True):
    """``POST /v1/chat/completions``."""

    messages: list[ChatMessage]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    tools: list[Json] | None = None
    tool_choice: str | Json | None = None
    response_format: Json | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    reasoning_effort: str | None = None
    parallel_tool_calls: bool | None = None
    store: bool | None = None
    metadata: Json | None = None
    service_tier: str | None = None
    modalities: list[str] | None = None
    verbosity: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    audio: Any = None
    function_call: Any = None
    functions: Any = None
    moderation: Any = None
    prediction: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: str | None = None
    web_search_options: Any = None

    chat_template_kwargs: Json | None = None
    truncation: str | None = None

    @property
    def names(self) -> dict[str, str]:
        """What this route calls the fields that errors name."""
        names = {**super().names, **dict.fromkeys(OF_MESSAGES, "messages")}
        names["template_variables"] = "chat_template_kwargs"
        if self.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        if self.response_format in _FREE and self.grammar is self.regex is None:
            names["response_format"] = "tools"  # whose schemas are the only forms of an answer
        return names


class CompletionRequest(Sampled, kw_only=True):
    """``POST /v1/completions``."""

    prompt: str | list[str | int | list[int]]
    max_tokens: int | None = None
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None

    @property
    def n_places(self) -> int:
        """How many answers it takes."""
        is_one = isinstance(self.prompt, str) or all(isinstance(i, int) for i in self.prompt)
        return max(1, self.n or 1) * (1 if is_one else len(self.prompt))

    @property
    def names(self) -> dict[str, str]:
        """What this route calls the fields that errors name."""
        return {**super().names, "messages": "prompt", "prefix": "prompt", "tokens": "prompt"}


class EmbeddingsRequest(Request, kw_only=True):
    """``POST /v1/embeddings``. Token ids are refused by name: see `vectors`."""

    input: str | list[str | int | list[int]]
    encoding_format: str | None = None
    dimensions: int | None = None
    user: str | None = None

    @property
    def names(self) -> dict[str, str]:
        """What this route calls the fields that errors name."""
        return {**super().names, "texts": "input"}


class RerankRequest(Request, kw_only=True):
    """``POST /v1/rerank``, as the servers of Jina and Cohere have it."""

    query: str
    documents: list[str | Json]
    top_n: int | None = None
    return_documents: bool | None = None

    @property
    def names(self) -> dict[str, str]:
        """What this route calls the fields that errors name."""
        return {**super().names, "texts": "documents"}


class ResponsesRequest(Request, kw_only=True):
    """``POST /v1/responses``."""

    input: str | list[Json]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: list[Json] | None = None
    tool_choice: str | Json | None = None
    text: Json | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    parallel_tool_calls: bool | None = None
    metadata: Json | None = None
    truncation: str | None = None
    service_tier: str | None = None
    background: bool | None = None
    include: list[str] | None = None
    reasoning: Json | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    access_programs: Any = None
    background_options: Any = None
    context_management: Any = None
    conversation: Any = None
    image: Any = None
    max_tool_calls: int | None = None
    moderation: Any = None
    prompt: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: str | None = None
    top_logprobs: int | None = None

    @property
    def names(self) -> dict[str, str]:
        """What this route calls the fields that errors name."""
        is_free = (self.text or {}).get("format") in _FREE
        return {
            **super().names,
            **dict.fromkeys(OF_MESSAGES, "input"),
            "messages": "input",
            "messages.content": "input.content",
            "response_format": "tools" if is_free else "text.format",
            "reasoning_effort": "reasoning.effort",
            "max_tokens": "max_output_tokens",
        }


class TokenizeRequest(Request, kw_only=True):
    """``POST /tokenize``."""

    prompt: str
    add_special: bool = True


class DetokenizeRequest(Request, kw_only=True):
    """``POST /detokenize``."""

    tokens: list[int]

    @property
    def names(self) -> dict[str, str]:
        """What this route calls the fields that errors name."""
        return {**super().names, "token": "tokens", "text": "tokens"}


SETTLED: dict[str, tuple[Any, ...]] = {
    "store": (False,),
    "service_tier": ("auto", "default"),
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "metadata": ({},),
    "background": (False,),
    "previous_response_id": (),
    "include": ([],),
    "suffix": ("",),
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "moderation": (),
    "prediction": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": ("in_memory",),
    "web_search_options": (),
    "access_programs": (),
    "background_options": (),
    "context_management": ([],),
    "conversation": (),
    "image": (),
    "max_tool_calls": (),
}
"""Fields that the server does not act on, and the values beside null that mean what it does."""

_SETTLED_OF: dict[type[Request], dict[str, tuple[Any, ...]]] = {
    ResponsesRequest: {"prompt": (), "top_logprobs": (0,)},
}
"""Those that another route acts on."""


def check_depth(request: Request) -> None:
    """Raise `InvalidInputError` where a field is nested deeper than may reach an engine."""
    for name in request.__struct_fields__:
        value = getattr(request, name)
        if _is_deeper(value, MAX_DEPTH):
            raise InvalidInputError(
                f"{name} is nested more than {MAX_DEPTH} deep; send less",
                field=name,
                value=type(value).__name__,
                allowed=f"at most {MAX_DEPTH} objects and lists within one another",
            )


def _is_deeper(value: Any, n: int) -> bool:
    level = [value]
    for _ in range(n):
        level = [
            item
            for outer in level
            for item in _within(outer)
            if isinstance(item, (dict, list, msgspec.Struct))
        ]
        if not level:
            return False
    return True


def _within(value: Any) -> Iterable[Any]:
    if isinstance(value, msgspec.Struct):
        return (getattr(value, name) for name in value.__struct_fields__)
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _check_stream_options(request: Any, options: StreamOptions) -> None:
    if not request.stream:
        raise InvalidInputError(
            "stream_options are those of a stream; leave them out, or send stream=true",
            field="stream_options",
            value=msgspec.to_builtins(options),
            allowed="null without stream",
        )
    if options.include_usage and isinstance(request, ResponsesRequest):
        raise InvalidInputError(
            "stream_options.include_usage is none of this route, which always sends the usage",
            field="stream_options.include_usage",
            value=True,
            allowed="null",
        )
    if options.include_obfuscation:
        raise InvalidInputError(
            "stream_options.include_obfuscation is not supported here; leave it out, or send false",
            field="stream_options.include_obfuscation",
            value=True,
            allowed="false",
        )


def check_known(field: str, given: dict[str, Any], names: tuple[str, ...]) -> None:
    """Raise `InvalidInputError` where the object ``field`` has others than ``names``."""
    for name, value in given.items():
        if name not in names:
            raise InvalidInputError(
                f"{field} has no field {name!r}",
                field=f"{field}.{name}",
                value=value,
                allowed=", ".join(names),
            )


def check_settled(request: Request) -> None:
    """Raise `InvalidInputError` for a field with a value that the server would have to act on."""
    options = getattr(request, "stream_options", None)
    if options is not None:
        _check_stream_options(request, options)
    for name, allowed in {**SETTLED, **_SETTLED_OF.get(type(request), {})}.items():
        value = getattr(request, name, None)
        if value is None or value in allowed:
            continue
        shown = " or ".join(str(msgspec.json.encode(a), "utf-8") for a in allowed) or "null"
        raise InvalidInputError(
            f"{name} is not supported here; leave it out, or send {shown}",
            field=name,
            value=value,
            allowed=shown,
        )
