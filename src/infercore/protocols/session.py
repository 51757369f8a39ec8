"""The session that users hold: text, prefix, suffix and streams. The core's sessions satisfy it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from infercore.protocols.opening import opened_by
from infercore.values.field_texts import lists_fields

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import TracebackType

    from typing_extensions import Self, Unpack

    from infercore.values.config import DecodeConfig
    from infercore.values.fields import ChatFields, DecodeFields, RunToolsFields
    from infercore.values.session import (
        Beam,
        Completion,
        ContextReport,
        Message,
        PrefixInput,
        PrefixStatus,
        Snapshot,
        StreamChunk,
        SuffixInput,
        SuffixStatus,
    )


@opened_by("infercore.open_session(path_or_model) or model.new_session()")
@runtime_checkable
class Session(Protocol):
    """**Protocol:** a stable prefix kept hot, a volatile suffix, and decoding from there.

    States: EMPTY, PREFIXED, READY, DECODED, CLOSED, FATAL. While a decode iterator is open,
    every other call but ``cancel``, ``explain_context`` and ``close`` raises `SessionBusyError`.
    """

    @property
    def state(self) -> str:
        """The state's name."""

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""

    def ensure_prefix(
        self, prefix: PrefixInput | str | Sequence[int], *, timeout: float | None = None
    ) -> PrefixStatus:
        """Make the context equal ``prefix``, evaluating only what is not resident.

        What was evaluated before a change by `Context.set_adapters` or `Context.set_control_vector`
        no longer counts: this call, `prefill_suffix`, `generate` and `chat` evaluate it anew.
        `decode` and text that is appended go on from it.
        Token ids are taken as they are, here and wherever else a text is expected. Suffix and
        generated tokens are no longer part of the context; the engine may keep them as a warm tail.
        Raises `ContextOverflowError` (stage "prefix"), `InvalidInputError` and, if requested,
        `ManifestMismatchError`: state unchanged. If cancelled, it raises `DecodeAbortedError`, and
        if ``timeout`` seconds, including waiting, were not enough, `CallTimeoutError`: what was
        evaluated is reused when it is called again.
        """

    def prefill_suffix(
        self, suffix: SuffixInput | str | Sequence[int], *, timeout: float | None = None
    ) -> SuffixStatus:
        """Put the volatile text after the prefix, evaluating only what is not resident.

        It replaces an earlier suffix and what was generated, unless its mode is "append". Raises
        `InvalidStateError` without a prefix, `ContextOverflowError` (stage "suffix"),
        `ManifestMismatchError` and `InvalidInputError`: state unchanged. If cancelled, it raises
        `DecodeAbortedError`: the prefix stands, and calling again continues.
        """

    @lists_fields("DecodeConfig", "SamplingConfig")
    def decode(
        self, config: DecodeConfig | None = None, **fields: Unpack[DecodeFields]
    ) -> Iterator[StreamChunk]:
        """Return an iterator that generates from here, one `StreamChunk` after another.

        ``fields`` are those of `DecodeConfig` and `SamplingConfig`. The last chunk has the finish
        reason and the usage. Generated tokens are resident; a second decode continues after them.
        Closing or dropping the iterator ends the decode and leaves the session usable. Raises
        `InvalidStateError` with nothing to decode from, `ContextOverflowError` (stage "decode")
        without room for one token, `GrammarError` and `InvalidInputError` for the config: state
        unchanged.
        """

    def beam_search(
        self,
        n_beams: int,
        *,
        max_tokens: int,
        length_penalty: float = 1.0,
        n_return: int = 1,
        early_stopping: bool = True,
    ) -> list[Beam]:
        """Return the ``n_return`` best of ``n_beams`` likeliest continuations, best first.

        The session stays as it was: none of them becomes part of its context. ``early_stopping``
        ends the search once ``n_beams`` have ended; otherwise it goes on while a better one can be
        expected. Beams are evaluated together where the context has several sequences, otherwise in
        turns. Cancelling raises `DecodeAbortedError`. Raises what `decode` raises: state unchanged.
        """

    @lists_fields("DecodeConfig", "SamplingConfig")
    def sample_many(self, n: int, **decode: Unpack[DecodeFields]) -> list[Completion]:
        """Return ``n`` continuations, drawn with consecutive seeds from the given one.

        ``decode`` are the fields of `decode`. The session stays as it was: none of them becomes
        part of its context. They are evaluated together where the context has several sequences,
        otherwise in turns. ``timeout`` is that of the whole call: those that it leaves no time for
        end with "timeout" too, without a token. Cancelling raises `DecodeAbortedError`. Raises what
        `decode` raises: state unchanged.
        """

    @lists_fields("DecodeConfig", "SamplingConfig")
    def infill(
        self, prefix: str, suffix: str, **decode: Unpack[DecodeFields]
    ) -> Iterator[StreamChunk]:
        """Return an iterator over the text that belongs between ``prefix`` and ``suffix``.

        The text before the gap becomes the prefix, the text after it the suffix; control tokens in
        them are plain text. ``decode`` are the fields of `decode`. Raises `UnsupportedFeatureError`
        where the vocabulary lacks the marks (`Tokenizer.fim`), and what `prefill_suffix` and
        `decode` raise.
        """

    def evict(self, start: int, end: int) -> PrefixStatus:
        """Take the tokens in [start, end) out of the logical context, and close the gap.

        Where the context can move tokens (``kv_shift``), those after the gap move up as they are,
        as `ContextReport.cuts` shows: they were computed with what is gone, so logits differ from
        those of a cold run. That is good for continuing; a new suffix evaluates them again.
        Otherwise, and where they share cells with another session, they are evaluated again now.
        Raises `InvalidInputError` for an invalid range: state unchanged.
        """

    @lists_fields("DecodeConfig", "SamplingConfig")
    def generate(self, text: str | Sequence[int], **decode: Unpack[DecodeFields]) -> str:
        """Return the text generated after the suffix ``text``.

        ``text`` may be token ids. If there is no prefix, an empty one is set: for a text, what the
        tokenizer puts in front; for token ids, nothing. Raises what `prefill_suffix` and `decode`
        raise.
        """

    def explain_context(self) -> ContextReport:
        """Report what is resident, from any thread, at any time, even when closed; never waits."""

    def cancel(self) -> None:
        """End the running prefill or decode, from any thread; if none is running, nothing happens.

        A decode ends with finish reason "cancelled", a prefill with `DecodeAbortedError`. A stream
        need not be read to its end then: the next call ends it, and it yields nothing more.
        """

    def snapshot(self) -> Snapshot:
        """Return the session's state as a value: tokens, KV cache, last logits and identity.

        Raises `UnsupportedFeatureError` where the engine cannot save a sequence.
        """

    def restore(self, snapshot: Snapshot) -> None:
        """Take on the state of ``snapshot``; decoding can continue at once.

        Raises `ManifestMismatchError` for another identity and `ContextOverflowError` (stage
        "restore"): state unchanged. `SnapshotError` for damaged data: unchanged, or cleared if the
        engine had begun. After an interruption such as Ctrl-C the session is unchanged: the next
        call evaluates again whatever the engine lost.
        """

    def fork(self) -> Session:
        """Return an independent session in the same state, on the same weights.

        It gets a copy of the sequence where the context has a free one (``n_seq_max``), otherwise a
        new context.
        """

    def save(self, path: str | os.PathLike[str]) -> Snapshot:
        """Write the session's state to a file, all or nothing; return what was written.

        Raises what `snapshot` raises, `InvalidInputError` for a folder or a path that leads
        nowhere, and OSError where the file cannot be written.
        """

    def load(self, path: str | os.PathLike[str]) -> Snapshot:
        """Take on the state in a file that `save` wrote; return what was read.

        Raises `ModelNotFoundError` where there is no file, and what `restore` raises.
        """

    @lists_fields("ChatRequest", "DecodeConfig", "SamplingConfig")
    def chat(
        self, messages: Sequence[Message | Mapping[str, Any]], **decode: Unpack[ChatFields]
    ) -> Iterator[StreamChunk]:
        """Return an iterator over the answer to ``messages``, rendered by the model's template.

        The part that a different last user turn would not change becomes the prefix, the rest the
        suffix. The core also accepts

        - ``tools`` (``{"type": "function", "function": {"name", "parameters"}}``) and
          ``tool_choice``: "auto", "none", "required" or a name. The last two constrain the text to
          one call that the tool's schema accepts;
        - ``reasoning``: "parsed" (`StreamChunk.reasoning`), "text" (left in the text) or "off", and
          ``reasoning_budget``, tokens after which a thought is closed;
        - ``chat_template`` in place of the model's own, ``template_variables``, and
          ``parse_special``: the text of control tokens in messages is text unless that is set.

        Calls come as `StreamChunk.tool_calls` with the finish reason "tool_calls"; anything that is
        not a valid call of a given tool stays text. With ``overflow="truncate"`` or "shift" whole
        turns are left out, oldest first, when the window is full (`StreamChunk.dropped_messages`).
        Raises `UnsupportedFeatureError` without a template, for tools that it leaves out, and for
        parts of messages that the model cannot read; `InvalidInputError` where it refuses the
        messages; and what `prefill_suffix` and `decode` raise.
        """

    @lists_fields("ChatRequest", "DecodeConfig", "SamplingConfig")
    def run_tools(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        functions: Sequence[Callable[..., Any]],
        *,
        max_rounds: int = 8,
        **decode: Unpack[RunToolsFields],
    ) -> list[Message]:
        """Chat, run the functions that the model calls, and go on until it answers in text.

        A function is offered by its name, docstring and annotated parameters; what it returns, or
        raises, goes back to the model. After ``max_rounds`` rounds of calls the model must answer.
        Returns the new messages: answers, calls and results, in order. Raises what `chat` raises.
        """

    def close(self) -> None:
        """Release everything; idempotent. A running decode is cancelled."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...
