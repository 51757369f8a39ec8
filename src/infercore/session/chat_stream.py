"""The iterator over a chat's answer: a decode whose text is read for thoughts and calls."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING, Protocol

import attrs

from infercore.chat.raw import RawText

if TYPE_CHECKING:
    from collections.abc import Iterator

    from typing_extensions import Self

    from infercore.chat.answer import AnswerReader
    from infercore.session.pieces import Pieces
    from infercore.values.session import StreamChunk


class Chunks(Protocol):
    """A decode: chunks that can be ended."""

    @property
    def finished(self) -> bool:
        """Whether the last chunk has come."""

    def __next__(self) -> StreamChunk:
        """Return the next chunk."""

    def cancel(self) -> None:
        """End at the next step."""

    def close(self) -> None:
        """End now."""


class ChatStream:
    """An iterator of `StreamChunk`; a context manager that closes itself.

    Chunks that hold nothing yet (marks of a call that is still being written) are kept and come
    with the next one. With ``pieces`` the text of control tokens is left out of the answer.
    """

    def __init__(
        self,
        stream: Chunks,
        reader: AnswerReader | None,
        *,
        pieces: Pieces | None,
        dropped_messages: tuple[int, ...] = (),
    ) -> None:
        self._stream = stream
        self._reader = reader
        self._pieces = pieces
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._behind = RawText("", "")  # what tokens say whose text has not come yet
        self._dropped = dropped_messages
        self._kept: StreamChunk | None = None

    @property
    def finished(self) -> bool:
        """Whether the last chunk has come, or the stream was closed."""
        return self._stream.finished

    def __repr__(self) -> str:
        return repr(self._stream)

    def __iter__(self) -> Iterator[StreamChunk]:
        return self

    def __next__(self) -> StreamChunk:
        while True:
            chunk = self.shown(next(self._stream))
            if chunk is not None:
                return chunk

    @property
    def source(self) -> Chunks:
        """The decode whose text is read."""
        return self._stream

    def shown(self, chunk: StreamChunk) -> StreamChunk | None:
        """Return what of ``chunk``, the next one of the source, is to be shown; None = nothing."""
        if self._reader is not None:
            chunk = self._read(chunk, self._reader)
        chunk = self._joined(chunk)
        is_empty = not (chunk.text or chunk.reasoning or chunk.tool_calls or chunk.finish_reason)
        if is_empty:
            self._kept = chunk
            return None
        dropped, self._dropped = self._dropped, ()
        return attrs.evolve(chunk, dropped_messages=dropped) if dropped else chunk

    def _joined(self, chunk: StreamChunk) -> StreamChunk:
        """Put what came before without anything to show in front of ``chunk``."""
        kept, self._kept = self._kept, None
        if kept is None:
            return chunk
        logprobs = None if chunk.logprobs is None else (*(kept.logprobs or ()), *chunk.logprobs)
        return attrs.evolve(
            chunk,
            tokens=kept.tokens + chunk.tokens,
            logprobs=logprobs,
            prompt_logprobs=kept.prompt_logprobs or chunk.prompt_logprobs,
            shifted_out=kept.shifted_out + chunk.shifted_out,
        )

    def _read(self, chunk: StreamChunk, reader: AnswerReader) -> StreamChunk:
        piece = reader.push(self._raw(chunk))
        reason = chunk.finish_reason
        if reason is not None:
            rest = reader.finish()
            piece = type(piece)(
                piece.text + rest.text, piece.reasoning + rest.reasoning, piece.calls + rest.calls
            )
            if reader.n_calls and reason in ("eos", "stop"):
                reason = "tool_calls"
        return attrs.evolve(
            chunk,
            text=piece.text,
            reasoning=piece.reasoning,
            tool_calls=piece.calls,
            finish_reason=reason,
        )

    def _raw(self, chunk: StreamChunk) -> RawText:
        """Return the chunk's text with what control tokens wrote; text may lag behind tokens."""
        if self._pieces is None:
            return RawText.of(chunk.text)
        for token in chunk.tokens:
            piece = self._pieces[token]
            text = self._utf8.decode(piece.data)
            n = len(piece.data.decode("utf-8", errors="replace")) if piece.is_control else 0
            self._behind += RawText(text, "0" * (len(text) - n) + "1" * min(n, len(text)))
        if chunk.finish_reason is not None:
            self._behind += RawText.of(self._utf8.decode(b"", final=True))
        found, self._behind = (f(len(chunk.text)) for f in (self._behind.first, self._behind.after))
        return found if found.text == chunk.text else RawText.of(chunk.text)

    def cancel(self) -> None:
        """End with ``finish_reason="cancelled"`` at the next step; from any thread."""
        self._stream.cancel()

    def close(self) -> None:
        """End the decode; what was shown is resident, the session is free. Idempotent."""
        self._stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
