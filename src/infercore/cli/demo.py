"""``infercore demo``: one story from every engine, and what a warm prefix saves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import click

import infercore
from infercore.cli import demo_run, demo_text
from infercore.cli.backends import missing
from infercore.cli.output import print_json, print_table

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from infercore.cli.demo_run import Run

COLUMNS = (
    "backend", "turn", "reused tokens", "prefilled tokens", "first text ms", "tokens/s", "text",
)  # fmt: skip
EXIT_TEXTS_DIFFER = 1
NOTE = """\
first text ms: one run, from the call of ensure_prefix until the first text arrives, so tokenizing,
prefill and the first step are in it; loading ({load}) and one short generation in
another session, which warms the engine up, came before.
The model is tiny, so what reuse cannot save weighs more here than with a real one: tokenizing the
prefix ({tokenize}) and one engine step for each token ({step}).
Settings, so that engines can be compared: greedy, flash attention off, float32 KV."""


@click.command()
@click.option("--backend", "names", multiple=True, help="A backend to show; may be repeated.")
@click.option(
    "--max-tokens",
    type=click.IntRange(1, demo_text.MAX_TOKENS),
    default=128,
    show_default=True,
    help="Tokens to generate in each turn.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON and no story.")
@click.pass_context
def demo(
    ctx: click.Context,
    names: tuple[str, ...],
    max_tokens: int,
    as_json: bool,  # noqa: FBT001  (click passes flags)
) -> None:
    """Tell the same story with each backend, then another one over the same prefix.

    Exits with status 1 where the backends' texts differ.
    """
    write = _silent if as_json else _write
    runs = [run(name, max_tokens, write) for name in _names(names, quiet=as_json)]
    same = demo_run.same_text(runs)
    if as_json:
        print_json({"same_text": same, "runs": [attrs.asdict(run) for run in runs]})
    else:
        _print(runs, same)
    if same is False:
        click.echo("error: the backends' texts differ", err=True)
        ctx.exit(EXIT_TEXTS_DIFFER)


def run(name: str, max_tokens: int, write: Callable[[str], None]) -> Run:
    """Return both turns of one backend, streamed to ``write`` as they come."""
    infercore.get_backend(name)  # raises what is wrong with it
    formats = next(info.formats for info in infercore.backends() if info.name == name)
    path = demo_run.model_path(name, formats)
    return demo_run.run(name, path, max_tokens, write)


def _names(asked: Sequence[str], *, quiet: bool) -> list[str]:
    """The backends to show; those that cannot run are told, unless they were asked for."""
    if asked:
        return list(dict.fromkeys(asked))
    infos = infercore.backends()
    reasons = {info.name: _left_out(info) for info in [*infos, *missing(infos)]}
    told = [f"{name}: {reason}" for name, reason in reasons.items() if reason]
    usable = [name for name, reason in reasons.items() if reason is None]
    if not usable:
        raise infercore.BackendNotFoundError(
            "no backend can be used here; " + "; ".join(told),
            candidates=[info.name for info in infos],
        )
    if not quiet:
        for text in told:
            click.echo(f"left out: {text}")
    return usable


def _left_out(info: infercore.BackendInfo) -> str | None:
    """Why the backend cannot be shown; None where it can."""
    if not info.available:
        return info.reason or "not available"
    if demo_run.pack_format(info.formats) is None:
        return f"reads {', '.join(info.formats) or 'nothing it tells of'}, not the demo's model"
    return None


def _write(text: str) -> None:
    click.echo(text, nl=False)


def _silent(text: str) -> None:
    """Drop ``text``."""


def _print(runs: Sequence[Run], same: bool | None) -> None:  # noqa: FBT001  (three answers)
    verdict = {True: "same", False: "DIFFERS", None: "only one"}[same]
    rows = [_row(run, turn, verdict) for run in runs for turn in run.turns]
    print_table(COLUMNS, rows, right=COLUMNS[2:6])
    click.echo(
        NOTE.format(
            load=_each(runs, "load_ms"),
            tokenize=_each(runs, "tokenize_ms"),
            step=_each(runs, "step_ms"),
        )
    )


def _row(run: Run, turn: demo_run.Turn, verdict: str) -> Sequence[Any]:
    return (
        run.backend,
        turn.name,
        turn.reused_tokens,
        turn.prefilled_tokens,
        _number(turn.first_text_ms),
        _number(turn.tokens_per_second),
        verdict,
    )


def _each(runs: Sequence[Run], field: str) -> str:
    return ", ".join(f"{run.backend} {_number(getattr(run, field))} ms" for run in runs)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
