"""The process that renders templates: its limits, its life, and its deaths."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest

import infercore as ic
from infercore.chat.template import render
from infercore.limited import process, wire

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="where the kernel keeps the limits")
USER = [{"role": "user", "content": "hello"}]
GROWING = (
    "{% set n = namespace(a=1) %}{% for i in range(40) %}{% set n.a = [n.a, n.a] %}{% endfor %}"
)
TREE = "{% set n = n or namespace() %}{% set n.a = 1 %}" + GROWING.split("%}", 1)[1]
SLOW = GROWING + "{{ n.a }}"
IN_C = "{{ ('a' * 60000000) | wordwrap(1, wrapstring='y' * 1000) }}"
NO_END = {
    "a tree printed": SLOW,
    "a tree as JSON": GROWING + "{{ n.a | tojson }}",
    "a tree as a string": GROWING + "{{ n.a | string | length }}",
    "a tree compared": f"{TREE}{{% set n.b = n.a %}}{TREE}{{{{ n.a == n.b }}}}",
    "words": "{{ lipsum(n=1000000, max=60000000) }}",
    "digits": "{{ 5 | round(-60000000) }}",
    "wrapped": IN_C,
    "links": "{{ ('http://a.b ' * 3000000) | urlize }}",
    "a sum of lists": "{{ ([[0] * 1000000] * 900) | sum(start=[]) }}",
}
NO_ROOM = {
    "replace": "{% set n = namespace(x='ab') %}{% for i in range(60) %}"
    "{% set n.x = n.x | replace('a', 'aaaaaaaa') %}{% endfor %}",
    "JSON's indent": "{{ range(1000) | list | tojson(indent=10000000) }}",
    "translate": "{{ ('a' * 60000000).translate({97: 'b' * 1000}) }}",
    "join": "{{ (['x' * 60000000] * 60) | join }}",
    "many kept": "{% set n = namespace(l=[]) %}{% for i in range(100) %}"
    "{% set n.l = n.l + ['x' * 60000000 ~ i] %}{% endfor %}",
    "indent": "{{ ('a\\n' * 1000) | indent('x' * 60000000) }}",
    "lists": "{{ [[[0] * 60000000] * 2] | string }}",
}


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> float:
    """Give renders a fifth of a second, so that tests of the end need not wait long."""
    monkeypatch.setattr(process, "MAX_SECONDS", 0.2)
    return 0.2


def rendered(template: str, **variables: Any) -> str:
    return render(template, USER, add_generation_prompt=True, tools=None, **variables)


def child() -> psutil.Process:
    """Return the process that renders now."""
    rendered("")
    (alive,) = process.limited._alive
    return psutil.Process(alive._process.pid)


@pytest.mark.parametrize("name", [*NO_END, *NO_ROOM])
def test_no_filter_escapes_the_limits(short: float, name: str) -> None:
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    child()  # its start counts for nobody
    started = time.perf_counter()
    with pytest.raises(ic.InvalidInputError, match=r"stopped|refuses"):
        rendered({**NO_END, **NO_ROOM}[name])
    assert time.perf_counter() - started < short + 8  # on a machine with much to do
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10
    assert rendered("{{ messages[0].content }}") == "hello"


def test_the_limit_is_two_seconds() -> None:
    child()
    started = time.perf_counter()
    with pytest.raises(ic.InvalidInputError, match="it takes more than 2 seconds"):
        rendered(SLOW)
    assert 1.9 < time.perf_counter() - started < 5


def test_a_busy_machine_refuses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The seconds are those of work: here nothing runs for twice as many."""
    monkeypatch.setattr(process, "MAX_SECONDS", 0.5)
    worker = child()
    template = "{% for i in range(99999) %}{% endfor %}{{ messages[0].content }}"
    with ThreadPoolExecutor(1) as pool:
        worker.suspend()
        text = pool.submit(rendered, template)
        time.sleep(0.2)
        worker.resume()
        time.sleep(0.02)
        worker.suspend()
        time.sleep(1)
        worker.resume()
        assert text.result(20) == "hello"


def test_a_machine_that_stands_still_refuses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the clock it takes longer than anything may, and it has hardly worked."""
    monkeypatch.setattr(process, "MAX_SECONDS", 0.7)  # of which the loops take a ninth or so
    worker = child()
    loops = "{% for i in range(99999) %}{% endfor %}" * 4
    with ThreadPoolExecutor(1) as pool:
        worker.suspend()
        text = pool.submit(rendered, loops + "{{ messages[0].content }}")
        time.sleep(0.2)
        worker.resume()
        time.sleep(0.01)
        worker.suspend()
        time.sleep(3.8)
        worker.resume()
        assert text.result(20) == "hello"


def test_text_up_to_its_limit() -> None:
    assert len(rendered("{{ 'x' * n }}", n=wire.MAX_TEXT_BYTES)) == wire.MAX_TEXT_BYTES
    for template in ("{{ 'x' * n }}y", "{% for i in range(9) %}{{ 'x' * n }}{% endfor %}"):
        with pytest.raises(ic.InvalidInputError, match="16 MiB of text"):
            rendered(template, n=wire.MAX_TEXT_BYTES)


def test_the_memory_limit_is_in_force() -> None:
    bound, _ = child().rlimit(psutil.RLIMIT_AS)
    assert wire.MAX_MEMORY_BYTES < bound < wire.MAX_MEMORY_BYTES + (256 << 20)
    with pytest.raises(ic.InvalidInputError, match="256 MiB of memory"):
        rendered("{{ range(n) | list | length }}{{ [x] * 40000000 }}", n=9, x=1)


def test_one_process_is_kept_for_all_renders() -> None:
    first = child().pid
    assert [rendered(f"{{{{ {i} }}}}") for i in range(40)] == [str(i) for i in range(40)]
    assert child().pid == first


def test_a_render_costs_little_more() -> None:
    from infercore.chat import worker

    rows = [{"role": "user", "content": "word " * 200}] * 20
    template = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"

    def seconds(call: Any) -> float:
        call()
        times = []
        for _ in range(60):
            started = time.perf_counter()
            call()
            times.append(time.perf_counter() - started)
        return min(times)

    here = seconds(lambda: worker.answer(template, {"messages": rows}, (0.0, 0.0, "UTC")))
    there = seconds(lambda: render(template, rows, add_generation_prompt=True, tools=None))
    assert there - here < 1e-3


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_a_killed_process_is_started_anew(number: int) -> None:
    before = child()
    before.send_signal(number)
    before.wait(10)
    assert rendered("{{ messages[0].content }}") == "hello"
    assert child().pid != before.pid


def test_one_killed_in_the_middle_of_a_render(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "MAX_SECONDS", 0.7)
    before = child()
    timer = threading.Timer(0.2, before.kill)
    timer.start()
    with pytest.raises(ic.InvalidInputError, match=r"0\.7 seconds"):  # the second try, to its limit
        rendered(SLOW)
    assert rendered("{{ messages[0].content }}") == "hello"


def test_many_threads(short: float) -> None:
    def work(i: int) -> bool:
        if i == 7:
            with pytest.raises(ic.InvalidInputError, match="stopped"):
                rendered(SLOW)
        return all(rendered("{{ i }}-{{ j }}", i=i, j=j) == f"{i}-{j}" for j in range(20))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(24)))


def test_an_interrupted_render_leaves_no_answer_behind() -> None:
    child()

    class Boom(Exception):  # noqa: N818  (no error of the code)
        pass

    def raise_boom(*_: object) -> None:
        raise Boom

    previous = signal.signal(signal.SIGALRM, raise_boom)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(Boom):
            rendered(SLOW)
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert rendered("{{ messages[0].content }}") == "hello"


def test_a_handler_may_render_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "MAX_SECONDS", 1.0)
    child()
    found = []

    def handle(*_: object) -> None:
        found.append(rendered("from the handler"))

    previous = signal.signal(signal.SIGALRM, handle)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(ic.InvalidInputError, match="stopped"):
            rendered(SLOW)
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert found == ["from the handler"]
    assert rendered("after") == "after"


SCRIPT = """
import os, sys
from infercore.limited import process
from infercore.chat.template import render
def rendered(template):
    rows = [{"role": "user", "content": "hello"}]
    return render(template, rows, add_generation_prompt=True, tools=None)
print(rendered("{{ messages[0].content }}"), flush=True)
(alive,) = process.limited._alive
print(alive._process.pid, flush=True)
"""


def run_script(more: str) -> subprocess.Popen[str]:
    code = SCRIPT + textwrap.dedent(more)
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


def read_pid(parent: subprocess.Popen[str]) -> int:
    assert parent.stdout is not None
    assert parent.stdout.readline() == "hello\n"
    return int(parent.stdout.readline())


def ends_within(pid: int, seconds: float) -> bool:
    """Whether the process ends in time; its remains may stay until somebody asks for its status."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize("template", ["", SLOW, IN_C], ids=["idle", "in Python", "in C"])
def test_it_ends_within_a_second_of_its_parent(template: str) -> None:
    with run_script(f"rendered({template!r}) if {template!r} else sys.stdin.readline()") as parent:
        pid = read_pid(parent)
        time.sleep(0.4)
        parent.kill()
        assert ends_within(pid, 1)


def test_it_ends_with_an_orderly_exit_too() -> None:
    with run_script("") as parent:
        pid = read_pid(parent)
        assert parent.wait(20) == 0
        assert ends_within(pid, 1)


def test_a_fork_has_a_process_of_its_own() -> None:
    more = """
    if (forked := os.fork()) == 0:
        ok = rendered("{{ 1 + 1 }}") == "2" and alive not in process.limited._alive
        os._exit(0 if ok else 1)
    ended, status = os.waitpid(forked, 0)
    assert status == 0, status
    assert rendered("{{ 2 + 2 }}") == "4" and alive in process.limited._alive
    print("fine")
    """
    with run_script(more) as parent:
        read_pid(parent)
        assert parent.stdout is not None
        assert parent.stdout.read() == "fine\n"


def test_a_forked_child_does_not_keep_it_alive() -> None:
    more = """
    import time
    if os.fork() == 0:
        time.sleep(30)
        os._exit(0)
    sys.stdin.readline()
    """
    with run_script(more) as parent:
        pid = read_pid(parent)
        time.sleep(0.3)
        forked = psutil.Process(parent.pid).children()
        parent.kill()
        assert ends_within(pid, 1)
        for one in forked:
            if one.is_running():
                one.kill()


def test_no_file_left_is_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    process.limited.close()

    def no_pipe() -> tuple[int, int]:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "pipe", no_pipe)
    with pytest.raises(ic.OutOfMemoryError, match="Too many open files"):
        rendered("x")


def test_a_frozen_program_renders_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    process.limited.close()
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    assert rendered("{{ messages[0].content }}") == "hello"
    assert not process.limited._alive
    with pytest.raises(ic.InvalidInputError, match="stopped"):
        rendered("{% for i in range(9) %}{{ 'x' * 60000000 }}{% endfor %}")


@pytest.mark.parametrize(
    "ended",
    [
        ic.CallTimeoutError(elapsed_ms=1.0, resident_tokens=0),
        ic.DecodeAbortedError("cancelled", resident_tokens=0),
        ic.OutOfMemoryError("no process can be started"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_ends_a_call_says_nothing_about_the_template(
    monkeypatch: pytest.MonkeyPatch, ended: ic.InferCoreError
) -> None:
    """What was not found out is not taken for what the template cannot do, now or later."""
    from infercore.chat import dialect

    source = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    rows = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    expected = dialect.Dialect(source, "", "").render(rows, add_generation_prompt=False)
    found, render = dialect.Dialect(source, "", ""), dialect.templates.render

    def ends(*_: Any, **__: Any) -> str:
        raise ended

    for n in range(3):  # each time a little later
        tried = iter([render] * n)
        monkeypatch.setattr(
            dialect.templates, "render", lambda *a, t=tried, **k: next(t, ends)(*a, **k)
        )
        with pytest.raises(type(ended)):
            found.render(rows, add_generation_prompt=False)
    monkeypatch.undo()
    assert found.render(rows, add_generation_prompt=False) == expected


@pytest.mark.parametrize("refuses", [True, False])
def test_a_template_that_is_slow_is_not_asked_for_more(
    monkeypatch: pytest.MonkeyPatch,
    refuses: bool,
) -> None:
    from infercore.chat import dialect, template

    asked = []

    def slow(*_: Any, **__: Any) -> str:
        asked.append(1)
        if refuses:
            raise template.TemplateRefusalError("no", field="messages", value=(), allowed="a")
        return "a"

    monkeypatch.setattr(dialect.templates, "render", slow)
    monkeypatch.setattr(dialect, "_SLOW_S", -1.0)
    found = dialect.Dialect("{{ 1 }}", "", "")
    with pytest.raises(ic.InvalidInputError):
        found.render([{"role": "user", "content": "a"}], add_generation_prompt=True)
    assert len(asked) <= 3
