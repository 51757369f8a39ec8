"""``infercore embed``: one vector for each text."""

from __future__ import annotations

import io
from typing import Any

import click

import infercore
from infercore.cli.loading import context_fields, loaded
from infercore.cli.options import CONTEXT, SectionCommand, context_options, model_and
from infercore.cli.terminal import (
    lines,
    print_json,
    print_json_line,
    read_file,
    read_stdin,
    stdin_is_piped,
    tell,
)
from infercore.engine import atomic

POOLING = ("mean", "cls", "last", "rank")
DECIDED = (
    "n_ctx", "n_batch", "n_ubatch", "n_seq_max", "kv_unified", "pooling_type", "on_oom",
    "n_ctx_min",
)  # fmt: skip
CONTEXT_FOR_VECTORS = tuple(name for name in CONTEXT if name not in DECIDED)
"""Fields of `ContextConfig` that texts and their pooling do not decide."""


@click.command(
    cls=SectionCommand,
    examples=[
        "infercore embed model.gguf 'some text'",
        "infercore embed -m model.gguf -f lines.txt",
    ],
    short_help="Print the embedding of each text.",
)
@model_and("texts")
@click.argument("texts", metavar="[TEXT]...", nargs=-1)
@click.option(
    "files", "-f", "--file", multiple=True, metavar="FILE",
    help="Texts from FILE, one per line; repeatable.",
)  # fmt: skip
@click.option(
    "--pooling", type=click.Choice(POOLING),
    help="How to pool the vectors of a text's tokens; default: the model's own way.",
)  # fmt: skip
@click.option(
    "--normalize/--no-normalize",
    default=True,
    show_default=True,
    help="Scale each vector to length 1.",
)
@click.option(
    "-o", "--output", metavar="FILE.npy", type=click.Path(dir_okay=False),
    help="Write a NumPy array, float32 [n_texts, n_embd], instead of printing vectors.",
)  # fmt: skip
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON document instead of one line per text."
)
@context_options(CONTEXT_FOR_VECTORS)
def embed(
    model: str,
    texts: tuple[str, ...],
    files: tuple[str, ...],
    output: str | None,
    as_json: bool,  # noqa: FBT001  (click passes flags)
    **options: Any,
) -> None:
    """Print the embedding of each TEXT as a line of JSON.

    Texts come from arguments and --file; without any, from standard input, one a line.
    """
    chosen = _texts(texts, files)
    how = {name: options[name] for name in ("pooling", "normalize")}
    fields = context_fields(model, options)
    with loaded(model, options, context=True) as opened:
        vectors = infercore.embed(opened, chosen, **how, **fields)
    shape = [len(chosen), int(vectors.shape[1])]
    if output is not None:
        _write(output, vectors)
        tell(f"wrote float32 {shape} to {output}")
    facts = {"model": model, **how, "shape": shape}
    if as_json:
        held = {"output": output} if output is not None else {"embeddings": vectors.tolist()}
        print_json({**facts, **held})
    elif output is None:
        for number, (text, vector) in enumerate(zip(chosen, vectors, strict=True)):
            line = {"number": number, "text": text, "embedding": vector.tolist()}
            print_json_line(line)


def _texts(texts: tuple[str, ...], files: tuple[str, ...]) -> list[str]:
    if not texts and not files and not stdin_is_piped():
        raise click.UsageError("no text; pass one, use --file, or pipe lines in")
    found = [*texts, *(line for path in files for line in lines(read_file(path)))]
    return found if texts or files else lines(read_stdin())


def _write(path: str, vectors: Any) -> None:
    import numpy as np  # noqa: PLC0415  (help needs none of it)

    held = io.BytesIO()
    np.save(held, vectors, allow_pickle=False)
    atomic.write_whole(path, held.getvalue())
