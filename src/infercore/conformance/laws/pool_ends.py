"""How calls of a pool end: cancelled, too long, failed, or with the pool; each alone."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from infercore.conformance.expect import LawError, equal, raises, that
from infercore.conformance.holding import PATIENCE_S
from infercore.conformance.law import law
from infercore.conformance.pooling import Calls, text_of, together
from infercore.conformance.rig import generated
from infercore.errors import (
    ContextOverflowError,
    DecodeAbortedError,
    InferCoreError,
    SessionClosedError,
    SessionFatalError,
    TransientEngineError,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from infercore.conformance.rig import Rig


def _beside(
    rig: Rig, pool: Any, one: Callable[[Any], Any], what: str, **fields: Any
) -> tuple[Any, list[Any]]:
    """Return what ``one(session)`` gives beside three others; those must give their own texts."""
    prompts = [rig.passage(10) for _ in range(3)]
    sessions = [pool.open_session(**fields) for _ in range(4)]

    def work(i: int) -> Any:
        return one(sessions[3]) if i == 3 else text_of(sessions[i], prompts[i], 16)  # noqa: PLR2004

    found = together(pool, work, range(4))
    for i in range(3):
        equal(len(found[i]), 16, f"tokens of session {i}, beside {what}")
        rig.follows(rig.tokenizer.encode(prompts[i]), found[i], f"session {i}, beside {what}")
    return found[3], sessions


@law("POOL-32", tier="process", since="1.2")
def check_cancel_of_one(rig: Rig) -> None:
    """A stream that is cancelled ends soon, frees its place, and harms no other."""
    pool, prompt = rig.pool(), rig.passage(8)

    def cancelled(session: Any) -> Any:
        session.ensure_prefix(prompt)
        chunks = []
        for chunk in session.decode(max_tokens=200, temperature=0, ignore_eos=True):
            chunks.append(chunk)
            if len(chunks) == 4:  # noqa: PLR2004
                session.cancel()
        return chunks

    chunks, sessions = _beside(rig, pool, cancelled, "one that was cancelled")
    equal(chunks[-1].finish_reason, "cancelled", "finish_reason")
    tokens = generated(chunks)
    that(len(tokens) <= 8, f"{len(tokens)} tokens came, cancelled after 4")  # noqa: PLR2004
    rig.follows(rig.tokenizer.encode(prompt), tokens, "the one that was cancelled")
    equal(pool.stats().n_running, 0, "running sessions at the end")
    more = generated(list(sessions[3].decode(max_tokens=4, temperature=0, ignore_eos=True)))
    rig.follows(rig.tokenizer.encode(prompt) + tokens, more, "going on after the cancel")


@law("POOL-33", tier="process", since="1.2")
def check_cancel_of_a_prefill(rig: Rig) -> None:
    """A prefill that is cancelled keeps what was evaluated, and harms no other."""
    text = rig.passage(100)
    with Calls(rig) as calls:
        pool = rig.pool(n_step_tokens=8)

        def cancelled(session: Any) -> Any:
            n_pieces = 0

            def count(spans: dict[int, int]) -> None:
                nonlocal n_pieces
                n_pieces += max(spans.values()) > 2  # noqa: PLR2004
                if n_pieces == 5:  # noqa: PLR2004
                    session.cancel()

            calls.before = count
            return raises(DecodeAbortedError, lambda: session.ensure_prefix(text), "a prefill")

        error, sessions = _beside(rig, pool, cancelled, "a prefill that was cancelled")
        calls.before = None
    status = sessions[3].ensure_prefix(text)
    n = status.prefix_tokens
    that(error.resident_tokens < n, f"{error.resident_tokens} of {n} were resident")
    if pool.effective["n_parallel"] > 1:  # else the next session takes the only place there is
        that(error.resident_tokens > 0, "nothing was resident after five pieces")
        that(status.reused_tokens >= error.resident_tokens - 1, "what was evaluated was lost")
    rig.follows(rig.tokenizer.encode(text), text_of(sessions[3], text, 4), "after resuming")


@law("POOL-34", tier="process", since="1.2")
def check_overflow_of_one(rig: Rig) -> None:
    """A session that fills its window, or asks for too much, ends alone."""
    pool, prompt = rig.pool(n_ctx=64), rig.passage(20)

    def overflows(session: Any) -> Any:
        raises(ContextOverflowError, lambda: session.ensure_prefix(rig.story), "a text too long")
        session.ensure_prefix(prompt)
        return list(session.decode(temperature=0, ignore_eos=True))

    chunks, _ = _beside(rig, pool, overflows, "one that overflows")
    equal(chunks[-1].finish_reason, "context", "finish_reason")
    ids, tokens = rig.tokenizer.encode(prompt), generated(chunks)
    that(len(ids) + len(tokens) <= 65, f"{len(tokens)} tokens came in a window of 64")  # noqa: PLR2004
    rig.follows(ids, tokens, "the one that fills its window")


class _Boom(Exception):  # noqa: N818  (stands for an error of the caller's)
    pass


@law("POOL-35", tier="process", since="1.2")
def check_a_processor_that_raises(rig: Rig) -> None:
    """What a processor raises reaches its own caller, and harms no other."""

    class Bad:
        n = 0

        def apply(self, logits: Any) -> Any:
            self.n += 1
            if self.n == 4:  # noqa: PLR2004
                raise _Boom("no")
            return logits

    def raising(session: Any) -> Any:
        session.ensure_prefix("Once")
        stream = session.decode(max_tokens=20, ignore_eos=True, processors=[Bad()])
        try:
            list(stream)
        except _Boom as error:
            return error
        except InferCoreError as error:
            return error.__cause__
        return None

    pool = rig.pool()
    error, sessions = _beside(rig, pool, raising, "a processor that raises")
    that(isinstance(error, _Boom), f"the caller was given {error!r}")
    equal(len(text_of(sessions[3], "Once", 4)), 4, "tokens of the session afterwards")


@law("POOL-36", tier="process", needs="multi_sequence", since="1.2")
def check_a_step_that_fails(rig: Rig) -> None:
    """A typed error in a shared call ends nobody who can go on alone."""
    with Calls(rig) as calls:
        n_failed = 0

        def fail(spans: dict[int, int]) -> None:
            nonlocal n_failed
            if len(spans) > 1 and n_failed < 2:  # noqa: PLR2004
                n_failed += 1
                raise TransientEngineError("not now", backend=rig.backend)

        pool = rig.pool()
        calls.before = fail
        prompts = [rig.passage(9) for _ in range(4)]
        texts = together(pool, lambda p: text_of(pool.open_session(), p, 24), prompts)
        calls.before = None
        that(n_failed, "no call was shared")
    for i, (prompt, tokens) in enumerate(zip(prompts, texts, strict=True)):
        rig.follows(rig.tokenizer.encode(prompt), tokens, f"session {i}, after failing steps")


@law("POOL-37", tier="process", since="1.2")
def check_restarts(rig: Rig) -> None:
    """When the engine fails for good it is reopened, and every session continues the same."""
    with Calls(rig) as calls:
        failed: list[int] = []

        def fail(_: Any) -> None:
            if len(calls.made) == 12:  # noqa: PLR2004
                failed.append(1)
                raise RuntimeError("the engine is gone")

        pool = rig.pool()
        calls.before = fail
        prompts = [rig.passage(9) for _ in range(3)]
        texts = together(pool, lambda p: text_of(pool.open_session(), p, 16), prompts)
        calls.before = None
        equal((len(failed), pool.stats().n_restarts), (1, 1), "failures and restarts")
    for i, (prompt, tokens) in enumerate(zip(prompts, texts, strict=True)):
        rig.follows(rig.tokenizer.encode(prompt), tokens, f"session {i}, after a restart")


@law("POOL-38", tier="process", since="1.2")
def check_the_first_cause(rig: Rig) -> None:
    """After max_restarts every call of every session raises the first cause, and close works."""
    with Calls(rig) as calls:

        def fail(_: Any) -> None:
            raise RuntimeError("the engine is gone")

        pool = rig.pool(max_restarts=0)
        sessions = [pool.open_session() for _ in range(3)]
        sessions[0].ensure_prefix("Once")
        calls.before = fail

        def ends(session: Any) -> Any:
            return raises(
                SessionFatalError, lambda: session.ensure_prefix(rig.story[:90]), "a call"
            )

        errors = together(pool, ends, sessions)
        calls.before = None
        errors += [ends(session) for session in sessions]
    causes = {str(error.cause) for error in errors}
    that(len(causes) == 1 and "gone" in causes.pop(), "the calls were not told one cause")
    equal(sessions[0].explain_context().fatal_cause is not None, True, "the report has the cause")
    for session in sessions:
        session.close()
    pool.close()


@law("POOL-39", tier="process", since="1.2")
def check_close_ends_all(rig: Rig) -> None:
    """close() ends what runs; every later call raises SessionClosedError."""
    pool = rig.pool(n_parallel=2)
    sessions = [pool.open_session() for _ in range(4)]
    started = threading.Semaphore(0)

    def work(session: Any) -> str:
        try:
            session.ensure_prefix(rig.story[:60])
            stream = session.decode(temperature=0, ignore_eos=True)
            for n, chunk in enumerate(stream):
                if n == 1:
                    started.release()
                if chunk.finish_reason is not None:
                    return str(chunk.finish_reason)
                time.sleep(0.002)
        except SessionClosedError:
            return "closed"
        raise LawError("a stream ended without a reason")

    def close(_: Any) -> str:
        for _ in range(2):
            that(started.acquire(timeout=PATIENCE_S), "nothing was generated")
        pool.close()
        return "closed"

    jobs = [lambda s=s: work(s) for s in sessions] + [lambda: close(None)]
    ends = together(pool, lambda job: job(), jobs)
    that(set(ends) <= {"closed", "cancelled", "context"}, f"calls ended as {ends}")
    equal(pool.closed, True, "closed")
    for session in sessions:
        raises(SessionClosedError, lambda s=session: s.ensure_prefix("a"), "ensure_prefix")
    raises(SessionClosedError, pool.open_session, "open_session")
    pool.close()


@law("POOL-40", tier="process", since="1.2")
def check_drain(rig: Rig) -> None:
    """drain() lets running calls finish and lets no new one begin; a timeout cancels them."""
    pool, prompt = rig.pool(), rig.passage(8)
    session, other = pool.open_session(), pool.open_session()
    session.ensure_prefix(prompt)
    stream = session.decode(max_tokens=30, temperature=0, ignore_eos=True)
    tokens = list(next(stream).tokens)
    drained: list[bool] = []
    thread = threading.Thread(target=lambda: drained.append(pool.drain(PATIENCE_S)), daemon=True)
    thread.start()
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            other.ensure_prefix("a")
        except SessionClosedError:
            break
        if time.monotonic() > until:
            raise LawError("calls begin although the pool drains")
    tokens += generated(list(stream))
    thread.join(PATIENCE_S)
    equal((len(tokens), drained), (30, [True]), "tokens of the call that had begun, and drain()")
    late = rig.pool()
    session = late.open_session()
    session.ensure_prefix(prompt)
    stream = session.decode(temperature=0, ignore_eos=True)
    next(stream)
    equal(late.drain(0.05), False, "drain() with a stream that nobody reads")
    raises(SessionClosedError, late.open_session, "open_session")
