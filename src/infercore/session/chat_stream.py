"""The iterator over a chat's answer: a decode whose text is read for thoughts and calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import attrs

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from typing_extensions import Self

    from infercore.chat.answer import AnswerReader, Piece
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
        self._hidden: dict[str, None] = {}  # what control tokens of this answer say, in order
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
        chunk = self._joined(chunk)
        if self._reader is not None:
            chunk = self._read(chunk, self._reader)
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
        self._note_control(chunk.tokens)
        piece = reader.push(chunk.text)
        reason = chunk.finish_reason
        if reason is None:
            return self._with(chunk, piece)
        rest = reader.finish()
        piece = type(piece)(
            piece.text + rest.text, piece.reasoning + rest.reasoning, piece.calls + rest.calls
        )
        if reader.n_calls and reason in ("eos", "stop"):
            reason = "tool_calls"
        return attrs.evolve(self._with(chunk, piece), finish_reason=reason)

    def _note_control(self, tokens: Sequence[int]) -> None:
        if self._pieces is not None:
            known = [self._pieces[token] for token in tokens]
            texts = [
                piece.data.decode("utf-8", errors="replace") for piece in known if piece.is_control
            ]
            self._hidden |= dict.fromkeys(texts)

    def _with(self, chunk: StreamChunk, piece: Piece) -> StreamChunk:
        text, reasoning = piece.text, piece.reasoning
        for hidden in self._hidden:
            text, reasoning = text.replace(hidden, ""), reasoning.replace(hidden, "")
        return attrs.evolve(chunk, text=text, reasoning=reasoning, tool_calls=piece.calls)

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
