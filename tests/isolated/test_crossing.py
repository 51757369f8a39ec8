"""Pools and sessions whose engine lives in a process of its own: what crosses."""

from __future__ import annotations

import asyncio
import os
import time
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import psutil
import pytest

import infercore as ic
from infercore.isolated.held import Held
from isolated.pools import (
    FIELDS,
    SECONDS,
    TEXTS,
    kill,
    kill_cases,
    told,
    told_here,
)

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(os.name != "posix", reason="isolation needs POSIX")


def test_answers_are_those_of_a_pool_in_this_process(pool: Any, plain: Any) -> None:
    assert pool.model is None
    assert pool.info == plain.info
    assert pool.capabilities == plain.capabilities
    tokens = pool.tokenizer.encode("The little dog")
    assert tokens == plain.tokenizer.encode("The little dog")
    assert pool.tokenizer.decode(tokens) == plain.tokenizer.decode(tokens)
    assert pool.tokenizer.digest == plain.tokenizer.digest
    for fields in (
        {"temperature": 0},
        {"seed": 7},
        {"seed": 8, "mirostat": 2},
        {"seed": 9, "stop": ["."]},
    ):
        with pool.open_session() as ours, plain.open_session() as theirs:
            assert told(ours, **fields) == told(theirs, **fields), fields
            assert ours.state == theirs.state
            assert attrs_of(ours.explain_context()) == attrs_of(theirs.explain_context())
            assert ours.generate(" and then", max_tokens=8, **fields) == theirs.generate(
                " and then", max_tokens=8, **fields
            )


def attrs_of(report: Any) -> dict[str, Any]:
    return {name: getattr(report, name) for name in ("resident_tokens", "manifest", "state")}


def test_errors_have_their_types_and_facts(session: Any) -> None:
    with pytest.raises(ic.InvalidStateError):
        next(session.decode())
    with pytest.raises(ic.ContextOverflowError) as caught:
        session.ensure_prefix("word " * 400)
    assert caught.value.stage == "prefix"
    assert caught.value.n_ctx == kill_cases.POOL["n_ctx"]
    session.ensure_prefix("Once")
    with pytest.raises(ic.GrammarError) as wrong:
        session.decode(response_format={"type": "regex", "pattern": "("})
    assert wrong.value.source
    stream = session.decode(max_tokens=4)
    with pytest.raises(ic.SessionBusyError):
        session.ensure_prefix("other")
    stream.close()
    assert session.state in ("PREFIXED", "READY", "DECODED")


def test_what_cannot_cross_is_refused_by_name(session: Any, pack_path: Path) -> None:
    session.ensure_prefix("Once upon a time")
    before = session.explain_context()
    for fields in ({"processors": [lambda ids, row: row]}, {"response_format": dict.get}):
        with pytest.raises(ic.UnsupportedFeatureError, match=next(iter(fields))):
            session.decode(**fields)
    with pytest.raises(ic.UnsupportedFeatureError, match="implementation='native'"):
        session.decode(implementation="native")
    with pytest.raises(ic.UnsupportedFeatureError, match="progress"):
        ic.open_pool(pack_path, isolate=True, progress=print)
    assert session.explain_context() == before
    assert told(session, temperature=0)


def test_a_model_that_is_here_cannot_be_isolated(model: Any) -> None:
    with pytest.raises(ic.InvalidInputError, match="open_pool"):
        model.new_pool(isolate=True)
    with pytest.raises(ic.InvalidInputError, match="open_session"):
        ic.open_session(model, isolate=True)


def test_forks_snapshots_and_files(pool: Any, session: Any, tmp_path: Path) -> None:
    first = told(session, temperature=0, n=8)
    with session.fork() as twin:
        kill(pool)
        assert [t for c in twin.decode(max_tokens=6, temperature=0) for t in c.tokens] == [
            t for c in session.decode(max_tokens=6, temperature=0) for t in c.tokens
        ]
    session.save(tmp_path / "saved")
    with pool.open_session() as other:
        other.load(tmp_path / "saved")
        assert other.explain_context().generated_tokens == len(first) + 6


def test_bytes_of_tokens_are_those_of_the_tokenizer(pool: Any, plain: Any) -> None:
    ours, theirs = pool.tokenizer, plain.tokenizer
    assert [ours.token_bytes(i) for i in range(ours.n_vocab)] == [
        theirs.token_bytes(i) for i in range(ours.n_vocab)
    ]
    with pytest.raises(ic.InvalidTokenError):
        ours.token_bytes(ours.n_vocab)


def test_a_session_alone_ends_its_process(pack_path: Path, backend_name: str) -> None:
    session = ic.open_session(
        pack_path, backend=backend_name, isolate=True, n_ctx=128, overflow="truncate", **FIELDS
    )
    pid = session.context.process.pid
    assert told(session, temperature=0, n=4)
    session.close()
    assert session.closed
    assert session.state == "CLOSED"
    assert not psutil.pid_exists(pid)


def test_tasks_read_at_the_same_time(pool: Any, plain: Any) -> None:
    async def one(text: str) -> list[int]:
        async with await pool.aopen_session() as session:
            await session.ensure_prefix(text)
            stream = session.decode(max_tokens=12, temperature=0)
            return [t async for chunk in stream for t in chunk.tokens]

    async def all_of_them() -> list[list[int]]:
        return list(await asyncio.gather(*map(one, TEXTS)))

    found = asyncio.run(all_of_them())
    assert found == [told_here(plain, text, 12, temperature=0) for text in TEXTS]


def test_messages_that_are_changed_meanwhile_change_no_answer(pool: Any, plain: Any) -> None:
    messages = [{"role": "user", "content": "Tell me of Mira."}]
    fields = {"max_tokens": 16, "temperature": 0}
    with plain.open_session() as session:
        expected = [t for chunk in session.chat(messages, **fields) for t in chunk.tokens]
    with pool.open_session() as session:
        stream = session.chat(messages, **fields)
        found = list(next(stream).tokens)
        messages[0]["content"] = "Tell me of the wood."
        messages.append({"role": "assistant", "content": ""})
        kill(pool)
        assert found + [t for chunk in stream for t in chunk.tokens] == expected


def test_a_cancel_right_behind_its_call_is_heard(pool: Any, session: Any) -> None:
    process, target = pool.process, session._target
    asked = {"max_tokens": 120, "temperature": 0, "ignore_eos": True}
    session.ensure_prefix(TEXTS[0])
    whole = session.generate(" b", **asked)
    n_whole = 0
    for _ in range(8):
        session.ensure_prefix(TEXTS[0])
        call = process.send(process.epoch, target, "generate", [" b"], asked)
        process.send(process.epoch, target, "cancel")
        call.done.wait()
        n_whole += call.error is None and call.result == whole
    assert n_whole <= 1  # this thread may wait between its two lines; without the mark: 7 of 8


def test_who_calls_late_for_an_item_takes_none_from_the_next_request(plain: Any) -> None:
    """A delivery may be held up between an item and its call, while a reader has the item."""
    given: SimpleQueue[tuple[int, Any]] = SimpleQueue()
    with plain.open_session() as session:
        session.ensure_prefix(TEXTS[0])
        held = Held(session)
        held.open("decode", [], {"max_tokens": 40, "ignore_eos": True}, None)
        held.next()
        for number in range(20):
            assert held.ask(number, lambda n, item: given.put((n, item)))
            until = time.monotonic() + SECONDS
            while given.empty() and time.monotonic() < until:
                held.stream._job.on_item()
            n, item = given.get(timeout=SECONDS)
            assert (n, given.empty()) == (number, True)
            assert held.next(item)[0].tokens
        job = held.stream._job
        held.end()
        held.open("decode", [], {"max_tokens": 4}, None)
        assert not held.ask(20, lambda n, item: given.put((n, item))), "it has not begun"
        job.items.put("an end that is announced late, beside the next stream")
        job.on_item()
        assert given.empty()
