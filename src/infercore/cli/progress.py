"""Bars on standard error while a model loads or a long text is evaluated; none in a pipe."""

from __future__ import annotations

import os
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from infercore.cli.terminal import in_a_cell, may_animate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from infercore import ContextReport

BAR_AFTER_S = 0.5
LOOK_EVERY_S = 0.2


def _bar() -> Any:
    from rich.console import Console  # noqa: PLC0415  (pipes need none of it)
    from rich.progress import (  # noqa: PLC0415
        BarColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
    )

    columns = (
        SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(),
        TextColumn("{task.fields[told]}", markup=False), TimeElapsedColumn(),
    )  # fmt: skip
    return Progress(*columns, console=Console(stderr=True), transient=True)


@contextmanager
def loading(path: str) -> Iterator[Callable[[float], object] | None]:
    """Show that ``path`` is being loaded; give what is to be called with the fraction loaded.

    The bar fills only where the engine tells the fraction. None without a terminal.
    """
    if not may_animate():
        yield None
        return
    with _bar() as bar:
        name = in_a_cell(os.path.basename(os.path.abspath(path)))
        task = bar.add_task(f"loading {name}", total=None, told="")

        def report(fraction: float) -> None:
            if 0 < fraction <= 1:
                bar.update(task, total=1.0, completed=fraction, told=f"{fraction:.0%}")

        yield report


@contextmanager
def counting(total: int) -> Iterator[Callable[[str], object]]:
    """Show how many of ``total`` parts are done; give what is called as each of them begins."""
    if not may_animate():
        yield lambda _: None
        return
    with _bar() as bar:
        task = bar.add_task("", total=total, told="")
        n_begun = 0

        def begin(name: str) -> None:
            nonlocal n_begun
            bar.update(task, completed=n_begun, description=name, told=f"{n_begun} of {total}")
            n_begun += 1

        yield begin


class PrefillBar:
    """A bar for the tokens of a text that the engine still has to evaluate.

    It comes up when that takes a while, and goes before the first text.
    """

    def __init__(self, report: Callable[[], ContextReport]) -> None:
        self._report = report
        self._begun = self._looked = time.perf_counter()
        self._bar: Any = None
        self._task: Any = None
        self._done = not may_animate()

    def look(self) -> None:
        """Draw how far the engine is; call it while waiting."""
        now = time.perf_counter()
        if self._done or now - self._begun < BAR_AFTER_S or now - self._looked < LOOK_EVERY_S:
            return
        self._looked = now
        report = self._report()
        if not report.pending_tokens:
            return
        held = report.resident_tokens + report.warm_tail_tokens
        total = held + report.pending_tokens
        if self._bar is None:
            self._bar = _bar()
            self._task = self._bar.add_task("reading the prompt", total=total, told="")
            self._bar.start()
        self._bar.update(self._task, total=total, completed=held, told=f"{held} of {total} tokens")

    def end(self) -> None:
        """Wipe the bar away, for good; idempotent."""
        self._done = True
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
