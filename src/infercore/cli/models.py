"""``infercore pull`` and ``infercore models``: fetch models, list them, give them aliases."""

from __future__ import annotations

import os

import attrs
import click

import infercore
from infercore.cli.options import SectionCommand, WholeSummaries
from infercore.cli.terminal import print_json, print_table, tell
from infercore.locating import hub, settings
from infercore.locating.locate import (
    HUB,
    PACK,
    is_name,
    locate,
    pack_models,
    readable_kinds,
    refuse_fetching,
)

COLUMNS = ("model", "size", "read by")
_SCALE = 1000


@click.command(
    cls=SectionCommand,
    examples=[
        "infercore pull hf:ORG/REPO",
        "infercore pull hf:ORG/REPO:Q8_0",
        "infercore pull hf:ORG/REPO:folder/file.gguf",
    ],
    short_help="Fetch models from the hub, or newer versions of them.",
)
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
def pull(names: tuple[str, ...]) -> None:
    """Fetch each model NAME from the hub, or its newer version; print where it is.

    A NAME is hf:ORG/REPO, hf:ORG/REPO:QUANT or hf:ORG/REPO:FILE. Files go to the cache of
    huggingface_hub, are compared with the hub's checksums, and are shared with other programs;
    HF_TOKEN or `hf auth login` gives access to gated models. `hf cache rm` deletes them.
    """
    aliases = settings.read().aliases
    wanted = [aliases.get(name, name) for name in names]
    for name in wanted:
        refuse_fetching(name)
        hub.parsed(name[len(HUB) :])
    for name in wanted:
        tell(f"fetching {name}")
        click.echo(hub.fetch(name[len(HUB) :], kinds=readable_kinds(), update=True))


@attrs.frozen(kw_only=True)
class Row:
    """A model that is here. ``path`` is None where there is none to load."""

    name: str
    path: str | None
    size_bytes: int | None
    read_by: tuple[str, ...]
    aliases: tuple[str, ...] = ()
    default: bool = False


@click.group(
    cls=WholeSummaries,
    invoke_without_command=True,
    short_help="List local models, aliases and the default model.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def models(ctx: click.Context, as_json: bool) -> None:  # noqa: FBT001  (click passes flags)
    """List the models that are here, with their aliases and the default.

    They are those of the hub's cache, of the model pack, and what aliases name.
    """
    if ctx.invoked_subcommand is not None:
        return
    rows = _rows()
    if as_json:
        print_json([attrs.asdict(row) for row in rows])
        return
    if not rows:
        click.echo("no models yet; fetch one with infercore pull hf:ORG/REPO")
        return
    print_table(COLUMNS, [_cells(row) for row in rows], right=("size",))


@models.command("alias")
@click.argument("alias")
@click.argument("model")
def set_alias(alias: str, model: str) -> None:
    """Let ALIAS mean MODEL, a path or a name, everywhere a model is named."""
    now = settings.read()
    kept = now.aliases[model] if _is_alias(model, now) else _checked(model)
    settings.write(settings.with_alias(now, alias, kept))
    tell(f"{alias} means {kept}")


@models.command("unalias")
@click.argument("alias")
def remove_alias(alias: str) -> None:
    """Take ALIAS away; where it is the default model, clear the default."""
    now = settings.with_alias(settings.read(), alias, None)
    was_default = now.default == alias
    settings.write(attrs.evolve(now, default=None) if was_default else now)
    tell(f"{alias} is no longer an alias")
    if was_default:
        tell("it was the default; the default is cleared")


@models.command("default")
@click.argument("model", required=False)
@click.option("--clear", is_flag=True, help="Clear the default.")
def set_default(model: str | None, clear: bool) -> None:  # noqa: FBT001  (click passes flags)
    """Take MODEL where a command names none; without MODEL, print the default."""
    now = settings.read()
    if model is None and not clear:
        shown = settings.default_model()
        click.echo("there is no default model" if shown is None else shown)
        return
    if model is not None and clear:
        raise click.UsageError("give MODEL or --clear, not both")
    kept = model if model is None or _is_alias(model, now) else _checked(model)
    settings.write(attrs.evolve(now, default=kept))
    tell("there is no default model" if kept is None else f"the default is {kept}")


def _is_alias(model: str, now: settings.Settings) -> bool:
    """Return whether ``model`` is an alias, and not a path that is there, which goes first."""
    return model in now.aliases and not os.path.exists(model)


def _checked(model: str) -> str:
    """Return a name as it is, a path in full. Raises `ModelNotFoundError` where nothing is."""
    if is_name(model):
        return model
    locate(model)
    return model if model.startswith("~") else os.path.abspath(model)


def _rows() -> list[Row]:
    now = settings.read()
    default = settings.default_model()
    found: dict[str, str | None] = dict(pack_models())
    sizes: dict[str, int] = {}
    for each in hub.held():
        name = f"{HUB}{each.repo}:{each.variant.label}"
        found[name], sizes[name] = each.path, each.size_bytes
    for target in {*now.aliases.values(), *([default] if default else [])}:
        if target not in found and target not in now.aliases:
            found[target] = _path_of(target)
    return [_row(name, path, sizes.get(name), now, default) for name, path in sorted(found.items())]


def _row(
    name: str, path: str | None, size: int | None, now: settings.Settings, default: str | None
) -> Row:
    names = {name, *(alias for alias, target in now.aliases.items() if target == name)}
    return Row(
        name=name,
        path=path,
        size_bytes=_size(path) if size is None and path is not None else size,
        read_by=() if path is None else tuple(_readers(name, path)),
        aliases=tuple(sorted(names - {name})),
        default=default in names,
    )


def _path_of(target: str) -> str | None:
    """Return where ``target`` is, None where it is not here (nothing is fetched)."""
    if target.startswith(HUB):
        return None
    try:
        return locate(target)
    except infercore.InferCoreError:
        return None


def _readers(name: str, path: str) -> list[str]:
    """Return the backends that read the model; the pack has some in several formats."""
    usable = [info.name for info in infercore.backends() if info.available]
    return [
        backend
        for backend in usable
        if infercore.get_backend(backend).match(_path_for(backend, name, path)) > 0
    ]


def _path_for(backend: str, name: str, path: str) -> str:
    if not name.startswith(PACK):
        return path
    try:
        return locate(name, backend=backend)
    except infercore.ModelNotFoundError:
        return path


def _size(path: str) -> int:
    if os.path.isfile(path):
        return os.path.getsize(path)
    folders = os.walk(path)
    return sum(
        os.path.getsize(os.path.join(at, name)) for at, _, names in folders for name in names
    )


def _cells(row: Row) -> tuple[str, ...]:
    more = [*row.aliases, *(["default"] if row.default else [])]
    name = row.name + (f" ({', '.join(more)})" if more else "")
    if row.path is None:
        return name, "", "not here"
    return name, _sized(row.size_bytes), ", ".join(row.read_by) or "nothing installed"


def _sized(n_bytes: int | None) -> str:
    value: float = n_bytes or 0
    for unit in ("B", "KB", "MB", "GB"):
        if value < _SCALE:
            return f"{value:.0f} {unit}" if value >= 10 or unit == "B" else f"{value:.1f} {unit}"  # noqa: PLR2004
        value /= _SCALE
    return f"{value:.1f} TB"
