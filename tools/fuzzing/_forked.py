"""Loads a made-up file as a first load does: tried in a child, then loaded; each in a fork.

A first load starts a Python for its trial, which takes seconds on a busy machine. Here the process
that has imported all of it, and started no engine, forks once for the trial and once for the load.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import traceback
from typing import TYPE_CHECKING, Any

import infercore as ic
from fuzzing import Patience, Wrong
from infercore import trial
from infercore.registry import default_registry

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

DEATH, HANG = "death", "hang"
TRIAL_LIMIT_S, USE_LIMIT_S = 60.0, 60.0


class Untyped(Exception):  # noqa: N818  (a finding)
    """An exception that is no `InferCoreError`, with its traceback."""


def loaded(
    backend: str, path: str, use: Callable[[ic.Model], None], adapters: Sequence[str] = ()
) -> str:
    """Load and use the model at ``path`` as the default of `ModelConfig.check_in_child` does.

    What its trial does not survive counts as refused: that the death of a real trial is a typed
    error has tests of its own. What is raised there the load would raise again. Raises that, and
    `Wrong` for a file whose reading kills or hangs, or that passes its trial and then does.
    """
    descriptor = default_registry().get(backend)

    def read() -> None:
        if descriptor.check_file is not None:
            descriptor.check_file(path)

    def tried() -> None:
        with load() as model, contextlib.suppress(*(() if adapters else (Exception,))):
            trial.use(model, adapters)

    def load() -> Any:
        return ic.load_model(path, backend=backend, check_in_child=False)

    def used() -> None:
        with load() as model:
            use(model)

    _raise(_outcome(forked((read, tried), TRIAL_LIMIT_S), trial_may_die=True))
    _raise(_outcome(forked((used,), USE_LIMIT_S), trial_may_die=False))
    return "loaded"


def _outcome(told: list[Any], *, trial_may_die: bool) -> tuple[str, str]:
    kind, detail, n_done = told
    if kind in (DEATH, HANG):
        if trial_may_die and n_done:
            return "typed", f"its trial ended by {detail}"
        where = "reading it" if trial_may_die else "it passed its trial, and then"
        return "wrong", f"{where}: {kind}, {detail}"
    return kind, detail


def _raise(outcome: tuple[str, str]) -> None:
    kind, detail = outcome
    if kind == "wrong":
        raise Wrong(detail)
    if kind == "untyped":
        raise Untyped(detail)
    if kind == "typed":
        raise ic.ModelFormatError(detail, path="")


def forked(steps: Sequence[Callable[[], None]], limit_s: float) -> list[Any]:
    """Run ``steps`` in a fork; return (what came of it, how, how many steps were done).

    What came of it is "ok", "typed", "untyped", "wrong", `DEATH` or `HANG`.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        _run(steps, writer)
    os.close(writer)
    try:
        lines, ended = _read(reader, limit_s)
        if not ended:
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    finally:
        os.close(reader)
    told = [json.loads(line) for line in lines]
    n_done = sum(line[0] == "done" for line in told)
    if told and told[-1][0] != "done":
        return [*told[-1], n_done]
    if not ended:
        return [HANG, f"more than {limit_s:g} s", n_done]
    if os.WIFSIGNALED(status):
        return [DEATH, signal.Signals(os.WTERMSIG(status)).name, n_done]
    return [DEATH, f"exit status {os.WEXITSTATUS(status)}", n_done]


def _run(steps: Sequence[Callable[[], None]], writer: int) -> None:
    """Run in the fork, and end it without any destructor."""

    def say(*what: Any) -> None:
        os.write(writer, (json.dumps(what) + "\n").encode())

    try:
        for step in steps:
            step()
            say("done")
        say("ok", "")
    except Wrong as error:
        say("wrong", str(error))
    except (ic.PluginError, ic.SessionFatalError) as error:
        say("untyped", f"{error!r}\n{traceback.format_exc(limit=-4)}"[:4000])
    except ic.InferCoreError as error:
        say("typed", f"{type(error).__name__}: {error}"[:2000])
    except BaseException as error:  # noqa: BLE001  (this is what is looked for)
        say("untyped", f"{error!r}\n{traceback.format_exc(limit=-4)}"[:4000])
    os._exit(0)


def _read(reader: int, limit_s: float) -> tuple[list[bytes], bool]:
    """Return the lines that the fork wrote, and whether it ended within its time."""
    held, patience = b"", Patience(limit_s)
    with selectors.DefaultSelector() as selector:
        selector.register(reader, selectors.EVENT_READ)
        while patience.left_s > 0:
            if not selector.select(patience.step_s()):
                patience.spend()
                continue
            data = os.read(reader, 1 << 16)
            if not data:
                return held.splitlines(), True
            held += data
    return held.splitlines(), False
