"""``infercore generate``: text after each prompt, over one warm prefix.

A generation runs in a thread of its own and is shown as it comes, with what it took; a chat's too.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import textwrap
import threading
import time
from typing import TYPE_CHECKING, Any

import attrs
import click

from infercore.cli.decoding import (
    chat_fields,
    chat_options,
    decode_fields,
    decode_options,
    need_template,
    overflow_option,
    system_message,
)
from infercore.cli.loading import opened, plain
from infercore.cli.options import (
    CONTEXT_FOR_TEXT,
    SectionCommand,
    context_options,
    model_and,
)
from infercore.cli.terminal import (
    PrefillBar,
    print_json_line,
    read_file,
    read_stdin,
    stdin_is_piped,
    tell,
    tell_error,
    without_line_end,
    write,
    write_thought,
)
from infercore.errors import DecodeAbortedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from typing_extensions import Self

    from infercore import Session, StreamChunk, Usage


POLL_S = 0.05
EXIT_INTERRUPTED = 130
EXIT_UNFINISHED = 3
_HEADING_CHARACTERS = 60
_OF_JSON = ("json_schema", "json_object")


@click.command(
    cls=SectionCommand,
    examples=[
        "infercore generate pack:storyteller 'Once upon a time'",
        "infercore generate -m hf:ORG/REPO --chat -n 200 'Why?'",
        "git diff | infercore generate -m x --chat 'Review this'",
        "infercore generate model.gguf --chat @question.txt",
        "infercore generate m.gguf --json-schema s.json 'Mira, 34'",
    ],
    short_help="Generate text after a prompt.",
)
@model_and("prompts")
@click.argument("prompts", metavar="[PROMPT]...", nargs=-1)
@click.option("more", "-p", "--prompt", multiple=True, metavar="TEXT", help="A prompt; repeatable.")
@click.option(
    "files", "-f", "--file", multiple=True, metavar="FILE", help="A prompt from FILE; repeatable."
)
@click.option("--prefix", metavar="TEXT", help="Text before each prompt, evaluated once.")
@click.option("--prefix-file", metavar="FILE", help="The prefix from FILE, unchanged.")
@click.option(
    "--chat", is_flag=True, help="Treat each prompt as a chat message, in the model's template."
)
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON per chunk.")
@click.option("--stats", is_flag=True, help="Print statistics for each prompt to standard error.")
@context_options(CONTEXT_FOR_TEXT)
@overflow_option
@chat_options
@decode_options
@click.pass_context
def generate(ctx: click.Context, /, model: str, **options: Any) -> None:
    """Generate text after each PROMPT, and write it as it comes.

    Prompts come from arguments (@FILE is the text of a file, @@ begins a prompt with an @),
    --prompt and --file, in this order. A text that is piped in goes before each of them, with an
    empty line between; alone it is the prompt. What prompts have in common, or --prefix, is
    evaluated once. Ctrl-C ends the generation.

    Exit status: 0, 1 for an error, 2 for a wrong command line, 3 where an answer broke off before
    it was what --json-schema, --regex or another constraint asks for, 130 after Ctrl-C.
    """
    prompts = _prompts(options)
    show = Show(as_json=options["as_json"], stats=options["stats"])
    of_chat = _chat_of(options)
    prefix = _prefix(options) if of_chat is None else ""
    with decode_fields(options) as decode, opened(model, options) as (loaded, session):
        if of_chat is not None:
            need_template(loaded, of_chat.fields)
        unfinished = False
        for number, prompt in enumerate(prompts):
            if len(prompts) > 1 and not show.as_json:
                tell(f"==> {_heading(prompt)} <==")
            one = One(session=session, decode=decode, prefix=prefix, chat=of_chat, prompt=prompt)
            turn = show.run(session, one.begin, number=number)
            show.end(turn, number=number, **one.statuses)
            if turn.interrupted:
                ctx.exit(EXIT_INTERRUPTED)
            unfinished |= show.broke_off(turn, decode)
        if unfinished:
            ctx.exit(EXIT_UNFINISHED)


@attrs.frozen(kw_only=True)
class OfChat:
    """What each prompt of a chat shares: the system message, and fields of `Session.chat`."""

    system: str | None
    fields: Mapping[str, Any]

    def messages(self, prompt: str) -> list[dict[str, str]]:
        """Return the chat in which ``prompt`` is the only question."""
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*first, {"role": "user", "content": prompt}]


@attrs.define(kw_only=True)
class One:
    """The generation after one prompt; ``statuses`` are those of its prefix and suffix."""

    session: Session
    decode: Mapping[str, Any]
    prefix: str
    chat: OfChat | None
    prompt: str
    statuses: dict[str, Any] = attrs.field(factory=dict)

    def begin(self) -> Iterator[StreamChunk]:
        """Evaluate what is not held yet, and generate."""
        if self.chat is not None:
            messages = self.chat.messages(self.prompt)
            yield from self.session.chat(messages, **self.chat.fields, **self.decode)
            return
        self.statuses["prefix"] = plain(self.session.ensure_prefix(self.prefix))
        if self.prompt:
            self.statuses["suffix"] = plain(self.session.prefill_suffix(self.prompt))
        yield from self.session.decode(**self.decode)


def _prompts(options: Mapping[str, Any]) -> list[str]:
    texts = [_text_of(prompt) for prompt in options["prompts"]] + [*options["more"]]
    texts += [without_line_end(read_file(path)) for path in options["files"]]
    reads_stdin = {"-", "@-"} & {*options["prompts"], *options["files"], *_other_files(options)}
    piped = ""
    if not reads_stdin and stdin_is_piped() and (texts == [] or sys.stdin is not None):
        piped = without_line_end(read_stdin())
    elif not texts:
        raise click.UsageError("no prompt; pass one, use --file, or pipe text in")
    if not texts:
        return [piped]
    return [f"{piped}\n\n{text}" if piped else text for text in texts]


def _heading(prompt: str) -> str:
    """Return the beginning of a prompt, in one line, so that answers can be kept apart."""
    return textwrap.shorten(prompt, _HEADING_CHARACTERS, placeholder=" ...") or "(no text)"


def _other_files(options: Mapping[str, Any]) -> list[str]:
    """The files of other options, each of which may be standard input too."""
    names = ("prefix_file", "system_file", "template", "grammar", "json_schema")
    return [options[name] for name in names if options[name] is not None]


def _text_of(prompt: str) -> str:
    """Return what an argument means: ``@FILE`` is the text of a file."""
    if prompt.startswith("@@"):
        return prompt[1:]
    if not prompt.startswith("@"):
        return prompt
    if prompt != "@-" and not os.path.isfile(prompt[1:]):
        raise click.UsageError(
            f"there is no file {prompt[1:]!r}; to start a prompt with @, type @@"
        )
    return without_line_end(read_file(prompt[1:]))


def _chat_of(options: Mapping[str, Any]) -> OfChat | None:
    """What makes the prompts messages; None where nothing does."""
    fields, system = chat_fields(options), system_message(options)
    if not (options["chat"] or fields or system is not None):
        return None
    if options["prefix"] is not None or options["prefix_file"] is not None:
        raise click.UsageError("a chat takes --system in place of --prefix")
    return OfChat(system=system, fields=fields)


def _prefix(options: Mapping[str, Any]) -> str:
    text, path = options["prefix"], options["prefix_file"]
    if text is not None and path is not None:
        raise click.UsageError("--prefix and --prefix-file cannot be combined; give one")
    return (text or "") if path is None else read_file(path)


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

    ``reasoning`` is what the model thought, which is no part of the text. ``first_text_ms`` counts
    from the start, prefill included, to the first chunk with text.
    """

    text: str = ""
    reasoning: str = ""
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
            "reasoning": self.reasoning,
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
        if not self.as_json and not turn.text:
            _end_thought(turn.reasoning)
        if not self.as_json and turn.text and not turn.text.endswith("\n"):
            write("\n")
        return turn

    def _take(self, turn: Turn, chunk: StreamChunk, started: float, number: int) -> None:
        if chunk.text and turn.first_text_ms is None:
            turn.first_text_ms = (time.perf_counter() - started) * 1e3
        if not self.as_json:
            self._write(turn, chunk)
        turn.text += chunk.text
        turn.reasoning += chunk.reasoning
        turn.shifted_out += len(chunk.shifted_out)
        turn.dropped_messages += chunk.dropped_messages
        turn.finish_reason, turn.usage = chunk.finish_reason, chunk.usage
        if self.as_json:
            shown = {"type": "chunk", "number": number, "text": chunk.text, "tokens": chunk.tokens}
            if chunk.reasoning:
                shown["reasoning"] = chunk.reasoning
            if chunk.logprobs is not None:
                shown["logprobs"] = [plain(logprob) for logprob in chunk.logprobs]
            print_json_line(shown)

    @staticmethod
    def _write(turn: Turn, chunk: StreamChunk) -> None:
        if chunk.reasoning:
            write_thought(chunk.reasoning)
        if chunk.text:
            if not turn.text:
                _end_thought(turn.reasoning + chunk.reasoning)
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


def _end_thought(thought: str) -> None:
    if thought and not thought.endswith("\n"):
        write_thought("\n")


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
