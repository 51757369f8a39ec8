"""Draw the plots and fill in the tables of the pages, from the files that the scripts wrote.

    python benchmarks/report.py

The same results give the same bytes. A table stands between two marks on its page.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from goals import GOALS, SPREAD, rows_of

from infercore.measuring.stats import number

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

mpl.use("svg")
mpl.rcParams.update(
    {
        "svg.hashsalt": "infercore",
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "figure.constrained_layout.use": True,
    }
)

from matplotlib import pyplot as plt  # noqa: E402  (after the backend is chosen)
from matplotlib import ticker  # noqa: E402

HERE = Path(__file__).parent
DOCS = HERE.parent / "docs"
OWN, OTHER = "#1f6f8b", "#c0b7a6"
Rows = "list[dict[str, Any]]"
BEGIN, END = "<!-- results: {name} -->", "<!-- results end -->"


def read(results: Path) -> dict[str, dict[str, Any]]:
    """Return what the files of ``results`` hold, by their names without the ending."""
    files = sorted(results.glob("*.json"))
    return {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in files}


def plain(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The figures themselves, without the ratios."""
    return [row for row in rows if not row["figure"].endswith(", ratio")]


# -- plots -----------------------------------------------------------------------------------------


def bars(axes: Any, rows: Sequence[dict[str, Any]], title: str, unit: str) -> None:
    """A bar for each contender, with the range of its rounds; ours in our colour."""
    names = [row["by"] for row in rows]
    middles = [row["value"]["median"] for row in rows]
    sides = [
        [m - row["value"]["low"] for m, row in zip(middles, rows, strict=True)],
        [row["value"]["high"] - m for m, row in zip(middles, rows, strict=True)],
    ]
    colours = [OWN if is_own(name) else OTHER for name in names]
    axes.barh(names, middles, xerr=sides, color=colours, height=0.65, ecolor="#555555")
    axes.invert_yaxis()
    axes.set_title(title, loc="left", x=-0.45)
    axes.set_xlabel(unit)


def is_own(name: str) -> bool:
    return name.startswith(("infercore", "Session", "one ", "contexts", "plan_memory", "into"))


def draw_throughput(told: dict[str, dict[str, Any]]) -> Any:
    figures: dict[tuple[str, str], list[dict[str, Any]]] = {}
    names = ("throughput-gguf", "throughput-ir", "throughput-1b")
    for row in plain(rows_of(told, *names)):
        figures.setdefault((row["model"], row["figure"]), []).append(row)
    if not figures:
        return None
    n = len(figures)
    figure, grid = plt.subplots(-(-n // 2), 2, figsize=(9.5, 1.9 * -(-n // 2)), squeeze=False)
    for axes, (key, rows) in zip(grid.flat, figures.items(), strict=False):
        bars(axes, rows, f"{key[0]}: {key[1]}", rows[0]["unit"])
    for axes in grid.flat[n:]:
        axes.set_visible(False)
    return figure


def draw_first_token(told: dict[str, dict[str, Any]]) -> Any:
    lines: dict[str, dict[tuple[str, str], list[tuple[int, dict[str, float]]]]] = {}
    names = [name for name in told if name.startswith("warm-prefix") and name != SPREAD]
    for row in plain(rows_of(told, *names)):
        kind, length = re.match(r"(\w+), (\d+)", row["figure"]).groups()  # type: ignore[union-attr]
        of_model = lines.setdefault(row["model"], {})
        of_model.setdefault((row["by"], kind), []).append((int(length), row["value"]))
    if not lines:
        return None
    figure, grid = plt.subplots(1, len(lines), figsize=(9.5, 3.6), sharey=True, squeeze=False)
    for axes, (model, found) in zip(grid.flat, lines.items(), strict=True):
        for (by, kind), points in found.items():
            points.sort(key=lambda point: point[0])
            style = {"color": OWN if is_own(by) else "#8a7f6a", "marker": "o", "markersize": 4}
            style["linestyle"] = "-" if kind == "warm" else "--"
            values = [value["median"] for _, value in points]
            axes.plot([n for n, _ in points], values, label=f"{by}, {kind}", **style)
        axes.set(xscale="log", yscale="log", xlabel="tokens of the prefix", title=model)
        lengths = sorted({n for points in found.values() for n, _ in points})
        axes.set_xticks(lengths, [str(n) for n in lengths])
        axes.minorticks_off()
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda ms, _: f"{ms:g}"))
        axes.grid(visible=True, which="major", axis="y", color="#dddddd")
        axes.legend(frameon=False, fontsize=8)
    grid[0][0].set_ylabel("ms to the first token")
    return figure


def draw_agent_loop(told: dict[str, dict[str, Any]]) -> Any:
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in plain(rows_of(told, "agent-loop-hybrid", "agent-loop")):
        if row["figure"].endswith(", all"):
            found.setdefault((row["model"], row["figure"].removesuffix(", all")), []).append(row)
    if not found:
        return None
    figure, grid = plt.subplots(len(found), 1, figsize=(7.5, 1.25 * len(found)), squeeze=False)
    for axes, ((model, name), rows) in zip(grid.flat, found.items(), strict=True):
        bars(axes, rows, f"{model}: {name}", "s")
    return figure


def draw_memory(told: dict[str, dict[str, Any]]) -> Any:
    models: dict[str, list[dict[str, Any]]] = {}
    for row in plain(rows_of(told, "memory")):
        models.setdefault(row["model"], []).append(row)
    if not models:
        return None
    figure, grid = plt.subplots(1, len(models), figsize=(9.5, 1.7), squeeze=False)
    for axes, (model, rows) in zip(grid.flat, models.items(), strict=True):
        bars(axes, rows, f"{model}: {rows[0]['figure']}", "MiB")
    return figure


PLOTS: dict[str, Callable[[dict[str, dict[str, Any]]], Any]] = {
    "throughput": draw_throughput,
    "first-token": draw_first_token,
    "agent-loop": draw_agent_loop,
    "memory": draw_memory,
}


def draw(told: dict[str, dict[str, Any]], folder: Path) -> None:
    """Write a plot for each kind of result that there is."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, work in PLOTS.items():
        figure = work(told)
        if figure is not None:
            path = folder / f"bench-{name}.svg"
            figure.savefig(path, format="svg", metadata={"Date": None, "Creator": "infercore"})
            plt.close(figure)
            path.write_text(trimmed(path.read_text(encoding="utf-8")), encoding="utf-8")


def trimmed(text: str) -> str:
    """Without blanks at the ends of lines, which matplotlib leaves."""
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


# -- tables ----------------------------------------------------------------------------------------


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A table of ``rows``: medians with their ranges."""
    lines = ["| model | measured | by | median | range | |", "|---|---|---|---|---|---|"]
    for row in rows:
        value = row["value"]
        between = f"{number(value['low'])} to {number(value['high'])}" if value["n"] > 1 else ""
        what = f"{row['unit']}; {row['note']}" if row["note"] else row["unit"]
        cells = (row["model"], row["figure"], row["by"], number(value["median"]), between, what)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def goals(told: dict[str, dict[str, Any]]) -> str:
    """The table of goals."""
    head = "| goal | model | of | bound | measured | |\n|---|---|---|---|---|---|"
    return "\n".join([head, *filter(None, (goal.line(told) for goal in GOALS))])


def told_of(name: str, told: dict[str, dict[str, Any]]) -> str:
    """What stands between the marks ``name``: for each file the command, the load, the table."""
    if name == "machine":
        return machine(told)
    if name == "goals":
        return goals(told)
    parts = [part for part in told if part == name or part.startswith(f"{name}-")]
    texts = []
    for part in parts:
        load, cpus = (told[part]["machine"][key] for key in ("load_average", "cpus"))
        texts.append(
            f"`{told[part]['command']}` (load {load} on {cpus} CPUs when it ended):\n\n"
            f"{table(told[part]['rows'])}"
        )
    return "\n\n".join(texts) or "Not measured yet."


def machine(told: dict[str, dict[str, Any]]) -> str:
    """The machine and the versions, of which all results must be."""
    kinds = {
        json.dumps([_constant(part["machine"]), part["versions"]], sort_keys=True)
        for part in told.values()
    }
    texts = []
    for kind in sorted(kinds):
        here, versions = json.loads(kind)
        packages = ", ".join(f"{name} {version}" for name, version in versions.items())
        texts.append(
            f"{here['processor']}, {here['cpus']} CPUs ({', '.join(here['features'])}), "
            f"{here['memory_gib']} GiB, {here['system']} {here['architecture']}; {packages}."
        )
    return "\n\n".join(texts)


def _constant(machine: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in machine.items() if key != "load_average"}


def fill(page: Path, told: dict[str, dict[str, Any]]) -> None:
    """Write the tables between the marks of ``page``."""
    text = page.read_text(encoding="utf-8")
    pattern = re.compile(
        re.escape(BEGIN).replace(re.escape("{name}"), r"([\w-]+)") + r"\n.*?" + re.escape(END),
        re.DOTALL,
    )

    def filled(found: re.Match[str]) -> str:
        name = found[1]
        return f"{BEGIN.format(name=name)}\n\n{told_of(name, told)}\n\n{END}"

    page.write_text(pattern.sub(filled, text), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--plots", type=Path, default=DOCS / "_static")
    parser.add_argument("--page", type=Path, action="append", help="default: those of this tree")
    options = parser.parse_args()
    told = read(options.results)
    draw(told, options.plots)
    for page in options.page or (DOCS / "benchmarks.md", HERE / "README.md"):
        fill(page, told)


if __name__ == "__main__":
    main()
