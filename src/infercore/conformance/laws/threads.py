"""One owner at a time; many sessions side by side."""

from __future__ import annotations

import contextlib
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from infercore.conformance import children
from infercore.conformance.expect import equal, raises, that
from infercore.conformance.holding import Held, switching_often, while_held
from infercore.conformance.law import law
from infercore.conformance.rig import greedy
from infercore.errors import InvalidInputError, SessionBusyError, UnsupportedFeatureError

if TYPE_CHECKING:
    from infercore.conformance.rig import Rig


def _told(session: Any, text: str) -> list[int]:
    session.ensure_prefix(text)
    return greedy(session, 12)


@law("THREAD-1", tier="process")
def check_sessions_side_by_side(rig: Rig) -> None:
    """Sessions of one model in several threads give what each gives alone."""
    texts = [rig.passage(8) for _ in range(3)]
    alone = [_told(rig.session(), text) for text in texts]
    sessions = [rig.session() for _ in texts]
    with ThreadPoolExecutor(3) as pool:
        for _ in range(2):
            equal(list(pool.map(_told, sessions, texts)), alone, "tokens made side by side")


@law("THREAD-2", tier="process")
def check_a_second_thread_is_refused(rig: Rig) -> None:
    """While one thread uses a context, another gets SessionBusyError and spoils nothing."""
    tokens = rig.tokens(9)
    context = rig.context(n_batch=4, n_ubatch=4)
    held = Held()
    context.set_abort_callback(held)

    def intrude() -> None:
        for name, call in {
            "decode": lambda: context.decode([tokens[0]]),
            "logits": context.logits,
            "n_past": context.n_past,
            "seq_remove": lambda: context.seq_remove(0),
            "clear": context.clear,
        }.items():
            raises(SessionBusyError, call, f"{name} from a second thread")

    while_held(held, lambda: context.decode(tokens), intrude)
    context.set_abort_callback(None)
    rig.near(context.logits(), rig.cold(tokens), "what the first thread decoded")


@law("THREAD-3", tier="process")
def check_a_busy_session_can_be_explained(rig: Rig) -> None:
    """A busy session refuses a second thread, but explains itself without waiting."""
    session = rig.session(n_batch=4, n_ubatch=4)
    context = rig.inner(session)
    text = rig.passage(12)
    held = Held()
    context.set_abort_callback(held)

    def intrude() -> None:
        raises(SessionBusyError, lambda: session.ensure_prefix("a"), "a second ensure_prefix")
        equal(session.explain_context().closed, False, "closed")

    while_held(held, lambda: session.ensure_prefix(text), intrude)
    context.set_abort_callback(None)
    rig.follows(rig.tokenizer.encode(text), greedy(session, 4), "what the first thread did")


@law("THREAD-4", needs="live_threads")
def check_set_threads(rig: Rig) -> None:
    """The number of threads can be changed; the logits stay within the tolerance.

    What the last call made stays. Numbers that do not go together, or are more than there are
    processors, are refused by their name or set; what is told of those refused stays as it was.
    """
    tokens = rig.tokens(8)
    context = rig.context()
    for n in (1, 3):  # one step, whose rows may lie in the engine's memory
        context.decode(tokens[:n])
        row = np.array(context.logits())
        context.set_threads(1, 1)
        equal((context.n_threads, context.n_threads_batch), (1, 1), "threads")
        rig.same_bits(context.logits(), row, "the last row after the change")
        context.set_threads(*_before(rig))
    context.decode(tokens[:4])
    with contextlib.suppress(UnsupportedFeatureError, InvalidInputError):
        context.set_threads(3, 3)  # by which few sizes of a matrix can be divided
    context.decode(tokens[4:7])
    context.decode_one(tokens[7])
    held = [*tokens[:1], *tokens[:3], *tokens]
    rig.near(context.logits(), rig.cold(held), "logits with three threads")
    context.set_threads(1, 1)
    context.decode(tokens)
    rig.near(context.logits(), rig.cold([*held, *tokens]), "logits after the change")
    many = (os.cpu_count() or 1) + 40
    for n, n_batch in ((1, 2), (2, 1), (many, many)):
        expected, before = (n, n_batch), (context.n_threads, context.n_threads_batch)
        told = dict(context.effective)
        try:
            context.set_threads(n, n_batch)
        except (UnsupportedFeatureError, InvalidInputError) as error:
            that("n_threads" in str(error), f"{n} and {n_batch} refused as {error}")
            own = getattr(error, "backend", rig.backend)
            equal(own, rig.backend, "the backend that refuses them")
            equal(dict(context.effective), told, f"effective, {n} and {n_batch} refused")
            expected = before
            _check_goes_on(rig, context)
        found = context.n_threads, context.n_threads_batch
        equal(found, expected, f"threads, {n} and {n_batch} asked for")


def _check_goes_on(rig: Rig, context: Any) -> None:
    """What was refused has left nothing that later calls meet."""
    tokens, can = rig.tokens(8), context.capabilities
    if can.embeddings:
        with contextlib.suppress(UnsupportedFeatureError):
            context.set_embeddings(context.effective.get("embeddings") is True)
    if can.lora and rig.adapter is not None:
        for adapters in (rig.adapters_at(1.0), ()):
            context.set_adapters(adapters)
    context.set_threads(context.n_threads, context.n_threads_batch)
    context.clear()
    context.decode(tokens)
    rig.near(context.logits(), rig.cold(tokens), "logits after threads were refused")


def _before(rig: Rig) -> tuple[int, int]:
    """Return the threads that a context has where nobody sets them."""
    with rig.model.new_context(**rig.fields()) as context:
        return context.n_threads, context.n_threads_batch


@law("THREAD-15", needs="live_threads", since="1.2")
def check_set_threads_as_opened(rig: Rig) -> None:
    """After `set_threads(n)`, `effective` is that of a context opened with n threads."""
    _need_two(rig)
    for n, other in ((1, 2), (2, 1)):
        context = rig.context(n_threads=n, n_threads_batch=n)
        context.set_threads(other, other)
        opened = rig.context(n_threads=other, n_threads_batch=other)
        for name, value in opened.effective.items():
            what = f"effective[{name!r}], {other} threads set in place of {n}"
            equal(context.effective.get(name), value, what)


def _need_two(rig: Rig) -> None:
    """Raise `NotApplicable` where no two threads can be had, as on a machine of one processor."""
    context = rig.context()
    try:
        context.set_threads(2, 2)
        rig.context(n_threads=2, n_threads_batch=2).close()
    except (UnsupportedFeatureError, InvalidInputError):
        rig.leave("two threads are refused here")
    finally:
        context.close()


@law("THREAD-8", needs="live_threads", since="1.1")
def check_the_engine_s_own_threads(rig: Rig) -> None:
    """The engine itself, seen past the API, has the thread counts that were set."""
    observe = rig.observe
    tokens = rig.tokens(9)
    context = rig.context()
    if observe is None or observe(context, 0).threads is None:
        rig.leave("the rig's observe does not tell how many threads there are")
    context.decode(tokens[:2])
    at = 2
    for n, n_batch in ((2, 3), (1, 2), (2, 2), (1, 1)):
        context.set_threads(n, n_batch)
        equal((context.n_threads, context.n_threads_batch), (n, n_batch), "threads told")
        equal(observe(context, 0).threads, (n, n_batch), "the engine's own threads")
        context.decode(tokens[at : at + 1 + at % 2])
        at += 1 + at % 2
    rig.near(context.logits(), rig.cold(tokens[:at]), "logits after the changes")


@law("THREAD-5", tier="process")
def check_contexts_opened_in_threads(rig: Rig) -> None:
    """Many threads may open contexts of one model at once, and compute in them.

    Texts of the same length, so that each takes the room that the others take; every other one with
    an adapter.
    """
    texts = [rig.tokens(n) for n in (6, 6, 6, 6, 40, 40, 40, 40)]
    has_one = rig.adapter is not None and rig.context().capabilities.lora
    adapted = {"adapters": rig.adapters_at(1.0)} if has_one else {}

    def computed(i: int) -> Any:
        return rig.cold(texts[i], **(adapted if i % 2 else {}))

    expected = [computed(i) for i in range(len(texts))]

    def work(i: int) -> Any:
        return [computed(i) for _ in range(4)]

    with switching_often(), ThreadPoolExecutor(4) as pool:
        for i, rows in enumerate(pool.map(work, range(len(texts)))):
            for row in rows:
                rig.near(row, expected[i], "logits of a context opened in a thread")


@law("THREAD-13", needs="live_threads", since="1.2")
def check_threads_beside_other_contexts(rig: Rig) -> None:
    """A context whose threads were changed goes on while others open, change theirs and close."""
    _need_two(rig)
    tokens = rig.tokens(12)
    begun, rest = tokens[:6], tokens[6:]
    expected, context = rig.cold(tokens), rig.context()
    for n in (1, 2, 1):
        context.clear()
        context.decode(begun)
        context.set_threads(n, n)
        with rig.model.new_context(**rig.fields(n_threads=3 - n, n_threads_batch=3 - n)) as other:
            other.decode(begun)
            other.set_threads(n, n)
            context.decode(rest)
            rig.near(context.logits(), expected, f"with {n} threads now, beside another context")
            other.decode(rest)
            rig.near(other.logits(), expected, f"another context, with {n} threads now, too")
        with contextlib.suppress(UnsupportedFeatureError):
            context.warmup()
        context.clear()
        context.decode(tokens)
        rig.near(context.logits(), expected, "after another context was closed")


_FORKED = """
import os
from infercore import InvalidStateError
session = rig.session()
session.ensure_prefix("Once upon")
if os.fork() == 0:
    try:
        session.prefill_suffix(" a")
    except InvalidStateError as error:
        print("refused", flush=True)
    os._exit(0)
os.wait()
print("alive", bool(list(session.decode(max_tokens=2, temperature=0))))
"""


@law("THREAD-6", tier="process")
def check_a_forked_child_is_refused(rig: Rig) -> None:
    """In a child of os.fork an inherited session raises InvalidStateError; the parent goes on."""
    if not hasattr(os, "fork"):
        rig.leave("this platform has no os.fork")
    equal(children.run(rig, _FORKED).split(), ["refused", "alive", "True"], "what was printed")


_LIMIT = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})"
_LIMITED = """
context = rig.model.new_context(n_ctx=32)
print(context.n_threads, context.n_threads_batch)
"""


@law("THREAD-14", tier="process", since="1.2")
def check_threads_of_a_limited_process(rig: Rig) -> None:
    """In a process that may use one processor there is one thread by default."""
    if not hasattr(os, "sched_setaffinity"):
        rig.leave("this platform does not bind processes to processors")
    found = children.run(rig, _LIMITED, before=_LIMIT).split()
    equal(found, ["1", "1"], "threads by default, single and in batches")


_UNCLOSED = """
import threading
from infercore import DecodeAbortedError, SessionClosedError, UnsupportedFeatureError
session = rig.session()
session.ensure_prefix("Once upon")
stream = session.decode(temperature=0, ignore_eos=True)
print(next(stream).text is not None)
context, tokens = rig.context(), rig.story_at(0, rig.n_ctx - 1)
begun = threading.Event()
def work():
    try:
        while True:
            context.decode(tokens[:1])
            begun.set()
            context.decode(tokens[1:])
            context.clear()
    except (DecodeAbortedError, SessionClosedError, UnsupportedFeatureError):
        pass  # closed with the process, or an engine that decodes in sessions alone
    finally:
        begun.set()
threading.Thread(target=work, daemon=True).start()
begun.wait()
"""


@law("THREAD-7", tier="process")
def check_an_exit_without_close(rig: Rig) -> None:
    """A process that closes nothing ends quietly, also while a thread of it decodes."""
    equal(children.run(rig, _UNCLOSED).strip(), "True", "what was printed")
