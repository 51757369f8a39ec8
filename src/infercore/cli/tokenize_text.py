"""``infercore tokenize``: text to token ids with their pieces, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from infercore.cli.loading import loaded
from infercore.cli.options import SectionCommand, model_options
from infercore.cli.output import print_json, print_table
from infercore.cli.terminal import write
from infercore.cli.texts import read_file, read_stdin, stdin_is_piped, without_line_end

if TYPE_CHECKING:
    from infercore import Tokenizer


@click.command(cls=SectionCommand)
@model_options
@click.argument("texts", metavar="[TEXT]...", nargs=-1)
@click.option("-f", "--file", metavar="FILE", help="The text from FILE, taken as it is.")
@click.option("--decode", "decodes", is_flag=True, help="TEXT holds token ids; print their text.")
@click.option("--ids", "ids_only", is_flag=True, help="Print the ids alone, on one line.")
@click.option(
    "--no-special", is_flag=True,
    help="Add no token such as BOS; with --decode: leave control tokens out.",
)  # fmt: skip
@click.option("--no-parse-special", is_flag=True, help="The text of a control token stays text.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def tokenize(
    model: str,
    texts: tuple[str, ...],
    file: str | None,
    decodes: bool,  # noqa: FBT001  (click passes flags)
    **options: Any,
) -> None:
    """Print the tokens of TEXT: their ids, their exact bytes and how many there are.

    Several arguments are joined by blanks, as in a shell's echo. Without any, the text comes
    from standard input, its last line end left off.
    """
    if decodes and (options["ids_only"] or options["no_parse_special"]):
        raise click.UsageError("--decode excludes --ids and --no-parse-special")
    text = _text(texts, file)
    ids = _ids(text) if decodes else []
    with loaded(model, options) as opened:
        if decodes:
            _decode(opened.tokenizer, ids, options)
        else:
            _encode(opened.tokenizer, text, options)


def _text(texts: tuple[str, ...], file: str | None) -> str:
    if texts and file is not None:
        raise click.UsageError("give TEXT or --file, not both")
    if file is not None:
        return read_file(file)
    if not texts and not stdin_is_piped():
        raise click.UsageError("no text; give one, or a file with --file, or pipe one in")
    return " ".join(texts) if texts else without_line_end(read_stdin())


def _ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError as error:
        raise click.UsageError(f"--decode takes token ids such as 12 7 45 ({error})") from error


def _encode(tokenizer: Tokenizer, text: str, options: dict[str, Any]) -> None:
    ids = tokenizer.encode(
        text,
        add_special=not options["no_special"],
        parse_special=not options["no_parse_special"],
    )
    if options["as_json"]:
        told: dict[str, Any] = {"n_tokens": len(ids), "ids": ids}
        if not options["ids_only"]:
            told["tokens"] = [_facts(tokenizer, token) for token in ids]
        print_json(told)
    elif options["ids_only"]:
        click.echo(" ".join(map(str, ids)))
    else:
        pieces = [(i, token, quoted(tokenizer.token_bytes(token))) for i, token in enumerate(ids)]
        print_table(("place", "id", "piece"), pieces, right=("place", "id"))
        click.echo(f"{len(ids)} tokens")


def _facts(tokenizer: Tokenizer, token: int) -> dict[str, Any]:
    piece = tokenizer.token_bytes(token)
    return {
        "id": token,
        "text": piece.decode("utf-8", errors="replace"),
        "hex": piece.hex(),
        "control": tokenizer.is_control(token),
    }


def quoted(piece: bytes) -> str:
    """Return ``piece`` in quotes: as text where it is some, as bytes where it is a part of it."""
    try:
        return repr(piece.decode())
    except UnicodeDecodeError:
        return repr(piece)


def _decode(tokenizer: Tokenizer, ids: list[int], options: dict[str, Any]) -> None:
    text = tokenizer.decode(ids, skip_special=options["no_special"])
    if options["as_json"]:
        print_json({"n_tokens": len(ids), "ids": ids, "text": text})
    else:
        write(text + ("" if text.endswith("\n") else "\n"))
