"""The mutation tool: its operators, its sample and score, and a few mutants of the example."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

TOOLS = Path(__file__).parents[2] / "tools"
pytestmark = pytest.mark.skipif(not TOOLS.exists(), reason="the tools are not beside the tests")

SOURCE = '''
"""A module."""

LIMIT = 8

def near(values: list[int], *, last: int = 3) -> list[int]:
    """Return some of them."""
    kept = []
    for value in values[1:]:
        if value < LIMIT and not value == last:
            kept.append(min(value, last + 1))
    return list(kept)
'''


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(TOOLS))
    from mutation import operators

    return operators


@pytest.fixture
def scoring(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(TOOLS))
    from mutation import scoring

    return scoring


def test_each_mutant_is_one_change_that_compiles(operators: Any) -> None:
    found = operators.mutants("m.py", SOURCE)
    texts = {ast.unparse(operators.changed(SOURCE, mutant)) for mutant in found}
    assert len(texts) == len(found) > 20
    assert ast.unparse(ast.parse(SOURCE)) not in texts
    for text in texts:
        compile(text, "m.py", "exec")
    kinds = {mutant.operator for mutant in found}
    assert kinds >= {
        operators.COMPARISON, operators.BOUND, operators.SIGN, operators.CONSTANT,
        operators.CONDITION, operators.EXTREME, operators.SLICE, operators.EARLY, operators.CALL,
    }  # fmt: skip


def test_a_mutant_says_where_it_is(operators: Any) -> None:
    found = operators.mutants("m.py", SOURCE)
    bound = next(mutant for mutant in found if mutant.operator == operators.BOUND)
    assert (bound.function, bound.line, bound.before) == ("near", 10, "value < LIMIT")
    assert bound.after == "value < LIMIT - 1"
    assert not bound.at_import
    assert {m.before for m in found if m.at_import} == {"8", "3"}


def test_a_sample_is_even_over_operators_and_repeatable(operators: Any, scoring: Any) -> None:
    found = operators.mutants("a.py", SOURCE) + operators.mutants("b.py", SOURCE)
    drawn = scoring.sampled(found, 20, 0)
    assert drawn == scoring.sampled(found, 20, 0) != scoring.sampled(found, 20, 1)
    kinds = Counter(mutant.operator for mutant in drawn)
    assert max(kinds.values()) - min(kinds.values()) <= 1
    assert sorted(map(repr, scoring.sampled(found, None, 0))) == sorted(map(repr, found))


def test_the_interval_of_confidence(scoring: Any) -> None:
    low, high = scoring.wilson(90, 100)
    assert (round(low, 3), round(high, 3)) == (0.826, 0.945)
    assert scoring.wilson(0, 0) == (0.0, 1.0)


def test_every_equivalent_mutant_has_an_argument(scoring: Any) -> None:
    for entry in scoring.equivalents():
        assert len(entry.reason) > 40, entry


def test_lines_of_other_machines_count_as_survived_in_the_raw_score_alone(
    operators: Any, scoring: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mutation import running

    first, second, third = [m for m in operators.mutants("m.py", SOURCE) if m.function][:3]
    assert first.function == second.function
    entry = scoring.Elsewhere(subject="s", file="m.py", needs="a GPU", functions=[first.function])
    monkeypatch.setattr(scoring, "elsewhere", lambda: (entry,))
    monkeypatch.setattr(scoring, "equivalents", lambda: ())
    verdicts = (
        running.Verdict(mutant=first, outcome=running.SURVIVED, reason=running.NEVER_RUN),
        running.Verdict(mutant=second, outcome=running.SURVIVED),  # a law runs it
        running.Verdict(mutant=third, outcome=running.KILLED),
    )
    score = scoring.Score(subject="s", seed=0, n_mutants=3, verdicts=verdicts)
    assert [found.mutant for found in score.survivors] == [second]
    assert (score.share(adjusted=False), score.share(adjusted=True)) == ((1, 3), (1, 2))


def test_a_budget_leaves_out_what_does_not_fit_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))
    from mutation import running

    steps = [running.Step(0, f"DEC-{i}") for i in range(4)]
    seconds = dict(zip(steps, (2.0, 9.0, 3.0, 3.0), strict=True))
    baseline = running.Baseline(outcomes={}, seconds=seconds, lines={})
    assert running._within(steps, baseline, 6.0) == [steps[0], steps[2]]
    assert running._within(steps, baseline, None) == steps


def test_what_killed_nearby_counts_more_and_is_remembered(
    operators: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))
    from mutation import running

    inside, other = operators.mutants("m.py", SOURCE)[-1], operators.mutants("n.py", SOURCE)[-1]
    assert inside.function == "near"
    outside = next(m for m in operators.mutants("m.py", SOURCE) if not m.function)
    for _ in range(2):
        kills = running.Kills(tmp_path / "kills.json")
        kills.add(running.Verdict(mutant=inside, outcome=running.KILLED, law="DEC-1"))
    kills.add(running.Verdict(mutant=inside, outcome=running.SURVIVED))
    here, near, far = (kills.worth(mutant, "DEC-1") for mutant in (inside, outside, other))
    assert here > near > far == 2
    assert kills.worth(inside, "DEC-2") == 0


def test_a_sample_of_the_example_s_mutants(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    command = [sys.executable, str(TOOLS / "mutate.py"), "--subject", "example", "--sample", "8"]
    laws = ["--only", "TOK-8", "--only", "DEC-1", "--only", "DEC-3", "--only", "KV-2"]
    done = subprocess.run(
        [*command, *laws, "--json", str(found)],
        capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    score = json.loads(found.read_text(encoding="utf-8"))
    assert sum(score["counts"].values()) == 8
    assert score["counts"]["killed"] >= 1
    assert score["counts"]["survived"] >= 1  # so few laws cannot see all
    assert "survivors:" in done.stdout
    again = subprocess.run(
        [*command, *laws, "--resume", "--json", str(found)],
        capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip
    assert again.returncode == 0, again.stdout + again.stderr
    assert " s killed " in done.stdout
    assert " s killed " not in again.stdout  # all had been tried
    assert json.loads(found.read_text(encoding="utf-8"))["counts"] == score["counts"]
