"""The pytest front: ``pytest --pyargs infercore.conformance --infercore-backend NAME``.

pytest loads this module in every run of an environment that has infercore, so it imports nothing
of it until a law is to be run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from infercore.conformance.law import Law
    from infercore.conformance.rig import Rig

_LAW, _REPORTED = "infercore_law", "infercore_conformance"
_LETTERS = {"refused": ("refused", "r", "REFUSED"), "newer": ("newer", "n", "FAILED (NEWER)")}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add this suite's options, all of them prefixed."""
    group = parser.getgroup("infercore", "conformance of an infercore backend")
    group.addoption(
        "--infercore-backend", metavar="NAME", help="the backend to run the laws of infercore on"
    )
    group.addoption(
        "--infercore-model", metavar="PATH", help="a model to use in place of the rig's own"
    )
    group.addoption(
        "--infercore-seed", metavar="N", type=int, default=0, help="chooses the laws' texts"
    )
    group.addoption(
        "--infercore-require",
        metavar="NAMES",
        action="append",
        default=[],
        help="what must be there, with commas: oracle, observe, adapter, encoder, constraints, "
        "suite, what laws need (kv_shift, state, ...), or options that the backend honours "
        "(n_ubatch, native.mirostat, ...); what is missing fails the run",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one test of each law; without a backend that is an error of collection."""
    if _LAW not in metafunc.fixturenames:
        return
    from infercore.conformance.registry import laws  # noqa: PLC0415

    _collected(metafunc.config)["rig"] = _find(metafunc.config)
    metafunc.parametrize(_LAW, laws(), ids=lambda law: f"{law.id}-{law.name}")


def _find(config: pytest.Config) -> Rig:
    """The rig of the backend that was named; one failure for all laws where there is none."""
    from infercore.conformance.rigs import find_rig  # noqa: PLC0415
    from infercore.errors import InferCoreError  # noqa: PLC0415

    if hasattr(config, "workerinput"):  # of pytest-xdist: nobody would see the whole run
        pytest.fail("the laws run in one process; leave pytest-xdist out (-n0)", pytrace=False)
    name = config.getoption("--infercore-backend")
    if not name:
        pytest.fail("the laws need a backend; give --infercore-backend NAME", pytrace=False)
    try:
        return find_rig(name, model=config.getoption("--infercore-model"))
    except InferCoreError as error:
        pytest.fail(str(error), pytrace=False)


@pytest.fixture(scope="session")
def infercore_rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """Return the rig of the backend that was named; its model is closed at the end."""
    from infercore.conformance.runner import check_known, describe  # noqa: PLC0415

    rig: Rig = _collected(request.config)["rig"]
    check_known(rig)
    _collected(request.config)["facts"] = describe(rig, _required(request.config))
    yield rig
    rig.close()


def _required(config: pytest.Config) -> list[str]:
    """The names that ``--infercore-require`` gives, one at a time or with commas."""
    given = ",".join(config.getoption("--infercore-require"))
    return [name.strip() for name in given.split(",") if name.strip()]


def _collected(config: pytest.Config) -> dict[str, Any]:
    """What this run has found so far."""
    found: dict[str, Any] = config.__dict__.setdefault(_REPORTED, {"facts": None, "results": []})
    return found


def run_one(law: Law, rig: Rig, request: pytest.FixtureRequest) -> None:
    """Run one law, and end the test as the law ended."""
    from infercore.conformance.runner import run_law  # noqa: PLC0415

    result = run_law(law, rig, seed=request.config.getoption("--infercore-seed"))
    _collected(request.config)["results"].append(result)
    reason = f"{law.id}: {law.text}\n{result.reason}"
    if result.cause and result.cause not in str(result.reason):
        reason += f"\nthe plugin raised {result.cause}"
    if result.drawn:
        reason += f"\nmade of: {'; '.join(result.drawn)}"
    if result.counts_as_failure:
        pytest.fail(reason, pytrace=False)
    elif result.outcome == "FAIL":
        request.node.user_properties.append((_REPORTED, "newer"))
    elif result.outcome == "known":
        pytest.xfail(reason)
    elif result.outcome == "n/a":
        pytest.skip(reason)
    else:
        request.node.user_properties.append((_REPORTED, result.outcome))


def pytest_report_teststatus(report: Any) -> tuple[str, str, str] | None:
    """Show a law that was rightly refused as such, not as passed."""
    outcome = dict(getattr(report, "user_properties", ())).get(_REPORTED)
    if report.when != "call" or not report.passed:
        return None
    return _LETTERS.get(str(outcome))


def _report(config: pytest.Config) -> Any:
    """The report of what was run, None where no rig was opened."""
    found = _collected(config)
    if found["facts"] is None:
        return None
    from infercore.conformance.report import Report  # noqa: PLC0415

    return Report(
        results=tuple(found["results"]),
        seed=config.getoption("--infercore-seed"),
        **found["facts"],
    )


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """End with a failure where nothing was tried."""
    report = _report(session.config)
    nothing = _none_ran(session) if report is None else not report.passed
    _collected(session.config)["nothing"] = report is None and nothing
    if nothing and exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _none_ran(session: pytest.Session) -> bool:
    """Whether laws were selected, and none of them was run: somebody's mark has skipped them."""
    chosen = any(_LAW in getattr(item, "fixturenames", ()) for item in session.items)
    return chosen and not session.config.option.collectonly


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Show the matrix of laws, and the reasons."""
    report = _report(config)
    if report is None:
        if _collected(config).get("nothing"):
            terminalreporter.write_line("infercore conformance: failed; no law was run")
        return
    from infercore.conformance.render import matrix, notes, summary, to_mend  # noqa: PLC0415

    terminalreporter.section(f"infercore conformance of {report.backend}")
    for line in (matrix([report]), "", *notes(report), "", *to_mend(report), summary(report)):
        terminalreporter.write_line(line)
