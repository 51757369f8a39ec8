"""Laws run on a changed subject, each change in a process of its own."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib
import inspect
import json
import os
import pickle
import resource
import select
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from mutation.loading import Subject, announce, for_children
from mutation.operators import changed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from mutation.operators import Mutant
    from mutation.subjects import Subject as Description

KILLED, CRASHED, TIMED_OUT, SURVIVED, LEFT_OUT = (
    "killed", "crashed", "timed out", "survived", "left out",
)  # fmt: skip
NEVER_RUN = "no law runs this line"
MAX_BYTES = 12 * 2**30
_LOADING = ("headers", "kinds", "loading", "told")
"""Modules of laws that load a model of the reference by its path, with options of a user."""
_MARK = "#subject"
_NEAR = {"file": 4, "function": 16}  # times as much as elsewhere a kill there counts
_OTHERS = 4  # times later than a law of the mutant's own groups another comes


@attrs.frozen
class Step:
    """A law on one of the subject's rigs."""

    rig: int
    law: str

    @property
    def label(self) -> str:
        """The law's id, with the rig's number where it is not the first."""
        return f"{self.law}@{self.rig}" if self.rig else self.law

    @property
    def group(self) -> str:
        """The id of the law's group."""
        return self.law.split("-", maxsplit=1)[0]


@attrs.frozen(kw_only=True)
class Row:
    """What the unchanged subject does on one step; ``seconds`` are of the processor."""

    key: str
    outcome: str
    seconds: float
    lines: frozenset[tuple[str, int]]


@attrs.frozen(kw_only=True)
class Baseline:
    """What the unchanged subject does: the outcome, the time and the lines of each step."""

    outcomes: Mapping[Step, str]
    seconds: Mapping[Step, float]
    lines: Mapping[Step, frozenset[tuple[str, int]]]

    def steps_for(self, file: str, first: int, last: int) -> list[Step]:
        """Return the steps that run one of the lines, the fastest first."""
        asked = {(file, line) for line in range(first, last + 1)}
        found = [step for step, lines in self.lines.items() if asked & lines]
        return sorted(found, key=self.seconds.__getitem__)


@attrs.frozen(kw_only=True)
class Verdict:
    """What became of a mutant: killed, crashed, timed out, survived or left out, and by what.

    ``own`` tells that it was a law of the groups that speak of the file. Of a survivor
    ``n_untried`` laws that run its lines did not fit into the budget: one of them may see it.
    """

    mutant: Mutant
    outcome: str
    law: str = ""
    reason: str = ""
    own: bool = False
    elapsed_s: float = 0.0
    n_untried: int = 0

    @property
    def detected(self) -> bool:
        """Whether the suite does not let it pass."""
        return self.outcome in (KILLED, CRASHED, TIMED_OUT)


class Runner:
    """Runs steps on a subject in forked children. Nothing of the subject is imported here."""

    def __init__(self, subject: Description, *, folder: Path, seed: int = 0) -> None:
        self.subject = subject
        self._folder = folder
        self._seed = seed
        self._modules = subject.modules()
        self._importer = Subject(self._modules)
        self._importer.compile_all()
        targets = {_rig_name(i): target for i, target in enumerate(subject.rigs)}
        announce(folder, {"infercore.conformance": targets, **subject.entries})
        if subject.entries:
            sys.path.insert(0, str(folder))
        for name in ("infercore.api", "infercore.conformance.runner", *subject.preload):
            importlib.import_module(name)
        from infercore.conformance import laws  # noqa: PLC0415  (after the path is set)

        self.laws = {law.id: law for law in laws()}
        self._texts = ""

    # -- the unchanged subject ----------------------------------------------------------------

    def baseline(self, only: Sequence[str] | None = None, kept: Path | None = None) -> Baseline:
        """Return what the unchanged subject does on every law, and which lines each runs.

        What ``kept`` has of an earlier run is not measured again, where neither the subject nor
        the law's own file has changed since; what is measured is kept there.
        """
        place = kept or self._folder / "baseline"
        pid = os.fork()
        if not pid:
            _in_child(lambda: self._measure(only, place))
        _, status = os.waitpid(pid, 0)
        if status:
            raise SystemExit(f"the unchanged {self.subject.name} ended with status {status}")
        found = _read(place)
        wanted = {(i, law.id) for i in range(len(self.subject.rigs)) for law in _chosen(only)}
        steps = {step: row for step, row in found.items() if (step.rig, step.law) in wanted}
        return Baseline(
            outcomes={step: row.outcome for step, row in steps.items()},
            seconds={step: row.seconds for step, row in steps.items()},
            lines={step: row.lines for step, row in steps.items()},
        )

    def _measure(self, only: Sequence[str] | None, place: Path) -> None:
        # As changed subjects are: code that runs under a limit alone runs.
        resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
        self._importer.install()
        for_children(self._folder, self._modules)
        found = _read(place) if place.exists() else {}
        for i in range(len(self.subject.rigs)):
            left = [
                law
                for law in _chosen(only)
                if (row := found.get(Step(i, law.id))) is None or row.key != self._key(law)
            ]
            if left:
                self._measure_on(i, left, found, place)
        place.write_bytes(pickle.dumps(found))

    def _measure_on(self, i: int, left: Sequence[Any], found: dict[Step, Row], place: Path) -> None:
        from infercore.conformance import run_law  # noqa: PLC0415

        names = {name + _MARK: file for file, name in self._names().items()}
        with _traced(names) as loading:  # what it runs shows in every law
            rig = self._rig(i)
            _ = rig.model
            if rig.encoder is not None:
                _ = rig.encoder_model
        for n, law in enumerate(left):
            step, started = Step(i, law.id), time.process_time()
            with _traced(names) as seen:
                result = run_law(law, rig, seed=self._seed)
            if result.outcome == "FAIL":
                print(f"unchanged {step.label} FAIL: {result.reason}", file=sys.stderr)
            found[step] = Row(
                key=self._key(law),
                outcome=result.outcome,
                seconds=time.process_time() - started,
                lines=frozenset(seen | loading),
            )
            if n % 40 == 39:  # noqa: PLR2004  (it is large)
                place.write_bytes(pickle.dumps(found))
        rig.close()

    def _key(self, law: Any) -> str:
        """What a law's row of the baseline was made with: the subject, and the law's file."""
        if not self._texts:
            texts = sorted((name, module.text) for name, module in self._modules.items())
            self._texts = hashlib.sha256(repr(texts).encode()).hexdigest()
        file = Path(inspect.getfile(law.check)).read_bytes()
        return self._texts + hashlib.sha256(file).hexdigest()

    def _names(self) -> dict[str, str]:
        folder = self.subject.folder
        return {file: str(folder / file) for file in self.subject.files}

    def _rig(self, i: int) -> Any:
        module, function = self.subject.rigs[i].split(":")
        rig = getattr(importlib.import_module(module), function)()
        rig.child = (_rig_name(i), None)
        if self.subject.name == "reference":
            self._load_the_subject()
        return rig

    def _load_the_subject(self) -> None:
        """Let laws that load the reference by a path load the subject, not what it is judged by."""
        subject = importlib.import_module(self.subject.package)
        for name in _LOADING:
            module: Any = importlib.import_module(f"infercore.conformance.laws.{name}")
            for asked in ("load_reference_model", "reference_backend"):
                if hasattr(module, asked):
                    setattr(module, asked, getattr(subject, asked))

    # -- a changed one ------------------------------------------------------------------------

    def start(self, mutant: Mutant, steps: Sequence[Step], outcomes: Mapping[Step, str]) -> Child:
        """Start a child that runs ``steps`` on the mutant until one fails."""
        readable, writable = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(readable)
            os.setsid()  # so that what laws start ends with it
            _in_child(lambda: self._judge(mutant, steps, outcomes, writable))
        os.close(writable)
        return Child(pid, readable)

    def _judge(
        self,
        mutant: Mutant,
        steps: Sequence[Step],
        outcomes: Mapping[Step, str],
        pipe: int,
    ) -> None:
        resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)

        def say(kind: str, *rest: str) -> None:
            os.write(pipe, (json.dumps([kind, *rest]) + "\n").encode())

        try:
            rigs = self._changed_rigs(mutant, steps[0].rig)
        except BaseException as error:  # noqa: BLE001  (whatever keeps it from loading)
            say("load", f"{type(error).__name__}: {error}"[:300])
            return
        for step in steps:
            say("law", step.label)
            if self.laws[step.law].tier == "process":
                self._tell_children(mutant)
            reason = self._broken(rigs, step, outcomes[step])
            if reason is not None:
                say("fail", step.label, reason[:300])
                return
        say("done")

    def _changed_rigs(self, mutant: Mutant, first: int) -> dict[int, Any]:
        name = self.subject.module_of(mutant.file)
        self._importer.change(name, changed(self._modules[name].text, mutant))
        self._importer.install()
        rigs = {first: self._rig(first)}
        _ = rigs[first].model
        return rigs

    def _broken(self, rigs: dict[int, Any], step: Step, expected: str) -> str | None:
        """Return why the step shows the mutant, None where it does not."""
        from infercore.conformance import run_law  # noqa: PLC0415

        if step.rig not in rigs:
            for rig in rigs.values():
                rig.close()
            rigs[step.rig] = self._rig(step.rig)
        result = run_law(self.laws[step.law], rigs[step.rig], seed=self._seed)
        if result.outcome == "FAIL" and expected != "FAIL":
            return str(result.reason)
        if result.outcome == "refused" and expected == "ok":
            return f"the rig requires what is now refused: {result.reason}"
        return None

    def _tell_children(self, mutant: Mutant) -> None:
        """Let the processes that laws start run the same mutant."""
        name = self.subject.module_of(mutant.file)
        text = ast.unparse(changed(self._modules[name].text, mutant))
        module = attrs.evolve(self._modules[name], text=text)
        for_children(self._folder, {**self._modules, name: module})


def _read(place: Path) -> dict[Step, Row]:
    found: dict[Step, Row] = pickle.loads(place.read_bytes())  # noqa: S301  (our own file)
    return found


def _chosen(only: Sequence[str] | None) -> Sequence[Any]:
    from infercore.conformance import select  # noqa: PLC0415  (after the path is set)

    return select(list(only) if only else None)


def _rig_name(i: int) -> str:
    return f"infercore-mutant-{i}"


class Kills:
    """How many mutants each law killed: in all, in a file, and in a function of it.

    They are kept in ``place``, so that later runs try the likeliest laws first.
    """

    def __init__(self, place: Path | None) -> None:
        self._place = place
        known = json.loads(place.read_text("utf-8")) if place and place.exists() else {}
        self._counts: Counter[str] = Counter(known)

    def add(self, verdict: Verdict) -> None:
        """Take in what became of a mutant."""
        if verdict.outcome == KILLED:
            self._counts.update(_where(verdict.mutant, verdict.law).values())
        if self._place is not None:
            self._place.write_text(json.dumps(self._counts), encoding="utf-8")

    def worth(self, mutant: Mutant, label: str) -> int:
        """Return how likely the law is to kill ``mutant``, judged by what it killed before."""
        where = _where(mutant, label)
        return self._counts[label] + sum(n * self._counts[where[at]] for at, n in _NEAR.items())


def _where(mutant: Mutant, label: str) -> dict[str, str]:
    file = f"{mutant.file} {label}"
    return {"anywhere": label, "file": file, "function": f"{mutant.function} {file}"}


class Child:
    """A process that runs laws on one mutant, and what it has said so far."""

    def __init__(self, pid: int, pipe: int) -> None:
        self.pid = pid
        self._pipe = pipe
        self._text = b""
        self.law = ""
        self.said: list[str] = []
        self.started = self._seen = time.monotonic()
        self._cpu_at_law = self._waited = 0.0

    def read(self, timeout: float) -> bool:
        """Take in what it says within ``timeout`` seconds; False when it has ended."""
        ready, _, _ = select.select([self._pipe], [], [], timeout)
        # A pause of the whole machine, or of this process and its child, is not waited for.
        before, self._seen = self._seen, time.monotonic()
        self._waited += min(self._seen - before, 2 * timeout)
        if not ready:
            return True
        data = os.read(self._pipe, 65536)
        self._text += data
        *lines, self._text = self._text.split(b"\n")
        for line in lines:
            said = json.loads(line)
            if said[0] == "law":
                self.law, self._waited = said[1], 0.0
                self._cpu_at_law = self.cpu()
            else:
                self.said = said
        return bool(data)

    def cpu(self) -> float:
        """Return the seconds of processor time that it has taken."""
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text(encoding="utf-8").rsplit(")")[1]
        except OSError:
            return 0.0
        user, system = fields.split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def too_long(self, base_s: float) -> bool:
        """Whether the law takes far longer than on the unchanged subject."""
        used = self.cpu() - self._cpu_at_law
        return used > 8 * base_s + 5 or self._waited > 40 * base_s + 90

    def end(self) -> int:
        """End it and what it started; return its wait status."""
        with contextlib.suppress(OSError):
            os.killpg(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        os.close(self._pipe)
        return status


def _in_child(work: Any) -> None:
    code = 1
    try:
        work()
        code = 0
    except BaseException as error:  # noqa: BLE001  (a fork must not go on in the parent's place)
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    finally:
        os._exit(code)


def judged(
    runner: Runner,
    mutant: Mutant,
    baseline: Baseline,
    kills: Kills,
    *,
    budget_s: float | None = None,
) -> Verdict:
    """Return what becomes of a mutant: laws of its own groups are tried sooner than others.

    ``budget_s`` bounds the time that its laws take on the unchanged code, so that a survivor may
    be one that a law not tried would see.
    """
    own = set(runner.subject.files[mutant.file])
    every = _ordered(runner, mutant, baseline, kills)
    if not every:
        return Verdict(mutant=mutant, outcome=SURVIVED, reason=NEVER_RUN)
    steps = _within(every, baseline, budget_s) or every[:1]
    seconds = {step.label: baseline.seconds[step] for step in steps}
    child = runner.start(mutant, steps, baseline.outcomes)
    late = False
    while child.read(0.25):
        if child.too_long(seconds.get(child.law, 5.0)):
            late = True
            break
    status = child.end()
    elapsed = time.monotonic() - child.started
    group = child.law.split("-")[0]
    told: dict[str, Any] = {"mutant": mutant, "law": child.law, "elapsed_s": elapsed}
    if child.said and child.said[0] == "fail":
        _, law, reason = child.said
        told["law"] = law
        return Verdict(outcome=KILLED, reason=reason, own=law.split("-")[0] in own, **told)
    if child.said and child.said[0] == "load":
        return Verdict(outcome=LEFT_OUT, reason=child.said[1], **told)
    if child.said and child.said[0] == "done":
        n_untried = len(every) - len(steps)
        return Verdict(outcome=SURVIVED, n_untried=n_untried, **{**told, "law": ""})
    if late:
        return Verdict(outcome=TIMED_OUT, own=group in own, **told)
    reason = f"ended with status {status}"
    outcome = CRASHED if child.law else LEFT_OUT
    return Verdict(outcome=outcome, reason=reason, own=group in own, **told)


def _within(steps: list[Step], baseline: Baseline, budget_s: float | None) -> list[Step]:
    """Return steps that take ``budget_s`` together, the first that fit; all of them for None."""
    if budget_s is None:
        return steps
    kept: list[Step] = []
    for step in steps:
        if baseline.seconds[step] <= budget_s:
            budget_s -= baseline.seconds[step]
            kept.append(step)
    return kept


def _ordered(runner: Runner, mutant: Mutant, baseline: Baseline, kills: Kills) -> list[Step]:
    """The steps that run the mutant's lines: what is likely to kill it at a small cost first."""
    if mutant.at_import:
        steps = [step for step in baseline.seconds if baseline.outcomes[step] != "n/a"]
    else:
        steps = baseline.steps_for(mutant.file, *mutant.lines)
    steps = [step for step in steps if baseline.outcomes[step] not in ("FAIL", "n/a")]
    own = set(runner.subject.files[mutant.file])
    # What the first rig has tried already, kills least.
    first = {step.law for step in steps if not step.rig}
    steps = [step for step in steps if step.group in own or not step.rig or step.law not in first]

    def worth(step: Step) -> tuple[Any, ...]:
        cost = (0.02 + baseline.seconds[step]) / (1 + kills.worth(mutant, step.label))
        return step.rig, cost if step.group in own else _OTHERS * cost

    return sorted(steps, key=worth)


@contextlib.contextmanager
def _traced(names: Mapping[str, str]) -> Iterator[set[tuple[str, int]]]:
    """Collect the lines of the subject's files that run in the block, in every thread."""
    seen: set[tuple[str, int]] = set()
    # Lines of each function that did not run yet; None for code of others. Where none is left,
    # nothing is traced any more. By id, as code is equal to that of the same text elsewhere.
    left: dict[int, set[int] | None] = {}
    known = []

    def line(frame: Any, event: str, _: Any) -> Any:
        if event == "line":
            seen.add((names[frame.f_code.co_filename], frame.f_lineno))
            (left[id(frame.f_code)] or set()).discard(frame.f_lineno)
        return line

    def call(frame: Any, event: str, arg: Any) -> Any:
        del event, arg
        code = frame.f_code
        at = id(code)
        if at not in left:
            known.append(code)
            name = code.co_filename
            is_subject = name.endswith(_MARK) and name in names
            rows = {row[2] for row in code.co_lines() if row[2]} - {code.co_firstlineno}
            left[at] = rows if is_subject else None
        return line if left[at] else None

    threading.settrace(call)
    sys.settrace(call)
    try:
        yield seen
    finally:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]  # the stubs want a function
