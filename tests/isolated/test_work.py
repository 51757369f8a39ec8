"""Every kind of work over a death of its engine: the same as undisturbed, wherever it comes.

A death is placed by the number of requests that have gone to the worker, and by no clock.
"""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pytest

import infercore as ic
import pack
from infercore.isolated.process import EngineProcess

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.skipif(os.name != "posix", reason="isolation needs POSIX")

FIELDS = {"n_threads": 1, "n_threads_batch": 1}
POOL = {"n_parallel": 2, "n_ctx": 256, **FIELDS}
TEXT = "Once upon a time there was a baker named Mira."
USER = {"role": "user", "content": "Weather?"}
TEMPLATE = (
    "{%- for t in tools or [] %}{{ t.function | tojson }}\n{% endfor -%}"
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{%- for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>"
    "{% endfor -%}<|im_end|>\n{% endfor -%}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif -%}"
)
THINKS = (
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n"
    "{%- if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif -%}"
    "{{ m.content }}<|im_end|>\n{% endfor -%}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif -%}"
)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Mira", "Tom"]}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def pool(pack_path: Path, backend_name: str) -> Iterator[Any]:
    with ic.open_pool(
        pack_path, backend=backend_name, isolate=True, max_restarts=10**6, **POOL
    ) as opened:
        yield opened


@pytest.fixture(scope="module")
def plain(model: Any) -> Iterator[Any]:
    with model.new_pool(**POOL) as opened:
        yield opened


@contextmanager
def dying(pool: Any, at: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Kill the worker right before request number ``at``; give the names of all requests."""
    process = pool.process
    whole, next_of, asked = process.send, process.send_next, []

    def note(name: str) -> None:
        if name not in ("cancel", "stats", "explain_context"):
            asked.append(name)
            if len(asked) == at:
                os.kill(process.pid, signal.SIGKILL)

    def send(epoch: int, target: int, name: str, *rest: Any) -> Any:
        note(name)
        return whole(epoch, target, name, *rest)

    def send_next(epoch: int, target: int) -> Any:
        note("next")
        return next_of(epoch, target)

    with monkeypatch.context() as patch:
        patch.setattr(process, "send", send)
        patch.setattr(process, "send_next", send_next)
        yield asked
    assert len(asked) > at, f"the work had ended before: {asked}"


def tokens(session: Any, n: int = 20, **fields: Any) -> list[int]:
    return [t for chunk in session.decode(max_tokens=n, **fields) for t in chunk.tokens]


def shifts(pool: Any, _: Path) -> Any:
    with pool.open_session(overflow="shift") as session:
        session.ensure_prefix("Once")
        session.prefill_suffix(" upon a time" * 50)
        n_before = session.explain_context().resident_tokens
        assert n_before < 256 < n_before + 120
        found = tokens(session, 120, temperature=0, ignore_eos=True)
        return len(found), found[: 255 - n_before], session.explain_context().prefix_tokens


def structured(pool: Any, _: Path) -> Any:
    with pool.open_session() as session:
        session.ensure_prefix(TEXT)
        chunks = list(
            session.decode(
                max_tokens=60, seed=3, response_format={"type": "json_schema", "schema": SCHEMA}
            )
        )
        return "".join(chunk.text for chunk in chunks), chunks[-1].finish_reason


def chats(pool: Any, _: Path) -> Any:
    seen: list[Any] = []

    def weather(city: Literal["Rome", "Oslo"], days: Literal[1, 2]) -> str:
        """The weather of the next days."""
        seen.append((city, days))
        return "sun"

    with pool.open_session() as session:
        came = session.run_tools(
            [USER], [weather], max_rounds=1, chat_template=TEMPLATE, tool_choice="required",
            max_tokens=150, temperature=0,
        )  # fmt: skip
    calls = [(m.role, m.content, [c.name for c in m.tool_calls or ()]) for m in came]
    return seen, calls


def thinks(pool: Any, _: Path) -> Any:
    asked = {"chat_template": THINKS, "reasoning_budget": 8, "ignore_eos": True}
    with pool.open_session() as session:
        chunks = list(session.chat([USER], **asked, max_tokens=24, temperature=0))
        thought = "".join(chunk.reasoning for chunk in chunks)
        return thought, [token for chunk in chunks for token in chunk.tokens]


def saves(pool: Any, folder: Path) -> Any:
    with pool.open_session() as session, pool.open_session() as other:
        session.ensure_prefix(TEXT)
        first = tokens(session, 5, seed=4)
        session.save(folder / "saved")
        snapshot = session.snapshot()
        other.load(folder / "saved")
        second = tokens(other, 5, temperature=0)
        other.restore(snapshot)
        return first, second, tokens(other, 5, temperature=0)


def forks(pool: Any, _: Path) -> Any:
    with pool.open_session() as session:
        session.ensure_prefix(TEXT)
        first = tokens(session, 5, temperature=0)
        with session.fork() as twin:
            return first, tokens(twin, 6, seed=4), tokens(session, 6, temperature=0)


def whole_calls(pool: Any, _: Path) -> Any:
    with pool.open_session() as session:
        session.ensure_prefix(TEXT)
        text = session.generate(" The dog", max_tokens=6, seed=5)
        session.ensure_prefix(TEXT)
        session.prefill_suffix(" The dog")
        beams = session.beam_search(2, max_tokens=4)
        many = session.sample_many(2, max_tokens=4, seed=6)
        session.evict(2, 4)
        rest = session.explain_context().resident_tokens
        return text, [b.tokens for b in beams], [c.tokens for c in many], rest


WORK = {
    "shift": (shifts, (4, 6, 60, 110)),
    "structured output": (structured, (2, 4, 9)),
    "tools": (chats, (2, 3)),
    "a thought with a budget": (thinks, (6, 14)),
    "save, load, restore": (saves, (1, 4, 9, 10, 11, 12, 20)),
    "fork": (forks, (3, 9, 12, 19)),
    "calls without a stream": (whole_calls, (2, 3, 6, 7, 8)),
}


@pytest.mark.parametrize("name", WORK)
def test_work_is_the_same_wherever_the_engine_dies(
    pool: Any, plain: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    work, places = WORK[name]
    if name == "shift" and not plain.capabilities.kv_shift:
        pytest.skip("this engine cannot move a window")
    expected = work(plain, tmp_path)
    for at in places:
        n_before = pool.stats().n_restarts
        with dying(pool, at, monkeypatch):
            assert work(pool, tmp_path) == expected, at
        assert pool.stats().n_restarts > n_before


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_drain_lets_a_stream_end_whose_engine_dies(
    pack_path: Path, plain: Any, backend_name: str, when: str
) -> None:
    with plain.open_session() as session:
        session.ensure_prefix(TEXT)
        expected = tokens(session, temperature=0)
    with (
        ic.open_pool(pack_path, backend=backend_name, isolate=True, **POOL) as pool,
        ThreadPoolExecutor(1) as threads,
    ):
        session = pool.open_session()
        session.ensure_prefix(TEXT)
        stream = session.decode(max_tokens=20, temperature=0)
        found = [t for _ in range(5) for t in next(stream).tokens]
        pid, child = pool.process.pid, pool.process._child
        os.kill(pid, signal.SIGKILL if when == "before" else signal.SIGSTOP)
        while when == "before" and child.death is None:
            time.sleep(0.001)
        drained = threads.submit(pool.drain)
        while when == "meanwhile" and "of_pool" not in {c.name for c in child.calls.values()}:
            time.sleep(0.001)
        if when == "meanwhile":
            os.kill(pid, signal.SIGKILL)
        found += [t for chunk in stream for t in chunk.tokens]
        assert found == expected
        assert drained.result(60.0)
        assert pool.drain()
        for call in (pool.open_session, lambda: session.ensure_prefix(TEXT)):
            with pytest.raises(ic.SessionClosedError):
                call()


def test_a_pool_refuses_what_is_no_time_and_no_namespace(
    pack_path: Path, backend_name: str
) -> None:
    with ic.open_pool(pack_path, backend=backend_name, isolate=True, **POOL) as pool:
        for timeout in (-1, float("nan"), "1", True):
            with pytest.raises(ic.InvalidInputError):
                pool.drain(timeout)
        for namespace in (5, b"a", True):
            with pytest.raises(ic.InvalidInputError):
                pool.flush_cache(namespace)
        pool.open_session().close()  # it does not drain
        assert pool.drain(timeout=0)
        pool.flush_cache()
    assert pool.drain()
    with pytest.raises(ic.SessionClosedError):
        pool.flush_cache()


@pytest.mark.parametrize("value", [object(), {1, 2}, None, 5, b"a"])
def test_what_is_no_text_is_refused_as_without_isolation(pool: Any, value: Any) -> None:
    with pool.open_session() as session:
        for call, field in ((session.ensure_prefix, "prefix"), (session.prefill_suffix, "suffix")):
            with pytest.raises(ic.InvalidInputError) as caught:
                call(value)
            assert caught.value.field == field
            session.ensure_prefix(TEXT)


def dies_at_once(monkeypatch: pytest.MonkeyPatch, pool: Any, work: Callable[[], Any]) -> Any:
    with dying(pool, 1, monkeypatch):
        return work()


@pytest.fixture(scope="module")
def texts() -> list[str]:
    pack.need_pack()
    import infercore_models

    return [each.text for each in infercore_models.golden_texts("encoder")][:3]


def test_vectors_are_the_same_whose_engine_dies(
    backend_name: str, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import infercore_models

    path = infercore_models.path("encoder", pack.FORMATS[backend_name])
    fields = {"backend": backend_name, **FIELDS}
    with ic.open_pool(path, isolate=True, **fields) as pool:
        expected = pool.embed(texts)
        found = dies_at_once(monkeypatch, pool, lambda: pool.embed(texts))
        assert pool.stats().n_restarts == 1
    np.testing.assert_allclose(found, expected, atol=1e-5)
    np.testing.assert_allclose(found, ic.embed(path, texts, **fields), atol=1e-4)


def test_a_machine_that_is_always_late_puts_off_the_end_of_a_hang_for_a_while() -> None:
    """A look that comes late pardons a worker, which may have been stopped too; not for ever."""
    process, killed = object.__new__(EngineProcess), []
    process._step_timeout, process._n_pauses, process._lenient_until = 60.0, 0, 0.0
    process._child = SimpleNamespace(
        death=None, calls={1: None}, is_loaded=True, heard_at=0.0,
        board=SimpleNamespace(is_late=True),
        remind=lambda: None, kill=killed.append, ask_whether_it_works=lambda: None,
    )  # fmt: skip
    for _ in range(3):
        process._looked_at = process._lenient_until = 0.0
        process.look()
        assert not killed
    process._looked_at = process._lenient_until = 0.0
    process.look()
    assert killed
    killed.clear()
    process.look()  # in time: a later pause is one again
    process._looked_at = process._lenient_until = 0.0
    n_before = len(killed)
    process.look()
    assert len(killed) == n_before
