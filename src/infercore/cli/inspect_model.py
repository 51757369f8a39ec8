"""``infercore inspect``: what a model is, from a real load of it."""

from __future__ import annotations

import fnmatch
from typing import TYPE_CHECKING, Any

import click

import infercore
from infercore.cli.backends import missing
from infercore.cli.loading import loaded, plain
from infercore.cli.options import SectionCommand, model_options
from infercore.cli.output import mebibytes, print_json, print_table
from infercore.registry.known import KNOWN

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from infercore import Model, Tokenizer

WIDEST_VALUE = 100
SPECIAL = ("bos", "eos", "eot")


@click.command(cls=SectionCommand)
@model_options
@click.option(
    "patterns", "--metadata", multiple=True, metavar="PATTERN",
    help="Show only metadata whose key matches, such as '*rope*'; repeatable.",
)  # fmt: skip
@click.option("--no-metadata", is_flag=True, help="Show no metadata.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with nothing cut short.")
def inspect(
    model: str,
    patterns: tuple[str, ...],
    no_metadata: bool,  # noqa: FBT001  (click passes flags)
    as_json: bool,  # noqa: FBT001
    **options: Any,
) -> None:
    """Load MODEL and tell what it is: shape, tokenizer, capabilities, digest, metadata.

    It also tells which backends can read the file, and how to install one that is missing.
    """
    if patterns and no_metadata:
        raise click.UsageError("--metadata and --no-metadata exclude each other; give one")
    with loaded(model, options) as opened:
        facts = _facts(opened, model)
    shown = {} if no_metadata else _matching(facts["metadata"], patterns)
    facts["metadata"] = shown
    if as_json:
        print_json(facts)
        return
    rows = [("path", model), *_rows(facts)]
    print_table(("what", "value"), rows)
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
        "readers": _readers(path),
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
    return "none" if value is None else str(value)


def _short(value: str) -> str:
    """Return ``value``, cut where it would fill the screen."""
    if len(value) <= WIDEST_VALUE:
        return value
    return f"{value[:WIDEST_VALUE]}... ({len(value)} characters; --json shows all)"
