"""One generation: in a thread of its own, shown as it comes, with what it took."""

from __future__ import annotations

import json
import queue
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import attrs

from infercore.cli.loading import plain
from infercore.cli.terminal import PrefillBar, print_json_line, tell, tell_error, write
from infercore.errors import DecodeAbortedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from typing_extensions import Self

    from infercore import Session, StreamChunk, Usage


POLL_S = 0.05
EXIT_INTERRUPTED = 130
EXIT_UNFINISHED = 3
_OF_JSON = ("json_schema", "json_object")


class Generation:
    """The chunks that ``begin`` gives, prefill included; a context manager to iterate within.

    The first Ctrl-C cancels in the engine: the stream ends as a cancelled one does, without a
    last chunk where it was still in the prompt, and ``interrupted`` is true. A second one raises
    `KeyboardInterrupt`. Leaving early (an error while writing, for instance) cancels as well.
    """

    def __init__(self, session: Session, begin: Callable[[], Iterable[StreamChunk]]) -> None:
        self.interrupted = False
        self._session = session
        self._begin = begin
        self._items: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="infercore", daemon=True)
        self._bar = PrefillBar(session.explain_context)
        self._handler: Any = None

    def _work(self) -> None:
        end: BaseException | None = None
        try:
            for chunk in self._begin():
                self._items.put(chunk)
        except BaseException as error:  # noqa: BLE001  (raised in the thread that reads)
            end = error
        self._items.put(_End(end))

    def __enter__(self) -> Self:
        ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN  # a job in the background
        if threading.current_thread() is threading.main_thread() and not ignored:
            self._handler = signal.signal(signal.SIGINT, self._on_interrupt)
        self._thread.start()
        return self

    def _on_interrupt(self, *_: object) -> None:
        if self.interrupted:
            raise KeyboardInterrupt
        self.interrupted = True

    def __iter__(self) -> Iterator[StreamChunk]:
        while True:
            item = self._next()
            if isinstance(item, _End):
                if item.error is None or self._is_our_cancel(item.error):
                    return
                raise item.error
            yield item

    def _next(self) -> Any:
        while True:
            if self.interrupted:  # again each time: between two calls a cancel finds nothing
                self._session.cancel()
            try:
                item = self._items.get(timeout=POLL_S)
            except queue.Empty:
                self._bar.look()
            else:
                self._bar.end()
                return item

    def _is_our_cancel(self, error: BaseException) -> bool:
        return self.interrupted and isinstance(error, DecodeAbortedError)

    def __exit__(self, *_: object) -> None:
        try:
            self._bar.end()
            while self._thread.is_alive():  # left early, or about to end anyway
                self._session.cancel()
                self._thread.join(POLL_S)
        finally:
            if self._handler is not None:
                signal.signal(signal.SIGINT, self._handler)


class _End:
    """The end of the stream, with what ended it."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


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
        if usage.seed is not None and (usage.sampling is None or usage.sampling.temperature > 0):
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

    def broke_off(self, turn: Turn, decode: Mapping[str, Any]) -> bool:
        """Say so, and return True, where a constrained answer ended before it was complete."""
        constraint = decode.get("response_format")
        if constraint is None or turn.finish_reason not in {"length", "context"}:
            return False
        if constraint["type"] in _OF_JSON and _is_json(turn.text):
            return False
        more = "--max-tokens" if turn.finish_reason == "length" else "--n-ctx"
        tell_error(f"the answer was cut off before it was complete; allow more with {more}")
        return True

    def end(self, turn: Turn, *, number: int, **facts: Any) -> None:
        """Show what the generation took: as JSON always, as a line where it was asked for."""
        if self.as_json:
            print_json_line({"type": "result", "number": number, **turn.facts(), **facts})
        if self.stats:
            tell(f"[{turn.told()}]")


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
