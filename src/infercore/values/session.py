"""What goes into a session and what it reports."""

from __future__ import annotations

import importlib
import json
import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import attrs

from infercore.errors import InvalidTokenError
from infercore.values import checks
from infercore.values.field_texts import lists_fields
from infercore.values.manifest import ContextManifest
from infercore.values.shown import fields_table, one_line, table

if TYPE_CHECKING:
    from infercore.values.config import SamplingConfig

FinishReason = Literal["eos", "stop", "length", "context", "cancelled", "timeout", "tool_calls"]


def _manifest(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    if value is not None and not isinstance(value, ContextManifest):
        raise checks.refuse(attribute.name, value, "a ContextManifest or None")


def _is_manifest(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    if not isinstance(value, ContextManifest):
        raise checks.refuse(attribute.name, value, "a ContextManifest")


def _is_bytes(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    if not isinstance(value, bytes):
        raise checks.refuse(attribute.name, value, "bytes")


def _token_ids(value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    value = value.tolist() if hasattr(value, "tolist") else value  # NumPy's, without importing it
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes, bytearray, memoryview)):
        raise checks.refuse("tokens", value, "a sequence of token ids, or None")
    return tuple(_token_id(token) for token in value)


def _token_id(token: Any) -> int:
    if not checks.is_integer(token):
        raise InvalidTokenError(
            f"tokens: {checks.shown(token)} is not a token id; give integers",
            field="tokens",
            value=token,
            allowed="token ids",
        )
    return operator.index(token)


def _check_text_or_tokens(given: PrefixInput | SuffixInput) -> None:
    """Raise `InvalidInputError` unless there is a text or tokens, and nothing that only a text has.

    A text has joints and control tokens in it; ids are taken as they are.
    """
    if (given.text is None) == (given.tokens is None):
        raise checks.refuse("text", given.text, "a text, or token ids as tokens; one of the two")
    if given.tokens is not None and not given.parse_special:
        raise checks.refuse("parse_special", given.parse_special, "it with a text only")


def _boundary(given: SuffixInput) -> Literal["joint", "split"]:
    return "joint" if given.tokens is None else "split"


@lists_fields("PrefixInput")
@attrs.frozen(kw_only=True)
class PrefixInput:
    """The stable text, or its token ids, and what the caller states about its identity.

    ``tokens`` are taken as they are: nothing is put in front of them, and text that follows is
    tokenized separately. Their text, wherever one is hashed, is the bytes of the tokens.
    ``parse_special`` turns the text of control tokens into those tokens. ``cache_class`` is the
    caller's own label, which the text's `ManifestSegment` shows. With ``on_mismatch="cold"`` a
    differing identity starts cold and says so in `PrefixStatus.reset_reason`; with "error" it
    raises `ManifestMismatchError`.
    """

    text: str | None = attrs.field(default=None, validator=checks.text(optional=True))
    tokens: tuple[int, ...] | None = attrs.field(default=None, converter=_token_ids)
    manifest: ContextManifest | None = attrs.field(default=None, validator=_manifest)
    parse_special: bool = attrs.field(default=True, validator=checks.boolean(optional=False))
    cache_class: str | None = attrs.field(default=None, validator=checks.text(optional=True))
    on_mismatch: Literal["cold", "error"] = attrs.field(
        default="cold", validator=checks.one_of("cold", "error", optional=False)
    )

    def __attrs_post_init__(self) -> None:
        _check_text_or_tokens(self)


@lists_fields("SuffixInput")
@attrs.frozen(kw_only=True)
class SuffixInput:
    """The volatile text that follows the prefix, or its token ids, which are taken as they are.

    ``mode="replace"`` replaces an earlier suffix and what was generated, "append" adds to the end.
    ``boundary="joint"`` tokenizes prefix and suffix as one text, "split" separately; appended text
    is joined only with a suffix that was itself tokenized jointly, never with what was generated,
    which stays as the model made it. ``tokens`` are always "split", and so is text that follows a
    prefix of token ids. ``cache_class`` as in `PrefixInput`.
    """

    text: str | None = attrs.field(default=None, validator=checks.text(optional=True))
    tokens: tuple[int, ...] | None = attrs.field(default=None, converter=_token_ids)
    manifest: ContextManifest | None = attrs.field(default=None, validator=_manifest)
    mode: Literal["replace", "append"] = attrs.field(
        default="replace", validator=checks.one_of("replace", "append", optional=False)
    )
    boundary: Literal["joint", "split"] = attrs.field(
        default=attrs.Factory(_boundary, takes_self=True),
        validator=checks.one_of("joint", "split", optional=False),
    )
    parse_special: bool = attrs.field(default=True, validator=checks.boolean(optional=False))
    cache_class: str | None = attrs.field(default=None, validator=checks.text(optional=True))

    def __attrs_post_init__(self) -> None:
        _check_text_or_tokens(self)
        if self.tokens is not None and self.boundary == "joint":
            raise checks.refuse("boundary", self.boundary, "'split' with tokens, or leave it out")


@attrs.frozen(kw_only=True)
class PrefixStatus:
    """What `Session.ensure_prefix` reused and evaluated, in tokens.

    ``reused_tokens + prefilled_tokens == prefix_tokens``; ``dropped_tokens`` were removed from the
    engine to make room for the new ones. Of those reused, ``shared_tokens`` were copied from
    another session of the pool and ``restored_tokens`` came back from memory or disk.
    ``resident_tokens`` counts the logical context, ``available_tokens`` what still fits.
    ``stable_byte_hash`` is the hash of the UTF-8 text; for a prefix of token ids, of the bytes of
    its tokens. ``reset_reason`` says why nothing was reused.
    """

    reused_tokens: int
    prefilled_tokens: int
    dropped_tokens: int
    prefix_tokens: int
    suffix_tokens: int
    resident_tokens: int
    available_tokens: int
    n_ctx: int
    stable_byte_hash: str
    stable_token_hash: str
    manifest_digest: str
    reset_reason: str | None = None
    shared_tokens: int = 0
    restored_tokens: int = 0

    def __repr__(self) -> str:
        return one_line(self)


@attrs.frozen(kw_only=True)
class SuffixStatus:
    """What `Session.prefill_suffix` reused and evaluated, in tokens.

    ``suffix_tokens`` is the length of the text after the prefix tokens that were kept; it includes
    tokens that replaced prefix tokens at the seam (``seam_tokens`` counts the prefix tokens that
    gave way). ``reused_tokens + prefilled_tokens`` is the length of what was asked for: the whole
    suffix, but of ids or of a text tokenized apart with ``mode="append"`` those alone, with the
    token that had ended the generation before them. ``reevaluated_tokens`` come before that and
    still had to be evaluated again: their logits were gone, or the engine could not go back to
    them. ``truncated_tokens`` are the ids that ``overflow="truncate"`` left out. Other fields as in
    `PrefixStatus`.
    """

    reused_tokens: int
    prefilled_tokens: int
    dropped_tokens: int
    prefix_tokens: int
    suffix_tokens: int
    resident_tokens: int
    available_tokens: int
    n_ctx: int
    stable_byte_hash: str
    stable_token_hash: str
    manifest_digest: str
    reset_reason: str | None = None
    seam_tokens: int = 0
    reevaluated_tokens: int = 0
    truncated_tokens: tuple[int, ...] = ()
    shared_tokens: int = 0
    restored_tokens: int = 0

    def __repr__(self) -> str:
        return one_line(self)


@attrs.frozen(kw_only=True)
class Usage:
    """Token counts and times of one decode.

    ``prompt_tokens`` were resident at its start; ``cached_tokens`` of them had not been evaluated
    since the previous decode. ``time_to_first_token_ms`` counts from the call of ``decode`` (of
    ``chat``: with its prefill) to the first token, ``tokens_per_second`` the tokens after it. Of
    ``drafted_tokens`` guessed ahead (speculative decoding), ``accepted_tokens`` were right.
    ``waited_ms`` is the time spent waiting for a place in the pool, ``mean_batch`` how many
    sessions shared an engine call on average, and ``reevaluated_tokens`` had to be evaluated again
    because the session had lost their cells to others. ``sampling`` is the config in force, with
    the seed that was used: passing it again draws the same tokens.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    time_to_first_token_ms: float | None
    tokens_per_second: float | None
    seed: int | None
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    waited_ms: float = 0.0
    mean_batch: float = 1.0
    reevaluated_tokens: int = 0
    sampling: SamplingConfig | None = attrs.field(default=None, repr=False)

    def __repr__(self) -> str:
        return one_line(self)

    def _repr_html_(self) -> str:
        return fields_table(self, without=("sampling",))


@attrs.frozen(kw_only=True)
class TokenLogprob:
    """Natural-log probabilities at one step: of the chosen token and of the likeliest ones."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@attrs.frozen(kw_only=True, slots=False)
class StreamChunk:
    """A piece of generated text, and the ids of the tokens that ended in it.

    The last chunk has a ``finish_reason`` ("eos", "stop", "length", "context", "cancelled",
    "timeout"; for a chat also "tool_calls") and ``usage``. The texts of all chunks, joined, are the
    whole text; likewise the ids. ``stopped_by`` is the stop string or the token id that ended the
    text, if one did. If requested, the first chunk's ``prompt_logprobs`` has an entry for each
    token of the prompt except the first. ``shifted_out`` are the ids that ``overflow="shift"``
    dropped from the context since the previous chunk. In a chat ``reasoning`` is a piece of a
    thought, ``tool_calls`` are those completed by now, and the first chunk's ``dropped_messages``
    are the indices of the messages that ``overflow="truncate"`` left out.
    """

    text: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    shifted_out: tuple[int, ...] = ()
    stopped_by: str | int | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    dropped_messages: tuple[int, ...] = ()

    def __repr__(self) -> str:
        return one_line(self)


_new, _set = object.__new__, object.__setattr__  # it is frozen
# What a chunk does not hold itself is found here: most have a text and tokens alone.
for _field in attrs.fields(StreamChunk)[1:]:
    setattr(StreamChunk, _field.name, _field.default)


def text_chunk(text: str, tokens: tuple[int, ...]) -> StreamChunk:
    """Return ``StreamChunk(text=text, tokens=tokens)``, in a third of the time: once a token."""
    chunk = _new(StreamChunk)
    _set(chunk, "text", text)
    _set(chunk, "tokens", tokens)
    return chunk


@attrs.frozen(kw_only=True)
class Completion:
    """One whole continuation: its text, its token ids, why it ended, and its usage.

    ``logprobs`` has one entry per token where they were requested, otherwise it is None. The fields
    mean the same as in `StreamChunk`.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    logprobs: tuple[TokenLogprob, ...] | None = None

    def __repr__(self) -> str:
        return one_line(self)


@attrs.frozen(kw_only=True)
class Beam(Completion):
    """A continuation that `Session.beam_search` found, with its ``score``.

    The score is the sum of log-probabilities, including the end token's, divided by the number of
    generated tokens to the power of ``length_penalty``. ``logprobs`` are always present.
    """

    score: float


@attrs.frozen(kw_only=True)
class ContextReport:
    """What a session holds; available at any time and from any thread, even when closed or failed.

    ``resident_tokens`` counts the logical context, ``held_tokens`` what the engine holds of the
    session now: more if there is a warm tail, fewer if others took its cells. ``warm_tail_tokens``
    are held by the engine beyond the logical context, for reuse. These counts grow while a text is
    evaluated, and ``pending_tokens`` counts what is left. ``cuts`` has the first place after which
    tokens were computed while others stood before them that `Session.evict` or ``overflow="shift"``
    has since removed: good for continuing, not for reuse. ``fatal_cause`` is the text of the error
    that ended the session, if one did.
    """

    state: str
    resident_tokens: int
    prefix_tokens: int
    suffix_tokens: int
    generated_tokens: int
    warm_tail_tokens: int
    n_ctx: int
    available_tokens: int
    stable_byte_hash: str | None
    stable_token_hash: str | None
    manifest_digest: str
    manifest: ContextManifest = attrs.field(repr=False)
    closed: bool
    fatal_cause: str | None = None
    pending_tokens: int = 0
    held_tokens: int = 0
    cuts: tuple[int, ...] = ()

    def __repr__(self) -> str:
        return one_line(self)

    def _repr_html_(self) -> str:
        parts = {
            "prefix": self.prefix_tokens,
            "suffix": self.suffix_tokens,
            "generated": self.generated_tokens,
        }
        rows = [*parts.items(), ("free", self.available_tokens), ("window", self.n_ctx)]
        return table(f"Session {self.state}", rows, parts, self.available_tokens)


def _calls(value: Any) -> tuple[Any, ...]:
    calls = () if value is None else checks.items("tool_calls", value, "a sequence of calls")
    for call in calls:
        if not isinstance(call, (ToolCall, Mapping)):
            raise checks.refuse("tool_calls", call, "ToolCall objects, or mappings with a function")
    return tuple(calls)


def _arguments(given: Mapping[str, Any] | str | None) -> Mapping[str, Any]:
    return checks.frozen_mapping(call_arguments(given))


def call_arguments(given: Mapping[str, Any] | str | None) -> Mapping[str, Any]:
    """Return the arguments of a call, which may be their JSON text; None and "" are none.

    Raises `InvalidInputError` for anything else.
    """
    value: Any = given
    if isinstance(given, str):
        try:
            value = json.loads(given) if given.strip() else {}
        except (ValueError, RecursionError) as error:
            raise checks.refuse("arguments", given, "a mapping, or its JSON text") from error
    elif given is None:
        value = {}
    if not isinstance(value, Mapping):
        raise checks.refuse("arguments", given, "a mapping, or its JSON text")
    return value


@attrs.frozen(kw_only=True)
class ToolCall:
    """A model's call of one of the tools it was given.

    ``arguments`` fit the tool's schema; their JSON text is taken too. ``id`` is what the answer
    refers to (`Message.tool_call_id`).
    """

    id: str = attrs.field(validator=checks.text())
    name: str = attrs.field(validator=checks.text())
    arguments: Mapping[str, Any] = attrs.field(factory=dict, converter=_arguments)

    def as_dict(self) -> dict[str, Any]:
        """Return the call as messages hold it: ``{"id", "type", "function": {...}}``."""
        function = {"name": self.name, "arguments": dict(self.arguments)}
        return {"id": self.id, "type": "function", "function": function}


@attrs.frozen(kw_only=True)
class Message:
    """One turn of a chat: its role ("system", "user", "assistant", "tool") and content.

    ``content`` is text, a sequence of parts (``{"type": "text", "text": ...}``), or None alongside
    ``tool_calls``. A tool's result has ``tool_call_id`` and may have its ``name``. ``reasoning`` is
    the thought before an answer; the template decides whether later turns see it.
    """

    role: str = attrs.field(validator=checks.text())
    content: str | Sequence[Mapping[str, Any]] | None = attrs.field(
        default=None, validator=checks.content
    )
    tool_calls: Sequence[ToolCall | Mapping[str, Any]] = attrs.field(default=(), converter=_calls)
    tool_call_id: str | None = attrs.field(default=None, validator=checks.text(optional=True))
    name: str | None = attrs.field(default=None, validator=checks.text(optional=True))
    reasoning: str | None = attrs.field(default=None, validator=checks.text(optional=True))


@attrs.frozen(kw_only=True)
class Snapshot:
    """A session's state as bytes, with the identity it belongs to.

    `Session.restore` refuses one whose ``manifest`` states another identity than the session's.
    ``elapsed_ms`` is the time it took to make, which two equal ones may differ in; ``size_bytes``
    the size of ``data``.
    """

    manifest: ContextManifest = attrs.field(validator=_is_manifest)
    data: bytes = attrs.field(repr=False, validator=_is_bytes)
    resident_tokens: int = attrs.field(validator=checks.integer(0, optional=False))
    elapsed_ms: float = attrs.field(default=0.0, eq=False)

    @property
    def size_bytes(self) -> int:
        """Size of the snapshot in bytes."""
        return len(self.data)

    def to_bytes(self) -> bytes:
        """Return the snapshot as bytes: those that `Session.save` writes to a file."""
        return self.data

    @classmethod
    def from_bytes(cls, data: bytes) -> Snapshot:
        """Return the snapshot that `to_bytes` gave. Raises `SnapshotError` for other bytes."""
        if not isinstance(data, (bytes, bytearray, memoryview)):
            raise checks.refuse("data", data, "bytes")
        # What reads them stands above values, so it is not imported by name.
        reader = importlib.import_module("infercore.session.snapshots")
        snapshot: Snapshot = reader.from_bytes(bytes(data))
        return snapshot
