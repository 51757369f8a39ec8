"""What there is, and what a model makes of texts.

``infercore backends``, ``inspect``, ``plan``, ``tokenize`` and ``embed``.
"""

from __future__ import annotations

import fnmatch
import io
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs
import click

import infercore
from infercore.cli.loading import context_fields, loaded, plain, plan_fields
from infercore.cli.options import (
    CONTEXT,
    SectionCommand,
    context_options,
    given,
    model_and,
    model_options,
    pool_options,
)
from infercore.cli.terminal import (
    lines,
    mebibytes,
    print_json,
    print_json_line,
    print_table,
    read_file,
    read_stdin,
    say,
    stdin_is_piped,
    tell,
    without_line_end,
    write,
)
from infercore.engine import atomic
from infercore.locating import locate
from infercore.registry.known import KNOWN
from infercore.values import memory
from infercore.values.pool import PoolConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

    from infercore import MemoryPlan, Model, Tokenizer


COLUMNS = ("name", "usable", "version", "formats", "distribution")
DEVICE_COLUMNS = ("backend", "device", "kind", "description", "memory MiB")


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--devices", is_flag=True, help="List devices too; this imports the engines.")
def backends(as_json: bool, devices: bool) -> None:  # noqa: FBT001  (click passes flags)
    """List the backends, with the reason why one cannot be used."""
    infos = [*infercore.backends(devices=devices)]
    infos += missing(infos)
    if as_json:
        print_json([attrs.asdict(info) for info in infos])
        return
    rows = [_of_backend(info) for info in infos]
    shown = [i for i, name in enumerate(COLUMNS) if name == "name" or any(row[i] for row in rows)]
    print_table([COLUMNS[i] for i in shown], [[row[i] for i in shown] for row in rows])
    for info in infos:
        if info.reason:
            say(f"{info.name}: {info.reason}")
    if devices:
        rows = [row for info in infos for row in _device_rows(info)]
        print_table(DEVICE_COLUMNS, rows, right=("memory MiB",))


def missing(infos: Sequence[infercore.BackendInfo]) -> list[infercore.BackendInfo]:
    """Return the backends of this project that are not among ``infos``, with the command."""
    names = {info.name for info in infos}
    return [
        infercore.BackendInfo(
            name=known.name, available=False, reason=f"not installed; run: {known.install}"
        )
        for known in KNOWN.values()
        if known.name not in names
    ]


def _of_backend(info: infercore.BackendInfo) -> Sequence[str]:
    parts = [part for part in (info.distribution, info.plugin_version) if part]
    return (
        info.name,
        "yes" if info.available else "no",
        info.version or "",
        ", ".join(info.formats),
        " ".join(parts),
    )


def _device_rows(info: infercore.BackendInfo) -> list[Sequence[str]]:
    return [
        (info.name, device.name, device.kind, device.description, _mebibytes(device))
        for device in info.devices
    ]


def _mebibytes(device: infercore.DeviceInfo) -> str:
    total = device.memory_total_bytes
    return "" if total is None else str(total // 2**20)


WIDEST_VALUE = 100
EMPTY = ""
SPECIAL = ("bos", "eos", "eot")


@click.command(
    cls=SectionCommand,
    examples=["infercore inspect pack:storyteller --metadata '*rope*'"],
    short_help="Load a model and describe it.",
)
@model_options
@click.option(
    "patterns", "--metadata", multiple=True, metavar="PATTERN",
    help="Show only metadata with matching keys, such as '*rope*'; repeatable.",
)  # fmt: skip
@click.option("--no-metadata", is_flag=True, help="Show no metadata.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with nothing truncated.")
def inspect(
    model: str,
    patterns: tuple[str, ...],
    no_metadata: bool,  # noqa: FBT001  (click passes flags)
    as_json: bool,  # noqa: FBT001
    **options: Any,
) -> None:
    """Load MODEL and show what it is: shape, tokenizer, capabilities, digest, metadata.

    It also shows which backends can read the file, and how to install one that is missing.
    """
    if patterns and no_metadata:
        raise click.UsageError("--metadata and --no-metadata cannot be combined; give one")
    with loaded(model, options) as opened:
        facts = _facts(opened, model)
    shown = {} if no_metadata else _matching(facts["metadata"], patterns)
    facts["metadata"] = shown
    if as_json:
        print_json(facts)
        return
    rows = [("path", model), *_rows(facts)]
    print_table(("what", "value"), [row for row in rows if row[1] != EMPTY])
    print_table(("capability", "value"), list(_flat(facts["capabilities"])))
    print_table(("backend", "reads it", "why"), [tuple(row.values()) for row in facts["readers"]])
    if shown:
        print_table(("metadata", "value"), [(key, _short(value)) for key, value in shown.items()])


def _facts(model: Model, path: str) -> dict[str, Any]:
    info = plain(model.info)
    return {
        "path": path,
        "backend": model.backend,
        "digest": model.digest,
        "info": {name: value for name, value in info.items() if name != "metadata"},
        "tokenizer": _tokenizer(model.tokenizer),
        "capabilities": plain(model.capabilities),
        "readers": _readers(locate(path, backend=model.backend)),
        "metadata": dict(sorted(info["metadata"].items())),
    }


def _tokenizer(tokenizer: Tokenizer) -> dict[str, Any]:
    ids = {name: getattr(tokenizer, name) for name in SPECIAL}
    return {
        "n_vocab": tokenizer.n_vocab,
        **{name: None if i is None else _special(tokenizer, i) for name, i in ids.items()},
        "digest": tokenizer.digest,
        "chat_template": tokenizer.chat_template,
    }


def _special(tokenizer: Tokenizer, token: int) -> dict[str, Any]:
    return {"id": token, "text": tokenizer.token_bytes(token).decode("utf-8", errors="replace")}


def _readers(path: str) -> list[dict[str, str]]:
    """Return each backend with whether it reads the path, and why not."""
    rows = []
    infos = infercore.backends()
    for info in infos:
        if not info.available:
            rows.append((info.name, "no", info.reason or "not available"))
            continue
        reads = infercore.get_backend(info.name).match(path) > 0
        formats = f"reads {', '.join(info.formats)}" if info.formats else ""
        rows.append((info.name, "yes" if reads else "no", formats))
    for info in missing(infos):
        reads = KNOWN[info.name].looks_like(path)
        rows.append((info.name, "would" if reads else "no", info.reason or ""))
    return [dict(zip(("backend", "reads", "why"), row, strict=True)) for row in rows]


def _matching(metadata: Mapping[str, str], patterns: Sequence[str]) -> dict[str, str]:
    """Return the entries that a pattern names, all of them without any."""
    return {
        key: value
        for key, value in metadata.items()
        if not patterns or any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)
    }


def _rows(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    info, tokenizer = facts["info"], facts["tokenizer"]
    rows = [("backend", facts["backend"]), ("digest", facts["digest"])]
    rows += [(name, _of_info(name, value)) for name, value in info.items()]
    rows.append(("tokenizer digest", tokenizer["digest"]))
    for name in SPECIAL:
        token = tokenizer[name]
        rows.append((name, "none" if token is None else f"{token['id']} {token['text']}"))
    template = tokenizer["chat_template"]
    rows.append(("chat template", f"yes, {len(template)} characters" if template else "no"))
    return rows


def _of_info(name: str, value: Any) -> str:
    if name == "size_bytes":
        return f"{value} ({mebibytes(value)} MiB)"
    return _word(value)


def _flat(capabilities: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(name, _word(value)) for name, value in capabilities.items()]


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {item}" for key, item in value.items()) or EMPTY
    return "none" if value is None else str(value)


def _short(value: str) -> str:
    """Return ``value``, cut where it would fill the screen."""
    if len(value) <= WIDEST_VALUE:
        return value
    return f"{value[:WIDEST_VALUE]}... ({len(value)} characters; --json shows all)"


EXIT_DOES_NOT_FIT = 1
PLANNED = ("n_parallel", "n_cells", "batch_invariant")
"""Fields of `PoolConfig` on which the memory of its context depends."""


@click.command(
    cls=SectionCommand,
    examples=[
        "infercore plan model.gguf -c 8192",
        "infercore plan model.gguf --type-k q8_0",
        "infercore plan model.gguf -c 4096 -np 8",
    ],
    short_help="Show how much memory a model will take.",
)
@model_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON; sizes in bytes.")
@context_options()
@pool_options(PLANNED)
@click.pass_context
def plan(
    ctx: click.Context,
    /,
    model: str,
    as_json: bool,  # noqa: FBT001  (click passes flags)
    **options: Any,
) -> None:
    """Show how much memory MODEL and a context will take, without loading it.

    With an option of a pool, the context is the one that the pool's sessions share. The sum is set
    against the memory that is free on this machine now. It counts all devices together; infercore
    backends --devices shows what a GPU has. Exit status: 0 where it fits, 1 where it does not.
    """
    fields = {**plan_fields(model, options), **given(PoolConfig, options)}
    found = infercore.plan_memory(model, backend=options["backend"], **fields)
    free = free_bytes()
    fits = found.peak_bytes <= free
    if as_json:
        print_json({**plain(found), "total_bytes": found.total_bytes, "free_bytes": free,
                    "fits": fits})  # fmt: skip
    else:
        print_table(
            ("what", "MiB"), [*_parts(found), ("free now", mebibytes(free))], right=("MiB",)
        )
        verdict = "fits" if fits else "DOES NOT FIT"
        click.echo(f"{verdict}: n_ctx {found.n_ctx}, peak {mebibytes(found.peak_bytes)} MiB of "
                   f"{mebibytes(free)} MiB free")  # fmt: skip
    if not fits:
        ctx.exit(EXIT_DOES_NOT_FIT)


def _parts(found: MemoryPlan) -> list[tuple[str, str]]:
    kinds = sorted(found.kv_bytes_by_kind.items())
    parts = [
        ("weights", found.weights_bytes),
        *[(f"KV cache, {kind}", n_bytes) for kind, n_bytes in kinds],
        *([] if kinds else [("KV cache", found.kv_bytes)]),
        ("compute", found.compute_bytes),
        ("sum", found.total_bytes),
        ("peak, loading included", found.peak_bytes),
    ]
    return [(name, mebibytes(n_bytes)) for name, n_bytes in parts]


def free_bytes() -> int:
    """Return the memory that programs may still take here, a container's limit included."""
    import psutil  # noqa: PLC0415  (help needs none of it)

    return min(int(psutil.virtual_memory().available), memory.free_bytes())


@click.command(
    cls=SectionCommand,
    examples=["infercore tokenize pack:storyteller 'Once upon a time'"],
    short_help="Turn text into tokens, or tokens into text.",
)
@model_and("texts")
@click.argument("texts", metavar="[TEXT]...", nargs=-1)
@click.option("-f", "--file", metavar="FILE", help="The text from FILE, unchanged.")
@click.option(
    "--decode", "decodes", is_flag=True, help="Treat TEXT as token ids, and print their text."
)
@click.option("--ids", "ids_only", is_flag=True, help="Print only the ids, on one line.")
@click.option(
    "--no-special", is_flag=True,
    help="Do not add tokens such as BOS; with --decode: omit control tokens.",
)  # fmt: skip
@click.option(
    "--no-parse-special", is_flag=True, help="Treat the text of control tokens as plain text."
)
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
        raise click.UsageError("no text; pass one, use --file, or pipe text in")
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
            told["tokens"] = [_piece(tokenizer, token) for token in ids]
        print_json(told)
    elif options["ids_only"]:
        click.echo(" ".join(map(str, ids)))
    else:
        pieces = [(i, token, quoted(tokenizer.token_bytes(token))) for i, token in enumerate(ids)]
        print_table(("place", "id", "piece"), pieces, right=("place", "id"))
        click.echo(f"{len(ids)} tokens")


def _piece(tokenizer: Tokenizer, token: int) -> dict[str, Any]:
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
    chosen = _texts_of(texts, files)
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


def _texts_of(texts: tuple[str, ...], files: tuple[str, ...]) -> list[str]:
    if not texts and not files and not stdin_is_piped():
        raise click.UsageError("no text; pass one, use --file, or pipe lines in")
    found = [*texts, *(line for path in files for line in lines(read_file(path)))]
    return found if texts or files else lines(read_stdin())


def _write(path: str, vectors: Any) -> None:
    import numpy as np  # noqa: PLC0415  (help needs none of it)

    held = io.BytesIO()
    np.save(held, vectors, allow_pickle=False)
    atomic.write_whole(path, held.getvalue())
