"""One generation as it is shown: its text as it comes, then what it took."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import attrs

from infercore.cli.loading import plain
from infercore.cli.output import print_json_line
from infercore.cli.running import Generation
from infercore.cli.terminal import tell, write

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from infercore import Session, StreamChunk, Usage


@attrs.define(kw_only=True)
class Turn:
    """What one generation gave. ``text`` is complete also where it was interrupted.

    ``first_text_ms`` counts from the start, prefill included, to the first chunk with text.
    """

    text: str = ""
    finish_reason: str | None = None
    usage: Usage | None = None
    first_text_ms: float | None = None
    shifted_out: int = 0
    dropped_messages: tuple[int, ...] = ()
    interrupted: bool = False

    def told(self) -> str:
        """Return the line about reuse, speed and the end."""
        usage = self.usage
        if usage is None:
            return "interrupted before the first token"
        parts = [f"reused {usage.cached_tokens} of {usage.prompt_tokens} tokens"]
        if self.first_text_ms is not None:
            parts.append(f"first text {self.first_text_ms:.0f} ms")
        parts.append(f"{usage.completion_tokens} new tokens")
        if usage.tokens_per_second is not None:
            parts.append(f"{usage.tokens_per_second:.1f} tokens/s")
        if usage.drafted_tokens:
            parts.append(f"{usage.accepted_tokens} of {usage.drafted_tokens} guesses right")
        if self.shifted_out:
            parts.append(f"{self.shifted_out} tokens left out")
        parts.append(f"finish {self.finish_reason}")
        if usage.seed is not None:
            parts.append(f"seed {usage.seed}")
        return ", ".join(parts)

    def facts(self) -> dict[str, Any]:
        """Return it all as JSON can hold it."""
        return {
            "text": self.text,
            "finish_reason": self.finish_reason,
            "first_text_ms": self.first_text_ms,
            "interrupted": self.interrupted,
            "dropped_messages": self.dropped_messages,
            "usage": None if self.usage is None else plain(self.usage),
        }


@attrs.frozen(kw_only=True)
class Show:
    """How generations are shown: as text, or as lines of JSON; with a line of figures or not."""

    as_json: bool
    stats: bool

    def run(
        self, session: Session, begin: Callable[[], Iterable[StreamChunk]], *, number: int
    ) -> Turn:
        """Run a generation to its end, showing each chunk as it comes."""
        turn = Turn()
        started = time.perf_counter()
        with Generation(session, begin) as generation:
            for chunk in generation:
                self._take(turn, chunk, started, number)
        turn.interrupted = generation.interrupted
        if not self.as_json and turn.text and not turn.text.endswith("\n"):
            write("\n")
        return turn

    def _take(self, turn: Turn, chunk: StreamChunk, started: float, number: int) -> None:
        if chunk.text and turn.first_text_ms is None:
            turn.first_text_ms = (time.perf_counter() - started) * 1e3
        turn.text += chunk.text
        turn.shifted_out += len(chunk.shifted_out)
        turn.dropped_messages += chunk.dropped_messages
        turn.finish_reason, turn.usage = chunk.finish_reason, chunk.usage
        if self.as_json:
            shown = {"type": "chunk", "number": number, "text": chunk.text, "tokens": chunk.tokens}
            if chunk.logprobs is not None:
                shown["logprobs"] = [plain(logprob) for logprob in chunk.logprobs]
            print_json_line(shown)
        elif chunk.text:
            write(chunk.text)

    def end(self, turn: Turn, *, number: int, **facts: Any) -> None:
        """Show what the generation took: as JSON always, as a line where it was asked for."""
        if self.as_json:
            print_json_line({"type": "result", "number": number, **turn.facts(), **facts})
        if self.stats:
            tell(f"[{turn.told()}]")
