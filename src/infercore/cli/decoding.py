"""Options of a decode: its length and ends, what constrains it, how it guesses ahead."""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click

import infercore
from infercore.cli.options import KeyValue, checked, given, option, sampling_options
from infercore.cli.terminal import read_file
from infercore.values.config import DecodeConfig, SamplingConfig, SpeculativeConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

T = TypeVar("T")

_FORMATS = ("json_schema", "json_object", "regex", "grammar", "choice")
_SPECULATIVE = ("n_draft", "n_gram")

_DECODE = (
    option("max_tokens", "-n", "--max-tokens", "--n-predict", "--predict", section="Decode",
           type=int, metavar="N",
           help="Maximum number of tokens to generate; default: until the window is full."),
    option("--stop", section="Decode", multiple=True, metavar="TEXT",
           help="Stop at this text, without printing it; repeatable."),
    option("stop_tokens", "--stop-token", section="Decode", multiple=True, type=int, metavar="ID",
           help="Stop at this token; repeatable."),
    option("--special-text/--no-special-text", section="Decode", default=None,
           help="Show control tokens as text."),
    option("--logprobs", section="Decode", type=int, metavar="N",
           help="Report the N likeliest tokens of each step; needs --json."),
    option("json_schema", "--json-schema", section="Constraint", metavar="FILE",
           help="JSON that fits the schema in FILE."),
    option("--json-object", section="Constraint", is_flag=True, help="Any JSON object."),
    option("--regex", section="Constraint", metavar="PATTERN", help="Text that matches."),
    option("--grammar", section="Constraint", metavar="FILE",
           help="Text that follows the grammar in FILE: Lark if its name ends in .lark, "
                "otherwise GBNF."),
    option("--choice", section="Constraint", multiple=True, metavar="TEXT",
           help="One of these texts; repeatable."),
    option("--speculative", section="Guessing ahead", is_flag=True,
           help="Guess tokens from the text so far; the result stays the same."),
    option("--draft-model", section="Guessing ahead", type=click.Path(), metavar="MODEL",
           help="Guess tokens with a smaller model that has the same vocabulary."),
    option("--n-draft", section="Guessing ahead", type=int, metavar="N",
           help="Maximum number of tokens to guess at once. [default: 8]"),
    option("--n-gram", section="Guessing ahead", type=int, metavar="N",
           help="With --speculative: longest run of tokens to look for. [default: 3]"),
)  # fmt: skip

_CHAT = (
    option("system", "--system", "-sys", "--system-prompt", section="Chat", metavar="TEXT",
           help="The system message."),
    option("--system-file", section="Chat", metavar="FILE", help="The system message from FILE."),
    option("--template", section="Chat", metavar="FILE",
           help="A Jinja chat template in place of the model's own."),
    option("template_variables", "--template-var", section="Chat", type=KeyValue(), multiple=True,
           help="A variable for the template, such as enable_thinking=false; repeatable."),
    option("--parse-special", section="Chat", is_flag=True,
           help="Read the text of control tokens in messages as those tokens."),
)  # fmt: skip

overflow_option: Callable[[Any], Any] = option(
    "--overflow", section="Context", type=click.Choice(["error", "truncate", "shift"]),
    help="When the window is full: refuse, leave out the oldest turns of a chat (or the oldest of "
    "a prompt that does not fit), or drop the older half while generating. [default: error; of "
    "infercore chat: truncate]",
)  # fmt: skip


def decode_options(command: T) -> T:
    """Add the fields of `DecodeConfig` and `SamplingConfig`."""
    command = sampling_options(command)
    for add in reversed(_DECODE):
        command = add(command)
    return command


def chat_options(command: T) -> T:
    """Add what goes into a chat beside its messages."""
    for add in reversed(_CHAT):
        command = add(command)
    return command


@contextmanager
def decode_fields(options: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Give the fields of a decode that ``options`` name; a draft model is open meanwhile.

    The others of `SamplingConfig` are what the model's files recommend.
    """
    if options["logprobs"] is not None and not options["as_json"]:
        raise click.UsageError("--logprobs needs --json; plain text cannot show them")
    fields: dict[str, Any] = {"sampling": "model", **given(SamplingConfig, options)}
    for name in ("max_tokens", "stop", "stop_tokens", "special_text", "logprobs"):
        if options[name] not in (None, ()):
            fields[name] = options[name]
    if (constraint := _response_format(options)) is not None:
        fields["response_format"] = constraint
    _check(fields)
    with _speculative(options) as speculative:
        if speculative is not None:
            fields["speculative"] = speculative
        yield fields


def _check(fields: Mapping[str, Any]) -> None:
    sampling = {field.name for field in SamplingConfig.__attrs_attrs__}
    checked(DecodeConfig, {k: v for k, v in fields.items() if k not in sampling})


def _response_format(options: Mapping[str, Any]) -> Any:
    asked = [name for name in _FORMATS if options[name]]
    if len(asked) > 1:
        flags = ", ".join("--" + name.replace("_", "-") for name in asked)
        raise click.UsageError(f"{flags} cannot be combined; give one")
    return _MAKERS[asked[0]](options[asked[0]]) if asked else None


def _schema(path: str) -> dict[str, Any]:
    try:
        schema = json.loads(read_file(path))
    except ValueError as error:
        if isinstance(error, infercore.InferCoreError):
            raise
        raise click.UsageError(f"{path} is not valid JSON: {error}") from error
    return {"type": "json_schema", "schema": schema}


def _grammar(path: str) -> dict[str, Any]:
    kind = "lark" if path.lower().endswith(".lark") else "gbnf"
    return {"type": kind, "grammar": read_file(path)}


_MAKERS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "json_schema": _schema,
    "json_object": lambda _: {"type": "json_object"},
    "regex": lambda pattern: {"type": "regex", "pattern": pattern},
    "grammar": _grammar,
    "choice": lambda choices: {"type": "choice", "choices": list(choices)},
}


@contextmanager
def _speculative(
    options: Mapping[str, Any],
) -> Iterator[SpeculativeConfig | Literal["auto"] | None]:
    path, lookup = options["draft_model"], options["speculative"]
    fields = {name: options[name] for name in _SPECULATIVE if options[name] is not None}
    if path is None and not lookup:
        if fields:
            raise click.UsageError("--n-draft and --n-gram need --speculative or --draft-model")
        yield None
    elif path is None:
        seeded = options.get("seed") is not None  # asked for by name, so not left to "auto"
        yield checked(SpeculativeConfig, fields) if fields or seeded else "auto"
    elif lookup or "n_gram" in fields:
        raise click.UsageError("--draft-model excludes --speculative and --n-gram; give one")
    else:
        checked(SpeculativeConfig, fields)
        with infercore.load_model(path) as draft:
            yield SpeculativeConfig(kind="draft_model", draft_model=draft, **fields)


def chat_fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `Session.chat` takes beside messages and the decode's fields."""
    fields: dict[str, Any] = {}
    if options["template"] is not None:
        fields["chat_template"] = read_file(options["template"])
    if options["template_variables"]:
        fields["template_variables"] = dict(options["template_variables"])
    if options["parse_special"]:
        fields["parse_special"] = True
    return fields


def system_message(options: Mapping[str, Any]) -> str | None:
    """Return the system message that was given, None where none was."""
    text, path = options["system"], options["system_file"]
    if text is not None and path is not None:
        raise click.UsageError("--system and --system-file cannot be combined; give one")
    return text if path is None else read_file(path)


def need_template(model: infercore.Model, fields: Mapping[str, Any]) -> None:
    """Raise `UnsupportedFeatureError` where neither model nor caller has a chat template."""
    if not model.tokenizer.chat_template and "chat_template" not in fields:
        raise infercore.UnsupportedFeatureError(
            feature="chat",
            backend=model.backend,
            hint="this model has no chat template; give one with --template FILE, or use "
            "infercore generate",
        )
