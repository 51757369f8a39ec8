"""``infercore generate``: text after each prompt, over one warm prefix."""

from __future__ import annotations

import os
import sys
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
from infercore.cli.generating import EXIT_INTERRUPTED, EXIT_UNFINISHED, Show
from infercore.cli.loading import opened, plain
from infercore.cli.options import (
    CONTEXT_FOR_TEXT,
    SectionCommand,
    context_options,
    model_and,
)
from infercore.cli.terminal import read_file, read_stdin, stdin_is_piped, without_line_end

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from infercore import Session, StreamChunk


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
