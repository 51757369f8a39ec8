"""``infercore bench``: how fast a model is on this machine, and what it holds."""

from __future__ import annotations

import os
from time import perf_counter
from typing import TYPE_CHECKING, Any

import attrs
import click
from click.core import ParameterSource

from infercore.cli.loading import context_fields, loaded, plain
from infercore.cli.options import (
    CONTEXT_FOR_TEXT,
    ParamType,
    SectionCommand,
    context_options,
    model_options,
)
from infercore.cli.terminal import counting, print_json, print_table, write
from infercore.measuring import machine, tuning
from infercore.measuring.parts import N_PREFILL, PARTS, Bench, Figure, Settings
from infercore.measuring.stats import number, spread

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import infercore
    from infercore.measuring.stats import Spread

TUNE_COLUMNS = ("setting", "prefill", "decode", "worth it")
COLUMNS = ("part", "what", "median", "range", "unit", "measured on")
NOTE = """\
Median of {runs} after a warm-up (cold and warm turns: all count).
On a busy machine these figures mean little: the load was {load} on {cpus} CPUs at the start."""


class Tokens(ParamType[tuple[int, ...]]):
    """Numbers of tokens, with commas between them."""

    name = "N,N,..."

    def convert(
        self,
        value: Any,
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> tuple[int, ...]:
        """Return the numbers; anything but integers of at least 1 is a usage error."""
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(int(part) for part in str(value).split(","))
        except ValueError:
            numbers = ()
        if not numbers or min(numbers) < 1:
            self.fail(f"{value!r} is not a list of numbers such as 128,2048", param, ctx)
        return numbers


@click.command(
    cls=SectionCommand,
    examples=["infercore bench model.gguf", "infercore bench model.gguf --tune"],
    short_help="Measure a model on this machine.",
)
@model_options
@click.option(
    "--only",
    multiple=True,
    type=click.Choice(list(PARTS)),
    metavar="PART",
    help=f"A part to measure ({', '.join(PARTS)}); repeatable.",
)
@click.option(
    "--prefix-tokens",
    type=Tokens(),
    default="128,512,2048",
    show_default=True,
    help="Prefix lengths for the first-token measurement.",
)
@click.option(
    "--suffix-tokens",
    type=click.IntRange(1),
    default=32,
    show_default=True,
    metavar="N",
    help="Tokens after the prefix.",
)
@click.option(
    "--decode-tokens",
    type=click.IntRange(2),
    default=64,
    show_default=True,
    metavar="N",
    help="Tokens to generate.",
)
@click.option(
    "--repeats",
    type=click.IntRange(1, 100),
    default=3,
    show_default=True,
    metavar="N",
    help="Runs of each part; the median is reported.",
)
@click.option(
    "--tune", "tunes", is_flag=True, help="Compare other settings with the defaults instead."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@context_options(CONTEXT_FOR_TEXT)
def bench(
    model: str,
    only: tuple[str, ...],
    as_json: bool,  # noqa: FBT001  (click passes flags)
    tunes: bool,  # noqa: FBT001
    **options: Any,
) -> None:
    """Measure MODEL on this machine.

    Prefill and decode, the time to the first token over a cold and a warm prefix, saving,
    restoring and forking a session, memory against the plan, and what infercore itself costs a
    token. Nothing but infercore and the engine is needed. With --tune: threads, compute steps,
    flash attention and KV types other than those in force, each in turns with them; one number
    of --prefix-tokens says how much is prefilled then.
    """
    names = [field.name for field in attrs.fields(Settings)]
    settings = Settings(**{name: options[name] for name in names})
    context = context_fields(model, options)
    if tunes:
        _tune(model, options, context, settings, as_json=as_json)
        return
    here, held = machine.machine(), machine.resident_bytes()
    begun = perf_counter()
    with loaded(model, options, context=True) as opened:
        load_ms = spread([(perf_counter() - begun) * 1e3])
        measuring = Bench(opened, settings, held_before=held, context=context)
        figures = _measure(measuring, [p for p in PARTS if p in only or not only])
        about = {**_about(opened, model), "n_ctx": measuring.n_ctx}
    figures = [Figure(part="load", name="model", unit="ms", value=load_ms), *figures]
    if as_json:
        told = {"model": about, "settings": attrs.asdict(settings), "context": _told(context)}
        told |= {"machine": here, "versions": machine.versions()}
        told |= {"left_out": measuring.left_out}
        print_json({**told, "figures": [attrs.asdict(figure) for figure in figures]})
        return
    _print(about, figures, measuring.left_out)
    runs = "1 run" if settings.repeats == 1 else f"{settings.repeats} runs"
    click.echo(NOTE.format(runs=runs, load=here["load_average"], cpus=here["cpus"]))


def _tune(
    path: str,
    options: dict[str, Any],
    context: dict[str, Any],
    settings: Settings,
    *,
    as_json: bool,
) -> None:
    n_prefill = _n_tuned(settings)
    with loaded(path, options, context=True) as opened:
        tried, refused = tuning.tune(
            opened,
            context,
            n_prefill=n_prefill,
            n_decode=settings.decode_tokens,
            repeats=settings.repeats,
        )
    if as_json:
        told = [{**attrs.asdict(each), "worth": each.is_worth_it} for each in tried]
        print_json({"tried": told, "refused": refused, "machine": machine.machine()})
        return
    _show(tried, refused)


def _n_tuned(settings: Settings) -> int:
    """Return how many tokens to prefill. An option that tuning cannot honour is a usage error."""
    source = click.get_current_context().get_parameter_source
    for name in ("only", "suffix_tokens"):
        if source(name) is not ParameterSource.DEFAULT:
            raise click.UsageError(f"--tune excludes --{name.replace('_', '-')}; give one")
    if source("prefix_tokens") is ParameterSource.DEFAULT:
        return 2 * N_PREFILL
    if len(settings.prefix_tokens) > 1:
        raise click.UsageError("--tune takes one number of --prefix-tokens")
    return settings.prefix_tokens[0]


def _measure(measuring: Bench, parts: Sequence[str]) -> list[Figure]:
    """The figures of ``parts``; what has none stands in `Bench.left_out`."""
    figures: list[Figure] = []
    with counting(len(parts)) as begin:
        for part in parts:
            begin(part)
            figures += measuring.run(part)
    return figures


def _told(context: dict[str, Any]) -> dict[str, Any]:
    """The fields of the context as JSON can hold them."""
    adapters = [plain(adapter) for adapter in context.get("adapters", ())]
    return {**context, **({"adapters": adapters} if adapters else {})}


def _about(model: infercore.Model, path: str) -> dict[str, Any]:
    info = model.info
    return {
        "file": os.path.basename(os.path.normpath(path)),
        "backend": model.backend,
        "architecture": info.architecture,
        "n_params": info.n_params,
        "size_bytes": info.size_bytes,
        "n_vocab": info.n_vocab,
        "n_layer": info.n_layer,
        "n_ctx_train": info.n_ctx_train,
    }


def _print(about: dict[str, Any], figures: Sequence[Figure], left_out: dict[str, str]) -> None:
    write(
        f"{about['file']}: {about['architecture']}, {about['n_params'] / 1e6:.0f} million weights, "
        f"{about['size_bytes'] / 2**20:.0f} MiB, on {about['backend']}\n"
    )
    print_table(COLUMNS, [_row(figure) for figure in figures], right=COLUMNS[2:4])
    for part, reason in left_out.items():
        click.echo(f"left out: {part}: {reason}")


def _row(figure: Figure) -> Sequence[str]:
    value = figure.value
    between = f"{number(value.low)} to {number(value.high)}" if value.n > 1 else ""
    return (figure.part, figure.name, number(value.median), between, figure.unit, figure.note)


def _show(tried: Sequence[tuning.Tried], refused: Mapping[str, str]) -> None:
    """Print the settings, the best first, and what to do."""
    order = sorted(tried, key=lambda t: -t.best)
    rows = [(t.name, _cell(t.prefill), _cell(t.decode), "yes" * t.is_worth_it) for t in order]
    print_table(TUNE_COLUMNS, rows, right=TUNE_COLUMNS[1:3])
    for name, reason in refused.items():
        write(f"refused: {name}: {reason}\n")
    worth = [t.name for t in order if t.is_worth_it]
    if not tried:
        write("Nothing could be tried here.\n")
    elif worth:
        write("Worth changing here (1.05 times the default or more): " + "; ".join(worth) + "\n")
    else:
        write("Nothing worth changing: the defaults are the fastest settings here.\n")


def _cell(value: Spread) -> str:
    return f"{number(value.median)} ({number(value.low)} to {number(value.high)})"
