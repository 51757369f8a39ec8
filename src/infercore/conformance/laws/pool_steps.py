"""The steps of a pool: what each call of the engine has, and who waits how long."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from infercore.conformance.expect import equal, raises, that
from infercore.conformance.holding import PATIENCE_S
from infercore.conformance.law import law
from infercore.conformance.pooling import Calls, text_of, together
from infercore.conformance.rig import generated
from infercore.errors import ContextOverflowError, PoolFullError, SessionClosedError

if TYPE_CHECKING:
    from typing_extensions import Self

    from infercore.conformance.rig import Rig


@law("POOL-23", tier="process", since="1.2")
def check_every_call_ends(rig: Rig) -> None:
    """Whatever the windows, cells and steps, every call ends, once, and with its own text."""
    for _ in range(4):
        n = rig.random.randrange(2, 7)
        window = rig.random.randrange(48, 120)
        pool = rig.pool(
            n_ctx=window,
            n_cells=rig.random.randrange(window, 3 * window),
            n_parallel=rig.random.randrange(1, n + 1),
            n_step_tokens=rig.random.choice([1, 3, 8, 64]),
        )
        shared, n_tokens = rig.passage(20), rig.random.randrange(4, 40)
        prompts = [shared + " " + rig.passage(rig.random.randrange(2, 18)) for _ in range(n)]
        callers = [
            _Caller(pool.open_session(), prompt, n_tokens, cancels=i == 0)
            for i, prompt in enumerate(prompts)
        ]
        for caller, tokens in zip(callers, together(pool, _Caller.twice, callers), strict=True):
            ids = rig.tokenizer.encode(caller.prompt)
            if isinstance(tokens, ContextOverflowError):
                that(len(ids) > window, f"{len(ids)} tokens did not fit a window of {window}")
            else:
                rig.follows(ids, tokens, f"with {pool.config}")
        stats = pool.stats()
        equal((stats.n_running, stats.n_waiting), (0, 0), "running and waiting at the end")
        pool.close()


class _Caller:
    """One caller of a pool, which may cancel what it asked for."""

    def __init__(self, session: Any, prompt: str, n_tokens: int, *, cancels: bool) -> None:
        self.session, self.prompt, self.n_tokens = session, prompt, n_tokens
        self.cancels = cancels

    def twice(self) -> Any:
        """Ask for the same twice and return what came the second time."""
        self.once()
        return self.once()

    def once(self) -> Any:
        """Return the tokens that came, or the error of a prompt that is too long."""
        try:
            self.session.ensure_prefix(self.prompt)
        except ContextOverflowError as error:
            return error
        chunks = []
        asked = {"max_tokens": self.n_tokens, "temperature": 0, "ignore_eos": True}
        for chunk in self.session.decode(**asked):
            chunks.append(chunk)
            if self.cancels and len(chunks) == 3:  # noqa: PLR2004
                self.session.cancel()
        ends = [chunk.finish_reason for chunk in chunks if chunk.finish_reason is not None]
        that(len(ends) == 1, f"a stream told {len(ends)} ends")
        return generated(chunks)


def _busy(session: Any, prompt: str, stop: threading.Event, made: list[int]) -> None:
    """Generate until ``stop``, noting each token; the end of the pool is an end too."""
    with suppress(SessionClosedError):
        while not stop.is_set():
            session.ensure_prefix(prompt)
            for chunk in session.decode(max_tokens=100, temperature=0, ignore_eos=True):
                made += chunk.tokens
                if stop.is_set():
                    break


class _Running:
    """Sessions that generate while a block runs; they have begun when it is entered."""

    def __init__(self, rig: Rig, pool: Any, n: int) -> None:
        self.stop = threading.Event()
        self.made: list[list[int]] = [[] for _ in range(n)]
        self.threads = [
            threading.Thread(
                target=_busy, args=(pool.open_session(), rig.passage(6), self.stop, made),
                daemon=True,
            )
            for made in self.made
        ]  # fmt: skip

    def __enter__(self) -> Self:
        for thread in self.threads:
            thread.start()
        until = time.monotonic() + PATIENCE_S
        while not all(len(made) > 2 for made in self.made):  # noqa: PLR2004
            that(time.monotonic() < until, "sessions that should generate do not")
            time.sleep(0.005)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        for thread in self.threads:
            thread.join(PATIENCE_S)


@law("POOL-24", tier="process", since="1.2")
def check_the_step_budget(rig: Rig) -> None:
    """No engine call has more than n_step_tokens tokens, nor more than n_parallel sequences."""
    with Calls(rig) as calls:
        pool = rig.pool(n_step_tokens=6, n_parallel=3)
        prompts = [rig.passage(30) for _ in range(5)]
        together(pool, lambda prompt: text_of(pool.open_session(), prompt, 8), prompts)
        pool.close()
        most = max(sum(call.values()) for call in calls.made)
        that(most <= 6, f"a call had {most} tokens, n_step_tokens is 6")  # noqa: PLR2004
        widest = max(len(call) for call in calls.made)
        that(widest <= 3, f"a call had {widest} sequences, n_parallel is 3")  # noqa: PLR2004


@law("POOL-25", tier="process", needs="multi_sequence", since="1.2")
def check_tokens_beside_a_prompt(rig: Rig) -> None:
    """While a long prompt is evaluated, each running session has a token in every call of it."""
    rig.need_all_logits()
    # A reader that other work on the machine keeps away gives its place away: the best of three.
    pieces, alone = min((_pieces_of_a_prompt(rig) for _ in range(3)), key=lambda found: found[1])
    that(pieces >= 8, f"a prompt of 90 tokens was evaluated in {pieces} calls")  # noqa: PLR2004
    that(alone <= pieces // 3, f"{alone} of {pieces} calls kept others out")


def _pieces_of_a_prompt(rig: Rig) -> tuple[int, int]:
    """Return the calls that a prompt took beside two running sessions, and those it had alone."""
    with Calls(rig) as calls:
        calls.before = lambda _: time.sleep(0.005)
        pool = rig.pool(n_step_tokens=8, n_parallel=4)
        with _Running(rig, pool, 2):
            start = len(calls.made)
            pool.open_session(namespace="prompt").ensure_prefix(rig.passage(90))
            made = calls.made[start:]
        pool.close()
    pieces = [call for call in made if max(call.values()) > 2]  # noqa: PLR2004
    return len(pieces), sum(len(call) == 1 for call in pieces)


@law("POOL-26", tier="process", since="1.2")
def check_no_prompt_starves(rig: Rig) -> None:
    """Sessions that generate without end do not keep a prompt from finishing."""
    rig.need_all_logits()
    for n_step_tokens in (2, 16):
        pool = rig.pool(n_step_tokens=n_step_tokens, n_parallel=4)
        with _Running(rig, pool, 3) as running:
            for attempt in range(3):  # a machine that lets this thread wait is no starvation
                before = sum(map(len, running.made))
                session = pool.open_session(namespace=f"prompt {attempt}")
                n = session.ensure_prefix(rig.passage(24)).prefix_tokens
                during = sum(map(len, running.made)) - before
                session.close()
                if during <= 9 * (n + 8):
                    break
            else:
                that(False, f"the others made {during} tokens while {n} were evaluated")
        pool.close()


@law("POOL-27", tier="process", since="1.2")
def check_all_have_their_turn(rig: Rig) -> None:
    """With more sessions than places each gets its turn, and none waits for all the others."""
    pool = rig.pool(n_parallel=2)
    prompts = [rig.passage(8) for _ in range(6)]

    def work(prompt: str) -> Any:
        session = pool.open_session()
        session.ensure_prefix(prompt)
        return list(session.decode(max_tokens=10, temperature=0, ignore_eos=True))[-1].usage

    usages = together(pool, work, prompts)
    equal([usage.completion_tokens for usage in usages], [10] * 6, "tokens of each")
    that(any(usage.waited_ms > 0 for usage in usages), "nobody is told to have waited")


@law("POOL-28", tier="process", since="1.2")
def check_a_full_queue(rig: Rig) -> None:
    """A call beyond max_waiting raises PoolFullError and changes nothing; opening never does."""
    pool = rig.pool(n_parallel=1, max_waiting=0)
    other = pool.open_session()
    other.ensure_prefix(rig.passage(6))
    held, go = threading.Event(), threading.Event()

    def hold(_: Any) -> None:
        held.set()
        go.wait(PATIENCE_S)

    with Calls(rig) as calls:
        waiting = rig.pool(n_parallel=1, max_waiting=0)
        first, second = waiting.open_session(), waiting.open_session()
        before = second.explain_context()
        calls.before = hold
        thread = threading.Thread(target=first.ensure_prefix, args=(rig.passage(6),), daemon=True)
        thread.start()
        try:
            that(held.wait(PATIENCE_S), "the first call never reached the engine")
            error = raises(PoolFullError, lambda: second.ensure_prefix("a"), "a second call")
            equal(second.explain_context(), before, "the session that was refused")
            third = waiting.open_session()
        finally:
            calls.before = None
            go.set()
            thread.join(PATIENCE_S)
        third.close()  # which waits for the step that runs
        that(error.n_waiting >= 0, f"n_waiting is {error.n_waiting}")
        second.ensure_prefix("a")


@law("POOL-29", tier="session", since="1.2")
def check_slow_readers(rig: Rig) -> None:
    """A stream that is no longer read stalls nobody, and continues when it is read again."""
    pool = rig.pool(n_parallel=1)
    slow, quick = pool.open_session(), pool.open_session()
    text = rig.passage(8)
    slow.ensure_prefix(text)
    stream = slow.decode(max_tokens=20, temperature=0, ignore_eos=True)
    tokens = list(next(stream).tokens)
    made = together(pool, lambda one: text_of(one, text + " and", 12), [quick])[0]
    equal(len(made), 12, "tokens of the session beside it")
    tokens += generated(list(stream))
    equal(len(tokens), 20, "tokens of the slow reader")
    rig.follows(rig.tokenizer.encode(text), tokens, "the slow reader")


@law("POOL-30", tier="process", since="1.2")
def check_ten_streams_in_one_thread(rig: Rig) -> None:
    """One thread reading ten streams in turn over two places reaches the end of all of them."""
    pool = rig.pool(n_parallel=2, n_ctx=64, n_cells=256)
    prompts = [rig.passage(6 + i % 3) for i in range(10)]

    def read_all(_: int) -> list[list[int]]:
        sessions = [pool.open_session() for _ in prompts]
        for session, prompt in zip(sessions, prompts, strict=True):
            session.ensure_prefix(prompt)
        asked = {"max_tokens": 9, "temperature": 0, "ignore_eos": True}
        streams = {i: session.decode(**asked) for i, session in enumerate(sessions)}
        made: list[list[int]] = [[] for _ in prompts]
        while streams:
            for i, stream in list(streams.items()):
                chunk = next(stream, None)
                if chunk is None:
                    del streams[i]
                else:
                    made[i] += chunk.tokens
        return made

    (texts,) = together(pool, read_all, [0])
    for i, (prompt, tokens) in enumerate(zip(prompts, texts, strict=True)):
        equal(len(tokens), 9, f"tokens of stream {i}")
        rig.follows(rig.tokenizer.encode(prompt), tokens, f"stream {i}")


@law("POOL-31", tier="process", since="1.2")
def check_stats_never_wait(rig: Rig) -> None:
    """stats() and explain_context() answer while the engine is busy."""
    held, go = threading.Event(), threading.Event()

    def hold(_: Any) -> None:
        held.set()
        go.wait(PATIENCE_S)

    with Calls(rig) as calls:
        pool = rig.pool()
        session, text = pool.open_session(), rig.passage(8)
        calls.before = hold
        thread = threading.Thread(target=session.ensure_prefix, args=(text,), daemon=True)
        thread.start()
        try:
            that(held.wait(PATIENCE_S), "the call never reached the engine")
            start = time.monotonic()
            stats = pool.stats()
            session.explain_context()
            elapsed = time.monotonic() - start
        finally:
            calls.before = None
            go.set()
            thread.join(PATIENCE_S)
        that(elapsed < PATIENCE_S / 4, f"stats() took {elapsed:.1f} s while the engine was busy")
        equal((stats.n_open, stats.n_running), (1, 1), "open and running sessions")
