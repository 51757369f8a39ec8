"""``infercore demo``: one story from every engine, and what a warm prefix saves."""

from __future__ import annotations

import importlib
from contextlib import closing
from time import perf_counter
from typing import TYPE_CHECKING, Any

import attrs
import click

import infercore
from infercore.cli.inspecting import missing
from infercore.cli.options import backend_names
from infercore.cli.terminal import print_json, print_table
from infercore.values import install

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


N_CTX = 1024
"""The window of the demo's sessions, in tokens: the model's trained one."""

MAX_TOKENS = 384
"""The most that a turn may generate; prefix and suffix fill the rest of the window."""


def _joined(text: str) -> str:
    """Undo the line breaks inside the paragraphs of ``text``."""
    return "\n\n".join(" ".join(part.split()) for part in text.strip().split("\n\n"))


PREFIX = (
    _joined("""
Once upon a time there was a painter named Lien, who lived near the pine forest. Lien was very
quiet, and everyone on the road knew it. Her best friend was Pavel, who never went anywhere
without a white cat.

One evening a letter came under the door. It was sealed with the sign 🎨 and it said: "Whoever
walks the road for three days will find the last colour." "Look twice and speak once," said
Lien. So she packed a silk brush and some rice with honey, called Pavel, and the two friends
closed the door without a sound.

On the first day they came to the old mill. Its wheel had not turned since the great storm. Out
of it came a dusty ghost, who was tired of the silence. Pavel looked at Lien and nodded. Lien
put down the silk brush and cleaned the wheel until it turned again. "How clever you are," said
the dusty ghost, and gave them a cup of white flour. That night they slept between two warm
sacks, and they shared the rice with honey.

On the second day the road led them to the market town. Forty coloured roofs leaned over one
crooked street. There they met a nervous mayor, who had forgotten how to ring the tower bell.
"That can be mended," said Pavel. Lien put down the silk brush and pulled the bell until every
window opened. "Thank you, friends," said the nervous mayor, and gave them a ribbon of yellow
silk. That night they slept above the rope shop, and Pavel told a joke.

On the third day they reached the glass lake. The water was so still that the clouds seemed to
swim in it. Right beside it sat an ancient pike, who wanted to hear news from the land. "That
can be mended," said Pavel. Lien put down the silk brush and told it all the news of the year.
"I will not forget it," said the ancient pike, and gave them a scale that shone like a coin.
That night they slept in a dry boat, and the white cat snored.

When the fourth morning came, something shone behind the glass lake. It was the last colour!
Lien could hardly believe it, and the white cat danced in a circle. They carried it home, and
at the door Lien said once more: "Look twice and speak once." From that day on she was faithful
to a friend. The end.
""")
    + "\n\n"
)
"""One whole story: what stays the same, 579 tokens of the storyteller's tokenizer."""

TURNS = {
    "cold": _joined("""
Once upon a time there was a baker named Mira, who lived near the stone bridge. Mira was very
patient, and everyone on the road knew it. Her best friend was
"""),
    "warm": _joined("""
Once upon a time there was a shepherd named Felix, who lived near the snow pass. Felix was very
careful, and even the birds knew it. His best friend was
"""),
}
"""What changes: how the next story begins, about 40 tokens each."""

WARM_UP = "Hello"
"""Generated from once before anything is measured; no beginning of it is in `PREFIX`."""


MODEL = "storyteller"
PACK_FORMATS = (("openvino", "openvino"), ("gguf", "gguf-f32"))


@attrs.frozen(kw_only=True)
class Turn:
    """One turn: what was reused and evaluated, and how long it took.

    ``first_text_ms`` counts from the call of ``ensure_prefix`` to the first chunk with text.
    """

    name: str
    reused_tokens: int
    prefilled_tokens: int
    completion_tokens: int
    first_text_ms: float | None
    tokens_per_second: float | None
    finish_reason: str | None
    text: str
    tokens: tuple[int, ...]


@attrs.frozen(kw_only=True)
class Run:
    """Both turns of one backend, and the costs that no reuse can save."""

    backend: str
    model: str
    load_ms: float
    tokenize_ms: float
    step_ms: float | None
    turns: tuple[Turn, ...]


def pack_format(formats: Sequence[str]) -> str | None:
    """Return the pack's format that a reader of ``formats`` takes, None where there is none."""
    return next((packed for read, packed in PACK_FORMATS if read in formats), None)


def model_path(backend: str, formats: Sequence[str]) -> str:
    """Return the demo's model in a format that the backend reads.

    Raises `ModelNotFoundError` where the pack is not installed, `UnsupportedFeatureError` where
    it has no such format.
    """
    try:
        pack = importlib.import_module("infercore_models")
    except ImportError as error:
        raise infercore.ModelNotFoundError(
            f"the demo's model is not installed; run: {install.model_pack()}",
            path="infercore_models",
        ) from error
    packed = pack_format(formats)
    if packed is not None:
        return str(pack.path(MODEL, packed))
    raise infercore.UnsupportedFeatureError(
        f"backend {backend} reads {', '.join(formats) or 'no format it names'}, and the demo's "
        "model is not there in that format; name other backends with --backend",
        feature="demo",
        backend=backend,
    )


def told_by(backend: str, path: str, max_tokens: int, write: Callable[[str], None]) -> Run:
    """Tell both stories with ``backend``. Raises what the model and the session raise."""
    begun = perf_counter()
    with infercore.load_model(path, backend=backend) as model:
        load_ms = _ms_since(begun)
        _warm_up(model)
        tokenize_ms = _tokenize_ms(model)
        turns = []
        with closing(_session(model)) as session:
            for name, suffix in TURNS.items():
                write(f"-- {backend}, {name} --\n{suffix}")
                turns.append(_turn(session, name, suffix, max_tokens, write))
                write("\n\n")
    return Run(
        backend=backend,
        model=MODEL,
        load_ms=load_ms,
        tokenize_ms=tokenize_ms,
        step_ms=_step_ms(turns),
        turns=tuple(turns),
    )


def same_text(runs: Sequence[Run]) -> bool | None:
    """Return whether all runs gave the same texts; None where there is only one."""
    if len(runs) < 2:  # noqa: PLR2004  (a comparison needs two)
        return None
    texts = {tuple((turn.text, turn.tokens) for turn in run.turns) for run in runs}
    return len(texts) == 1


def _session(model: infercore.Model) -> infercore.Session:
    return model.new_session(
        n_ctx=N_CTX, precision="accurate", flash_attn="off", type_k="f32", type_v="f32"
    )


def _warm_up(model: infercore.Model) -> None:
    """Let the engine do once what it does only once; nothing of it can be reused later."""
    with closing(_session(model)) as session:
        session.ensure_prefix(WARM_UP)
        for _ in session.decode(max_tokens=4, temperature=0):
            pass


def _tokenize_ms(model: infercore.Model) -> float:
    begun = perf_counter()
    model.tokenizer.encode(PREFIX)
    return _ms_since(begun)


def _turn(
    session: infercore.Session,
    name: str,
    suffix: str,
    max_tokens: int,
    write: Callable[[str], None],
) -> Turn:
    begun = perf_counter()
    first_text_ms = None
    chunks: list[infercore.StreamChunk] = []
    prefix_status = session.ensure_prefix(PREFIX)
    suffix_status = session.prefill_suffix(suffix)
    for chunk in session.decode(max_tokens=max_tokens, temperature=0):
        if chunk.text and first_text_ms is None:
            first_text_ms = _ms_since(begun)
        chunks.append(chunk)
        write(chunk.text)
    return Turn(
        name=name,
        reused_tokens=prefix_status.reused_tokens + suffix_status.reused_tokens,
        prefilled_tokens=prefix_status.prefilled_tokens + suffix_status.prefilled_tokens,
        first_text_ms=first_text_ms,
        **_generated(chunks),
    )


def _generated(chunks: Sequence[infercore.StreamChunk]) -> dict[str, Any]:
    """The fields of a `Turn` that its chunks carry."""
    last = chunks[-1]
    tokens = tuple(token for chunk in chunks for token in chunk.tokens)
    return {
        "completion_tokens": last.usage.completion_tokens if last.usage else len(tokens),
        "tokens_per_second": last.usage.tokens_per_second if last.usage else None,
        "finish_reason": last.finish_reason,
        "text": "".join(chunk.text for chunk in chunks),
        "tokens": tokens,
    }


def _step_ms(turns: Sequence[Turn]) -> float | None:
    """The time of one generated token, the mean over the turns."""
    speeds = [turn.tokens_per_second for turn in turns if turn.tokens_per_second]
    return sum(1000 / speed for speed in speeds) / len(speeds) if speeds else None


def _ms_since(begun: float) -> float:
    return (perf_counter() - begun) * 1000


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


@click.command(short_help="Tell a story with each engine; no model needed.")
@click.option(
    "--backend",
    "names",
    multiple=True,
    shell_complete=backend_names,
    help="A backend to show; may be repeated.",
)
@click.option(
    "--max-tokens",
    type=click.IntRange(1, MAX_TOKENS),
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
    same = same_text(runs)
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
    path = model_path(name, formats)
    return told_by(name, path, max_tokens, write)


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
    if pack_format(info.formats) is None:
        return f"reads {', '.join(info.formats) or 'no format it names'}, not the demo's model"
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


def _row(run: Run, turn: Turn, verdict: str) -> Sequence[Any]:
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
